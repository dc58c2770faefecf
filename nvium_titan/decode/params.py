"""The weights of a decoder, packed for inference, and where they come from.

One load turns the bundle's HF-named tensors into what a decode step wants: q, k and v in one
matrix, gate and up in one matrix, every matrix transposed to (in, out) and contiguous, the two
router rows folded into their difference. Nothing here is written afterwards: any number of
sequences may share one `DecoderParams`.

Shapes: I inputs, O outputs, D width, R router width, V vocabulary rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvium_titan.bundle import BundleConfig, expected_tensors, read_bundle
from nvium_titan.bundle.quantization import SCALE_SUFFIX, dequantize, quantize_int8
from nvium_titan.core.mixture import at_least_float32
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import BundleError


class Matrix(NamedTuple):
    """A linear layer's weights: floating-point numbers, or integers with a scale per output."""

    weight_IO: Tensor
    """Weights, contiguous; for int8 the integers."""
    scale_O: Tensor | None = None
    """Step of each output's integers, float32; None if the weights are floating-point."""


class LayerParams(NamedTuple):
    """One transformer layer."""

    attn_norm_D: Tensor
    """Gain before attention."""
    qkv: Matrix
    """Query, key and value projections side by side."""
    attn_out: Matrix
    """Output projection of attention."""
    mlp_norm_D: Tensor
    """Gain before the MLP."""
    gate_up: Matrix
    """Gate and up projections side by side."""
    down: Matrix
    """Output projection of the MLP."""


class AdapterParams(NamedTuple):
    """The two matrices of an adapter."""

    inner: Matrix
    """The first."""
    outer: Matrix
    """The second."""


class RouterParams(NamedTuple):
    """One router: two linear layers, a norm, and one row that scores leaving."""

    fc1: Matrix
    """First layer."""
    fc1_bias_R: Tensor
    """Its bias."""
    fc2: Matrix
    """Second layer."""
    fc2_bias_D: Tensor
    """Its bias."""
    norm_D: Tensor
    """Gain before the head, at least float32."""
    leave_D: Tensor
    """Exit row minus continue row, at least float32."""
    leave_bias: Tensor
    """Exit bias minus continue bias, shape (1,), at least float32."""


