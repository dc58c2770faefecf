"""The training entry point.

    torchrun --nproc_per_node=N -m nvium_titan.train --config-file X.toml [--section.key value ...]
    python -m nvium_titan.train --module nvium_titan --config NAME        (torchtitan's own way)

Without torchrun it trains in one process; without an accelerator, on the CPU.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nvium_titan.convert.step_folders import (
    METADATA,
    describe,
    fault_in,
    finished_folders,
    is_finished,
)
from nvium_titan.errors import CheckpointError, ConfigError, NviumError
from nvium_titan.logs import drop_known_noise

if TYPE_CHECKING:
    from torchtitan.components.checkpointer import CheckpointManager

    from nvium_titan.core.shape import ModelShape
    from nvium_titan.train.trainer import NviumTrainer

USAGE = """usage: [torchrun ...] -m nvium_titan.train --config-file FILE.toml [--section.key value]

Train an N-vium, or its dense twin, from a TOML file. A flag overrides the key of its name:
  --training.steps 100 --loss.beta 0.3 --model.num_layers 6 --nvium.exit_layers 2 4
The resolved settings are saved as <dump_folder>/config.toml. Examples are in train_configs/.
--config-file FILE.toml --help lists every key, its meaning and its value in that file.
--config-file FILE.toml --dry-run [--world-size N] checks the file for N ranks, without a GPU, and
shows layout, parameters, memory per rank and tokens per step.
"""


def load(argv: Sequence[str]) -> NviumTrainer.Config:
    """Return a run's configuration from command-line words.

    Args:
        argv: `--config-file X.toml` or torchtitan's `--module M --config NAME`, and flags.

    Raises:
        ConfigError: If the file, a key or a flag is wrong.
    """
    if any(word == "--module" or word.startswith("--module=") for word in argv):
        from torchtitan.config import ConfigManager

        return ConfigManager().parse_args(list(argv))
    from nvium_titan.train.config import load_config
    from nvium_titan.train.trainer import NviumTrainer

    words = list(argv)
    for index, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name == "--config-file" and (has_value or index + 1 < len(words)):
            path = value if has_value else words[index + 1]
            flags = words[:index] + words[index + (1 if has_value else 2) :]
            if {"-h", "--help"} & set(flags):
                _show_help(load_config(NviumTrainer.Config(), path))
            return load_config(NviumTrainer.Config(), path, flags)
    raise ConfigError(f"no --config-file given\n\n{USAGE}")


def _show_help(config: NviumTrainer.Config) -> NoReturn:
    """Print every flag with its meaning and its value in a configuration; exit with code 0."""
    import tyro
    from torchtitan.config.manager import ConfigManager, custom_registry

    ConfigManager.register_tyro_rules(custom_registry)
    tyro.cli(
        type(config),
        args=["--help"],
        default=config,
        prog="nvium train",
        registry=custom_registry,
        use_underscores=True,
        config=(tyro.conf.AvoidSubcommands,),
    )
    sys.exit(0)


def check_inputs(config: NviumTrainer.Config) -> None:
    """Check what a run will read, before anything is built or written.

    Args:
        config: The run's configuration.

    Raises:
        CheckpointError: If the checkpoint to start from is missing.
        BundleError: If the bundle to start from is damaged or holds another model.
        TokenizerError: If the tokenizer cannot be read or does not fit the vocabulary.
        DataError: If the training or validation data is missing, empty or malformed.
    """
    from nvium_titan.text.tokenizer import check_vocabulary
    from nvium_titan.train.data.loader import TextDataLoader

    shape = config.model_spec.model.shape
    _check_checkpoint(config.checkpoint, Path(config.dump_folder), shape)
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    check_vocabulary(tokenizer, shape.vocab_size)
    loaders = [config.dataloader]
    if config.validator.enable:
        loaders.append(config.validator.dataloader)
    for loader in loaders:
        if isinstance(loader, TextDataLoader.Config):
            loader.check(tokenizer)


def _check_checkpoint(
    checkpoint: CheckpointManager.Config, dump_folder: Path, shape: ModelShape
) -> None:
    from nvium_titan.convert.hf import check_loadable

    # Random weights must never train in place of a checkpoint that is missing.
    path, step = checkpoint.initial_load_path, checkpoint.load_step
    if not checkpoint.enable:
        if path or step >= 0:
            raise ConfigError(
                f"[checkpoint] initial_load_path={path!r}, load_step={step}: nothing is loaded "
                "while enable=false; set [checkpoint] enable = true"
            )
        return
    folder = dump_folder / checkpoint.folder
    if step >= 0:
        if not is_finished(folder / f"step-{step}"):
            raise CheckpointError(
                f"[checkpoint] load_step={step}: no {folder}/step-{step}/.metadata; "
                f"{describe(folder)}"
            )
    elif path and "://" not in path and not finished_folders(folder):
        pattern = "*.safetensors" if checkpoint.initial_load_in_hf else METADATA
        if not list(Path(path).glob(pattern)):
            raise CheckpointError(
                f"[checkpoint] initial_load_path={path!r}: no {pattern} in it; {describe(path)}"
            )
        if checkpoint.initial_load_in_hf:
            check_loadable(path, shape)
        elif fault := fault_in(Path(path)):
            raise CheckpointError(f"[checkpoint] initial_load_path={path!r}: {fault}")


def run(config: NviumTrainer.Config) -> None:
    """Train as configured, resuming from the newest checkpoint if there is one.

    Args:
        config: The run's configuration.

    Raises:
        NviumError: If the input cannot work (UsageError) or the loss diverges (DivergenceError).
        Interrupted: If a signal ended the run early.
    """
    import torch
    from torchtitan.observability import structured_logger as sl

    from nvium_titan.train.config import save_config

    check_inputs(config)
    sl.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    trainer = _build(config)
    try:
        if torch.distributed.get_rank() == 0:
            folder = Path(config.dump_folder)
            folder.mkdir(parents=True, exist_ok=True)
            save_config(config.resolved(), folder / "config.toml")
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            with _stops_on_signals(trainer):
                trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()
    if trainer.stopped_by is not None:
        raise Interrupted(trainer.stopped_by)


class Interrupted(Exception):  # noqa: N818  (it is no error)
    """A signal ended the run; with checkpoints on, its last step is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


