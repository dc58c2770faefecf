"""Where a token leaves, by a policy's thresholds and the router logits."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Failing:
    """A threshold that nobody can read: it raises where a token would be held against it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error

    def __ne__(self, other: object) -> bool:
        raise self.error

    __hash__ = None  # type: ignore[assignment]


def exit_of(thresholds: Sequence[float], router_logits: Sequence[float]) -> int:
    """Return the first exit whose threshold is -inf or below its router logit; else the last."""
    pairs = zip(thresholds, router_logits, strict=True)
    leaving = (k for k, (t, z) in enumerate(pairs) if t == -math.inf or z > t)
    return next(leaving, len(thresholds))
