"""`nvium bench` in process: what it prints, its JSON, its errors and its end on Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvium_titan import cli
from nvium_titan.bench.systems import EngineRun, EngineSystem
from nvium_titan.bundle import write_bundle
from nvium_titan.report.bench_records import read_report
from nvium_titan.text.tokenizer import ByteTokenizer
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

SMALL = ["--pairs", "2", "--prompt-tokens", "4", "--new-tokens", "11"]
SHAPE = ["bench", "--shape", "64x4", "--exit-probs", ".4,.2,.1,.3", *SMALL]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "bundle"
    config = tiny_config(vocab_size=264, max_positions=64)
    write_bundle(
        path,
        config=config,
        tensors=lively_tensors(config, router_gain=0.7),
        tokenizer=ByteTokenizer(),
        provenance={},
    )
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    rows = [
        {"category": "writing", "turns": ["Say a.", "Say b."]},
        {"category": "qa", "turns": ["What is c?"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def json_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    record = json_of([*SHAPE, "--dtypes", "float32,int8", "--twin"], capsys)
    assert {"threads", "cpu", "versions", "command", "forced_shares", "seed"} <= set(record)
    assert record["forced_shares"] == [0.4, 0.2, 0.1, 0.3]
    assert {"name", "num_cores", "flags", "busy_cores"} == set(record["cpu"])
    assert {"nvium_titan", "torch"} == set(record["versions"])
    assert [entry["dtype"] for entry in record["dtypes"]] == ["float32", "int8"]
    for entry in record["dtypes"]:
        assert {
            "systems", "over_dense", "limit", "fraction_of_limit",
            "group_size_histogram", "overhead", "exit_shares", "other_ratios", "bandwidth_gb_s",
            "layers_per_token", "host_reads_per_token",
        } <= set(entry)  # fmt: skip
        ratio = {"over", "ratio", "ratio_iqr", "spread", "conclusive"}
        assert set(entry["over_dense"]) == set(entry["other_ratios"][0]) == ratio
        assert [system["name"] for system in entry["systems"]] == ["N-vium", "dense", "twin"]
        for system in entry["systems"]:
            assert system["dtype"] == entry["dtype"]
            ms = system["ms_per_token"]
            assert ms["q1"] <= ms["median"] <= ms["q3"]
        assert entry["exit_shares"] == [0.4, 0.2, 0.1, 0.3]
        assert set(entry["overhead"]) == {"N-vium", "dense"}
    read_bytes = [entry["weight_mb_per_token"]["dense"] for entry in record["dtypes"]]
    assert read_bytes[0] == 4 * read_bytes[1]


def test_kernels_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    record = json_of([*SHAPE, "--kernels", "torch"], capsys)
    assert record["device"] == "cpu"
    assert record["dtypes"][0]["host_reads_per_token"] > 2, "in pieces, each router read by itself"


def test_the_table_names_systems_limit_and_overhead(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(SHAPE) == 0
    shown = capsys.readouterr().out
    for text in ("64x4: ", "forced, routers run and read", "flags that matter", "dense", "limit",
                 "spread", "rows of block calls", "sampling", "2 interleaved pairs"):  # fmt: skip
        assert text in shown


def test_out_gets_the_report_and_the_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    record = json_of([*SHAPE, "--out", str(tmp_path / "out")], capsys)
    report = read_report(tmp_path / "out" / "bench.json")
    assert report.dtypes[0].over_dense.ratio == record["dtypes"][0]["over_dense"]["ratio"]
    assert (tmp_path / "out" / "bench.png").stat().st_size > 5000


def test_a_bundles_routers_decide(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json_of(["bench", str(bundle), *SMALL, "--dense", str(bundle)], capsys)
    assert record["forced_shares"] is None
    names = [system["name"] for system in record["dtypes"][0]["systems"]]
    assert names == ["N-vium", "dense", "trained dense"]
    record = json_of(["bench", str(bundle), *SMALL, "--exit-probs", "1 0 0"], capsys)
    assert record["dtypes"][0]["exit_shares"] == [1, 0, 0]


@pytest.mark.cases
def test_ext_05_the_cost_of_never_leaving_early_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"N-vium": 0.030, "dense": 0.025}

    def run(self: EngineSystem, prompt_ids: Sequence[int], num_new_tokens: int) -> EngineRun:
        done = original(self, prompt_ids, num_new_tokens)
        return replace(done, ttft_s=0.1, decode_s=slow[self.name])

    original = EngineSystem.run
    monkeypatch.setattr(EngineSystem, "run", run)
    words = ["bench", "--shape", "64x4", *SMALL, "--exit-probs"]
    assert cli.main([*words, "0,0,0,1"]) == 0
    assert "No token left early: that costs 20.0% over dense." in capsys.readouterr().out
    assert cli.main([*words, ".5,0,0,.5"]) == 0
    shown = capsys.readouterr().out
    assert "N-vium loses here: 1.20x as slow as dense." in shown
    assert "0.83x (slower)" in shown


def test_pairs_that_disagree_show_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([1.0, 1.0, 1.0, 1.0, 9.0, 1.0] * 2)

    def run(self: EngineSystem, prompt_ids: Sequence[int], num_new_tokens: int) -> EngineRun:
        done = original(self, prompt_ids, num_new_tokens)
        return replace(done, ttft_s=0.1, decode_s=next(times))

    original = EngineSystem.run
    monkeypatch.setattr(EngineSystem, "run", run)
    assert cli.main(SHAPE) == 0
    assert "this run shows nothing" in capsys.readouterr().out
    assert cli.main([*SHAPE, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["dtypes"][0]["over_dense"]["conclusive"] is False
    assert "nvium: warning: float32: The pairs disagree too much" in printed.err


def test_ctrl_c_prints_the_pairs_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    original = EngineSystem.run

    def run(self: EngineSystem, prompt_ids: Sequence[int], num_new_tokens: int) -> EngineRun:
        calls.append(self.name)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(self, prompt_ids, num_new_tokens)

    monkeypatch.setattr(EngineSystem, "run", run)
    assert cli.main([*SHAPE, "--dtypes", "float32,bfloat16"]) == 130
    shown = capsys.readouterr()
    assert "1 interleaved pairs (interrupted; 2 were asked for)" in shown.out
    assert "bfloat16" not in shown.out
    assert "interrupted" in shown.err


def test_spec_bench_is_told_by_category(
    bundle: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", str(bundle), "--prompts", str(prompts), "--new-tokens", "8"]
    record = json_of(words, capsys)
    entry = record["dtypes"][0]
    assert [row["category"] for row in entry["categories"]] == ["multi-turn conversation", "qa"]
    assert (record["num_questions"], record["num_trials"], entry["is_complete"]) == (2, 3, True)
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "multi-turn" in shown
    assert "mean of the categories" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a bundle or a --shape"),
        (["BUNDLE", "--shape", "64x4"], "and not both"),
        (["/nowhere"], "/nowhere: no such bundle"),
        (["--shape", "64"], "shape '64': must be WIDTHxDEPTH"),
        (["--shape", "100x4"], "the width a multiple of 64"),
        (["--shape", "64x5"], "num_exits=4 does not divide num_layers=5"),
        (["--shape", "64x4", "--exit-probs", ".5,.5"], "2 exit shares for 4 exits"),
        (["--shape", "64x4", "--exit-probs", ".5,.2,.2,.2"], "must be >= 0 and sum to 1"),
        (["--shape", "64x4", "--exit-probs", "a,b"], "--exit-probs a,b: must be numbers"),
        (["--shape", "64x4", "--pairs", "0"], "--pairs 0: must be at least 1"),
        (["--shape", "64x4", "--new-tokens", "1"], "--new-tokens 1: must be at least 2"),
        (["--shape", "64x4", "--new-tokens", "2000"], "context of 1024 tokens"),
        (["--shape", "64x4", "--dtypes", "float61"], "--dtypes float61: 'float61' is unknown"),
        (["--shape", "64x4", "--kernels", "graph"], "--kernels graph: graphs need a GPU"),
        (["--shape", "64x4", "--device", "tpu"], "--device tpu: torch sees no such GPU here"),
        (["--shape", "64x4", "--peer", "vllm"], "--peer vllm: 'vllm'"),
        (["--shape", "64x4", "--peer", "hf", "--batch", "2"], "does not go with --peer hf"),
        (["--shape", "64x4", "--prompts", "x"], "--shape does not go with --prompts"),
        (["--shape", "64x4", "--per-category", "2"], "--prompts, which is missing"),
        (["BUNDLE", "--exits", "3"], "--exits 3: a bundle has its own"),
        (["BUNDLE", "--dense", "/nowhere", "--new-tokens", "9"], "/nowhere: no such bundle"),
        (["BUNDLE", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)  # fmt: skip
def test_mistakes_are_one_message_and_exit_code_2(
    words: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(bundle) if word == "BUNDLE" else word for word in words]
    assert cli.main(["bench", *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
