"""Tokenizers: no special id from text, streams equal to decoding at once, what a bundle carries."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nvium_titan.errors import TokenizerError
from nvium_titan.text.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
)

TEXT = "Hello  world, said the mixture. \n  The <s> exits </s> take turns; \u00e9 x\u0301 \u4e2d."
PLAIN_BPE = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
KINDS = ["byte", "sentencepiece-bpe", "sentencepiece-unigram", "hf"]
SPECIAL_TEXTS = ["</s>", "<s> hi", "a</s>b", "<|eos|>", "<|bos|>x", "<unk>", "<0x0A>", "<end>"]
# Emoji with a joiner, CJK, a combining mark, Arabic, no-break space, NUL, replacement character.
CHARACTERS = "ab \n\t\u00e9\U0001f469\u200d\U0001f4bb\u6f22e\u0301\u0627\u00a0\0\ufffd<>/s|"


def train_sentencepiece(directory: Path, **options: Any) -> Path:
    model = io.BytesIO()
    defaults: dict[str, Any] = {"vocab_size": 300, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, *TEXT.split()] * 5),
        model_writer=model,
        hard_vocab_limit=False,
        **(defaults | options),
    )
    file = directory / "tokenizer.model"
    file.write_bytes(model.getvalue())
    return file


def write_hugging_face(
    directory: Path, *, specials: tuple[str, ...] = ("<begin>", "<end>")
) -> Path:
    """A byte-level BPE whose start and end are named in tokenizer_config.json."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(specials),
        show_progress=False,
    )
    model.train_from_iterator([TEXT] * 5, trainer)
    # Saved settings that would cut or pad every document.
    model.enable_truncation(4)
    model.enable_padding(length=8)
    model.save(str(directory / "tokenizer.json"))
    config = {"bos_token": specials[0], "eos_token": {"content": specials[1]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    return {
        "byte": load_tokenizer("byte"),
        "sentencepiece-bpe": load_tokenizer(
            train_sentencepiece(folders["sentencepiece-bpe"], **PLAIN_BPE)
        ),
        "sentencepiece-unigram": load_tokenizer(
            train_sentencepiece(folders["sentencepiece-unigram"], model_type="unigram")
        ),
        "hf": load_tokenizer(write_hugging_face(folders["hf"])),
    }


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, loaded: dict[str, Tokenizer]) -> Tokenizer:
    return loaded[request.param]


def library_decode(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    """What the library behind a tokenizer makes of a whole list of ids without specials."""
    if isinstance(tokenizer, ByteTokenizer):
        return lambda ids: bytes(ids).decode("utf-8", "replace")
    assert isinstance(tokenizer, SentencePieceTokenizer | HuggingFaceTokenizer)
    return tokenizer._model.decode


texts = st.one_of(
    st.text(alphabet=CHARACTERS, max_size=20),
    st.text(max_size=20),
    st.lists(st.sampled_from(["Hello", " ", "  ", *SPECIAL_TEXTS]), max_size=6).map("".join),
)
any_text = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.cases
@pytest.mark.parametrize("text", SPECIAL_TEXTS)
def test_tok_01_text_never_becomes_a_special_id(tokenizer: Tokenizer, text: str) -> None:
    specials = {tokenizer.bos_id, tokenizer.eos_id}
    ids = tokenizer.encode(text)
    assert not specials & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_bos=True) == [tokenizer.bos_id, *ids]
    assert tokenizer.encode(text, add_eos=True) == [*ids, tokenizer.eos_id]
    both = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert both == [tokenizer.bos_id, *ids, tokenizer.eos_id]
    assert tokenizer.decode(both) == text


@pytest.mark.cases
def test_tok_01_documented_ids_of_the_llama_kind(shared_dir: Path) -> None:
    tokenizer = load_tokenizer(shared_dir / "data/tokenizer/mistral_v1/tokenizer.model")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32000, 1, 2)
    assert tokenizer.encode("</s>") == [1867, 28713, 28767]
    assert tokenizer.encode("<s> hi", add_bos=True) == [1, 523, 28713, 28767, 12014]
    assert tokenizer.encode("a</s>b", add_eos=True) == [264, 700, 28713, 28767, 28726, 2]
    assert tokenizer.encode("") == []
    assert tokenizer.encode("", add_bos=True, add_eos=True) == [1, 2]


@pytest.mark.cases
@pytest.mark.parametrize("kind", ["byte", "sentencepiece-bpe", "hf"])
def test_tok_01_exported_tokenizer_json_gives_the_same_ids(
    loaded: dict[str, Tokenizer], tmp_path: Path, kind: str
) -> None:
    tokenizer = loaded[kind]
    tokenizer.save(tmp_path)
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    exported.no_truncation()
    exported.no_padding()
    # What transformers does when tokenizer_config.json says so, and ours always says so.
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    exported.encode_special_tokens = config["split_special_tokens"]
    for text in [TEXT, "", " lead", "\u4e2d\U0001f600 \u200d", *SPECIAL_TEXTS]:
        ids = exported.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(text)
        assert exported.decode(ids) == tokenizer.decode(ids)
    if kind != "hf":
        assert exported.encode("hi").ids == tokenizer.encode("hi", add_bos=True)


