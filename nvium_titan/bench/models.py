"""The models that a benchmark compares: an N-vium, the dense model of its size, the matched twin.

Dense is the same width and depth with one exit, no adapter and no router. It runs on the same
engine: the strongest baseline we have. The module owns the types that the engine computes in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvium_titan.bundle import BundleConfig, expected_tensors, read_bundle, write_bundle
from nvium_titan.convert.export import bundle_config
from nvium_titan.core.flavors import dense_twin
from nvium_titan.core.shape import ModelShape
from nvium_titan.decode import DecoderParams, Engine
from nvium_titan.decode.forward.build import Kernels
from nvium_titan.decode.params import random_tensors
from nvium_titan.errors import BenchError, nearest
from nvium_titan.text.tokenizer import ByteTokenizer, Tokenizer

ENGINE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
"""Type of the tensors to start from, by the type that the engine computes in."""

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Bytes of a weight, by the same names."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BenchModel:
    """A model before it is packed: its dimensions, and how to get its weights in a type."""

    name: str
    """Its bundle, or its width x layers."""
    config: BundleConfig
    """Dimensions and exits."""
    tokenizer: Tokenizer
    """Its tokenizer; with random weights one that knows every id."""
    load_tensors: Callable[[torch.dtype], Mapping[str, Tensor]]
    """Returns at least the tensors of `expected_tensors(config)`, in a type, on `device`."""
    device: torch.device
    """Where to compute."""

    @classmethod
    def random(
        cls, shape: ModelShape, *, seed: int, device: torch.device | str = "cpu"
    ) -> BenchModel:
        """Return a model with random weights: where exits are forced, they do not affect speed."""
        device = torch.device(device)
        tokenizer = _AnyId(shape.vocab_size)
        config = bundle_config(shape, tokenizer=tokenizer, dtype="float32")
        return cls(
            name=f"{shape.dim}x{shape.num_layers}",
            config=config,
            tokenizer=tokenizer,
            load_tensors=lambda dtype: random_tensors(
                config, seed=seed, dtype=dtype, device=device
            ),
            device=device,
        )

    @classmethod
    def from_bundle(cls, path: Path, *, device: torch.device | str = "cpu") -> BenchModel:
        """Return a trained model.

        Raises:
            BundleError: If the bundle is missing, incomplete or malformed.
            TokenizerError: If its tokenizer cannot be read.
        """
        bundle = read_bundle(path)
        return cls(
            name=str(path),
            # `load_tensors` gives what an int8 bundle stands for, in any type.
            config=dataclasses.replace(bundle.config, quantization=None),
            tokenizer=bundle.load_tokenizer(),
            load_tensors=lambda dtype: bundle.load_tensors(dtype=dtype, device=device),
            device=torch.device(device),
        )

    @property
    def shape(self) -> ModelShape:
        """The model's numbers."""
        return self.config.shape

    @property
    def context(self) -> int:
        """Longest sequence, tokens."""
        return self.shape.max_seq_len

    @property
    def num_params(self) -> int:
        """Parameters, the embedding included."""
        return sum(math.prod(shape) for shape in expected_tensors(self.config).values())

    def dense(self) -> BenchModel:
        """Return the same backbone with its final exit alone: no junctions, no adapter."""
        config = dataclasses.replace(self.config, shape=self.shape.dense(), final_adapter=False)
        return dataclasses.replace(self, config=config)

    def twin(self, *, seed: int) -> BenchModel:
        """Return the dense model with as many parameters, by a wider MLP, with random weights."""
        config = dataclasses.replace(self.config, shape=dense_twin(self.shape), final_adapter=False)
        return dataclasses.replace(
            self,
            config=config,
            load_tensors=lambda dtype: random_tensors(
                config, seed=seed, dtype=dtype, device=self.device
            ),
        )

    def load_params(self, *, dtype: str) -> DecoderParams:
        """Return the weights packed for a type, one of `ENGINE_DTYPES`."""
        return DecoderParams.from_tensors(
            self.config,
            self.load_tensors(ENGINE_DTYPES[dtype]),
            dtype=getattr(torch, dtype),
            num_tokens=self.tokenizer.vocab_size,
        )

    def load_engine(self, *, dtype: str, max_seq_len: int, kernels: Kernels = "auto") -> Engine:
        """Return an engine that computes in a type, one of `ENGINE_DTYPES`."""
        return Engine(self.load_params(dtype=dtype), max_seq_len=max_seq_len, kernels=kernels)

    def write(self, path: Path, *, dtype: str) -> None:
        """Write it as a bundle, for another engine.

        Args:
            path: The bundle directory.
            dtype: Type of its tensors: float32 or bfloat16.
        """
        tensors = self.load_tensors(ENGINE_DTYPES[dtype])
        config = dataclasses.replace(self.config, dtype=dtype)
        write_bundle(
            path,
            config=config,
            tensors={name: tensors[name] for name in expected_tensors(config)},
            tokenizer=self.tokenizer,
            provenance={},
        )


class _AnyId(ByteTokenizer):
    """Bytes for the first ids, nothing for the others, so that no id is padding."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def check_dtypes(names: str) -> list[str]:
    """Return the types in a comma-separated list, each once.

    Raises:
        BenchError: If the engine does not compute in one of them, or there is none.
    """
    dtypes = [name.strip() for name in names.split(",") if name.strip()]
    for name in dtypes:
        if name not in ENGINE_DTYPES:
            raise BenchError(f"--dtypes {names}: {name!r} is unknown{nearest(name, ENGINE_DTYPES)}")
    if not dtypes:
        raise BenchError(f"--dtypes {names!r}: give at least one of {', '.join(ENGINE_DTYPES)}")
    return list(dict.fromkeys(dtypes))
