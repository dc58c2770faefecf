"""What a run of a benchmark decodes: prompts of random ids, exits by script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from nvium_titan.decode import ExitPolicy, ScriptedExits


class Workload(NamedTuple):
    """How much to decode, and how often."""

    prompt_tokens: int
    """Tokens of a prompt."""
    new_tokens: int
    """Tokens to make per sequence, at least 2: the first is not counted."""
    num_pairs: int
    """Pairs to run."""
    seed: int
    """Decides weights, prompts, exits and tokens."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, tokens."""
        return self.prompt_tokens + self.new_tokens

    def prompts(self, num_tokens: int) -> list[list[int]]:
        """Return a prompt of random ids below `num_tokens` for each pair."""
        rng = random.Random(self.seed)
        return [
            [rng.randrange(num_tokens) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_pairs)
        ]

    def policies(self, shares: Sequence[float], *, batch: int = 1) -> list[ExitPolicy]:
        """Return policies that force tokens after the first out in these shares; routers still run.

        Args:
            shares: Of the tokens, one per exit; they sum to 1.
            batch: Sequences decoded at once.

        Returns:
            One policy per sequence.
        """
        return [
            ScriptedExits(
                # Each sequence has its own order: exits that coincide would flatter a batch.
                exit_indices=exit_script(shares, self.new_tokens - 1, seed=self.seed + row),
                first_position=self.prompt_tokens + 1,
                runs_router=True,
            )
            for row in range(batch)
        ]


def exit_counts(shares: Sequence[float], num_tokens: int) -> list[int]:
    """Return how many of `num_tokens` leave at each exit: rounded down, largest remainders up.

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
