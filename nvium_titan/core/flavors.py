"""Named sizes, and the dense twin's width: plain numbers, nothing here needs torch.

N-vium (arXiv:2605.13190), App. A: backbone shapes follow Pythia's widths and depths, routers are
0.66 d wide, rounded up to a multiple of 8 (which gives the published configurations, but for 688 at
width 1024), adapters d wide. `dense-768x24` is the parameter-matched baseline of
`quadrivium-768x24`: the same depth, one exit, no adapter, an MLP wide enough for the parameters.
"""

from __future__ import annotations

import dataclasses
import math
import re

from nvium_titan.core.cost import count_params
from nvium_titan.core.shape import ModelShape, resolve_exit_layers
from nvium_titan.errors import ConfigError, nearest

_ROUND_TO = 8


def _round_up(value: float) -> int:
    return math.ceil(value / _ROUND_TO) * _ROUND_TO


def router_dim_of(dim: int) -> int:
    """Return the routers' width m_r for a model width: 0.66 d rounded up to a multiple of 8."""
    return _round_up(0.66 * dim)


def _shape(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    ffn_dim: int,
    num_kv_heads: int | None = None,
    vocab_size: int = 32000,
    num_exits: int = 4,
    exit_layers: tuple[int, ...] | None = None,
    router_dim: int | None = None,
    max_seq_len: int = 1024,
) -> ModelShape:
    return ModelShape(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=dim // num_heads,
        ffn_dim=ffn_dim,
        rope_theta=10000.0,
        norm_eps=1e-6,
        max_seq_len=max_seq_len,
        tie_embeddings=False,
        exit_layers=resolve_exit_layers(
            num_layers=num_layers, num_exits=num_exits, exit_layers=exit_layers
        ),
        router_dim=router_dim or router_dim_of(dim),
        adapter_dim=dim,
    )


def _named_shapes() -> dict[str, ModelShape]:
    named = {
        "debug": _shape(
            dim=64, num_layers=6, num_heads=4, ffn_dim=176, num_exits=3, vocab_size=264,
        ),
        "demo": _shape(dim=64, num_layers=12, num_heads=2, ffn_dim=176, vocab_size=264),
        # The paper's Table 2: depth at width 768, then width at 24 layers.
        "quadrivium-768x6": _shape(
            dim=768, num_layers=6, num_heads=12, ffn_dim=2048, exit_layers=(1, 2, 4)
        ),
        **{
            f"quadrivium-768x{depth}": _shape(
                dim=768, num_layers=depth, num_heads=12, ffn_dim=2048
            )
            for depth in (12, 24, 36, 48)
        },
        "quadrivium-128x24": _shape(dim=128, num_layers=24, num_heads=4, ffn_dim=344),
        "quadrivium-256x24": _shape(dim=256, num_layers=24, num_heads=8, ffn_dim=688),
        "quadrivium-512x24": _shape(dim=512, num_layers=24, num_heads=8, ffn_dim=1368),
        "quadrivium-1024x24": _shape(
            dim=1024, num_layers=24, num_heads=16, ffn_dim=2736, router_dim=688
        ),
        "quadrivium-1536x24": _shape(dim=1536, num_layers=24, num_heads=24, ffn_dim=4096),
        # The paper's App. G: 1.5B.
        "quadrivium-1536x48": _shape(dim=1536, num_layers=48, num_heads=12, ffn_dim=4096),
        # Shapes to grow into.
        "quadrivium-3b": _shape(
            dim=2560, num_layers=36, num_heads=20, ffn_dim=6912, max_seq_len=4096
        ),
        "quadrivium-8b": _shape(
            dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, max_seq_len=4096
        ),
    }  # fmt: skip
    return named | {
        f"dense-{name.removeprefix('quadrivium-')}": dense_twin(shape)
        for name, shape in named.items()
    }


def dense_twin(shape: ModelShape) -> ModelShape:
    """Return the parameter-matched dense baseline of a shape.

    N-vium (arXiv:2605.13190), Sec. 5: the same depth, a slightly wider MLP. The width is solved
    from the parameter count and rounded up: to a multiple of 8, which gives the paper's widths,
    unless that adds over 0.3% to a small model.
    """
    bare = shape.dense()
    missing = sum(count_params(shape).values()) - sum(count_params(bare).values())
    width = shape.ffn_dim + missing / (3 * shape.dim * shape.num_layers)
    twin = dataclasses.replace(bare, ffn_dim=_round_up(width))
    excess = sum(count_params(twin).values()) / sum(count_params(shape).values()) - 1
    return twin if excess <= 0.003 else dataclasses.replace(bare, ffn_dim=math.ceil(width))


def parse_shape(size: str, *, num_exits: int = 4) -> ModelShape:
    """Return the numbers of a shape WIDTHxDEPTH, such as "768x24".

    A width and depth of the paper give its model; others follow its rules: heads of 64 (32 below
    width 512), an MLP of 8/3 of the width rounded up to a multiple of 8, a vocabulary of 32000.

    Args:
        size: Width and layers.
        num_exits: Exits, the final one included, evenly spaced.

    Raises:
        ConfigError: If it is not such a shape, or the exits do not divide the layers.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", size)
    dim, num_layers = map(int, match.groups()) if match else (0, 0)
    head_dim = 64 if dim >= 512 else 32
    if dim < 1 or dim % head_dim or num_layers < 1:
        raise ConfigError(
            f"shape {size!r}: must be WIDTHxDEPTH, such as 768x24, the width a multiple of 64 "
            "(of 32 below 512)"
        )
    named = _named_shapes().get(f"quadrivium-{size}")
    if named is not None and num_exits == named.num_exits:
        return named
    return _shape(
        dim=dim,
        num_layers=num_layers,
        num_heads=named.num_heads if named else dim // head_dim,
        ffn_dim=_round_up(8 * dim / 3),
        num_exits=num_exits,
    )


def flavor_names() -> list[str]:
    """Return every flavor, in the order of the table."""
    return list(_named_shapes())


def flavor_shape(name: str) -> ModelShape:
    """Return the numbers of a flavor.

    Raises:
        ConfigError: If there is no such flavor; the message names the nearest.
    """
    named = _named_shapes()
    if name not in named:
        raise ConfigError(
            f"unknown flavor '{name}'{nearest(name, named)}; fix [model] flavor (--flavor)"
        )
    return named[name]
