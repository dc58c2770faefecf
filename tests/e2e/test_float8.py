"""Training with products in float8: emulated on the CPU, refused where it cannot be had."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvium_titan.convert.export import load_native_tensors, read_step_folder
from tests.helpers.runs import rows_of, train_here, write_toml

pytestmark = pytest.mark.e2e

DEBUG = Path(__file__).resolve().parents[2] / "train_configs" / "debug.toml"

has_torchao = importlib.util.find_spec("torchao") is not None


def test_float8_without_torchao_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "nvium_titan.train.model.float8.importlib.util.find_spec", lambda _name: None
    )
    assert train_here(write_toml(tmp_path, float8={"enable": True})) == 2
    assert "pip install 'nvium-titan[float8]'" in capfd.readouterr().err


@pytest.mark.skipif(not has_torchao, reason="needs the extra float8")
def test_a_command_keeps_torchao_s_warnings_to_itself() -> None:
    command = [sys.executable, "-m", "nvium_titan.train", "--dry-run", "--config-file", str(DEBUG)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "register_constant" not in done.stderr


@pytest.mark.skipif(not has_torchao, reason="needs the extra float8")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have float8 products")
def test_float8_without_hardware_names_the_way_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_here(write_toml(tmp_path, float8={"enable": True})) == 2
    assert "set emulate = true" in capfd.readouterr().err


@pytest.mark.skipif(not has_torchao, reason="needs the extra float8")
def test_emulated_float8_trains_nearly_what_float32_trains(tmp_path: Path) -> None:
    runs = {}
    for name, float8 in (("whole", {}), ("float8", {"enable": True, "emulate": True})):
        folder = tmp_path / name
        folder.mkdir()
        assert train_here(write_toml(folder, training={"steps": 4}, float8=float8)) == 0
        runs[name] = folder / "run"
    whole, rounded = ([row.loss for row in rows_of(runs[name])] for name in ("whole", "float8"))
    # float8 keeps 4 bits of every factor.
    assert rounded == pytest.approx(whole, rel=2e-2)
    assert rounded != whole
    tensors = load_native_tensors(read_step_folder(runs["float8"]))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
