"""Records of training and evaluation, and how a record is read from JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from nvium_titan.errors import DataError

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsRow:
    """One logged step of training (`train`) or one validation (`val`)."""

    step: int
    """Training steps done."""
    split: Literal["train", "val"]
    """What was measured."""
    loss: float
    """The objective, nats/token."""
    mixture_nll: float
    """L_mix, nats/token."""
    perplexity: float
    """exp(L_mix)."""
    exit_ce: list[float]
    """Cross-entropy of each exit alone, nats/token."""
    exit_shares: list[float]
    """Mean exit probability of each exit."""
    expected_depth: float
    """Fraction of num_layers."""
    beta: float
    """Weight of the compute penalty at this step (0 in the router warm-up)."""
    router_means: list[float]
    """Mean conditional probability of leaving at each junction."""
    router_entropy: float
    """Entropy of the exit distribution, nats."""
    grad_norm: float | None
    """Gradient norm before clipping; None for validation."""
    lr: float | None
    """Learning rate; None for validation."""
    tokens: int
    """Training tokens seen so far; of a validation, the tokens it ran over."""
    tokens_per_s: float
    """Tokens per second over all ranks, since the last row."""
    limit_speedup: float | None
    """Highest decode speed-up over dense that these exit shares allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModePerplexity:
    """How well one distribution of a model predicts a text.

    A perplexity is exp(-log_likelihood / count); None if the count is 0 or a float overflows.
    """

    mode: str
    """Which distribution: "mixture", "exit k" (that exit alone, from 1) or "final exit"."""
    log_likelihood: float
    """Of all scored tokens, nats."""
    token_perplexity: float | None
    """Per scored token."""
    word_perplexity: float | None
    """Per word: text between white space."""
    byte_perplexity: float | None
    """Per byte of the text in UTF-8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityResult:
    """One evaluation of a model on a text, with the rules it followed."""

    modes: list[ModePerplexity]
    """The mixture, each early exit alone, the final exit alone."""
    exit_shares: list[float]
    """Mean exit probability of each exit over the scored tokens."""
    window: int
    """Most tokens of context of a prediction."""
    stride: int
    """Tokens that each further window of a document scores."""
    num_documents: int
    """Documents with at least one scored token."""
    num_tokens: int
    """Scored tokens."""
    num_words: int
    """Words of the scored text."""
    num_bytes: int
    """UTF-8 bytes of the scored text."""
    starts_with_bos: bool
    """Whether BOS starts each document; if not, its first token is context only."""
    scores_eos: bool
    """Whether the end of a document is scored, as a token."""


def read_metrics(path: Path) -> list[MetricsRow]:
    """Return the rows of a `metrics.jsonl`.

    Args:
        path: The file.

    Raises:
        DataError: If the file is missing, or a line is not such a row.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; a training run writes it into its dump folder")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(from_json(MetricsRow, json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: not a row of metrics ({error!r})") from error
    return rows


def from_json(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Return the dataclass `kind` from the JSON object of its `asdict`; other keys are ignored.

    Raises:
        KeyError: If a field is missing.
        TypeError: If there is no object where one belongs.
    """
    return kind(**{name: _value(hint, data[name]) for name, hint in _hints(kind).items()})


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _value(hint: Any, value: Any) -> Any:
    item = next(iter(get_args(hint)), None)
    if is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]  # a class, not an instance
    return [from_json(item, row) for row in value] if is_dataclass(item) else value  # type: ignore[arg-type]
