"""`Router`, `Adapter`, `Junction`, `AdaptedNorm`: what stands behind a block.

Shapes: B sequences, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.protocols.module import Module

from nvium_titan.core.mixture import at_least_float32


class Router(Module):
    """Scores leaving at a junction.

    N-vium (arXiv:2605.13190), App. A, "Architecture": a bottleneck MLP of width floor(0.66 d), then
    a projection to two logits. From the authors' code: GELU is exact, all three projections have
    biases, and an RMSNorm stands before the last.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Layers of the router, named as they run."""

        fc1: Linear.Config
        fc2: Linear.Config
        norm: RMSNorm.Config
        head: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc1 = config.fc1.build()
        self.fc2 = config.fc2.build()
        self.norm = config.norm.build()
        self.head = config.head.build()

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the router logit z = exit minus continue, shape (B, T), float32.

        Args:
            hidden_BTD: The junction's normalised hidden state.
        """
        rows_BT2 = self.head(self.norm(self.fc2(F.gelu(self.fc1(hidden_BTD)))))
        rows_BT2 = at_least_float32(rows_BT2)
        return rows_BT2[..., 1] - rows_BT2[..., 0]


class Adapter(Module):
    """Maps a normalised hidden state to what the shared head reads: o = n + W_out silu(W_in n).

    N-vium (arXiv:2605.13190), Sec. 4 and App. A. It starts as the identity (W_out = 0). That it is
    residual stands in the authors' code, not in the paper.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The two projections, without biases."""

        fc_in: Linear.Config
        fc_out: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc_in = config.fc_in.build()
        self.fc_out = config.fc_out.build()

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the exit state o, shape (B, T, D), for a normalised hidden state."""
        return hidden_BTD + self.fc_out(F.silu(self.fc_in(hidden_BTD)))


class Junction(Module):
    """What stands behind an early exit's block: norm, router, adapter."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The three parts."""

        norm: RMSNorm.Config
        router: Router.Config
        adapter: Adapter.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = config.norm.build()
        self.router = config.router.build()
        self.adapter = config.adapter.build()

    def forward(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exit state o (B, T, D) and the router logit z (B, T) of a residual stream."""
        normed_BTD = self.norm(hidden_BTD)
        return self.adapter(normed_BTD), self.router(normed_BTD)


class AdaptedNorm(Module):
    """The final exit: norm and adapter, without a router (w_{N_V} = 1)."""

    # In the place of torchtitan's root norm, so that FSDP, pipeline split and sharding take the
    # final adapter along with it.

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The two parts."""

        norm: RMSNorm.Config
        adapter: Adapter.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = config.norm.build()
        self.adapter = config.adapter.build()

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the final exit state o, shape (B, T, D)."""
        return self.adapter(self.norm(hidden_BTD))
