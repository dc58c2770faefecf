"""Schedules, their cost model, and that the model predicts what the engine counts."""

from __future__ import annotations

import random

import pytest
import torch

from nvium_titan.core.cost import head_cost
from nvium_titan.decode import (
    DecoderParams,
    Engine,
    GenerationRequest,
    LockStep,
    Periodic,
    Schedule,
    ScriptedExits,
    choose_schedule,
)
from nvium_titan.decode.schedule import named_schedule, tokens_per_cost
from nvium_titan.errors import PromptError
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

PAPER = (0.35, 0.2, 0.15, 0.3)
HEAD_COST = 0.145


def speedup(schedule: LockStep | Periodic, shares: tuple[float, ...], num_rows: int) -> float:
    dense = num_rows / (len(shares) + HEAD_COST)
    rate = tokens_per_cost(schedule, shares, num_rows=num_rows, head_cost=HEAD_COST)
    return rate / dense


@pytest.mark.parametrize(("num_rows", "simulated"), [(1, 1.60), (2, 1.26), (4, 1.08), (8, 1.00)])
def test_lock_step_gains_what_a_simulation_with_row_costs_says(
    num_rows: int, simulated: float
) -> None:
    assert speedup(LockStep(), PAPER, num_rows) == pytest.approx(simulated, rel=0.025)


def test_one_row_in_lock_step_pays_its_expected_depth() -> None:
    rate = tokens_per_cost(LockStep(), PAPER, num_rows=1, head_cost=HEAD_COST)
    assert rate == pytest.approx(1 / (1 + 0.65 + 0.45 + 0.3 + HEAD_COST))


@pytest.mark.parametrize("num_exits", [2, 4, 6])
def test_with_many_rows_a_replay_pays_above_the_threshold(num_exits: int) -> None:
    threshold = (1 + HEAD_COST) / (num_exits + HEAD_COST)
    for offset in (-0.02, 0.02):
        first = threshold + offset
        shares = (first, *((1 - first) / (num_exits - 1),) * (num_exits - 1))
        replayed = speedup(Periodic(num_replays=1), shares, 10_000)
        assert (replayed > speedup(LockStep(), shares, 10_000)) == (offset > 0)


def test_the_choice_is_the_best_candidate_and_lock_step_where_nothing_is_gained() -> None:
    assert choose_schedule((0.1, 0.1, 0.1, 0.7), num_rows=8, head_cost=HEAD_COST) == LockStep()
    assert choose_schedule((1.0,), num_rows=8, head_cost=HEAD_COST) == LockStep()
    assert choose_schedule(PAPER, num_rows=1, head_cost=HEAD_COST) == LockStep()
    lively = choose_schedule((0.6, 0.2, 0.1, 0.1), num_rows=8, head_cost=HEAD_COST)
    assert isinstance(lively, Periodic)
    for num_replays in range(1, 9):
        other = Periodic(num_replays=num_replays)
        assert speedup(lively, (0.6, 0.2, 0.1, 0.1), 8) >= speedup(other, (0.6, 0.2, 0.1, 0.1), 8)
    costly_head = choose_schedule((0.6, 0.2, 0.1, 0.1), num_rows=8, head_cost=5.0)
    assert costly_head == LockStep(), "a replay pays the head"


def test_one_row_never_gains_from_a_replay() -> None:
    for shares in (PAPER, (0.9, 0.1), (0.5, 0.5, 0.0), (0.0, 0.0, 1.0)):
        alone = speedup(LockStep(), shares, 1)
        assert speedup(Periodic(num_replays=3), shares, 1) == pytest.approx(alone)


def test_settings_and_shares_are_checked() -> None:
    with pytest.raises(PromptError, match="num_replays=0"):
        Periodic(num_replays=0)
    with pytest.raises(PromptError, match="num_shallow=0"):
        Periodic(num_replays=1, num_shallow=0)
    with pytest.raises(ValueError, match="sum to 1"):
        choose_schedule((0.5, 0.4), num_rows=2, head_cost=1.0)
    assert Periodic(num_replays=2, num_shallow=9).limits(3) == (3, 3, 3)
    assert Periodic(num_replays=2).limits(3) == (1, 1, 3)
    assert LockStep().limits(3) == (3,)


