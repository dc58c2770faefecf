"""Packed sequences: documents end to end, cut where a sequence is full.

A document is BOS (if the tokenizer has one), its text, EOS. A sequence has T inputs and the label
after each; the label belongs to the same document as its input. What a sequence cuts off starts the
next one. Positions count from 0 in every document, and again after a cut, since attention reaches
back over neither.

Letters: T tokens of a sequence.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from nvium_titan.errors import DataError
from nvium_titan.train.data.encoding import Encoder, Ids, encode_document
from nvium_titan.train.data.sources import Source, no_text

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
"""The label of padding, which does not count in the loss."""

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class Share(NamedTuple):
    """The sequences of a rank: ranks take sequences in turn, their worker processes batches."""

    rank: int
    num_ranks: int
    batch_size: int
    """Sequences of one rank in a batch."""

    def takes(self, index: int) -> bool:
        """Return whether sequence `index` is for this rank and this worker process."""
        worker = get_worker_info()
        own, rank = divmod(index, self.num_ranks)
        batch = own // self.batch_size
        return rank == self.rank and (worker is None or batch % worker.num_workers == worker.id)


class PackedTextDataset(IterableDataset, Stateful):
    """One rank's sequences of `seq_len` tokens from the documents of a source.

    The order of sequences does not depend on the number of ranks, and every rank has as many.
    Without `infinite` there is one epoch, in which each token counts once: padding fills the last
    sequence, and the last batch of every rank.
    """

    # Every rank walks the whole order and keeps its share, so each encodes all of a text. That may
    # be too slow for many GPUs; a prepared folder is encoded already, and costs little to walk. (Of
    # a stream from the hub each rank has its own documents.) The walk stops only after every rank
    # has had its turn: the position is the same on all, and any number of ranks can resume from it.

    def __init__(
        self, source: Source, tokenizer: Encoder, *, seq_len: int, share: Share, infinite: bool
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._share = share
        self._infinite = infinite
        # What the last sequence left of a document.
        self._rest: Ids = np.empty(0, dtype=np.int64)
        self._num_sequences = 0
        # Shares are counted from this sequence on; those before it are skipped.
        self._first_sequence = 0
        self._num_epoch_tokens = 0
        self._has_warned = False
        # Any id will do: its label is ignored and nothing attends to it.
        self._pad_id = tokenizer.eos_id or 0

    def __iter__(self) -> Iterator[Sample]:
        """Yield this rank's sequences from the current position on.

        Each is ({"input": (T,), "positions": (T,)}, labels (T,)), int64.
        """
        own: list[Ids] | None = None
        for runs in self._sequences():
            index = self._num_sequences - self._first_sequence
            self._num_sequences += 1
            if index >= 0 and self._share.takes(index):
                own = runs
            if own is not None and (index + 1) % self._share.num_ranks == 0:
                yield to_sample(own, seq_len=self._seq_len, pad_id=self._pad_id)
                own = None

    def _sequences(self) -> Iterator[list[Ids]]:
        """Yield each sequence as runs of ids, one per document; a run's last id is a label only."""
        runs: list[Ids] = []
        num_inputs = 0
        for document in itertools.chain([self._rest], self._documents()):
            self._rest = document
            while (num_left := len(self._rest) - 1) > 0:
                take = min(num_left, self._seq_len - num_inputs)
                runs.append(self._rest[: take + 1])
                num_inputs += take
                self._rest = self._rest[take:]
                if num_inputs == self._seq_len:
                    yield runs
                    runs, num_inputs = [], 0
        # The epoch is over: pad to whole batches on every rank.
        round_size = self._share.num_ranks * self._share.batch_size
        while runs or (self._num_sequences - self._first_sequence) % round_size:
            yield runs
            runs = []

    def _documents(self) -> Iterator[Ids]:
        """Yield the ids of each document from the source's position on, epoch after epoch."""
        while True:
            for document in self._source.documents():
                ids = encode_document(document, self._tokenizer)
                if len(ids):
                    self._num_epoch_tokens += len(ids)
                    yield ids
            self._check_epoch()
            if not self._infinite:
                return
            self._source.next_epoch()
            self._num_epoch_tokens = 0

    def _check_epoch(self) -> None:
        # Otherwise an infinite run would look for text for ever.
        if not self._num_epoch_tokens:
            raise DataError(no_text(self._source))
        if self._infinite and self._num_epoch_tokens < self._seq_len and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: all of it is %d tokens, less than one sequence (seq_len=%d); it is repeated",
                self._source.name,
                self._num_epoch_tokens,
                self._seq_len,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on all ranks."""
        return {
            "source": self._source.state_dict(),
            "ids": self._rest.copy(),
            "num_sequences": self._num_sequences,
            "num_epoch_tokens": self._num_epoch_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; the next sequences are those of an uninterrupted run."""
        self._source.load_state_dict(state["source"])
        self._rest = state["ids"]
        self._num_sequences = self._first_sequence = state["num_sequences"]
        self._num_epoch_tokens = state["num_epoch_tokens"]

    def pass_over(self, num_sequences: int) -> None:
        """Skip the sequences before this one, with which shares start."""
        self._first_sequence = num_sequences


def to_sample(runs: list[Ids], *, seq_len: int, pad_id: int) -> Sample:
    """Return the sequence that runs of ids make, padded at its end.

    Args:
        runs: Each from one document: all ids but the last are inputs, all but the first labels.
        seq_len: T, at least the number of inputs.
        pad_id: Any id: its label is ignored and nothing attends to it.
    """
    inputs_T = np.full(seq_len, pad_id, dtype=np.int64)
    labels_T = np.full(seq_len, IGNORED_LABEL, dtype=np.int64)
    positions_T = np.empty(seq_len, dtype=np.int64)
    start = 0
    for ids in runs:
        end = start + len(ids) - 1
        inputs_T[start:end] = ids[:-1]
        labels_T[start:end] = ids[1:]
        positions_T[start:end] = np.arange(end - start)
        start = end
    positions_T[start:] = np.arange(seq_len - start)
    return (
        {"input": torch.from_numpy(inputs_T), "positions": torch.from_numpy(positions_T)},
        torch.from_numpy(labels_T),
    )
