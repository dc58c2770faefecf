"""What a bundle's `config.json` and tensor list say: a shape, its tensors and their sizes.

The module owns `BundleConfig`; `bundle.directory` reads and writes the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from nvium_titan.bundle.quantization import SCALE_SUFFIX, is_quantized
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import BundleError, ConfigError, nearest

CONFIG_FILE = "config.json"
MODELING_FILE = "modeling_nvium.py"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("int8",)

# The fields of `ModelShape` by their keys in config.json, in the order of the file.
_SHAPE_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tie_embeddings",
    "exit_layers": "exit_layers",
    "router_dim": "router_dim",
    "adapter_dim": "adapter_dim",
}
# The keys that a dense model's file leaves out, and what that means.
_NO_EXITS = {"exit_layers": [], "router_dim": 0, "adapter_dim": 0, "final_adapter": False}
# What the decoder computes whatever config.json says; another value is another model.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None}
# What JSON gives for the annotation of a field; a bool is no int here.
_KINDS = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
}
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
    """An exported model's shape and how it is stored; `config.json` in Python."""

    shape: ModelShape
    """The model's numbers. `vocab_size` may exceed the tokenizer's (padding), `router_dim` is 0
    without early exits."""
    final_adapter: bool
    """Whether the final exit has an adapter; a model without early exits may have this one only."""
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
        """Check what the shape cannot: the types, and adapters and routers without early exits.

        Raises:
            BundleError: If a type is unknown or two fields disagree.
        """
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
        if self.shape.exit_layers:
            return
        for name, wanted in (("router_dim", False), ("adapter_dim", self.final_adapter)):
            value = getattr(self.shape, name)
            if (value > 0) != wanted:
                raise BundleError(
                    f"{name}={value}: must be {'positive' if wanted else '0'} without early "
                    f"exits, with final_adapter={self.final_adapter}; fix {CONFIG_FILE}"
                )

    @property
    def is_plain_llama(self) -> bool:
        """Whether this is a dense transformer that any LLaMA loader can open."""
        return not (self.shape.exit_layers or self.final_adapter or self.quantization)

    def to_json(self) -> dict[str, Any]:
        """Return `config.json`: of type "llama" for a dense model, else "nvium" or "nvium_int8"."""
        numbers = {key: getattr(self.shape, name) for key, name in _SHAPE_KEYS.items()}
        numbers |= {
            "exit_layers": list(self.shape.exit_layers),
            "final_adapter": self.final_adapter,
        }
        exits = {key: numbers.pop(key) for key in _NO_EXITS}
        own: dict[str, Any] = {}
        if self.is_plain_llama:
            model_type, architectures = "llama", ["LlamaForCausalLM"]
        elif self.quantization is None:
            model_type, architectures = "nvium", ["NviumForCausalLM"]
            own = exits | {"auto_map": _AUTO_MAP}
        else:
            model_type, architectures = _QUANTIZED_TYPE, []
            own = exits | {"quantization": self.quantization}
        return {
            "architectures": architectures,
            "model_type": model_type,
            **numbers,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "dtype": self.dtype,
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
            given |= _NO_EXITS
        kinds = {f.name: str(f.type) for f in (*fields(ModelShape), *fields(cls))}
        numbers = {
            name: _typed(given, key, kinds[name], source) for key, name in _SHAPE_KEYS.items()
        }
        own = {f.name: _typed(given, f.name, kinds[f.name], source) for f in fields(cls)[1:]}
        try:
            shape = ModelShape(**numbers)
        except ConfigError as error:
            raise BundleError(f"{source}: {_in_words_of_the_file(str(error))}") from error
        return cls(shape=shape, **own)


def _in_words_of_the_file(message: str) -> str:
    """Return what `ModelShape` has to say with the keys of config.json for its fields."""
    for key, name in _SHAPE_KEYS.items():
        message = re.sub(rf"\b{name}=", f"{key}=", message)
    return re.sub(r"fix \[\w+\]", f"fix {CONFIG_FILE}", message)


def _typed(data: Mapping[str, Any], key: str, kind: str, source: str) -> Any:
    if key not in data:
        raise BundleError(f"{source}: key {key!r} is missing")
    value = data[key]
    if kind == "tuple[int, ...]":
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
    elif type(value) in _KINDS[kind]:
        return float(value) if kind == "float" else value
    raise BundleError(f"{source}: {key}={value!r}: must be of type {kind}")


def expected_tensors(config: BundleConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a bundle, in model order.

    Matrices are (out, in). Junction k (from 0) stands behind the layer `exit_layers[k] - 1`.
    """
    shape = config.shape
    d, ffn, m_r, d_a = shape.dim, shape.ffn_dim, shape.router_dim, shape.adapter_dim
    q_dim, kv_dim = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, d)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        sizes |= {
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
    sizes["model.norm.weight"] = (d,)
    if not shape.tie_embeddings:
        sizes["lm_head.weight"] = (shape.vocab_size, d)
    for k in range(len(shape.exit_layers)):
        sizes |= {
            f"early_norms.{k}.weight": (d,),
            f"early_adapters.{k}.0.weight": (d_a, d),
            f"early_adapters.{k}.2.weight": (d, d_a),
            f"router_layers.{k}.layers.0.fc1.weight": (m_r, d),
            f"router_layers.{k}.layers.0.fc1.bias": (m_r,),
            f"router_layers.{k}.layers.0.fc2.weight": (d, m_r),
            f"router_layers.{k}.layers.0.fc2.bias": (d,),
            f"router_final_norms.{k}.weight": (d,),
            f"router_heads.{k}.weight": (2, d),
            f"router_heads.{k}.bias": (2,),
        }
    if config.final_adapter:
        sizes["final_adapter.0.weight"] = (d_a, d)
        sizes["final_adapter.2.weight"] = (d, d_a)
    return sizes


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
