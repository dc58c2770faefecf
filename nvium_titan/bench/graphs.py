"""Decoding in graphs beside dense: what it costs, and what a token launches, copies and reads.

Graphs are CUDA's, or an imitation on the CPU, of which everything but the times means the same.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from nvium_titan.bench.machine import wait_for
from nvium_titan.bench.models import WEIGHT_BYTES, BenchModel
from nvium_titan.bench.pairs import paired_ratio, quartiles, run_pairs
from nvium_titan.bench.systems import SETTLE_S, EngineRun, EngineSystem, host_reads_per_token
from nvium_titan.bench.workload import Workload
from nvium_titan.core.cost import limit_speedup, weights_read_per_token
from nvium_titan.decode import Engine, ExitPolicy, SampledRouter
from nvium_titan.decode.forward.graphs.forward import GraphForward, Mode
from nvium_titan.report.bench_records import Quartiles, Ratio

_COPIES = 11


def graphs_of(engine: Engine) -> GraphForward:
    """Return the forward of an engine that decodes in graphs."""
    assert isinstance(engine.forward, GraphForward), "an engine with kernels='graph'"
    return engine.forward


def in_mode(engine: Engine, mode: Mode) -> Engine:
    """Return the engine decoding in a mode; weights, buffers, graphs and counters are shared."""
    return Engine.with_forward(graphs_of(engine).in_mode(mode), max_seq_len=engine.max_seq_len)


def available_modes(engine: Engine) -> list[Mode]:
    """Return the modes that the engine's device and torch support."""
    return ["blocks"] if graphs_of(engine).mode == "blocks" else ["blocks", "tokens", "ahead"]


# --- figures --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """What a token after the first launches and reads; means over `num_tokens`."""

    num_tokens: int
    """Tokens counted."""
    graphs: float
    """Graphs launched."""
    copies: float
    """Copies to static inputs and from results."""
    host_reads: float
    """Times the host waited for a value."""
    num_skipped: int
    """Tokens and block calls that did not run as the graphs they should have been."""
    profiled_graphs: float | None
    """Graph launches that torch's profiler saw; None without a GPU."""
    profiled_kernels: float | None
    """Kernels that ran on the device, also those in graphs; None without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeFigures:
    """One way to decode one shape."""

    name: str
    """ "dense" (in the best of the modes), or a `Mode`."""
    ms_per_token: Quartiles
    """Per token after the first."""
    bandwidth_share: float
    """Bytes of weights that a token must read, over its time, over the copy bandwidth."""
    over_dense: Ratio | None
    """N-vium in this mode over dense; None for dense itself."""
    launches: Launches
    """What a token launches."""
    num_graphs: int
    """Graphs that its model holds in the end."""
    capture_s: float
    """Seconds for all captures of its model, compilation included."""
    pool_mb: float
    """Memory of all graphs of its model, 10^6 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeFigures:
    """One shape in one type, exits forced, every router run."""

    shape: str
    """Width x layers."""
    dtype: str
    """Type of weights and states."""
    exit_shares: list[float]
    """Share of the tokens forced out at each exit."""
    limit: float
    """Highest speed-up over dense that reading weights allows at these shares."""
    modes: list[ModeFigures]
    """Dense first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateFigures:
    """N-vium beside dense where a share of the tokens leaves at the first exit.

    A batch decodes in lock-step, in separate operations.
    """

    shape: str
    """Width x layers."""
    batch: int
    """Sequences decoded at once."""
    exit_rate: float
    """Share of the tokens that leave at the first exit; the others go to the last."""
    dense_ms: float
    """Milliseconds per token of dense, median."""
    nvium_ms: float
    """Milliseconds per token of N-vium, median."""
    over_dense: Ratio
    """N-vium over dense: below 1 it loses."""
    limit: float | None
    """What reading weights allows; None for a batch, whose sequences share what they read."""
    host_reads_per_token: float
    """Values that N-vium's host waited for."""


# --- measurements ---------------------------------------------------------------------------------


def copy_bandwidth(device: torch.device, *, num_bytes: int) -> float:
    """Return bytes read and written per second, GB/s: the median of copies of a large tensor.

    Args:
        device: Where to copy.
        num_bytes: Size of the tensor; many times the caches.
    """
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        wait_for(device)
        start = time.perf_counter()
        target.copy_(source)
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes / statistics.median(seconds) / 1e9


