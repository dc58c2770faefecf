"""`nvium eval`: perplexity of a text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from nvium_titan.cli.common import load, progress

if TYPE_CHECKING:
    from nvium_titan.report.records import PerplexityResult


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure the perplexity of a text, per token, word and byte.

    One pass scores the mixture (the model), each early exit alone and the final exit alone. BOS
    starts every document; its end is not scored. A training checkpoint is converted in memory.

    nvium eval bundles/debug --text held_out.jsonl --window 1024 --stride 512 --tokens 5000000
    """

    bundle: tyro.conf.Positional[Path]
    """A bundle from nvium export; or a step-N folder, or a run's folder: then its newest step."""

    text: Path
    """A .jsonl with a document per row, or any other text file: one document."""

    text_column: str = "text"
    """Key of the text in a row."""

    tokens: int | None = None
    """Score the first N tokens; default: all."""

    window: int | None = None
    """Most tokens of context of a prediction; default: the model's context."""

    stride: int | None = None
    """Tokens that each further window scores, with window - stride before them at least; default:
    window."""

    batch_size: int = 1
    """Windows handed to the engine at once; no result depends on it."""

    dtype: Literal["float32", "bfloat16", "float64", "int8"] | None = None
    """Type to compute in; int8 means int8 weights, the rest in float32. Default: int8 for a
    quantised bundle, otherwise float32. Sums are float64."""

    device: str = "cpu"
    """cpu, cuda or cuda:N."""

    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Score and print."""
        import torch

        from nvium_titan.decode import Engine
        from nvium_titan.eval.perplexity import encode_documents, evaluate, read_documents

        torch.set_flush_denormal(True)  # as in training; denormal numbers are slow on a CPU
        model = load(self.bundle, dtype=self.dtype, device=self.device)
        documents = encode_documents(
            read_documents(self.text, text_column=self.text_column),
            model.tokenizer,
            max_tokens=self.tokens,
        )
        total = sum(len(document.token_ids) - 1 for document in documents)
        with progress("tokens scored", total=total) as report:
            result = evaluate(
                Engine(model.params),
                model.tokenizer,
                documents,
                window=self.window,
                stride=self.stride,
                batch_size=self.batch_size,
                on_progress=report,
            )
        if self.json:
            settings = {
                "model": str(model.path),
                "text": str(self.text),
                "dtype": model.dtype,
                "device": self.device,
            }
            print(json.dumps({**settings, **asdict(result)}))
        else:
            print(_perplexities(result))


def _perplexities(result: PerplexityResult) -> str:
    names = ("token", "word", "byte")
    lines = [f"{'perplexity per':16}" + "".join(f"{name:>12}" for name in names)]
    for mode in result.modes:
        values = [getattr(mode, f"{name}_perplexity") for name in names]
        shown = (f"{value:12.6g}" if value is not None else f"{'-':>12}" for value in values)
        lines.append(f"{mode.mode:16}" + "".join(shown))
    start = "after BOS" if result.starts_with_bos else "no BOS: first token of each unscored"
    counts = (result.num_tokens, result.num_words, result.num_bytes)
    lines += [
        f"{'counts':16}" + "".join(f"{count:12}" for count in counts),
        f"{'exit shares':16}" + "".join(f"{share:12.3f}" for share in result.exit_shares),
        f"window {result.window}, stride {result.stride}, documents {result.num_documents} "
        f"({start}; EOS not scored)",
    ]
    return "\n".join(lines)
