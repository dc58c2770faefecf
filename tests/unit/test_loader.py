"""Training text: what becomes a document, how documents are packed, order, resuming, refusals."""

from __future__ import annotations

import collections
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset
from torchtitan.hf_datasets import DatasetConfig, text_datasets

from nvium_titan.errors import ConfigError, DataError, TokenizerError
from nvium_titan.text.documents import PIECE_BYTES, Document, Rejected, open_files, split_of
from nvium_titan.text.tokenizer import ByteTokenizer, check_vocabulary
from nvium_titan.train.config import load_config
from nvium_titan.train.data.loader import TextDataLoader
from nvium_titan.train.data.packing import IGNORED_LABEL
from nvium_titan.train.data.python_docs import MIN_CHARS, python_docs
from nvium_titan.train.data.tokenizers import TextTokenizer

BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id


def make_loader(
    *,
    rank: int = 0,
    num_ranks: int = 1,
    seq_len: int = 16,
    batch_size: int = 1,
    tokenizer: Any = None,
    **config: Any,
) -> TextDataLoader:
    return TextDataLoader.Config(**({"split": "all"} | config)).build(
        dp_world_size=num_ranks,
        dp_rank=rank,
        tokenizer=tokenizer or ByteTokenizer(),
        seq_len=seq_len,
        local_batch_size=batch_size,
    )


Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def rows(loader: TextDataLoader, num_batches: int | None = None) -> list[Row]:
    """The sequences of the next batches: inputs, positions, labels."""
    found = []
    for inputs, labels in itertools.islice(loader, num_batches):
        for parts in zip(inputs["input"], inputs["positions"], labels, strict=True):
            found.append(tuple(tuple(part.tolist()) for part in parts))
    return found  # type: ignore[return-value]


def write_rows(file: Path, items: list[Any]) -> Path:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    """Forty documents of different length, each of its own text."""
    items = [{"text": f"document {i}: " + "x" * (i % 13)} for i in range(40)]
    return str(write_rows(tmp_path / "numbered.jsonl", items))


# Packing


@pytest.mark.cases
def test_dat_07_end_is_a_label_and_only_padding_is_ignored(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "ab.jsonl", [{"text": "ab"}] * 5)
    (inputs, positions, labels), *rest = rows(make_loader(path=str(path), infinite=False))
    a, b = b"ab"
    assert rest == []
    document = [BOS, a, b]
    assert inputs == (*document * 5, EOS)
    assert labels == (*[a, b, EOS] * 5, IGNORED_LABEL)
    assert positions == (*[0, 1, 2] * 5, 0)


@pytest.mark.cases
def test_dat_07_labels_never_cross_documents_or_get_lost(numbered: str) -> None:
    seen: list[tuple[int, int]] = []
    for inputs, positions, labels in rows(make_loader(path=numbered, infinite=False)):
        for here, position, label in zip(inputs, positions, labels, strict=True):
            if label != IGNORED_LABEL:
                seen.append((here, label))
                assert position == 0 or here != BOS
                assert label != BOS
    tokenizer = ByteTokenizer()
    expected: collections.Counter[tuple[int, int]] = collections.Counter()
    for line in Path(numbered).read_text().splitlines():
        ids = tokenizer.encode(json.loads(line)["text"], add_bos=True, add_eos=True)
        expected.update(itertools.pairwise(ids))
    assert collections.Counter(seen) == expected


def test_long_document_goes_on_in_the_next_sequence(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "long.jsonl", [{"text": "abcdefgh"}])
    first, second, third = rows(make_loader(path=str(path), infinite=False, seq_len=4))
    assert first == ((BOS, *b"abc"), (0, 1, 2, 3), tuple(b"abcd"))
    assert second == (tuple(b"defg"), (0, 1, 2, 3), tuple(b"efgh"))
    assert third == ((*b"h", EOS, EOS, EOS), (0, 0, 1, 2), (EOS, *[IGNORED_LABEL] * 3))


def test_batches_have_the_shapes_of_torchtitan(numbered: str) -> None:
    inputs, labels = next(iter(make_loader(path=numbered, batch_size=3)))
    assert inputs.keys() == {"input", "positions"}
    for tensor in (*inputs.values(), labels):
        assert (tensor.shape, tensor.dtype) == ((3, 16), torch.int64)


