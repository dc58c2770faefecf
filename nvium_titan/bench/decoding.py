"""`nvium bench`: N-vium decodes in turns with dense, the matched twin and other engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, cast

import torch

from nvium_titan.bench.machine import device_name, package_versions
from nvium_titan.bench.models import WEIGHT_BYTES, BenchModel
from nvium_titan.bench.pairs import count_runs, paired_ratio, quartiles, run_pairs
from nvium_titan.bench.parts import split_time
from nvium_titan.bench.peers import PeerChoice, load_peer
from nvium_titan.bench.systems import (
    SETTLE_S,
    EngineRun,
    EngineSystem,
    System,
    Timing,
    host_reads_per_token,
)
from nvium_titan.bench.workload import Workload
from nvium_titan.core.cost import weights_read_per_token
from nvium_titan.decode import ExitPolicy, SampledRouter
from nvium_titan.decode.forward.build import Kernels
from nvium_titan.decode.schedule import ScheduleName
from nvium_titan.report.bench_records import (
    OURS,
    BenchReport,
    Cpu,
    DtypeFigures,
    SystemFigures,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """What to compare, and how."""

    model: BenchModel
    """The N-vium."""
    trained_dense: BenchModel | None
    """A dense model to run beside it."""
    with_twin: bool
    """Whether to run the parameter-matched dense model."""
    peers: tuple[PeerChoice, ...]
    """Other engines, with the dense model in them."""
    forced_shares: tuple[float, ...] | None
    """Exit shares to force; None lets the routers decide."""
    work: Workload
    """What each run decodes."""
    batch: int
    """Sequences that our engine decodes at once; peers need 1."""
    schedule: ScheduleName
    """When a batch of N-vium runs which block."""
    kernels: Kernels
    """What runs our models, as `Engine` takes it."""

    def num_runs(self, dtypes: Sequence[str]) -> int:
        """Return how often `measure` will run a system."""
        ours = 2 + self.with_twin + (self.trained_dense is not None)
        peers = sum(peer.dtype_beside(dtype) is not None for peer in self.peers for dtype in dtypes)
        return count_runs(ours * len(dtypes) + peers, self.work.num_pairs)

    def policies(self) -> list[ExitPolicy]:
        """Return who decides the exits of each sequence, the same in every run."""
        if self.forced_shares is None:
            return [SampledRouter()] * self.batch
        return self.work.policies(self.forced_shares, batch=self.batch)

    def measure(
        self, dtypes: Sequence[str], *, cpu: Cpu, command: str, on_run: Callable[[], None]
    ) -> BenchReport:
        """Run all pairs in one type after the other; an interrupt (Ctrl-C) ends them.

        Args:
            dtypes: Types that our models compute in.
            cpu: For the report.
            command: For the report.
            on_run: Called after every run of a system, warm-up included.

        Raises:
            BenchError: If a peer cannot be run.
            KeyboardInterrupt: If interrupted before the first pair of a type is complete.
        """
        entries: list[DtypeFigures] = []
        for dtype in dtypes:
            entries.append(run_comparison(self, dtype=dtype, on_run=on_run))
            if entries[-1].num_pairs < self.work.num_pairs:
                break
        systems = [system for entry in entries for system in entry.systems]
        peers = {system.name: system.version for system in systems if system.name not in OURS}
        model, work, shares = self.model, self.work, self.forced_shares
        return BenchReport(
            model=model.name,
            exits=list(model.shape.block_ends),
            num_params=model.num_params,
            forced_shares=None if shares is None else list(shares),
            prompt_tokens=work.prompt_tokens,
            new_tokens=work.new_tokens,
            batch=self.batch,
            schedule=self.schedule,
            num_pairs_wanted=work.num_pairs,
            seed=work.seed,
            device=device_name(model.device),
            threads=torch.get_num_threads(),
            cpu=cpu,
            versions=package_versions() | peers,
            command=command,
            dtypes=entries,
        )


def run_comparison(
    comparison: Comparison, *, dtype: str, on_run: Callable[[], None]
) -> DtypeFigures:
    """Run all pairs in one type; an interrupt (Ctrl-C) ends them, and leaves out the overhead.

    Args:
        comparison: What to run.
        dtype: Type that our models compute in.
        on_run: Called after every run of a system, warm-up included.

    Raises:
        BenchError: If a peer cannot be run.
        KeyboardInterrupt: If interrupted before the first pair is complete.
    """
    work = comparison.work
    with _open_systems(comparison, dtype=dtype) as (nvium, dense, others):
        systems: list[System] = [nvium, dense, *others]
        prompts = _prompts(comparison, nvium)
        pairs = run_pairs(
            systems,
            prompts,
            lambda system, prompt: system.run(prompt, work.new_tokens),
            on_run=on_run,
            settle_s=SETTLE_S,
        )
        overhead: dict[str, dict[str, float]] = {}
        # A GPU works on after a call has returned, so its parts cannot be timed from outside.
        is_split = comparison.batch == 1 and comparison.model.device.type == "cpu"
        if is_split and len(pairs) == work.num_pairs:
            with suppress(KeyboardInterrupt):
                for ours in (nvium, dense):
                    overhead[ours.name] = split_time(
                        ours.engine, prompts[0], work.new_tokens,
                        policy=ours.policies[0], seed=work.seed,
                    )  # fmt: skip
        return _figures(comparison, systems, pairs, overhead)


class _Systems(NamedTuple):
    nvium: EngineSystem
    dense: EngineSystem
    others: list[System]


@contextmanager
def _open_systems(comparison: Comparison, *, dtype: str) -> Iterator[_Systems]:
    """Give N-vium, dense and the others; close them and delete their files afterwards."""
    work = comparison.work
    with ExitStack() as stack:

        def ours(
            name: str, model: BenchModel, policies: Sequence[ExitPolicy] | None = None
        ) -> EngineSystem:
            engine = model.load_engine(
                dtype=dtype, max_seq_len=work.max_seq_len, kernels=comparison.kernels
            )
            # A model of one exit asks no policy, but each sequence has one.
            policies = policies or [SampledRouter()] * comparison.batch
            system = EngineSystem(
                name, engine, dtype=dtype, policies=policies, seed=work.seed,
                schedule=comparison.schedule,
            )  # fmt: skip
            return stack.enter_context(closing(system))

        model, dense = comparison.model, comparison.model.dense()
        systems = _Systems(ours("N-vium", model, comparison.policies()), ours("dense", dense), [])
        if comparison.trained_dense is not None:
            systems.others.append(ours("trained dense", comparison.trained_dense))
        if comparison.with_twin:
            systems.others.append(ours("twin", model.twin(seed=work.seed)))
        peers = [
            (peer.name, peer_dtype)
            for peer in comparison.peers
            if (peer_dtype := peer.dtype_beside(dtype)) is not None
        ]
        if peers:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nvium-bench-")))
            bundle = folder / "dense"
            dense.write(bundle, dtype="bfloat16" if dtype == "bfloat16" else "float32")
            for number, (name, peer_dtype) in enumerate(peers):
                work_dir = folder / str(number)
                work_dir.mkdir()
                peer = load_peer(
                    name, bundle, dtype=peer_dtype, threads=torch.get_num_threads(),
                    max_seq_len=work.max_seq_len, work_dir=work_dir,
                )  # fmt: skip
                systems.others.append(stack.enter_context(closing(peer)))
        yield systems


def _prompts(comparison: Comparison, nvium: EngineSystem) -> list[list[int]]:
    """Return a prompt per pair: random ids where exits are forced, else the model's own text."""
    params, work = nvium.engine.params, comparison.work
    if comparison.forced_shares is not None:
        return work.prompts(params.num_tokens)
    start = params.config.bos_token_id or 0
    prompts = []
    for number in range(work.num_pairs):
        prompt = [start]
        if work.prompt_tokens > 1:
            text = nvium.engine.generate(
                prompt, max_new_tokens=work.prompt_tokens - 1, seed=work.seed + number
            )
            prompt += text.result().token_ids
        prompts.append(prompt)
    return prompts


