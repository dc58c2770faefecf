"""Documents as token ids, for packing and for preparing."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nvium_titan.text.documents import Document, Split, split_of

Ids = npt.NDArray[np.integer[Any]]
"""Token ids of one document, BOS and EOS included; 1-dimensional."""


class Tokens(NamedTuple):
    """An encoded document."""

    ids: Ids
    """Its ids, possibly a read-only view of a file; empty if it has no text."""
    split: Split
    """The split that its text belongs to."""


class Encoder(Protocol):
    """The part of `text.tokenizer.Tokenizer` that packing and preparing need."""

    @property
    def kind(self) -> str:
        """`byte`, `sentencepiece` or `hf`."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id, plus one."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that starts a document, if there is one."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the ids of a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without BOS and EOS."""
        ...


def encode_document(document: Document | Tokens, tokenizer: Encoder) -> Ids:
    """Return the ids of a document, with BOS and EOS; none if it has no text."""
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