@pytest.mark.cases
def test_tok_01_exported_llama_tokenizer_gives_the_same_ids(
    shared_dir: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(shared_dir / "data/tokenizer/mistral_v1")
    tokenizer.save(tmp_path)
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = (shared_dir / "data/text/tinystories/tinystories_cs336.txt").read_text()
    for line in [*text.splitlines(), TEXT, *SPECIAL_TEXTS]:
        assert exported.encode(line, add_special_tokens=False).ids == tokenizer.encode(line)


@pytest.mark.cases
def test_tok_01_vocabulary_whose_special_is_spelt_by_text_is_refused(tmp_path: Path) -> None:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: the text '</s>' encodes to special"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.cases
def test_tok_01_piece_that_text_can_spell_is_no_end(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        train_sentencepiece(tmp_path, user_defined_symbols=["</s>"], **PLAIN_BPE)
    )
    assert 2 in tokenizer.encode("a</s>b")
    assert tokenizer.eos_id is None


@pytest.mark.cases
@pytest.mark.parametrize(("vocab_size", "fits"), [(256, False), (258, True), (320, True)])
def test_tok_02_vocabulary_of_the_model(vocab_size: int, fits: bool) -> None:
    if fits:
        check_vocabulary(ByteTokenizer(), vocab_size)
    else:
        with pytest.raises(TokenizerError, match=r"258 ids, .*vocab_size=256; set .* at least 258"):
            check_vocabulary(ByteTokenizer(), vocab_size)


@pytest.mark.cases
@pytest.mark.parametrize("kind", KINDS)
def test_tok_04_stream_keeps_every_space(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    text = "Hello  world \n  x"
    if kind == "sentencepiece-unigram":  # this one squeezes spaces when it encodes
        text = "Hello world x"
    ids = tokenizer.encode(text)
    for num_prompt in range(len(ids)):
        stream = tokenizer.stream(ids[:num_prompt])
        shown = "".join([*map(stream.push, ids[num_prompt:]), stream.finish()])
        assert tokenizer.decode(ids[:num_prompt]) + shown == tokenizer.decode(ids) == text


@pytest.mark.cases
@pytest.mark.parametrize("kind", KINDS)
@any_text
@given(text=texts)
@example(text="Hello  world \n  x")
@example(text=" lead")
def test_tok_04_decoding_equals_the_library(
    loaded: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == library_decode(tokenizer)(ids)


@pytest.mark.cases
@pytest.mark.parametrize("kind", KINDS)
@any_text
@given(data=st.data())
def test_dec_07_any_ids_stream_as_valid_text(
    loaded: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = loaded[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    stream = tokenizer.stream()
    chunks = [*map(stream.push, ids), stream.finish()]
    assert "".join(chunks) == tokenizer.decode(ids)
    for chunk in chunks:
        chunk.encode("utf-8")


@pytest.mark.cases
@pytest.mark.parametrize("kind", ["byte", "sentencepiece-bpe", "hf"])
def test_dec_07_characters_come_whole_and_the_tail_once(
    loaded: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = loaded[kind]
    text = "x\U0001f600\u6f22"
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    chunks = [stream.push(i) for i in ids]
    assert "".join(chunks) == text
    assert stream.finish() == ""
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids[:-1])) == "x\U0001f600"
    assert set(stream.finish()) == {"\ufffd"}
    assert stream.finish() == ""


@pytest.mark.cases
def test_dec_07_invalid_bytes_do_not_swallow_what_follows() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.push(i) for i in (0xFF, 0xE6, 0x61)] == ["\ufffd", "", "\ufffda"]


def test_lone_surrogates_become_question_marks(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a?b"


def test_unknown_id_is_refused(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    for token_id in (size, -1):
        with pytest.raises(TokenizerError, match=rf"token id {token_id}: .*ids 0\.\.{size - 1}"):
            tokenizer.decode([token_id])


def test_saved_tokenizer_comes_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again) is type(tokenizer)
    facts = ("kind", "vocab_size", "bos_id", "eos_id")
    assert [getattr(again, name) for name in facts] == [getattr(tokenizer, name) for name in facts]
    assert again.encode(TEXT, add_bos=True) == tokenizer.encode(TEXT, add_bos=True)


def test_torchtitan_tokenizer_with_listed_specials(shared_dir: Path) -> None:
    tokenizer = load_tokenizer(shared_dir / "data/tokenizer/torchtitan_test")
    assert (tokenizer.kind, tokenizer.vocab_size) == ("hf", 2020)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2002, 2003)
    ids = tokenizer.encode("the<|end_of_text|>end", add_eos=True)
    assert ids.count(2003) == 1
    assert tokenizer.decode(ids) == "the<|end_of_text|>end"
    assert tokenizer.decode([2009, *ids]) == "the<|end_of_text|>end"


def test_specials_that_disagree_are_refused(tmp_path: Path) -> None:
    write_hugging_face(tmp_path)
    config = {"added_tokens_decoder": {"77": {"content": "<end>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=r"gives '<end>' id 77, tokenizer\.json gives it 1"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_without_config_has_no_start_or_end(tmp_path: Path) -> None:
    write_hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)
    assert tokenizer.encode("a", add_bos=True, add_eos=True) == tokenizer.encode("a")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("missing", None, r"missing: no such file or directory; .*or 'byte'"),
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer\.json"),
        ("tokenizer.model", "text", r"tokenizer\.model: not a sentencepiece model"),
        ("vocab.txt", "text", r"vocab\.txt: must end in \.json .* or \.model"),
        ("", None, r"holds neither tokenizer\.json nor tokenizer\.model"),
    ],
)
def test_unreadable_tokenizer_is_refused(
    tmp_path: Path, name: str, content: str | None, match: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=match):
        load_tokenizer(tmp_path / name)


def test_unreadable_tokenizer_config_is_refused(tmp_path: Path) -> None:
    for content, match in (("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TokenizerError, match=match):
            load_tokenizer(tmp_path)
