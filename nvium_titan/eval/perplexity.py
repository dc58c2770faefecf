"""Perplexity of a text: per token, word and byte; of the mixture, each exit alone, the final exit.

The rules, which the result repeats: BOS starts every document, if the tokenizer has one. Only the
text is scored: EOS is neither appended nor a target, so figures per word and byte are those of the
text. A document longer than the window is scored in sliding windows: each moves on by the stride
and scores what is new. So every token is scored once, with at least window - stride tokens of
context where the document has them. With stride = window this is lm-eval's rolling log-likelihood.

Shapes: B windows, T tokens, E exits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nvium_titan.decode import Engine
from nvium_titan.errors import DataError, PromptError
from nvium_titan.report.records import ModePerplexity, PerplexityResult
from nvium_titan.text.documents import Rejected, open_files
from nvium_titan.text.tokenizer import Tokenizer


class EncodedDocument(NamedTuple):
    """A document, or the beginning of one, ready to score."""

    token_ids: list[int]
    """BOS, if there is one, and the text; every id but the first is a target."""
    num_words: int
    """Words of the text."""
    num_bytes: int
    """UTF-8 bytes of the text."""


class Window(NamedTuple):
    """A stretch of a document that one prefill scores."""

    document_index: int
    token_ids: list[int]
    num_scored: int
    """How many of its last tokens are scored; the others are context."""


class DocumentScore(NamedTuple):
    """How well a model predicts one document, summed over its targets, in float64."""

    log_mix: float
    """Log-likelihood under the mixture, nats."""
    log_exits_E: Tensor
    """Log-likelihood under each exit alone, nats."""
    exit_probs_E: Tensor
    """Sum of the exit probabilities."""
    num_tokens: int
    """Targets."""


def read_documents(path: Path, *, text_column: str = "text") -> Iterator[str]:
    """Yield the documents of a file: each row of a .jsonl or .json, or all of any other.

    Empty documents are left out.

    Args:
        path: The file.
        text_column: Key of the text in a row.

    Raises:
        DataError: If the file is missing, or any part of the text cannot be used.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a text file or a .jsonl of documents (--text)")
    store = open_files(str(path), text_column=text_column)
    pieces: list[str] = []
    for index in range(len(store)):
        item = store.read(index)
        if isinstance(item, Rejected):
            # An evaluation leaves nothing out silently.
            raise DataError(f"{item.place}: {item.reason}; fix the text to evaluate on")
        pieces.append(item.text)
        if item.is_end:
            text = "".join(pieces)
            pieces = []
            if text:
                yield text


