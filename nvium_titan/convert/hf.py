"""Hugging Face checkpoints of the LLaMA architecture: to a bundle, and with new junctions.

Names and layout are those of the bundle, so tensors pass unchanged. Growing junctions adds exits
to a pretrained model without touching what it computes: adapters are the identity, so the final
exit's logits stay the same to the bit, and routers start near "continue".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors import safe_open
from torch import Tensor

from nvium_titan.bundle import BundleConfig, expected_tensors, write_bundle
from nvium_titan.bundle.config import CONFIG_FILE, DTYPES
from nvium_titan.bundle.directory import (
    INDEX_FILE,
    WEIGHTS_FILE,
    check_tensors,
    read_headers,
    read_json,
)
from nvium_titan.core.flavors import router_dim_of
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import BundleError, ConfigError
from nvium_titan.text.tokenizer import load_tokenizer

NEW_ROUTER_LOGIT = -4.0
"""Exit minus continue of a grown router, for every token: it leaves with probability
sigmoid(-4) = 0.018, so each junction costs the mixture at most 0.0182 nats/token at the start."""

# What a missing or null key means to transformers' LlamaConfig.
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# A buffer that old checkpoints carry; it is computed, not learned.
_BUFFER_SUFFIX = ".rotary_emb.inv_freq"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class HFCheckpoint:
    """A checked checkpoint folder of transformers, LLaMA or N-vium."""

    path: Path
    """The folder."""
    config: BundleConfig
    """The model's shape, and the type that most tensors have; no special ids."""
    tensor_files: Mapping[str, str]
    """The file that holds each tensor of the model."""

    def load_tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, as stored."""
        tensors = {}
        for file in sorted(set(self.tensor_files.values())):
            with safe_open(self.path / file, framework="pt") as reader:
                for name, home in self.tensor_files.items():
                    if home == file:
                        tensors[name] = reader.get_tensor(name)
        return tensors


def read_hf(directory: Path | str, *, dtype: str | None = None) -> HFCheckpoint:
    """Return the checkpoint in a folder after checking its configuration, tensor names and shapes.

    Args:
        directory: Holds config.json and model.safetensors, or shards with their index.
        dtype: Type that the tensors will be converted to; None: they must all be of one type.

    Raises:
        BundleError: If it is another architecture or needs what our model does not compute; if a
            file or tensor is missing, extra or of another shape.
    """
    folder = Path(directory)
    if not (folder / WEIGHTS_FILE).is_file() and not (folder / INDEX_FILE).is_file():
        raise BundleError(
            f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE} in it; save the model with "
            "save_pretrained(folder, safe_serialization=True)"
        )
    source = str(folder / CONFIG_FILE)
    data = _llama_settings(read_json(folder / CONFIG_FILE), source)
    files, found = read_headers(folder)
    found = {name: what for name, what in found.items() if not name.endswith(_BUFFER_SUFFIX)}
    stored = [kind for _, kind in found.values()]
    common = max(sorted(set(stored)), key=stored.count, default="float32")
    config = BundleConfig.from_json(data | {"dtype": common}, source=source)
    if config.shape.tie_embeddings and _HEAD in found:
        _check_tied(folder, files)
        del found[_HEAD]
    if dtype is not None:
        found = {name: (shape, common) for name, (shape, _) in found.items()}
    check_tensors(found, config, source=str(folder))
    return HFCheckpoint(
        path=folder, config=config, tensor_files={name: files[name] for name in found}
    )


def import_hf(
    directory: Path | str,
    out: Path | str,
    *,
    exits: Sequence[int] = (),
    dtype: str | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
) -> dict[str, tuple[int, ...]]:
    """Write a Hugging Face checkpoint as a bundle; tensors keep every bit unless `dtype` is given.

    Args:
        directory: As `read_hf`.
        out: The bundle's directory; written whole or not at all.
        exits: Layers before each early exit, to grow junctions there; none: the model as it is.
        dtype: Type to convert every tensor to; default: as stored.
        tokenizer: Tokenizer to put in; default: the one whose files lie in `directory`.
        seed: Seeds the random part of new junctions.

    Returns:
        Name and shape of every new tensor.

    Raises:
        BundleError: As `read_hf`; if there are exits already; if `out` cannot be written.
        ConfigError: If `exits` are impossible for this model.
        TokenizerError: If there is no tokenizer, or it has more ids than the model.
    """
    checkpoint = read_hf(directory, dtype=dtype)
    text_tokenizer = load_tokenizer(checkpoint.path if tokenizer is None else tokenizer)
    config = replace(
        checkpoint.config,
        bos_token_id=text_tokenizer.bos_id,
        eos_token_id=text_tokenizer.eos_id,
        dtype=checkpoint.config.dtype if dtype is None else dtype,
    )
    kind = DTYPES[config.dtype]
    tensors = {name: tensor.to(kind) for name, tensor in checkpoint.load_tensors().items()}
    new = {}
    if exits:
        config, grown = grow_junctions(config, tensors, exits, seed=seed)
        new = {name: tuple(grown[name].shape) for name in grown if name not in tensors}
        tensors = grown
    write_bundle(
        out,
        config=config,
        tensors=tensors,
        tokenizer=text_tokenizer,
        provenance={"imported_from": "huggingface", "path": str(checkpoint.path.resolve())}
        | ({"grown_exits": list(exits), "seed": seed} if exits else {}),
    )
    return new


def grow_junctions(
    config: BundleConfig, tensors: Mapping[str, Tensor], exits: Sequence[int], *, seed: int = 0
) -> tuple[BundleConfig, dict[str, Tensor]]:
    """Return a dense model with new junctions that leave its final exit as it is, to the bit.

    Adapters start as the identity (output projection 0). A junction's norm is a copy of the final
    norm: the shared head was trained to read states scaled by that gain. Router heads have weight 0
    and bias (0, `NEW_ROUTER_LOGIT`); what lies before them is drawn as the paper's initialisation
    draws it (N-vium, arXiv:2605.13190, App. A), routers have its width.

    Args:
        config: A dense model.
        tensors: Its tensors; they are not copied.
        exits: Layers before each early exit, increasing.
        seed: Seeds the random part.

    Raises:
        BundleError: If the model has exits already.
        ConfigError: If an exit is not a layer of the model before the last, or they do not
            increase.
    """
    if not config.is_plain_llama:
        raise BundleError(
            f"exit_layers={list(config.shape.exit_layers)}: the model has exits already; "
            "junctions grow on a dense model"
        )
    dim, num_layers = config.shape.dim, config.shape.num_layers
    try:
        shape = replace(
            config.shape, exit_layers=tuple(exits), router_dim=router_dim_of(dim), adapter_dim=dim
        )
    except ConfigError as error:
        raise ConfigError(
            f"--exits {','.join(map(str, exits))}: they must increase and lie in "
            f"[1, {num_layers - 1}]: the model has {num_layers} layers"
        ) from error
    config = replace(config, shape=shape, final_adapter=True)
    generator = torch.Generator().manual_seed(seed)
    grown = dict(tensors)
    for name, size in expected_tensors(config).items():
        if name not in grown:
            new = _new_tensor(name, size, tensors["model.norm.weight"].float(), generator)
            grown[name] = new.to(DTYPES[config.dtype])
    return config, grown


def training_tables(bundle: Path | str) -> str:
    """Return the TOML tables that train a bundle: its shape and where its weights are.

    With early exits they train the junctions alone; `trainable = "all"` trains everything.

    Args:
        bundle: A bundle or a folder of transformers.

    Raises:
        BundleError: As `read_hf`.
    """
    path = Path(bundle).resolve()
    model = asdict(read_hf(path).config.shape)
    nvium = {key: model.pop(key) for key in ("exit_layers", "router_dim", "adapter_dim")}
    if nvium["exit_layers"]:
        nvium["trainable"] = "junctions"
    checkpoint = {"enable": True, "initial_load_path": str(path), "initial_load_in_hf": True}
    tables = {"model": model, "nvium": nvium, "checkpoint": checkpoint}
    return tomli_w.dumps({"hf_assets_path": str(path), **tables})


def check_loadable(directory: Path | str, shape: ModelShape) -> None:
    """Check that a training run of this shape can start from a folder of transformers.

    Args:
        directory: As `read_hf`; a bundle is one.
        shape: The model that is to be trained.

    Raises:
        BundleError: As `read_hf`; if the folder holds a model of another shape.
    """
    config = read_hf(directory, dtype="float32").config  # loading converts to the type of training
    if config.is_plain_llama and shape.exit_layers:
        shown = ",".join(map(str, shape.exit_layers))
        raise BundleError(
            f"{directory}: a dense model, but [nvium] asks for exit_layers="
            f"{list(shape.exit_layers)}; grow the junctions first and load what this writes: "
            f"nvium import {directory} --out BUNDLE --exits {shown}"
        )
    # The longest sequence is a limit of the run, not of the weights.
    theirs = asdict(replace(config.shape, max_seq_len=shape.max_seq_len))
    other = [
        f"{key}={ours}, there {theirs[key]}"
        for key, ours in asdict(shape).items()
        if ours != theirs[key]
    ]
    if other:
        raise BundleError(
            f"{directory}: another model than the settings say: {'; '.join(other)}; "
            "fix [model] and [nvium]"
        )


def _new_tensor(
    name: str, shape: tuple[int, ...], final_norm_D: Tensor, generator: torch.Generator
) -> Tensor:
    if name.startswith("early_norms."):
        return final_norm_D.clone()
    if name.startswith("router_final_norms."):
        return torch.ones(shape)
    if name.startswith("router_heads.") and name.endswith("bias"):
        return torch.tensor([0.0, NEW_ROUTER_LOGIT])
    is_adapter = name.startswith(("early_adapters.", "final_adapter."))
    is_input = name.endswith(".0.weight")
    if len(shape) == 1 or name.startswith("router_heads.") or (is_adapter and not is_input):
        return torch.zeros(shape)
    std = 1 / math.sqrt(shape[1]) if is_adapter else 0.02
    return std * torch.randn(shape, generator=generator)


def _llama_settings(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return config.json with every key that the bundle's configuration asks for.

    Raises:
        BundleError: If it is another architecture, quantised, or scales RoPE.
    """
    model_type, architectures = data.get("model_type"), data.get("architectures")
    if model_type not in ("llama", "nvium"):
        raise BundleError(
            f"{source}: model_type={model_type!r}: only the LLaMA architecture ('llama') is read"
        )
    wanted = "LlamaForCausalLM" if model_type == "llama" else "NviumForCausalLM"
    if architectures not in (None, [wanted]):
        raise BundleError(f"{source}: architectures={architectures!r}: only [{wanted!r}] is read")
    if data.get("quantization_config") is not None:
        raise BundleError(
            f"{source}: quantization_config={data['quantization_config']!r}: quantised weights "
            "are not read; give the float checkpoint"
        )
    given = {key: value for key, value in data.items() if value is not None}
    # transformers 5 puts rope_theta in here; null and the type "default" both mean plain RoPE.
    for key in ("rope_parameters", "rope_scaling"):
        rope = given.pop(key, {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise BundleError(f"{source}: {key}={rope!r}: RoPE scaling is not supported")
        if "rope_theta" in rope:
            given["rope_theta"] = rope["rope_theta"]
    heads, width = given.get("num_attention_heads"), given.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        given = {"num_key_value_heads": heads, "head_dim": width // heads, **given}
    # The tokenizer names the special ids.
    return {**_DEFAULTS, **given, "bos_token_id": None, "eos_token_id": None}


def _check_tied(folder: Path, files: Mapping[str, str]) -> None:
    """Check that a head stored beside a tied embedding is the embedding.

    Raises:
        BundleError: If it is another matrix.
    """
    both = []
    for name in (_HEAD, _EMBEDDING):
        if name not in files:
            return  # named as missing by the check that follows
        with safe_open(folder / files[name], framework="pt") as reader:
            both.append(reader.get_tensor(name))
    if not torch.equal(*both):
        raise BundleError(
            f"{folder}: {_HEAD} differs from {_EMBEDDING}, but config.json says "
            "tie_word_embeddings=true; set it to false if the head is its own"
        )