def test_tokenizer_without_start_token(tmp_path: Path) -> None:
    class NoStart(ByteTokenizer):
        bos_id = None  # type: ignore[assignment]

    path = write_rows(tmp_path / "ab.jsonl", [{"text": "ab"}, {"text": "a"}])
    loader = make_loader(path=str(path), infinite=False, seq_len=3, tokenizer=NoStart())
    ((inputs, _, labels),) = rows(loader)
    assert sorted(zip(inputs, labels, strict=True)) == [(97, 98), (97, EOS), (98, EOS)]


def test_tokenizer_without_end_token_is_refused(numbered: str) -> None:
    class NoEnd(ByteTokenizer):
        eos_id = None  # type: ignore[assignment]

    with pytest.raises(TokenizerError, match=r"no end token.*eos_token in tokenizer_config"):
        make_loader(path=numbered, tokenizer=NoEnd())


# Order, ranks, resuming


def test_order_is_shuffled_by_seed_and_epoch(numbered: str) -> None:
    one, again, other = (
        rows(make_loader(path=numbered, seed=seed, seq_len=8), 20) for seed in (0, 0, 1)
    )
    assert one == again
    assert one != other
    # The second epoch has an order of its own.
    data = make_loader(path=numbered).dataset
    source = data._source  # type: ignore[attr-defined]
    orders = []
    for _ in range(3):
        orders.append([document.text for document in source.documents()])
        source.next_epoch()
    unshuffled = [json.loads(line)["text"] for line in Path(numbered).read_text().splitlines()]
    assert unshuffled != orders[0] != orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(unshuffled)


@pytest.mark.parametrize("infinite", [True, False])
def test_order_does_not_depend_on_the_number_of_ranks(numbered: str, infinite: bool) -> None:
    arguments: dict[str, Any] = {"path": numbered, "infinite": infinite}
    num_batches = 30 if infinite else None
    one = rows(make_loader(batch_size=4, **arguments), num_batches)
    two = [
        rows(make_loader(rank=rank, num_ranks=2, batch_size=2, **arguments), num_batches)
        for rank in range(2)
    ]
    assert len(two[0]) == len(two[1])
    merged = [row for pair in zip(*two, strict=True) for row in pair]
    assert merged == one


