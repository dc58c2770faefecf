"""What a run of a benchmark decodes: prompts of random ids, exits by script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from nvium_titan.bench.exits import exit_script
from nvium_titan.decode import ExitPolicy, ScriptedExits


class Workload(NamedTuple):
    """How much to decode."""

    prompt_tokens: int
    """Tokens of a prompt."""
    new_tokens: int
    """Tokens to make."""
    num_pairs: int
    """Rounds in which every system runs once."""
    seed: int
    """Decides weights, prompts, exits and tokens."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence."""
        return self.prompt_tokens + self.new_tokens

    def prompts(self, num_tokens: int) -> list[list[int]]:
        """Return a prompt of random ids below `num_tokens` for each pair."""
        rng = random.Random(self.seed)
        return [
            [rng.randrange(num_tokens) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_pairs)
        ]

    def policies(self, shares: Sequence[float], *, batch: int = 1) -> list[ExitPolicy]:
        """Return scripts of exits with these shares behind the first token; routers are run.

        A script has the same counts in another order for each sequence: exits that fell together
        would flatter a batch.
        """
        return [
            ScriptedExits(
                exit_indices=exit_script(shares, self.new_tokens - 1, seed=self.seed + row),
                first_position=self.prompt_tokens + 1,
                runs_router=True,
            )
            for row in range(batch)
        ]
