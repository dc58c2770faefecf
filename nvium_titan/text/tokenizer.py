"""Text to token ids and back: bytes, sentencepiece and Hugging Face tokenizers.

No text becomes a special id: `</s>` in a document or a prompt is four ordinary characters. Only
`add_bos` and `add_eos` add special ids, and decoding skips them. The stream is the only decoder;
`decode` joins what it gives, so that streamed and decoded text agree.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers

from nvium_titan.errors import TokenizerError
from nvium_titan.text.hf_json import (
    BYTE_BOS,
    BYTE_EOS,
    byte_tokenizer_json,
    sentencepiece_json,
)
from nvium_titan.text.stream import ByteStream, TextStream, WindowStream

CONFIG_FILE = "tokenizer_config.json"
HF_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
_KIND_KEY = "nvium_kind"


class Tokenizer(Protocol):
    """What training, export and decoding need of a tokenizer."""

    @property
    def kind(self) -> str:
        """`byte`, `sentencepiece` or `hf`."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id, plus one."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that starts a document, if there is one."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of what decides the ids of a text: kind, model file, special ids."""
        ...

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Return the ids of `text`; a lone surrogate is encoded as `?`.

        Args:
            text: Any text; no part of it becomes a special id.
            add_bos: Whether to start with `bos_id`, if there is one.
            add_eos: Whether to end with `eos_id`, if there is one.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special ids.

        Raises:
            TokenizerError: If the tokenizer has no such id.
        """
        ...

    def stream(self, prompt_ids: Sequence[int] = ()) -> TextStream:
        """Return a stream that continues the text of `prompt_ids`, without repeating it.

        After a prompt the first word keeps the space in front of it.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into an existing directory."""
        ...


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that every token id has a row in the model's embedding; further rows are padding.

    Raises:
        TokenizerError: If the tokenizer has more ids than the model.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the {tokenizer.kind} tokenizer has {tokenizer.vocab_size} ids, but the model has "
            f"vocab_size={vocab_size}; set [model] vocab_size to at least {tokenizer.vocab_size} "
            "or choose another tokenizer"
        )


class _Base(ABC):
    """What the three kinds share: special ids and decoding."""

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @property
    def fingerprint(self) -> str:
        special = f"{self.kind} {self.vocab_size} {self.bos_id} {self.eos_id} "
        return hashlib.sha256(special.encode() + self._model_bytes()).hexdigest()

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        ids = self._encode_text(text.encode("utf-8", "replace").decode("utf-8"))
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        eos = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*bos, *ids, *eos]

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream(self, prompt_ids: Sequence[int] = ()) -> TextStream:
        stream = self._new_stream()
        for token_id in prompt_ids:
            stream.push(token_id)
        return stream

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]: ...

    @abstractmethod
    def _new_stream(self) -> TextStream: ...

    @abstractmethod
    def _model_bytes(self) -> bytes: ...

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"token id {token_id}: the {self.kind} tokenizer has ids 0..{self.vocab_size - 1}"
            )


class ByteTokenizer(_Base):
    """UTF-8 bytes as ids 0..255, then 256 (start) and 257 (end); without a file."""

    kind = "byte"
    vocab_size = 258
    bos_id = 256
    eos_id = 257

    def _encode_text(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _new_stream(self) -> TextStream:
        return ByteStream(self._token_bytes, strip_first_space=False)

    def _model_bytes(self) -> bytes:
        return b""

    def _token_bytes(self, token_id: int) -> bytes:
        self._check_id(token_id)
        return bytes([token_id]) if token_id < 256 else b""

    def save(self, directory: Path) -> None:
        """Write a config that names the kind, and a `tokenizer.json` with the same ids."""
        byte_tokenizer_json().save(str(directory / HF_FILE))
        base = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BYTE_BOS,
            "eos_token": BYTE_EOS,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }
        _write_config(directory, kind=self.kind, base=base)


class SentencePieceTokenizer(_Base):
    """A sentencepiece `tokenizer.model`, such as LLaMA-2's."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        """Load the model.

        Raises:
            TokenizerError: If the file is not a sentencepiece model.
        """
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise TokenizerError(f"{path}: not a sentencepiece model: {error}") from error
        self.vocab_size = self._model.vocab_size()
        # Negative if the model has none. Both are control pieces, which no text can spell.
        self.bos_id = _id_or_none(self._model.bos_id())
        self.eos_id = _id_or_none(self._model.eos_id())
        self._bytes = [self._piece_bytes(token_id) for token_id in range(self.vocab_size)]
        # Whether decoding drops the space that encoding puts in front of the first word.
        pieces = map(self._model.id_to_piece, range(self.vocab_size))
        word = next((p for p in pieces if p[0] == "\u2581" != p[1:2] and len(p) > 1), None)
        self._strips_first_space = word is not None and self._model.decode_pieces([word])[:1] != " "

    def _piece_bytes(self, token_id: int) -> bytes:
        if self._model.is_control(token_id):
            return b""
        if self._model.is_byte(token_id):
            return bytes([int(self._model.id_to_piece(token_id)[3:5], 16)])
        if self._model.is_unknown(token_id):
            return str(self._model.decode([token_id])).encode()
        return str(self._model.id_to_piece(token_id)).replace("\u2581", " ").encode()

    def _encode_text(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def _new_stream(self) -> TextStream:
        return ByteStream(self._token_bytes, strip_first_space=self._strips_first_space)

    def _model_bytes(self) -> bytes:
        return bytes(self._model.serialized_model_proto())

    def _token_bytes(self, token_id: int) -> bytes:
        self._check_id(token_id)
        return self._bytes[token_id]

    def save(self, directory: Path) -> None:
        """Write `tokenizer.model`, a config and, if the format allows, a `tokenizer.json`."""
        (directory / SENTENCEPIECE_FILE).write_bytes(self._model.serialized_model_proto())
        converted = sentencepiece_json(self._model)
        if converted is not None:
            converted.save(str(directory / HF_FILE))
        ids = {
            "bos_token": self.bos_id,
            "eos_token": self.eos_id,
            "unk_token": self._model.unk_id(),
        }
        base = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "legacy": False,
            "clean_up_tokenization_spaces": False,
        } | {key: None if i is None else self._model.id_to_piece(i) for key, i in ids.items()}
        _write_config(directory, kind=self.kind, base=base)


class HuggingFaceTokenizer(_Base):
    """A `tokenizer.json`, with special tokens from the `tokenizer_config.json` beside it."""

    kind = "hf"

    def __init__(self, path: Path) -> None:
        """Load the two files.

        Raises:
            TokenizerError: If a file cannot be read, if the two disagree about an id, or if a
                text could spell a special token.
        """
        self._config = _read_config(path.parent)
        try:
            self._json = path.read_bytes()
            self._model = tokenizers.Tokenizer.from_buffer(self._json)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path}: not a tokenizer.json: {error}") from error
        self._model.no_padding()
        self._model.no_truncation()
        self._add_special_tokens(path)
        self._model.encode_special_tokens = True
        vocab = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.bos_id = vocab.get(_token_text(self._config, "bos_token"))
        self.eos_id = vocab.get(_token_text(self._config, "eos_token"))
        added = self._model.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        unknown = vocab.get(getattr(self._model.model, "unk_token", None) or "")
        for token_id in self._special_ids - {unknown}:
            if token_id in self._encode_text(added[token_id].content):
                raise TokenizerError(
                    f"{path}: the text {added[token_id].content!r} encodes to special id "
                    f"{token_id}, so a document could contain it; remove the token from the "
                    "model's vocabulary and keep it in added_tokens"
                )

    def _add_special_tokens(self, path: Path) -> None:
        # What only tokenizer_config.json calls special must be special in the model too.
        listed = self._config.get("added_tokens_decoder", {})
        wanted = {
            int(key): token["content"] for key, token in listed.items() if token.get("special")
        }
        names = [*(wanted[key] for key in sorted(wanted))]
        names += [_token_text(self._config, key) for key in ("bos_token", "eos_token")]
        self._model.add_special_tokens(
            [tokenizers.AddedToken(name, normalized=False) for name in dict.fromkeys(names) if name]
        )
        for token_id, name in wanted.items():
            if self._model.token_to_id(name) != token_id:
                raise TokenizerError(
                    f"{path.parent / CONFIG_FILE}: added_tokens_decoder gives {name!r} id "
                    f"{token_id}, {path.name} gives it {self._model.token_to_id(name)}"
                )

    def _encode_text(self, text: str) -> list[int]:
        return list(self._model.encode(text, add_special_tokens=False).ids)

    def _new_stream(self) -> TextStream:
        return WindowStream(self._decode_window, self._is_text)

    def _model_bytes(self) -> bytes:
        # Special tokens may be in tokenizer_config.json alone.
        return self._json + repr(sorted(self._special_ids)).encode()

    def _decode_window(self, ids: list[int]) -> str:
        return str(self._model.decode(ids, skip_special_tokens=False))

    def _is_text(self, token_id: int) -> bool:
        self._check_id(token_id)
        return token_id not in self._special_ids

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` as it was read, and its config."""
        (directory / HF_FILE).write_bytes(self._json)
        _write_config(directory, kind=self.kind, base=self._config)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Return the tokenizer at `path`.

    Args:
        path: `byte`, a directory with tokenizer files, or a `.json` or `.model` file. In a
            directory that `save` did not write, `tokenizer.model` is preferred to
            `tokenizer.json`.

    Raises:
        TokenizerError: If there is no tokenizer, or it cannot be read.
    """
    if path == "byte":
        return ByteTokenizer()
    path = Path(path).expanduser()
    if not path.exists():
        raise TokenizerError(
            f"tokenizer {path}: no such file or directory; give a directory with {HF_FILE} or "
            f"{SENTENCEPIECE_FILE}, one of these files, or 'byte', which needs no file"
        )
    if path.is_dir():
        kind = _read_config(path).get(_KIND_KEY)
        if kind == ByteTokenizer.kind:
            return ByteTokenizer()
        files = [SENTENCEPIECE_FILE, HF_FILE]
        if kind == HuggingFaceTokenizer.kind:
            files.reverse()
        found = [path / file for file in files if (path / file).is_file()]
        if not found:
            raise TokenizerError(
                f"tokenizer {path}: the directory holds neither {HF_FILE} nor {SENTENCEPIECE_FILE}"
            )
        path = found[0]
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    raise TokenizerError(
        f"tokenizer {path}: must end in .json (Hugging Face) or .model (sentencepiece)"
    )


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{file}: must hold a JSON object, found {type(config).__name__}")
    return config


def _token_text(config: dict[str, Any], key: str) -> str:
    """Return a token stored as a string or as {"content": ...}; "" if there is none."""
    token = config.get(key)
    return str(token["content"] if isinstance(token, dict) else token or "")


def _write_config(directory: Path, *, kind: str, base: dict[str, Any]) -> None:
    """Write `tokenizer_config.json`."""
    # With split_special_tokens transformers, too, takes special tokens in a text for text.
    config = {**base, "split_special_tokens": True, _KIND_KEY: kind}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
