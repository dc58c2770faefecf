"""The weights of a decoder, packed for inference, and where they come from.

One load turns the bundle's HF-named tensors into what the decode step wants: q, k and v in one
matrix, gate and up in one matrix, every matrix transposed to (in, out) and contiguous, RoPE pairs
side by side, the two router rows folded into their difference. Nothing here is written afterwards:
any number of sequences may share one `DecoderParams`.

Shapes: D width, Q query features, K key (= value) features, F MLP width, R router width, A adapter
width, V vocabulary rows. A norm gain is stored twice in a row (2D), as `decode.forward.torch`
wants it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nvium_titan.bundle import BundleConfig, expected_tensors, read_bundle
from nvium_titan.bundle.quantization import dequantize, quantize_int8
from nvium_titan.core.mixture import at_least_float32
from nvium_titan.errors import BundleError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerParams:
    """One transformer layer."""

    attn_norm_2D: Tensor
    """Gain before attention."""
    qkv_DW: Tensor
    """Query, key, value projections side by side, W = Q + 2K; RoPE pairs are adjacent. The queries
    carry the 1 / sqrt(head_dim) of attention, unless `is_low_precision`: there it would round."""
    attn_out_QD: Tensor
    """Output projection of attention."""
    mlp_norm_2D: Tensor
    """Gain before the MLP."""
    gate_up_D2F: Tensor
    """Gate and up projections side by side."""
    down_FD: Tensor
    """Output projection of the MLP."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RouterParams:
    """One router: two linear layers, a norm, and one row that scores leaving."""

    fc1_DR: Tensor
    """First layer."""
    fc1_bias_R: Tensor
    """Its bias."""
    fc2_R2D: Tensor
    """Second layer beside its negative, which is what the norm after it wants."""
    fc2_bias_2D: Tensor
    """Its bias beside its negative."""
    norm_2D: Tensor
    """Gain before the head, at least float32."""
    leave_2D: Tensor
    """Exit row minus continue row, then zeros; at least float32."""
    leave_bias: Tensor
    """Exit bias minus continue bias, shape (1,), at least float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExitParams:
    """What stands between a block's output and the shared head."""

    norm_2D: Tensor
    """Gain of the junction's norm; the model's final norm at the last exit."""
    adapter_in_DA: Tensor | None
    """First adapter matrix; None if this exit has no adapter (a dense model)."""
    adapter_out_AD: Tensor | None
    """Second adapter matrix."""
    router: RouterParams | None
    """The router; None at the last exit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderParams:
    """A decoder's dimensions and packed weights, on one device and in one dtype."""

    config: BundleConfig
    """Dimensions and exit positions. Its `dtype` is that of the file, not of these tensors."""
    embedding_VD: Tensor
    """Token embedding."""
    layers: tuple[LayerParams, ...]
    """All layers, bottom up."""
    exits: tuple[ExitParams, ...]
    """All exits, bottom up; the last one is the final exit."""
    head_VD: Tensor
    """The head W_lm that every exit shares; the embedding itself if the two are tied."""
    num_tokens: int
    """Ids the tokenizer knows, at most V; rows from here on are padding and are never sampled."""
    is_int8: bool = False
    """Whether all matrices lie on a grid of int8 steps per output, as `quantization` rounds them;
    the tensors here are those products, in float32."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the residual stream."""
        return self.embedding_VD.dtype

    @property
    def is_low_precision(self) -> bool:
        """Whether norms, RoPE and attention scores need more precision than the weights have."""
        return self.dtype not in (torch.float32, torch.float64)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_VD.device

    def without_weights(self) -> DecoderParams:
        """Return what is left once a model has packed its own copy: dimensions, type, embedding."""
        no_rows_VD = self.embedding_VD[:0]
        return replace(self, layers=(), exits=(), head_VD=no_rows_VD)

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
            dtype: Type to compute in: float32, float64, bfloat16 or float16; or int8: float32
                with weights rounded to int8 steps. None: int8 for a quantised bundle, else float32.
            device: Where to compute.

        Raises:
            BundleError: If the bundle is incomplete or malformed.
        """
        bundle = read_bundle(path)
        if dtype is None:
            dtype = torch.int8 if bundle.config.quantization == "int8" else torch.float32
        is_int8 = dtype == torch.int8
        tensors = bundle.load_tensors(dtype=torch.float32 if is_int8 else dtype, device=device)
        return cls.from_tensors(
            bundle.config,
            # Weights of a quantised bundle are on their grid already, and stay as they are.
            dequantize(quantize_int8(tensors), dtype=torch.float32) if is_int8 else tensors,
            num_tokens=bundle.tokenizer_vocab_size,
            is_int8=is_int8,
        )

    @classmethod
    def from_tensors(
        cls,
        config: BundleConfig,
        tensors: Mapping[str, Tensor],
        *,
        num_tokens: int | None = None,
        is_int8: bool = False,
    ) -> DecoderParams:
        """Return HF-named tensors packed for inference.

        Args:
            config: The dimensions.
            tensors: Exactly the tensors of `bundle.expected_tensors(config)`, all of one dtype and
                on one device. Matrices are copied; the embedding and the head are aliased.
            num_tokens: Ids the tokenizer knows; every row of the head if None.
            is_int8: Whether the matrices are on a grid of int8 steps; they are float32 then.

        Raises:
            BundleError: If a tensor is missing or of the wrong shape, or `num_tokens` is larger
                than the vocabulary.
        """
        for name, shape in expected_tensors(config).items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                found = list(tensors[name].shape) if name in tensors else "nothing"
                raise BundleError(f"tensor {name}: expected {list(shape)}, found {found}")
        num_tokens = config.shape.vocab_size if num_tokens is None else num_tokens
        if not 1 <= num_tokens <= config.shape.vocab_size:
            raise BundleError(
                f"the tokenizer has {num_tokens} ids, the model only vocab_size="
                f"{config.shape.vocab_size}"
            )
        embedding_VD = tensors["model.embed_tokens.weight"]
        num_early = len(config.shape.exit_layers)
        return cls(
            config=config,
            embedding_VD=embedding_VD,
            layers=tuple(
                _pack_layer(config, tensors, f"model.layers.{index}")
                for index in range(config.shape.num_layers)
            ),
            exits=tuple(
                _pack_exit(
                    tensors,
                    norm=f"early_norms.{k}" if k < num_early else "model.norm",
                    adapter=f"early_adapters.{k}" if k < num_early else "final_adapter",
                    router=_pack_router(tensors, k) if k < num_early else None,
                )
                for k in range(num_early + 1)
            ),
            head_VD=embedding_VD if config.shape.tie_embeddings else tensors["lm_head.weight"],
            num_tokens=num_tokens,
            is_int8=is_int8,
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
            dtype: Type to compute in; or int8, as for `from_bundle`.
            device: Where to compute.
            num_tokens: Ids that may be sampled; all if None.
        """
        is_int8 = dtype == torch.int8
        tensors = random_tensors(config, seed=seed, dtype=torch.float32 if is_int8 else dtype)
        if is_int8:
            tensors = dequantize(quantize_int8(tensors), dtype=torch.float32)
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        return cls.from_tensors(config, tensors, num_tokens=num_tokens, is_int8=is_int8)


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


