"""What went wrong for others when they split a model; what every rank must decide alike."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from nvium_titan.convert.export import load_native_tensors, read_step_folder
from nvium_titan.train.controller import ControllerConfig, next_beta
from tests.helpers.layouts import largest_deviations, rank_steps, train_layouts
from tests.helpers.runs import rows_of, tiny_settings, train_here

pytestmark = pytest.mark.distributed

BASELINE = {1: 9.0, 2: 9.0, 4: 9.0, 6: 0.0, 8: 0.0}
"""Validation losses that the mixture's are below up to step 5, and above afterwards."""


def seed(folder: Path, settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Write a seed checkpoint; return the settings of runs that start from it."""
    toml = folder / f"{name}-seed.toml"
    toml.write_text(tomli_w.dumps(settings))
    where = ["--dump_folder", str(folder / f"{name}-seed")]
    assert train_here(toml, *where, "--checkpoint.create_seed_checkpoint") == 0
    start = str(folder / f"{name}-seed" / "checkpoint" / "step-0")
    return {**settings, "checkpoint": {**settings["checkpoint"], "initial_load_path": start}}


def train_one(folder: Path, settings: dict[str, Any], name: str) -> None:
    toml = folder / f"{name}-one.toml"
    toml.write_text(tomli_w.dumps(settings))
    assert train_here(toml, "--dump_folder", str(folder / f"{name}-one")) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of one process (`*-one`) and of two, from the same weights."""
    folder = tmp_path_factory.mktemp("cases")
    batch = {"global_batch_size": 4, "local_batch_size": 4}
    half = {**batch, "local_batch_size": 2}
    plans = {
        # No term trains the routers alone in the first three steps.
        "phases": {"loss": {"alpha": 0.0, "beta": 0.5, "warmup_fraction": 0.5}},
        "frozen": {"nvium": {"trainable": "junctions"}},
    }
    layouts = {}
    for name, tables in plans.items():
        settings = tiny_settings(folder, training=batch, checkpoint={"interval": 100}, **tables)
        started = seed(folder, settings, name)
        train_one(folder, started, name)
        layouts[name] = {**started, "training": {**started["training"], **half}}
    row = replace(rows_of(folder / "phases-one")[0], split="val")
    rows = [asdict(replace(row, step=step, mixture_nll=BASELINE[step])) for step in BASELINE]
    baseline = folder / "baseline.jsonl"
    baseline.write_text("".join(json.dumps(row) + "\n" for row in rows))
    layouts["beta"] = tiny_settings(
        folder, training={**half, "steps": 8}, checkpoint={"interval": 4},
        validator={"enable": True, "freq": 2, "steps": 2},
        loss={"beta": 0.1, "controller": {"baseline": str(baseline)}},
    )  # fmt: skip
    layouts["beta-resumed"] = {
        **layouts["beta"],
        "checkpoint": {
            "enable": True, "interval": 4, "initial_load_model_only": False,
            "initial_load_path": str(folder / "beta" / "checkpoint" / "step-4"),
        },
    }  # fmt: skip
    train_layouts(folder, layouts, num_processes=2)
    return folder


@pytest.mark.cases
@pytest.mark.parametrize("name", ["phases", "frozen"])
def test_dis_06_parameters_without_a_gradient_neither_hang_nor_leak(runs: Path, name: str) -> None:
    found = largest_deviations(runs / name, runs / f"{name}-one")
    assert len(rows_of(runs / name)) == 6
    assert max(found.values()) < 1e-5, found
    for steps in rank_steps(runs / name):
        # The optimizer's state is made in the first step. At times a scalar of the last collective
        # is alive yet: fewer bytes than one more scalar or vector in each step would be.
        live = [step["live_bytes"] for step in steps[1:]]
        assert max(live) - min(live) < 256, steps


@pytest.mark.cases
def test_dis_06_a_frozen_backbone_stays_what_it_was(runs: Path) -> None:
    before = load_native_tensors(read_step_folder(runs / "frozen-seed"))
    after = load_native_tensors(read_step_folder(runs / "frozen"))
    for name in before:
        changed = not torch.equal(before[name], after[name])
        assert changed == (".junction." in name), name


def test_every_rank_has_the_same_beta_and_goes_on_with_it(runs: Path) -> None:
    nll = {row.step: row.mixture_nll for row in rows_of(runs / "beta", "val")}
    config = ControllerConfig()
    after_4 = next_beta(0.1, BASELINE[4] - nll[4], config)
    after_6 = next_beta(after_4, BASELINE[6] - nll[6], config)
    assert after_4 > 0.1
    assert after_6 < after_4
    # Two steps of router warm-up, whose validation moves nothing.
    compute = [0, 0, 0.1, 0.1, after_4, after_4, after_6, after_6]
    balance = [1, 1, 0, 0, 0, 0, 0, 0]
    for name, first in (("beta", 1), ("beta-resumed", 5)):
        ranks = rank_steps(runs / name)
        assert len(ranks) == 2
        for steps in ranks:
            assert [step["step"] for step in steps] == list(range(first, 9))
            assert [step["compute"] for step in steps] == compute[first - 1 :]
            assert [step["balance"] for step in steps] == balance[first - 1 :]
        losses = [row.loss for row in rows_of(runs / name)]
        assert losses == [row.loss for row in rows_of(runs / "beta")][first - 1 :]
