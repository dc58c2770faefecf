"""Byte and sentencepiece tokenizers as a Hugging Face `tokenizer.json`, for readers of bundles.

No token is "added", since readers look for added tokens in text: `</s>` in a text stays text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BYTE_BOS, BYTE_EOS = "<|bos|>", "<|eos|>"
_SPACE = "\u2581"  # sentencepiece's visible space


def byte_tokenizer_json() -> Tokenizer:
    """Return the byte tokenizer as a BPE without merges: an id per byte, then start and end."""
    # The ByteLevel steps below use GPT-2's printable stand-ins for bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocab = {letters[byte]: byte for byte in range(256)} | {BYTE_BOS: 256, BYTE_EOS: 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _starting_with(BYTE_BOS, vocab[BYTE_BOS])
    return tokenizer


def sentencepiece_json(model: sentencepiece.SentencePieceProcessor) -> Tokenizer | None:
    """Return a sentencepiece model as a Hugging Face tokenizer with the same ids, if there is one.

    There is one for LLaMA-2's kind: a BPE with byte fallback that does not normalise the text.
    """
    # As a unigram model, for example, that format reads `</s>` in a text as the end token.
    spec = _Spec.of(model.serialized_model_proto())
    if not spec.is_plain_bpe:
        return None
    vocab = {str(model.id_to_piece(i)): i for i in range(model.vocab_size())}
    plain = {
        piece: i
        for piece, i in vocab.items()
        if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))
    }
    ranked = sorted(plain, key=lambda piece: (-model.get_score(plain[piece]), plain[piece]))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[pair for piece in ranked for pair in _splits(piece, plain)],
            unk_token=str(model.id_to_piece(model.unk_id())),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if spec.add_dummy_prefix else []
    strip = [decoders.Strip(content=" ", left=1, right=0)] if spec.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    if model.bos_id() >= 0:
        tokenizer.post_processor = _starting_with(
            str(model.id_to_piece(model.bos_id())), model.bos_id()
        )
    return tokenizer


def _starting_with(token: str, token_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])


def _splits(piece: str, vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of pieces that make up `piece`, the most frequent first."""
    cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
    pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
    yield from sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


class _Spec(NamedTuple):
    """Settings that sentencepiece's Python interface does not give, from the model file."""

    is_plain_bpe: bool
    """Whether it is a BPE with byte fallback, without normalisation and pieces set by the user."""
    add_dummy_prefix: bool
    """Whether a space is put in front of the text."""

    @classmethod
    def of(cls, proto: bytes) -> _Spec:
        # Field numbers of sentencepiece_model.proto; a missing field has its default.
        outer = dict(_fields(proto))
        trainer = dict(_fields(outer.get(2, b"")))
        normalizer = dict(_fields(outer.get(3, b"")))
        is_bpe, has_byte_fallback = trainer.get(3, 1) == 2, trainer.get(35, False)
        has_character_map, removes_spaces = normalizer.get(2, b""), normalizer.get(4, True)
        has_user_defined = 31 in trainer
        return cls(
            is_plain_bpe=bool(is_bpe and has_byte_fallback)
            and not (has_character_map or removes_spaces or has_user_defined),
            add_dummy_prefix=bool(normalizer.get(3, True)),
        )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a protocol buffer message."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        length = {1: 8, 2: 0, 5: 4}[kind] or varint()
        yield key >> 3, message[position : position + length]
        position += length
