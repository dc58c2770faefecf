"""The checks behind tools/gpu_check.py: each must fail where something is wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from nvium_titan.bench.graphs import launches, memory, speed
from nvium_titan.bench.graphs.exactness import Exactness, check_exactness
from nvium_titan.bench.graphs.modes import graphs_of, in_mode
from nvium_titan.bench.models import BenchModel
from nvium_titan.bench.workload import Workload
from nvium_titan.core.flavors import parse_shape
from nvium_titan.decode import Engine
from nvium_titan.decode.forward.graphs import forward as graph_model

SHARES = (0.35, 0.2, 0.15, 0.3)
WORK = Workload(prompt_tokens=3, new_tokens=11, num_pairs=1, seed=0)


def bench_model() -> BenchModel:
    return BenchModel.random(dataclasses.replace(parse_shape("32x4"), vocab_size=100), seed=0)


def check() -> list[Exactness]:
    return check_exactness(bench_model(), dtype=torch.float32, work=WORK, shares=SHARES)


def graph_engine() -> Engine:
    return bench_model().load_engine(dtype="float32", max_seq_len=20, kernels="graph")


def test_every_mode_is_exact() -> None:
    rows = check()
    assert [(row.mode, row.exits, row.num_tokens) for row in rows] == [
        (mode, exits, 11) for mode in ("blocks", "tokens", "ahead") for exits in ("forced", "drawn")
    ]
    assert all(row.passed for row in rows)


def test_a_wrong_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(logits_V: Tensor, key_1: Tensor, temperature_1: Tensor) -> Tensor:
        return logits_V.argmin(0, keepdim=True)

    monkeypatch.setattr(graph_model, "draw_token", wrong)
    blocks, _, tokens, *_ = check()
    assert blocks.passed
    assert not tokens.passed
    assert tokens.decision_error > 0.1 > tokens.state_error


@pytest.mark.parametrize("wrong", [0.0, 9.0], ids=["leaves too early", "goes on"])
def test_a_wrong_exit_is_seen(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = graph_model._StaticInputs.set_token

    def shifted(self: graph_model._StaticInputs, *args: object) -> None:
        thresholds(self, *args)  # type: ignore[arg-type]
        self._thresholds[:] = wrong or -9.0

    monkeypatch.setattr(graph_model._StaticInputs, "set_token", shifted)
    rows = {(row.mode, row.exits): row for row in check()}
    assert rows["blocks", "drawn"].passed
    assert not rows["tokens", "drawn"].passed
    assert rows["tokens", "forced"].decision_error == float("inf")


def test_a_wrong_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = graph_model.run_layer

    def wrong(*args: Tensor, eps: float, scale: float) -> Tensor:
        return right(*args, eps=eps, scale=1.1 * scale)

    monkeypatch.setattr(graph_model, "run_layer", wrong)
    assert not any(row.passed for row in check())


def test_a_mode_is_a_view_that_leaves_the_engine_as_it_was() -> None:
    engine = graph_engine()
    by_blocks = in_mode(engine, "blocks")
    assert engine.runner.runs_tokens
    assert not by_blocks.runner.runs_tokens
    assert graphs_of(by_blocks).counters is graphs_of(engine).counters
    tokens = in_mode(engine, "tokens")
    assert tokens.runner.runs_tokens
    assert not tokens.forward.looks_ahead
    assert engine.forward.looks_ahead
    assert in_mode(engine, "ahead") is engine


def test_captures_are_timed_and_still_work() -> None:
    engine = graph_engine()
    seconds = speed._time_captures(engine)
    engine.generate([1, 2], max_new_tokens=5).result()
    assert len(seconds) == graphs_of(engine).counters.captures > 0


def test_growing_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Callable[[int], float]] = {
        "flat": lambda served: 100.0 if served < 6 else 80.0,
        "grows": lambda served: 100.0 + served,
    }
    found = {}
    for name, size in sizes.items():
        calls = iter(range(1, 100))
        monkeypatch.setattr(memory, "_memory_bytes", lambda _, s=size, c=calls: 1e6 * s(next(c)))
        found[name] = memory.watch_memory(
            bench_model(), num_requests=4, num_rounds=3, sample_every=1,
            work=Workload(prompt_tokens=2, new_tokens=3, num_pairs=1, seed=0),
        )  # fmt: skip
    assert found["flat"].is_flat
    assert not found["grows"].is_flat
    assert found["grows"].memory_mb == [100.0 + n for n in range(1, 13)]


def test_a_script_has_the_shares_and_the_same_prompts_come_again() -> None:
    (policy,) = WORK.policies(SHARES)
    exits: Sequence[int] = [
        next(k for k in (*range(3), 3) if k == 3 or policy.leaves(k, position=p, **RULED_BY_NOBODY))
        for p in range(4, 14)
    ]
    assert Counter(exits) == {0: 4, 1: 2, 2: 1, 3: 3}
    assert WORK.prompts(100) == WORK.prompts(100)


RULED_BY_NOBODY = {"router_logit": 0.0, "uniform": 0.5}


def test_the_profiler_counts_calls_by_name() -> None:
    events: Counter[str] = Counter()
    a, b = torch.ones(3), torch.ones(3)
    with launches._profiled(events):
        for _ in range(3):
            a.add_(b)
    assert events["aten::add_"] == 3
    assert events["kernels"] == 0


def test_copies_have_a_rate() -> None:
    assert speed.copy_bandwidth(torch.device("cpu"), num_bytes=1 << 16) > 0
