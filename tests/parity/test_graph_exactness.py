"""Decoding in graphs equals decoding in single operations; the fake graph, in float64."""

from __future__ import annotations

import gc
import itertools
import logging
import random

import pytest
import torch
from torch.testing import assert_close

from nvium_titan.bundle import BundleConfig
from nvium_titan.decode import (
    DecoderParams,
    Engine,
    ExitPolicy,
    FixedExit,
    GenerationRequest,
    GenerationResult,
    Noise,
    RouterGreedy,
    SampledRouter,
    SamplingParams,
    ScriptedExits,
)
from nvium_titan.decode.forward.graphs.capture import CudaGraphs
from nvium_titan.decode.forward.graphs.forward import LAUNCHES_PER_TOKEN, GraphForward, Mode
from nvium_titan.decode.forward.torch import Seen, causal_mask, run_layer
from nvium_titan.decode.sequence import LayerSlots
from nvium_titan.errors import DependencyError
from tests.gpu import imitation
from tests.gpu.imitation import ImitatedGraphs
from tests.helpers.engines import make_engine
from tests.helpers.reference import assert_cache_equals
from tests.helpers.tiny_decoder import exit_scripts, lively_tensors, tiny_config
from tests.helpers.tolerance import model_rounding

pytestmark = pytest.mark.parity

TOLERANCE = 1e-10
CONFIG = tiny_config()
FOUR_EXITS = tiny_config(exit_layers=(1, 2, 3), num_layers=4, num_kv_heads=4, tie=True)
DENSE = tiny_config(exit_layers=(), num_layers=3, final_adapter=False)
POLICIES: dict[str, ExitPolicy] = {
    "sampled": SampledRouter(),
    "hot": SampledRouter(temperature=0.5),
    "greedy": RouterGreedy(),
    "fixed": FixedExit(exit_index=1),
    "long-owed": ScriptedExits(exit_indices=(0,) * 45 + (1, 2), first_position=3),
    "routers-run": ScriptedExits(exit_indices=(0, 2, 1), first_position=3, runs_router=True),
}
SAMPLINGS = {
    "plain": SamplingParams(),
    "warm": SamplingParams(temperature=0.7),
    "argmax": SamplingParams(temperature=0),
    "filtered": SamplingParams(temperature=0.9, top_k=7, top_p=0.9),
    "nucleus": SamplingParams(top_p=0.6),
    "min-p": SamplingParams(temperature=1.3, min_p=0.2),
    "cold": SamplingParams(temperature=0, top_k=3),
    "mixture": SamplingParams(top_k=7, filter_scope="mixture"),
}


def make(
    config: BundleConfig = CONFIG,
    *,
    kernels: str = "graph",
    dtype: torch.dtype = torch.float64,
    num_tokens: int | None = None,
    **kwargs: object,
) -> Engine:
    tensors = {name: tensor.to(dtype) for name, tensor in lively_tensors(config).items()}
    params = DecoderParams.from_tensors(config, tensors, num_tokens=num_tokens)
    return make_engine(params, kernels=kernels, **kwargs)


def model_of(engine: Engine) -> GraphForward:
    model = engine.forward
    assert isinstance(model, GraphForward)
    return model


def assert_same(one: GenerationResult, other: GenerationResult) -> None:
    assert one.token_ids == other.token_ids
    assert one.exit_indices == other.exit_indices
    assert one.finish_reason == other.finish_reason
    assert one.stats.layers_run == other.stats.layers_run
    assert one.stats.group_sizes == other.stats.group_sizes
    assert one.stats.head_rows == other.stats.head_rows


@pytest.mark.parametrize("pattern", exit_scripts(3, 51))
def test_every_exit_pattern_keeps_the_cache_exact(pattern: str) -> None:
    script = exit_scripts(3, 51)[pattern]
    policy = ScriptedExits(exit_indices=script, first_position=5)
    engine, eager = make(), make(kernels="torch")
    states = engine.new_state(), eager.new_state()
    results = [
        each.generate(
            [1, 2, 3, 4, 5], max_new_tokens=51, policy=policy, seed=3, state=state
        ).result()
        for each, state in zip((engine, eager), states, strict=True)
    ]
    assert_same(*results)
    assert results[0].exit_indices == script
    assert states[0].filled == states[1].filled
    assert_cache_equals(CONFIG, lively_tensors(CONFIG), states[0], tolerance=TOLERANCE)
    engine.flush(states[0])
    assert_cache_equals(CONFIG, lively_tensors(CONFIG), states[0], tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [(policy, "warm") for policy in POLICIES]
    + [("sampled", sampling) for sampling in SAMPLINGS]
    + [("greedy", "argmax"), ("fixed", "filtered")],
)
def test_every_law_gives_the_tokens_of_single_operations(policy: str, sampling: str) -> None:
    results = [
        make(kernels=kernels, num_tokens=37)
        .generate(
            [1, 2, 3],
            max_new_tokens=60,
            policy=POLICIES[policy],
            sampling=SAMPLINGS[sampling],
            seed=4,
        )
        .result()
        for kernels in ("graph", "torch")
    ]
    assert_same(*results)
    assert max(results[0].token_ids) < 37


