"""The fake graph: what a capture cannot hold is refused, what nobody may read is poisoned."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from nvium_titan.decode.forward.graphs.capture import CaptureError
from tests.gpu.imitation import ImitatedGraphs

X_4 = torch.tensor([1.0, 2.0, 3.0, 4.0])


def write(out: Tensor, value: Tensor) -> None:
    out.copy_(value)


@pytest.fixture
def graphs() -> ImitatedGraphs:
    return ImitatedGraphs()


def test_a_replay_computes_from_what_the_inputs_hold_now(graphs: ImitatedGraphs) -> None:
    x_4, out_4 = X_4.clone(), torch.zeros(4)
    graph = graphs.capture(lambda: write(out_4, (x_4 * 2).sin() + 1), outputs=(out_4,))
    for _ in range(3):
        x_4 += 1
        graph.replay()
        assert torch.equal(out_4, (x_4 * 2).sin() + 1)
    assert (graphs.counters.captures, graphs.counters.replays) == (1, 3)


def test_a_function_runs_once_before_its_capture_and_not_in_it(graphs: ImitatedGraphs) -> None:
    x_4, out_4 = X_4.clone(), torch.zeros(4)

    def function() -> None:
        x_4.add_(1)
        torch.add(x_4, 1, out=out_4)
        out_4.index_fill_(0, torch.arange(2), 7.0)

    graph = graphs.capture(function)
    assert torch.equal(x_4, X_4 + 1)
    assert out_4.tolist() == [7, 7, 5, 6]
    graph.replay()
    assert torch.equal(x_4, X_4 + 2)
    assert out_4.tolist() == [7, 7, 6, 7]


def test_work_space_made_inside_is_made_again_by_every_replay(graphs: ImitatedGraphs) -> None:
    x_4, out_4 = X_4.clone(), torch.zeros(4)

    def function() -> None:
        sum_4 = torch.zeros(4)
        sum_4.add_(x_4).mul_(2)
        out_4.copy_(sum_4)

    graph = graphs.capture(function)
    for _ in range(2):
        graph.replay()
        assert torch.equal(out_4, 2 * X_4)


def test_a_python_integer_is_baked_and_a_static_input_is_not(graphs: ImitatedGraphs) -> None:
    """What a real graph does without a word gives a wrong result here too."""
    position = 1
    position_1, baked_1, read_1 = torch.tensor([1]), torch.zeros(1), torch.zeros(1)

    def function() -> None:
        baked_1.copy_(X_4[position : position + 1])
        read_1.copy_(X_4.index_select(0, position_1))

    graph = graphs.capture(function, outputs=(baked_1, read_1))
    position = 2
    position_1.fill_(2)
    graph.replay()
    assert read_1.item() == X_4[position]
    assert baked_1.item() == X_4[1]


HOST_READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 2),
    "index|nonzero": lambda x: x[x > 2],
    "unique": lambda x: x.unique(),
    "lift_fresh": lambda x: x + torch.tensor([1.0]),
}


NAMES = {"item": "_local_scalar_dense", "int": "_local_scalar_dense", "if": "_local_scalar_dense"}


@pytest.mark.parametrize("operation", HOST_READS)
def test_what_needs_the_host_is_refused_by_name(graphs: ImitatedGraphs, operation: str) -> None:
    out_1 = torch.zeros(1)

    def function() -> None:
        HOST_READS[operation](X_4)
        out_1.fill_(1)

    with torch.inference_mode(), pytest.raises(CaptureError, match=NAMES.get(operation, operation)):
        graphs.capture(function, outputs=(out_1,))
    assert graphs.counters.captures == 0
    assert X_4.tolist() == [1, 2, 3, 4], "the refusal ends with the capture"


def test_a_function_that_gives_away_the_memory_of_the_graph_is_refused(
    graphs: ImitatedGraphs,
) -> None:
    with pytest.raises(CaptureError, match=r"made by aten\.mul.*copy it into a static output"):
        graphs.capture(lambda: X_4 * 2)


def test_a_tensor_that_escapes_is_poisoned(graphs: ImitatedGraphs) -> None:
    kept: list[Tensor] = []
    out_4 = torch.zeros(4)

    def function() -> None:
        kept.append(X_4 * 2)
        out_4.copy_(kept[-1])

    graph = graphs.capture(function, outputs=(out_4,))
    graph.replay()
    assert torch.equal(out_4, 2 * X_4)
    assert kept[-1].isnan().all()


def test_an_output_that_is_held_and_not_cloned_is_overwritten(graphs: ImitatedGraphs) -> None:
    x_4, out_4, is_on = X_4.clone(), torch.zeros(4), torch.tensor(True)
    graph = graphs.capture(
        lambda: graphs.branch(is_on, partial(write, out_4, x_4)), outputs=(out_4,)
    )
    graph.replay()
    held, cloned = out_4, out_4.clone()
    is_on.fill_(False)
    graph.replay()
    assert held.isnan().all()
    assert torch.equal(cloned, X_4)


def test_an_output_that_a_replay_does_not_write_wholly_shows(graphs: ImitatedGraphs) -> None:
    out_4, ids_4 = torch.zeros(4), torch.zeros(4, dtype=torch.int64)

    def function() -> None:
        out_4[:2].copy_(X_4[:2])
        ids_4[:3].fill_(5)

    graph = graphs.capture(function, outputs=(out_4, ids_4))
    graph.replay()
    assert out_4.isnan().tolist() == [False, False, True, True]
    assert ids_4.tolist() == [5, 5, 5, torch.iinfo(torch.int64).min]


def test_branches_nest_and_follow_the_device(graphs: ImitatedGraphs) -> None:
    a, b, out_1 = torch.tensor(True), torch.tensor(True), torch.zeros(1)

    def outer() -> None:
        graphs.branch(b, partial(out_1.fill_, 2))
        graphs.branch(~b, partial(out_1.fill_, 3))

    def function() -> None:
        graphs.branch(~a, partial(out_1.fill_, 1))
        graphs.branch(a, outer)

    graph = graphs.capture(function, outputs=(out_1,))
    for value_a, value_b, expected in ((True, True, 2), (True, False, 3), (False, True, 1)):
        a.fill_(value_a)
        b.fill_(value_b)
        graph.replay()
        assert out_1.item() == expected


def test_before_a_capture_every_branch_runs(graphs: ImitatedGraphs) -> None:
    runs_2 = torch.zeros(2)
    is_on_2 = torch.tensor([True, False])

    def function() -> None:
        for index in range(2):
            graphs.branch(is_on_2[index], partial(runs_2[index : index + 1].add_, 1))

    graph = graphs.capture(function)
    assert runs_2.tolist() == [1, 1]
    graph.replay()
    assert runs_2.tolist() == [2, 1]


def test_what_is_fetched_is_what_was_there_then(graphs: ImitatedGraphs) -> None:
    x_2 = torch.tensor([1, 2])
    fetch = graphs.fetch(x_2)
    x_2 += 5
    assert fetch.wait() == [1, 2]
    assert (graphs.counters.copies, graphs.counters.host_reads) == (1, 1)


def test_a_branch_needs_a_capture_and_one_bool(graphs: ImitatedGraphs) -> None:
    with pytest.raises(CaptureError, match="only inside a capture"):
        graphs.branch(torch.tensor(True), lambda: None)
    with pytest.raises(CaptureError, match=r"float32 of shape \(4,\)"):
        graphs.capture(lambda: graphs.branch(X_4, lambda: None))


def test_a_graph_that_is_dropped_leaves_the_pool(graphs: ImitatedGraphs) -> None:
    out_4 = torch.zeros(4)
    graph = graphs.capture(lambda: write(out_4, X_4 * 2 + 1))
    assert graphs.pool_bytes == 2 * 4 * 4
    del graph
    gc.collect()
    assert graphs.pool_bytes == 0
