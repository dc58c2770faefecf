"""The batch's contract: rows end alone, seeds are theirs, shapes are few, errors name rows."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvium_titan.decode import (
    DecoderParams,
    Engine,
    FixedExit,
    GenerationRequest,
    GenerationResult,
    LockStep,
    Periodic,
    SamplingParams,
    ScriptedExits,
)
from nvium_titan.decode.forward.graphs.forward import BLOCK_BUCKETS, MAX_TOKEN_GRAPHS, GraphForward
from nvium_titan.decode.sampling import Draw
from nvium_titan.errors import PromptError
from tests.helpers.engines import make_engine
from tests.helpers.tiny_decoder import lively_tensors, tiny_config


def make(**kwargs: Any) -> Engine:
    config = tiny_config()
    tensors = lively_tensors(config, router_gain=0.7)
    return make_engine(DecoderParams.from_tensors(config, tensors), **kwargs)


def ask(*prompt_ids: int, **kwargs: Any) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt_ids, **{"max_new_tokens": 12, **kwargs})


def tokens_and_exits(result: GenerationResult) -> tuple[object, object]:
    return result.token_ids, result.exit_indices


EOS = 39
EOS_AT = {1: 1, 2: 5, 3: None}


def force_eos(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the request of seed s sample EOS at its step EOS_AT[s] and at no other."""
    original = engine.forward.draw

    def draw(logits_V: Tensor, draw: Draw) -> int:
        eos_at = EOS_AT[draw.noise.seed]
        if eos_at is not None and draw.position == 2 + eos_at - 1:
            return EOS
        return original(logits_V[:EOS], draw)

    monkeypatch.setattr(engine.forward, "draw", draw)