def test_filters_are_drawn_inside_the_graph_and_change_without_a_capture() -> None:
    engine, eager = make(), make(kernels="torch")
    model = model_of(engine)
    for sampling in SAMPLINGS.values():
        if sampling.filter_scope == "mixture":  # at full depth, in pieces
            continue
        results = [
            each.generate(
                [1, 2, 3], max_new_tokens=30, policy=POLICIES["fixed"], sampling=sampling, seed=6
            ).result()
            for each in (engine, eager)
        ]
        assert_same(*results)
    # Whatever the numbers are: a graph with a filter and one without, for each tuple.
    (graphs,) = model._graphs.values()
    assert {has_filter for _, has_filter in graphs.tokens} == {True, False}
    captures = model.counters.captures
    for top_k in (1, 5, 39):
        sampling = SamplingParams(top_k=top_k, top_p=0.8)
        engine.generate(
            [1, 2, 3], max_new_tokens=30, policy=POLICIES["fixed"], sampling=sampling, seed=6
        ).result()
    assert model.counters.captures == captures


@pytest.mark.parametrize("config", [FOUR_EXITS, DENSE], ids=["four-exits", "dense"])
def test_other_numbers_of_exits_give_the_same_tokens(config: BundleConfig) -> None:
    results = [
        make(config, kernels=kernels).generate([1, 2, 3], max_new_tokens=60, seed=5).result()
        for kernels in ("graph", "torch")
    ]
    assert_same(*results)


def test_log_probabilities_come_from_tokens_in_pieces() -> None:
    results = [
        make(kernels=kernels)
        .generate([1, 2], max_new_tokens=30, seed=2, with_log_probs=True)
        .result()
        for kernels in ("graph", "torch")
    ]
    assert_same(*results)
    for name in ("log_exits", "log_probs", "log_mix"):
        values = [torch.tensor(getattr(result, name)) for result in results]
        assert_close(*values, atol=TOLERANCE, rtol=TOLERANCE)


def test_scores_equal_those_of_single_operations() -> None:
    ids_BT = [[(7 * i + b) % 40 for i in range(90)] for b in range(2)]
    scores = [make(kernels=kernels).score(ids_BT) for kernels in ("graph", "torch")]
    for one, other in zip(*scores, strict=True):
        assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("lazy_prefill", [False, True])
