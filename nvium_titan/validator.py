"""Validation on held-out text: torchtitan's loop, with the mixture's figures summed over it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torchtitan.components.validate import Validator

from nvium_titan.data.datasets import TextDataLoader


class NviumValidator(Validator):
    """torchtitan's validator; every figure is an exact mean over the valid tokens of all ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """torchtitan's validation settings, over our data."""

        dataloader: TextDataLoader.Config = field(
            default_factory=lambda: TextDataLoader.Config(split="validation", infinite=False)
        )
        """Held-out text; the keys of `[dataloader]`."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        # One pass at most: local text ends on all ranks at once, so a set smaller than `steps` is
        # not counted twice. Streams from the hub may end apart, and start over as in torchtitan.
        is_stream = bool(config.dataloader.dataset)
        self.dl_config = replace(config.dataloader, infinite=is_stream and config.steps != -1)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Run the validation set once and log it as split `val`."""
        loss_fn: Any = self.loss_fn
        loss_fn.sums.zero_()
        super().validate(model_parts, step)
        loss_fn.sums.zero_()
