"""The interleaved comparison: every system once per pair, in alternating order, on one prompt.

Speed drifts with heat, neighbours and caches; two systems that take turns in one process drift
together, so the ratio of a pair means more than two medians. The module owns the term pair.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from nvium_titan.bench.models import WEIGHT_BYTES, BenchModel
from nvium_titan.bench.ours import EngineSystem, split_time
from nvium_titan.bench.peers import PEER_DTYPES, load_peer
from nvium_titan.bench.statistics import paired_ratio, quartiles
from nvium_titan.bench.system import System, Timing
from nvium_titan.bench.workload import Workload
from nvium_titan.core.cost import weights_read_per_token
from nvium_titan.decode import ExitPolicy, SampledRouter
from nvium_titan.decode.forward.choose import Kernels
from nvium_titan.errors import BenchError, nearest
from nvium_titan.report.bench_records import DtypeFigures, SystemFigures

_SETTLE_S = 0.1
"""Pause after each run: the threads of another engine spin on after its last token."""

_SAME_TYPE = {"int8": ("int8", "q8_0")}
"""What a peer may call a type of ours, where it is not the same name."""


class PeerChoice(NamedTuple):
    """A peer to run, and in which type."""

    name: str
    """A key of `PEER_DTYPES`."""
    dtype: str | None
    """One of its types; None takes that of N-vium, and leaves it out where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """What to compare, and how often."""

    model: BenchModel
    """The N-vium."""
    trained_dense: BenchModel | None
    """A dense model to run beside it, or none."""
    with_twin: bool
    """Whether to run the parameter-matched dense."""
    peers: tuple[PeerChoice, ...]
    """Other engines, with the dense model in them."""
    forced_shares: tuple[float, ...] | None
    """Exit shares to force; None lets the routers decide."""
    prompt_tokens: int
    """Tokens of a prompt."""
    new_tokens: int
    """Tokens to make per run and sequence, at least 2: the first is not counted."""
    batch: int
    """Sequences that our engine decodes at once, in lock-step; peers need 1."""
    num_pairs: int
    """Pairs to run."""
    seed: int
    """Decides weights, prompts, exits and tokens."""
    kernels: Kernels
    """What runs N-vium and dense; see `Engine`."""

    @property
    def work(self) -> Workload:
        """What each run decodes."""
        return Workload(self.prompt_tokens, self.new_tokens, self.num_pairs, self.seed)

    def peers_for(self, dtype: str) -> list[tuple[str, str]]:
        """Return the peers to run beside our engine in `dtype`, each with its own type."""
        chosen = []
        for peer in self.peers:
            wanted = (peer.dtype,) if peer.dtype else _SAME_TYPE.get(dtype, (dtype,))
            found = next((name for name in wanted if name in PEER_DTYPES[peer.name]), None)
            if found is not None:
                chosen.append((peer.name, found))
        return chosen

    def num_runs(self, dtype: str) -> int:
        """Return how often `run_comparison` will run a system, warm-up included."""
        ours = 2 + self.with_twin + (self.trained_dense is not None)
        return (self.num_pairs + 1) * (ours + len(self.peers_for(dtype)))

    def policies(self) -> list[ExitPolicy]:
        """Return who decides the exits of each sequence, the same in every run."""
        if self.forced_shares is None:
            return [SampledRouter()] * self.batch
        return self.work.policies(self.forced_shares, batch=self.batch)


def parse_peer(text: str) -> PeerChoice:
    """Return the peer that NAME or NAME:DTYPE means.

    Raises:
        BenchError: If there is no such peer, or it has no such type.
    """
    name, _, dtype = text.partition(":")
    if name not in PEER_DTYPES:
        raise BenchError(f"--peer {text}: {name!r} is unknown{nearest(name, PEER_DTYPES)}")
    if dtype and dtype not in PEER_DTYPES[name]:
        raise BenchError(f"--peer {text}: {dtype!r} is unknown{nearest(dtype, PEER_DTYPES[name])}")
    return PeerChoice(name, dtype or None)


