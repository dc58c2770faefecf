"""The numbers that fix a model's shape, exits included.

The module owns the terms exit, exit position and block. Code counts from 0; people are shown the
paper's k = 1..N_V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from nvium_titan.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Every number that fixes the shape of a model.

    N-vium (arXiv:2605.13190), Sec. 4: block k, of b_1..b_{N_V}, ends at layer l_k. The paper
    spaces them evenly; any increasing list is accepted here.
    """

    vocab_size: int
    """Rows of the embedding and of the head; at least the tokenizer's size."""
    dim: int
    """Width d of the residual stream."""
    num_layers: int
    """Transformer layers L."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides num_heads (grouped-query attention)."""
    head_dim: int
    """Width of a head; even, for RoPE."""
    ffn_dim: int
    """Width m of the MLP."""
    rope_theta: float
    """Base of the rotary frequencies (LLaMA-2: 10000)."""
    norm_eps: float
    """Epsilon of every RMSNorm."""
    max_seq_len: int
    """Longest sequence, tokens."""
    tie_embeddings: bool
    """Whether the head is the embedding."""
    exit_layers: tuple[int, ...]
    """Layers run before each early exit: N_V - 1, increasing, each in [1, num_layers - 1]."""
    router_dim: int
    """Width m_r of the routers' bottleneck (paper: about 0.66 d)."""
    adapter_dim: int
    """Width d_a of the adapters (paper: d); 0, no adapter, only with one exit: the dense model."""

    def __post_init__(self) -> None:
        """Check the numbers against each other.

        Raises:
            ConfigError: If one is out of range or two disagree.
        """
        for key in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                    "ffn_dim", "max_seq_len"):  # fmt: skip
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)}: must be at least 1; fix [model]")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                "fix [model]"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}: RoPE needs an even number; fix [model]")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ConfigError(
                f"rope_theta={self.rope_theta}, norm_eps={self.norm_eps}: both must be > 0; "
                "fix [model]"
            )
        _check_exits(self.exit_layers, num_layers=self.num_layers)
        if self.exit_layers and self.router_dim < 1:
            raise ConfigError(
                f"router_dim={self.router_dim}: must be at least 1 with exit_layers="
                f"{list(self.exit_layers)}; fix [nvium]"
            )
        if self.adapter_dim < (1 if self.exit_layers else 0):
            raise ConfigError(
                f"adapter_dim={self.adapter_dim}: must be at least 1 with early exits "
                "(0 only with num_exits = 1); fix [nvium]"
            )

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

    def dense(self) -> ModelShape:
        """Return the same backbone with its final exit alone: no junctions, no adapter."""
        return replace(self, exit_layers=(), router_dim=0, adapter_dim=0)


def resolve_exit_layers(
    *, num_layers: int, num_exits: int, exit_layers: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the early exit positions for the two keys of `[nvium]`.

    Args:
        num_layers: Transformer layers.
        num_exits: Exits N_V, the final one included.
        exit_layers: Early exit positions, or None for the paper's even split, l_k = k L / N_V.

    Raises:
        ConfigError: If the two disagree, or either is impossible.
    """
    if exit_layers is not None:
        _check_exits(exit_layers, num_layers=num_layers)
        if len(exit_layers) + 1 != num_exits:
            raise ConfigError(
                f"exit_layers={list(exit_layers)} makes {len(exit_layers) + 1} exits with the "
                f"final one, but num_exits={num_exits}; fix [nvium]"
            )
        return tuple(exit_layers)
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
    return tuple(num_layers * k // num_exits for k in range(1, num_exits))


def _check_exits(exit_layers: Sequence[int], *, num_layers: int) -> None:
    shown = list(exit_layers)
    for position in shown:
        if not 1 <= position <= num_layers - 1:
            raise ConfigError(
                f"exit_layers={shown}: {position} must lie in [1, {num_layers - 1}] "
                f"(num_layers={num_layers}; the final exit is implied); fix [nvium]"
            )
    if any(a >= b for a, b in pairwise(shown)):
        raise ConfigError(f"exit_layers={shown}: must increase strictly; fix [nvium]")
