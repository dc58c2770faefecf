"""Validation on held-out text: torchtitan's loop, with the mixture's figures summed over it all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.components.validate import Validator

from nvium_titan.train.data.agreement import in_step
from nvium_titan.train.data.loader import Batch, TextDataLoader


@dataclass(frozen=True, kw_only=True)
class _InStep:
    """Builds the batches of one pass: the text at most once, as many batches on every rank."""

    config: TextDataLoader.Config
    hosts: dist.ProcessGroup | None

    def build(self, **kwargs: Any) -> Iterator[Batch]:
        return in_step(self.config.build(**kwargs), self.hosts)


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
        # A second pass would count a small set twice.
        self._data = replace(config.dataloader, infinite=False)
        self.bind(None)

    def bind(self, hosts: dist.ProcessGroup | None) -> None:
        """Set the group in which the ranks agree on each batch (`host_group`)."""
        self.dl_config = _InStep(config=self._data, hosts=hosts)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Run the validation set once; log it as split `val`."""
        loss_fn: Any = self.loss_fn
        loss_fn.sums.zero_()
        super().validate(model_parts, step)
        loss_fn.sums.zero_()
