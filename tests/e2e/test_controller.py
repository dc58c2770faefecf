"""A run whose beta follows a baseline; its state is in the checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nvium_titan.train.controller import ControllerConfig, next_beta
from tests.helpers.runs import rows_of, train_here, write_toml

pytestmark = pytest.mark.e2e


def test_beta_follows_the_baseline_and_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(
        tmp_path, training={"steps": 8}, checkpoint={"interval": 4},
        validator={"enable": True, "freq": 2, "steps": 2}, loss={"beta": 0.1},
    )  # fmt: skip
    plain = tmp_path / "plain"
    assert train_here(toml, "--dump_folder", str(plain)) == 0
    # A baseline that is better at step 4 and worse at step 6.
    shift = {1: 0.0, 2: 9.0, 4: -0.02, 6: 0.05, 8: 0.0}
    rows = [
        replace(row, mixture_nll=row.mixture_nll + shift[row.step]) for row in rows_of(plain, "val")
    ]
    baseline = tmp_path / "baseline.jsonl"
    baseline.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    toml = write_toml(
        tmp_path, training={"steps": 8}, checkpoint={"interval": 4},
        validator={"enable": True, "freq": 2, "steps": 2},
        loss={"beta": 0.1, "controller": {"baseline": str(baseline)}},
    )  # fmt: skip
    assert train_here(toml) == 0
    run = tmp_path / "run"
    nll = {row.step: row.mixture_nll for row in rows_of(run, "val")}
    losses = {row.step: row.mixture_nll for row in rows}
    config = ControllerConfig()
    after_4 = next_beta(0.1, losses[4] - nll[4], config)
    after_6 = next_beta(after_4, losses[6] - nll[6], config)
    assert after_4 < 0.1 < after_6
    # Two steps of router warm-up, whose validation moves nothing.
    want = [0, 0, 0.1, 0.1, after_4, after_4, after_6, after_6]
    assert [row.beta for row in rows_of(run)] == want

    whole = [(row.step, row.split, row.loss) for s in ("train", "val") for row in rows_of(run, s)]
    shutil.rmtree(run / "checkpoint" / "step-8")
    assert train_here(toml) == 0
    assert [row.beta for row in rows_of(run)] == want
    again = [(row.step, row.split, row.loss) for s in ("train", "val") for row in rows_of(run, s)]
    assert again == whole

    capfd.readouterr()
    assert train_here(toml, "--validator.enable", "false") == 2
    assert "beta follows the validation loss" in capfd.readouterr().err