def test_one_epoch_gives_every_rank_whole_batches_and_each_token_once(numbered: str) -> None:
    def labels_of(num_ranks: int, batch_size: int) -> list[int]:
        found: list[int] = []
        lengths = set()
        for rank in range(num_ranks):
            loader = make_loader(
                path=numbered,
                infinite=False,
                rank=rank,
                num_ranks=num_ranks,
                batch_size=batch_size,
            )
            mine = rows(loader)
            lengths.add(len(mine))
            found += [label for _, _, labels in mine for label in labels if label >= 0]
        assert len(lengths) == 1
        assert lengths.pop() % batch_size == 0
        return sorted(found)

    assert labels_of(1, 1) == labels_of(3, 1) == labels_of(2, 5) == labels_of(64, 2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("infinite", [True, False], ids=["endless", "one-epoch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_resumed_loader_continues_exactly(
    numbered: str, infinite: bool, num_workers: int, rank: int
) -> None:
    arguments: dict[str, Any] = {
        "path": numbered,
        "infinite": infinite,
        "num_workers": num_workers,
        "rank": rank,
        "num_ranks": 2,
        "batch_size": 2,
    }
    total = 40 if infinite else None  # more than one epoch
    whole = rows(make_loader(**arguments), total)
    for num_before in (1, 3, 9):
        loader = make_loader(**arguments)
        iterator = iter(loader)
        before = rows(iterator, num_before)  # type: ignore[arg-type]
        state = loader.state_dict()
        resumed = make_loader(**arguments)
        resumed.load_state_dict(state)
        after = rows(resumed, None if total is None else total - num_before)
        assert before + after == whole


@pytest.mark.cases
@pytest.mark.parametrize("infinite", [True, False], ids=["endless", "one-epoch"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 3, 0), (1, 6, 0)),
        ((1, 4, 0), (4, 1, 0)),
        ((3, 2, 2), (2, 3, 0)),
        ((1, 6, 0), (3, 2, 2)),
    ],
    ids=["2-to-1", "1-to-4", "3-with-workers-to-2", "1-to-3-with-workers"],
)
def test_ckp_01_another_number_of_ranks_or_workers_goes_on_where_the_last_one_was(
    numbered: str, infinite: bool, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    def loaders(num_ranks: int, batch_size: int, num_workers: int) -> list[TextDataLoader]:
        return [
            make_loader(
                path=numbered, infinite=infinite, rank=rank, num_ranks=num_ranks,
                batch_size=batch_size, num_workers=num_workers,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip

    total, num_steps = 8 if infinite else None, 3
    whole = rows(make_loader(path=numbered, infinite=infinite, batch_size=before[0] * before[1]),
                 total)  # fmt: skip
    first = loaders(*before)
    seen = [rows(loader, num_steps) for loader in first]
    states = [loader.state_dict() for loader in first]
    assert all(state.keys() == states[0].keys() for state in states)
    second = loaders(*after)
    for loader in second:
        loader.load_state_dict(states[-1])
    seen += [rows(loader, None if total is None else total - num_steps) for loader in second]
    used = sorted(row for part in seen for row in part)
    assert used == sorted(whole)


def test_worker_processes_keep_the_order(numbered: str) -> None:
    arguments: dict[str, Any] = {"path": numbered, "infinite": False, "batch_size": 3}
    assert rows(make_loader(num_workers=2, **arguments)) == rows(make_loader(**arguments))


# Files and rows


@pytest.mark.cases
def test_dat_01_bad_rows_are_skipped_with_count_and_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items: list[Any] = [{"text": f"row {i + 1}"} for i in range(200)]
    items[49] = {"id": 50}
    items[59] = {"text": None}
    items[69] = {"text": 70}
    items[79] = {"text": ["eighty"]}
    items[89] = "{cut"
    items[99] = "7"
    path = write_rows(tmp_path / "f.jsonl", items)
    store = open_files(str(path), text_column="text")
    rejected = [item for i in range(len(store)) if isinstance(item := store.read(i), Rejected)]
    assert [item.place for item in rejected] == [f"{path}:{i}" for i in (50, 60, 70, 80, 90, 100)]
    assert [item.reason.partition(": Exp")[0] for item in rejected] == [
        "no key 'text' (keys: id)",
        "'text' is null, must be a string",
        "'text' is a number, must be a string",
        "'text' is a list, must be a string",
        "not valid JSON",
        "is a number, must be an object",
    ]
    caplog.set_level(logging.WARNING)
    found = rows(make_loader(path=str(path), infinite=False))
    ends = sum(labels.count(EOS) for _, _, labels in found)
    assert ends == 194
    assert "skipped 1 document, the first " in caplog.text
    assert "skipped 6 documents, the first " in caplog.text
    assert f"{path}:" in caplog.text


@pytest.mark.cases
def test_dat_01_other_column(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "g.jsonl", [{"content": "one"}, {"content": "two"}])
    config = TextDataLoader.Config(path=str(path), text_column="content", split="all")
    assert sorted(d.text for d in config.source().documents()) == ["one", "two"]


@pytest.mark.cases
@pytest.mark.parametrize("name", ["g.jsonl", "g.json"])
def test_dat_01_file_without_a_good_row_is_refused_at_start(tmp_path: Path, name: str) -> None:
    good = write_rows(tmp_path / "good.jsonl", [{"text": "fine"}])
    bad = tmp_path / name
    items = [{"content": "one"}, {"content": "two"}]
    bad.write_text(json.dumps(items) if name == "g.json" else "\n".join(map(json.dumps, items)))
    config = TextDataLoader.Config(path=[str(good), str(bad)])
    with pytest.raises(
        DataError,
        match=rf"{name}: none of its 2 rows has text under 'text'; the first: .*{name}"
        r"(:|: row )1: no key 'text' \(keys: content\); fix \[dataloader\] text_column",
    ):
        config.check(ByteTokenizer())


@pytest.mark.cases
@pytest.mark.parametrize("infinite", [True, False])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.txt", ""),
        ("blank.txt", "\n \n\t\n" * 50),
        ("empty.jsonl", ""),
        ("blank.jsonl", "\n\n"),
        ("emptytext.jsonl", '{"text": ""}\n{"text": "  "}\n'),
        ("empty.json", "[]"),
    ],
)
def test_dat_02_source_without_text_is_an_error_not_a_hang(
    tmp_path: Path, name: str, content: str, infinite: bool
) -> None:
    (tmp_path / name).write_text(content)
    config = TextDataLoader.Config(path=str(tmp_path / name), infinite=infinite)
    with pytest.raises(DataError, match=rf"{name}', split 'train': no text to train on"):
        config.check(ByteTokenizer())
    with pytest.raises(DataError, match="no text to train on"):
        next(iter(make_loader(path=str(tmp_path / name), infinite=infinite)))


@pytest.mark.cases
def test_dat_02_short_documents_are_packed_and_repeated_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    texts = ["ab", "", "cd", " ", "ef"]
    path = write_rows(tmp_path / "short.jsonl", [{"text": text} for text in texts])
    ((inputs, positions, labels),) = rows(make_loader(path=str(path), seq_len=128), 1)
    assert IGNORED_LABEL not in labels
    assert inputs.count(BOS) == positions.count(0) == 43
    assert bytes(i for i in inputs if i < 256).count(b"ab") in (14, 15)
    assert caplog.text.count("is 12 tokens, less than one sequence (seq_len=128)") == 1


@pytest.mark.cases
def test_dat_02_empty_split_is_an_error(tmp_path: Path) -> None:
    texts = [text for text in map(str, range(50)) if split_of(text) == "train"]
    path = write_rows(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    config = TextDataLoader.Config(path=str(path), split="validation")
    with pytest.raises(DataError, match="split 'validation': no text to train on"):
        config.check(ByteTokenizer())


def test_text_file_is_one_document_read_in_pieces(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i}. " + "\u6f22\u00e9 word " * (i % 60) for i in range(400)]
    text = "\n\n".join(paragraphs)
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    store = open_files(str(tmp_path / "book.txt"), text_column="text")
    pieces = [store.read(i) for i in range(len(store))]
    assert len(pieces) > 10
    assert all(isinstance(piece, Document) for piece in pieces)
    documents = [piece for piece in pieces if isinstance(piece, Document)]
    assert "".join(document.text for document in documents) == text
    assert [document.is_end for document in documents] == [False] * (len(pieces) - 1) + [True]
    assert all(document.text.startswith("Paragraph") for document in documents)
    sizes = [len(document.text.encode()) for document in documents]
    assert max(sizes) <= PIECE_BYTES * 1.5
    found = rows(make_loader(path=str(tmp_path / "book.txt"), infinite=False, seq_len=512))
    assert sum(labels.count(EOS) for _, _, labels in found) == 1


@pytest.mark.parametrize("separator", ["", " ", "\r\n\r\n"])
def test_pieces_never_cut_a_character(tmp_path: Path, separator: str) -> None:
    text = separator.join(["\u6f22" * 333] * 100)
    (tmp_path / "x.txt").write_text(text, encoding="utf-8", newline="")
    store = open_files(str(tmp_path / "x.txt"), text_column="text")
    pieces = [store.read(i) for i in range(len(store))]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Document)) == text


