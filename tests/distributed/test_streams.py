"""Ranks whose text ends or fails apart: they stop together, and lose nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.runs import rows_of, train_under_torchrun, write_toml

pytestmark = [pytest.mark.distributed, pytest.mark.cases]

STREAM = {"path": "", "dataset": "stand_in", "split": "train", "infinite": False}


def run(
    toml: Path, kind: str, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> subprocess.CompletedProcess[str]:
    monkeypatch.setenv("STREAM", kind)
    return train_under_torchrun(toml, *flags, num_processes=2, module="tests.helpers.stream_run")


def test_dat_04_a_rank_whose_text_ends_first_goes_on_with_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = write_toml(
        tmp_path,
        training={"steps": 40, "local_batch_size": 1},
        dataloader=STREAM,
        validator={"enable": True, "freq": 20, "steps": -1, "dataloader": STREAM},
        checkpoint={"interval": 100},
    )
    done = run(toml, "uneven", monkeypatch)
    assert done.returncode != 0
    # The stream of rank 0 has 30 sequences, that of rank 1 has 10.
    message = (
        r"^nvium: error: the text ended after step 30 of 40: set \[dataloader\] infinite = true"
    )
    assert len(re.findall(message, done.stderr, re.MULTILINE)) == 2
    rows = rows_of(tmp_path / "run")
    assert [row.step for row in rows] == list(range(1, 31))
    validated = rows_of(tmp_path / "run", "val")
    assert [(row.step, row.tokens) for row in validated] == [(1, 40 * 64), (20, 40 * 64)]
    assert (tmp_path / "run" / "checkpoint" / "step-30" / ".metadata").is_file()


def test_dat_09_a_stream_that_fails_is_tried_again_then_all_ranks_stop_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = write_toml(
        tmp_path,
        training={"steps": 12, "local_batch_size": 1},
        dataloader=STREAM,
        checkpoint={"interval": 5},
    )
    once = run(toml, "once", monkeypatch, "--dump_folder", str(tmp_path / "once"))
    assert once.returncode == 0, once.stderr[-3000:]
    lost = "dataset 'stand_in': ConnectionError: the line is dead; trying again in "
    assert (once.stdout + once.stderr).count(lost) == 1

    forever = run(toml, "forever", monkeypatch)
    assert forever.returncode != 0
    assert (forever.stdout + forever.stderr).count(lost) == 2
    cause = r"the stream failed, and again in 2 retries: ConnectionError: the line is dead"
    errors = re.findall(rf"^nvium: error: (.*){cause}", forever.stderr, re.MULTILINE)
    assert sorted(errors) == ["dataset 'stand_in': ", "rank 1: dataset 'stand_in': "]
    assert [row.step for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]
    assert (tmp_path / "run" / "checkpoint" / "step-7" / ".metadata").is_file()

    resumed = run(toml, "fine", monkeypatch)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    losses = [[row.loss for row in rows_of(tmp_path / name)] for name in ("run", "once")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
