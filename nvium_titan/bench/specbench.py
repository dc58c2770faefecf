"""Spec-Bench: six categories of prompts, which N-vium and a dense model answer in turns.

N-vium (arXiv:2605.13190), App. A: three trials of at most 128 tokens per prompt in each category;
milliseconds per token, dense over N-vium, averaged over the categories. Here the two take turns,
question by question. Prompts are plain text, without a chat template.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from nvium_titan.bench.machine import package_versions
from nvium_titan.bench.models import BenchModel
from nvium_titan.bench.pairs import count_runs, run_pairs
from nvium_titan.core.cost import limit_speedup
from nvium_titan.decode import Engine
from nvium_titan.decode.forward.build import Kernels
from nvium_titan.errors import BenchError, DataError
from nvium_titan.report.bench_records import CategoryFigures, Cpu, PromptsFigures, PromptsReport
from nvium_titan.text.tokenizer import Tokenizer

NUM_TRIALS = 3
MAX_NEW_TOKENS = 128
NAMES = ("N-vium", "dense")

# The eight categories of MT-bench are one of Spec-Bench.
_CONVERSATION = "multi-turn conversation"
_MT_BENCH = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
}  # fmt: skip


class Question(NamedTuple):
    """One row of the file."""

    category: str
    """One of Spec-Bench's six, or whatever the file says."""
    turns: tuple[str, ...]
    """What the user says, turn by turn."""


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpecBench:
    """What to answer, and with which models."""

    model: BenchModel
    """The N-vium; its routers decide."""
    dense: BenchModel
    """What it is measured against; has the same tokenizer."""
    prompts: Path
    """The file of the questions, for the report."""
    questions: Sequence[Question]
    """As from `read_questions`."""
    max_new_tokens: int
    """Most tokens per prompt; the end token ends an answer earlier."""
    seed: int
    """With trial and question it decides every token."""
    kernels: Kernels
    """What runs the models, as `Engine` takes it."""

    def __post_init__(self) -> None:
        """Check that there is room for prompts.

        Raises:
            BenchError: If the answers alone would fill a model's context.
        """
        for model in (self.model, self.dense):
            if model.context <= self.max_new_tokens:
                raise BenchError(
                    f"--new-tokens {self.max_new_tokens} leaves no room for a prompt in a context "
                    f"of {model.context} tokens"
                )

    def num_runs(self, dtypes: Sequence[str]) -> int:
        """Return how often `measure` will have a question answered."""
        return count_runs(len(NAMES), NUM_TRIALS * len(self.questions)) * len(dtypes)

    def measure(
        self, dtypes: Sequence[str], *, cpu: Cpu, command: str, on_run: Callable[[], None]
    ) -> PromptsReport:
        """Answer all questions in one type after the other; an interrupt (Ctrl-C) ends them.

        Args:
            dtypes: Types to compute in.
            cpu: For the report.
            command: For the report.
            on_run: Called after every question that a model has answered, warm-up included.

        Raises:
            KeyboardInterrupt: If interrupted before both models have answered one question.
        """
        entries: list[PromptsFigures] = []
        for dtype in dtypes:
            entries.append(self._answer_all(dtype, on_run))
            if not entries[-1].is_complete:
                break
        return PromptsReport(
            model=self.model.name,
            prompts=str(self.prompts),
            num_questions=len(self.questions),
            num_trials=NUM_TRIALS,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            threads=torch.get_num_threads(),
            cpu=cpu,
            versions=package_versions(),
            command=command,
            dtypes=entries,
        )

    def _answer_all(self, dtype: str, on_run: Callable[[], None]) -> PromptsFigures:
        engines = [
            m.load_engine(dtype=dtype, max_seq_len=m.context, kernels=self.kernels)
            for m in (self.model, self.dense)
        ]
        work: list[tuple[int, Question]] = []
        for _ in range(NUM_TRIALS):
            numbered = list(enumerate(self.questions, start=self.seed + len(work)))
            # Backwards every second time: so each question has either model answering first,
            # whatever the number of questions.
            work += numbered[::-1] if len(work) // len(numbered) % 2 else numbered
        pairs = run_pairs(
            engines,
            work,
            lambda engine, item: _answer(
                engine, self.model.tokenizer, item[1], self.max_new_tokens, seed=item[0]
            ),
            on_run=on_run,
        )
        by_category: dict[str, list[list[_Turns]]] = {}
        for (_, question), pair in zip(work, pairs, strict=False):
            by_category.setdefault(question.category, []).append(pair)
        categories = [_figures(name, found) for name, found in by_category.items()]
        exits = Counter(index for turns, _ in pairs for turn in turns for index in turn.exits)
        shares = [exits[index] / exits.total() for index in range(engines[0].num_exits)]
        return PromptsFigures(
            dtype=dtype,
            is_complete=len(pairs) == len(work),
            categories=categories,
            ratio=sum(category.ratio for category in categories) / len(categories),
            exit_shares=shares,
            limit=limit_speedup(self.model.shape, shares),
        )


class _Turn(NamedTuple):
    """The answer to one prompt."""

    exits: tuple[int, ...]
    """The exit of each token."""
    is_truncated: bool
    """Whether the prompt was cut at the front to fit."""
    seconds: float
    """From prompt to end."""
    further_s: float
    """Of these, for the tokens after the first."""


_Turns = list[_Turn]


def _answer(
    engine: Engine, tokenizer: Tokenizer, question: Question, max_new_tokens: int, *, seed: int
) -> _Turns:
    """Answer every turn, each from the whole conversation so far."""
    ids: list[int] = []
    room = engine.max_seq_len - max_new_tokens
    stop_ids = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    turns = []
    for turn in question.turns:
        ids += tokenizer.encode(f"\n\n{turn}\n" if ids else f"{turn}\n", add_bos=not ids)
        is_truncated = len(ids) > room
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
        turns.append(_Turn(result.exit_indices, is_truncated, end - start, end - first))
    return turns


def _figures(category: str, pairs: Sequence[Sequence[_Turns]]) -> CategoryFigures:
    by_model = [[turn for turns in each for turn in turns] for each in zip(*pairs, strict=True)]
    ms, rates = [], []
    for turns in by_model:
        num_tokens = sum(len(turn.exits) for turn in turns)
        further = num_tokens - len(turns)
        ms.append(1000 * sum(turn.seconds for turn in turns) / num_tokens)
        rates.append(further / sum(turn.further_s for turn in turns) if further else 0.0)
    return CategoryFigures(
        category=category,
        num_prompts=len(by_model[0]),
        num_truncated=sum(turn.is_truncated for turn in by_model[0]),
        ms_per_token=dict(zip(NAMES, ms, strict=True)),
        tokens_per_s=dict(zip(NAMES, rates, strict=True)),
        ratio=ms[1] / ms[0],
    )
