"""`nvium export` and `nvium import`: checkpoints to bundles and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import tyro

from nvium_titan.cli.common import load, progress
from nvium_titan.errors import BundleError, ConfigError, DataError

if TYPE_CHECKING:
    from nvium_titan.convert.load import LoadedModel
    from nvium_titan.eval.perplexity import EncodedDocument

HELD_OUT_TOKENS = 4096
"""Tokens of the built-in corpus on which the cost of quantisation is measured."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Turn a training checkpoint into a bundle, which decodes without torchtitan.

    Any number of ranks may have saved the checkpoint. A dense model becomes a plain
    LlamaForCausalLM. With --format reference, a checkpoint or bundle becomes a checkpoint that the
    N-vium authors' code loads. With --quantize int8 it becomes a bundle of little more than a
    quarter of the size, for this decoder only; the cost in perplexity is printed.

    nvium export runs/debug --out bundles/debug

    nvium export bundles/debug --out bundles/debug-int8 --quantize int8
    """

    checkpoint: tyro.conf.Positional[Path]
    """A step-N folder, or a run's folder for its newest step; for reference and int8 also a
    bundle."""

    out: Path
    """Folder to write, whole or not at all; replaces an older bundle."""

    format: Literal["bundle", "reference"] = "bundle"
    """What to write: a bundle, or a checkpoint of the authors' code."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the exported weights; a bundle keeps its own."""

    quantize: Literal["int8"] | None = None
    """Store matrices as int8 with a scale per output, other tensors as float32."""

    text: Path | None = None
    """With --quantize: text to measure the perplexity on, as in nvium eval; default: the first
    4,096 tokens of held-out Python documentation."""

    tokenizer: str | None = None
    """Tokenizer to include: "byte", a folder or a file; default: that of the training run."""

    def run(self) -> None:
        """Write the bundle or the authors' checkpoint.

        Raises:
            BundleError: If flags exclude each other, or ask for what a bundle cannot become.
        """
        from nvium_titan.bundle.directory import PROVENANCE_FILE
        from nvium_titan.convert.export import export_checkpoint
        from nvium_titan.convert.reference import export_reference

        source = self.checkpoint
        is_bundle = (source / PROVENANCE_FILE).is_file()
        self._check(is_bundle=is_bundle)
        if self.format == "bundle" and self.quantize is None:
            source = export_checkpoint(source, self.out, dtype=self.dtype, tokenizer=self.tokenizer)
            print(f"exported {source} to {self.out}")
            return
        with TemporaryDirectory(prefix="nvium-") as folder:
            bundle = source if is_bundle else Path(folder) / "bundle"
            if not is_bundle:
                source = export_checkpoint(
                    source, bundle, dtype=self.dtype, tokenizer=self.tokenizer
                )
            if self.quantize is None:
                export_reference(bundle, self.out)
                report = []
            else:
                report = _quantize(bundle, self.out, text=self.text)
        print("\n".join([f"exported {source} to {self.out}", *report]))

    def _check(self, *, is_bundle: bool) -> None:
        if self.quantize is None and self.text is not None:
            raise BundleError(
                f"--text {self.text} measures what --quantize costs; add --quantize int8, or use "
                "nvium eval"
            )
        if self.quantize is not None and self.format == "reference":
            raise BundleError(
                f"--quantize {self.quantize} goes with --format bundle: the authors' code reads "
                "float weights only; leave one of them out"
            )
        if self.quantize is not None and self.dtype != "float32":
            raise BundleError(
                f"--quantize {self.quantize} stores matrices as int8 and the rest as float32; "
                f"leave out --dtype {self.dtype}"
            )
        if is_bundle and (
            (self.format == "bundle" and self.quantize is None)
            or self.dtype != "float32"
            or self.tokenizer is not None
        ):
            raise BundleError(
                f"{self.checkpoint} is a bundle already: it can only take --quantize int8 or "
                "--format reference, and keeps its type and tokenizer (no --dtype, no --tokenizer)"
            )


