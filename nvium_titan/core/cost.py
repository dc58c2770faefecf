"""Parameters, FLOPs, bytes and the bandwidth limit of a shape and its exit shares.

N-vium (arXiv:2605.13190), App. F, Eq. for F_N-vium and F_dense. Plain arithmetic: nothing here
needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvium_titan.core.shape import ExitPlan
from nvium_titan.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Every number that fixes the shape of a model."""

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
    """Early exit positions, N_V - 1 of them."""
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
        if self.exit_layers and self.router_dim < 1:
            raise ConfigError(f"router_dim={self.router_dim}: must be at least 1; fix [nvium]")
        if self.adapter_dim < (1 if self.exit_layers else 0):
            raise ConfigError(
                f"adapter_dim={self.adapter_dim}: must be at least 1 with early exits "
                "(0 only with num_exits = 1); fix [nvium]"
            )
        _ = self.plan

    @property
    def plan(self) -> ExitPlan:
        """Where the exits are."""
        return ExitPlan(num_layers=self.num_layers, exit_layers=self.exit_layers)


def layer_params(dims: ModelDims) -> int:
    """Return the parameters of one transformer layer."""
    attention = dims.dim * dims.head_dim * (2 * dims.num_heads + 2 * dims.num_kv_heads)
    return attention + 3 * dims.dim * dims.ffn_dim + 2 * dims.dim


def adapter_params(dims: ModelDims) -> int:
    """Return the parameters of one adapter (no biases)."""
    return 2 * dims.dim * dims.adapter_dim


def router_params(dims: ModelDims) -> int:
    """Return the parameters of one router: fc1, fc2 and head with biases, and a norm."""
    bottleneck = 2 * dims.dim * dims.router_dim + dims.router_dim + dims.dim
    return bottleneck + dims.dim + 2 * dims.dim + 2


def count_params(dims: ModelDims) -> dict[str, int]:
    """Return the parameters by part; the sum is the paper's Table 2 figure.

    N-vium (arXiv:2605.13190), Table 2 (which counts the embedding and the untied head).
    """
    table = dims.vocab_size * dims.dim
    num_junctions = len(dims.exit_layers)
    return {
        "embedding": table,
        "layers": dims.num_layers * layer_params(dims),
        "norms": (num_junctions + 1) * dims.dim,
        "adapters": (num_junctions + 1) * adapter_params(dims),
        "routers": num_junctions * router_params(dims),
        "lm_head": 0 if dims.tie_embeddings else table,
    }


def forward_flops(dims: ModelDims, *, seq_len: int) -> dict[str, int]:
    """Return the forward FLOPs per token by term, for training at `seq_len` tokens.

    N-vium (arXiv:2605.13190), App. F and Table 4. A multiply-add is 2 FLOPs; attention is counted
    over the whole sequence, without the causal half, as the paper does; norms and the two-row
    router head are left out (under 0.01%). The paper writes 8 d^2 for the attention projections,
    which holds for full heads; grouped-query heads are counted as they are.
    """
    num_exits = len(dims.exit_layers) + 1
    projections = 2 * dims.dim * dims.head_dim * (2 * dims.num_heads + 2 * dims.num_kv_heads)
    return {
        "backbone": dims.num_layers * (projections + 6 * dims.dim * dims.ffn_dim),
        "attention": 4 * dims.num_layers * seq_len * dims.num_heads * dims.head_dim,
        "heads": num_exits * 2 * dims.vocab_size * dims.dim,
        "adapters": num_exits * 4 * dims.dim * dims.adapter_dim,
        "routers": len(dims.exit_layers) * 4 * dims.dim * dims.router_dim,
    }


def weights_read_per_token(dims: ModelDims, exit_shares: Sequence[float]) -> float:
    """Return the mean number of weights that decoding one token must read.

    A block is read whenever a token enters it, however long its piggyback group is; the head and
    one adapter are read once per token. The KV cache is left out (it grows with the context and is
    small beside the weights at the sizes of the paper).

    Args:
        dims: The shape.
        exit_shares: Share of tokens that leave at each exit; they must sum to 1.

    Raises:
        ConfigError: If their number is not the number of exits, or they do not sum to 1.
    """
    plan = dims.plan
    if len(exit_shares) != plan.num_exits:
        raise ConfigError(
            f"{len(exit_shares)} exit shares for {plan.num_exits} exits; give one for each "
            "(--exit-probs)"
        )
    if min(exit_shares) < 0 or abs(sum(exit_shares) - 1) > 1e-3:
        raise ConfigError(
            f"exit shares {list(exit_shares)} (--exit-probs): must be >= 0 and sum to 1, not to "
            f"{sum(exit_shares):g}"
        )
    total = float(dims.vocab_size * dims.dim + adapter_params(dims) + dims.dim)
    arrive = 1.0
    for index, block in enumerate(plan.blocks):
        total += arrive * len(block) * layer_params(dims)
        if index < plan.num_exits - 1:
            total += arrive * (router_params(dims) + dims.dim)
        arrive -= exit_shares[index]
    return total


def limit_speedup(dims: ModelDims, exit_shares: Sequence[float]) -> float:
    """Return the decode speed-up over dense that reading weights allows: the bandwidth limit.

    Dense is the same width and depth without adapters, routers and early exits, read in full for
    every token, in the same dtype.

    Args:
        dims: The shape.
        exit_shares: Share of tokens that leave at each exit; they must sum to 1.

    Raises:
        ConfigError: As `weights_read_per_token`.

    Example:
        The paper's 768 x 24 shape at shares .35, .2, .15, .3 gives 1.50.
    """
    dense = dims.num_layers * layer_params(dims) + dims.vocab_size * dims.dim + dims.dim
    return dense / weights_read_per_token(dims, exit_shares)
