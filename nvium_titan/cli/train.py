"""`nvium train`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train an N-vium or its dense twin from a TOML file, as python -m nvium_titan.train does.

    nvium train --config-file train_configs/debug.toml --training.steps 50

    For several processes: torchrun --nproc_per_node=4 -m nvium_titan.train --config-file FILE.toml
    """