@pytest.mark.parametrize("num_rows", [2, 6])
@pytest.mark.parametrize(
    "schedule",
    [LockStep(), Periodic(num_replays=2), Periodic(num_replays=1, num_shallow=2)],
    ids=["lock", "sweep", "sweep-of-two"],
)
def test_the_engine_runs_the_calls_that_the_model_predicts(
    schedule: LockStep | Periodic, num_rows: int
) -> None:
    """One layer per block; exits drawn from the shares; 3% is five deviations or more."""
    config = tiny_config(exit_layers=(1, 2, 3), num_layers=4, max_positions=600)
    engine = Engine(DecoderParams.from_tensors(config, lively_tensors(config)))
    rng = random.Random(5)
    requests = [
        GenerationRequest(
            prompt_ids=[row],
            max_new_tokens=500,
            policy=ScriptedExits(exit_indices=tuple(rng.choices(range(4), PAPER, k=500))),
        )
        for row in range(num_rows)
    ]
    batch = engine.generate_batch(requests, schedule=schedule)
    with torch.inference_mode():
        for _, token in batch:
            if token.position == 500:  # the first row that ends; from here the batch is smaller
                break
    counted = batch.stats.num_new_tokens / (
        batch.stats.layers_run + HEAD_COST * batch.stats.head_calls
    )
    predicted = tokens_per_cost(schedule, PAPER, num_rows=num_rows, head_cost=HEAD_COST)
    assert counted == pytest.approx(predicted, rel=0.03)


def test_a_schedule_is_whatever_names_its_limits() -> None:
    class DeepOnly:
        def limits(self, num_blocks: int) -> tuple[int, ...]:
            return (1, 2, num_blocks)

    schedule: Schedule = DeepOnly()
    config = tiny_config()
    engine = Engine(DecoderParams.from_tensors(config, lively_tensors(config)))
    requests = [GenerationRequest(prompt_ids=[1], max_new_tokens=9, seed=s) for s in range(3)]
    ours = engine.generate_batch(requests, schedule=schedule).results()
    assert [result.token_ids for result in ours] == [
        result.token_ids for result in engine.generate_batch(requests).results()
    ]


@pytest.mark.parametrize("shares", [(0.7, 0.2, 0.1), (0.1, 0.1, 0.8)], ids=["shallow", "deep"])
def test_auto_takes_what_the_measured_shares_call_for(shares: tuple[float, ...]) -> None:
    config = tiny_config(exit_layers=(2, 4), num_layers=6, vocab_size=8, max_positions=100)
    engine = Engine(DecoderParams.from_tensors(config, lively_tensors(config)))
    rng = random.Random(3)
    requests = [
        GenerationRequest(
            prompt_ids=[row],
            max_new_tokens=80,
            seed=row,
            policy=ScriptedExits(exit_indices=tuple(rng.choices(range(3), shares, k=80))),
        )
        for row in range(8)
    ]
    locked = engine.generate_batch(requests)
    auto = engine.generate_batch(requests, schedule="auto")
    for ours, theirs in zip(auto.results(), locked.results(), strict=True):
        assert ours.token_ids == theirs.token_ids
    wanted = choose_schedule(shares, num_rows=8, head_cost=head_cost(config.shape))
    assert isinstance(wanted, Periodic) == (shares[0] > 0.5)
    fewer_layers = auto.stats.layers_run < locked.stats.layers_run
    assert fewer_layers == isinstance(wanted, Periodic)


def test_schedules_have_names() -> None:
    assert named_schedule("lockstep") == LockStep()
    assert named_schedule("periodic") == Periodic(num_replays=1)
    assert named_schedule("auto") == "auto"
