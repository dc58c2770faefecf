"""Documents in the order of training: one order per epoch, one split, from any position.

Documents by index (files, the demo corpus, downloaded data sets) are shuffled in every epoch, from
the first on, by the seed alone. A stream from the hub keeps its own order.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from typing_extensions import override

from nvium_titan.errors import StreamError
from nvium_titan.text.documents import Document, Rejected, Split, Store
from nvium_titan.train.data.encoding import Tokens, split_of_document
from nvium_titan.train.data.shards import ShardStore

logger = logging.getLogger(__name__)

RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses, in seconds, before a failed stream is opened again where it was; then it is given up."""


class Source(Protocol):
    """Documents in the order of training."""

    name: str
    """Its name in messages."""
    is_sharded: bool
    """Whether each rank has documents of its own."""

    def documents(self) -> Iterator[Document | Tokens]:
        """Yield the rest of the epoch; the position moves before each document is yielded.

        Raises:
            DataError: If a prepared document was changed.
            StreamError: If a stream keeps failing (`RETRY_WAITS_S`).
        """
        ...

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        ...

    def faults(self) -> str:
        """Return a summary of the documents skipped so far, "" if there are none."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...


def no_text(source: Source) -> str:
    """Return the message that a source has no text to train on."""
    faults = f" ({source.faults()})" if source.faults() else ""
    return f"{source.name}: no text to train on{faults}; fix [dataloader]"


class Faults:
    """Counts skipped documents; reports the first, the tenth, the hundredth, ..."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._num_reported = 0
        self._first: Rejected | None = None

    def add(self, rejected: Rejected) -> None:
        """Count a document."""
        self._first = self._first or rejected
        self._count += 1
        if self._count >= 10 * self._num_reported:
            self.report()

    def report(self) -> None:
        """Log the count if it has grown since the last report."""
        if self._count > self._num_reported:
            self._num_reported = self._count
            logger.warning("%s: %s", self._name, self.summary())

    def summary(self) -> str:
        """Return the count, and place and reason of the first; "" if there are none."""
        if self._first is None:
            return ""
        noun = "document" if self._count == 1 else "documents"
        return f"skipped {self._count} {noun}, the first {self._first.place}: {self._first.reason}"


class IndexedSource(Source):
    """Documents of a store, shuffled by seed and epoch."""

    is_sharded = False

    def __init__(self, store: Store | ShardStore, *, name: str, split: Split, seed: int) -> None:
        self.name = name
        self._store = store
        self._split = split
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._faults = Faults(name)

    @override
    def documents(self) -> Iterator[Document | Tokens]:
        order = _permutation(len(self._store), seed=self._seed, epoch=self._epoch)
        while self._cursor < len(order):
            item = self._store.read(int(order[self._cursor]))
            self._cursor += 1
            if isinstance(item, Rejected):
                self._faults.add(item)
            elif self._split in ("all", split_of_document(item)):
                yield item
        self._faults.report()

    @override
    def next_epoch(self) -> None:
        self._epoch += 1
        self._cursor = 0

    @override
    def faults(self) -> str:
        return self._faults.summary()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "cursor": self._cursor}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._cursor = state["epoch"], state["cursor"]


class StreamSource(Source):
    """A Hugging Face stream, already divided among the ranks."""

    is_sharded = True

    def __init__(self, data: Any, to_text: Callable[[Any], Any], *, name: str) -> None:
        self.name = name
        self._data = data
        self._to_text = to_text
        self._epoch = 0
        self._num_samples = 0
        # The library knows its position only once it has moved; until then it is this one.
        self._start: dict[str, Any] | None = None
        self._has_moved = False
        self._faults = Faults(name)

    @override
    def documents(self) -> Iterator[Document]:
        for sample in self._samples():
            self._num_samples += 1
            place = f"{self.name}: sample {self._num_samples}"
            item = sample_document(sample, self._to_text, place=place)
            if isinstance(item, Rejected):
                self._faults.add(item)
            else:
                yield item
        self._faults.report()

    def _samples(self) -> Iterator[Any]:
        samples = iter(self._data)
        num_failures = 0
        while True:
            try:
                sample = next(samples)
            except StopIteration:
                return
            except Exception as error:  # the library raises whatever its readers raise
                if num_failures == len(RETRY_WAITS_S):
                    raise StreamError(
                        f"{self.name}: the stream failed, and again in {num_failures} retries: "
                        f"{type(error).__name__}: {error}; run the same command again to resume"
                    ) from error
                wait_s = RETRY_WAITS_S[num_failures]
                num_failures += 1
                logger.warning(
                    "%s: %s: %s; trying again in %g s",
                    self.name,
                    type(error).__name__,
                    error,
                    wait_s,
                )
                time.sleep(wait_s)
                self._go_to(self._position())
                samples = iter(self._data)
            else:
                num_failures = 0
                self._has_moved = True
                yield sample

    @override
    def next_epoch(self) -> None:
        self._epoch += 1
        self._data.set_epoch(self._epoch)
        self._start, self._has_moved = None, False

    @override
    def faults(self) -> str:
        return self._faults.summary()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "data": self._position()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._data.set_epoch(self._epoch)
        self._go_to(state["data"])

    def _position(self) -> dict[str, Any] | None:
        return self._data.state_dict() if self._has_moved else self._start

    def _go_to(self, position: dict[str, Any] | None) -> None:
        # None is the start of an epoch, which the library has no position for.
        self._start, self._has_moved = position, False
        if position is not None:
            self._data.load_state_dict(position)


class SampleStore(Store):
    """A downloaded Hugging Face data set."""

    def __init__(self, data: Any, to_text: Callable[[Any], Any], *, name: str) -> None:
        self._data = data
        self._to_text = to_text
        self._name = name

    @override
    def __len__(self) -> int:
        return len(self._data)

    @override
    def read(self, index: int) -> Document | Rejected:
        place = f"{self._name}: sample {index + 1}"
        return sample_document(self._data[index], self._to_text, place=place)


def sample_document(
    sample: Any, to_text: Callable[[Any], Any], *, place: str
) -> Document | Rejected:
    """Return the document in a sample of a data set, or why there is none."""
    try:
        text = to_text(sample)
    except KeyError as error:
        keys = ", ".join(sorted(map(str, sample)))
        return Rejected(place, f"no key {error.args[0]!r} (keys: {keys})")
    if not isinstance(text, str):
        return Rejected(place, f"the text is a {type(text).__name__}, must be a string")
    return Document(text)


def _permutation(length: int, *, seed: int, epoch: int) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest()
    # A torch generator's seed is signed.
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    return torch.randperm(length, generator=generator)
