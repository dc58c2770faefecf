"""Where the exits are: layer count, exit positions, blocks and depth fractions.

The module owns the terms exit, exit position and block. Code counts from 0; people are shown the
paper's k = 1..N_V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nvium_titan.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitPlan:
    """The blocks b_1..b_{N_V} of a decoder of `num_layers` layers.

    N-vium (arXiv:2605.13190), Sec. 4: block k ends at layer l_k. The paper spaces them evenly;
    any increasing list is accepted here.
    """

    num_layers: int
    """Transformer layers L, at least 1."""

    exit_layers: tuple[int, ...]
    """Layers run before each early exit: N_V - 1, increasing, each in [1, num_layers - 1]."""

    def __post_init__(self) -> None:
        """Check the positions.

        Raises:
            ConfigError: If a position is out of range or the list does not increase.
        """
        if self.num_layers < 1:
            raise ConfigError(f"num_layers={self.num_layers}: must be at least 1; fix [model]")
        shown = list(self.exit_layers)
        for position in shown:
            if not 1 <= position <= self.num_layers - 1:
                raise ConfigError(
                    f"exit_layers={shown}: {position} must lie in [1, {self.num_layers - 1}] "
                    f"(num_layers={self.num_layers}; the final exit is implied); fix [nvium]"
                )
        if any(a >= b for a, b in pairwise(shown)):
            raise ConfigError(f"exit_layers={shown}: must increase strictly; fix [nvium]")

    @classmethod
    def even(cls, *, num_layers: int, num_exits: int) -> ExitPlan:
        """Return the paper's even split, l_k = k L / N_V.

        Raises:
            ConfigError: If `num_exits` does not divide `num_layers`.
        """
        if not 1 <= num_exits <= max(num_layers, 1):
            raise ConfigError(
                f"num_exits={num_exits}: must lie in [1, num_layers={num_layers}]; fix [nvium]"
            )
        if num_layers % num_exits:
            raise ConfigError(
                f"num_exits={num_exits} does not divide num_layers={num_layers}: "
                "list the early exits in exit_layers, for example "
                f"{[max(1, num_layers * k // num_exits) for k in range(1, num_exits)]}; fix [nvium]"
            )
        size = num_layers // num_exits
        return cls(num_layers=num_layers, exit_layers=tuple(range(size, num_layers, size)))

    @property
    def num_exits(self) -> int:
        """Exits N_V, the final one included."""
        return len(self.exit_layers) + 1

    @property
    def block_ends(self) -> tuple[int, ...]:
        """Layers run when block k is done: l_1..l_{N_V}, the last one is `num_layers`."""
        return (*self.exit_layers, self.num_layers)

    @property
    def blocks(self) -> tuple[range, ...]:
        """The layer indices of every block, in order."""
        return tuple(range(a, b) for a, b in pairwise((0, *self.block_ends)))

    @property
    def depth_fractions(self) -> tuple[float, ...]:
        """l_k / L for every exit; the last one is 1."""
        return tuple(end / self.num_layers for end in self.block_ends)

    def balance_targets(self) -> tuple[float, ...]:
        """Return 1 / (N_V - k + 1) for k < N_V: the w_k that make all exits equally likely."""
        return tuple(1 / (self.num_exits - index) for index in range(self.num_exits - 1))


def resolve_exit_plan(
    *, num_layers: int, num_exits: int, exit_layers: Sequence[int] | None
) -> ExitPlan:
    """Return the plan for the two keys of `[nvium]`.

    Args:
        num_layers: Transformer layers.
        num_exits: Exits N_V, the final one included.
        exit_layers: Early exit positions, or None for the even split.

    Raises:
        ConfigError: If the two disagree, or either is impossible.
    """
    if exit_layers is None:
        return ExitPlan.even(num_layers=num_layers, num_exits=num_exits)
    plan = ExitPlan(num_layers=num_layers, exit_layers=tuple(exit_layers))
    if plan.num_exits != num_exits:
        raise ConfigError(
            f"exit_layers={list(exit_layers)} makes {plan.num_exits} exits with the final one, "
            f"but num_exits={num_exits}; fix [nvium]"
        )
    return plan
