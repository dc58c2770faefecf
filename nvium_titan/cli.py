"""The `nvium` command: one dataclass per subcommand, each a thin call into the package.

Heavy imports stay inside the subcommand, so that `nvium --help` is quick and a bare install
decodes. A user's mistake is one message on stderr and exit code 2; results go to stdout.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import tyro

from nvium_titan import __version__
from nvium_titan.errors import BundleError, NviumError, PromptError

if TYPE_CHECKING:
    from nvium_titan.decode import GenerationResult


_STATS = (
    "law", "num_new_tokens", "finish_reason", "exit_shares", "mean_group_size",
    "layers_per_token", "ttft_ms", "tokens_per_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train an N-vium or its dense twin from a TOML file; the same as python -m nvium_titan.train.

    nvium train --config-file train_configs/debug.toml --training.steps 50

    For several processes: torchrun --nproc_per_node=4 -m nvium_titan.train --config-file FILE.toml
    """


@dataclass(frozen=True, kw_only=True)
class Export:
    """Turn a training checkpoint into a bundle, which decodes without torchtitan.

    A dense model becomes a plain LlamaForCausalLM. Any number of ranks may have saved it. With
    --format reference a checkpoint or a bundle becomes one that the N-vium authors' code loads.

    nvium export runs/debug --out bundles/debug
    """

    checkpoint: tyro.conf.Positional[Path]
    """A step-N folder, or a run's folder: then its newest step; for reference also a bundle."""

    out: Path
    """Folder to write, whole or not at all; an older bundle there is replaced."""

    format: Literal["bundle", "reference"] = "bundle"
    """What to write: a bundle, or a checkpoint of the authors' code."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the exported weights; a bundle keeps its own."""

    tokenizer: str | None = None
    """Tokenizer to put in: "byte", a folder or a file; default: the one of the training run."""

    def run(self) -> None:
        """Write the bundle or the authors' checkpoint.

        Raises:
            BundleError: If a bundle is to become a bundle, or is to change type or tokenizer.
        """
        from nvium_titan.bundle import PROVENANCE_FILE
        from nvium_titan.convert.export import export_checkpoint
        from nvium_titan.convert.reference import export_reference

        source = self.checkpoint
        if (source / PROVENANCE_FILE).is_file():
            if self.format == "bundle" or self.dtype != "float32" or self.tokenizer is not None:
                raise BundleError(
                    f"{source} is a bundle already: it can only take --format reference, and keeps "
                    "its type and tokenizer (no --dtype, no --tokenizer)"
                )
            export_reference(source, self.out)
        elif self.format == "bundle":
            source = export_checkpoint(source, self.out, dtype=self.dtype, tokenizer=self.tokenizer)
        else:
            with TemporaryDirectory(prefix="nvium-") as folder:
                bundle = Path(folder) / "bundle"
                source = export_checkpoint(
                    source, bundle, dtype=self.dtype, tokenizer=self.tokenizer
                )
                export_reference(bundle, self.out)
        print(f"exported {source} to {self.out}")


