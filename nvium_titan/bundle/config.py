"""What a bundle's `config.json` and tensor list say: dimensions in, names and shapes out.

The module owns `BundleConfig`; `nvium_titan.bundle` reads and writes the directory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvium_titan.bundle.quantization import SCALE_SUFFIX, is_quantized
from nvium_titan.core.shape import ModelShape, resolve_exit_layers
from nvium_titan.errors import BundleError, ConfigError, nearest

CONFIG_FILE = "config.json"
MODELING_FILE = "modeling_nvium.py"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("int8",)

# What the decoder computes whatever config.json says; another value is another model.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None}
_EXIT_KEYS = ("exit_layers", "router_dim", "adapter_dim", "final_adapter")
# No loader of other projects knows it: one that took the integers for weights would say nothing.
_QUANTIZED_TYPE = "nvium_int8"
_MODEL_TYPES = ("nvium", _QUANTIZED_TYPE, "llama")
# Where transformers finds the classes, with trust_remote_code=True.
_AUTO_MAP = {
    "AutoConfig": "modeling_nvium.NviumConfig",
    "AutoModelForCausalLM": "modeling_nvium.NviumForCausalLM",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleConfig:
    """The dimensions of an exported model; `config.json` in Python."""

    vocab_size: int
    """Rows of the embedding and the head; the tokenizer may be smaller (padding), never larger."""
    hidden_size: int
    """Width d of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_hidden_layers: int
    """Transformer layers L."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; divides `num_attention_heads`."""
    head_dim: int
    """Width of one head; even (RoPE turns pairs)."""
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    rms_norm_eps: float
    """Epsilon of every RMSNorm."""
    rope_theta: float
    """Base of the rotary frequencies."""
    tie_word_embeddings: bool
    """Whether the head is the embedding; then there is no `lm_head.weight`."""
    exit_layers: tuple[int, ...]
    """Layers run before each early exit; empty for a one-exit model."""
    router_dim: int
    """Hidden width m_r of the routers; 0 without early exits."""
    adapter_dim: int
    """Hidden width d_a of the adapters; 0 if there is none."""
    final_adapter: bool
    """Whether the final exit has an adapter."""
    bos_token_id: int | None
    """Token that starts a document, if any."""
    eos_token_id: int | None
    """Token that ends a document, if any."""
    dtype: str
    """Stored type of every tensor that is not quantised: float32, bfloat16 or float16."""
    quantization: str | None = None
    """int8: matrices are stored as integers with a scale per output (`quantization`), all other
    tensors as float32. None: every tensor is stored as `dtype`."""

    def __post_init__(self) -> None:
        """Check what one field demands of another.

        Raises:
            BundleError: If a size is impossible or two fields disagree.
        """
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise BundleError(
                    f"{name}={getattr(self, name)}: must be positive; fix {CONFIG_FILE}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise BundleError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}; fix {CONFIG_FILE}"
            )
        if self.head_dim % 2:
            raise BundleError(f"head_dim={self.head_dim}: must be even; fix {CONFIG_FILE}")
        if self.dtype not in DTYPES:
            raise BundleError(
                f"dtype={self.dtype!r}{nearest(self.dtype, DTYPES)}; fix {CONFIG_FILE}"
            )
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise BundleError(
                f"quantization={self.quantization!r}{nearest(self.quantization, QUANTIZATIONS)}; "
                f"fix {CONFIG_FILE}"
            )
        if self.quantization is not None and self.dtype != "float32":
            raise BundleError(
                f"dtype={self.dtype!r}: must be 'float32' with quantization="
                f"{self.quantization!r}; fix {CONFIG_FILE}"
            )
        try:
            resolve_exit_layers(
                num_layers=self.num_hidden_layers,
                num_exits=len(self.exit_layers) + 1,
                exit_layers=self.exit_layers,
            )
        except ConfigError as error:
            raise BundleError(
                f"exit_layers={list(self.exit_layers)} is impossible with "
                f"num_hidden_layers={self.num_hidden_layers}; fix {CONFIG_FILE}: {error}"
            ) from error
        has_routers = bool(self.exit_layers)
        has_adapters = has_routers or self.final_adapter
        for name, wanted in (("router_dim", has_routers), ("adapter_dim", has_adapters)):
            if (getattr(self, name) > 0) != wanted:
                raise BundleError(
                    f"{name}={getattr(self, name)}: must be {'positive' if wanted else '0'} with "
                    f"exit_layers={list(self.exit_layers)}, final_adapter={self.final_adapter}; "
                    f"fix {CONFIG_FILE}"
                )

    @property
    def shape(self) -> ModelShape:
        """The dimensions, for the arithmetic of `flops`."""
        return ModelShape(
            vocab_size=self.vocab_size,
            dim=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            ffn_dim=self.intermediate_size,
            rope_theta=self.rope_theta,
            norm_eps=self.rms_norm_eps,
            max_seq_len=self.max_position_embeddings,
            tie_embeddings=self.tie_word_embeddings,
            exit_layers=self.exit_layers,
            router_dim=self.router_dim,
            adapter_dim=self.adapter_dim,
        )

    @property
    def is_plain_llama(self) -> bool:
        """Whether this is a dense transformer that any LLaMA loader can open."""
        return not (self.exit_layers or self.final_adapter or self.quantization)

    def to_json(self) -> dict[str, Any]:
        """Return `config.json`: of type "llama" for a dense model, else "nvium" or "nvium_int8"."""
        fields = dataclasses.asdict(self)
        quantization = fields.pop("quantization")
        exits = {key: fields.pop(key) for key in _EXIT_KEYS}
        exits["exit_layers"] = list(self.exit_layers)
        own: dict[str, Any] = {}
        if self.is_plain_llama:
            model_type, architectures = "llama", ["LlamaForCausalLM"]
        elif quantization is None:
            model_type, architectures = "nvium", ["NviumForCausalLM"]
            own = exits | {"auto_map": _AUTO_MAP}
        else:
            model_type, architectures = _QUANTIZED_TYPE, []
            own = exits | {"quantization": quantization}
        return {
            "architectures": architectures,
            "model_type": model_type,
            **fields,
            # transformers before 4.56 and several converters know only this name.
            "torch_dtype": self.dtype,
            **_FIXED,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "use_cache": True,
            **own,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str = CONFIG_FILE) -> BundleConfig:
        """Return the configuration in `data`, the content of `config.json`.

        Args:
            data: The parsed file.
            source: Its name for error messages.

        Raises:
            BundleError: If a key is missing, has the wrong type, or asks for another model.
        """
        model_type = data.get("model_type")
        if model_type not in _MODEL_TYPES:
            raise BundleError(
                f"{source}: model_type={model_type!r}: must be one of {', '.join(_MODEL_TYPES)}"
            )
        for key, fixed in _FIXED.items():
            if data.get(key, fixed) != fixed:
                raise BundleError(f"{source}: {key}={data[key]!r}: only {fixed!r} is supported")
        given = {"quantization": None, **data}
        if (given["quantization"] is not None) != (model_type == _QUANTIZED_TYPE):
            raise BundleError(
                f"{source}: model_type={model_type!r} with quantization={given['quantization']!r}: "
                f"a quantised bundle is of type {_QUANTIZED_TYPE!r}, and no other is quantised"
            )
        if model_type == "llama":
            given |= {"exit_layers": [], "router_dim": 0, "adapter_dim": 0, "final_adapter": False}
        return cls(**{f.name: _typed(given, f.name, str(f.type), source) for f in _FIELDS})


