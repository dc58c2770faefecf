"""What went wrong for others when they split a model: parameters that get no gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from nvium_titan.convert.export import load_native_tensors, read_step_folder
from tests.helpers.layouts import largest_deviations, train_layouts
from tests.helpers.runs import rows_of, tiny_settings, train_here

pytestmark = [pytest.mark.distributed, pytest.mark.cases]


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
    train_layouts(folder, layouts, num_processes=2, timeout_s=300)
    return folder


@pytest.mark.parametrize("name", ["phases", "frozen"])
def test_dis_06_parameters_without_a_gradient_neither_hang_nor_leak(runs: Path, name: str) -> None:
    found = largest_deviations(runs / name, runs / f"{name}-one")
    assert len(rows_of(runs / name)) == 6
    assert max(found.values()) < 1e-5, found
    for path in runs.joinpath(name).glob("live-*.json"):
        live = json.loads(path.read_text())
        assert len(set(live[1:])) == 1, live  # the optimizer's state is made in the first step


def test_dis_06_a_frozen_backbone_stays_what_it_was(runs: Path) -> None:
    before = load_native_tensors(read_step_folder(runs / "frozen-seed"))
    after = load_native_tensors(read_step_folder(runs / "frozen"))
    for name in before:
        changed = not torch.equal(before[name], after[name])
        assert changed == (".junction." in name), name
