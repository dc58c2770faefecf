"""Documents as token ids: what packing and preparing share. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nvium_titan.text.documents import Document, Split, split_of

Ids = npt.NDArray[np.integer[Any]]
"""Token ids of one document, BOS and EOS included; 1-dimensional."""


class Tokens(NamedTuple):
    """A document that was encoded before."""

    ids: Ids
    """All of it; may be a read-only view of a file. Empty if there is no text."""
    split: Split
    """The split its text belongs to."""


class Encoder(Protocol):
    """What packing and preparing ask of a tokenizer."""

    @property
    def kind(self) -> str:
        """`byte`, `sentencepiece` or `hf`."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that starts a document, if there is one."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the ids of a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` alone."""
        ...


def encode_document(document: Document | Tokens, tokenizer: Encoder) -> Ids:
    """Return the ids of a document, BOS and EOS included; none if it has no text."""
    if isinstance(document, Tokens):
        return document.ids
    ids = tokenizer.encode(document.text) if document.text.strip() else []
    if ids:
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        eos = [tokenizer.eos_id] if document.is_end and tokenizer.eos_id is not None else []
        ids = [*bos, *ids, *eos]
    return np.array(ids, dtype=np.int64)


def split_of_document(document: Document | Tokens) -> Split:
    """Return the split that a document belongs to."""
    return document.split if isinstance(document, Tokens) else split_of(document.text)
