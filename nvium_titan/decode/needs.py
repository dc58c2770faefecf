"""What a sequence asks for while it chooses tokens, so that one driver can serve many at once.

Choosing is written as a generator: it yields a need, is sent the answer, and knows nothing of the
other sequences. Served at once, that is decoding one sequence; gathered, it is a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nvium_titan.decode.sampling import Draw


class NeedBlock(NamedTuple):
    """This sequence's rows owed to a block must be run, and perhaps the router behind it.

    The answer is z_k of the last token, NaN without the router.
    """

    block_index: int
    with_router: bool


class NeedLogits(NamedTuple):
    """Logits of the last token at some exits; the answer has shape (exits, V)."""

    exit_indices: tuple[int, ...]


class NeedToken(NamedTuple):
    """All that the next token needs, at once, where the model can run it as a whole.

    The answer is a `TokenRun`, or None where this token must be run in pieces.
    """

    thresholds: list[float]
    """For each junction, the router logit above which the token leaves; see `exit_thresholds`."""
    reads_router: bool
    """Whether the routers are run."""
    draw: Draw
    """How the token is drawn from the logits of its exit; a model may leave that to the asker."""
    following: Callable[[], NeedToken | None] | None = None
    """What the next token will need, if the one drawn here is fed: a model may begin with it before
    it knows this one. None if that is not known, or not wanted."""


Need = NeedToken | NeedBlock | NeedLogits
