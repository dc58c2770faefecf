"""From a pretrained LLaMA to an N-vium: grow junctions, train them, with the backbone frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvium_titan.bundle import read_bundle
from nvium_titan.cli import main
from nvium_titan.convert.export import export_checkpoint
from nvium_titan.convert.hf import training_tables
from tests.helpers.hf_models import save_tiny_llama
from tests.helpers.runs import train_here, train_under_torchrun, write_toml

pytestmark = pytest.mark.e2e

JUNCTION_PARTS = ("early_", "router_")


def grown_run(folder: Path, **nvium: Any) -> Path:
    """Grow junctions on a tiny LLaMA; return a TOML file that trains them for 3 steps."""
    save_tiny_llama(folder / "llama")
    command = ["import", str(folder / "llama"), "--out", str(folder / "grown"), "--exits", "1,2,3"]
    assert main(command) == 0
    tables = tomli.loads(training_tables(folder / "grown"))
    return write_toml(
        folder,
        model=tables["model"],
        nvium=tables["nvium"] | {"num_exits": 4} | nvium,
        checkpoint=tables["checkpoint"] | {"interval": 3},
        training={"steps": 3},
    )


def tensors_after(run: Path, step: int, out: Path) -> dict[str, Tensor]:
    export_checkpoint(run / "checkpoint" / f"step-{step}", out)
    return read_bundle(out).load_tensors()


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert set(before) == set(after)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.cases
def test_ckp_07_junctions_train_on_a_frozen_backbone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = grown_run(tmp_path)
    listed = capsys.readouterr().out
    before = read_bundle(tmp_path / "grown").load_tensors()
    plain = load_file(tmp_path / "llama" / "model.safetensors")
    assert all(f"  {name} [" in listed for name in before if name not in plain)
    assert train_here(toml) == 0
    after = tensors_after(tmp_path / "run", 3, tmp_path / "trained")
    assert not changed(plain, {name: after[name] for name in plain})
    moved = changed(before, after)
    assert moved <= {name for name in before if name.startswith(JUNCTION_PARTS)}
    # The router's first layers wait for its head, which starts at 0, to move.
    for part in ("norms", "adapters.0.2"):
        assert any(part in name for name in moved)
    for k in range(3):
        assert {f"router_heads.{k}.weight", f"router_layers.{k}.layers.0.fc1.weight"} <= moved

    # It goes on from its own checkpoint, still frozen.
    assert train_here(toml, "--training.steps", "5") == 0
    later = tensors_after(tmp_path / "run", 5, tmp_path / "later")
    assert not changed(plain, {name: later[name] for name in plain})
    assert changed(after, later)


def test_everything_trains_if_asked(tmp_path: Path) -> None:
    toml = grown_run(tmp_path, trainable="all")
    assert train_here(toml) == 0
    before = read_bundle(tmp_path / "grown").load_tensors()
    assert changed(before, tensors_after(tmp_path / "run", 3, tmp_path / "trained")) == set(before)


@pytest.mark.distributed
def test_two_processes_freeze_the_same_backbone(tmp_path: Path) -> None:
    toml = grown_run(tmp_path)
    done = train_under_torchrun(toml, num_processes=2)
    assert done.returncode == 0, done.stderr
    before = read_bundle(tmp_path / "grown").load_tensors()
    moved = changed(before, tensors_after(tmp_path / "run", 3, tmp_path / "trained"))
    assert moved
    assert all(name.startswith(JUNCTION_PARTS) for name in moved)


def test_a_bfloat16_bundle_starts_float32_training(tmp_path: Path) -> None:
    toml = grown_run(tmp_path)
    command = ["import", str(tmp_path / "llama"), "--out", str(tmp_path / "grown")]
    assert main([*command, "--exits", "1,2,3", "--dtype", "bfloat16"]) == 0
    before = read_bundle(tmp_path / "grown").load_tensors(dtype=torch.float32)
    assert train_here(toml) == 0
    moved = changed(before, tensors_after(tmp_path / "run", 3, tmp_path / "trained"))
    assert moved
    assert all(name.startswith(JUNCTION_PARTS) for name in moved)


@pytest.mark.cases
def test_ckp_07_a_renamed_backbone_key_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = grown_run(tmp_path)
    for folder in ("llama", "grown"):
        file = tmp_path / folder / "model.safetensors"
        tensors = load_file(file)
        old = "model.layers.2.mlp.up_proj.weight"
        tensors["model.layers.2.mlp.up.weight"] = tensors.pop(old)
        save_file(tensors, file)
    message = (
        "tensors missing: model.layers.2.mlp.up_proj.weight; "
        "tensors not part of the model: model.layers.2.mlp.up.weight"
    )
    capfd.readouterr()
    command = ["import", str(tmp_path / "llama"), "--out", str(tmp_path / "other")]
    assert main([*command, "--exits", "1,2,3"]) == 2
    assert f"{tmp_path / 'llama'}: {message}" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()
    assert train_here(toml) == 2
    assert f"{tmp_path / 'grown'}: {message}" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.cases
def test_ckp_07_a_plain_checkpoint_is_sent_to_import(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = grown_run(tmp_path)
    plain = str(tmp_path / "llama")
    assert train_here(toml, "--checkpoint.initial_load_path", plain) == 2
    said = capfd.readouterr().err
    assert "a dense model, but [nvium] asks for exit_layers=[1, 2, 3]" in said
    assert f"nvium import {plain} --out BUNDLE --exits 1,2,3" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint.initial_load_path", "grown"], "must be an absolute path, as '/"),
        (["--checkpoint.initial_load_path", "none"], "initial_load_path must name the bundle"),
        (["--model.rope_theta", "5e5"], "rope_theta=500000.0, there 10000.0; fix [model]"),
        (["--nvium.exit_layers", "1,2", "--nvium.num_exits", "3"], "exit_layers=(1, 2), there (1"),
        (
            ["--nvium.exit_layers", "[]", "--nvium.num_exits", "1", "--nvium.adapter_dim", "0"],
            "the model has no early exit",
        ),
        (["--nvium.trainable", "junction"], "trainable"),
    ],
    ids=["relative-path", "no-path", "rope-theta", "exits", "dense", "misspelt"],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(
    flags: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = grown_run(tmp_path)
    assert train_here(toml, *flags) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
