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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import tyro

from nvium_titan import __version__
from nvium_titan.errors import BundleError, ConfigError, NviumError, PromptError

if TYPE_CHECKING:
    from nvium_titan.convert.load import LoadedModel
    from nvium_titan.decode import (
        FixedExit,
        GenerationResult,
        RouterGreedy,
        SampledRouter,
        SamplingParams,
    )
    from nvium_titan.results import PerplexityResult


_STATS = (
    "law", "num_new_tokens", "finish_reason", "exit_shares", "certified_early", "mean_group_size",
    "layers_per_token", "layers_saved", "ttft_ms", "tokens_per_s",
)  # fmt: skip
_TITLES = {"certified_early": "tokens certified early"}
_BAR_AFTER_S = 5.0


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
    """Turn a Hugging Face LLaMA or a checkpoint of the N-vium authors' code into a bundle.

    nvium import LLAMA_FOLDER --out bundles/dense

    nvium import LLAMA_FOLDER --out bundles/grown --exits 6,12,18

    nvium import CHECKPOINT --out bundles/theirs --tokenizer TOKENIZER
    """

    checkpoint: tyro.conf.Positional[Path]
    """The folder with config.json and model.safetensors (or shards); the authors' is told by its
    exp_config.json or .hydra/config.yaml."""

    out: Path
    """Bundle to write, whole or not at all; an older bundle there is replaced."""

    exits: str | None = None
    """Grow junctions on a pretrained LLaMA after these layers, such as 6,12,18: the final exit's
    logits stay the same to the bit, the routers start near "continue" (w = 0.018)."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to convert a LLaMA to; default: as stored."""

    tokenizer: str | None = None
    """Tokenizer to put in: "byte", a folder or a file; default: the one in the folder."""

    seed: int = 0
    """Seeds the random part of grown junctions."""

    def run(self) -> None:
        """Write the bundle; list what is new in it and the tables that train it.

        Raises:
            BundleError: If --exits or --dtype are given for the authors' format.
            ConfigError: If --exits is not a list of numbers.
        """
        from nvium_titan.convert.hf import import_hf, training_tables
        from nvium_titan.convert.reference import find_experiment, import_reference

        if find_experiment(self.checkpoint) is not None:
            if self.exits is not None or self.dtype is not None:
                raise BundleError(
                    f"{self.checkpoint} is a checkpoint of the authors' code: it has exits and "
                    "keeps its type (no --exits, no --dtype)"
                )
            import_reference(self.checkpoint, self.out, tokenizer=self.tokenizer)
            print(f"imported {self.checkpoint} to {self.out}")
            return
        try:
            exits = [int(word) for word in (self.exits or "").replace(",", " ").split()]
        except ValueError as error:
            raise ConfigError(f"--exits {self.exits}: must be numbers, such as 6,12,18") from error
        new = import_hf(
            self.checkpoint, self.out,
            exits=exits, dtype=self.dtype, tokenizer=self.tokenizer, seed=self.seed,
        )  # fmt: skip
        print(f"imported {self.checkpoint} to {self.out}")
        if new:
            print(f"{len(new)} new tensors, to be trained; the others are as they were:")
            print("\n".join(f"  {name} {list(shape)}" for name, shape in new.items()))
            print(f"\nto train it, put into the TOML file:\n\n{training_tables(self.out)}", end="")


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a prompt with a trained model; the new text goes to stdout as it is sampled.

    By default every token is an exact sample of the mixture of exits. Temperature, filters, greedy,
    a forced exit and a router temperature change the law; --stats and --json name it. A training
    checkpoint is converted in memory; nothing is written.

    nvium generate bundles/debug --prompt "The Python " --max-new-tokens 200 --stats
    """

    bundle: tyro.conf.Positional[Path]
    """A bundle from nvium export; or a step-N folder, or a run's folder: then its newest step."""

    prompt: str
    """Text to continue; - reads it from stdin."""

    max_new_tokens: int = 128
    """Most tokens to sample; fewer if the model ends the text or its context is full."""

    temperature: float | None = None
    """1 samples as it is; 0: the likeliest token of the mixture. Default: 1, with --greedy 0."""

    top_k: int = 0
    """Sample among the k likeliest tokens; 0: all."""

    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""

    min_p: float = 0.0
    """Sample among tokens at least this fraction as likely as the likeliest."""

    filter_scope: Literal["exit", "mixture"] = "exit"
    """What temperature and filters act on. The mixture needs every layer for every token."""

    greedy: Literal["mixture", "router"] | None = None
    """mixture: temperature 0. router: leave where w > 1/2, take the likeliest token there."""

    router_temperature: float = 1.0
    """Divides the router logits: another value samples a mixture with other weights."""

    exit: int | None = None
    """Always leave at this exit, 1 the earliest; default: the routers decide."""

    seed: int = 0
    """The same seed gives the same text."""

    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends the generation and is not printed; may be given several times."""

    ignore_eos: bool = False
    """Go on after the end token, which then is a token like any other."""

    max_seq_len: int | None = None
    """Most tokens of prompt and new text together; default: the model's own context."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type to compute in."""

    device: str = "cpu"
    """cpu, cuda or cuda:N."""

    stream: bool = True
    """Write the text as it comes, not at the end."""

    stats: bool = False
    """Print exit shares, group sizes, layers run, tokens certified early and speed to stderr."""

    log_probs: bool = False
    """With --json: the log-probabilities of each token (nats): exit, token at it, both, mixture."""

    json: bool = False
    """Print one JSON object instead of the text; it repeats the settings."""

    def run(self) -> None:
        """Sample and print.

        Raises:
            PromptError: If there is nothing to continue, settings exclude each other, or there is
                no such device.
        """
        from nvium_titan.decode import Engine, TextGeneration

        if self.log_probs and not self.json:
            raise PromptError("--log-probs needs --json, which shows them")
        sampling, policy = self._law()
        model = _load(self.bundle, dtype=self.dtype, device=self.device)
        engine = Engine(model.params, max_seq_len=self.max_seq_len)
        tokenizer = model.tokenizer
        prompt = sys.stdin.read() if self.prompt == "-" else self.prompt
        prompt_ids = tokenizer.encode(prompt, add_bos=True)
        if not prompt_ids:
            raise PromptError("--prompt is empty, and this tokenizer has no token to start from")
        tokens = engine.generate(
            prompt_ids,
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            policy=policy,
            seed=self.seed,
            stop_ids=[] if tokenizer.eos_id is None or self.ignore_eos else [tokenizer.eos_id],
            with_log_probs=self.log_probs,
        )
        generation = TextGeneration(tokens, tokenizer.stream(prompt_ids), stop_strings=self.stop)
        streams = self.stream and not self.json
        for piece in generation:
            if streams:
                print(piece, end="", flush=True)
        text, stop_string, result = generation.result()
        report = _report(result, num_layers=model.params.config.num_hidden_layers)
        if self.json:
            record = {"prompt": prompt, "text": text, "stop_string": stop_string, **report}
            record["settings"] = {
                "model": str(model.path),
                "max_new_tokens": self.max_new_tokens,
                "max_seq_len": engine.max_seq_len,
                "sampling": asdict(sampling),
                "policy": {"name": type(policy).__name__, **asdict(policy)},
                "seed": self.seed,
                "stop": self.stop,
                "ignore_eos": self.ignore_eos,
                "dtype": self.dtype,
                "device": self.device,
            }
            if self.log_probs:
                record["log_probs"] = _log_probs(result)
            print(json.dumps(record, ensure_ascii=False))
        else:
            print("" if streams else text)
        if self.stats:
            for name in _STATS:
                print(f"{_TITLES.get(name, name):24}{_shown(report[name])}", file=sys.stderr)

    def _law(self) -> tuple[SamplingParams, SampledRouter | RouterGreedy | FixedExit]:
        from nvium_titan.decode import FixedExit, RouterGreedy, SampledRouter, SamplingParams

        if self.greedy and self.temperature:
            raise PromptError(
                f"--greedy {self.greedy} takes the likeliest token, but --temperature is "
                f"{self.temperature:g}; leave one of them out"
            )
        if self.exit is not None and self.greedy:
            raise PromptError(
                f"--exit {self.exit} leaves --greedy {self.greedy} nothing to decide; "
                "for the likeliest token of that exit use --temperature 0"
            )
        is_routed = self.exit is None and self.greedy != "router"
        if self.router_temperature != 1 and not is_routed:
            other = "--greedy router" if self.exit is None else f"--exit {self.exit}"
            raise PromptError(
                f"--router-temperature {self.router_temperature:g} acts where the exit is drawn "
                f"from the routers, which {other} does not do; leave one of them out"
            )
        default = 0.0 if self.greedy else 1.0
        sampling = SamplingParams(
            temperature=default if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            filter_scope=self.filter_scope,
        )
        if self.greedy == "router":
            return sampling, RouterGreedy()
        if self.exit is not None:
            return sampling, FixedExit(exit_index=self.exit - 1)
        return sampling, SampledRouter(temperature=self.router_temperature)


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure the perplexity of a text, per token, word and byte.

    One pass gives the mixture (the model), each early exit alone and the final exit alone. BOS
    starts every document; its end is not scored. A training checkpoint is converted in memory.

    nvium eval bundles/debug --text held_out.jsonl --window 1024 --stride 512 --tokens 5000000
    """

    bundle: tyro.conf.Positional[Path]
    """A bundle from nvium export; or a step-N folder, or a run's folder: then its newest step."""

    text: Path
    """A .jsonl of documents, one a row, or any other text file: one document."""

    text_column: str = "text"
    """The key of a row that holds its text."""

    tokens: int | None = None
    """Score the first N tokens; default: all."""

    window: int | None = None
    """Most tokens that a prediction is conditioned on; default: the model's context."""

    stride: int | None = None
    """Tokens each further window scores, with at least window - stride before; default: window."""

    batch_size: int = 1
    """Windows handed to the engine at once; changes no result."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type to compute in; sums are float64."""

    device: str = "cpu"
    """cpu, cuda or cuda:N."""

    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Score and print."""
        from nvium_titan.decode import Engine
        from nvium_titan.eval.perplexity import encode_documents, evaluate, read_documents

        model = _load(self.bundle, dtype=self.dtype, device=self.device)
        documents = encode_documents(
            read_documents(self.text, text_column=self.text_column),
            model.tokenizer,
            max_tokens=self.tokens,
        )
        total = sum(len(document.token_ids) - 1 for document in documents)
        with _progress("tokens scored", total=total) as report:
            result = evaluate(
                Engine(model.params),
                model.tokenizer,
                documents,
                window=self.window,
                stride=self.stride,
                batch_size=self.batch_size,
                on_progress=report,
            )
        if self.json:
            settings = {
                "model": str(model.path),
                "text": str(self.text),
                "dtype": self.dtype,
                "device": self.device,
            }
            print(json.dumps({**settings, **asdict(result)}))
        else:
            print(_perplexities(result))


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
            Train | Export | Import | Generate | Eval | Info,
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


def _load(path: Path, *, dtype: str, device: str) -> LoadedModel:
    import torch

    from nvium_titan.convert.load import load_model

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise PromptError(f"--device {device}: torch sees no CUDA GPU here; use cpu")
    return load_model(path, dtype=getattr(torch, dtype), device=device)


@contextmanager
def _progress(title: str, *, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that takes what is done; a bar appears on stderr after five seconds."""
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True))
    task = bar.add_task(title, total=total)
    start = time.monotonic()

    def report(done: int) -> None:
        bar.update(task, completed=done)
        if not bar.live.is_started and time.monotonic() - start > _BAR_AFTER_S:
            bar.start()

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def _perplexities(result: PerplexityResult) -> str:
    names = ("token", "word", "byte")
    lines = [f"{'perplexity per':16}" + "".join(f"{name:>12}" for name in names)]
    for mode in result.modes:
        values = [getattr(mode, f"{name}_perplexity") for name in names]
        shown = (f"{value:12.6g}" if value is not None else f"{'-':>12}" for value in values)
        lines.append(f"{mode.mode:16}" + "".join(shown))
    start = "after BOS" if result.starts_with_bos else "no BOS: first token of each unscored"
    counts = (result.num_tokens, result.num_words, result.num_bytes)
    lines += [
        f"{'counts':16}" + "".join(f"{count:12}" for count in counts),
        f"{'exit shares':16}" + "".join(f"{share:12.3f}" for share in result.exit_shares),
        f"window {result.window}, stride {result.stride}, documents {result.num_documents} "
        f"({start}; EOS not scored)",
    ]
    return "\n".join(lines)