_FIELDS = dataclasses.fields(BundleConfig)
_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
)  # fmt: skip


def _typed(data: Mapping[str, Any], key: str, kind: str, source: str) -> Any:
    if key not in data:
        raise BundleError(f"{source}: key {key!r} is missing")
    value = data[key]
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == "tuple[int, ...]":
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
    elif kind == "float":
        if is_int or isinstance(value, float):
            return float(value)
    elif (
        (kind in ("int", "int | None") and is_int)
        or (kind == "int | None" and value is None)
        or (kind == "bool" and isinstance(value, bool))
        or (kind in ("str", "str | None") and isinstance(value, str))
        or (kind == "str | None" and value is None)
    ):
        return value
    raise BundleError(f"{source}: {key}={value!r}: must be of type {kind}")


def expected_tensors(config: BundleConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a bundle, in model order.

    Matrices are (out, in). Junction k (from 0) stands behind the layer `exit_layers[k] - 1`.
    """
    d, ffn = config.hidden_size, config.intermediate_size
    q_dim = config.num_attention_heads * config.head_dim
    kv_dim = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (d,),
            f"{prefix}.self_attn.q_proj.weight": (q_dim, d),
            f"{prefix}.self_attn.k_proj.weight": (kv_dim, d),
            f"{prefix}.self_attn.v_proj.weight": (kv_dim, d),
            f"{prefix}.self_attn.o_proj.weight": (d, q_dim),
            f"{prefix}.post_attention_layernorm.weight": (d,),
            f"{prefix}.mlp.gate_proj.weight": (ffn, d),
            f"{prefix}.mlp.up_proj.weight": (ffn, d),
            f"{prefix}.mlp.down_proj.weight": (d, ffn),
        }
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    for k in range(len(config.exit_layers)):
        shapes |= {
            f"early_norms.{k}.weight": (d,),
            f"early_adapters.{k}.0.weight": (config.adapter_dim, d),
            f"early_adapters.{k}.2.weight": (d, config.adapter_dim),
            f"router_layers.{k}.layers.0.fc1.weight": (config.router_dim, d),
            f"router_layers.{k}.layers.0.fc1.bias": (config.router_dim,),
            f"router_layers.{k}.layers.0.fc2.weight": (d, config.router_dim),
            f"router_layers.{k}.layers.0.fc2.bias": (d,),
            f"router_final_norms.{k}.weight": (d,),
            f"router_heads.{k}.weight": (2, d),
            f"router_heads.{k}.bias": (2,),
        }
    if config.final_adapter:
        shapes["final_adapter.0.weight"] = (config.adapter_dim, d)
        shapes["final_adapter.2.weight"] = (d, config.adapter_dim)
    return shapes


def stored_tensors(config: BundleConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and type of every tensor as it lies in the file, in model order."""
    stored: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in expected_tensors(config).items():
        if config.quantization and is_quantized(name, len(shape)):
            stored[name] = (shape, config.quantization)
            stored[name + SCALE_SUFFIX] = (shape[:1], config.dtype)
        else:
            stored[name] = (shape, config.dtype)
    return stored


def stored_bytes(config: BundleConfig) -> int:
    """Return the bytes that all tensors take in the file."""
    return sum(
        math.prod(shape) * getattr(torch, dtype).itemsize
        for shape, dtype in stored_tensors(config).values()
    )
