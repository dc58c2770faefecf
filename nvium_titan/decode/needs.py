"""What a sequence asks for while it chooses tokens, so that one driver can serve many at once.

Choosing is written as a generator: it yields a need, is sent the answer, and knows nothing of the
other sequences. Served at once, that is decoding one sequence; gathered, it is a batch.
"""

from __future__ import annotations

from typing import NamedTuple


class NeedBlock(NamedTuple):
    """This sequence's rows owed to a block must be run, and perhaps the router behind it.

    The answer is z_k of the last token, NaN without the router.
    """

    block_index: int
    with_router: bool


class NeedLogits(NamedTuple):
    """Logits of the last token at some exits; the answer has shape (exits, V)."""

    exit_indices: tuple[int, ...]


class NeedExit(NamedTuple):
    """All that the last token needs where its thresholds decide, as `exit_thresholds` gives them.

    The answer is a `TokenRun`; or None where a token runs in pieces: then these are asked for.
    """

    thresholds: list[float]
    reads_router: bool


Need = NeedExit | NeedBlock | NeedLogits
