"""Perplexity: against the slow twin, for every mode, window, stride and batch size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvium_titan import cli
from nvium_titan.bundle import write_bundle
from nvium_titan.cli import common
from nvium_titan.decode import DecoderParams, Engine
from nvium_titan.errors import DataError, PromptError
from nvium_titan.eval.perplexity import (
    EncodedDocument,
    encode_documents,
    evaluate,
    read_documents,
    score_documents,
    sliding_windows,
)
from nvium_titan.text.tokenizer import ByteTokenizer
from tests.helpers.reference import reference_forward
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

CONFIG = tiny_config(vocab_size=264, max_positions=64)
DOCUMENTS = (
    "One.",
    "Two words, \u6f22 and \U0001f600.\n",
    "A document of exactly so many bytes that it fills one window..",
    "A longer document. " * 9,
    " white\tspace  at the ends ",
)
MODES = ("mixture", "exit 1", "exit 2", "final exit")


def bad_first_exit() -> dict[str, Tensor]:
    """Return weights whose first exit is sure of the wrong token."""
    tensors = lively_tensors(CONFIG, seed=3)
    tensors["early_norms.0.weight"] *= -8
    return tensors


def write_model(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    write_bundle(path, config=CONFIG, tensors=tensors, tokenizer=ByteTokenizer(), provenance={})
    return path


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def on_paper(tensors: Mapping[str, Tensor], *, window: int, stride: int) -> dict[str, float]:
    """Return the log-likelihood of `DOCUMENTS` by mode, each target in a forward of its own window.

    Windows end at window, window + stride, window + 2 stride, ... and at the document's end; a
    target belongs to the first that reaches it.
    """
    totals = dict.fromkeys(MODES, 0.0)
    for text in DOCUMENTS:
        ids = [256, *text.encode()]
        for target in range(1, len(ids)):
            further = max(0, math.ceil((target - window) / stride))
            last_input = min(window + further * stride, len(ids) - 1)
            first = max(0, last_input - window)
            twin = reference_forward(CONFIG, tensors, ids[first:target])
            totals["mixture"] += float(twin.log_mix_TV[-1, ids[target]])
            for mode, logits_TV in zip(MODES[1:], twin.logits_ETV, strict=True):
                totals[mode] += float(logits_TV[-1].log_softmax(-1)[ids[target]])
    return totals


def run_eval(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.cases
@pytest.mark.parametrize(("window", "stride"), [(64, 64), (40, 15)], ids=["default", "sliding"])
def test_evl_01_every_figure_by_name_equals_the_float64_reference(
    window: int, stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = lively_tensors(CONFIG)
    model, text = write_model(tmp_path / "bundle", tensors), write_rows(tmp_path / "five.jsonl")
    flags = [] if window == 64 else ["--window", str(window), "--stride", str(stride)]
    record = run_eval(capsys, str(model), "--text", str(text), *flags)
    num_bytes = sum(len(document.encode()) for document in DOCUMENTS)
    assert (record["window"], record["stride"], record["num_documents"]) == (window, stride, 5)
    assert record["num_tokens"] == record["num_bytes"] == num_bytes
    assert record["num_words"] == 1 + 5 + 12 + 27 + 5
    assert (record["starts_with_bos"], record["scores_eos"]) == (True, False)
    expected = on_paper(tensors, window=window, stride=stride)
    assert [mode["mode"] for mode in record["modes"]] == list(MODES)
    for mode in record["modes"]:
        total = expected[mode["mode"]]
        assert mode["log_likelihood"] == pytest.approx(total, rel=1e-6)
        for name in ("token", "word", "byte"):
            mean = -total / record[f"num_{name}s"]
            # exp makes the mean's error a relative one.
            want = pytest.approx(math.exp(mean), rel=1e-6 * max(1, mean))
            assert mode[f"{name}_perplexity"] == want
    assert sum(record["exit_shares"]) == pytest.approx(1)


def test_the_table_says_what_was_measured_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "bundle", lively_tensors(CONFIG))
    text = tmp_path / "whole.txt"
    text.write_text("\n".join(DOCUMENTS))
    monkeypatch.setattr(common, "_BAR_AFTER_S", 0.0)
    words = ["eval", str(model), "--text", str(text), "--tokens", "100", "--stride", "32"]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split() == ["perplexity", "per", "token", "word", "byte"]
    assert [line[:16].strip() for line in lines[1:5]] == list(MODES)
    assert lines[5].split()[:2] == ["counts", "100"]
    assert lines[-1] == "window 64, stride 32, documents 1 (after BOS; EOS not scored)"
    assert "tokens scored" in shown.err, "the bar, once it takes long"


@pytest.mark.cases
def test_evl_02_the_batch_size_changes_no_document() -> None:
    """Documents of 3, 50 and 200 tokens, padded beside each other, in float32."""
    engine = Engine(DecoderParams.from_tensors(CONFIG, lively_tensors(CONFIG), num_tokens=258))
    g = torch.Generator().manual_seed(0)
    documents = [
        EncodedDocument(torch.randint(0, 256, (length,), generator=g).tolist(), 1, length)
        for length in (3, 50, 200)
    ]
    runs = [
        score_documents(engine, documents, window=64, stride=48, batch_size=batch_size)
        for batch_size in (1, 2, 8)
    ]
    assert [score.num_tokens for score in runs[0]] == [2, 49, 199]
    for run in runs[1:]:
        for got, want in zip(run, runs[0], strict=True):
            assert got.log_mix == pytest.approx(want.log_mix, rel=1e-6)
            assert got.log_exits_E.tolist() == pytest.approx(want.log_exits_E.tolist(), rel=1e-6)


@pytest.mark.cases
def test_evl_06_the_mode_decides_what_is_scored_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = bad_first_exit()
    model, text = write_model(tmp_path / "bundle", tensors), write_rows(tmp_path / "five.jsonl")
    record = run_eval(capsys, str(model), "--text", str(text), "--dtype", "float64")
    found = {mode["mode"]: mode["token_perplexity"] for mode in record["modes"]}
    expected = on_paper(tensors, window=64, stride=64)
    assert found == {
        mode: pytest.approx(math.exp(-total / record["num_tokens"]), rel=1e-9)
        for mode, total in expected.items()
    }
    assert found["exit 1"] > 2 * found["final exit"]
    assert found["mixture"] < found["exit 1"] / 2
    assert abs(found["mixture"] / found["final exit"] - 1) > 0.01


@pytest.mark.parametrize("window", [1, 7, 20])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 20, 21, 55])
def test_windows_score_every_target_once_with_enough_context(window: int, length: int) -> None:
    ids = list(range(length))
    for stride in range(1, window + 1):
        targets = []
        for w in sliding_windows([EncodedDocument(ids, 1, 1)], window=window, stride=stride):
            assert len(w.token_ids) <= window + 1
            for target in w.token_ids[len(w.token_ids) - w.num_scored :]:
                targets.append(target)
                context = target - w.token_ids[0]
                assert context >= min(target, max(1, window - stride))
        assert targets == ids[1:]


def test_a_bound_cuts_the_last_document_and_its_text() -> None:
    tokenizer = ByteTokenizer()
    documents = encode_documents(iter(["one two", "three four", "five"]), tokenizer, max_tokens=13)
    assert [len(d.token_ids) - 1 for d in documents] == [7, 6]
    assert [(d.num_words, d.num_bytes) for d in documents] == [(2, 7), (1, 6)]
    engine = Engine(DecoderParams.from_tensors(CONFIG, lively_tensors(CONFIG), num_tokens=258))
    assert evaluate(engine, tokenizer, documents).num_tokens == 13


def test_what_has_no_count_or_overflows_has_no_perplexity() -> None:
    tensors = lively_tensors(CONFIG)
    engine = Engine(DecoderParams.from_tensors(CONFIG, tensors, num_tokens=258))
    tokenizer = ByteTokenizer()
    spaces = evaluate(engine, tokenizer, encode_documents(iter(["  "]), tokenizer)).modes[0]
    assert spaces.word_perplexity is None
    assert spaces.token_perplexity is not None
    long = evaluate(engine, tokenizer, encode_documents(iter(["x" * 400]), tokenizer)).modes[0]
    assert long.word_perplexity is None


def test_without_a_start_token_the_first_token_is_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "bos_id", None)
    model = write_model(tmp_path / "bundle", lively_tensors(CONFIG))
    text = write_rows(tmp_path / "five.jsonl")
    assert cli.main(["eval", str(model), "--text", str(text)]) == 0
    shown = capsys.readouterr().out.splitlines()
    num_bytes = sum(len(document.encode()) for document in DOCUMENTS)
    assert shown[5].split() == ["counts", str(num_bytes - 5), "50", str(num_bytes)]
    assert "(no BOS: first token of each unscored; EOS not scored)" in shown[-1]


def test_documents_are_rows_or_whole_files(tmp_path: Path) -> None:
    assert list(read_documents(write_rows(tmp_path / "five.jsonl"))) == list(DOCUMENTS)
    whole = tmp_path / "whole.txt"
    whole.write_text("line\n\n" * 9000, encoding="utf-8")
    assert list(read_documents(whole)) == ["line\n\n" * 9000]
    other = tmp_path / "other.jsonl"
    other.write_text('{"body": "a"}\n{"body": ""}\n\n{"body": 3}\n')
    with pytest.raises(DataError, match=r"other.jsonl:4: 'body' is a number"):
        list(read_documents(other, text_column="body"))
    with pytest.raises(DataError, match="--text-column"):
        list(read_documents(other))
    with pytest.raises(DataError, match="no such file"):
        list(read_documents(tmp_path / "none.txt"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="no text to evaluate on"):
        encode_documents(read_documents(tmp_path / "empty.txt"), ByteTokenizer())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--window", "65"], r"window=65: must lie in 1..64, the model's context"),
        (["--window", "0"], "window=0"),
        (["--window", "8", "--stride", "9"], r"stride=9: must lie in 1..8"),
        (["--stride", "0"], "stride=0"),
        (["--batch-size", "0"], "batch_size=0"),
        (["--tokens", "0"], "tokens=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_settings_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "bundle", lively_tensors(CONFIG))
    text = write_rows(tmp_path / "five.jsonl")
    assert cli.main(["eval", str(model), "--text", str(text), *flags]) == PromptError.exit_code
    assert message in capsys.readouterr().err