def test_further_turns_and_early_stops(lazy_prefill: bool) -> None:
    """Turns on one sequence: to the end, stopped by the caller, by a token, and dropped."""
    tokens = []
    for kernels in ("graph", "torch"):
        engine = make(kernels=kernels)
        state = engine.new_state()
        taken, last = [], []
        for turn in range(4):
            generation = engine.generate(
                [*last, *range(turn, 40)],
                max_new_tokens=20,
                seed=turn,
                state=state,
                stop_ids=range(0, 40, 3) if turn == 2 else (),
                lazy_prefill=lazy_prefill,
            )
            drawn = list(itertools.islice(generation, 6 if turn % 2 else None))
            if turn == 1:
                assert generation.stop().finish_reason == "stop"
            generation.close()
            taken += [(token.token_id, token.exit_index) for token in drawn]
            last = [drawn[-1].token_id]
        tokens.append(taken)
        assert_cache_equals(CONFIG, lively_tensors(CONFIG), state, tolerance=TOLERANCE)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_a_failure_in_the_middle_of_a_token_leaves_the_rows_owed(
    fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, eager = make(), make(kernels="torch")
    state, twin = engine.new_state(), eager.new_state()
    noise = Noise(1, vocab_size=40)
    engine.prefill(state, [1, 2, 3])
    eager.prefill(twin, [1, 2, 3])
    token = engine.choose(state, noise=noise)
    eager.choose(twin, noise=noise)

    def fail(graph: imitation._ImitatedGraph) -> None:
        for step in graph._steps[: int(fraction * len(graph._steps))]:
            step.run()
        raise RuntimeError("the device is gone")

    for index in range(25):
        if index % 5 == 4:
            before = list(state.filled)
            with monkeypatch.context() as patch:
                patch.setattr(imitation._ImitatedGraph, "replay", fail)
                with pytest.raises(RuntimeError, match="device is gone"):
                    engine.step(state, token.token_id, noise=noise)
            assert state.filled == before
            after = engine.choose(state, noise=noise)
        else:
            after = engine.step(state, token.token_id, noise=noise)
        assert after == eager.step(twin, token.token_id, noise=noise)
        token = after
    assert state.filled == twin.filled
    assert_cache_equals(CONFIG, lively_tensors(CONFIG), state, tolerance=TOLERANCE)


def test_a_deferred_state_survives_500_replays() -> None:
    config = tiny_config(max_positions=560)
    engine = make(config)
    state = engine.new_state()
    policy = ScriptedExits(exit_indices=(*(0,) * 520, 2), first_position=3)
    before = model_of(engine).counters.replays
    generation = engine.generate([1, 2, 3], max_new_tokens=521, policy=policy, state=state)
    tokens = list(itertools.islice(generation, 520))
    assert {token.exit_index for token in tokens} == {0}
    assert model_of(engine).counters.replays - before >= 500
    assert state.filled == [522, 3, 3]
    assert next(generation).exit_index == 2  # takes all of them up
    assert state.filled == [523, 523, 523]
    assert_cache_equals(config, lively_tensors(config), state, tolerance=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_lower_precision_stays_near_the_twin(dtype: torch.dtype) -> None:
    engine = make(dtype=dtype)
    state = engine.new_state()
    policy = ScriptedExits(exit_indices=exit_scripts(3, 40)["random"])
    engine.generate([1, 2, 3], max_new_tokens=40, policy=policy, state=state).result()
    engine.flush(state)
    tolerance = model_rounding(dtype, CONFIG.shape, num_tokens=len(state.token_ids))
    assert_cache_equals(CONFIG, lively_tensors(CONFIG), state, tolerance=tolerance)


def test_a_batch_gives_the_single_runs_in_counted_operations() -> None:
    engine, eager = make(), make(kernels="torch")
    requests = [
        GenerationRequest(prompt_ids=[row, 2, 3] * (row + 1), max_new_tokens=20, seed=row)
        for row in range(3)
    ]
    results = engine.generate_batch(requests).results()
    assert model_of(engine).counters.eager_calls > 0
    assert model_of(engine).counters.replays == 0
    for request, result in zip(requests, results, strict=True):
        single = eager.generate(request.prompt_ids, max_new_tokens=20, seed=request.seed).result()
        assert result.token_ids == single.token_ids


# --- the token behind, launched before this one is read -------------------------------------------


def looking_back(engine: Engine) -> Engine:
    model_of(engine).mode = "tokens"
    return engine


@pytest.mark.parametrize("pattern", ["random", "fifty-early-then-full"])
def test_exits_and_reads_are_the_same_without_looking_ahead(pattern: str) -> None:
    policy = ScriptedExits(exit_indices=exit_scripts(3, 51)[pattern], first_position=5)
    engines = looking_back(make()), make(), make(kernels="torch")
    results = [
        each.generate([1, 2, 3, 4, 5], max_new_tokens=51, policy=policy, seed=3).result()
        for each in engines
    ]
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])
    assert results[0].stats.host_reads == results[1].stats.host_reads
    counters = model_of(engines[1]).counters
    assert counters.replays == model_of(engines[0]).counters.replays
    assert counters.unused_tokens == 0, "no token behind the last one"


def test_the_next_token_is_launched_before_this_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    replay, wait = imitation._ImitatedGraph.replay, imitation._ImitatedFetch.wait

    def noted_replay(graph: imitation._ImitatedGraph) -> None:
        events.append("launch")
        replay(graph)

    def noted_wait(fetch: imitation._ImitatedFetch) -> list[int]:
        events.append("read")
        return wait(fetch)

    monkeypatch.setattr(imitation._ImitatedGraph, "replay", noted_replay)
    monkeypatch.setattr(imitation._ImitatedFetch, "wait", noted_wait)
    for engine, expected in (
        (make(), ["launch", *["launch", "read"] * 4, "read"]),
        (looking_back(make()), ["launch", "read"] * 5),
    ):
        generation = engine.generate([1, 2, 3], max_new_tokens=6, seed=2)
        next(generation)  # in pieces: its rows have run with the prompt
        events.clear()
        generation.result()
        assert events == expected


