"""Adaptive beta: raise the price of depth as long as the mixture is as good as a dense baseline.

N-vium (arXiv:2605.13190), App. G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from nvium_titan.errors import ConfigError, DataError
from nvium_titan.report.records import read_metrics


@dataclass(kw_only=True, slots=True)
class ControllerConfig:
    """How beta follows the gap to a baseline (table `[loss.controller]`)."""

    baseline: str = ""
    """The metrics.jsonl of a dense run with validation; if empty, [loss] beta stays constant."""

    k_up: float = 2.0
    """Rise of beta per nat that the mixture is better than the baseline; >= 0."""

    k_down: float = 4.0
    """Fall of beta per nat that it is worse; >= 0."""

    dead_band: float = 0.005
    """Gap in nats/token within which beta stays; >= 0."""

    max_step: float = 0.2
    """Largest change of beta at one validation; >= 0."""

    min_beta: float = 0.0
    """Lower end of beta; >= 0."""

    max_beta: float = 2.0
    """Upper end of beta; at least min_beta."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a value is out of range.
        """
        for key in ("k_up", "k_down", "dead_band", "max_step", "min_beta"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"[loss.controller] {key}={value}: must be finite and >= 0")
        if not self.min_beta <= self.max_beta < math.inf:
            raise ConfigError(
                f"[loss.controller] max_beta={self.max_beta}: must be finite and at least "
                f"min_beta={self.min_beta}"
            )


def next_beta(beta: float, gap: float, config: ControllerConfig) -> float:
    """Return the beta that follows a validation: a rise ends at max_beta, a fall at min_beta.

    Args:
        beta: The current one.
        gap: Validation loss of the baseline minus that of the mixture, nats/token.
        config: Gains and limits.
    """
    if abs(gap) < config.dead_band or gap == 0:
        return beta
    if gap > 0:
        return min(beta + min(config.k_up * gap, config.max_step), config.max_beta)
    return max(beta + max(config.k_down * gap, -config.max_step), config.min_beta)


class Baseline:
    """The validation losses of a dense run."""

    def __init__(self, losses: dict[int, float]) -> None:
        self._losses = losses

    @classmethod
    def read(cls, path: Path | str) -> Baseline:
        """Read a run's metrics.jsonl.

        Raises:
            DataError: If it is missing, malformed or has no validation in it.
        """
        rows = [row for row in read_metrics(Path(path)) if row.split == "val"]
        if not rows:
            raise DataError(
                f"{path}: no validation in it; [loss.controller] baseline must be the "
                "metrics.jsonl of a run with [validator] enable = true"
            )
        return cls({row.step: row.mixture_nll for row in rows})

    def at(self, step: int) -> float:
        """Return the loss at the nearest step, the first of two equally near, in nats/token."""
        return self._losses[min(self._losses, key=lambda known: abs(known - step))]
