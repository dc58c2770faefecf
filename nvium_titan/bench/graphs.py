"""Decoding in graphs on the device at hand: is it exact, what does it launch, hold and cost.

`tools/gpu_check.py` drives it. Three ways to decode are compared: operations one by one (the
reference), a graph per block with a host read at every junction, a graph per token. On the CPU
graphs are imitated: everything but the times means the same.

Shapes: T new tokens, D width, V vocabulary.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nvium_titan.bench.exits import exit_script
from nvium_titan.bench.measure import interleave
from nvium_titan.bench.models import WEIGHT_BYTES, BenchModel
from nvium_titan.bench.ours import EngineSystem
from nvium_titan.bench.report import Quartiles, Ratio
from nvium_titan.bench.statistics import paired_ratio, quartiles
from nvium_titan.decode import (
    DecoderParams,
    Engine,
    ExitPolicy,
    Noise,
    SampledRouter,
    ScriptedExits,
)
from nvium_titan.decode.deferred import PREFILL_BUCKETS
from nvium_titan.decode.graph.model import MAX_TOKEN_GRAPHS, GraphModel
from nvium_titan.decode.policy import exit_thresholds
from nvium_titan.decode.runner import DecodeState
from nvium_titan.flops import limit_speedup, weights_read_per_token

Mode = Literal["tokens", "blocks"]
"""A graph per token, or per block with a host read at every junction."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest errors allowed, by type. States: of the largest value in a buffer. Decisions: in nats, by
which a token or an exit may miss what separate operations would choose. Products of other shapes
round differently, and bfloat16 has 8 bits."""

_COPIES = 11
_POOL_GROWTH = 1.02
"""Memory may grow by so much behind the second round of requests: the allocator's fragments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exactness:
    """Graphs against separate operations, on one generation."""

    mode: Mode
    """How it was decoded."""
    dtype: str
    """Type computed in."""
    exits: str
    """Who decided: "forced" (a script) or "drawn" (the routers)."""
    num_tokens: int
    """New tokens."""
    state_error: float
    """Largest difference of a key, value or boundary state to those of a full forward pass, as a
    fraction of the largest value in its buffer."""
    decision_error: float
    """By how much a token or an exit missed what a full forward pass would have chosen, nats; 0
    where all are the same."""
    tolerance: float
    """Most that either may be."""
    passed: bool
    """Whether both are within it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """What a token after the first costs in launches and reads; means over `num_tokens`."""

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
    """Kernels that ran on the device, those in graphs included; None without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeFigures:
    """One way to decode one shape."""

    name: str
    """ "dense" (a graph per token), "blocks" or "tokens"."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """Memory over many requests of different lengths and exits."""

    num_requests: int
    """Requests served, in rounds of the same ones in another order."""
    memory_mb: list[float]
    """Held on the device, pools of graphs included (where graphs are imitated: theirs alone), at
    every sample."""
    num_graphs: int
    """Graphs held in the end."""
    bound: int
    """Most graphs that may be held."""
    is_flat: bool
    """Whether no sample behind the second round is above all of the second round."""


class Workload(NamedTuple):
    """How much to decode."""

    prompt_tokens: int
    """Tokens of a prompt."""
    new_tokens: int
    """Tokens to make."""
    num_pairs: int
    """Rounds in which every system runs once."""
    seed: int
    """Decides weights, prompts, exits and tokens."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence."""
        return self.prompt_tokens + self.new_tokens

    def prompts(self, num_tokens: int) -> list[list[int]]:
        """Return a prompt of random ids below `num_tokens` for each pair."""
        rng = random.Random(self.seed)
        return [
            [rng.randrange(num_tokens) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_pairs)
        ]

    def policies(self, shares: Sequence[float], *, batch: int = 1) -> list[ExitPolicy]:
        """Return scripts of exits with these shares behind the first token; routers are run."""
        return [
            ScriptedExits(
                exit_indices=exit_script(shares, self.new_tokens - 1, seed=self.seed + row),
                first_position=self.prompt_tokens + 1,
                runs_router=True,
            )
            for row in range(batch)
        ]


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
        _wait_for(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes / statistics.median(seconds) / 1e9


def graphs_of(engine: Engine) -> GraphModel:
    """Return the model of an engine that decodes in graphs."""
    model = engine.runner.model
    assert isinstance(model, GraphModel), "an engine with kernels='graph'"
    return model


def in_mode(engine: Engine, mode: Mode) -> Engine:
    """Return the engine decoding in a mode; weights, buffers, graphs and counters are shared."""
    if mode == "tokens":
        return engine
    by_blocks = copy.copy(engine)
    by_blocks.runner = copy.copy(engine.runner)
    by_blocks.runner.model = copy.copy(engine.runner.model)
    by_blocks.runner.model.token_runner = None
    return by_blocks


def available_modes(engine: Engine) -> list[Mode]:
    """Return the modes that the engine's device and torch can do."""
    return ["blocks"] if engine.runner.model.token_runner is None else ["blocks", "tokens"]


# --- exactness ------------------------------------------------------------------------------------


def check_exactness(
    model: BenchModel, *, dtype: torch.dtype, work: Workload, shares: Sequence[float]
) -> list[Exactness]:
    """Decode in every mode, forced and routed, and compare with separate operations.

    Args:
        model: A small one.
        dtype: Type to compute in.
        work: The number of pairs does not matter.
        shares: Of the exits, where they are forced.
    """
    params = DecoderParams.from_tensors(model.config, model.load_tensors(dtype))
    reference = Engine(params, max_seq_len=work.max_seq_len, kernels="torch")
    engine = Engine(params, max_seq_len=work.max_seq_len, kernels="graph")
    policies = {"forced": work.policies(shares)[0], "drawn": SampledRouter()}
    return [
        _exactness(in_mode(engine, mode), reference, mode=mode, exits=exits, work=work, policy=p)
        for mode in available_modes(engine)
        for exits, p in policies.items()
    ]


@torch.inference_mode()
def _exactness(
    engine: Engine,
    reference: Engine,
    *,
    mode: Mode,
    exits: str,
    work: Workload,
    policy: ExitPolicy,
) -> Exactness:
    dtype = engine.params.dtype
    prompt = work.prompts(engine.params.num_tokens)[0]
    state = engine.new_state()
    result = engine.generate(
        prompt, max_new_tokens=work.new_tokens, policy=policy, seed=work.seed, state=state
    ).result()
    engine.flush(state)
    full = reference.new_state()
    reference.prefill(full, [*prompt, *result.token_ids[:-1]])
    state_error = max(
        _difference(found[..., : full.length, :], expected[..., : full.length, :])
        for found, expected in (
            (state.buffers.kv_LGSH, full.buffers.kv_LGSH),
            *zip(state.buffers.boundary_SD, full.buffers.boundary_SD, strict=True),
        )
    )
    state.close()
    decision_error = max(
        _decision_error(reference, full, policy, work.seed, index + len(prompt), *chosen)
        for index, chosen in enumerate(zip(result.exit_indices, result.token_ids, strict=True))
    )
    tolerance = TOLERANCES[dtype]
    return Exactness(
        mode=mode,
        dtype=str(dtype).removeprefix("torch."),
        exits=exits,
        num_tokens=len(result.token_ids),
        state_error=state_error,
        decision_error=decision_error,
        tolerance=tolerance,
        passed=max(state_error, decision_error) <= tolerance,
    )


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value; infinite where something is NaN."""
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def _decision_error(
    reference: Engine,
    full: DecodeState,
    policy: ExitPolicy,
    seed: int,
    position: int,
    exit_index: int,
    token_id: int,
) -> float:
    """Return by how much exit and token of a position miss what the full pass says, nats."""
    params, model = reference.params, reference.runner.model
    noise = Noise(seed, vocab_size=params.num_tokens, device=params.device)
    num_junctions = reference.num_exits - 1
    thresholds = exit_thresholds(
        policy,
        position=position,
        uniforms=[noise.uniform(position, index) for index in range(num_junctions)],
    )
    assert thresholds is not None, "a policy of ours"
    error = 0.0
    for index in range(exit_index + 1):
        n_1D = model.exit_norm(index, full.buffers.boundary_SD[index + 1][position - 1 :][:1])
        if index == num_junctions:
            break
        beyond = float(model.router_logit(index, n_1D)) - thresholds[index]
        error = max(error, -beyond if index == exit_index else beyond)
    logits_V = model.logits(model.exit_state(exit_index, n_1D))[0, : params.num_tokens]
    scores_V = logits_V.double() + noise.gumbel(position)
    missed = float(scores_V.max() - scores_V[token_id])
    return max(error, missed) if missed == missed else float("inf")


# --- launches -------------------------------------------------------------------------------------


def count_launches(system: EngineSystem, prompt: Sequence[int], *, num_tokens: int) -> Launches:
    """Decode once and count; everything must have been captured before.

    Args:
        system: An engine in graphs, with the policy to decode by.
        prompt: What to continue.
        num_tokens: Tokens to count, behind the first one.
    """
    counters = graphs_of(system.engine).counters
    is_cuda = system.engine.params.device.type == "cuda"
    generation = system.engine.generate(
        prompt, max_new_tokens=1 + num_tokens, policy=system.policies[0], seed=0
    )
    next(generation)
    before = copy.copy(counters)
    events: Counter[str] = Counter()
    with _profiled(events) if is_cuda else nullcontext():
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
def _profiled(events: Counter[str]) -> Iterator[None]:
    """Count the calls of the CUDA runtime by name, and as "kernels" what ran on the device."""
    with torch.profiler.profile() as trace:
        yield
    for event in trace.events() or ():
        if event.device_type.name == "CPU":
            events[event.name] += 1
        elif not event.name.startswith(("Memcpy", "Memset")):
            events["kernels"] += 1


# --- speed ----------------------------------------------------------------------------------------


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
        self._prompts = work.prompts(model.config.vocab_size)

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
        dims = self._model.dims
        weights = [weights_read_per_token(self._model.dense().dims, [1.0])]
        weights += [weights_read_per_token(dims, shares)] * len(modes)
        ratios = [None, *(paired_ratio("dense", times[0], ms) for ms in times[1:])]
        return ShapeFigures(
            shape=self.shape,
            dtype=self._dtype,
            exit_shares=list(shares),
            limit=limit_speedup(dims, shares),
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
            limit=limit_speedup(self._model.dims, shares) if batch == 1 else None,
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
        _wait_for(engine.params.device)
        seconds.append(time.perf_counter() - start)
        return graph

    backend.capture = timed  # type: ignore[method-assign,assignment]  # the engine has no timers
    return seconds


# --- memory ---------------------------------------------------------------------------------------


def watch_memory(
    model: BenchModel, *, num_requests: int, num_rounds: int, sample_every: int, work: Workload
) -> MemoryFigures:
    """Serve requests of random lengths and exits, in rounds, and watch memory and graphs.

    Args:
        model: A small one.
        num_requests: Different requests.
        num_rounds: How often each comes, in another order every round; at least 3.
        sample_every: Requests between two samples.
        work: Longest prompt and generation.
    """
    engine = model.load_engine(dtype="float32", max_seq_len=work.max_seq_len, kernels="graph")
    graphs, rng = graphs_of(engine), random.Random(work.seed)
    last = engine.num_exits - 1
    requests = []
    for seed in range(num_requests):
        num_new = rng.randint(2, work.new_tokens)
        prompt = [rng.randrange(engine.params.num_tokens)] * rng.randint(1, work.prompt_tokens)
        script = tuple(rng.choice((0, 0, rng.randint(0, last))) for _ in range(num_new))
        requests.append((prompt, num_new, ScriptedExits(exit_indices=script), seed))
    samples, ends, num_served = list[float](), list[int](), 0
    for _ in range(num_rounds):
        rng.shuffle(requests)
        for prompt, num_new, policy, seed in requests:
            engine.generate(prompt, max_new_tokens=num_new, policy=policy, seed=seed).result()
            num_served += 1
            if num_served % sample_every == 0:
                samples.append(_memory_bytes(engine) / 1e6)
        ends.append(len(samples))
    assert graphs.buffer_pool is not None, "graphs have a pool"
    num_sets = len(graphs.buffer_pool)
    return MemoryFigures(
        num_requests=num_served,
        memory_mb=samples,
        num_graphs=graphs.num_graphs,
        bound=num_sets * (MAX_TOKEN_GRAPHS + engine.num_exits * len(PREFILL_BUCKETS)),
        is_flat=max(samples[ends[1] :]) <= _POOL_GROWTH * max(samples[ends[0] : ends[1]]),
    )


def _memory_bytes(engine: Engine) -> int:
    if engine.params.device.type == "cuda":
        return torch.cuda.memory_reserved(engine.params.device)
    return graphs_of(engine).backend.pool_bytes


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