@pytest.mark.parametrize("seed", [1, 9], ids=["same-seed", "other-seed"])
@pytest.mark.parametrize("lazy_prefill", [False, True])
def test_a_turn_of_one_token_after_a_stop(seed: int, lazy_prefill: bool) -> None:
    """The token behind the stop has run; what it left must not be seen."""
    taken = []
    for engine in (make(), make(kernels="torch")):
        state = engine.new_state()
        first = engine.generate([1, 2, 3], max_new_tokens=30, seed=1, state=state)
        drawn = list(itertools.islice(first, 7))
        first.stop()
        again = engine.generate(
            [drawn[-1].token_id], max_new_tokens=20, seed=seed, state=state,
            lazy_prefill=lazy_prefill,
        )  # fmt: skip
        taken.append([*drawn, *again])
        assert_cache_equals(CONFIG, lively_tensors(CONFIG), state, tolerance=TOLERANCE)
        if isinstance(engine.forward, GraphForward):
            assert model_of(engine).counters.unused_tokens == 1
    assert taken[0] == taken[1]


@pytest.mark.parametrize(
    ("other_token", "seed", "policy", "num_unused"),
    [
        (0, 1, SampledRouter(), 0),
        (1, 1, SampledRouter(), 1),
        (0, 5, SampledRouter(), 1),
        (0, 1, FixedExit(exit_index=2), 1),
    ],
    ids=["the-same", "other-token", "other-seed", "other-policy"],
)
def test_a_step_after_a_stop_takes_what_was_begun_if_it_is_the_same(
    other_token: int, seed: int, policy: ExitPolicy, num_unused: int
) -> None:
    taken = []
    engines = make(), make(kernels="torch")
    for engine in engines:
        state, noise = engine.new_state(), Noise(seed, vocab_size=40)
        first = engine.generate([1, 2, 3], max_new_tokens=30, seed=1, state=state)
        drawn = list(itertools.islice(first, 7))
        first.stop()
        token_id = (drawn[-1].token_id + other_token) % 40
        for _ in range(8):
            drawn.append(engine.step(state, token_id, noise=noise, policy=policy))
            token_id = drawn[-1].token_id
        taken.append(drawn)
        assert_cache_equals(CONFIG, lively_tensors(CONFIG), state, tolerance=TOLERANCE)
    assert taken[0] == taken[1]
    assert model_of(engines[0]).counters.unused_tokens == num_unused


def test_the_counts_on_the_device_are_those_of_the_host() -> None:
    engine = looking_back(make())
    state = engine.new_state()
    generation = engine.generate([1, 2, 3], max_new_tokens=30, seed=3, state=state)
    next(generation)
    (graphs,) = model_of(engine)._graphs.values()
    for _ in generation:
        assert graphs.inputs.filled_E.tolist() == state.filled
    assert model_of(engine).counters.declined_tokens == 1  # the first: all others are one graph


def test_blocks_that_are_run_with_other_sequences_drop_what_was_begun() -> None:
    taken = []
    for engine in (make(), make(kernels="torch")):
        states = [engine.new_state() for _ in range(2)]
        engine.prefill(states[1], [4, 5])
        first = engine.generate(
            [1, 2, 3], max_new_tokens=30, policy=POLICIES["long-owed"], state=states[0]
        )
        drawn = list(itertools.islice(first, 10))
        with torch.inference_mode():
            engine.runner.feed(states[1], [6])
            for block_index in range(3):
                engine.runner.fill_all(states, block_index)
        drawn.extend(first)
        taken.append(drawn)
        assert_cache_equals(CONFIG, lively_tensors(CONFIG), states[0], tolerance=TOLERANCE)
    assert taken[0] == taken[1]


