"""From a training checkpoint (DCP step folder) to a bundle, and from a bundle to an int8 one.

A step folder holds everything that is needed: the weights, whatever the number of ranks that wrote
them, and the run's resolved settings. torchtitan is not imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from nvium_titan.bundle import BundleConfig, read_bundle, write_bundle
from nvium_titan.bundle.config import DTYPES
from nvium_titan.convert.layout import to_bundle
from nvium_titan.convert.names import native_to_hf
from nvium_titan.convert.step_folders import find_step_folder, read_metadata, step_of
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import BundleError, CheckpointError
from nvium_titan.report.records import read_metrics
from nvium_titan.text.tokenizer import Tokenizer, load_tokenizer

SETTINGS_KEY = "nvium.settings"
"""The checkpoint entry that holds the run's resolved settings, as TOML text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFolder:
    """A readable training checkpoint."""

    path: Path
    """The step-N folder."""
    settings: Mapping[str, Any]
    """The run's resolved settings, as in its config.toml."""
    settings_text: str
    """The same as TOML text."""
    shape: ModelShape
    """The shape of the model."""

    @property
    def step(self) -> int:
        """Training steps behind the weights."""
        return step_of(self.path)

    @property
    def run_folder(self) -> Path:
        """The run's dump folder, where metrics.jsonl lies."""
        return self.path.parent.parent


def read_step_folder(path: Path | str) -> StepFolder:
    """Read what a checkpoint says of itself.

    Args:
        path: As `find_step_folder`.

    Raises:
        CheckpointError: If it cannot be read, or was not written by this package.
    """
    folder = find_step_folder(path)
    entries = _entries(folder)
    saved = folder.parent.parent / "config.toml"
    if SETTINGS_KEY in entries:
        holder: dict[str, Any] = {SETTINGS_KEY: ""}
        _load(holder, folder)
        text = holder[SETTINGS_KEY]
    elif saved.is_file():  # a model-only checkpoint keeps no settings
        text = saved.read_text(encoding="utf-8")
    else:
        raise CheckpointError(
            f"{folder}: no '{SETTINGS_KEY}' in it and no {saved}: not a checkpoint of nvium_titan"
        )
    settings = tomli.loads(text)
    numbers: dict[str, Any] = {**settings["model"], **settings["nvium"]}
    numbers["exit_layers"] = tuple(numbers["exit_layers"])
    known = {field.name for field in fields(ModelShape)}
    shape = ModelShape(**{key: value for key, value in numbers.items() if key in known})
    return StepFolder(path=folder, settings=settings, settings_text=text, shape=shape)


def _entries(folder: Path) -> Mapping[str, Any]:
    entries: Mapping[str, Any] = read_metadata(folder).state_dict_metadata
    return entries


def load_native_tensors(folder: StepFolder) -> dict[str, Tensor]:
    """Return the model's parameters under their native names, whole, on the CPU.

    Args:
        folder: From `read_step_folder`.

    Raises:
        CheckpointError: If a parameter is missing or of another shape, or a file is damaged.
    """
    entries = _entries(folder.path)
    names = native_to_hf(folder.shape)
    missing = [name for name in names if not isinstance(entries.get(name), TensorStorageMetadata)]
    if missing:
        raise CheckpointError(
            f"{folder.path}: {len(missing)} parameters are missing, the first is {missing[0]}"
        )
    tensors = {
        name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
        for name in names
    }
    _load(dict(tensors), folder.path)
    return tensors


def _load(entries: dict[str, Any], folder: Path) -> None:
    # Tensors are filled in place, anything else is put in by key.
    try:
        with warnings.catch_warnings():
            # It only says that one process reads, which is what is wanted here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(entries, checkpoint_id=folder, no_dist=True)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        causes = getattr(error, "failures", {0: (error, None)})
        cause = next(iter(causes.values()))[0]
        raise CheckpointError(
            f"{folder}: cannot be read ({type(cause).__name__}: {cause}): a file in it is damaged "
            "or missing; give another step"
        ) from error


def bundle_config(shape: ModelShape, *, tokenizer: Tokenizer, dtype: str) -> BundleConfig:
    """Return the bundle's configuration for a shape.

    Args:
        shape: The shape of the model.
        tokenizer: Gives the special ids.
        dtype: Type of the exported tensors: float32, bfloat16 or float16.
    """
    return BundleConfig(
        shape=shape,
        final_adapter=shape.adapter_dim > 0,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        dtype=dtype,
    )


def export_checkpoint(
    checkpoint: Path | str,
    out: Path | str,
    *,
    dtype: str = "float32",
    tokenizer: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a training checkpoint as a bundle; a dense model as a plain LlamaForCausalLM.

    Args:
        checkpoint: A step-N folder, or a folder that holds some: then the newest.
        out: The bundle's directory; written whole or not at all.
        dtype: Type of every exported tensor. The default keeps the float32 master weights exactly.
        tokenizer: Tokenizer to put in; default: the one the run trained with.
        max_shard_bytes: Tensor bytes per file.

    Returns:
        The step folder that was exported.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged or not ours.
        TokenizerError: If the tokenizer is missing or does not fit.
        BundleError: If `out` holds something else or cannot be written.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype}: choose one of {', '.join(DTYPES)}")
    folder = read_step_folder(checkpoint)
    text_tokenizer = load_tokenizer(tokenizer or folder.settings["hf_assets_path"])
    tensors = to_bundle(load_native_tensors(folder), folder.shape)
    write_bundle(
        out,
        config=bundle_config(folder.shape, tokenizer=text_tokenizer, dtype=dtype),
        tensors={name: t.to(DTYPES[dtype]).contiguous() for name, t in tensors.items()},
        tokenizer=text_tokenizer,
        provenance=_provenance(folder),
        max_shard_bytes=max_shard_bytes,
    )
    return folder.path


def quantize_bundle(bundle: Path | str, out: Path | str) -> None:
    """Write a bundle as one with int8 matrices: a bit over a quarter of float32's size.

    Args:
        bundle: The bundle to read; its tokenizer and provenance are kept.
        out: The bundle to write, whole or not at all; may be the same.

    Raises:
        BundleError: If the bundle is malformed, quantised already, or a matrix is not finite; if
            `out` holds something else or cannot be written.
        TokenizerError: If its tokenizer cannot be read.
    """
    source = read_bundle(bundle)
    if source.config.quantization is not None:
        raise BundleError(
            f"{source.path}: is quantised to {source.config.quantization} already; "
            "give the bundle or the checkpoint that it was made from"
        )
    write_bundle(
        out,
        config=replace(source.config, dtype="float32", quantization="int8"),
        tensors=source.load_tensors(dtype=torch.float32),
        tokenizer=source.load_tokenizer(),
        provenance=source.provenance,
    )


def _provenance(folder: StepFolder) -> dict[str, Any]:
    """Return the run's settings and, where its metrics are at hand, the last validation."""
    record: dict[str, Any] = {"step": folder.step, "settings": folder.settings_text}
    metrics = folder.run_folder / "metrics.jsonl"
    if metrics.is_file():
        rows = [row for row in read_metrics(metrics) if row.step <= folder.step]
        for row in rows:
            if row.split == "train":
                record["tokens_seen"] = row.tokens
            else:
                record["validation"] = asdict(row)
    return record
