"""Checkpoints of the N-vium authors' code (github.com/ETH-DISCO/n-vium): to a bundle and back.

Their folder holds a Hugging Face LLaMA `config.json`, the weights, and the settings of the
experiment, in which the exits stand: `.hydra/config.yaml`, or `exp_config.json`. Tensor names and
layout are those of the bundle, so tensors pass unchanged in both directions.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from nvium_titan.bundle import Bundle, BundleConfig, read_bundle, write_bundle
from nvium_titan.bundle.config import CONFIG_FILE
from nvium_titan.bundle.directory import WEIGHTS_FILE, check_tensors, read_headers, read_json
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import BundleError, TokenizerError
from nvium_titan.text.tokenizer import Tokenizer, load_tokenizer

JSON_FILE = "exp_config.json"
HYDRA_FILE = ".hydra/config.yaml"

_FIXED = {
    "temperature": 1.0,
    "tying.tie_early_to_final": True,
    "router.router_type": "simple_mlp",
    "router.router_temp": 1.0,
    "router.num_layers": 1,
    "early_adapter.enabled": True,
    "final_adapter.enabled": True,
}
"""What our model computes whatever the experiment says; another value is another model."""


def find_experiment(directory: Path | str) -> Path | None:
    """Return the file with the experiment's settings, None if this is not the authors' checkpoint.

    Args:
        directory: A folder with the weights. As in the authors' code the settings may also lie one
            or two folders up, where their trainer puts them.
    """
    folder = Path(directory).resolve()
    places = [folder / JSON_FILE, *(up / HYDRA_FILE for up in (folder, *folder.parents[:2]))]
    return next((path for path in places if path.is_file()), None)


def import_reference(
    directory: Path | str, out: Path | str, *, tokenizer: str | None = None
) -> None:
    """Write a checkpoint of the authors' code as a bundle; tensors keep every bit.

    Args:
        directory: The folder that holds `train.model.safetensors`.
        out: The bundle's directory; written whole or not at all.
        tokenizer: Tokenizer to put in; default: the one whose files lie in `directory`.

    Raises:
        BundleError: If a file, key or tensor is missing, extra or of the wrong kind, if the
            checkpoint asks for another model than ours, or if `out` cannot be written.
        TokenizerError: If there is no tokenizer, or it has more ids than the model.
    """
    folder = Path(directory)
    experiment = _read_experiment(folder)
    files, headers = read_headers(folder)
    _, dtype = next(iter(headers.values()), ((), "none"))
    config = _bundle_config(read_json(folder / CONFIG_FILE), experiment, dtype, source=str(folder))
    check_tensors({_plain(n): h for n, h in headers.items()}, config, source=str(folder))
    tensors = {
        _plain(name): tensor
        for file in sorted(set(files.values()))
        for name, tensor in load_file(folder / file).items()
    }
    write_bundle(
        out,
        config=config,
        tensors=tensors,
        tokenizer=_load_tokenizer(folder, tokenizer),
        provenance={"imported_from": "reference", "experiment": experiment},
    )


def export_reference(bundle: Bundle | Path | str, out: Path | str) -> None:
    """Write a bundle as a checkpoint that the authors' code loads; tensors keep every bit.

    Args:
        bundle: A bundle or its directory.
        out: A new or empty directory; written whole or not at all.

    Raises:
        BundleError: If the bundle is no N-vium, or `out` holds something.
        TokenizerError: If the bundle's tokenizer cannot be read.
    """
    bundle = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
    config = bundle.config
    if not (config.shape.exit_layers and config.final_adapter):
        raise BundleError(
            f"{bundle.path}: exit_layers={list(config.shape.exit_layers)}, "
            f"final_adapter={config.final_adapter}: the authors' format needs early exits and "
            "adapters; a dense bundle is a LlamaForCausalLM already"
        )
    target = Path(out).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BundleError(f"{target}: exists and is not empty; choose another output directory")
    backbone = replace(config, shape=config.shape.dense(), final_adapter=False, quantization=None)
    llama = backbone.to_json() | {"architectures": ["NviumModel"]}
    # An imported model keeps the authors' training settings.
    experiment = {**bundle.provenance.get("experiment", {}), **_experiment(config.shape)}
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        save_file(bundle.load_tensors(), partial / WEIGHTS_FILE, metadata={"format": "pt"})
        bundle.load_tokenizer().save(partial)
        for name, data in ((CONFIG_FILE, llama), (JSON_FILE, experiment)):
            (partial / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        # YAML holds JSON, so their loader reads the same text.
        (partial / HYDRA_FILE).parent.mkdir()
        shutil.copyfile(partial / JSON_FILE, partial / HYDRA_FILE)
        partial.rename(target)
    except OSError as error:
        raise BundleError(f"{target}: cannot write the checkpoint: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plain(name: str) -> str:
    return name.removeprefix("_orig_mod.")  # which torch.compile puts in front of every name


def _read_experiment(folder: Path) -> dict[str, Any]:
    path = find_experiment(folder)
    if path is None:
        raise BundleError(
            f"{folder}: neither {JSON_FILE} nor {HYDRA_FILE} here (or up to two folders above): "
            "not a checkpoint of the N-vium authors' code"
        )
    if path.name == JSON_FILE:
        return read_json(path)
    try:
        import yaml  # type: ignore[import-untyped]  # its stubs are another package
    except ImportError as error:
        raise BundleError(
            f"{path}: reading it needs PyYAML: pip install pyyaml, or put the same settings into "
            f"{folder / JSON_FILE}"
        ) from error
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BundleError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise BundleError(f"{path}: must hold a mapping, found {type(data).__name__}")
    return data


def _bundle_config(
    llama: Mapping[str, Any], experiment: Mapping[str, Any], dtype: str, *, source: str
) -> BundleConfig:
    if llama.get("model_type") != "llama":
        raise BundleError(
            f"{source}: model_type={llama.get('model_type')!r} in {CONFIG_FILE}: must be 'llama'"
        )
    settings = _flat(experiment)
    needed = (*_FIXED, "early_layer_idx", "router.intermediate_size", "early_adapter.dim",
              "final_adapter.dim", "tying.tie_final_to_embeddings")  # fmt: skip
    for key in needed:
        if key not in settings:
            raise BundleError(f"{source}: key {key} is missing from the experiment's settings")
    required = {**_FIXED, "final_adapter.dim": settings["early_adapter.dim"]}
    for key, value in required.items():
        if settings[key] != value:
            raise BundleError(f"{source}: {key}={settings[key]!r}: only {value!r} is supported")
    exits = settings["early_layer_idx"]
    return BundleConfig.from_json(
        {
            **llama,
            "model_type": "nvium",
            "dtype": dtype,
            "tie_word_embeddings": settings["tying.tie_final_to_embeddings"],
            "exit_layers": sorted(exits) if isinstance(exits, list) else [exits],
            "router_dim": settings["router.intermediate_size"],
            "adapter_dim": settings["early_adapter.dim"],
            "final_adapter": True,
        },
        source=source,
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _experiment(shape: ModelShape) -> dict[str, Any]:
    """Return the settings from which the authors' code builds the model."""
    adapter = {"enabled": True, "dim": shape.adapter_dim}
    return {
        "model_type": "Nvium",
        "early_layer_idx": list(shape.exit_layers),
        "decode_head": "final",
        "temperature": 1.0,
        "random_init_all": True,
        "tying": {
            "tie_final_to_embeddings": shape.tie_embeddings,
            "tie_early_to_final": True,
            "tie_early_to_embeddings": False,
            "init_early_from": "random",
        },
        "router": {
            "router_type": "simple_mlp",
            "router_temp": 1.0,
            "hidden_size": shape.dim,
            "intermediate_size": shape.router_dim,
            "num_layers": 1,
            "router_head_init_std": 0.4,
        },
        "early_adapter": adapter,
        "final_adapter": adapter,
    }


def _load_tokenizer(folder: Path, tokenizer: str | None) -> Tokenizer:
    try:
        return load_tokenizer(folder if tokenizer is None else tokenizer)
    except TokenizerError as error:
        if tokenizer is not None:
            raise
        raise TokenizerError(
            f"{error}; the authors' code keeps the tokenizer elsewhere: name it (--tokenizer)"
        ) from error
