"""Training with compiled layers: compiled indeed, without graph breaks, and never again later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from nvium_titan.train.trainer import NviumTrainer
from tests.helpers.runs import rows_of, train_here, write_toml

pytestmark = pytest.mark.e2e


@pytest.mark.cases
def test_cmp_01_layers_compile_once_for_each_kind_and_never_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[int] = []
    step = NviumTrainer.train_step

    def counted(self, data_iterator):
        step(self, data_iterator)
        graphs.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(NviumTrainer, "train_step", counted)
    settings = {"training": {"steps": 5}, "checkpoint": {"enable": False}}
    toml = write_toml(tmp_path, **settings)
    counters.clear()  # what another test of this process compiled
    assert train_here(toml, "--dump_folder", str(tmp_path / "eager")) == 0
    assert graphs == [0] * 5
    graphs.clear()
    torch._dynamo.reset()
    counters.clear()
    # The tracer is the same for every backend; this one spares the test a C++ compiler.
    compiled = ["--compile.enable", "--compile.backend", "aot_eager"]
    assert train_here(toml, *compiled, "--dump_folder", str(tmp_path / "compiled")) == 0
    # Layers with a junction and layers without one.
    assert graphs == [2] * 5
    assert not counters["graph_break"]
    eager, fast = rows_of(tmp_path / "eager"), rows_of(tmp_path / "compiled")
    assert [row.loss for row in fast] == pytest.approx([row.loss for row in eager], rel=1e-5)
    assert [r.grad_norm for r in fast] == pytest.approx([r.grad_norm for r in eager], rel=1e-4)
