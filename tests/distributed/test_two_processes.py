"""Two gloo processes train what one process trains; FSDP2 checkpoints resume and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nvium_titan.bundle import read_bundle
from nvium_titan.convert.export import export_checkpoint
from tests.helpers.runs import (
    assert_evaluates_alike,
    rows_of,
    train_here,
    train_under_torchrun,
    write_toml,
)

pytestmark = pytest.mark.distributed


def passed(toml: Path, *flags: str) -> None:
    done = train_under_torchrun(toml, *flags, num_processes=2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def seed_checkpoint(toml: Path, folder: Path) -> list[str]:
    """Write the weights of a fresh model once; return the flags that start a run from them.

    Each number of processes draws its own initial weights.
    """
    assert (
        train_here(toml, "--dump_folder", str(folder), "--checkpoint.create_seed_checkpoint") == 0
    )
    return ["--checkpoint.initial_load_path", str(folder / "checkpoint" / "step-0")]


@pytest.mark.cases
def test_dis_08_two_processes_train_save_resume_and_export_on_a_cpu(tmp_path: Path) -> None:
    toml = write_toml(tmp_path)
    passed(toml)
    whole = rows_of(tmp_path / "run")
    other = ["--dump_folder", str(tmp_path / "other"), "--lr_scheduler.total_steps", "6"]
    passed(toml, *other, "--training.steps", "3")
    passed(toml, *other)
    resumed = rows_of(tmp_path / "other")
    assert [row.step for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert [row.loss for row in resumed] == [row.loss for row in whole]
    assert [row.grad_norm for row in resumed] == [row.grad_norm for row in whole]
    export_checkpoint(tmp_path / "run", tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle").config.shape.exit_layers == (1, 3)


@pytest.mark.cases
def test_num_04_two_processes_equal_one_with_any_accumulation(tmp_path: Path) -> None:
    batch = {"steps": 2, "global_batch_size": 8}
    toml = write_toml(tmp_path, training=batch, checkpoint={"interval": 100})
    flags = seed_checkpoint(toml, tmp_path / "seed")
    runs = []
    for name, size, processes in (("8x1", 8, 1), ("2x4", 2, 1), ("1x8", 1, 1), ("2x2x2", 2, 2)):
        where = ["--dump_folder", str(tmp_path / name), "--training.local_batch_size", str(size)]
        if processes == 1:
            assert train_here(toml, *flags, *where) == 0
        else:
            passed(toml, *flags, *where)
        runs.append(rows_of(tmp_path / name))
    for run in runs[1:]:
        for got, want in zip(run, runs[0], strict=True):
            assert got.loss == pytest.approx(want.loss, rel=1e-6)
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
            assert got.exit_shares == pytest.approx(want.exit_shares, rel=1e-5)
            assert got.router_means == pytest.approx(want.router_means, rel=1e-5)
            assert got.exit_ce == pytest.approx(want.exit_ce, rel=1e-5)
            assert got.tokens == want.tokens


@pytest.mark.cases
def test_num_01_a_rank_without_valid_labels_changes_nothing(tmp_path: Path) -> None:
    # One document shorter than a sequence, one epoch: rank 1 gets padding alone.
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "only a few words"}) + "\n")
    data = {"infinite": False}
    toml = write_toml(
        tmp_path, training={"steps": 1, "local_batch_size": 1}, dataloader=data,
        checkpoint={"interval": 1},
    )  # fmt: skip
    flags = seed_checkpoint(toml, tmp_path / "seed")
    assert train_here(toml, *flags, "--dump_folder", str(tmp_path / "one")) == 0
    passed(toml, *flags, "--dump_folder", str(tmp_path / "two"))
    one, two = rows_of(tmp_path / "one")[0], rows_of(tmp_path / "two")[0]
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert two.exit_shares == pytest.approx(one.exit_shares, rel=1e-6)
    for name in ("one", "two"):
        export_checkpoint(tmp_path / name, tmp_path / f"{name}_bundle")
    a, b = (read_bundle(tmp_path / f"{name}_bundle").load_tensors() for name in ("one", "two"))
    for key in a:
        assert b[key].isfinite().all()
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=2e-5)


@pytest.mark.cases
def test_evl_07_a_checkpoint_of_two_processes_scores_as_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passed(write_toml(tmp_path, training={"steps": 2}, checkpoint={"interval": 2}))
    step = tmp_path / "run" / "checkpoint" / "step-2"
    export_checkpoint(step, tmp_path / "bundle")
    assert_evaluates_alike(
        (step, tmp_path / "run", tmp_path / "bundle"), tmp_path / "text.jsonl", capsys
    )
