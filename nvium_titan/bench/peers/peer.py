"""What peers share: the clock, and the model as a plain Hugging Face folder."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models

from nvium_titan.bench.systems import Timing
from nvium_titan.bundle import Bundle
from nvium_titan.bundle.config import CONFIG_FILE
from nvium_titan.errors import BenchError


class Peer(ABC):
    """A `System` of other people, timed by the tokens it hands over."""

    def __init__(self, *, name: str, dtype: str, version: str, threads: int) -> None:
        """Take what tables show; the arguments are the attributes of a `System`."""
        self.name = name
        self.dtype = dtype
        self.version = version
        self.threads = threads

    @abstractmethod
    def generate(
        self, prompt_ids: Sequence[int], num_new_tokens: int, on_token: Callable[[int], object]
    ) -> None:
        """Continue the prompt greedily, past any end token.

        Args:
            prompt_ids: At least one token.
            num_new_tokens: Tokens to make; the sequence must fit.
            on_token: Called with each token as soon as the engine hands it over.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop the model; nothing may be run afterwards."""

    def run(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Timing:
        """Return the times of one generation: to the first token, and from there to the last.

        Raises:
            BenchError: If the engine makes another number of tokens.
        """
        token_s: list[float] = []
        start_s = time.perf_counter()
        self.generate(prompt_ids, num_new_tokens, lambda _: token_s.append(time.perf_counter()))
        if len(token_s) != num_new_tokens:
            raise BenchError(
                f"peer {self.name}: made {len(token_s)} tokens, asked for {num_new_tokens}"
            )
        return Timing(
            num_new_tokens=num_new_tokens,
            ttft_s=token_s[0] - start_s,
            decode_s=token_s[-1] - token_s[0],
        )


def write_plain_folder(bundle: Bundle, folder: Path, *, max_seq_len: int) -> None:
    """Lay out a bundle for converters that read Hugging Face folders; weights are linked.

    Args:
        bundle: The model.
        folder: The folder to write.
        max_seq_len: Longest sequence of the measurement.
    """
    folder.mkdir(exist_ok=True)
    config = bundle.config.to_json() | {
        "max_position_embeddings": max_seq_len, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    for source in bundle.path.glob("model*.safetensors*"):
        link = folder / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source.resolve())
    # A word per row of the embedding, so that no converter changes the vocabulary.
    words = token_words(bundle.config.shape.vocab_size)
    word_level = models.WordLevel({word: index for index, word in enumerate(words)}, words[0])
    Tokenizer(word_level).save(str(folder / "tokenizer.json"))
    special = {"bos_token": words[0], "eos_token": words[1], "unk_token": words[0]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | special), encoding="utf-8"
    )


def token_words(vocab_size: int) -> list[str]:
    """Return a word for every token id."""
    return [f"t{index}" for index in range(vocab_size)]
