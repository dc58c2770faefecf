"""The checks of decoding in graphs: they pass, and each fails where something is wrong.

On imitated graphs everywhere, on CUDA graphs where there is a GPU. `tools/gpu_check.py` runs the
same checks on larger models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvium_titan.bench.graphs import LoadedShape, available_modes
from nvium_titan.bench.models import BenchModel
from nvium_titan.bench.workload import Workload
from nvium_titan.core.flavors import parse_shape
from nvium_titan.decode.forward.graphs import forward as graph_forward
from nvium_titan.decode.sampling import Filters
from tests.gpu import memory
from tests.gpu.exactness import Exactness, check_exactness
from tests.gpu.imitation import graph_engine
from tests.gpu.launches import launch_failures

SHARES = (0.35, 0.2, 0.15, 0.3)
WORK = Workload(prompt_tokens=3, new_tokens=11, num_pairs=1, seed=0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
on_every_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="imitated"),
        pytest.param("cuda", id="cuda", marks=[pytest.mark.gpu, needs_cuda]),
    ],
)


def bench_model(device: str = "cpu") -> BenchModel:
    shape = dataclasses.replace(parse_shape("32x4"), vocab_size=100)
    return BenchModel.random(shape, seed=0, device=device)


def check(device: str = "cpu") -> list[Exactness]:
    return check_exactness(bench_model(device), dtype=torch.float32, work=WORK, shares=SHARES)


@on_every_device
def test_every_mode_is_exact(device: str) -> None:
    rows = check(device)
    engine = graph_engine(bench_model(device).load_params(dtype="float32"), max_seq_len=20)
    modes = available_modes(engine)
    assert [(row.mode, row.exits, row.num_tokens) for row in rows] == [
        (mode, exits, 11) for mode in modes for exits in ("forced", "drawn")
    ]
    assert device == "cuda" or modes == ["blocks", "tokens", "ahead"]
    assert all(row.passed for row in rows)


@on_every_device
def test_a_token_is_the_documented_number_of_launches(device: str) -> None:
    shape = LoadedShape(bench_model(device), dtype="bfloat16", work=WORK, build=graph_engine)
    assert launch_failures(shape.speed(SHARES, bandwidth_gb_s=1.0)) == []


@on_every_device
def test_memory_stays_flat(device: str) -> None:
    found = memory.watch_memory(
        bench_model(device), num_requests=8, num_rounds=3, sample_every=2, work=WORK
    )
    assert found.failures == []
    assert found.num_graphs > 0


def test_a_wrong_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(logits_V: Tensor, key_1: Tensor, filters: Filters) -> Tensor:
        return logits_V.argmin(0, keepdim=True)

    monkeypatch.setattr(graph_forward, "draw_in_graph", wrong)
    blocks, _, tokens, *_ = check()
    assert blocks.passed
    assert not tokens.passed
    assert tokens.decision_error > 0.1 > tokens.state_error


@pytest.mark.parametrize("wrong", [0.0, 9.0], ids=["leaves too early", "goes on"])
def test_a_wrong_exit_is_seen(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = graph_forward._StaticInputs.set_token

    def shifted(self: graph_forward._StaticInputs, *args: object) -> None:
        thresholds(self, *args)  # type: ignore[arg-type]
        self._thresholds[:] = wrong or -9.0

    monkeypatch.setattr(graph_forward._StaticInputs, "set_token", shifted)
    rows = {(row.mode, row.exits): row for row in check()}
    assert rows["blocks", "drawn"].passed
    assert not rows["tokens", "drawn"].passed
    assert rows["tokens", "forced"].decision_error == float("inf")


def test_a_wrong_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = graph_forward.run_layer

    def wrong(x_TD: Tensor, *args: Any, norm: Any) -> None:
        right(x_TD, *args, norm=norm)
        x_TD.mul_(1.1)

    monkeypatch.setattr(graph_forward, "run_layer", wrong)
    assert not any(row.passed for row in check())


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
    assert found["grows"].failures == [f"memory grows: {found['grows'].memory_mb} MB"]