def _build(config: NviumTrainer.Config) -> NviumTrainer:
    # What torchtitan asserts of a configuration is for the user to fix: no traceback.
    try:
        return config.build()
    except (AssertionError, NotImplementedError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "torchtitan" not in Path(frames[-1].filename).parts:
            raise
        raise ConfigError(f"torchtitan refuses the settings: {error}") from error


@contextmanager
def _stops_on_signals(trainer: NviumTrainer) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end training after the current step; a second one ends it at once."""
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        trainer.request_stop(number)

    saved = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0 done, 1 failed, 2 wrong use, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM). torchrun
    reports these and exits with a code of its own.

    Args:
        argv: Command-line words; default `sys.argv[1:]`.

    Raises:
        OSError: Unless the disk is full; no error is caught that is not the user's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    drop_known_noise()
    try:
        from nvium_titan.train import compat

        compat.require_torchtitan()
        compat.use_cpu_without_accelerator()
        _one_process_by_default()
        from torchtitan.tools.logging import init_logger

        if "--dry-run" in words:
            sys.stdout.write(_dry_run(words) + "\n")
            return 0
        init_logger()
        run(load(words))
    except NviumError as error:
        sys.stderr.write(f"nvium: error: {error}\n")
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write(
            f"nvium: error: the disk is full ({error}); make room, then run the same command again "
            "to resume from the last checkpoint\n"
        )
        return 1
    except Interrupted as stop:
        sys.stderr.write(f"nvium: stopped by {stop}; run the same command again to resume\n")
        return stop.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("nvium: interrupted\n")
        return 130
    return 0


def _dry_run(words: Sequence[str]) -> str:
    from nvium_titan.train.dry_run import dry_run

    flags = [word for word in words if word != "--dry-run"]
    world_size = None
    for index, word in enumerate(flags):
        name, has_value, value = word.partition("=")
        if name == "--world-size":
            value = value if has_value else "".join(flags[index + 1 : index + 2])
            if not value.isdigit() or int(value) < 1:
                raise ConfigError(f"--world-size {value}: must be the number of ranks, at least 1")
            world_size = int(value)
            del flags[index : index + (1 if has_value else 2)]
            break
    return dry_run(load(flags), world_size=world_size).to_text()


def _one_process_by_default() -> None:
    """Without torchrun, set what it would have set."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
