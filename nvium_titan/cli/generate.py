"""`nvium generate`: text, the law it was sampled from, and its figures."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from nvium_titan.cli.common import load, shown
from nvium_titan.cli.prompts import read_prompts
from nvium_titan.errors import PromptError

if TYPE_CHECKING:
    from nvium_titan.convert.load import LoadedModel
    from nvium_titan.decode import (
        BatchStats,
        Engine,
        FixedExit,
        GenerationResult,
        RouterGreedy,
        SampledRouter,
        SamplingParams,
        TextResult,
    )

_STATS = (
    "law", "num_new_tokens", "finish_reason", "exit_shares", "certified_early", "mean_group_size",
    "layers_per_token", "layers_saved", "ttft_ms", "tokens_per_s",
)  # fmt: skip
_TITLES = {"certified_early": "tokens certified early"}


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts with a trained model; new text goes to stdout as it is sampled.

    By default every token is an exact sample of the mixture of exits. Temperature, filters, greedy,
    a forced exit and a router temperature change the law; --stats and --json name it. A training
    checkpoint is converted in memory; nothing is written.

    nvium generate bundles/debug --prompt "The Python " --max-new-tokens 200 --stats

    nvium generate bundles/debug --prompts-file prompts.jsonl --json > answers.jsonl
    """

    bundle: tyro.conf.Positional[Path]
    """A bundle from nvium export; or a step-N folder, or a run's folder: then its newest step."""

    prompt: str | None = None
    """Text to continue; - reads it from stdin."""

    prompts_file: Path | None = None
    """Continue the prompts of a file instead, each on its own. In a .jsonl file every line is an
    object with the text under "prompt" or "text"; in any other file every line is a prompt. Blank
    lines are skipped. Answers come in the order of the file."""

    batch: int = 8
    """With --prompts-file: decode this many at once. That changes the speed, not the answers."""

    schedule: Literal["lockstep", "periodic", "auto"] = "lockstep"
    """With --prompts-file: when the batch runs which block. auto finds the fastest from the exit
    shares of the first tokens; lockstep and periodic (the first block once more before each sweep
    down) insist. The answers are the same."""

    max_new_tokens: int = 128
    """Most tokens to sample; fewer come if the model ends the text or its context is full."""

    temperature: float | None = None
    """1 samples the model as it is, 0 takes the likeliest token of the mixture; default: 1, and 0
    with --greedy."""

    top_k: int = 0
    """Sample among the k likeliest tokens; 0 keeps all."""

    top_p: float = 1.0
    """Sample among the likeliest tokens that together reach this probability."""

    min_p: float = 0.0
    """Sample among tokens at least this fraction as likely as the likeliest."""

    filter_scope: Literal["exit", "mixture"] = "exit"
    """What temperature and filters act on; the mixture needs every layer for every token."""

    greedy: Literal["mixture", "router"] | None = None
    """mixture: temperature 0; router: leave where w > 1/2, take the likeliest token there."""

    router_temperature: float = 1.0
    """Divides the router logits; other values than 1 sample a mixture with other weights."""

    exit: int | None = None
    """Always leave at this exit, 1 being the earliest; default: the routers decide."""

    seed: int = 0
    """The same seed gives the same text; prompt i of a file, from 0, takes seed + i."""

    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends the answer and is not printed; may be given several times."""

    lazy_prefill: bool = False
    """Run the upper layers of the prompt only when a token needs them: the first token may come
    sooner; the text stays the same."""

    ignore_eos: bool = False
    """Do not stop at the end token."""

    max_seq_len: int | None = None
    """Most tokens of prompt and answer together; default: the model's context."""

    dtype: Literal["float32", "bfloat16", "float64", "int8"] | None = None
    """Type to compute in; int8 means int8 weights, the rest in float32. Default: int8 for a
    quantised bundle, otherwise float32."""

    device: str = "cpu"
    """cpu, cuda or cuda:N."""

    stream: bool = True
    """Print text as it comes, and of a prompts file each answer once it is complete."""

    stats: bool = False
    """Print exit shares, group sizes, layers run, tokens certified early and speed to stderr."""

    log_probs: bool = False
    """With --json: log-probabilities of each token, nats: its exit, the token there, both together,
    and the token under the mixture."""

    json: bool = False
    """Print one JSON object per prompt instead of the text, with the settings."""

    def run(self) -> None:
        """Sample and print.

        Raises:
            PromptError: If there is nothing to continue, flags exclude each other, or there is no
                such device.
        """
        from nvium_titan.decode import Engine

        if self.log_probs and not self.json:
            raise PromptError("--log-probs needs --json, which shows them")
        if (self.prompt is None) == (self.prompts_file is None):
            raise PromptError("give either --prompt or --prompts-file")
        sampling, policy = self._law()
        prompts = read_prompts(self.prompts_file) if self.prompts_file else []
        model = load(self.bundle, dtype=self.dtype, device=self.device)
        engine = Engine(model.params, max_seq_len=self.max_seq_len)
        eos_id = model.tokenizer.eos_id
        settings = {
            "max_new_tokens": self.max_new_tokens,
            "sampling": sampling,
            "policy": policy,
            "lazy_prefill": self.lazy_prefill,
            "stop_ids": [] if eos_id is None or self.ignore_eos else [eos_id],
            "with_log_probs": self.log_probs,
        }
        if self.prompt is None:
            self._continue_all(prompts, engine, model, settings)
        else:
            prompt = sys.stdin.read() if self.prompt == "-" else self.prompt
            self._continue_one(prompt, engine, model, settings)

    def _continue_one(
        self, prompt: str, engine: Engine, model: LoadedModel, settings: dict[str, Any]
    ) -> None:
        from nvium_titan.decode import TextGeneration

        prompt_ids = _encode(model, prompt)
        tokens = engine.generate(prompt_ids, seed=self.seed, **settings)
        stream = model.tokenizer.stream(prompt_ids)
        generation = TextGeneration(tokens, stream, stop_strings=self.stop)
        streams = self.stream and not self.json
        for piece in generation:
            if streams:
                print(piece, end="", flush=True)
        text = generation.result()
        record = self._record(prompt, text, engine, model)
        if self.json:
            print(json.dumps(record, ensure_ascii=False))
        else:
            print("" if streams else text.text)
        if self.stats:
            _print_stats({name: record[name] for name in _STATS})

    def _continue_all(
        self, prompts: list[str], engine: Engine, model: LoadedModel, settings: dict[str, Any]
    ) -> None:
        """Continue the prompts in a batch; print each answer after those before it."""
        from nvium_titan.decode import GenerationRequest, TextPieces, TextResult

        all_ids = [_encode(model, prompt) for prompt in prompts]
        batch = engine.generate_batch(
            [
                GenerationRequest(prompt_ids=prompt_ids, seed=self.seed + row, **settings)
                for row, prompt_ids in enumerate(all_ids)
            ],
            batch_size=self.batch,
            schedule=self.schedule,
        )
        rows = [
            TextPieces(model.tokenizer.stream(prompt_ids), stop_strings=self.stop)
            for prompt_ids in all_ids
        ]
        num_printed = 0
        for row, token in batch:
            rows[row].push(token.token_id)
            if rows[row].stop_string is not None:
                batch.stop(row)
            while num_printed < len(rows) and (result := batch.result(num_printed)) is not None:
                pieces, prompt = rows[num_printed], prompts[num_printed]
                pieces.finish()
                text = TextResult(pieces.text, pieces.stop_string, result)
                if self.json:
                    record = self._record(prompt, text, engine, model)
                    print(json.dumps(record, ensure_ascii=False), flush=self.stream)
                else:
                    title = f"[{num_printed + 1}] {prompt}"
                    print(f"{title}\n{text.text}\n", flush=self.stream)
                num_printed += 1
        if self.stats:
            _print_stats(_batch_stats(batch.results(), batch.stats))

    def _record(
        self, prompt: str, text: TextResult, engine: Engine, model: LoadedModel
    ) -> dict[str, Any]:
        result = text.generation
        report = _report(result, num_layers=model.params.config.shape.num_layers)
        record = {"prompt": prompt, "text": text.text, "stop_string": text.stop_string, **report}
        policy: Any = result.policy
        record["settings"] = {
            "model": str(model.path),
            "max_new_tokens": self.max_new_tokens,
            "max_seq_len": engine.max_seq_len,
            "sampling": asdict(result.sampling),
            "policy": {"name": type(policy).__name__, **asdict(policy)},
            "seed": result.seed,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "lazy_prefill": self.lazy_prefill,
            "dtype": model.dtype,
            "device": self.device,
        }
        if self.log_probs:
            record["log_probs"] = _log_probs(result)
        return record

    def _law(self) -> tuple[SamplingParams, SampledRouter | RouterGreedy | FixedExit]:
        from nvium_titan.decode import FixedExit, RouterGreedy, SampledRouter, SamplingParams

        if self.greedy and self.temperature:
            raise PromptError(
                f"--greedy {self.greedy} takes the likeliest token, so it does not go with "
                f"--temperature {self.temperature:g}; leave one of them out"
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
                f"--router-temperature {self.router_temperature:g} changes how routers draw the "
                f"exit, but with {other} they draw none; leave one of them out"
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


def _encode(model: LoadedModel, prompt: str) -> list[int]:
    prompt_ids = model.tokenizer.encode(prompt, add_bos=True)
    if not prompt_ids:
        raise PromptError("the prompt is empty, and this tokenizer has no BOS to start from")
    return prompt_ids


def _print_stats(figures: dict[str, Any]) -> None:
    for name, figure in figures.items():
        print(f"{_TITLES.get(name, name):24}{shown(figure)}", file=sys.stderr)


def _batch_stats(results: list[GenerationResult], stats: BatchStats) -> dict[str, Any]:
    counts = [sum(of_exit) for of_exit in zip(*(r.exit_counts for r in results), strict=True)]
    return {
        "law": results[0].law,
        "num_prompts": len(results),
        "num_new_tokens": stats.num_new_tokens,
        "exit_shares": [count / stats.num_new_tokens for count in counts],
        "layers_per_token": stats.layers_run / stats.num_new_tokens,
        "tokens_per_s": stats.tokens_per_s,
    }


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
    """Return a row per token; `path` is leaving at its exit and drawing the token there."""
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