def test_small_text_file_is_one_whole_document(tmp_path: Path) -> None:
    (tmp_path / "x.md").write_bytes(b"\xef\xbb\xbfhi\r\n")
    store = open_files(str(tmp_path / "x.md"), text_column="text")
    assert [store.read(i) for i in range(len(store))] == [Document("hi\r\n", is_end=True)]


def test_binary_and_other_encodings_are_set_aside_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("hi".encode("utf-16-le"))
    store = open_files(str(tmp_path), text_column="text")
    assert [store.read(i) for i in range(2)] == [
        Rejected(f"{tmp_path / 'a.txt'}: byte 3", "not UTF-8 text"),
        Rejected(f"{tmp_path / 'b.txt'}: byte 0", "holds NUL, so it is not text"),
    ]
    with pytest.raises(DataError, match=r"no text to train on \(skipped 2 documents, the first"):
        TextDataLoader.Config(path=str(tmp_path), split="all").check(ByteTokenizer())


def test_folders_globs_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.md", "deep/skip.bin", ".hidden/d.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "rows.json").write_text('[{"text": "r1"}, {"text": "r2"}]')

    def texts(path: Any) -> list[str]:
        store = open_files(path, text_column="text")
        return [item.text for i in range(len(store)) if isinstance(item := store.read(i), Document)]

    assert texts(str(tmp_path)) == ["a.txt", "b.txt", "deep/c.md", "r1", "r2"]
    assert texts(str(tmp_path / "*.txt")) == ["a.txt", "b.txt"]
    assert texts(str(tmp_path / "**" / "*.md")) == ["deep/c.md"]
    assert texts([str(tmp_path / "b.txt"), str(tmp_path / "*.txt")]) == ["b.txt", "a.txt"]
    assert texts(str(tmp_path / "deep" / "skip.bin")) == ["deep/skip.bin"]
    monkeypatch.chdir(tmp_path)
    assert texts("deep") == ["deep/c.md"]


