"""AdamW and the learning-rate schedule, in the few numbers that a person sets.

torchtitan asks for parameter groups and for warm-up steps. Here a TOML file says `lr = 4e-4`, and
keeps its meaning when `training.steps` changes. The defaults are the paper's (N-vium,
arXiv:2605.13190v1, App. A): AdamW (0.9, 0.95, 1e-8); weight decay 0.1, but none on biases, RMS
norms and embeddings; linear warm-up over 1% of the steps; cosine decay to 10%.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
import tyro
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from typing_extensions import override

from nvium_titan.errors import ConfigError

__all__ = ["AdamW", "LRSchedule", "OptimizerConfig"]

# torchtitan refuses an empty group; every pipeline stage has a norm, so this one never is.
NO_DECAY_PATTERN = r"(bias|norm\.weight|tok_embeddings\.weight)$"
"""Names of the parameters without weight decay."""


class AdamW(OptimizersContainer):
    """AdamW over all parameters, without weight decay on biases, norms and the embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """AdamW's numbers; `kind = "param_groups"` takes torchtitan's list of groups instead."""

        lr: float = 4e-4
        """Peak learning rate, > 0. The paper's falls with the width: 1e-3 (128 to 512), 4e-4
        (768), 3e-4 (1024 and wider), 2e-4 (the 1.5B)."""

        betas: tuple[float, float] = (0.9, 0.95)
        """Decay of the running means of the gradients and of their squares, each in [0, 1)."""

        eps: float = 1e-8
        """Added to the denominator, > 0."""

        weight_decay: float = 0.1
        """Decoupled weight decay, >= 0; none on biases, norms and the embedding."""

        param_groups: Annotated[list[ParamGroupConfig], tyro.conf.Suppress] = field(
            default_factory=list
        )

        def __post_init__(self) -> None:
            if not 0 < self.lr < math.inf:
                raise ConfigError(f"lr={self.lr}: must be a number > 0")
            if not all(0 <= beta < 1 for beta in self.betas):
                raise ConfigError(f"betas={list(self.betas)}: each must be in [0, 1)")
            if not 0 < self.eps < math.inf:
                raise ConfigError(f"eps={self.eps}: must be a number > 0")
            if not 0 <= self.weight_decay < math.inf:
                raise ConfigError(f"weight_decay={self.weight_decay}: must be a number >= 0")

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        def group(pattern: str, weight_decay: float) -> ParamGroupConfig:
            return ParamGroupConfig(
                pattern=pattern,
                optimizer_name="AdamW",
                optimizer_kwargs={
                    "lr": config.lr,
                    "betas": config.betas,
                    "eps": config.eps,
                    "weight_decay": weight_decay,
                },
            )

        groups = [group(NO_DECAY_PATTERN, 0.0), group(r".*", config.weight_decay)]
        super().__init__(replace(config, param_groups=groups), model_parts=model_parts)


OptimizerConfig = Annotated[
    Annotated[AdamW.Config, tyro.conf.subcommand("adamw")]
    | Annotated[OptimizersContainer.Config, tyro.conf.subcommand("param-groups")],
    tyro.conf.AvoidSubcommands,
]
"""Type of the trainer's `optimizer` field; the names are its `kind` in TOML. torchtitan's own
command line takes `--optimizer.lr` without naming the kind first."""


class LRSchedule(LRSchedulersContainer):
    """Linear warm-up, a constant phase if `decay_ratio` leaves one, then decay."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """torchtitan's curve, with a warm-up that may scale with the run.

        The curve is `total_steps` long; None: `training.steps`. Its last `decay_ratio` decays;
        None: all that follows the warm-up, 0: nothing, the rate stays at its peak.
        """

        warmup_steps: int | None = None
        """Steps of linear warm-up, >= 0; None: `warmup_ratio` of the curve."""

        warmup_ratio: float = 0.01
        """Fraction of the curve that warms up, in [0, 1]; at least one step unless 0. Counts while
        `warmup_steps` is None."""

        decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
        """Shape of the decay."""

        min_lr_factor: float = 0.1
        """Where the decay ends, as a fraction of the peak, in [0, 1]."""

        def __post_init__(self) -> None:
            for key in ("warmup_steps", "total_steps"):
                value = getattr(self, key)
                if value is not None and value < 0:
                    raise ConfigError(f"{key}={value}: must be >= 0")
            for key in ("warmup_ratio", "decay_ratio", "min_lr_factor"):
                value = getattr(self, key)
                if value is not None and not 0 <= value <= 1:
                    raise ConfigError(f"{key}={value}: must be in [0, 1]")

        def resolve(self, training_steps: int) -> LRSchedulersContainer.Config:
            """Return torchtitan's config for a run of this length.

            Args:
                training_steps: Steps of the run, >= 1.

            Raises:
                ConfigError: If the phases do not fit into the run.
            """
            # torchtitan would warn and shorten them, or run past the end of the curve.
            total = training_steps if self.total_steps is None else self.total_steps
            if training_steps < 1:
                raise ConfigError(f"[training] steps={training_steps}: must be >= 1")
            if training_steps > total:
                raise ConfigError(
                    f"[training] steps={training_steps} is more than [lr_scheduler] "
                    f"total_steps={total}, where the learning rate's curve ends; raise total_steps"
                )
            warmup = self.warmup_steps
            if warmup is None:
                warmup = max(1, round(self.warmup_ratio * total)) if self.warmup_ratio else 0
            if warmup > total:
                raise ConfigError(
                    f"[lr_scheduler] warmup_steps={warmup} is more than the {total} steps of the "
                    "learning-rate curve; lower it, or use warmup_ratio"
                )
            decay = 0 if self.decay_ratio is None else round(self.decay_ratio * total)
            if warmup + decay > total:
                raise ConfigError(
                    f"[lr_scheduler] {warmup} steps of warm-up and decay_ratio={self.decay_ratio} "
                    f"({decay} steps) are more than the {total} steps of the learning-rate curve; "
                    "leave decay_ratio out to decay from the warm-up to the end"
                )
            return LRSchedulersContainer.Config(
                warmup_steps=warmup,
                total_steps=total,
                decay_ratio=self.decay_ratio,
                decay_type=self.decay_type,
                min_lr_factor=self.min_lr_factor,
            )

        @override
        def build(
            self, *, optimizers: OptimizersContainer, training_steps: int
        ) -> LRSchedulersContainer:
            curve = self.resolve(training_steps)
            return curve.build(optimizers=optimizers, training_steps=training_steps)