def _report(result: GenerationResult, *, num_layers: int) -> dict[str, Any]:
    stats = result.stats
    figures = {
        "mean_group_size": stats.mean_group_size,
        "layers_per_token": stats.layers_per_token,
        "layers_saved": 1 - stats.layers_per_token / num_layers,
        "ttft_ms": 1000 * stats.ttft_s,
        "tokens_per_s": stats.tokens_per_s,
    }
    return {
        "law": result.law,
        "seed": result.seed,
        "token_ids": result.token_ids,
        "exits": [index + 1 for index in result.exit_indices],
        "exit_shares": [count / stats.num_new_tokens for count in result.exit_counts],
        "certified_early": result.certified_early,
        "finish_reason": result.finish_reason,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_new_tokens": stats.num_new_tokens,
        # JSON has no NaN: a single token has no rate.
        **{name: None if math.isnan(value) else value for name, value in figures.items()},
    }


def _log_probs(result: GenerationResult) -> list[dict[str, Any]]:
    """Return a row per token; `path` is leaving at the exit and drawing the token there."""
    rows = zip(
        result.exit_indices,
        result.log_exits or (),
        result.log_probs or (),
        result.log_mix or (),
        strict=True,
    )
    return [
        {"exit": index + 1, "exit_prob": p, "token_at_exit": pi, "path": p + pi, "mixture": mix}
        for index, p, pi, mix in rows
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return " ".join(map(_shown, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
