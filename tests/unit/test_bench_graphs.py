"""What measures decoding in graphs: modes, captures, launches, the work."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch

from nvium_titan.bench.graphs import copy_bandwidth, graphs_of, in_mode, profiled, time_captures
from nvium_titan.bench.models import BenchModel
from nvium_titan.bench.workload import Workload
from nvium_titan.core.flavors import shape_dims
from nvium_titan.decode import Engine

SHARES = (0.35, 0.2, 0.15, 0.3)
WORK = Workload(prompt_tokens=3, new_tokens=11, num_pairs=1, seed=0)


def graph_engine() -> Engine:
    model = BenchModel.random(dataclasses.replace(shape_dims("32x4"), vocab_size=100), seed=0)
    return model.load_engine(dtype="float32", max_seq_len=20, kernels="graph")


def test_a_mode_is_a_view_that_leaves_the_engine_as_it_was() -> None:
    engine = graph_engine()
    by_blocks = in_mode(engine, "blocks")
    assert engine.runner.runs_tokens
    assert not by_blocks.runner.runs_tokens
    assert graphs_of(by_blocks).counters is graphs_of(engine).counters
    tokens = in_mode(engine, "tokens")
    assert tokens.runner.runs_tokens
    assert not tokens.runner.model.looks_ahead
    assert engine.runner.model.looks_ahead
    assert in_mode(engine, "ahead") is engine


def test_captures_are_timed_and_still_work() -> None:
    engine = graph_engine()
    seconds = time_captures(engine)
    engine.generate([1, 2], max_new_tokens=5).result()
    assert len(seconds) == graphs_of(engine).counters.captures > 0


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
    with profiled(events):
        for _ in range(3):
            a.add_(b)
    assert events["aten::add_"] == 3
    assert events["kernels"] == 0


def test_copies_have_a_rate() -> None:
    assert copy_bandwidth(torch.device("cpu"), num_bytes=1 << 16) > 0
