"""Prepared text: equal to the text itself, resumable, damage refused by name; Parquet."""

from __future__ import annotations

import collections
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import IterableDataset

from nvium_titan import cli
from nvium_titan.errors import ConfigError, DataError, DependencyError, TokenizerError
from nvium_titan.text import parquet
from nvium_titan.text.documents import Document, Rejected, open_files
from nvium_titan.text.tokenizer import ByteTokenizer
from nvium_titan.train.data.loader import TextDataLoader
from nvium_titan.train.data.prepare import prepare
from nvium_titan.train.data.shards import (
    Manifest,
    Plan,
    ShardStore,
    TokenizerIdentity,
    write_manifest,
    write_shard,
)
from tests.unit.test_loader import make_loader, register, rows, write_rows


@contextmanager
def silent(*, total: int | None) -> Iterator[Callable[[int], None]]:
    del total
    yield lambda done: None


def prepared(out: Path, *, progress: Any = silent, workers: int = 1, **config: Any) -> Manifest:
    return prepare(
        TextDataLoader.Config(**config),
        tokenizer="byte",
        out=out,
        num_workers=workers,
        progress=progress,
        documents_per_shard=8,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows (some empty, some bad) and a text file that is read in pieces."""
    folder = tmp_path_factory.mktemp("text")
    items: list[Any] = [{"text": f"document {i}: " + "x" * (i % 13)} for i in range(60)]
    items[7], items[9], items[20] = {"text": ""}, {"text": " \n"}, {"text": None}
    write_rows(folder / "rows.jsonl", items)
    paragraphs = [f"Paragraph {i}. " + "\u6f22\u00e9 word " * (i % 60) for i in range(100)]
    (folder / "book.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def shards(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, prepared by two processes."""
    folder = tmp_path_factory.mktemp("prepared") / "shards"
    manifest = prepared(folder, path=str(text), workers=2)
    assert len(manifest.shards) == 8
    assert manifest.num_rejected == 1
    assert manifest.plan.dtype == "uint16"
    return folder


@pytest.fixture
def copied(shards: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(shards, tmp_path / "copied")
    return tmp_path / "copied"


# The same sequences


@pytest.mark.parametrize("split", ["train", "validation", "all"])
@pytest.mark.parametrize("infinite", [True, False], ids=["endless", "one-epoch"])
def test_shards_give_the_sequences_of_the_text(
    text: Path, shards: Path, split: str, infinite: bool
) -> None:
    for seed, seq_len in ((0, 16), (3, 50)):
        arguments: dict[str, Any] = {
            "split": split, "infinite": infinite, "seed": seed, "seq_len": seq_len,
        }  # fmt: skip
        num_batches = 4000 // seq_len if infinite else None
        of_text = rows(make_loader(path=str(text), **arguments), num_batches)
        assert rows(make_loader(path=str(shards), **arguments), num_batches) == of_text
        assert len(of_text) >= 3


def test_shards_give_the_same_order_on_any_number_of_ranks(text: Path, shards: Path) -> None:
    whole = rows(make_loader(path=str(text), infinite=False, batch_size=6))
    for num_ranks in (2, 3):
        parts = [
            rows(
                make_loader(
                    path=str(shards), infinite=False, rank=rank, num_ranks=num_ranks,
                    batch_size=6 // num_ranks,
                )
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        assert [row for turn in zip(*parts, strict=True) for row in turn] == whole


def test_a_run_on_the_text_goes_on_with_the_shards(text: Path, shards: Path) -> None:
    whole = rows(make_loader(path=str(text)), 300)
    loader = make_loader(path=str(text))
    before = rows(iter(loader), 117)  # type: ignore[arg-type]
    resumed = make_loader(path=str(shards))
    resumed.load_state_dict(loader.state_dict())
    assert before + rows(resumed, 183) == whole


@pytest.mark.cases
@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("kind", ["text", "shards"])
def test_dat_06_every_row_once_whatever_the_number_of_workers(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": str(i)} for i in range(50)])
    if kind == "shards":
        prepared(tmp_path / "shards", path=str(path))
        path = tmp_path / "shards"
    found = rows(make_loader(path=str(path), infinite=False, num_workers=num_workers, seq_len=9))
    assert read_back(found) == collections.Counter(range(50))


@pytest.mark.cases
def test_dat_06_a_stream_is_read_by_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "stand_in", stream_of(range(50)))
    arguments: dict[str, Any] = {"dataset": "stand_in", "infinite": False, "seq_len": 9}
    for num_workers in (0, 1):
        found = rows(make_loader(num_workers=num_workers, **arguments))
        assert read_back(found) == collections.Counter(range(50))
    with pytest.raises(ConfigError, match=r"num_workers=3: dataset 'stand_in' is a stream, which"):
        make_loader(num_workers=3, **arguments)


def read_back(found: list[Any]) -> collections.Counter[int]:
    """The numbers that the documents of some sequences spell."""
    ids = [i for inputs, _, labels in found for i, x in zip(inputs, labels, strict=True) if x >= 0]
    words = "".join(" " if i == ByteTokenizer.bos_id else chr(i) for i in ids)
    return collections.Counter(map(int, words.split()))


def numbers(low: int, high: int) -> Iterator[dict[str, str]]:
    for number in range(low, high):
        yield {"text": str(number)}


def stream_of(span: range) -> Callable[[str], Any]:
    arguments = {"low": span.start, "high": span.stop}
    return lambda _: IterableDataset.from_generator(numbers, gen_kwargs=arguments)


def test_a_stream_is_prepared_whole_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "stand_in", stream_of(range(50)))
    out = tmp_path / "shards"
    with pytest.raises(KeyboardInterrupt):
        prepared(out, progress=interrupted_after(17), dataset="stand_in")
    manifest = prepared(out, dataset="stand_in")
    assert [shard.num_documents for shard in manifest.shards] == [8, 8, 8, 8, 8, 8, 2]
    # Of a data set that names its own split nothing is held out.
    for split in ("train", "all"):
        found = rows(make_loader(path=str(out), split=split, infinite=False))
        assert read_back(found) == collections.Counter(range(50))
    with pytest.raises(ConfigError, match="dataset='stand_in' is one split already"):
        make_loader(path=str(out), split="validation")


def test_large_vocabularies_have_uint32_ids(tmp_path: Path) -> None:
    class Large(ByteTokenizer):
        vocab_size = 70000

        def _encode_text(self, text: str) -> list[int]:
            return [69000 + byte for byte in text.encode()]

    tokenizer = Large()
    items = [Document("abc"), Rejected("x:1", "bad"), Document(""), Document("de", is_end=False)]
    record = write_shard(tmp_path / "shard-00000.bin", items, tokenizer, "uint32")
    plan = Plan(
        text={}, files=[], tokenizer=TokenizerIdentity.of(tokenizer), dtype="uint32",
        documents_per_shard=8,
    )  # fmt: skip
    write_manifest(tmp_path, Manifest(plan=plan, shards=(record,)))
    store = ShardStore(tmp_path)
    ids = [store.read(index).ids for index in range(4)]
    assert [i.tolist() for i in ids] == [
        [256, 69097, 69098, 69099, 257],
        [],
        [],
        [256, 69100, 69101],
    ]
    assert ids[0].dtype == np.uint32
    assert not ids[0].flags.owndata  # a view of the file
    assert (record.num_rejected, record.first_rejected) == (1, "x:1: bad")


# Interrupted


def interrupted_after(num_documents: int) -> Any:
    """Progress that presses Ctrl-C."""

    @contextmanager
    def progress(*, total: int | None) -> Iterator[Callable[[int], None]]:
        def report(done: int) -> None:
            if done > num_documents:
                raise KeyboardInterrupt

        yield report

    return progress


def test_an_interrupted_preparation_keeps_whole_shards(
    text: Path, shards: Path, tmp_path: Path
) -> None:
    out, unfinished = tmp_path / "shards", tmp_path / "shards.unfinished"
    with pytest.raises(KeyboardInterrupt):
        prepared(out, progress=interrupted_after(36), path=str(text))
    assert not out.exists()
    with pytest.raises(
        DataError, match=r"shards\.unfinished'?: an unfinished folder of nvium data"
    ):
        make_loader(path=str(unfinished))
    with pytest.raises(
        DataError, match=r"was begun with another text .*\(different: text, files\)"
    ):
        prepared(out, path=str(text / "book.txt"))
    records = sorted(unfinished.glob("shard-*.json"))
    assert len(records) >= 4
    files = [file.with_suffix(".bin") for file in records]
    times = {file.name: file.stat().st_mtime_ns for file in files}
    damage(files[1], at=3)
    records[2].unlink()
    prepared(out, path=str(text))
    assert not unfinished.exists()
    assert {f.name for f in out.iterdir()} == {f.name for f in shards.iterdir()}
    for file in out.iterdir():
        assert file.read_bytes() == (shards / file.name).read_bytes()
    again = {name for name, time in times.items() if (out / name).stat().st_mtime_ns != time}
    assert again == {files[1].name, files[2].name}


def test_a_finished_folder_is_kept(
    shards: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert prepared(shards, path=str(text)).num_tokens > 1000
    assert "is prepared already" in caplog.text
    with pytest.raises(DataError, match=r"another text or with other settings \(different: text"):
        prepared(shards, corpus="python_docs")
    with pytest.raises(
        DataError, match="exists but is not a prepared folder; choose another --out"
    ):
        prepared(text, path=str(text))
    with pytest.raises(DataError, match="is already prepared; give the text itself"):
        prepared(shards, path=str(shards))


def test_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n \n")
    with pytest.raises(DataError, match=r"no text to prepare; fix \[dataloader\]"):
        prepared(tmp_path / "out", path=str(tmp_path / "blank.txt"))
    assert not (tmp_path / "out").exists()


# Refused


def damage(file: Path, *, at: int) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def swap(folder: Path) -> None:
    other = folder / "shard-00001.bin"
    shutil.copyfile(folder / "shard-00000.bin", other)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda f: (f / "shard-00002.bin").write_bytes((f / "shard-00002.bin").read_bytes()[:-1]),
        r"shard-00002\.bin: truncated: \d+ bytes, manifest\.json says \d+; copy it again",
    ),
    "too long": (
        lambda f: (f / "shard-00002.bin").open("ab").write(b"x"),
        r"shard-00002\.bin: too long, so not the same file",
    ),
    "missing": (
        lambda f: (f / "shard-00003.bin").unlink(),
        r"shard-00003\.bin: cannot be read: No such file",
    ),
    "changed ids": (
        lambda f: damage(f / "shard-00001.bin", at=0),
        r"shard-00001\.bin: document 1 of 8 was changed since it was written \(CRC-32\)",
    ),
    "changed index": (
        lambda f: damage(f / "shard-00001.bin", at=(f / "shard-00001.bin").stat().st_size - 1),
        r"shard-00001\.bin: its index does not match manifest\.json: the file was changed or",
    ),
    "foreign": (swap, r"shard-00001\.bin: (truncated|too long|its index)"),
    "manifest cut": (
        lambda f: (f / "manifest.json").write_bytes((f / "manifest.json").read_bytes()[:-9]),
        r"manifest\.json: not a manifest of nvium data prepare \(JSONDecodeError",
    ),
    "manifest without a key": (
        lambda f: (f / "manifest.json").write_text('{"format": "nvium-shards-1", "plan": {}}'),
        r"manifest\.json: not a manifest of nvium data prepare \(KeyError: 'tokenizer'\)",
    ),
    "other format": (
        lambda f: (f / "manifest.json").write_text('{"format": "nvium-shards-9"}'),
        r"manifest\.json: format 'nvium-shards-9', but this version reads 'nvium-shards-1'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_refused_by_name(copied: Path, fault: str) -> None:
    apply, message = FAULTS[fault]
    apply(copied)
    with pytest.raises(DataError, match=message):
        TextDataLoader.Config(path=str(copied), split="all").check(ByteTokenizer())


def test_changed_ids_never_train(copied: Path) -> None:
    damage(copied / "shard-00001.bin", at=0)
    # A folder too large to be read whole at the start is opened; the document is met on the way.
    loader = make_loader(path=str(copied), infinite=False)
    with pytest.raises(DataError, match=r"shard-00001\.bin: document 1 of 8 was changed"):
        rows(loader)


def test_check_names_every_bad_shard(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "check", str(copied), "--workers", "1"]) == 0
    assert "whole: " in capsys.readouterr().out
    damage(copied / "shard-00001.bin", at=0)
    FAULTS["truncated"][0](copied)
    assert cli.main(["data", "check", str(copied), "--workers", "1"]) == 2
    shown = capsys.readouterr().err
    assert "shard-00001.bin: document 1 of 8" in shown
    assert "shard-00002.bin: truncated" in shown
    assert cli.main(["data", "check", str(copied / "nowhere")]) == 2
    assert "give a folder of nvium data prepare" in capsys.readouterr().err


def test_another_tokenizer_is_refused(shards: Path) -> None:
    class Other(ByteTokenizer):
        eos_id = 10

    config = TextDataLoader.Config(path=str(shards))
    with pytest.raises(
        TokenizerError,
        match=r"prepared with another tokenizer \(byte, 258 ids, sha256 \w+\) than this run's "
        r"\(byte, 258 ids, sha256 \w+\); set hf_assets_path",
    ):
        config.check(Other())


def test_a_prepared_folder_stands_alone(shards: Path, text: Path) -> None:
    with pytest.raises(
        DataError, match="a prepared folder must be the only path; prepare the 2 paths"
    ):
        make_loader(path=[str(text), str(shards)])
    # A text of that name is a text.
    (text / "manifest.json").write_text('{"text": "of a ship"}')
    try:
        assert len(open_files(str(text), text_column="text")) > 60
        make_loader(path=str(text))
    finally:
        (text / "manifest.json").unlink()


# Parquet


def write_parquet(file: Path, table: dict[str, list[Any]], *, row_group_size: int = 7) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(table), file, row_group_size=row_group_size)
    return file


def test_parquet_rows_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {i}" for i in range(40)]
    write_parquet(tmp_path / "x.parquet", {"id": list(range(40)), "text": texts})
    write_rows(tmp_path / "y.jsonl", [{"text": text} for text in texts])
    of_rows = rows(make_loader(path=str(tmp_path / "y.jsonl")), 60)
    assert rows(make_loader(path=str(tmp_path / "x.parquet")), 60) == of_rows
    # Row groups that have no room are decoded again.
    monkeypatch.setattr(parquet, "KEPT_BYTES", 1)
    store = open_files(str(tmp_path / "x.parquet"), text_column="text")
    order = [39, 0, 20, 1, 38]
    assert [store.read(i) for i in order] == [Document(texts[i]) for i in order]


def test_parquet_rows_without_text_are_set_aside(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"text": ["a", None, "", "b"]})
    store = open_files(str(path), text_column="text")
    assert [store.read(i) for i in range(4)] == [
        Document("a"),
        Rejected(f"{path}: row 2", "'text' is null, must be a string"),
        Document(""),
        Document("b"),
    ]


def test_useless_parquet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"content": ["a"], "data": [b"b"]})
    with pytest.raises(DataError, match=r"x\.parquet: no column 'text'.*content, data\); fix"):
        open_files(str(path), text_column="text")
    with pytest.raises(DataError, match=r"row 1: 'data' is of type bytes, must be a string"):
        open_files(str(path), text_column="data")
    (tmp_path / "y.parquet").write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"y\.parquet: not a Parquet file"):
        open_files(str(tmp_path / "y.parquet"), text_column="text")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DependencyError, match=r"need pyarrow: pip install 'nvium-titan\[train\]'"):
        open_files(str(path), text_column="content")


def test_the_manifest_says_what_was_read(shards: Path, text: Path) -> None:
    table = json.loads((shards / "manifest.json").read_text())
    assert table["plan"]["text"] == {"path": str(text), "text_column": "text"}
    assert [file[0] for file in table["plan"]["files"]] == [
        str(text / name) for name in ("book.txt", "rows.jsonl")
    ]
    assert table["plan"]["tokenizer"]["kind"] == "byte"
    store = ShardStore(shards)
    num_tokens = sum(len(store.read(index).ids) for index in range(len(store)))
    assert num_tokens == table["num_tokens"] == sum(s["num_tokens"] for s in table["shards"])
    assert table["num_documents"] == len(open_files(str(text), text_column="text"))
