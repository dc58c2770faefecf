"""Rows of a batch equal single runs: tokens, exits, log-probabilities, caches; in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_titan.decode import (
    DecoderParams,
    DecodeState,
    Engine,
    FixedExit,
    GenerationRequest,
    GenerationResult,
    LockStep,
    Periodic,
    RouterGreedy,
    SampledRouter,
    SamplingParams,
    Schedule,
    ScriptedExits,
)
from tests.helpers.engines import make_engine
from tests.helpers.reference import assert_cache_equals
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

TOLERANCE = 1e-10
CONFIGS = (
    tiny_config(),
    tiny_config(exit_layers=(1, 2, 4), num_layers=5, num_kv_heads=4),
    tiny_config(exit_layers=(2,), num_layers=3, num_kv_heads=1, tie=True),
    tiny_config(exit_layers=(), num_layers=2),
)
TENSORS = tuple(lively_tensors(config, router_gain=0.7) for config in CONFIGS)
SCHEDULES: dict[str, Schedule] = {
    "lock-step": LockStep(),
    "one-replay": Periodic(num_replays=1),
    "three-replays-of-two": Periodic(num_replays=3, num_shallow=2),
}
LAWS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "exit-filter": {"sampling": SamplingParams(temperature=0.8, top_k=7, top_p=0.9)},
    "mixture-filter": {"sampling": SamplingParams(top_k=5, filter_scope="mixture")},
    "certified": {"sampling": SamplingParams(temperature=0)},
    "router-greedy": {"sampling": SamplingParams(temperature=0), "policy": RouterGreedy()},
    "router-temperature": {"policy": SampledRouter(temperature=2.0)},
    "first-exit": {"policy": FixedExit(exit_index=0)},
    "scripted": {"policy": ScriptedExits(exit_indices=(0, 0, 2, 1, 0))},
}


def make(which: int = 0, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Engine:
    tensors = {name: tensor.to(dtype) for name, tensor in TENSORS[which].items()}
    return make_engine(DecoderParams.from_tensors(CONFIGS[which], tensors), **kwargs)


def run_alone(engine: Engine, request: GenerationRequest) -> GenerationResult:
    return engine.generate(
        request.prompt_ids,
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        policy=request.policy,
        seed=request.seed,
        stop_ids=request.stop_ids,
        with_log_probs=request.with_log_probs,
    ).result()


def assert_rows_equal_single_runs(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    tolerance: float = TOLERANCE,
    **kwargs: Any,
) -> list[GenerationResult]:
    batch = engine.generate_batch(requests, **kwargs)
    streamed: list[list[int]] = [[] for _ in requests]
    for row_index, token in batch:
        streamed[row_index].append(token.token_id)
    results = batch.results()
    for request, result, tokens in zip(requests, results, streamed, strict=True):
        alone = run_alone(engine, request)
        assert result.token_ids == alone.token_ids == tuple(tokens)
        assert result.exit_indices == alone.exit_indices
        assert result.finish_reason == alone.finish_reason
        assert result.law == alone.law
        assert result.stats.host_reads == alone.stats.host_reads
        assert result.stats.head_rows == alone.stats.head_rows
        for name in ("log_exits", "log_probs", "log_mix"):
            ours, theirs = getattr(result, name), getattr(alone, name)
            assert (ours is None) == (theirs is None) == (not request.with_log_probs)
            if ours is not None:
                assert ours == pytest.approx(theirs, abs=tolerance, rel=tolerance)
    return results


def record_states(engine: Engine) -> list[DecodeState]:
    """Keep the sequences that the engine opens from now on."""
    states, original = [], engine.runner.new_state

    def new_state(*args: Any, **kwargs: Any) -> DecodeState:
        states.append(original(*args, **kwargs))
        return states[-1]

    engine.runner.new_state = new_state  # type: ignore[method-assign]
    return states


@pytest.mark.parity
@pytest.mark.parametrize("kernels", ["torch", "graph"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("law", LAWS)
def test_every_law_under_every_schedule(law: str, schedule: str, kernels: str) -> None:
    engine = make(kernels=kernels)
    requests = [
        GenerationRequest(
            prompt_ids=[1 + row] * (1 + 9 * row),
            max_new_tokens=14 - 3 * row,
            seed=row,
            with_log_probs=True,
            **LAWS[law],
        )
        for row in range(4)
    ]
    assert_rows_equal_single_runs(engine, requests, schedule=SCHEDULES[schedule])


@pytest.mark.parity
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_laws_side_by_side_with_fewer_places_than_rows(schedule: str) -> None:
    requests = [
        GenerationRequest(
            prompt_ids=[3, 1, 4][: 1 + i % 3], max_new_tokens=8 + i, seed=i, **LAWS[law]
        )
        for i, law in enumerate(LAWS)
    ]
    for batch_size in (1, 3, None):
        assert_rows_equal_single_runs(
            make(), requests, schedule=SCHEDULES[schedule], batch_size=batch_size
        )


rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 39), min_size=1, max_size=40),  # prompt
        st.integers(1, 14),  # new tokens
        st.sampled_from(sorted(LAWS)),
        st.integers(0, 2**64),  # seed
        st.lists(st.integers(0, 39), max_size=4),  # stop ids
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parity
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=rows,
    which=st.integers(0, len(CONFIGS) - 1),
    kernels=st.sampled_from(["torch", "graph"]),
    schedule=st.one_of(
        st.just(LockStep()),
        st.builds(Periodic, num_replays=st.integers(1, 4), num_shallow=st.integers(1, 4)),
    ),
    batch_size=st.one_of(st.none(), st.integers(1, 3)),
)
def test_any_batch_gives_single_runs_and_exact_caches(
    rows: list[tuple[list[int], int, str, int, list[int]]],
    which: int,
    kernels: str,
    schedule: Schedule,
    batch_size: int | None,
) -> None:
    engine = make(which, kernels=kernels)
    requests = [
        GenerationRequest(
            prompt_ids=prompt,
            max_new_tokens=num_new,
            seed=seed,
            stop_ids=stop_ids,
            **LAWS[law],
        )
        for prompt, num_new, law, seed, stop_ids in rows
    ]
    states = record_states(engine)
    results = engine.generate_batch(requests, batch_size=batch_size, schedule=schedule).results()
    assert len(states) == len(requests)
    for request, state, result in zip(requests, tuple(states), results, strict=True):
        assert state.token_ids == [*request.prompt_ids, *result.token_ids[:-1]]
        assert state.filled == sorted(state.filled, reverse=True)
        assert_cache_equals(CONFIGS[which], TENSORS[which], state, tolerance=TOLERANCE)
        engine.flush(state)
        assert_cache_equals(CONFIGS[which], TENSORS[which], state, tolerance=TOLERANCE)
    log_prob_requests = [replace(request, with_log_probs=True) for request in requests]
    assert_rows_equal_single_runs(
        engine, log_prob_requests, batch_size=batch_size, schedule=schedule
    )


@pytest.mark.parity
@pytest.mark.parametrize("kernels", ["torch", "graph"])
def test_more_owed_rows_than_one_call_holds_run_in_several(kernels: str) -> None:
    """Six rows owe 40 positions each when all go to the top at once."""
    engine = make(kernels=kernels)
    policy = ScriptedExits(exit_indices=(*(0,) * 40, 2), first_position=2)
    requests = [
        GenerationRequest(prompt_ids=[row, row], max_new_tokens=42, policy=policy)
        for row in range(6)
    ]
    states = record_states(engine)
    sizes = []
    run_block = engine.forward.run_block

    def counted(block_index: int, groups: Sequence[Any]) -> None:
        sizes.append((len(groups), sum(group.rows for group in groups)))
        run_block(block_index, groups)

    engine.forward.run_block = counted  # type: ignore[method-assign]
    results = engine.generate_batch(requests).results()
    assert (6, 6) in sizes
    assert (4, 128) in sizes, "as many full groups as a call holds"
    assert max(rows for _, rows in sizes) <= 128
    for state in states:
        assert_cache_equals(CONFIGS[0], TENSORS[0], state, tolerance=TOLERANCE)
    engine.forward.run_block = run_block  # type: ignore[method-assign]
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == run_alone(engine, request).token_ids


@pytest.mark.parity
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_lower_precision_batches_stay_near_the_twin(dtype: torch.dtype, kernels: str) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 0.25  # as for one sequence
    engine = make(dtype=dtype, kernels=kernels)
    states = record_states(engine)
    requests = [
        GenerationRequest(prompt_ids=[row + 1] * (row + 1), max_new_tokens=20, seed=row)
        for row in range(5)
    ]
    engine.generate_batch(requests, schedule=Periodic(num_replays=2)).results()
    for state in states:
        engine.flush(state)
        assert_cache_equals(CONFIGS[0], TENSORS[0], state, tolerance=tolerance)


@pytest.mark.cases
@pytest.mark.parametrize("law", ["certified", "sampled"])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_dec_10_a_batch_of_different_lengths_equals_single_runs(law: str, kernels: str) -> None:
    """Prompts of 1, 7 and 63 tokens in every order, float32."""
    engine = make(dtype=torch.float32, kernels=kernels)
    requests = [
        GenerationRequest(
            prompt_ids=[(5 * i + length) % 40 for i in range(length)],
            max_new_tokens=16,
            seed=length,
            with_log_probs=True,
            **LAWS[law],
        )
        for length in (1, 7, 63)
    ]
    for order in permutations(requests):
        assert_rows_equal_single_runs(engine, order, tolerance=1e-5)


@pytest.mark.cases
def test_dec_10_rows_with_different_forced_exits_equal_single_runs() -> None:
    engine = make(dtype=torch.float32)
    requests = [
        GenerationRequest(
            prompt_ids=[exit_index + 1] * length,
            max_new_tokens=16,
            policy=FixedExit(exit_index=exit_index),
            with_log_probs=True,
        )
        for exit_index, length in enumerate((1, 7, 63))
    ]
    for order in permutations(requests):
        results = assert_rows_equal_single_runs(engine, order, tolerance=1e-5)
        assert [result.exit_counts for result in results] == [
            run_alone(engine, request).exit_counts for request in order
        ]