def _figures(
    comparison: Comparison,
    systems: Sequence[System],
    pairs: Sequence[Sequence[Timing]],
    overhead: dict[str, dict[str, float]],
) -> DtypeFigures:
    dtype, model = systems[0].dtype, comparison.model
    # The first system is our own engine.
    runs = cast("list[EngineRun]", [pair[0] for pair in pairs])
    results = [result for run in runs for result in run.results]
    exits = Counter(index for result in results for index in result.exit_indices[1:])
    shares = [exits[index] / exits.total() for index in range(model.shape.num_exits)]
    groups = sum((result.stats.group_sizes for result in results), Counter[int]())
    timings = list(zip(*pairs, strict=True))
    figures = [_system_figures(*each) for each in zip(systems, timings, strict=True)]
    our_ms, *other_ms = ([timing.ms_per_token for timing in each] for each in timings)
    over_dense, *other_ratios = (
        paired_ratio(_label(system, dtype), ms, our_ms)
        for system, ms in zip(systems[1:], other_ms, strict=True)
    )
    # Several sequences share what they read, so the shares alone give no limit.
    limit: float | None = None
    megabytes: dict[str, float] = {}
    if comparison.batch == 1:
        weights = {
            "N-vium": weights_read_per_token(model.shape, shares),
            "dense": weights_read_per_token(model.shape.dense(), [1.0]),
        }
        megabytes = {name: WEIGHT_BYTES[dtype] * count / 1e6 for name, count in weights.items()}
        limit = megabytes["dense"] / megabytes["N-vium"]
    return DtypeFigures(
        dtype=dtype,
        num_pairs=len(pairs),
        systems=figures,
        over_dense=over_dense,
        other_ratios=other_ratios,
        limit=limit,
        fraction_of_limit=over_dense.ratio / limit if limit else None,
        exit_shares=shares,
        layers_per_token=sum(run.layers_run for run in runs) / exits.total(),
        host_reads_per_token=host_reads_per_token(runs),
        group_size_histogram={str(rows): groups[rows] for rows in sorted(groups)},
        weight_mb_per_token=megabytes,
        bandwidth_gb_s={
            name: mb / system.ms_per_token.median
            for (name, mb), system in zip(megabytes.items(), figures, strict=False)
        },
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