def test_the_same_length_after_another_text_takes_no_old_token() -> None:
    engine, eager = make(), make(kernels="torch")
    state = engine.new_state()
    first = engine.generate([1, 2, 3], max_new_tokens=30, seed=1, state=state)
    drawn = list(itertools.islice(first, 4))
    first.stop()
    state.clear()
    # As many tokens as had been fed, then the token that was drawn last, by the same seed.
    prompt = [9, 8, 7, 6, 5, drawn[-1].token_id]
    assert len(prompt) == drawn[-1].position
    result = engine.generate(prompt, max_new_tokens=20, seed=1, state=state).result()
    assert_same(result, eager.generate(prompt, max_new_tokens=20, seed=1).result())


@pytest.mark.parametrize("fails", ["launch", "read"])
@pytest.mark.parametrize("num_done", range(4, 24, 4))
def test_a_failure_in_the_token_behind_leaves_a_sequence_that_goes_on(
    num_done: int, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, calls = imitation._ImitatedGraph.replay, itertools.count()
    wait = imitation._ImitatedFetch.wait

    def fail_to_read(fetch: imitation._ImitatedFetch) -> list[int]:
        if next(calls) < num_done:
            return wait(fetch)
        raise RuntimeError("the device is gone")

    def fail(graph: imitation._ImitatedGraph) -> None:
        if next(calls) < num_done:
            replay(graph)
            return
        for step in graph._steps[: len(graph._steps) // 2]:
            step.run()
        raise RuntimeError("the device is gone")

    engine = make()
    state, noise = engine.new_state(), Noise(6, vocab_size=40)
    with monkeypatch.context() as patch:
        if fails == "launch":
            patch.setattr(imitation._ImitatedGraph, "replay", fail)
        else:
            patch.setattr(imitation._ImitatedFetch, "wait", fail_to_read)
        with pytest.raises(RuntimeError, match="device is gone"):
            engine.generate([1, 2, 3], max_new_tokens=30, seed=6, state=state).result()
    eager = make(kernels="torch").generate([1, 2, 3], max_new_tokens=30, seed=6)
    expected = list(eager)
    assert state.token_ids == [1, 2, 3, *(token.token_id for token in expected)][: state.length]
    position = state.length - 3
    for before, token in zip([None, *expected[position:]], expected[position:], strict=False):
        if before is None:
            assert engine.choose(state, noise=noise) == token
        else:
            assert engine.step(state, before.token_id, noise=noise) == token
    assert_cache_equals(CONFIG, lively_tensors(CONFIG), state, tolerance=TOLERANCE)


# --- what is captured, launched and kept ----------------------------------------------------------


def test_captures_are_bounded_by_the_tuples() -> None:
    engine = make(FOUR_EXITS, max_seq_len=700)
    draw = random.Random(5)
    script = tuple(draw.choices(range(4), (20, 3, 1, 1), k=600))
    policy = ScriptedExits(exit_indices=script)
    engine.generate([1, 2, 3], max_new_tokens=600, policy=policy, seed=1).result()
    model = model_of(engine)
    (graphs,) = model._graphs.values()
    assert 25 < len(graphs.tokens) <= 56
    for rows, _ in graphs.tokens:
        assert rows[0] == 1
        assert list(rows) == sorted(rows)
    assert model.counters.captures == model.num_graphs
    assert model.counters.dropped == 0


def test_the_least_recently_used_graph_is_dropped() -> None:
    engine = make(max_token_graphs=3)
    eager = make(kernels="torch")
    policy = ScriptedExits(exit_indices=(0, 0, 0, 0, 1, 0, 2, 0, 1, 1))
    results = [
        each.generate([1, 2], max_new_tokens=60, policy=policy, seed=1).result()
        for each in (engine, eager)
    ]
    assert_same(*results)
    model = model_of(engine)
    (graphs,) = model._graphs.values()
    assert len(graphs.tokens) == 3
    assert model.counters.dropped > 0
    assert model.counters.captures == model.num_graphs + model.counters.dropped


def test_sequences_at_the_same_time_have_their_own_buffers() -> None:
    engine, eager = make(), make(kernels="torch")
    runs = [engine.generate([row, 2], max_new_tokens=25, seed=row) for row in range(3)]
    for _ in range(25):
        for run in runs:
            next(run)
    for row, run in enumerate(runs):
        single = eager.generate([row, 2], max_new_tokens=25, seed=row).result()
        assert run.result().token_ids == single.token_ids
    pool = model_of(engine).buffer_pool
    assert pool is not None
    assert len(pool) == 3


def test_buffers_come_back_from_states_and_unstarted_generations() -> None:
    engine = make()
    pool = model_of(engine).buffer_pool
    assert pool is not None
    for _ in range(4):
        state = engine.new_state()
        engine.prefill(state, [1, 2])
        assert not state.buffers.kv_LGSH[:, :, 2:].any(), "zeroed between sequences"
        del state
        engine.generate([1, 2, 3, 4, 5], max_new_tokens=5)
        engine.score([[1, 2, 3, 4, 5, 6]])
    gc.collect()
    assert len(pool) == 1


@pytest.mark.cases
def test_dec_13_300_generations_do_not_grow_graphs_or_memory() -> None:
    """Prompts, exits and lengths of every kind; the number of graphs is the documented bound."""
    config = tiny_config(exit_layers=(1,), num_layers=2, max_positions=128)
    engine = make(config)
    model, draw = model_of(engine), random.Random(1)

    def generate(number: int) -> None:
        generation = engine.generate(
            [draw.randrange(40) for _ in range(draw.randint(1, 90))],
            max_new_tokens=draw.randint(1, 12),
            policy=ScriptedExits(exit_indices=tuple(draw.choices((0, 1), (4, 1), k=5))),
            lazy_prefill=number % 3 == 0,
            seed=number,
        )
        if number % 7 == 3:
            next(generation)
            generation.close()
        else:
            generation.result()

    engine.generate(
        [1], max_new_tokens=100, policy=ScriptedExits(exit_indices=(0,) * 33 + (1,))
    ).result()
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128):
        engine.generate([1] * min(num_rows, 126), max_new_tokens=1).result()
    for exit_index in (0, 1):  # a token on an owed run of every bucket
        for num_owed in range(1, 34):
            script = (*(0,) * num_owed, 1, exit_index)
            policy = ScriptedExits(exit_indices=script, first_position=1)
            engine.generate([1], max_new_tokens=num_owed + 2, policy=policy).result()
    warm = (model.counters.captures, model.num_graphs, model.backend.pool_bytes)
    for number in range(300):
        generate(number)
    assert (model.counters.captures, model.num_graphs, model.backend.pool_bytes) == warm
    assert model.buffer_pool is not None
    assert len(model.buffer_pool) == 1
    (graphs,) = model._graphs.values()
    assert len(graphs.tokens) == 6  # with two exits: a tuple for each bucket of the second block
    assert len(graphs.blocks) <= 2 * 8  # blocks and buckets


@pytest.mark.cases
def test_dec_15_every_token_is_three_launches() -> None:
    """After warm-up 100 tokens take 100 graphs, two copies each, and nothing beside them."""
    engine = make(max_seq_len=250)
    state = engine.new_state()
    policy = ScriptedExits(exit_indices=(0, 0, 2, 1, 0, 0, 0, 2))
    # At both ends of the count one token has been launched that is not read yet.
    generation = engine.generate([1, 2], max_new_tokens=201, policy=policy, state=state)
    for _ in range(100):
        next(generation)
    counters = model_of(engine).counters
    before = counters.replays, counters.copies, counters.host_reads
    quiet = counters.captures, counters.eager_calls, counters.declined_tokens, counters.dropped
    reads_before = state.stats.host_reads
    for _ in range(100):
        next(generation)
    after = counters.replays, counters.copies, counters.host_reads
    launches = sum(after[:2]) - sum(before[:2])
    assert launches == 100 * LAUNCHES_PER_TOKEN
    assert [b - a for a, b in zip(before, after, strict=True)] == [100, 200, 100]
    assert state.stats.host_reads - reads_before == 100
    assert quiet == (
        counters.captures, counters.eager_calls, counters.declined_tokens, counters.dropped
    )  # fmt: skip


@pytest.mark.cases
def test_ext_05_host_reads_per_token_are_counted() -> None:
    """One per token in a graph; block by block, one more for each router asked."""
    policy = ScriptedExits(exit_indices=(0, 1, 2), first_position=1, runs_router=True)
    reads = {}
    for is_whole in (True, False):
        engine = make()
        if not is_whole:
            model_of(engine).mode = "blocks"
        result = engine.generate([1], max_new_tokens=61, policy=policy).result()
        counters = model_of(engine).counters
        # The first token after a prompt is chosen from rows that have run.
        assert counters.declined_tokens == is_whole
        reads[is_whole] = result.stats.host_reads
        first = 1 + 1
        whole = 60
        routers = sum(min(e + 1, 2) for e in result.exit_indices[1:])
        assert result.stats.host_reads == first + whole + (0 if is_whole else routers)
        assert counters.host_reads == (whole if is_whole else 0)
    assert reads[True] < reads[False]


# --- choosing it ----------------------------------------------------------------------------------


def test_without_if_nodes_tokens_run_block_by_block(caplog: pytest.LogCaptureFixture) -> None:
    backend = ImitatedGraphs()
    backend.why_no_branches = "torch 2.11 cannot capture IF nodes"
    with caplog.at_level(logging.WARNING):
        engine = make(backend=backend)
    assert any(m.endswith("torch 2.11 cannot capture IF nodes") for m in caplog.messages)
    eager = make(kernels="torch")
    results = [
        each.generate([1, 2, 3], max_new_tokens=40, seed=1).result() for each in (engine, eager)
    ]
    assert_same(*results)
    assert results[0].stats.host_reads == results[1].stats.host_reads
    (graphs,) = model_of(engine)._graphs.values()
    assert graphs.blocks
    assert not graphs.tokens


def test_graphs_are_for_cuda() -> None:
    assert not isinstance(make(kernels="auto").forward, GraphForward)
    with pytest.raises(DependencyError, match="not on meta; use kernels='auto'"):
        Engine(DecoderParams.random(CONFIG, seed=0, device="meta"), kernels="graph")


def test_the_layer_compiles_whole_and_serves_every_layer() -> None:
    model = model_of(make())
    compilations = []

    def count(graph_module: torch.fx.GraphModule, _: object) -> object:
        compilations.append(graph_module)
        return graph_module.forward

    compiled = torch.compile(run_layer, fullgraph=True, dynamic=False, backend=count)
    generator = torch.Generator().manual_seed(0)
    num_slots, rows = 24, 4
    positions_T = torch.arange(5, 5 + rows)
    mask_TS = causal_mask(positions_T, num_slots, torch.float64)
    rope = model.rope.at(positions_T)
    with torch.inference_mode():
        for layer in model.params.layers[:3]:
            x_TD = torch.randn(rows, 32, generator=generator, dtype=torch.float64)
            slots_GSH = torch.randn(4, num_slots, 8, generator=generator, dtype=torch.float64)
            outputs = []
            for function in (run_layer, compiled):
                slots, x = slots_GSH.clone().unsqueeze(0), x_TD.clone()
                layer_slots = LayerSlots(slots, slots[:, :2], slots[:, 2:])
                seen = [Seen(layer_slots, positions_T, mask_TS, num_slots)]
                function(x, layer, rope, seen, norm=model._norm)
                outputs.append((x, slots))
            for one, other in zip(*outputs, strict=True):
                assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)
    assert len(compilations) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["blocks", "tokens", "ahead"])
