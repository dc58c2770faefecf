"""Tiny decoders with random weights, and exit scripts for them."""

from __future__ import annotations

import random
from dataclasses import replace

from torch import Tensor

from nvium_titan.bundle import BundleConfig
from nvium_titan.core.shape import ModelShape
from nvium_titan.decode.params import random_tensors


def tiny_config(
    *,
    vocab_size: int = 40,
    exit_layers: tuple[int, ...] = (1, 3),
    num_layers: int = 5,
    num_kv_heads: int = 2,
    num_heads: int = 4,
    final_adapter: bool = True,
    tie: bool = False,
    max_positions: int = 256,
    **widths: int,
) -> BundleConfig:
    """Return a decoder with uneven exits, 32 wide unless `widths` say otherwise; by default with
    grouped-query attention."""
    has_adapter = bool(exit_layers) or final_adapter
    shape = ModelShape(
        vocab_size=vocab_size,
        dim=32,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        ffn_dim=48,
        rope_theta=10000.0,
        norm_eps=1e-5,
        max_seq_len=max_positions,
        tie_embeddings=tie,
        exit_layers=exit_layers,
        router_dim=20 if exit_layers else 0,
        adapter_dim=24 if has_adapter else 0,
    )
    return BundleConfig(
        shape=replace(shape, **widths),
        final_adapter=final_adapter,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )


def lively_tensors(
    config: BundleConfig, *, seed: int = 0, router_gain: float = 3.0
) -> dict[str, Tensor]:
    """Return random weights whose routers really disagree from token to token."""
    tensors = random_tensors(config, seed=seed)
    for name in tensors:
        if name.startswith("router_heads") and name.endswith("weight"):
            tensors[name] *= router_gain
    return tensors


def exit_scripts(num_exits: int, length: int) -> dict[str, tuple[int, ...]]:
    """Return the exit patterns that a deferred cache must survive, by name."""
    last = num_exits - 1
    rng = random.Random(7)
    return {
        "all-early": (0,) * length,
        "all-full": (last,) * length,
        "alternate": tuple(0 if i % 2 else last for i in range(length)),
        "nested": tuple((last, 0, 1, 0, 0, min(1, last))[i % 6] for i in range(length)),
        "fifty-early-then-full": (*(0,) * (length - 1), last),
        "random": tuple(rng.randrange(num_exits) for _ in range(length)),
    }