def _quantize(bundle: Path, out: Path, *, text: Path | None) -> list[str]:
    """Write an int8 bundle; return what it saves and costs, a line each."""
    from nvium_titan.bundle import read_bundle
    from nvium_titan.bundle.config import stored_bytes
    from nvium_titan.convert.export import quantize_bundle
    from nvium_titan.eval.perplexity import encode_documents, read_documents

    # Read first: `out` may be the same folder.
    config = read_bundle(bundle).config
    model = load(bundle, dtype="float32", device="cpu")
    documents = encode_documents(
        _held_out() if text is None else read_documents(text),
        model.tokenizer,
        max_tokens=HELD_OUT_TOKENS if text is None else None,
    )
    quantize_bundle(bundle, out)
    before = _perplexity(model, documents, title="tokens scored before")
    after = _perplexity(load(out, dtype=None, device="cpu"), documents, title="and with int8")
    mb, mb_int8 = (stored_bytes(c) / 1e6 for c in (config, read_bundle(out).config))
    num_tokens = sum(len(document.token_ids) - 1 for document in documents)
    name = "held-out Python documentation" if text is None else str(text)
    return [
        f"weights on disk: {mb:,.1f} MB ({config.dtype}) -> {mb_int8:,.1f} MB (int8)",
        f"perplexity on {num_tokens:,} tokens of {name}: {before:.3f} -> {after:.3f} "
        f"({after / before - 1:+.2%})",
    ]


def _held_out() -> Iterator[str]:
    """Yield the documents that the built-in corpus keeps for validation, in order.

    Raises:
        DataError: If this Python has no documentation installed.
    """
    from nvium_titan.text.documents import Document, TextStore
    from nvium_titan.train.data.python_docs import python_docs
    from nvium_titan.train.data.sources import IndexedSource

    try:
        store = TextStore(python_docs())
    except DataError as error:
        raise DataError(
            "this Python comes without documentation to measure perplexity on; give --text FILE"
        ) from error
    source = IndexedSource(store, name="python_docs", split="validation", seed=0)
    return (item.text for item in source.documents() if isinstance(item, Document))


def _perplexity(model: LoadedModel, documents: Sequence[EncodedDocument], *, title: str) -> float:
    """Return the perplexity per token of the mixture."""
    from nvium_titan.decode import Engine
    from nvium_titan.eval.perplexity import evaluate

    total = sum(len(document.token_ids) - 1 for document in documents)
    with progress(title, total=total) as report:
        result = evaluate(Engine(model.params), model.tokenizer, documents, on_progress=report)
    return result.modes[0].token_perplexity or math.inf


@dataclass(frozen=True, kw_only=True)
class Import:
    """Turn a Hugging Face LLaMA or a checkpoint of the N-vium authors' code into a bundle.

    nvium import LLAMA_FOLDER --out bundles/dense

    nvium import LLAMA_FOLDER --out bundles/grown --exits 6,12,18

    nvium import CHECKPOINT --out bundles/theirs --tokenizer TOKENIZER
    """

    checkpoint: tyro.conf.Positional[Path]
    """The folder with config.json and model.safetensors or its shards; one with exp_config.json or
    .hydra/config.yaml is the authors'."""

    out: Path
    """Bundle to write, whole or not at all; replaces an older bundle."""

    exits: str | None = None
    """Add junctions to a pretrained LLaMA after these layers, such as 6,12,18. The final exit's
    logits stay the same to the bit; routers start near "continue" (w = 0.018)."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to convert a LLaMA to; default: as it is stored."""

    tokenizer: str | None = None
    """Tokenizer to include: "byte", a folder or a file; default: the one in the folder."""

    seed: int = 0
    """Decides the random weights of new junctions."""

    def run(self) -> None:
        """Write the bundle; list its new tensors and the TOML tables that train them.

        Raises:
            BundleError: If --exits or --dtype are given for a checkpoint of the authors' code.
            ConfigError: If --exits is not a list of numbers.
        """
        from nvium_titan.convert.hf import import_hf, training_tables
        from nvium_titan.convert.reference import find_experiment, import_reference

        if find_experiment(self.checkpoint) is not None:
            if self.exits is not None or self.dtype is not None:
                raise BundleError(
                    f"{self.checkpoint} is a checkpoint of the authors' code: it has exits and "
                    "keeps its type; leave out --exits and --dtype"
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
            print(f"{len(new)} new tensors, which need training; the others are unchanged:")
            print("\n".join(f"  {name} {list(shape)}" for name, shape in new.items()))
            print(f"\nto train them, add to the TOML file:\n\n{training_tables(self.out)}", end="")
