"""Adaptive beta against the numbers of the authors' code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvium_titan.errors import ConfigError, DataError
from nvium_titan.train.controller import Baseline, ControllerConfig, next_beta


@pytest.mark.parity
@pytest.mark.parametrize("name", ["class_defaults", "config_yaml", "h1536_l48_adaptive_run"])
def test_beta_moves_as_in_the_authors_code(name: str, shared_dir: Path) -> None:
    golden = json.loads((shared_dir / "golden" / "controller.json").read_text())[name]
    params = golden["params"]
    config = ControllerConfig(
        k_up=params["k_up"], k_down=params["k_down"], dead_band=params["dead_band"],
        max_step=params["max_step"], min_beta=params["min_weight"], max_beta=params["max_weight"],
    )  # fmt: skip
    assert len(golden["rows"]) > 50
    for gap, before, after, _ in golden["rows"]:
        # They compute the gap from two losses near 3, so it is rounded at about 1e-15.
        assert next_beta(before, gap, config) == pytest.approx(after, abs=1e-12)


@pytest.mark.parity
def test_the_baseline_is_that_of_the_nearest_step(shared_dir: Path) -> None:
    golden = json.loads((shared_dir / "golden" / "controller.json").read_text())
    lookup = golden["nearest_step_lookup"]
    baseline = Baseline({int(step): loss for step, loss in lookup["records"].items()})
    for step, loss in lookup["queries"].items():
        assert baseline.at(int(step)) == loss


def test_wrong_limits_and_an_unvalidated_baseline_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_beta=0\.5: must be finite and at least min_beta=1"):
        ControllerConfig(min_beta=1.0, max_beta=0.5)
    with pytest.raises(ConfigError, match=r"k_up=-1: must be finite and >= 0"):
        ControllerConfig(k_up=-1)
    path = tmp_path / "metrics.jsonl"
    path.touch()
    with pytest.raises(DataError, match="no validation in it"):
        Baseline.read(path)
