"""Spec-Bench: six categories of prompts, answered by N-vium and a dense model in turns.

N-vium (arXiv:2605.13190), App. A: three trials of at most 128 tokens per prompt in each category,
milliseconds per token, the dense model's over N-vium's, averaged over the categories. Here the two
take turns, prompt by prompt. Prompts are given as plain text, without a chat template.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nvium_titan.core.cost import limit_speedup
from nvium_titan.core.shape import ModelShape
from nvium_titan.decode import Engine
from nvium_titan.errors import BenchError, DataError
from nvium_titan.report.bench_records import CategoryFigures, PromptsFigures
from nvium_titan.text.tokenizer import Tokenizer

NUM_TRIALS = 3
MAX_NEW_TOKENS = 128

# The eight categories of MT-bench are one of Spec-Bench.
_CONVERSATION = "multi-turn conversation"
_MT_BENCH = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
}  # fmt: skip


class Question(NamedTuple):
    """One row of the file."""

    category: str
    """One of the six of Spec-Bench, or whatever the file says."""
    turns: tuple[str, ...]
    """What the user says, one prompt after the other's answer."""


class Answerer(NamedTuple):
    """One of the models that answer."""

    name: str
    """For the table."""
    engine: Engine
    """Its engine."""


def read_questions(path: Path, *, per_category: int | None = None) -> list[Question]:
    """Return the questions of a Spec-Bench file, the eight categories of MT-bench as one.

    Args:
        path: A .jsonl; each row has a `category` and a list of `turns`.
        per_category: Take the first so many of each category; all if None.

    Raises:
        DataError: If the file is missing or empty, or a row is malformed.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; Spec-Bench's is data/spec_bench/question.jsonl")
    questions, taken = [], Counter[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            category, turns = row["category"], row["turns"]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}:{number}: needs category and turns ({error!r})") from error
        is_text = isinstance(turns, list) and all(isinstance(turn, str) and turn for turn in turns)
        if not isinstance(category, str) or not is_text or not turns:
            raise DataError(
                f"{path}:{number}: category must be a text and turns a list of texts, none empty"
            )
        category = _CONVERSATION if category in _MT_BENCH else category
        if per_category is None or taken[category] < per_category:
            taken[category] += 1
            questions.append(Question(category, tuple(turns)))
    if not questions:
        raise DataError(f"{path}: holds no question")
    return questions


@dataclass(slots=True)
class _Tally:
    """What one model did in one category."""

    num_prompts: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    further_tokens: int = 0
    further_s: float = 0.0
    exits: Counter[int] = field(default_factory=Counter)


def run_questions(
    nvium: Answerer,
    dense: Answerer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    shape: ModelShape,
    dtype: str,
    max_new_tokens: int,
    seed: int,
    on_question: Callable[[], None],
) -> PromptsFigures:
    """Answer every question in `NUM_TRIALS` trials with both models; the routers decide.

    An interrupt (Ctrl-C) ends it: the figures are then of the questions so far.

    Args:
        nvium: The model measured.
        dense: What it is measured against.
        tokenizer: Of both.
        questions: As from `read_questions`.
        shape: Of N-vium, for the limit.
        dtype: Type computed in, for the record.
        max_new_tokens: Most tokens per prompt; the end token ends an answer before.
        seed: With trial and question it decides every token.
        on_question: Called after every question of every trial.

    Raises:
        BenchError: If a model's context has no room for a prompt.
        KeyboardInterrupt: If interrupted before both models have answered one question.
    """
    models = (nvium, dense)
    for model in models:
        if model.engine.max_seq_len <= max_new_tokens:
            raise BenchError(
                f"--new-tokens {max_new_tokens} leaves no room for a prompt in a context of "
                f"{model.engine.max_seq_len} tokens"
            )
    tallies: dict[str, tuple[_Tally, _Tally]] = {}
    for model in models:
        _answer(model.engine, tokenizer, questions[0], max_new_tokens, seed, _Tally())
    is_complete = False
    try:
        for trial in range(NUM_TRIALS):
            for number, question in enumerate(questions):
                pair = tallies.setdefault(question.category, (_Tally(), _Tally()))
                order = (0, 1) if (trial + number) % 2 == 0 else (1, 0)
                for index in order:
                    run_seed = seed + trial * len(questions) + number
                    engine = models[index].engine
                    _answer(engine, tokenizer, question, max_new_tokens, run_seed, pair[index])
                on_question()
        is_complete = True
    except KeyboardInterrupt:
        if not all(tally.num_tokens for pair in tallies.values() for tally in pair):
            raise
    exits = sum((pair[0].exits for pair in tallies.values()), Counter[int]())
    shares = [exits[index] / exits.total() for index in range(nvium.engine.num_exits)]
    categories = [_figures(name, models, pair) for name, pair in tallies.items()]
    return PromptsFigures(
        dtype=dtype,
        is_complete=is_complete,
        categories=categories,
        ratio=sum(category.ratio for category in categories) / len(categories),
        exit_shares=shares,
        limit=limit_speedup(shape, shares),
    )


def _answer(
    engine: Engine,
    tokenizer: Tokenizer,
    question: Question,
    max_new_tokens: int,
    seed: int,
    tally: _Tally,
) -> None:
    """Answer every turn, each from the whole conversation so far, and add it to `tally`."""
    ids: list[int] = []
    room = engine.max_seq_len - max_new_tokens
    stop_ids = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    for turn in question.turns:
        ids += tokenizer.encode(f"\n\n{turn}\n" if ids else f"{turn}\n", add_bos=not ids)
        tally.num_prompts += 1
        tally.num_truncated += len(ids) > room
        ids = ids[-room:]
        start = time.perf_counter()
        generation = engine.generate(
            ids, max_new_tokens=max_new_tokens, seed=seed, stop_ids=stop_ids
        )
        next(generation)
        first = time.perf_counter()
        result = generation.result()
        end = time.perf_counter()
        ids = [*ids, *result.token_ids]
        tally.num_tokens += len(result.token_ids)
        tally.seconds += end - start
        tally.further_tokens += len(result.token_ids) - 1
        tally.further_s += end - first
        tally.exits.update(result.exit_indices)


def _figures(
    category: str, models: Sequence[Answerer], pair: tuple[_Tally, _Tally]
) -> CategoryFigures:
    ms = [1000 * tally.seconds / tally.num_tokens for tally in pair]
    names = [model.name for model in models]
    rates = [t.further_tokens / t.further_s if t.further_tokens else 0.0 for t in pair]
    return CategoryFigures(
        category=category,
        num_prompts=pair[0].num_prompts,
        num_truncated=pair[0].num_truncated,
        ms_per_token=dict(zip(names, ms, strict=True)),
        tokens_per_s=dict(zip(names, rates, strict=True)),
        ratio=ms[1] / ms[0],
    )