def run_comparison(
    comparison: Comparison, *, dtype: str, on_run: Callable[[], None]
) -> DtypeFigures:
    """Run all pairs in one type.

    An interrupt (Ctrl-C) ends the pairs: the figures are then of those so far, without overhead.

    Args:
        comparison: What to run.
        dtype: Type that N-vium and dense compute in.
        on_run: Called after every run of a system, warm-up included.

    Raises:
        BenchError: If a peer cannot be run.
        KeyboardInterrupt: If interrupted before the second pair is done.
    """
    with _open_systems(comparison, dtype=dtype) as (nvium, dense, others):
        systems = [nvium, dense, *others]
        prompts = _prompts(comparison, nvium)
        for system in systems:
            system.run(prompts[0], comparison.new_tokens)
            on_run()
        nvium.runs.clear()
        pairs: list[list[Timing]] = []
        overhead = {}
        try:
            for pair in interleave(systems, prompts, comparison.new_tokens, on_run=on_run):
                pairs.append(pair)
            # A GPU works on after a call has returned, so its parts cannot be timed from outside.
            is_split = comparison.batch == 1 and comparison.model.device.type == "cpu"
            for ours in (nvium, dense) if is_split else ():
                overhead[ours.name] = split_time(
                    ours.engine, prompts[0], comparison.new_tokens,
                    policy=ours.policies[0], seed=comparison.seed,
                )  # fmt: skip
        except KeyboardInterrupt:
            if not pairs:
                raise
        return _figures(comparison, nvium, systems, pairs, overhead)


def interleave(
    systems: Sequence[System],
    prompts: Sequence[Sequence[int]],
    num_new_tokens: int,
    *,
    on_run: Callable[[], None],
) -> Iterator[list[Timing]]:
    """Give the timings of one pair after the other, in the order of `systems`.

    The order of the runs is turned round from pair to pair, so that nobody always runs on the
    caches and the clock speed that the same other one left.

    Args:
        systems: What to run.
        prompts: One for each pair.
        num_new_tokens: Tokens to make.
        on_run: Called after every run.
    """
    for number, prompt in enumerate(prompts):
        order = range(len(systems))
        timings = {}
        for index in order if number % 2 == 0 else reversed(order):
            timings[index] = systems[index].run(prompt, num_new_tokens)
            on_run()
            time.sleep(_SETTLE_S)
        yield [timings[index] for index in order]


class _Systems(NamedTuple):
    nvium: EngineSystem
    dense: EngineSystem
    others: list[System]


@contextmanager
def _open_systems(comparison: Comparison, *, dtype: str) -> Iterator[_Systems]:
    """Give N-vium, dense, and what else was asked for; nothing of them is left afterwards."""
    with ExitStack() as stack:

        def ours(name: str, model: BenchModel, policies: Sequence[ExitPolicy]) -> EngineSystem:
            engine = model.load_engine(
                dtype=dtype, max_seq_len=comparison.work.max_seq_len, kernels=comparison.kernels
            )
            system = EngineSystem(
                name, engine, dtype=dtype, policies=policies, seed=comparison.seed
            )
            return stack.enter_context(closing(system))

        model = comparison.model
        dense = model.dense()
        # A model of one exit asks no policy.
        all_the_way = [SampledRouter()] * comparison.batch
        systems = _Systems(
            ours("N-vium", model, comparison.policies()), ours("dense", dense, all_the_way), []
        )
        if comparison.trained_dense is not None:
            systems.others.append(ours("trained dense", comparison.trained_dense, all_the_way))
        if comparison.with_twin:
            systems.others.append(ours("twin", model.twin(seed=comparison.seed), all_the_way))
        peers = comparison.peers_for(dtype)
        if peers:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nvium-bench-")))
            bundle = folder / "dense"
            dense.write(bundle, dtype="bfloat16" if dtype == "bfloat16" else "float32")
            for number, (name, peer_dtype) in enumerate(peers):
                work_dir = folder / str(number)
                work_dir.mkdir()
                peer = load_peer(
                    name, bundle, dtype=peer_dtype, threads=torch.get_num_threads(),
                    max_seq_len=comparison.work.max_seq_len, work_dir=work_dir,
                )  # fmt: skip
                systems.others.append(stack.enter_context(closing(peer)))
        yield systems


