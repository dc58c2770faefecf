"""What measures decoding in graphs: modes, captures, launches, the work."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import torch

from nvium_titan.bench.graphs import (
    available_modes,
    copy_bandwidth,
    graphs_of,
    in_mode,
    profiled,
)
from nvium_titan.bench.models import BenchModel
from nvium_titan.bench.workload import Workload
from nvium_titan.core.flavors import parse_shape
from nvium_titan.decode import Engine
from tests.gpu import imitation

SHARES = (0.35, 0.2, 0.15, 0.3)
WORK = Workload(prompt_tokens=3, new_tokens=11, num_pairs=1, seed=0)


def graph_engine() -> Engine:
    model = BenchModel.random(dataclasses.replace(parse_shape("32x4"), vocab_size=100), seed=0)
    return imitation.graph_engine(model.load_params(dtype="float32"), max_seq_len=20)


def test_a_mode_is_a_view_that_leaves_the_engine_as_it_was() -> None:
    engine = graph_engine()
    modes = {mode: graphs_of(in_mode(engine, mode)) for mode in available_modes(engine)}
    assert [(name, forward.mode) for name, forward in modes.items()] == [
        ("blocks", "blocks"), ("tokens", "tokens"), ("ahead", "ahead"),
    ]  # fmt: skip
    assert graphs_of(engine).mode == "ahead"
    assert all(forward.counters is graphs_of(engine).counters for forward in modes.values())


def test_captures_are_timed_and_still_work() -> None:
    engine = graph_engine()
    counters = graphs_of(engine).counters
    assert counters.capture_s == 0
    engine.generate([1, 2], max_new_tokens=5).result()
    assert counters.captures > 0
    assert counters.capture_s > 0


def test_a_script_has_the_shares_and_the_same_prompts_come_again() -> None:
    (policy,) = WORK.policies(SHARES)
    exits = [
        [*policy.thresholds(position=p, uniforms=[0.5] * 3), -math.inf].index(-math.inf)
        for p in range(4, 14)
    ]
    assert Counter(exits) == {0: 4, 1: 2, 2: 1, 3: 3}
    assert WORK.prompts(100) == WORK.prompts(100)


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
