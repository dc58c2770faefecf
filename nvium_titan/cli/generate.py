"""`nvium generate`: text, its law and its figures."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from nvium_titan.cli.common import load, shown
from nvium_titan.errors import PromptError

if TYPE_CHECKING:
    from nvium_titan.decode import (
        FixedExit,
        GenerationResult,
        RouterGreedy,
        SampledRouter,
        SamplingParams,
    )

_STATS = (
    "law", "num_new_tokens", "finish_reason", "exit_shares", "certified_early", "mean_group_size",
    "layers_per_token", "layers_saved", "ttft_ms", "tokens_per_s",
)  # fmt: skip
_TITLES = {"certified_early": "tokens certified early"}


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

    dtype: Literal["float32", "bfloat16", "float64", "int8"] | None = None
    """Type to compute in; int8: int8 weights, else float32. Default: int8 for a quantised bundle,
    otherwise float32."""

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
        model = load(self.bundle, dtype=self.dtype, device=self.device)
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
                "dtype": model.dtype,
                "device": self.device,
            }
            if self.log_probs:
                record["log_probs"] = _log_probs(result)
            print(json.dumps(record, ensure_ascii=False))
        else:
            print("" if streams else text)
        if self.stats:
            for name in _STATS:
                print(f"{_TITLES.get(name, name):24}{shown(report[name])}", file=sys.stderr)

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