class LoadedShape:
    """N-vium and dense of one shape, in graphs, ready to run."""

    def __init__(
        self, model: BenchModel, *, dtype: str, work: Workload, build: Callable[..., Engine]
    ) -> None:
        """Load both.

        Args:
            model: The N-vium.
            dtype: One of `ENGINE_DTYPES`.
            work: What each run decodes.
            build: Makes an engine in graphs from `DecoderParams` and `max_seq_len`.
        """
        self._model, self._dtype, self._work = model, dtype, work
        self._nvium, self._dense = (
            build(m.load_params(dtype=dtype), max_seq_len=work.max_seq_len)
            for m in (model, model.dense())
        )
        self._prompts = work.prompts(model.shape.vocab_size)

    def speed(self, shares: Sequence[float], *, bandwidth_gb_s: float) -> ShapeFigures:
        """Run dense and every mode in turns, exits forced to `shares`.

        Args:
            shares: One per exit.
            bandwidth_gb_s: Copy bandwidth of the device.
        """
        policies = self._work.policies(shares)
        systems = [self._system("dense", self._dense, [SampledRouter()])]
        systems += [
            self._system(mode, in_mode(self._nvium, mode), policies)
            for mode in available_modes(self._nvium)
        ]
        dense_ms, *mode_ms = (_ms_per_token(runs) for runs in self._run(systems))
        shape = self._model.shape
        weights = weights_read_per_token(shape.dense(), [1.0])
        modes = [self._figures(systems[0], dense_ms, weights, bandwidth_gb_s, over_dense=None)]
        weights = weights_read_per_token(shape, shares)
        for system, ms in zip(systems[1:], mode_ms, strict=True):
            ratio = paired_ratio("dense", dense_ms, ms)
            modes.append(self._figures(system, ms, weights, bandwidth_gb_s, over_dense=ratio))
        return ShapeFigures(
            shape=self._model.name,
            dtype=self._dtype,
            exit_shares=list(shares),
            limit=limit_speedup(shape, shares),
            modes=modes,
        )

    def rate(self, exit_rate: float, *, batch: int) -> RateFigures:
        """Run dense and the best mode in turns, a share of tokens leaving at the first exit."""
        num_exits = self._nvium.num_exits
        shares = [exit_rate, *[0.0] * (num_exits - 2), 1 - exit_rate]
        nvium = self._system("N-vium", self._nvium, self._work.policies(shares, batch=batch))
        dense = self._system("dense", self._dense, [SampledRouter()] * batch)
        dense_runs, nvium_runs = self._run([dense, nvium])
        dense_ms, nvium_ms = _ms_per_token(dense_runs), _ms_per_token(nvium_runs)
        return RateFigures(
            shape=self._model.name,
            batch=batch,
            exit_rate=exit_rate,
            dense_ms=quartiles(dense_ms).median,
            nvium_ms=quartiles(nvium_ms).median,
            over_dense=paired_ratio("dense", dense_ms, nvium_ms),
            limit=limit_speedup(self._model.shape, shares) if batch == 1 else None,
            host_reads_per_token=host_reads_per_token(nvium_runs),
        )

    def _system(self, name: str, engine: Engine, policies: Sequence[ExitPolicy]) -> EngineSystem:
        return EngineSystem(
            name, engine, dtype=self._dtype, policies=policies, seed=self._work.seed
        )

    def _run(self, systems: Sequence[EngineSystem]) -> list[list[EngineRun]]:
        """Return the runs of each system, one per pair; the warm-up has captured every graph."""
        pairs = run_pairs(
            systems,
            self._prompts,
            lambda system, prompt: system.run(prompt, self._work.new_tokens),
            on_run=lambda: None,
            settle_s=SETTLE_S,
        )
        return [list(runs) for runs in zip(*pairs, strict=True)]

    def _figures(
        self,
        system: EngineSystem,
        times_ms: Sequence[float],
        weights: float,
        bandwidth_gb_s: float,
        *,
        over_dense: Ratio | None,
    ) -> ModeFigures:
        engine = self._dense if system.name == "dense" else self._nvium
        forward = graphs_of(engine)
        found = quartiles(times_ms)
        gb_per_s = weights * WEIGHT_BYTES[self._dtype] / 1e9 / (found.median / 1000)
        return ModeFigures(
            name=system.name,
            ms_per_token=found,
            bandwidth_share=gb_per_s / bandwidth_gb_s,
            over_dense=over_dense,
            launches=count_launches(system, self._prompts[0], num_tokens=self._work.new_tokens - 1),
            num_graphs=forward.num_graphs,
            capture_s=forward.counters.capture_s,
            pool_mb=forward.backend.pool_bytes / 1e6,
        )


def _ms_per_token(runs: Sequence[EngineRun]) -> list[float]:
    return [run.ms_per_token for run in runs]


def count_launches(system: EngineSystem, prompt: Sequence[int], *, num_tokens: int) -> Launches:
    """Decode once and count; everything must have been captured before.

    Args:
        system: An engine in graphs, with the policy to decode by.
        prompt: What to continue.
        num_tokens: Tokens to count, after the first one.
    """
    counters = graphs_of(system.engine).counters
    is_cuda = system.engine.params.device.type == "cuda"
    generation = system.engine.generate(
        prompt, max_new_tokens=1 + num_tokens, policy=system.policies[0], seed=0
    )
    next(generation)
    before = copy.copy(counters)
    events: Counter[str] = Counter()
    with profiled(events) if is_cuda else nullcontext():
        for _ in range(num_tokens):
            next(generation)
    skipped = (counters.declined_tokens - before.declined_tokens) + (
        counters.eager_calls - before.eager_calls
    )
    return Launches(
        num_tokens=num_tokens,
        graphs=(counters.replays - before.replays) / num_tokens,
        copies=(counters.copies - before.copies) / num_tokens,
        host_reads=generation.result().stats.host_reads / (num_tokens + 1),
        num_skipped=skipped,
        profiled_graphs=events["cudaGraphLaunch"] / num_tokens if is_cuda else None,
        profiled_kernels=events["kernels"] / num_tokens if is_cuda else None,
    )


@contextmanager
def profiled(events: Counter[str]) -> Iterator[None]:
    """Count the calls of the CUDA runtime by name, and as "kernels" what runs on the device."""
    with torch.profiler.profile() as trace:
        yield
    for event in trace.events() or ():
        if event.device_type.name == "CPU":
            events[event.name] += 1
        elif not event.name.startswith(("Memcpy", "Memset")):
            events["kernels"] += 1
