"""The authors' checkpoints in tests/data/golden, as bundles and as training models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor
from torchtitan.models.common import ComplexRoPE

from nvium_titan.bundle import Bundle, BundleConfig, read_bundle
from nvium_titan.convert.layout import to_native
from nvium_titan.convert.reference import import_reference
from nvium_titan.core.shape import ModelShape
from nvium_titan.train.model import model_spec
from nvium_titan.train.model.model import NviumModel

MODELS = ("nvium_mha", "nvium_gqa", "nvium_uneven")


def load_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def save_word_tokenizer(folder: Path, *, num_ids: int = 256) -> Path:
    """Write a tokenizer.json of `num_ids` words: the golden models have none of their own."""
    words = {f"w{index}": index for index in range(num_ids)}
    path = folder / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(path))
    return path


def import_golden(folder: Path, scratch: Path) -> Bundle:
    import_reference(folder, scratch / folder.name, tokenizer=str(save_word_tokenizer(scratch)))
    return read_bundle(scratch / folder.name)


def training_model(config: BundleConfig, tensors: dict[str, Tensor]) -> NviumModel:
    """Build the model that is trained, of the tensors' type, from a bundle's tensors."""
    shape = config.shape
    model = model_spec(shape, flavor="test").model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    native = to_native(tensors, shape)
    if native["lm_head.weight"].dtype == torch.float64:
        model.double()
        for module in model.modules():
            if isinstance(module, ComplexRoPE):
                module.cache = _double_cache(shape)
    model.load_state_dict(native)
    return model


def _double_cache(shape: ModelShape) -> Tensor:
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    position = torch.arange(shape.max_seq_len, dtype=torch.float64)
    angle = torch.outer(position, shape.rope_theta**-exponent)
    return torch.polar(torch.ones_like(angle), angle)


def rotate_in_double(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `ComplexRoPE.apply_rotary_emb` does, without its cast to float32."""

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rope_cache).flatten(3)

    return rotated(query), rotated(key)
