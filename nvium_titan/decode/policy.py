"""Exit policies: who decides at a junction whether the token leaves.

A policy answers before any router has run, with a threshold for each junction, so that every
forward can decide where the router logit is: in C, in a graph, or on the host. Only `SampledRouter`
with temperature 1 samples the model's own mixture; what the others sample, `law` names. A policy
has no state: one object may serve any number of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nvium_titan.errors import PromptError


class ExitPolicy(Protocol):
    """Decides at each junction."""

    @property
    def law(self) -> str:
        """What is sampled, for people; starts with "exact" or "approximate"."""

    @property
    def reads_router(self) -> bool:
        """Whether the routers are run; if not, all thresholds are infinite."""

    @property
    def router_temperature(self) -> float | None:
        """What divides z_k where the exit is drawn from the routers, so that a mixture exists.

        None if the policy has no mixture.
        """

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        """Return, for each junction, the router logit z_k above which the token leaves there.

        -inf where it leaves and +inf where it goes on, whatever the router says.

        Args:
            position: Position of the token being chosen.
            uniforms: The uniform number of each junction, in (0, 1).
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRouter:
    """Leave with probability w_k = sigmoid(z_k / temperature); the default.

    N-vium (arXiv:2605.13190), Sec. 4.2 and App. B.2: with temperature 1 the token is an exact
    sample of pi_mix. Another temperature samples a mixture with other weights.
    """

    temperature: float = 1.0
    """Divides the router logits; positive and finite."""

    reads_router = True

    def __post_init__(self) -> None:
        """Check the temperature.

        Raises:
            PromptError: If it is not positive and finite.
        """
        if not 0 < self.temperature < math.inf:
            raise PromptError(
                f"router temperature={self.temperature}: must be positive and finite; "
                "the limit 0 is the router-greedy policy"
            )

    @property
    def law(self) -> str:
        """What is sampled."""
        if self.temperature == 1:
            return "exact mixture"
        return f"approximate: mixture reweighted by router temperature {self.temperature:g}"

    @property
    def router_temperature(self) -> float | None:
        """The temperature."""
        return self.temperature

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        """Return the thresholds: u < sigmoid(z / T) is z > T log(u / (1 - u))."""
        return [self.temperature * (math.log(u) - math.log1p(-u)) for u in uniforms]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterGreedy:
    """Leave at the first junction with w_k > 1/2: what the authors' code does by default.

    Not the mixture: at temperature 0 the token is argmax pi_k of that exit, not argmax pi_mix.
    """

    law = "approximate: the first exit with w > 1/2"
    reads_router = True
    router_temperature = None

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        """Return the thresholds: w_k > 1/2 is z_k > 0."""
        return [0.0] * len(uniforms)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedExit:
    """Leave at one exit, always: samples pi_k."""

    exit_index: int
    """From 0; an index past the junctions means the last exit."""

    reads_router = False
    router_temperature = None

    @property
    def law(self) -> str:
        """What is sampled."""
        return f"approximate: exit {self.exit_index + 1} alone"

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        """Return the thresholds, all infinite."""
        return forced_thresholds(self.exit_index, len(uniforms))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedExits:
    """Leave where a script says; for experiments, benchmarks and tests."""

    exit_indices: tuple[int, ...]
    """Exit of each new token, repeated for ever; past the junctions means the last exit."""

    first_position: int = 0
    """Position of the token that takes the first entry."""

    runs_router: bool = False
    """Also run and read every router on the way, as sampling would, so that its cost is paid."""

    law = "approximate: scripted exits"

    def __post_init__(self) -> None:
        """Check the script.

        Raises:
            PromptError: If it is empty or names a negative exit.
        """
        if not self.exit_indices or min(self.exit_indices) < 0:
            raise PromptError(
                f"exit_indices={self.exit_indices}: must be one exit or more, each at least 0"
            )

    router_temperature = None

    @property
    def reads_router(self) -> bool:
        """Whether the routers are run."""
        return self.runs_router

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        """Return the thresholds, all infinite."""
        script = self.exit_indices
        exit_index = script[(position - self.first_position) % len(script)]
        return forced_thresholds(exit_index, len(uniforms))


def forced_thresholds(exit_index: int, num_junctions: int) -> list[float]:
    """Return the thresholds that let a token leave at one exit only."""
    return [-math.inf if index == exit_index else math.inf for index in range(num_junctions)]