@pytest.mark.parametrize(
    ("path", "match"),
    [
        (
            "missing.txt",
            r"path '.*missing\.txt': no such file, folder or glob .*fix \[dataloader\]",
        ),
        ("*.txt", r"path '.*\*\.txt': no such file, folder or glob"),
        ("empty", r"no file in this folder has a known suffix \(\.c .*\.txt\)"),
        ("broken.json", r"broken\.json: not valid JSON"),
    ],
)
def test_missing_data_is_refused(tmp_path: Path, path: str, match: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(DataError, match=match):
        TextDataLoader.Config(path=str(tmp_path / path)).check(ByteTokenizer())


def test_lone_surrogates_in_json_are_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "s.jsonl", ['{"text": "a\\ud83db"}'])
    for split in ("train", "validation", "all"):
        TextDataLoader.Config(path=str(path), split=split).source()
    ((inputs, _, _),) = rows(make_loader(path=str(path), infinite=False, seq_len=4))
    assert inputs == (BOS, *b"a?b")


# Configuration


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"path": "x", "corpus": "python_docs"}, "path and corpus are both set: keep one"),
        ({"dataset_path": "x.txt"}, r"dataset_path='x\.txt' .* for files of your own set path"),
        (
            {"dataset": "c4", "split": "validation"},
            r"dataset='c4' is one split already: .*such as c4_val",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TextDataLoader.Config(**keys)


def test_no_place_to_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no training text: set path, corpus or dataset"):
        make_loader()


def test_paths_come_from_toml_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('path = ["a.txt", "b.txt"]\nsplit = "validation"\n')
    config = load_config(TextDataLoader.Config(), file)
    assert (config.path, config.split) == (["a.txt", "b.txt"], "validation")
    assert load_config(TextDataLoader.Config(), file, ["--path", "c.txt"]).path == "c.txt"
    with pytest.raises(ConfigError, match=r"--split valid: .*did you mean 'validation'"):
        load_config(TextDataLoader.Config(), file, ["--split", "valid"])
    with pytest.raises(ConfigError, match=r"corpus .*python_docs"):
        load_config(TextDataLoader.Config(), file, ["--corpus", "python_doc"])


# The demo corpus


def test_python_docs_is_text_of_useful_length_split_in_two() -> None:
    documents = python_docs()
    assert python_docs.__wrapped__() == documents
    assert len(set(documents)) == len(documents) > 300
    assert sum(map(len, documents)) > 1_000_000
    assert all(len(text) >= MIN_CHARS or text.endswith("\n") for text in documents)
    shown = {}
    for split in ("train", "validation", "all"):
        config = TextDataLoader.Config(corpus="python_docs", split=split)
        config.check(ByteTokenizer())
        shown[split] = [document.text for document in config.source().documents()]
    assert sorted(shown["all"]) == sorted(documents)
    assert not set(shown["train"]) & set(shown["validation"])
    assert len(shown["train"]) + len(shown["validation"]) == len(documents)
    share = sum(map(len, shown["validation"])) / sum(map(len, documents))
    assert 0.02 < share < 0.10


# torchtitan's data sets


def register(monkeypatch: pytest.MonkeyPatch, name: str, loader: Any) -> None:
    entry = DatasetConfig(
        path="nowhere", loader=loader, sample_processor=lambda sample: sample["text"]
    )
    monkeypatch.setitem(text_datasets.DATASETS, name, entry)


def test_downloaded_data_set_is_read_like_local_rows(
    numbered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [json.loads(line) for line in Path(numbered).read_text().splitlines()]
    register(monkeypatch, "stand_in", lambda path: Dataset.from_list(texts))
    arguments: dict[str, Any] = {"infinite": False, "batch_size": 2}
    hub = rows(make_loader(dataset="stand_in", **arguments))
    assert hub == rows(make_loader(path=numbered, **arguments))


@pytest.fixture
def streamed(numbered: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A stand-in for C4: the same loader call, on a local file."""

    def load(path: str) -> Any:
        return load_dataset(
            "json",
            data_files=numbered,
            split="train",
            streaming=True,
            cache_dir=str(tmp_path / "cache"),
        )

    register(monkeypatch, "c4", load)
    return numbered


def test_stream_is_divided_by_documents_and_complete(streamed: str) -> None:
    def starts(**arguments: Any) -> list[bytes]:
        found = rows(make_loader(dataset="c4", infinite=False, seq_len=64, **arguments))
        pairs = [
            (i, p) for inputs, positions, _ in found for i, p in zip(inputs, positions, strict=True)
        ]
        return b"".join(b"|" if i == BOS else bytes([i]) for i, _ in pairs if i != EOS).split(b"|")

    one = starts()
    two = [starts(rank=rank, num_ranks=2) for rank in range(2)]
    assert len(one) == 41
    assert sorted(one[1:]) == sorted(two[0][1:] + two[1][1:])


@pytest.mark.parametrize("num_before", [1, 7, 25])
def test_stream_resumes_exactly(streamed: str, num_before: int) -> None:
    whole = rows(make_loader(dataset="c4"), 80)
    loader = make_loader(dataset="c4")
    before = rows(iter(loader), num_before)  # type: ignore[arg-type]
    resumed = make_loader(dataset="c4")
    resumed.load_state_dict(loader.state_dict())
    assert before + rows(resumed, 80 - num_before) == whole


@pytest.mark.cases
def test_dat_01_and_02_hold_for_streams(streamed: str, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(Path(streamed), [{"text": None}, {"text": ""}, {"text": "good"}])
    caplog.set_level(logging.WARNING)
    ((inputs, _, _),) = rows(make_loader(dataset="c4", infinite=False, seq_len=5))
    assert inputs == (BOS, *b"good")
    assert "dataset 'c4': skipped 1 document, the first dataset 'c4': sample 1: " in caplog.text
    write_rows(Path(streamed), [{"text": ""}] * 3)
    with pytest.raises(DataError, match="dataset 'c4': no text to train on"):
        next(iter(make_loader(dataset="c4")))
    with pytest.raises(DataError, match="dataset 'c4': no text to train on"):
        TextDataLoader.Config(dataset="c4").check(ByteTokenizer())


def test_unknown_or_unreachable_data_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"dataset 'c4_valid': unknown; did you mean 'c4_val"):
        make_loader(dataset="c4_valid")

    def offline(path: str) -> Any:
        raise ConnectionError("no network")

    register(monkeypatch, "c4", offline)
    with pytest.raises(DataError, match="dataset 'c4': cannot be loaded from nowhere: no network"):
        make_loader(dataset="c4")


# torchtitan's tokenizer component


def test_text_tokenizer_is_what_torchtitan_builds(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.Config().build(tokenizer_path="byte")
    assert tokenizer.get_vocab_size() == tokenizer.vocab_size == 258
    assert (tokenizer.kind, tokenizer.bos_id, tokenizer.eos_id) == ("byte", BOS, EOS)
    assert tokenizer.encode("a", add_bos=True, add_eos=True) == [BOS, 97, EOS]
    assert tokenizer.decode([BOS, 97]) == tokenizer.stream([]).push(97) == "a"
    tokenizer.save(tmp_path)
    again = TextTokenizer.Config().build(tokenizer_path=str(tmp_path))
    assert again.kind == "byte"


@pytest.mark.cases
def test_tok_02_text_tokenizer_is_checked_against_the_model() -> None:
    tokenizer = TextTokenizer.Config().build(tokenizer_path="byte")
    check_vocabulary(tokenizer, 320)
    with pytest.raises(TokenizerError, match="258 ids, but the model has vocab_size=256"):
        check_vocabulary(tokenizer, 256)
