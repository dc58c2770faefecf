"""What a sequence asks for while it chooses tokens, so that one driver can serve many at once.

Choosing is written as a generator: it yields a need, is sent the answer, and knows nothing of the
other sequences. Served at once, that is decoding one sequence; gathered, it is a batch.
"""

from __future__ import annotations

from typing import NamedTuple


class NeedBlock(NamedTuple):
    """This sequence's rows owed to a block must be run; the answer is None."""

    block_index: int


class NeedRouter(NamedTuple):
    """z_k of the last token; the answer is a float."""

    junction_index: int


class NeedLogits(NamedTuple):
    """Logits of the last token at some exits; the answer has shape (exits, V)."""

    exit_indices: tuple[int, ...]


Need = NeedBlock | NeedRouter | NeedLogits
