"""The tables `[model]`, `[nvium]` and `[float8]`: a shape, and products in float8."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from nvium_titan.core.flavors import flavor_shape, router_dim_of
from nvium_titan.core.shape import ModelShape, resolve_exit_layers
from nvium_titan.errors import ConfigError

Trainable = Literal["all", "junctions"]


@dataclass(kw_only=True, slots=True)
class ModelTable:
    """Table `[model]`: a named size, with any of its numbers changed."""

    flavor: str = "debug"
    """Named size to start from; `nvium info --list` lists them."""
    vocab_size: int | None = None
    """Rows of embedding and head; at least the tokenizer's size."""
    dim: int | None = None
    """Width of the residual stream."""
    num_layers: int | None = None
    """Transformer layers."""
    num_heads: int | None = None
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads; divides num_heads."""
    head_dim: int | None = None
    """Width of a head; default dim / num_heads when either is changed."""
    ffn_dim: int | None = None
    """Width of the MLP."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    norm_eps: float | None = None
    """Epsilon of every RMSNorm."""
    max_seq_len: int | None = None
    """Longest sequence, in tokens; at least training.seq_len."""
    tie_embeddings: bool | None = None
    """Whether the head shares the embedding's weight."""


@dataclass(kw_only=True, slots=True)
class NviumTable:
    """Table `[nvium]`: where the exits are, and how wide their parts."""

    num_exits: int | None = None
    """Number of exits N_V, with the final one; 1 is the dense transformer."""
    exit_layers: list[int] | None = None
    """Layers run before each early exit; default: the even split."""
    router_dim: int | None = None
    """Width of the routers' bottleneck; default: 0.66 dim, rounded up to a multiple of 8."""
    adapter_dim: int | None = None
    """Width of the adapters; default: dim; 0, only with num_exits = 1: the plain Llama."""
    trainable: Trainable = "all"
    """"junctions" trains only the norm, router and adapter of each early exit; layers and final
    exit stay as loaded, to the bit."""


@dataclass(kw_only=True, slots=True)
class Float8Table:
    """Table `[float8]`: matrix products of the layers in float8, through torchao."""

    enable: bool = False
    """Whether to multiply in float8; needs the extra `float8` and NVIDIA SM89 or later."""
    emulate: bool = False
    """Compute what float8 would give, slowly, on any device; not with [compile]."""
    skip: list[str] = field(default_factory=lambda: ["lm_head", "junction", "norm.adapter"])
    """Linear layers with one of these in their names stay as they are; default: head, routers and
    adapters."""


def resolve_shape(model: ModelTable, nvium: NviumTable) -> ModelShape:
    """Return the shape that two tables make of a flavor.

    Args:
        model: Table `[model]`.
        nvium: Table `[nvium]`.

    Raises:
        ConfigError: If a number is impossible or two disagree.
    """
    base = flavor_shape(model.flavor)
    changed = {key: value for key, value in asdict(model).items() if value is not None}
    del changed["flavor"]
    numbers = asdict(base) | changed
    dim, num_layers, num_heads = (numbers[key] for key in ("dim", "num_layers", "num_heads"))
    if model.head_dim is None and (dim, num_heads) != (base.dim, base.num_heads):
        if dim % num_heads:
            raise ConfigError(
                f"num_heads={num_heads} does not divide dim={dim}; fix [model] or set head_dim"
            )
        numbers["head_dim"] = dim // num_heads
    if model.num_kv_heads is None and base.num_kv_heads == base.num_heads:
        numbers["num_kv_heads"] = num_heads
    exit_layers, num_exits = nvium.exit_layers, nvium.num_exits
    if exit_layers is None and num_exits is None and num_layers == base.num_layers:
        exit_layers = list(base.exit_layers)
    if num_exits is None:
        num_exits = len(base.exit_layers if exit_layers is None else exit_layers) + 1
    exits = resolve_exit_layers(num_layers=num_layers, num_exits=num_exits, exit_layers=exit_layers)
    router_dim, adapter_dim = nvium.router_dim, nvium.adapter_dim
    if router_dim is None:
        is_kept = base.router_dim and dim == base.dim
        router_dim = base.router_dim if is_kept else router_dim_of(dim)
    if adapter_dim is None:
        adapter_dim = dim if base.adapter_dim or exits else 0
    numbers |= {
        "exit_layers": exits,
        "router_dim": router_dim if exits else 0,
        "adapter_dim": adapter_dim,
    }
    return ModelShape(**numbers)
