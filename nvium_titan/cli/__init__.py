"""The `nvium` command: one dataclass per subcommand, each a thin call into the package.

Heavy imports stay inside the subcommand, so that `nvium --help` is quick and a bare install
decodes. A user's mistake is one message on stderr and exit code 2; results go to stdout.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro

from nvium_titan import __version__
from nvium_titan.cli.bench import Bench
from nvium_titan.cli.bench_train import BenchTrain
from nvium_titan.cli.convert import Export, Import
from nvium_titan.cli.data import Data
from nvium_titan.cli.evaluate import Eval
from nvium_titan.cli.generate import Generate
from nvium_titan.cli.info import Info
from nvium_titan.cli.train import Train
from nvium_titan.errors import NviumError
from nvium_titan.logs import drop_known_noise

COMMANDS: dict[str, tuple[Any, str]] = {
    "train": (Train, "Train a model from a TOML file."),
    "data": (Data, "Encode text into shards before training."),
    "export": (Export, "Turn a training checkpoint into a bundle."),
    "import": (Import, "Turn a LLaMA or the authors' checkpoint into a bundle."),
    "generate": (Generate, "Continue prompts with a trained model."),
    "eval": (Eval, "Measure the perplexity of a text."),
    "bench": (Bench, "Measure decode speed beside dense and other engines."),
    "info": (Info, "Show what a model size has and costs."),
}
"""Every command, and the line that `nvium --help` gives it; its docstring is its own help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    Args:
        argv: Command-line words; default `sys.argv[1:]`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        # Its flags are the keys of the training configuration, so it reads them itself.
        from nvium_titan.train import launch as train

        return train.main(words[1:])
    drop_known_noise()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        command: Any = parse(words)
        command.run()
    except NviumError as error:
        print(f"nvium: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("nvium: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is left to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parse(words: Sequence[str]) -> Any:
    """Return the command that the words name; prints help or a mistake in them, and exits."""
    config = (tyro.conf.FlagCreatePairsOff,)
    if words[:2] == ["bench", "train"]:
        # A word of its own in front of the flags; a bundle of this name is ./train.
        return tyro.cli(BenchTrain, args=words[2:], config=config, prog="nvium bench train")
    if words and words[0] in COMMANDS:
        kind, _ = COMMANDS[words[0]]
        return tyro.cli(kind, args=words[1:], config=config, prog=f"nvium {words[0]}")
    # tyro shows one text in the list and in the command's own help, so the list has its own.
    kinds: Any = reduce(
        or_,
        (
            Annotated[kind, tyro.conf.subcommand(name, description=line)]
            for name, (kind, line) in COMMANDS.items()
        ),
    )
    description = f"N-vium {__version__}: train a mixture of exits, export it, decode it."
    return tyro.cli(kinds, args=words, config=config, prog="nvium", description=description)
