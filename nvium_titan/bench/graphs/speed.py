"""What decoding in graphs costs beside dense, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvium_titan.bench.graphs.launches import Launches, count_launches
from nvium_titan.bench.graphs.modes import available_modes, graphs_of, in_mode
from nvium_titan.bench.machine import wait_for
from nvium_titan.bench.measure import interleave
from nvium_titan.bench.models import WEIGHT_BYTES, BenchModel
from nvium_titan.bench.ours import EngineSystem
from nvium_titan.bench.statistics import paired_ratio, quartiles
from nvium_titan.bench.workload import Workload
from nvium_titan.core.cost import limit_speedup, weights_read_per_token
from nvium_titan.decode import Engine, ExitPolicy, SampledRouter
from nvium_titan.report.bench_records import Quartiles, Ratio

_COPIES = 11


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
    """Dense's time over its own, pair by pair; None for dense itself."""
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
    """Speed-up over dense that the weights read allow at those shares."""
    modes: list[ModeFigures]
    """Dense first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateFigures:
    """N-vium beside dense, in the same kernels, where a share of tokens leaves at the first exit.

    A batch is decoded in lock-step, in separate operations.
    """

    shape: str
    """Width x layers."""
    batch: int
    """Sequences decoded at once."""
    exit_rate: float
    """Share of tokens that leave at the first exit; the others go to the last."""
    dense_ms: float
    """Milliseconds per token of dense, median."""
    nvium_ms: float
    """The same of N-vium."""
    over_dense: Ratio
    """Dense's time over N-vium's, pair by pair: below 1 it loses."""
    limit: float | None
    """What the weights read allow; None for a batch, whose sequences share what they read."""
    host_reads_per_token: float
    """Values that N-vium's host waited for."""


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

    def __init__(self, shape: str, model: BenchModel, *, dtype: str, work: Workload) -> None:
        """Load both.

        Args:
            shape: Its name.
            model: The N-vium.
            dtype: A name of `ENGINE_DTYPES`.
            work: What each run decodes.
        """
        self.shape, self._model, self._dtype, self._work = shape, model, dtype, work
        self._nvium, self._dense = (
            m.load_engine(dtype=dtype, max_seq_len=work.max_seq_len, kernels="graph")
            for m in (model, model.dense())
        )
        self._capture_s = {engine: _time_captures(engine) for engine in (self._nvium, self._dense)}
        self._prompts = work.prompts(model.config.shape.vocab_size)

    def speed(self, shares: Sequence[float], *, bandwidth_gb_s: float) -> ShapeFigures:
        """Run dense and every mode in turns, exits forced to `shares`.

        Args:
            shares: One per exit.
            bandwidth_gb_s: Copy bandwidth of the device.
        """
        modes = available_modes(self._nvium)
        systems = [self._system("dense", self._dense, [SampledRouter()])]
        policies = self._work.policies(shares)
        systems += [self._system(mode, in_mode(self._nvium, mode), policies) for mode in modes]
        times = self._run(systems)
        shape = self._model.shape
        weights = [weights_read_per_token(self._model.dense().shape, [1.0])]
        weights += [weights_read_per_token(shape, shares)] * len(modes)
        ratios = [None, *(paired_ratio("dense", times[0], ms) for ms in times[1:])]
        return ShapeFigures(
            shape=self.shape,
            dtype=self._dtype,
            exit_shares=list(shares),
            limit=limit_speedup(shape, shares),
            modes=[
                self._figures(
                    system, ms,
                    weight_gb=num_weights * WEIGHT_BYTES[self._dtype] / 1e9,
                    bandwidth_gb_s=bandwidth_gb_s,
                    over_dense=ratio,
                )
                for system, ms, num_weights, ratio in zip(
                    systems, times, weights, ratios, strict=True
                )
            ],
        )  # fmt: skip

    def rate(self, exit_rate: float, *, batch: int) -> RateFigures:
        """Run dense and the best mode in turns, a share of tokens leaving at the first exit."""
        num_exits = self._nvium.num_exits
        shares = [exit_rate, *[0.0] * (num_exits - 2), 1 - exit_rate]
        nvium = self._system("N-vium", self._nvium, self._work.policies(shares, batch=batch))
        dense = self._system("dense", self._dense, [SampledRouter()] * batch)
        dense_ms, nvium_ms = self._run([dense, nvium])
        results = [result for run in nvium.runs for result in run.results]
        return RateFigures(
            shape=self.shape,
            batch=batch,
            exit_rate=exit_rate,
            dense_ms=quartiles(dense_ms).median,
            nvium_ms=quartiles(nvium_ms).median,
            over_dense=paired_ratio("dense", dense_ms, nvium_ms),
            limit=limit_speedup(self._model.shape, shares) if batch == 1 else None,
            host_reads_per_token=sum(r.stats.host_reads for r in results)
            / sum(r.stats.num_new_tokens for r in results),
        )

    def _system(self, name: str, engine: Engine, policies: Sequence[ExitPolicy]) -> EngineSystem:
        return EngineSystem(
            name, engine, dtype=self._dtype, policies=policies, seed=self._work.seed
        )

    def _run(self, systems: Sequence[EngineSystem]) -> list[list[float]]:
        """Return the milliseconds per token of each system in each pair, captures done before."""
        for system in systems:
            system.run(self._prompts[0], self._work.new_tokens)
            system.runs.clear()
        pairs = interleave(systems, self._prompts, self._work.new_tokens, on_run=lambda: None)
        by_pair = [[timing.ms_per_token for timing in pair] for pair in pairs]
        return [list(times) for times in zip(*by_pair, strict=True)]

    def _figures(
        self,
        system: EngineSystem,
        times_ms: Sequence[float],
        *,
        weight_gb: float,
        bandwidth_gb_s: float,
        over_dense: Ratio | None,
    ) -> ModeFigures:
        engine = self._dense if system.name == "dense" else self._nvium
        model = graphs_of(engine)
        found = quartiles(times_ms)
        return ModeFigures(
            name=system.name,
            ms_per_token=found,
            bandwidth_share=weight_gb / (found.median / 1000) / bandwidth_gb_s,
            over_dense=over_dense,
            launches=count_launches(system, self._prompts[0], num_tokens=self._work.new_tokens - 1),
            num_graphs=model.num_graphs,
            capture_s=sum(self._capture_s[engine]),
            pool_mb=model.backend.pool_bytes / 1e6,
        )


def _time_captures(engine: Engine) -> list[float]:
    """Return a list that gets the seconds of every capture of the engine from now on."""
    backend, seconds = graphs_of(engine).backend, list[float]()
    capture = backend.capture

    def timed(function: Callable[[], None], **outputs: Sequence[Tensor]) -> object:
        start = time.perf_counter()
        graph = capture(function, **outputs)
        wait_for(engine.params.device)
        seconds.append(time.perf_counter() - start)
        return graph

    backend.capture = timed  # type: ignore[method-assign,assignment]  # the engine has no timers
    return seconds
