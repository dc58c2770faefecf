"""A model to decode or score, from a bundle or straight from a training checkpoint.

A checkpoint is converted in memory, tensor by tensor as the export does it, and nothing is written:
the result is that of the float32 bundle.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from nvium_titan.bundle import read_bundle
from nvium_titan.bundle.config import CONFIG_FILE
from nvium_titan.bundle.directory import PROVENANCE_FILE
from nvium_titan.convert.export import bundle_config, load_native_tensors, read_step_folder
from nvium_titan.convert.layout import to_bundle
from nvium_titan.decode import DecoderParams
from nvium_titan.errors import BundleError
from nvium_titan.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer


class LoadedModel(NamedTuple):
    """Weights ready to decode, and the tokenizer that goes with them."""

    params: DecoderParams
    """For `Engine`."""
    tokenizer: Tokenizer
    """The one the model was trained with."""
    path: Path
    """The bundle, or the step folder that was taken."""

    @property
    def dtype(self) -> str:
        """Name of the type it computes in."""
        return "int8" if self.params.is_int8 else str(self.params.dtype).removeprefix("torch.")


def load_model(
    path: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LoadedModel:
    """Return the model at `path`.

    Args:
        path: A bundle; or a step-N folder, or a run's folder: then its newest step, which is
            logged.
        dtype: Type to compute in; None: int8 for a quantised bundle, else float32.
        device: Where to compute.

    Raises:
        BundleError: If there is no such folder, or the bundle is incomplete or malformed.
        CheckpointError: If the folder is neither a bundle nor a readable checkpoint.
        TokenizerError: If the tokenizer is missing or does not fit.
    """
    path = Path(path)
    if not path.is_dir():
        raise BundleError(f"{path}: no such bundle or checkpoint; make a bundle with nvium export")
    if any((path / name).is_file() for name in (CONFIG_FILE, PROVENANCE_FILE)):
        bundle = read_bundle(path)
        params = DecoderParams.from_bundle(path, dtype=dtype, device=device)
        return LoadedModel(params, bundle.load_tokenizer(), path)
    folder = read_step_folder(path)
    tokenizer = load_tokenizer(folder.settings["hf_assets_path"])
    check_vocabulary(tokenizer, folder.shape.vocab_size)
    tensors = to_bundle(load_native_tensors(folder), folder.shape)
    params = DecoderParams.from_tensors(
        bundle_config(folder.shape, tokenizer=tokenizer, dtype="float32"),
        {name: tensor.to(device) for name, tensor in tensors.items()},
        dtype=dtype or torch.float32,
        num_tokens=tokenizer.vocab_size,
    )
    return LoadedModel(params, tokenizer, folder.path)