@pytest.mark.cases
@pytest.mark.parametrize("schedule", [LockStep(), Periodic(num_replays=2)], ids=["lock", "sweep"])
def test_dec_05_each_row_ends_at_its_own_stop_id(
    schedule: LockStep | Periodic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EOS forced at steps 1, 5 and never."""
    engine = make()
    force_eos(engine, monkeypatch)
    requests = [ask(1, 2, seed=seed, stop_ids=[EOS]) for seed in EOS_AT]
    batch = engine.generate_batch(requests, schedule=schedule)
    pairs = list(batch)
    results = batch.results()
    assert [len(result.token_ids) for result in results] == [1, 5, 12]
    assert [result.finish_reason for result in results] == ["stop", "stop", "length"]
    assert [result.token_ids[-1] == EOS for result in results] == [True, True, False]
    for request, result in zip(requests, results, strict=True):
        single = engine.generate(
            request.prompt_ids, max_new_tokens=12, seed=request.seed, stop_ids=[EOS]
        )
        assert tokens_and_exits(result) == tokens_and_exits(single.result())
        assert result.stats.num_new_tokens == len(result.token_ids)
    assert len(pairs) == batch.stats.num_new_tokens == 18, "nothing after an end is counted"
    ends = [max(i for i, (row, _) in enumerate(pairs) if row == index) for index in range(3)]
    assert ends == sorted(ends)


@pytest.mark.cases
def test_dec_05_ignoring_the_stop_id_gives_every_row_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make()
    force_eos(engine, monkeypatch)
    results = engine.generate_batch([ask(1, 2, seed=seed) for seed in EOS_AT]).results()
    assert [len(result.token_ids) for result in results] == [12, 12, 12]
    assert {result.finish_reason for result in results} == {"length"}


def test_a_finished_row_runs_no_more_blocks() -> None:
    """Its companion alone decides from then on."""
    engine = make()
    shallow = ask(1, policy=FixedExit(exit_index=0), max_new_tokens=30)
    deep = ask(2, policy=FixedExit(exit_index=2), max_new_tokens=3)
    batch = engine.generate_batch([shallow, deep])
    results = batch.results()
    # Two steps of all 5 layers for both, then the first layer alone, 27 times.
    assert batch.stats.layers_run == 2 * 5 + 27
    assert batch.stats.head_calls == 30
    assert results[1].stats.layers_run == 2 * 5
    assert results[0].stats.layers_run == 2 * 5 + 27, "it rode along with its companion"


@pytest.mark.cases
def test_dec_09_a_seeded_row_does_not_depend_on_its_companions() -> None:
    """Alone, with an unseeded and a seeded companion, swapped, after another batch; float32."""
    engine = make()
    a = ask(7, 3, seed=1, max_new_tokens=30)
    expected = tokens_and_exits(engine.generate((7, 3), max_new_tokens=30, seed=1).result())
    companions = [
        ask(5, max_new_tokens=40),
        ask(5, seed=99, max_new_tokens=9),
        ask(1, 2, 3, seed=1, sampling=SamplingParams(temperature=0), max_new_tokens=50),
    ]
    assert tokens_and_exits(engine.generate_batch([a]).results()[0]) == expected
    for companion in companions:
        for schedule in (LockStep(), Periodic(num_replays=1)):
            first, _ = engine.generate_batch([a, companion], schedule=schedule).results()
            _, second = engine.generate_batch([companion, a], schedule=schedule).results()
            assert tokens_and_exits(first) == tokens_and_exits(second) == expected
    engine.generate_batch([ask(9, seed=3)] * 4).results()
    all_results = engine.generate_batch([*companions, a], batch_size=2).results()
    assert tokens_and_exits(all_results[-1]) == expected
    assert tokens_and_exits(make().generate_batch([a, a]).results()[1]) == expected


@pytest.mark.cases
def test_cmp_02_new_lengths_bring_no_new_shapes_and_no_memory() -> None:
    """40 prompts of distinct lengths from 1 to 200, twice: in graphs, and in batches."""
    graphs, batches = make(kernels="graph"), make(kernels="torch")
    assert isinstance(graphs.forward, GraphForward)
    lengths = [1 + (i * 199) // 39 for i in range(40)]
    assert len(set(lengths)) == 40
    requests = [
        ask(*((i + length) % 40 for i in range(length)), seed=length, max_new_tokens=6)
        for length in lengths
    ]

    def one_pass() -> tuple[int, int]:
        for request in requests:
            graphs.generate(request.prompt_ids, max_new_tokens=6, seed=request.seed).result()
        results = batches.generate_batch(requests, batch_size=8).results()
        assert [result.stats.num_prompt_tokens for result in results] == lengths
        del results
        gc.collect()
        live = sum(type(thing) is torch.Tensor for thing in gc.get_objects())
        return graphs.forward.counters.captures, live

    captures, live = one_pass()
    in_blocks = graphs.num_exits * len(BLOCK_BUCKETS)
    assert captures <= in_blocks + MAX_TOKEN_GRAPHS, "the documented buckets"
    assert one_pass() == (captures, live)


# --- the object ---------------------------------------------------------------------------------


def test_places_are_refilled_in_order_and_rows_come_as_they_are_made() -> None:
    requests = [ask(1, seed=seed, max_new_tokens=2 + seed) for seed in range(5)]
    batch = make().generate_batch(requests, batch_size=2)
    order = [row for row, _ in batch]
    assert order[:4] == [0, 1, 0, 1]
    assert [order.index(row) for row in range(5)] == sorted(order.index(row) for row in range(5))
    assert [len(result.token_ids) for result in batch.results()] == [2, 3, 4, 5, 6]
    positions = [token.position for row, token in make().generate_batch(requests) if row == 4]
    assert positions == [1, 2, 3, 4, 5, 6]


def test_times_belong_to_the_rows_and_to_the_batch() -> None:
    batch = make().generate_batch([ask(1, max_new_tokens=5), ask(2, max_new_tokens=1)])
    long, short = batch.results()
    assert 0 < long.stats.prefill_s < long.stats.ttft_s
    assert long.stats.decode_s > 0 == short.stats.decode_s
    assert long.stats.decode_s + long.stats.ttft_s <= batch.stats.prefill_s + batch.stats.decode_s
    assert batch.stats.tokens_per_s == pytest.approx(6 / batch.stats.decode_s)


def test_a_result_is_there_with_the_last_token_of_its_row() -> None:
    batch = make().generate_batch([ask(1, max_new_tokens=n) for n in (3, 3, 1)], batch_size=2)
    given: list[list[int]] = [[], [], []]
    for row, token in batch:
        given[row].append(token.token_id)
        for index, result in enumerate(map(batch.result, range(3))):
            is_over = len(given[index]) == (3, 3, 1)[index]
            assert (result is not None) == is_over
            assert result is None or list(result.token_ids) == given[index]


def test_a_row_can_be_stopped() -> None:
    batch = make().generate_batch([ask(1, seed=1), ask(2, seed=2)])
    with pytest.raises(RuntimeError, match="row 1 has not given a token yet"):
        batch.stop(1)
    seen = 0
    for row, _ in batch:
        seen += row == 1
        if seen == 4:
            batch.stop(1)
    batch.stop(1)
    first, second = batch.results()
    assert (len(first.token_ids), first.finish_reason) == (12, "length")
    assert (len(second.token_ids), second.finish_reason) == (4, "stop")


def test_a_closed_batch_has_no_results() -> None:
    batch = make().generate_batch([ask(1), ask(2)])
    next(batch)
    batch.close()
    assert list(batch) == []
    with pytest.raises(RuntimeError, match="closed or failed"):
        batch.results()


def test_a_failure_ends_the_batch_and_leaves_nothing_behind() -> None:
    class Broken(FixedExit):
        def thresholds(self, **kwargs: Any) -> list[float]:
            raise ValueError("broken policy")

    engine = make()
    before = engine.generate_batch([ask(1)]).results()[0]
    batch = engine.generate_batch([ask(1), ask(2, policy=Broken(exit_index=0))])
    with pytest.raises(ValueError, match="broken policy"):
        batch.results()
    with pytest.raises(RuntimeError, match="closed or failed"):
        batch.results()
    assert engine.generate_batch([ask(1)]).results()[0].token_ids == before.token_ids


def test_impossible_requests_are_refused_by_their_number() -> None:
    engine = make()
    good = ask(1)
    for bad, message in (
        (ask(40), "request 2: token id 40 is unknown"),
        (ask(), "request 2: the prompt is empty"),
        (replace(good, max_new_tokens=0), "request 2: max_new_tokens=0"),
        (ask(1, policy=FixedExit(exit_index=3)), "request 2: exit 4"),
        (ask(*[1] * 256), "request 2: a prompt of 256 tokens"),
    ):
        with pytest.raises(PromptError, match=message):
            engine.generate_batch([good, bad])
    with pytest.raises(PromptError, match="batch is empty"):
        engine.generate_batch([])
    with pytest.raises(PromptError, match=r"batch_size=0 \(--batch\): must be at least 1"):
        engine.generate_batch([good], batch_size=0)


@pytest.mark.parametrize("num_replays", [0, 2])
def test_replays_leave_the_deep_rows_waiting(num_replays: int) -> None:
    """The tokens of the shallow row come first; those of the deep one with each sweep."""
    schedule = Periodic(num_replays=num_replays) if num_replays else LockStep()
    shallow = ask(1, policy=ScriptedExits(exit_indices=(0,)), max_new_tokens=9)
    deep = ask(2, policy=ScriptedExits(exit_indices=(2,)), max_new_tokens=9)
    order = [row for row, _ in make().generate_batch([shallow, deep], schedule=schedule)]
    # Nothing is owed after a prefill, so no block runs for the first tokens, but a deep row still
    # waits for the sweep.
    expected = [0, 1] * 9 if num_replays == 0 else [*[0, 0, 0, 1] * 3, *[1] * 6]
    assert order == expected
