"""Forced exits: a script whose shares are as close to the wanted ones as whole tokens allow."""

from __future__ import annotations

import random
from collections.abc import Sequence


def exit_counts(shares: Sequence[float], num_tokens: int) -> list[int]:
    """Return how many of `num_tokens` leave at each exit: rounded down, the largest rests get one.

    Args:
        shares: Wanted share of each exit; they sum to 1.
        num_tokens: Tokens in all.

    Example:
        Shares .35, .2, .15, .3 of 10 tokens give 4, 2, 1, 3.
    """
    counts = [int(share * num_tokens + 1e-9) for share in shares]
    rests = [share * num_tokens - count for share, count in zip(shares, counts, strict=True)]
    by_rest = sorted(range(len(shares)), key=lambda index: (-round(rests[index], 9), index))
    for index in by_rest[: num_tokens - sum(counts)]:
        counts[index] += 1
    return counts


def exit_script(shares: Sequence[float], num_tokens: int, *, seed: int) -> tuple[int, ...]:
    """Return the exit of each token, from 0: exact counts in a seeded random order."""
    counts = exit_counts(shares, num_tokens)
    script = [index for index, count in enumerate(counts) for _ in range(count)]
    random.Random(seed).shuffle(script)
    return tuple(script)
