"""`nvium export` and `nvium import`: checkpoints to bundles and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import tyro

from nvium_titan.errors import BundleError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Export:
    """Turn a training checkpoint into a bundle, which decodes without torchtitan.

    A dense model becomes a plain LlamaForCausalLM. Any number of ranks may have saved it. With
    --format reference a checkpoint or a bundle becomes one that the N-vium authors' code loads.

    nvium export runs/debug --out bundles/debug
    """

    checkpoint: tyro.conf.Positional[Path]
    """A step-N folder, or a run's folder: then its newest step; for reference also a bundle."""

    out: Path
    """Folder to write, whole or not at all; an older bundle there is replaced."""

    format: Literal["bundle", "reference"] = "bundle"
    """What to write: a bundle, or a checkpoint of the authors' code."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the exported weights; a bundle keeps its own."""

    tokenizer: str | None = None
    """Tokenizer to put in: "byte", a folder or a file; default: the one of the training run."""

    def run(self) -> None:
        """Write the bundle or the authors' checkpoint.

        Raises:
            BundleError: If a bundle is to become a bundle, or is to change type or tokenizer.
        """
        from nvium_titan.bundle import PROVENANCE_FILE
        from nvium_titan.convert.export import export_checkpoint
        from nvium_titan.convert.reference import export_reference

        source = self.checkpoint
        if (source / PROVENANCE_FILE).is_file():
            if self.format == "bundle" or self.dtype != "float32" or self.tokenizer is not None:
                raise BundleError(
                    f"{source} is a bundle already: it can only take --format reference, and keeps "
                    "its type and tokenizer (no --dtype, no --tokenizer)"
                )
            export_reference(source, self.out)
        elif self.format == "bundle":
            source = export_checkpoint(source, self.out, dtype=self.dtype, tokenizer=self.tokenizer)
        else:
            with TemporaryDirectory(prefix="nvium-") as folder:
                bundle = Path(folder) / "bundle"
                source = export_checkpoint(
                    source, bundle, dtype=self.dtype, tokenizer=self.tokenizer
                )
                export_reference(bundle, self.out)
        print(f"exported {source} to {self.out}")


@dataclass(frozen=True, kw_only=True)
class Import:
    """Turn a Hugging Face LLaMA or a checkpoint of the N-vium authors' code into a bundle.

    nvium import LLAMA_FOLDER --out bundles/dense

    nvium import LLAMA_FOLDER --out bundles/grown --exits 6,12,18

    nvium import CHECKPOINT --out bundles/theirs --tokenizer TOKENIZER
    """

    checkpoint: tyro.conf.Positional[Path]
    """The folder with config.json and model.safetensors (or shards); the authors' is told by its
    exp_config.json or .hydra/config.yaml."""

    out: Path
    """Bundle to write, whole or not at all; an older bundle there is replaced."""

    exits: str | None = None
    """Grow junctions on a pretrained LLaMA after these layers, such as 6,12,18: the final exit's
    logits stay the same to the bit, the routers start near "continue" (w = 0.018)."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to convert a LLaMA to; default: as stored."""

    tokenizer: str | None = None
    """Tokenizer to put in: "byte", a folder or a file; default: the one in the folder."""

    seed: int = 0
    """Seeds the random part of grown junctions."""

    def run(self) -> None:
        """Write the bundle; list what is new in it and the tables that train it.

        Raises:
            BundleError: If --exits or --dtype are given for the authors' format.
            ConfigError: If --exits is not a list of numbers.
        """
        from nvium_titan.convert.hf import import_hf, training_tables
        from nvium_titan.convert.reference import find_experiment, import_reference

        if find_experiment(self.checkpoint) is not None:
            if self.exits is not None or self.dtype is not None:
                raise BundleError(
                    f"{self.checkpoint} is a checkpoint of the authors' code: it has exits and "
                    "keeps its type (no --exits, no --dtype)"
                )
            import_reference(self.checkpoint, self.out, tokenizer=self.tokenizer)
            print(f"imported {self.checkpoint} to {self.out}")
            return
        try:
            exits = [int(word) for word in (self.exits or "").replace(",", " ").split()]
        except ValueError as error:
            raise ConfigError(f"--exits {self.exits}: must be numbers, such as 6,12,18") from error
        new = import_hf(
            self.checkpoint, self.out,
            exits=exits, dtype=self.dtype, tokenizer=self.tokenizer, seed=self.seed,
        )  # fmt: skip
        print(f"imported {self.checkpoint} to {self.out}")
        if new:
            print(f"{len(new)} new tensors, to be trained; the others are as they were:")
            print("\n".join(f"  {name} {list(shape)}" for name, shape in new.items()))
            print(f"\nto train it, put into the TOML file:\n\n{training_tables(self.out)}", end="")
