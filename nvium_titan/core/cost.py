"""Parameters, FLOPs, bytes and the bandwidth limit of a shape and its exit shares.

N-vium (arXiv:2605.13190), App. F, Eq. for F_N-vium and F_dense. Plain arithmetic: nothing here
needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import ConfigError


def layer_params(shape: ModelShape) -> int:
    """Return the parameters of one transformer layer."""
    attention = shape.dim * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return attention + 3 * shape.dim * shape.ffn_dim + 2 * shape.dim


def adapter_params(shape: ModelShape) -> int:
    """Return the parameters of one adapter (no biases)."""
    return 2 * shape.dim * shape.adapter_dim


def router_params(shape: ModelShape) -> int:
    """Return the parameters of one router: fc1, fc2 and head with biases, and a norm."""
    bottleneck = 2 * shape.dim * shape.router_dim + shape.router_dim + shape.dim
    return bottleneck + shape.dim + 2 * shape.dim + 2


def count_params(shape: ModelShape) -> dict[str, int]:
    """Return the parameters by part; the sum is the paper's Table 2 figure.

    N-vium (arXiv:2605.13190), Table 2 (which counts the embedding and the untied head).
    """
    table = shape.vocab_size * shape.dim
    num_junctions = len(shape.exit_layers)
    return {
        "embedding": table,
        "layers": shape.num_layers * layer_params(shape),
        "norms": (num_junctions + 1) * shape.dim,
        "adapters": (num_junctions + 1) * adapter_params(shape),
        "routers": num_junctions * router_params(shape),
        "lm_head": 0 if shape.tie_embeddings else table,
    }


def forward_flops(shape: ModelShape, *, seq_len: int) -> dict[str, int]:
    """Return the forward FLOPs per token by term, for training at `seq_len` tokens.

    N-vium (arXiv:2605.13190), App. F and Table 4. A multiply-add is 2 FLOPs; attention is counted
    over the whole sequence, without the causal half, as the paper does; norms and the two-row
    router head are left out (under 0.01%). The paper writes 8 d^2 for the attention projections,
    which holds for full heads; grouped-query heads are counted as they are.
    """
    projections = 2 * shape.dim * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return {
        "backbone": shape.num_layers * (projections + 6 * shape.dim * shape.ffn_dim),
        "attention": 4 * shape.num_layers * seq_len * shape.num_heads * shape.head_dim,
        "heads": shape.num_exits * 2 * shape.vocab_size * shape.dim,
        "adapters": shape.num_exits * 4 * shape.dim * shape.adapter_dim,
        "routers": len(shape.exit_layers) * 4 * shape.dim * shape.router_dim,
    }


def weights_read_per_token(shape: ModelShape, exit_shares: Sequence[float]) -> float:
    """Return the mean number of weights that decoding one token must read.

    A block is read whenever a token enters it, however long its piggyback group is; the head and
    one adapter are read once per token. The KV cache is left out (it grows with the context and is
    small beside the weights at the sizes of the paper).

    Args:
        shape: The shape.
        exit_shares: Share of tokens that leave at each exit; they must sum to 1.

    Raises:
        ConfigError: If their number is not the number of exits, or they do not sum to 1.
    """
    if len(exit_shares) != shape.num_exits:
        raise ConfigError(
            f"{len(exit_shares)} exit shares for {shape.num_exits} exits; give one for each "
            "(--exit-probs)"
        )
    if min(exit_shares) < 0 or abs(sum(exit_shares) - 1) > 1e-3:
        raise ConfigError(
            f"exit shares {list(exit_shares)} (--exit-probs): must be >= 0 and sum to 1, not to "
            f"{sum(exit_shares):g}"
        )
    total = float(shape.vocab_size * shape.dim + adapter_params(shape) + shape.dim)
    arrive = 1.0
    for index, block in enumerate(shape.blocks):
        total += arrive * len(block) * layer_params(shape)
        if index < shape.num_exits - 1:
            total += arrive * (router_params(shape) + shape.dim)
        arrive -= exit_shares[index]
    return total


def head_cost(shape: ModelShape) -> float:
    """Return the weights of a head call, its adapter included, over those of a mean block call."""
    junctions = len(shape.exit_layers) * (router_params(shape) + shape.dim)
    blocks = shape.num_layers * layer_params(shape) + junctions
    head = shape.vocab_size * shape.dim + adapter_params(shape) + shape.dim
    return head / (blocks / shape.num_exits)


def limit_speedup(shape: ModelShape, exit_shares: Sequence[float]) -> float:
    """Return the decode speed-up over dense that reading weights allows: the bandwidth limit.

    Dense is the same width and depth without adapters, routers and early exits, read in full for
    every token, in the same dtype.

    Args:
        shape: The shape.
        exit_shares: Share of tokens that leave at each exit; they must sum to 1.

    Raises:
        ConfigError: As `weights_read_per_token`.

    Example:
        The paper's 768 x 24 shape at shares .35, .2, .15, .3 gives 1.50.
    """
    dense = weights_read_per_token(shape.dense(), [1.0])
    return dense / weights_read_per_token(shape, exit_shares)