def test_cuda_graphs_give_the_tokens_of_single_operations(mode: Mode) -> None:
    tensors = {name: tensor.double().cuda() for name, tensor in lively_tensors(CONFIG).items()}
    params = DecoderParams.from_tensors(CONFIG, tensors)
    engine, eager = Engine(params), Engine(params, kernels="torch")
    model = model_of(engine)
    assert isinstance(model.backend, CudaGraphs)
    if mode != "blocks" and model.backend.why_no_branches:
        pytest.skip(model.backend.why_no_branches)
    model.mode = mode
    laws = [(policy, SAMPLINGS["plain"]) for policy in POLICIES.values()]
    laws += [(POLICIES["sampled"], sampling) for sampling in SAMPLINGS.values()]
    for policy, sampling in laws:
        results = [
            each.generate(
                [1, 2, 3], max_new_tokens=60, policy=policy, sampling=sampling, seed=4
            ).result()
            for each in (engine, eager)
        ]
        assert_same(*results)
    size = model.backend.pool_bytes
    engine.generate([1, 2, 3], max_new_tokens=60, seed=4).result()
    assert model.backend.pool_bytes == size > 0
    # Stops with a token in flight, buffers that the next sequence takes, two at the same time.
    for seed in range(20):
        runs = [engine.generate([row, 2], max_new_tokens=25, seed=seed + row) for row in range(2)]
        taken = [[next(run) for run in runs] for _ in range(5 + seed % 3)]
        for row, run in enumerate(runs):
            run.close()
            expected = eager.generate([row, 2], max_new_tokens=25, seed=seed + row)
            assert [tokens[row] for tokens in taken] == list(itertools.islice(expected, len(taken)))
