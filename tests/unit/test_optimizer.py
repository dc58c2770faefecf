# ruff: noqa: E501 - one case a line
"""The paper's optimizer and learning-rate curve."""

from __future__ import annotations

import math
import re

import pytest
import torch

from nvium_titan.core.flavors import flavor_shape
from nvium_titan.errors import ConfigError
from nvium_titan.train.model.build import build_model_config
from nvium_titan.train.optimizer import AdamW, LRSchedule


def learning_rates(steps: int, **settings: object) -> list[float]:
    """The factor at every step of a run, read off the schedule it would train with."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = LRSchedule.Config(**settings).build(optimizers=[optimizer], training_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_metrics()["lr/SGD"])
        optimizer.step()
        schedule.step()
    return rates


def test_the_paper_warms_up_over_one_percent_and_ends_at_a_tenth():
    rates = learning_rates(1000)
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[504] == pytest.approx(0.55, abs=0.01)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)
    assert max(rates) == 1.0


def test_warmup_stable_decay_of_the_largest_model():
    rates = learning_rates(1000, decay_ratio=0.1)
    assert rates[10:901] == [1.0] * 891
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 0, "decay_ratio": 0.0}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 5}, [0.2, 0.4, 0.6, 0.8, 1.0]),
        ({"warmup_ratio": 1.0}, [0.2, 0.4, 0.6, 0.8, 1.0]),
        ({"warmup_ratio": 0.0, "decay_type": "linear", "min_lr_factor": 0.0}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"warmup_steps": 0, "decay_ratio": 1.0, "decay_type": "linear", "min_lr_factor": 0.0},
         [1, 0.8, 0.6, 0.4, 0.2]),
        ({"warmup_steps": 2, "total_steps": 8, "decay_ratio": 0.0}, [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
    ids=["none", "all-warmup", "ratio-1", "no-warmup", "decay-1", "longer-curve"],
)  # fmt: skip
def test_lrs_01_edge_ratios_give_the_documented_curve(settings, expected):
    rates = learning_rates(5, **settings)
    assert rates == pytest.approx(expected)
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("steps", "settings", "message"),
    [
        (5, {"warmup_steps": 50}, "[lr_scheduler] warmup_steps=50 is more than the 5 steps"),
        (5, {"warmup_steps": 1, "decay_ratio": 1.0}, "1 steps of warm-up and decay_ratio=1.0 (5 steps)"),
        (0, {}, "[training] steps=0: must be >= 1"),
        (-1, {}, "[training] steps=-1: must be >= 1"),
        (9, {"total_steps": 5}, "[training] steps=9 is more than [lr_scheduler] total_steps=5"),
        (5, {"warmup_steps": -1}, "warmup_steps=-1: must be >= 0"),
        (5, {"decay_ratio": 1.5}, "decay_ratio=1.5: must be in [0, 1]"),
        (5, {"min_lr_factor": math.nan}, "min_lr_factor=nan: must be in [0, 1]"),
    ],
)  # fmt: skip
def test_lrs_01_impossible_schedules_are_refused(steps, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LRSchedule.Config(**settings).resolve(steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr=0.0: must be a number > 0"),
        ({"betas": (0.9, 1.0)}, "betas=[0.9, 1.0]: each must be in [0, 1)"),
        ({"eps": 0.0}, "eps=0.0: must be a number > 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: must be a number >= 0"),
    ],
)
def test_adamw_refuses_impossible_numbers(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        AdamW.Config(**settings)


def test_weight_decay_spares_biases_norms_and_the_embedding():
    with torch.device("meta"):
        model = build_model_config(flavor_shape("debug")).build()
    optimizers = AdamW.Config(lr=0.5, weight_decay=0.25).build(model_parts=[model])
    (optimizer,) = optimizers
    decay = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    for name, parameter in model.named_parameters():
        spared = parameter.ndim == 1 or name == "tok_embeddings.weight"
        assert decay[name] == (0.0 if spared else 0.25), name
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