def encode_documents(
    documents: Iterator[str], tokenizer: Tokenizer, *, max_tokens: int | None = None
) -> list[EncodedDocument]:
    """Return documents as token ids; the last is cut where `max_tokens` targets are reached.

    Words and bytes of the cut document are those of the text that its tokens decode to.

    Args:
        documents: Texts.
        tokenizer: The model's.
        max_tokens: Most targets, at least 1; no limit if None.

    Raises:
        DataError: If no document has anything to score.
        PromptError: If `max_tokens` is below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise PromptError(f"tokens={max_tokens}: must be at least 1 (--tokens)")
    encoded, room = [], math.inf if max_tokens is None else max_tokens
    for text in documents:
        ids = tokenizer.encode(text, add_bos=True)
        if len(ids) - 1 > room:
            ids = ids[: int(room) + 1]
            text = tokenizer.decode(ids)
        if len(ids) > 1:
            encoded.append(EncodedDocument(ids, len(text.split()), len(text.encode("utf-8"))))
            room -= len(ids) - 1
        if room == 0:
            break
    if not encoded:
        raise DataError("no text to evaluate on: every document is empty or has a single token")
    return encoded


def sliding_windows(
    documents: Sequence[EncodedDocument], *, window: int, stride: int
) -> Iterator[Window]:
    """Yield the windows that score every target of every document once, in order.

    Args:
        documents: What to score.
        window: Most tokens of context; a window holds one more, its last target.
        stride: Targets of each further window of a document, from 1 to `window`.
    """
    for index, document in enumerate(documents):
        ids = document.token_ids
        scored, end = 1, min(window + 1, len(ids))
        while scored < len(ids):
            yield Window(index, ids[max(0, end - window - 1) : end], end - scored)
            scored, end = end, min(end + stride, len(ids))


def score_documents(
    engine: Engine,
    documents: Sequence[EncodedDocument],
    *,
    window: int,
    stride: int,
    batch_size: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[DocumentScore]:
    """Return the log-likelihoods of each document.

    Args:
        engine: The model.
        documents: What to score.
        window: As in `sliding_windows`; at most the engine's `max_seq_len`.
        stride: As in `sliding_windows`.
        batch_size: Windows per call of the engine, which runs them one after the other.
        on_progress: Called after each batch with the number of targets scored so far.

    Raises:
        PromptError: If `window`, `stride` or `batch_size` is out of range.
    """
    if not 1 <= window <= engine.max_seq_len:
        raise PromptError(
            f"window={window}: must lie in 1..{engine.max_seq_len}, the model's context (--window)"
        )
    if not 1 <= stride <= window:
        raise PromptError(f"stride={stride}: must lie in 1..{window}, the window (--stride)")
    if batch_size < 1:
        raise PromptError(f"batch_size={batch_size}: must be at least 1 (--batch-size)")
    log_mix = torch.zeros(len(documents), dtype=torch.float64)
    log_exits_E, exit_probs_E = torch.zeros(2, len(documents), engine.num_exits).double()
    num_scored = 0
    windows = sliding_windows(documents, window=window, stride=stride)
    while batch := list(islice(windows, batch_size)):
        longest = max(len(w.token_ids) for w in batch)
        # Padding goes to the right: nothing before depends on it, and its scores are dropped.
        padded = [w.token_ids + w.token_ids[-1:] * (longest - len(w.token_ids)) for w in batch]
        scores = engine.score(padded)
        for b, (index, ids, count) in enumerate(batch):
            targets = slice(len(ids) - 1 - count, len(ids) - 1)
            log_mix[index] += scores.log_mix[b, targets].double().sum().cpu()
            log_exits_E[index] += scores.log_exits[b, targets].double().sum(0).cpu()
            exit_probs_E[index] += scores.log_exit_probs[b, targets].double().exp().sum(0).cpu()
            num_scored += count
        if on_progress:
            on_progress(num_scored)
    return [
        DocumentScore(float(mix), exits_E, probs_E, len(document.token_ids) - 1)
        for mix, exits_E, probs_E, document in zip(
            log_mix, log_exits_E, exit_probs_E, documents, strict=True
        )
    ]


def evaluate(
    engine: Engine,
    tokenizer: Tokenizer,
    documents: Sequence[EncodedDocument],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> PerplexityResult:
    """Return the perplexities of a model on some documents; sums are float64.

    Args:
        engine: The model.
        tokenizer: The one that encoded the documents.
        documents: From `encode_documents`.
        window: Most tokens of context; the engine's `max_seq_len` if None.
        stride: Targets of each further window; the window if None.
        batch_size: As in `score_documents`; no result depends on it.
        on_progress: As in `score_documents`.

    Raises:
        PromptError: If `window`, `stride` or `batch_size` is out of range.
    """
    window = engine.max_seq_len if window is None else window
    stride = window if stride is None else stride
    scores = score_documents(
        engine,
        documents,
        window=window,
        stride=stride,
        batch_size=batch_size,
        on_progress=on_progress,
    )
    num_tokens = sum(score.num_tokens for score in scores)
    num_words = sum(document.num_words for document in documents)
    num_bytes = sum(document.num_bytes for document in documents)
    exits = torch.stack([score.log_exits_E for score in scores]).sum(0).tolist()
    shares_E = torch.stack([score.exit_probs_E for score in scores]).sum(0) / num_tokens
    totals = {"mixture": math.fsum(score.log_mix for score in scores)}
    totals |= {f"exit {index + 1}": total for index, total in enumerate(exits[:-1])}
    totals["final exit"] = exits[-1]
    return PerplexityResult(
        modes=[
            _mode(name, total, num_tokens, num_words, num_bytes) for name, total in totals.items()
        ],
        exit_shares=shares_E.tolist(),
        window=window,
        stride=stride,
        num_documents=len(documents),
        num_tokens=num_tokens,
        num_words=num_words,
        num_bytes=num_bytes,
        starts_with_bos=tokenizer.bos_id is not None,
        scores_eos=False,
    )


def _mode(
    name: str, log_likelihood: float, num_tokens: int, num_words: int, num_bytes: int
) -> ModePerplexity:
    return ModePerplexity(
        mode=name,
        log_likelihood=log_likelihood,
        token_perplexity=_perplexity(log_likelihood, num_tokens),
        word_perplexity=_perplexity(log_likelihood, num_words),
        byte_perplexity=_perplexity(log_likelihood, num_bytes),
    )


def _perplexity(log_likelihood: float, count: int) -> float | None:
    try:
        return math.exp(-log_likelihood / count)
    except (OverflowError, ZeroDivisionError):
        return None
