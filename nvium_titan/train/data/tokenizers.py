"""torchtitan's tokenizer component, over the tokenizers of bundles and decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from nvium_titan.text.stream import TextStream
from nvium_titan.text.tokenizer import load_tokenizer


class TextTokenizer(BaseTokenizer):
    """A `nvium_titan.text.tokenizer.Tokenizer` that torchtitan can build."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No keys: the top-level `hf_assets_path` says which tokenizer."""

    def __init__(self, config: Config, *, tokenizer_path: str, **_: Any) -> None:
        """Load the tokenizer.

        Args:
            config: Has no keys.
            tokenizer_path: `byte`, a folder, a tokenizer.json or a tokenizer.model.

        Raises:
            TokenizerError: If there is none, or it cannot be read.
        """
        super().__init__()
        self.tokenizer = load_tokenizer(tokenizer_path)
        """The tokenizer itself, for export."""
        self.eos_id = self.tokenizer.eos_id

    @property
    def kind(self) -> str:
        """`byte`, `sentencepiece` or `hf`."""
        return self.tokenizer.kind

    @property
    def vocab_size(self) -> int:
        """The largest id, plus one."""
        return self.tokenizer.vocab_size

    @property
    def bos_id(self) -> int | None:
        """The id that starts a document, if there is one."""
        return self.tokenizer.bos_id

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the ids of a text."""
        return self.tokenizer.fingerprint

    def get_vocab_size(self) -> int:
        """Return the largest id, plus one."""
        return self.tokenizer.vocab_size

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Return the ids of `text`, no part of which becomes a special id."""
        return self.tokenizer.encode(text, add_bos=add_bos, add_eos=add_eos)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special ids skipped."""
        return self.tokenizer.decode(ids)

    def stream(self, prompt_ids: Sequence[int] = ()) -> TextStream:
        """Return a stream that continues the text of `prompt_ids`."""
        return self.tokenizer.stream(prompt_ids)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into an existing directory."""
        self.tokenizer.save(directory)
