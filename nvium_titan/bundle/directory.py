"""Reading and writing the bundle's directory: whole or not at all, checked by name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nvium_titan import __version__
from nvium_titan.bundle.config import (
    CONFIG_FILE,
    DTYPES,
    MODELING_FILE,
    BundleConfig,
    expected_tensors,
    stored_tensors,
)
from nvium_titan.bundle.quantization import dequantize, quantize_int8
from nvium_titan.errors import BundleError
from nvium_titan.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PROVENANCE_FILE = "nvium.json"

# A bundle carries this file; it is copied, never imported here.
_MODELING_SOURCE = Path(__file__).parent.parent / "convert" / "hf_modeling_nvium.py"

_BUNDLE_FILE = re.compile(
    r"(config|generation_config|nvium|tokenizer|tokenizer_config)\.json|modeling_nvium\.py"
    r"|tokenizer\.model|model.*\.safetensors|model\.safetensors\.index\.json"
)

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A checked bundle on disk; its tensors are read on demand."""

    path: Path
    """The directory."""
    config: BundleConfig
    """The model's dimensions."""
    tokenizer_vocab_size: int
    """Ids the tokenizer knows; rows of the head from here on are padding, never to be sampled."""
    provenance: Mapping[str, Any]
    """What the exporter recorded: run configuration, step, versions, exit shares."""
    tensor_files: Mapping[str, str]
    """The file that holds each stored tensor."""

    def load_tensors(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Return every tensor of `expected_tensors(config)` by name, as new tensors.

        Args:
            dtype: Type to convert to; `config.dtype` if None.
            device: Where to put them.
        """
        tensors = {}
        for file in sorted(set(self.tensor_files.values())):
            with safe_open(self.path / file, framework="pt", device=str(device)) as reader:
                for name in reader.keys():  # noqa: SIM118 (a reader is not a mapping)
                    tensors[name] = reader.get_tensor(name)
        dtype = DTYPES[self.config.dtype] if dtype is None else dtype
        return dequantize({name: tensors[name] for name in self.tensor_files}, dtype=dtype)

    def load_tokenizer(self) -> Tokenizer:
        """Return the bundle's tokenizer.

        Raises:
            TokenizerError: If its files cannot be read or it has more ids than the model.
        """
        tokenizer = load_tokenizer(self.path)
        check_vocabulary(tokenizer, self.config.shape.vocab_size)
        return tokenizer


def write_bundle(
    directory: Path | str,
    *,
    config: BundleConfig,
    tensors: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer,
    provenance: Mapping[str, Any],
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a bundle whole or not at all: into a folder beside `directory`, then renamed.

    An older bundle at `directory` is replaced; anything else there is left alone and refused.

    Args:
        directory: The bundle to write.
        config: Its dimensions; `config.dtype` is the type every tensor must have. They are
            quantised here if it says so.
        tensors: Exactly the tensors of `expected_tensors(config)`, on any device.
        tokenizer: Saved with it; at most `config.shape.vocab_size` ids.
        provenance: Anything JSON can hold, kept in `nvium.json`.
        max_shard_bytes: Tensor bytes per file; more than one file gets an index.

    Raises:
        BundleError: If a tensor is missing, extra, or of the wrong shape or type; if one to be
            quantised is not finite; if `directory` holds something else; if writing fails.
        TokenizerError: If the tokenizer has more ids than the model.
    """
    target = Path(directory).resolve()
    check_vocabulary(tokenizer, config.shape.vocab_size)
    found = {
        name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()
    }
    check_tensors(found, replace(config, quantization=None), source="the model to export")
    _check_replaceable(target)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        ordered = {name: tensors[name] for name in expected_tensors(config)}
        stored = quantize_int8(ordered) if config.quantization else ordered
        _write_tensors(partial, stored, max_shard_bytes)
        tokenizer.save(partial)
        _write_json(partial / CONFIG_FILE, config.to_json())
        if not config.is_plain_llama and config.quantization is None:
            shutil.copyfile(_MODELING_SOURCE, partial / MODELING_FILE)
        _write_json(partial / "generation_config.json", _generation_config(config, tokenizer))
        record = {
            "format_version": FORMAT_VERSION,
            "nvium_titan_version": __version__,
            "torch_version": torch.__version__,
            "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size},
            "provenance": dict(provenance),
        }
        _write_json(partial / PROVENANCE_FILE, record)
        _swap_in(partial, target)
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{target}: cannot write the bundle: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_bundle(directory: Path | str) -> Bundle:
    """Return the bundle at `directory` after checking its files, names, shapes and types.

    Only the headers of the tensor files are read.

    Raises:
        BundleError: If a file is missing or malformed, or a tensor is missing, extra or wrong.
    """
    path = Path(directory)
    if not path.is_dir():
        raise BundleError(f"{path}: no such bundle directory; make one with `nvium export`")
    record = read_json(path / PROVENANCE_FILE)
    if record.get("format_version") != FORMAT_VERSION:
        raise BundleError(
            f"{path / PROVENANCE_FILE}: format_version={record.get('format_version')!r}: "
            f"this release reads {FORMAT_VERSION}; export the model again"
        )
    config = BundleConfig.from_json(read_json(path / CONFIG_FILE), source=str(path / CONFIG_FILE))
    files, found = read_headers(path)
    check_tensors(found, config, source=str(path))
    vocab_size = record.get("tokenizer", {}).get("vocab_size")
    if not isinstance(vocab_size, int) or not isinstance(record.get("provenance"), dict):
        raise BundleError(
            f"{path / PROVENANCE_FILE}: keys tokenizer.vocab_size and provenance are required; "
            "export the model again"
        )
    return Bundle(
        path=path,
        config=config,
        tokenizer_vocab_size=vocab_size,
        provenance=record["provenance"],
        tensor_files={name: files[name] for name in stored_tensors(config)},
    )


def check_tensors(
    found: Mapping[str, tuple[tuple[int, ...], str]], config: BundleConfig, *, source: str
) -> None:
    """Check that tensors are exactly those that a bundle of this configuration stores.

    Args:
        found: Shape and type of each tensor, as from `read_headers`.
        config: The configuration.
        source: Where they are, for the message.

    Raises:
        BundleError: If a tensor is missing, extra, or of another shape or type.
    """
    expected = stored_tensors(config)
    faults = []
    for what, names in (
        ("missing", [name for name in expected if name not in found]),
        ("not part of the model", [name for name in found if name not in expected]),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            faults.append(f"tensors {what}: {', '.join(names[:3])}{more}")
    for name, (shape, dtype) in expected.items():
        if name in found and found[name] != (shape, dtype):
            got_shape, got_dtype = found[name]
            faults.append(
                f"tensor {name} is {list(got_shape)} {got_dtype}, "
                f"config.json asks for {list(shape)} {dtype}"
            )
            break
    if faults:
        raise BundleError(f"{source}: {'; '.join(faults)}")


def read_headers(path: Path) -> tuple[dict[str, str], dict[str, tuple[tuple[int, ...], str]]]:
    """Return the file of every tensor in a folder, and its shape and type, by name.

    Args:
        path: Holds model.safetensors, or shards with their index.

    Raises:
        BundleError: If a file is missing or damaged.
    """
    if (path / INDEX_FILE).exists():
        names = sorted(set(read_json(path / INDEX_FILE).get("weight_map", {}).values()))
    else:
        names = [WEIGHTS_FILE]
    files: dict[str, str] = {}
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in names:
        if not (path / file).is_file():
            raise BundleError(f"{path}: file {file} is missing; copy or export the bundle again")
        try:
            with safe_open(path / file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (a reader is not a mapping)
                    view = reader.get_slice(name)
                    dtype = _SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype())
                    files[name], found[name] = file, (tuple(view.get_shape()), dtype)
        except SafetensorError as error:
            raise BundleError(f"{path / file}: damaged or cut short: {error}") from error
    return files, found


def _write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> None:
    """Write one file, or numbered shards and an index as Hugging Face names them."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        single = len(shards) == 1
        file = WEIGHTS_FILE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(ready, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / INDEX_FILE, index)


def _generation_config(config: BundleConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what `generate` of transformers reads: ids of a padded vocabulary are not sampled."""
    padding = list(range(tokenizer.vocab_size, config.shape.vocab_size))
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    return ids | ({"suppress_tokens": padding} if padding else {})


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if (target / PROVENANCE_FILE).is_file():
        # Replacing a bundle must take nothing along that is not the bundle's.
        foreign = [path for path in target.iterdir() if not _BUNDLE_FILE.fullmatch(path.name)]
        if foreign:
            raise BundleError(
                f"{target}: is a bundle, but {min(foreign).name} in it is not part of one and "
                "would be lost; move it away, or choose another output directory"
            )
        return
    if not target.is_dir() or any(target.iterdir()):
        raise BundleError(
            f"{target}: exists and is not a bundle (no {PROVENANCE_FILE}); "
            "choose another output directory"
        )


def _swap_in(partial: Path, target: Path) -> None:
    """Put `partial` at `target`; an older bundle stays until the new one is in place."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        BundleError: If it is missing or holds anything else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BundleError(
            f"{path.parent}: file {path.name} is missing; "
            "bundles are made with `nvium export` and `nvium import`"
        ) from error
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise BundleError(f"{path}: must hold a JSON object, found {type(data).__name__}")
    return data