def _prompts(comparison: Comparison, nvium: EngineSystem) -> list[list[int]]:
    """Return a prompt per pair: random ids where exits are forced, else the model's own text."""
    params = nvium.engine.params
    size, seed = comparison.prompt_tokens, comparison.seed
    if comparison.forced_shares is not None:
        return comparison.work.prompts(params.num_tokens)
    start = params.config.bos_token_id or 0
    if size == 1:
        return [[start]] * comparison.num_pairs
    return [
        [
            start,
            *nvium.engine.generate([start], max_new_tokens=size - 1, seed=seed + number)
            .result()
            .token_ids,
        ]
        for number in range(comparison.num_pairs)
    ]


def _figures(
    comparison: Comparison,
    nvium: EngineSystem,
    systems: Sequence[System],
    pairs: Sequence[Sequence[Timing]],
    overhead: dict[str, dict[str, float]],
) -> DtypeFigures:
    dtype = nvium.dtype
    # A run of a pair that was interrupted is not part of the figures.
    runs = nvium.runs[: len(pairs)]
    results = [result for run in runs for result in run.results]
    exits = Counter(index for result in results for index in result.exit_indices[1:])
    shares = [exits[index] / exits.total() for index in range(nvium.engine.num_exits)]
    groups = sum((result.stats.group_sizes for result in results), Counter[int]())
    times = [[pair[index].ms_per_token for pair in pairs] for index in range(len(systems))]
    ratios = [
        paired_ratio(_label(system, dtype), times[index], times[0])
        for index, system in enumerate(systems)
    ][1:]
    figures = [
        _system_figures(system, [pair[index] for pair in pairs])
        for index, system in enumerate(systems)
    ]
    model = comparison.model
    megabytes = {
        "N-vium": weights_read_per_token(model.shape, shares) * WEIGHT_BYTES[dtype] / 1e6,
        "dense": weights_read_per_token(model.dense().shape, [1.0]) * WEIGHT_BYTES[dtype] / 1e6,
    }
    # Several sequences share what they read, so that the shares alone give no limit.
    limit = megabytes["dense"] / megabytes["N-vium"] if comparison.batch == 1 else None
    over_dense = ratios[0]
    return DtypeFigures(
        dtype=dtype,
        num_pairs=len(pairs),
        systems=figures,
        ratio=over_dense.ratio,
        ratio_iqr=over_dense.ratio_iqr,
        spread=over_dense.spread,
        conclusive=over_dense.conclusive,
        other_ratios=ratios[1:],
        limit=limit,
        fraction_of_limit=over_dense.ratio / limit if limit else None,
        exit_shares=shares,
        layers_per_token=sum(run.layers_run for run in runs) / exits.total(),
        host_reads_per_token=sum(r.stats.host_reads for r in results)
        / sum(r.stats.num_new_tokens for r in results),
        group_size_histogram={str(rows): groups[rows] for rows in sorted(groups)},
        weight_mb_per_token=megabytes if limit else {},
        bandwidth_gb_s={
            system.name: megabytes[system.name] / system.ms_per_token.median
            for system in figures[:2]
        }
        if limit
        else {},
        overhead=overhead,
    )


def _system_figures(system: System, timings: Sequence[Timing]) -> SystemFigures:
    ms_per_token = quartiles([timing.ms_per_token for timing in timings])
    return SystemFigures(
        name=system.name,
        dtype=system.dtype,
        version=system.version,
        threads=system.threads,
        ms_per_token=ms_per_token,
        ttft_ms=1000 * quartiles([timing.ttft_s for timing in timings]).median,
        total_ms=1000 * quartiles([t.ttft_s + t.decode_s for t in timings]).median,
        tokens_per_s=1000 / ms_per_token.median,
    )


def _label(system: System, dtype: str) -> str:
    return system.name if system.dtype == dtype else f"{system.name} {system.dtype}"
