"""Exit policies: who decides at a junction whether the token leaves.

Only `SampledRouter` with temperature 1 samples the model's own mixture. The others sample a law
that is named here, and say so in `law`. A policy has no state: what it answers depends on its
arguments alone, so one object may serve any number of sequences.
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
        """Whether the router is to be run and read on the host; if not, `leaves` gets NaN."""

    @property
    def router_temperature(self) -> float | None:
        """What divides z_k where the exit is drawn from the routers, so that a mixture exists.

        None if the policy has no mixture.
        """

    def leaves(
        self, junction_index: int, *, position: int, router_logit: float, uniform: float
    ) -> bool:
        """Return whether the token leaves here.

        Args:
            junction_index: From 0; never the last exit, where everybody leaves.
            position: Position of the token being chosen.
            router_logit: z_k, exit minus continue; NaN if the router was not run.
            uniform: The junction's uniform number, in (0, 1).
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRouter:
    """Leave with probability w_k = sigmoid(z_k / temperature); the default.

    N-vium (arXiv:2605.13190), Sec. 4.2 and App. B.2: with temperature 1 the token is an exact
    sample of pi_mix. Another temperature samples a mixture with other weights.
    """

    temperature: float = 1.0
    """Divides the router logits; positive and finite."""

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
        """See `ExitPolicy`."""
        if self.temperature == 1:
            return "exact mixture"
        return f"approximate: mixture reweighted by router temperature {self.temperature:g}"

    @property
    def reads_router(self) -> bool:
        """See `ExitPolicy`."""
        return True

    @property
    def router_temperature(self) -> float | None:
        """See `ExitPolicy`."""
        return self.temperature

    def leaves(
        self, junction_index: int, *, position: int, router_logit: float, uniform: float
    ) -> bool:
        """See `ExitPolicy`."""
        return uniform < sigmoid(router_logit / self.temperature)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterGreedy:
    """Leave at the first junction with w_k > 1/2: what the authors' code does by default.

    Not the mixture: at temperature 0 the token is argmax pi_k of that exit, not argmax pi_mix.
    """

    @property
    def law(self) -> str:
        """See `ExitPolicy`."""
        return "approximate: the first exit with w > 1/2"

    @property
    def reads_router(self) -> bool:
        """See `ExitPolicy`."""
        return True

    @property
    def router_temperature(self) -> float | None:
        """See `ExitPolicy`."""
        return None

    def leaves(
        self, junction_index: int, *, position: int, router_logit: float, uniform: float
    ) -> bool:
        """See `ExitPolicy`."""
        return router_logit > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedExit:
    """Leave at one exit, always: samples pi_k."""

    exit_index: int
    """From 0; an index past the junctions means the last exit."""

    @property
    def law(self) -> str:
        """See `ExitPolicy`."""
        return f"approximate: exit {self.exit_index + 1} alone"

    @property
    def reads_router(self) -> bool:
        """See `ExitPolicy`."""
        return False

    @property
    def router_temperature(self) -> float | None:
        """See `ExitPolicy`."""
        return None

    def leaves(
        self, junction_index: int, *, position: int, router_logit: float, uniform: float
    ) -> bool:
        """See `ExitPolicy`."""
        return junction_index == self.exit_index


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedExits:
    """Leave where a script says; for experiments, benchmarks and tests."""

    exit_indices: tuple[int, ...]
    """Exit of each new token, repeated for ever; past the junctions means the last exit."""

    first_position: int = 0
    """Position of the token that takes the first entry."""

    runs_router: bool = False
    """Also run and read every router on the way, as sampling would, so that its cost is paid."""

    @property
    def law(self) -> str:
        """See `ExitPolicy`."""
        return "approximate: scripted exits"

    @property
    def reads_router(self) -> bool:
        """See `ExitPolicy`."""
        return self.runs_router

    @property
    def router_temperature(self) -> float | None:
        """See `ExitPolicy`."""
        return None

    def leaves(
        self, junction_index: int, *, position: int, router_logit: float, uniform: float
    ) -> bool:
        """See `ExitPolicy`."""
        script = self.exit_indices
        return junction_index == script[(position - self.first_position) % len(script)]


def exit_thresholds(
    policy: ExitPolicy, *, position: int, uniforms: Sequence[float]
) -> list[float] | None:
    """Return, for each junction, the router logit above which the token leaves there.

    -inf where it leaves and +inf where it goes on whatever the router says. The decision is that of
    `leaves`, before a router has run: u < sigmoid(z / T) is z > T log(u / (1 - u)).

    Args:
        policy: None is returned for a policy that is not one of this module.
        position: Position of the token being chosen.
        uniforms: The uniform number of each junction.
    """
    if type(policy) is SampledRouter:
        return [policy.temperature * (math.log(u) - math.log1p(-u)) for u in uniforms]
    if type(policy) is RouterGreedy:
        return [0.0] * len(uniforms)
    if type(policy) in (FixedExit, ScriptedExits):
        return [
            -math.inf
            if policy.leaves(index, position=position, router_logit=math.nan, uniform=u)
            else math.inf
            for index, u in enumerate(uniforms)
        ]
    return None


def sigmoid(z: float) -> float:
    """Return 1 / (1 + exp(-z)) without overflow; 0 and 1 at -inf and +inf."""
    if z >= 0:
        return 1 / (1 + math.exp(-z))
    e = math.exp(z)
    return e / (1 + e)


def log_sigmoid(z: float) -> float:
    """Return log(1 / (1 + exp(-z))) without overflow; -inf at -inf, 0 at +inf."""
    return min(z, 0.0) - math.log1p(math.exp(-abs(z)))