@dataclass(frozen=True, kw_only=True)
class Import:
    """Turn a checkpoint of the N-vium authors' code into a bundle.

    nvium import CHECKPOINT --out bundles/theirs --tokenizer TOKENIZER
    """

    checkpoint: tyro.conf.Positional[Path]
    """The folder that holds model.safetensors and config.json."""

    out: Path
    """Bundle to write, whole or not at all; an older bundle there is replaced."""

    tokenizer: str | None = None
    """Tokenizer to put in: "byte", a folder or a file; default: the one in the folder."""

    def run(self) -> None:
        """Write the bundle."""
        from nvium_titan.convert.reference import import_reference

        import_reference(self.checkpoint, self.out, tokenizer=self.tokenizer)
        print(f"imported {self.checkpoint} to {self.out}")


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a prompt with the model of a bundle; the new text goes to stdout as it is sampled.

    By default every token is an exact sample of the mixture of exits. --temperature, --top-k and
    --top-p change the law; --stats and --json name the law that was sampled.

    nvium generate bundles/debug --prompt "The Python " --max-new-tokens 200 --stats
    """

    bundle: tyro.conf.Positional[Path]
    """A bundle folder, from nvium export."""

    prompt: str
    """Text to continue; - reads it from stdin."""

    max_new_tokens: int = 128
    """Most tokens to sample; fewer if the model ends the text or its context is full."""

    temperature: float = 1.0
    """1 samples the mixture as it is; 0 is greedy: the likeliest token of the mixture."""

    top_k: int = 0
    """Sample among the k likeliest tokens; 0: all."""

    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""

    filter_scope: Literal["exit", "mixture"] = "exit"
    """What temperature, top-k and top-p act on. The mixture needs every layer for every token."""

    exit: int | None = None
    """Always leave at this exit, 1 the earliest; default: the routers decide."""

    seed: int = 0
    """The same seed gives the same text."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type to compute in."""

    device: str = "cpu"
    """cpu, cuda or cuda:N."""

    stream: bool = True
    """Write the text as it comes, not at the end."""

    stats: bool = False
    """Print exit shares, group sizes, layers run and speed to stderr."""

    json: bool = False
    """Print one JSON object instead of the text."""

    def run(self) -> None:
        """Sample and print.

        Raises:
            PromptError: If there is nothing to continue, or no such device.
        """
        import torch

        from nvium_titan.bundle import read_bundle
        from nvium_titan.decode import (
            Engine,
            FixedExit,
            SampledRouter,
            SamplingParams,
            TextGeneration,
        )

        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise PromptError(f"--device {self.device}: torch sees no CUDA GPU here; use cpu")
        tokenizer = read_bundle(self.bundle).load_tokenizer()
        engine = Engine.from_bundle(
            self.bundle, dtype=getattr(torch, self.dtype), device=self.device
        )
        prompt = sys.stdin.read() if self.prompt == "-" else self.prompt
        prompt_ids = tokenizer.encode(prompt, add_bos=True)
        if not prompt_ids:
            raise PromptError("--prompt is empty, and this tokenizer has no token to start from")
        tokens = engine.generate(
            prompt_ids,
            max_new_tokens=self.max_new_tokens,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                filter_scope=self.filter_scope,
            ),
            policy=SampledRouter() if self.exit is None else FixedExit(exit_index=self.exit - 1),
            seed=self.seed,
            stop_ids=[] if tokenizer.eos_id is None else [tokenizer.eos_id],
        )
        generation = TextGeneration(tokens, tokenizer.stream(prompt_ids))
        streams = self.stream and not self.json
        for piece in generation:
            if streams:
                print(piece, end="", flush=True)
        text, _, result = generation.result()
        report = _report(result)
        if self.json:
            print(json.dumps({"prompt": prompt, "text": text, **report}, ensure_ascii=False))
        else:
            print("" if streams else text)
        if self.stats:
            for name in _STATS:
                print(f"{name:18}{_shown(report[name])}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show what a model size has and costs: parameters, FLOPs per token, exits, decode speed-up.

    nvium info --list

    nvium info --flavor quadrivium-768x24 --exit-probs .35 .2 .15 .3
    """

    flavor: str = "quadrivium-768x24"
    """A named size, as in [model] flavor of a TOML file."""

    list: bool = False
    """List the named sizes with their parameters."""

    seq_len: int | None = None
    """Tokens that attention is counted over; default: the longest of the size."""

    exit_probs: tuple[float, ...] | None = None
    """Share of tokens leaving at each exit, to bound the decode speed-up; default: all alike."""

    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Print the figures."""
        from nvium_titan.flavors import flavor_dims, flavor_names
        from nvium_titan.flops import count_params, forward_flops, limit_speedup

        if self.list:
            sizes = {name: sum(count_params(flavor_dims(name)).values()) for name in flavor_names()}
            print(json.dumps(sizes) if self.json else _rows(sizes, unit=1e6, suffix=" M"))
            return
        dims = flavor_dims(self.flavor)
        params = count_params(dims)
        flops = forward_flops(dims, seq_len=self.seq_len or dims.max_seq_len)
        num_exits = dims.plan.num_exits
        shares = self.exit_probs or (1 / num_exits,) * num_exits
        limit = limit_speedup(dims, shares)
        exits = [*dims.exit_layers, dims.num_layers]
        if self.json:
            record = {
                "flavor": self.flavor,
                "params": sum(params.values()),
                "params_by_part": params,
                "flops_per_token": sum(flops.values()),
                "flops_by_term": flops,
                "exits": exits,
                "exit_probs": shares,
                "limit_speedup": limit,
            }
            print(json.dumps(record))
            return
        print(f"{self.flavor}: exits after layers {', '.join(map(str, exits))}\n")
        print("parameters\n" + _rows(params | {"total": sum(params.values())}, 1e6, " M"))
        print(
            "\nforward FLOPs per token\n"
            + _rows(flops | {"total": sum(flops.values())}, 1e9, " G", digits=4)
        )
        shown = " ".join(f"{share:.3g}" for share in shares)
        print(f"\nexit shares {shown} allow decoding at most {limit:.2f}x as fast as dense")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    Args:
        argv: Command-line words; default `sys.argv[1:]`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        # Its flags are the keys of the training configuration, so it reads them itself.
        from nvium_titan import train

        return train.main(words[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        command: Any = tyro.cli(
            Train | Export | Import | Generate | Info,
            args=words,
            config=(tyro.conf.FlagCreatePairsOff,),
            prog="nvium",
            description=f"N-vium {__version__}: train a mixture of exits, export it, decode it.",
        )
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


def _rows(values: dict[str, int], unit: float, suffix: str, *, digits: int = 2) -> str:
    width = max(map(len, values))
    return "\n".join(
        f"  {name:{width}}  {value / unit:10.{digits}f}{suffix}" for name, value in values.items()
    )


def _report(result: GenerationResult) -> dict[str, Any]:
    stats = result.stats
    figures = {
        "mean_group_size": stats.mean_group_size,
        "layers_per_token": stats.layers_per_token,
        "ttft_ms": 1000 * stats.ttft_s,
        "tokens_per_s": stats.tokens_per_s,
    }
    return {
        "law": result.law,
        "seed": result.seed,
        "token_ids": result.token_ids,
        "exits": [index + 1 for index in result.exit_indices],
        "exit_shares": [count / stats.num_new_tokens for count in result.exit_counts],
        "finish_reason": result.finish_reason,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_new_tokens": stats.num_new_tokens,
        # JSON has no NaN: a single token has no rate.
        **{name: None if math.isnan(value) else value for name, value in figures.items()},
    }


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return " ".join(map(_shown, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