def _pack_layer(config: BundleConfig, tensors: Mapping[str, Tensor], prefix: str) -> LayerParams:
    def weight(name: str) -> Tensor:
        return tensors[f"{prefix}.{name}.weight"]

    q = _interleaved(weight("self_attn.q_proj"), head_dim=config.shape.head_dim)
    if q.dtype in (torch.float32, torch.float64):
        q = q * config.shape.head_dim**-0.5
    k = _interleaved(weight("self_attn.k_proj"), head_dim=config.shape.head_dim)
    return LayerParams(
        attn_norm_2D=weight("input_layernorm").repeat(2),
        qkv_DW=_transposed(torch.cat([q, k, weight("self_attn.v_proj")])),
        attn_out_QD=_transposed(weight("self_attn.o_proj")),
        mlp_norm_2D=weight("post_attention_layernorm").repeat(2),
        gate_up_D2F=_transposed(torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")])),
        down_FD=_transposed(weight("mlp.down_proj")),
    )


def _pack_exit(
    tensors: Mapping[str, Tensor], *, norm: str, adapter: str, router: RouterParams | None
) -> ExitParams:
    has_adapter = f"{adapter}.0.weight" in tensors
    return ExitParams(
        norm_2D=tensors[f"{norm}.weight"].repeat(2),
        adapter_in_DA=_transposed(tensors[f"{adapter}.0.weight"]) if has_adapter else None,
        adapter_out_AD=_transposed(tensors[f"{adapter}.2.weight"]) if has_adapter else None,
        router=router,
    )


def _pack_router(tensors: Mapping[str, Tensor], k: int) -> RouterParams:
    layer = f"router_layers.{k}.layers.0"
    continue_D, exit_D = at_least_float32(tensors[f"router_heads.{k}.weight"])
    continue_bias, exit_bias = at_least_float32(tensors[f"router_heads.{k}.bias"])
    fc2_DR, fc2_bias_D = tensors[f"{layer}.fc2.weight"], tensors[f"{layer}.fc2.bias"]
    leave_D = exit_D - continue_D
    return RouterParams(
        fc1_DR=_transposed(tensors[f"{layer}.fc1.weight"]),
        fc1_bias_R=tensors[f"{layer}.fc1.bias"],
        fc2_R2D=_transposed(torch.cat([fc2_DR, -fc2_DR])),
        fc2_bias_2D=torch.cat([fc2_bias_D, -fc2_bias_D]),
        norm_2D=at_least_float32(tensors[f"router_final_norms.{k}.weight"]).repeat(2),
        leave_2D=torch.cat([leave_D, torch.zeros_like(leave_D)]),
        leave_bias=(exit_bias - continue_bias).reshape(1),
    )


def _interleaved(weight_OI: Tensor, *, head_dim: int) -> Tensor:
    """Return a rotate-half projection with the two features of each rotary pair side by side."""
    num_outputs, num_inputs = weight_OI.shape
    halves = weight_OI.view(-1, 2, head_dim // 2, num_inputs)
    return halves.transpose(1, 2).reshape(num_outputs, num_inputs)


def _transposed(weight_OI: Tensor) -> Tensor:
    return weight_OI.t().contiguous()
