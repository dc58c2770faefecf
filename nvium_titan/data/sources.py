"""Where documents come from in training: an order for each epoch, a split, a place to resume.

A source gives the documents of one epoch from its present position on. Documents by index (files,
the demo corpus, downloaded data sets) are shuffled anew in every epoch, the first included, by the
seed alone; a stream from the hub comes in its own order.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch

from nvium_titan.data.documents import Document, Rejected, Store

logger = logging.getLogger(__name__)

Split = Literal["train", "validation", "all"]
VALIDATION_PERCENT = 5
"""Share of the documents that the split "validation" gets and "train" does not."""


class Source(Protocol):
    """Documents in the order of training."""

    name: str
    """What error messages call it."""
    is_sharded: bool
    """Whether this rank sees its own documents only."""

    def documents(self) -> Iterator[Document]:
        """Yield the rest of this epoch; the position moves before each document is yielded."""
        ...

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        ...

    def faults(self) -> str:
        """Return a summary of what was set aside so far, empty if nothing was."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...


class Faults:
    """Counts the documents that were set aside; reports the first, the tenth, the hundredth, ..."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._num_reported = 0
        self._first: Rejected | None = None

    def add(self, rejected: Rejected) -> None:
        """Count one."""
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
        """Return the count and the first place and reason, empty if there is none."""
        if self._first is None:
            return ""
        noun = "document" if self._count == 1 else "documents"
        return f"skipped {self._count} {noun}, the first {self._first.place}: {self._first.reason}"


class IndexedSource:
    """Documents of a store, shuffled by seed and epoch."""

    is_sharded = False

    def __init__(self, store: Store, *, name: str, split: Split, seed: int) -> None:
        self.name = name
        self._store = store
        self._split = split
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._faults = Faults(name)

    def documents(self) -> Iterator[Document]:
        """Yield the rest of this epoch; the position moves before each document is yielded."""
        order = _permutation(len(self._store), seed=self._seed, epoch=self._epoch)
        while self._cursor < len(order):
            item = self._store.read(int(order[self._cursor]))
            self._cursor += 1
            if isinstance(item, Rejected):
                self._faults.add(item)
            elif self._split in ("all", split_of(item.text)):
                yield item
        self._faults.report()

    def next_epoch(self) -> None:
        """Go to the start of the next epoch, in a new order."""
        self._epoch += 1
        self._cursor = 0

    def faults(self) -> str:
        """Return a summary of what was set aside so far, empty if nothing was."""
        return self._faults.summary()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._epoch, self._cursor = state["epoch"], state["cursor"]


class StreamSource:
    """A Hugging Face stream, already divided over the ranks."""

    is_sharded = True

    def __init__(self, data: Any, to_text: Callable[[Any], Any], *, name: str) -> None:
        self.name = name
        self._data = data
        self._to_text = to_text
        self._epoch = 0
        self._faults = Faults(name)

    def documents(self) -> Iterator[Document]:
        """Yield the rest of this epoch; the position moves before each document is yielded."""
        for index, sample in enumerate(self._data):
            item = sample_document(sample, self._to_text, place=f"{self.name}: sample {index + 1}")
            if isinstance(item, Rejected):
                self._faults.add(item)
            else:
                yield item
        self._faults.report()

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self._epoch += 1
        self._data.set_epoch(self._epoch)

    def faults(self) -> str:
        """Return a summary of what was set aside so far, empty if nothing was."""
        return self._faults.summary()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch": self._epoch, "data": self._data.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._epoch = state["epoch"]
        self._data.set_epoch(self._epoch)
        self._data.load_state_dict(state["data"])


class SampleStore:
    """A downloaded Hugging Face data set."""

    def __init__(self, data: Any, to_text: Callable[[Any], Any], *, name: str) -> None:
        self._data = data
        self._to_text = to_text
        self._name = name

    def __len__(self) -> int:
        return len(self._data)

    def read(self, index: int) -> Document | Rejected:
        """Return one document, or why it is none."""
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
        return Rejected(place, f"the text is of type {type(text).__name__}, must be a string")
    return Document(text)


def split_of(text: str) -> Split:
    """Return the split that a document belongs to: by its own text, whatever else there is."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "validation" if int.from_bytes(digest) % 100 < VALIDATION_PERCENT else "train"


def _permutation(length: int, *, seed: int, epoch: int) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest()
    # Seeds of a torch generator are signed.
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    return torch.randperm(length, generator=generator)