class ExitParams(NamedTuple):
    """What stands between a block's output and the shared head."""

    norm_D: Tensor
    """Gain of the junction's norm; the model's final norm at the last exit."""
    adapter: AdapterParams | None
    """None if this exit has no adapter (a dense model)."""
    router: RouterParams | None
    """None at the last exit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderParams:
    """A decoder's dimensions and packed weights, on one device and in one dtype."""

    config: BundleConfig
    """Dimensions and exit positions. Its `dtype` is that of the file, not of these tensors."""
    embedding_VD: Tensor
    """Token embedding, floating-point."""
    layers: tuple[LayerParams, ...]
    """All layers, bottom up."""
    exits: tuple[ExitParams, ...]
    """All exits, bottom up; the last one is the final exit."""
    head: Matrix
    """The head W_lm that every exit shares, shape (D, V)."""
    num_tokens: int
    """Ids the tokenizer knows, at most V; rows from here on are padding and are never sampled."""

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions and exits."""
        return self.config.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the residual stream, and of the weights unless they are int8."""
        return self.embedding_VD.dtype

    @property
    def is_int8(self) -> bool:
        """Whether the matrices are integers with scales."""
        return self.head.scale_O is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_VD.device

    def dense(self) -> DecoderParams:
        """Return the same with the numbers that int8 weights stand for, in float32."""
        return replace(
            self,
            layers=tuple(map(_dense, self.layers)),
            exits=tuple(map(_dense, self.exits)),
            head=_dense(self.head),
        )

    def without_weights(self) -> DecoderParams:
        """Return what is left once a forward has packed its own copy: dimensions, embedding."""
        scale_O = self.head.scale_O
        head = Matrix(self.head.weight_IO[:, :0], None if scale_O is None else scale_O[:0])
        return replace(self, layers=(), exits=(), head=head)

    @classmethod
    def from_bundle(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> DecoderParams:
        """Return the packed weights of the bundle at `path`.

        Args:
            path: The bundle directory.
            dtype: Type to compute in: float32, float64, bfloat16 or float16; or int8: int8 weights,
                float32 elsewhere. None: int8 for a quantised bundle, else float32.
            device: Where to compute.

        Raises:
            BundleError: If the bundle is incomplete or malformed.
        """
        bundle = read_bundle(path)
        if dtype is None:
            dtype = torch.int8 if bundle.config.quantization == "int8" else torch.float32
        kind = torch.float32 if dtype == torch.int8 else dtype
        return cls.from_tensors(
            bundle.config,
            bundle.load_tensors(dtype=kind, device=device),
            dtype=dtype,
            num_tokens=bundle.tokenizer_vocab_size,
        )

    @classmethod
    def from_tensors(
        cls,
        config: BundleConfig,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        num_tokens: int | None = None,
    ) -> DecoderParams:
        """Return HF-named tensors packed for inference.

        Args:
            config: The dimensions.
            tensors: Exactly the tensors of `bundle.expected_tensors(config)`, floating-point, all
                of one dtype and on one device. Matrices are copied; the embedding is aliased.
            dtype: Type to compute in, as for `from_bundle`; that of the tensors if None. For int8
                matrices are rounded here; those of a quantised bundle give its integers again.
            num_tokens: Ids the tokenizer knows; every row of the head if None.

        Raises:
            BundleError: If a tensor is missing or of the wrong shape, cannot be int8, or
                `num_tokens` is larger than the vocabulary.
        """
        for name, shape in expected_tensors(config).items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                found = list(tensors[name].shape) if name in tensors else "nothing"
                raise BundleError(f"tensor {name}: expected {list(shape)}, found {found}")
        vocab_size = config.shape.vocab_size
        num_tokens = vocab_size if num_tokens is None else num_tokens
        if not 1 <= num_tokens <= vocab_size:
            raise BundleError(
                f"the tokenizer has {num_tokens} ids, the model only vocab_size={vocab_size}"
            )
        if dtype == torch.int8:
            tensors = quantize_int8(tensors)
        elif dtype is not None:
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        embedding = "model.embed_tokens.weight"
        num_early = len(config.shape.exit_layers)
        return cls(
            config=config,
            embedding_VD=_floats(tensors, embedding),
            layers=tuple(
                _pack_layer(tensors, f"model.layers.{index}")
                for index in range(config.shape.num_layers)
            ),
            exits=tuple(
                ExitParams(
                    tensors[f"early_norms.{k}.weight" if k < num_early else "model.norm.weight"],
                    _pack_adapter(
                        tensors, f"early_adapters.{k}" if k < num_early else "final_adapter"
                    ),
                    _pack_router(tensors, k) if k < num_early else None,
                )
                for k in range(num_early + 1)
            ),
            head=_matrix(tensors, embedding if config.shape.tie_embeddings else "lm_head.weight"),
            num_tokens=num_tokens,
        )

    @classmethod
    def random(
        cls,
        config: BundleConfig,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_tokens: int | None = None,
    ) -> DecoderParams:
        """Return random weights: for tests and for measuring speed, which weights do not change.

        Args:
            config: The dimensions.
            seed: Seeds every tensor.
            dtype: Type to compute in, as for `from_bundle`.
            device: Where to compute.
            num_tokens: Ids that may be sampled; all if None.
        """
        kind = torch.float32 if dtype == torch.int8 else dtype
        tensors = {
            name: tensor.to(device)
            for name, tensor in random_tensors(config, seed=seed, dtype=kind).items()
        }
        return cls.from_tensors(config, tensors, dtype=dtype, num_tokens=num_tokens)


def random_tensors(
    config: BundleConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return HF-named random tensors that give a lively model.

    Matrices are N(0, 1 / fan_in), so that activations keep their size; gains lie around 1, biases
    around 0. The values do not depend on `dtype` beyond rounding.

    Args:
        config: The dimensions.
        seed: Seeds the one generator that draws all of them, in model order.
        dtype: Type of the result.
        device: Where they are drawn; other devices give other values.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        draw = torch.randn(shape, generator=generator, device=device)
        if name.endswith("bias"):
            draw *= 0.1
        elif len(shape) == 1:
            draw = 1 + 0.1 * draw
        elif name != "model.embed_tokens.weight":
            draw /= math.sqrt(shape[1])
        tensors[name] = draw.to(dtype)
    return tensors


def _dense(packed: Any) -> Any:
    """Return packed weights with floating-point matrices."""
    if isinstance(packed, Matrix):
        return packed if packed.scale_O is None else Matrix(packed.weight_IO * packed.scale_O)
    return type(packed)(*(_dense(part) if isinstance(part, tuple) else part for part in packed))


def _matrix(tensors: Mapping[str, Tensor], *names: str) -> Matrix:
    """Return the projections of some names side by side."""
    weight_OI = torch.cat([tensors[name] for name in names])
    if weight_OI.dtype != torch.int8:
        return Matrix(weight_OI.t().contiguous())
    scale_O = torch.cat([tensors[name + SCALE_SUFFIX] for name in names])
    return Matrix(weight_OI.t().contiguous(), scale_O)


def _floats(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if tensors[name].dtype != torch.int8:
        return tensors[name]
    pair = {key: tensors[key] for key in (name, name + SCALE_SUFFIX)}
    return dequantize(pair, dtype=torch.float32)[name]


def _pack_layer(tensors: Mapping[str, Tensor], layer: str) -> LayerParams:
    def matrix(*names: str) -> Matrix:
        return _matrix(tensors, *(f"{layer}.{name}.weight" for name in names))

    return LayerParams(
        attn_norm_D=tensors[f"{layer}.input_layernorm.weight"],
        qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attn_out=matrix("self_attn.o_proj"),
        mlp_norm_D=tensors[f"{layer}.post_attention_layernorm.weight"],
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
        down=matrix("mlp.down_proj"),
    )


def _pack_adapter(tensors: Mapping[str, Tensor], adapter: str) -> AdapterParams | None:
    inner, outer = f"{adapter}.0.weight", f"{adapter}.2.weight"
    if inner not in tensors:
        return None
    return AdapterParams(_matrix(tensors, inner), _matrix(tensors, outer))


def _pack_router(tensors: Mapping[str, Tensor], k: int) -> RouterParams:
    layer = f"router_layers.{k}.layers.0"
    continue_D, exit_D = at_least_float32(tensors[f"router_heads.{k}.weight"])
    continue_bias, exit_bias = at_least_float32(tensors[f"router_heads.{k}.bias"])
    return RouterParams(
        fc1=_matrix(tensors, f"{layer}.fc1.weight"),
        fc1_bias_R=tensors[f"{layer}.fc1.bias"],
        fc2=_matrix(tensors, f"{layer}.fc2.weight"),
        fc2_bias_D=tensors[f"{layer}.fc2.bias"],
        norm_D=at_least_float32(tensors[f"router_final_norms.{k}.weight"]),
        leave_D=exit_D - continue_D,
        leave_bias=(exit_bias - continue_bias).reshape(1),
    )
