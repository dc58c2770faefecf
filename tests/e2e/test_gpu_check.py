"""tools/gpu_check.py: all of it on the CPU, tiny, over imitated graphs; and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nvium_titan.bench.graphs import Launches, ModeFigures, ShapeFigures
from nvium_titan.bench.pairs import quartiles
from tests.gpu.launches import launch_failures

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_check.py"

BLOCKED = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchtitan", "transformers", "tyro", "matplotlib"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the dry run as CI and a bare machine do: no torchtitan, another folder to stand in."""
    folder = tmp_path_factory.mktemp("gpu_check")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(SCRIPT), "--out", str(folder), "--dry-run"],
        cwd=folder, check=False, capture_output=True, text=True,
        env=os.environ | {"COLUMNS": "200", "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "gpu_check.json").read_text())
    return found | {"stdout": done.stdout}


@pytest.mark.e2e
def test_dry_run_checks_every_mode_in_every_type(report: dict[str, Any]) -> None:
    assert report["failures"] == report["left_out"] == []
    rows = {(row["mode"], row["dtype"], row["exits"]): row for row in report["exactness"]}
    assert set(rows) == {
        (mode, dtype, exits)
        for mode in ("blocks", "tokens", "ahead")
        for dtype in ("float64", "float32", "bfloat16")
        for exits in ("forced", "drawn")
    }
    assert all(row["passed"] for row in rows.values())
    double = [row for key, row in rows.items() if key[1] == "float64"]
    assert max(max(row["state_error"], row["decision_error"]) for row in double) < 1e-9


@pytest.mark.e2e
def test_dry_run_measures_dense_and_all_modes_of_every_shape(report: dict[str, Any]) -> None:
    assert [shape["shape"] for shape in report["shapes"]] == ["32x4", "32x8", "64x4"]
    for shape in report["shapes"]:
        assert [mode["name"] for mode in shape["modes"]] == ["dense", "blocks", "tokens", "ahead"]
        dense, blocks, tokens, ahead = shape["modes"]
        assert dense["over_dense"] is None
        assert tokens["over_dense"]["over"] == blocks["over_dense"]["over"] == "dense"
        assert all(mode["ms_per_token"]["median"] > 0 for mode in shape["modes"])
        assert all(mode["num_graphs"] > 0 and mode["pool_mb"] > 0 for mode in shape["modes"])
        # A script with shares .35/.2/.15/.3 asks 1 + .65 + .45 routers, and then reads the token.
        assert blocks["launches"]["host_reads"] > 2.5
        assert 1 <= tokens["launches"]["host_reads"] == ahead["launches"]["host_reads"] < 1.5
    for text in (
        "Exactness",
        "Forced exits",
        "Where it loses",
        "A dry run",
        "every check that ran",
    ):
        assert text in report["stdout"]


@pytest.mark.e2e
@pytest.mark.cases
def test_dec_13_memory_of_graphs_stays_flat(report: dict[str, Any]) -> None:
    memory = report["memory"]
    assert memory["is_flat"]
    assert memory["num_requests"] == 24
    assert 0 < memory["num_graphs"] <= memory["bound"]
    assert len(memory["memory_mb"]) == 12


@pytest.mark.e2e
@pytest.mark.cases
def test_dec_15_a_token_is_the_documented_number_of_launches(report: dict[str, Any]) -> None:
    for shape in report["shapes"]:
        for mode in shape["modes"]:
            if mode["name"] != "blocks":
                launches = mode["launches"]
                assert (launches["graphs"], launches["copies"]) == (1, 2)
                assert launches["num_skipped"] == 0


@pytest.mark.e2e
@pytest.mark.cases
def test_ext_05_exit_rates_batches_and_sizes_are_all_there(report: dict[str, Any]) -> None:
    rates = {(row["shape"], row["batch"], row["exit_rate"]): row for row in report["rates"]}
    shapes = ("32x4", "32x8", "64x4")
    assert set(rates) == {(s, b, r) for s in shapes for b in (1, 8) for r in (0.0, 0.5, 1.0)}
    for (_, batch, rate), row in rates.items():
        assert (row["limit"] is None) == (batch > 1)
        if batch == 1:
            # Reading every junction for nothing costs; leaving at the first exit gains.
            assert row["limit"] < 1 if rate == 0 else row["limit"] > 1
            assert row["host_reads_per_token"] < 1.5


def test_a_skipped_graph_and_another_number_of_launches_are_failures() -> None:
    def failures(**changes: float | None) -> list[str]:
        launches = Launches(**({
            "num_tokens": 10, "graphs": 1.0, "copies": 2.0, "host_reads": 1.0, "num_skipped": 0,
            "profiled_graphs": 1.0, "profiled_kernels": 300.0,
        } | changes))  # fmt: skip
        mode = ModeFigures(
            name="tokens", ms_per_token=quartiles([1.0]), bandwidth_share=0.5, over_dense=None,
            launches=launches, num_graphs=3, capture_s=1.0, pool_mb=1.0,
        )  # fmt: skip
        figures = ShapeFigures(
            shape="768x24", dtype="bfloat16", exit_shares=[1.0], limit=1.0, modes=[mode]
        )
        return launch_failures(figures)

    assert failures() == failures(profiled_graphs=None) == []
    assert "3 tokens did not run as a graph" in failures(num_skipped=3)[0]
    assert "1.5 graphs and 2.0 copies" in failures(graphs=1.5, profiled_graphs=1.5)[0]
    assert "the profiler saw 0.5 graphs" in failures(profiled_graphs=0.5)[0]


def test_what_does_not_fit_into_the_time_is_named() -> None:
    budget = load().Budget(0.0)
    assert not budget.allows("768x48: everything", before=0.5)
    assert budget.left_out == ["768x48: everything"]
    assert load().Budget(8.0).allows("768x24: everything", before=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("flags", "hint"),
    [(["--out", "unused"], "; --dry-run checks decoding on the CPU"), (["--train"], "")],
    ids=["decode", "train"],
)
def test_without_a_gpu_it_says_so_in_one_line(
    flags: list[str],
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *flags])
    assert load().main() == 0
    said = capsys.readouterr().out
    assert said == f"gpu_check: nothing checked: torch sees no CUDA GPU here{hint}\n"
    assert list(tmp_path.iterdir()) == []


def test_without_a_check_it_says_which_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit, match="2"):
        load().main()
    assert "give --out DIR" in capsys.readouterr().err
