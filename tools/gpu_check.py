"""Check decoding and training on a GPU in a few minutes, without network or data.

    python tools/gpu_check.py --out runs/gpu             decoding in CUDA graphs, at most 8 minutes
    python tools/gpu_check.py --out runs/gpu --dry-run   the same on the CPU, tiny, graphs imitated
    python tools/gpu_check.py --train                    ten training steps (needs torchtitan)

Decoding: is every mode exact, what does a token launch, does memory stay flat, and what does it
cost beside dense at three sizes? Writes gpu_check.json and prints tables; the exit code is 1 if a
check of tests/gpu fails. Times are never checked. Without a GPU it says so and passes, so the same
command runs everywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# For a checkout that is not installed; its tests never are.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from nvium_titan.bench.graphs import (
    LoadedShape,
    RateFigures,
    ShapeFigures,
    copy_bandwidth,
    graphs_of,
)
from nvium_titan.bench.machine import peak_flops
from nvium_titan.bench.models import BenchModel
from nvium_titan.bench.workload import Workload
from nvium_titan.core.cost import forward_flops
from nvium_titan.core.flavors import flavor_shape, parse_shape
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import DependencyError
from tests.gpu.exactness import Exactness, check_exactness
from tests.gpu.imitation import graph_engine
from tests.gpu.launches import launch_failures
from tests.gpu.memory import MemoryFigures, watch_memory

ROOT = Path(__file__).resolve().parents[1]
REPORT_FILE = "gpu_check.json"
SHARES = (0.35, 0.2, 0.15, 0.3)
"""Of the four exits, in the paper's shapes."""
WIDTH = 120
"""Of the tables, characters."""
EXIT_RATES = (0.0, 0.5, 1.0)
BATCHES = (1, 8)
STATED_COST = 0.1
"""If no token leaves early, N-vium may be so much slower than its weights say."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to run."""

    exactness: ModelShape
    exactness_dtypes: tuple[torch.dtype, ...]
    shapes: dict[str, ModelShape]
    work: Workload
    copy_bytes: int
    memory_requests: int
    memory_rounds: int
    memory_every: int


def gpu_plan() -> Plan:
    """Return the plan of a GPU."""
    return Plan(
        exactness=flavor_shape("quadrivium-256x24"),
        exactness_dtypes=(torch.float32, torch.bfloat16),
        shapes={name: parse_shape(name) for name in ("768x24", "768x48", "1536x48")},
        work=Workload(prompt_tokens=32, new_tokens=101, num_pairs=7, seed=0),
        copy_bytes=2 << 30,
        memory_requests=60,
        memory_rounds=5,
        memory_every=20,
    )


def dry_plan() -> Plan:
    """Return the plan of a dry run: all of it, tiny."""

    def tiny(size: str) -> ModelShape:
        return dataclasses.replace(parse_shape(size), vocab_size=300)

    return Plan(
        exactness=tiny("64x4"),
        exactness_dtypes=(torch.float64, torch.float32, torch.bfloat16),
        shapes={size: tiny(size) for size in ("32x4", "32x8", "64x4")},
        work=Workload(prompt_tokens=4, new_tokens=13, num_pairs=2, seed=0),
        copy_bytes=1 << 20,
        memory_requests=8,
        memory_rounds=3,
        memory_every=2,
    )


class Budget:
    """The time there is, and what did not fit into it."""

    def __init__(self, minutes: float) -> None:
        self.start = time.monotonic()
        self.left_out: list[str] = []
        self._seconds = 60 * minutes

    def allows(self, part: str, *, before: float) -> bool:
        """Return whether a part may begin: only `before` a fraction of the time is spent."""
        fits = self.spent_s < before * self._seconds
        if not fits:
            self.left_out.append(part)
        return fits

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start


@dataclass(kw_only=True)
class Report:
    """Everything found; gpu_check.json has these keys."""

    device: str
    is_dry_run: bool
    versions: dict[str, str]
    why_no_token_graphs: str | None = None
    copy_gb_s: float = 0.0
    exactness: list[Exactness] = field(default_factory=list)
    shapes: list[ShapeFigures] = field(default_factory=list)
    rates: list[RateFigures] = field(default_factory=list)
    memory: MemoryFigures | None = None
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0


def check_decoding(out: Path, *, is_dry_run: bool, minutes: float) -> bool:
    """Check and measure decoding in graphs; return whether every check passed."""
    console, budget = Console(width=WIDTH), Budget(minutes)
    plan = dry_plan() if is_dry_run else gpu_plan()
    device = torch.device("cpu" if is_dry_run else "cuda")
    report = Report(
        device="cpu, graphs imitated" if is_dry_run else torch.cuda.get_device_name(),
        is_dry_run=is_dry_run,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        },
    )
    try:
        for step in decoding_steps(plan, device, budget, report):
            console.print(f"{budget.spent_s:6.0f} s  {step}", highlight=False)
    finally:
        report.left_out, report.seconds = budget.left_out, budget.spent_s
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(report), indent=2) + "\n"
        (out / REPORT_FILE).write_text(text, encoding="utf-8")
    print_report(console, report)
    console.print(f"wrote {out / REPORT_FILE}", highlight=False)
    return not report.failures


def decoding_steps(
    plan: Plan, device: torch.device, budget: Budget, report: Report
) -> Iterator[str]:
    """Fill in the report; yield what has just been done."""
    work = plan.work
    report.copy_gb_s = copy_bandwidth(device, num_bytes=plan.copy_bytes)
    yield "copy bandwidth"
    model = BenchModel.random(plan.exactness, seed=work.seed, device=device)
    engine = graph_engine(model.load_params(dtype="float32"), max_seq_len=work.max_seq_len)
    report.why_no_token_graphs = graphs_of(engine).backend.why_no_branches
    for dtype in plan.exactness_dtypes:
        rows = check_exactness(model, dtype=dtype, work=work, shares=SHARES)
        report.exactness += rows
        report.failures += [
            f"exactness: {row.mode}, {row.dtype}, exits {row.exits}"
            for row in rows
            if not row.passed
        ]
        yield f"exactness, {dtype}"
    for number, (name, shape) in enumerate(plan.shapes.items(), start=1):
        # The last third of the time is for the largest shape, which matters most.
        if not budget.allows(f"{name}: everything", before=0.3 * number - 0.1):
            continue
        yield from shape_steps(name, shape, plan, device, budget, report, before=0.3 * number)
    if budget.allows("memory over many requests", before=0.92):
        report.memory = memory = watch_memory(
            model, num_requests=plan.memory_requests, num_rounds=plan.memory_rounds,
            sample_every=plan.memory_every, work=work,
        )  # fmt: skip
        report.failures += memory.failures
        yield f"memory over {memory.num_requests} requests"


def shape_steps(
    name: str,
    shape: ModelShape,
    plan: Plan,
    device: torch.device,
    budget: Budget,
    report: Report,
    *,
    before: float,
) -> Iterator[str]:
    """Measure one shape; exit rates only `before` a fraction of the time is spent."""
    model = BenchModel.random(shape, seed=plan.work.seed, device=device)
    loaded = LoadedShape(model, dtype="bfloat16", work=plan.work, build=graph_engine)
    figures = loaded.speed(SHARES, bandwidth_gb_s=report.copy_gb_s)
    report.shapes.append(figures)
    report.failures += launch_failures(figures)
    yield f"{name}, forced exits"
    for batch in BATCHES:
        for rate in EXIT_RATES:
            part = f"{name}: exit rate {rate:.0%}, batch {batch}"
            if budget.allows(part, before=before):
                report.rates.append(loaded.rate(rate, batch=batch))
                yield part


# --- tables ---------------------------------------------------------------------------------------


def print_report(console: Console, report: Report) -> None:
    """Print all tables, what was left out and what failed."""
    console.print(
        f"{report.device}; {', '.join(f'{k} {v}' for k, v in report.versions.items())}; copies "
        f"{report.copy_gb_s:.0f} GB/s; {report.seconds:.0f} s",
        highlight=False,
    )
    if report.is_dry_run:
        console.print("A dry run: it shows that everything runs; its times mean nothing.")
    if report.why_no_token_graphs:
        console.print(f"No graph per token here: {report.why_no_token_graphs}")
    print_table(
        console, "Exactness: largest error against separate operations",
        ("mode", "type", "exits", "states", "decisions, nats", "allowed", ""),
        [
            (row.mode, row.dtype, row.exits, f"{row.state_error:.1e}",
             f"{row.decision_error:.1e}", f"{row.tolerance:g}", mark(row.passed))
            for row in report.exactness
        ],
    )  # fmt: skip
    print_table(
        console,
        f"Forced exits {', '.join(f'{share:g}' for share in SHARES)}, every router run",
        ("shape", "mode", "ms/token", "of copy rate", "over dense", "limit", "kernels a token",
         "graphs a token", "host reads a token", "captures, s", "graphs", "pool, MB"),
        [speed_row(figures, index) for figures in report.shapes
         for index in range(len(figures.modes))],
    )  # fmt: skip
    print_table(
        console, "Where it loses: a share of the tokens leaves at the first exit",
        ("shape", "batch", "leave", "dense, ms", "N-vium, ms", "over dense", "limit",
         "host reads a token", "stated cost"),
        [rate_row(row) for row in report.rates],
    )  # fmt: skip
    if report.memory is not None:
        memory = report.memory
        console.print(
            f"Memory over {memory.num_requests} requests: {memory.memory_mb[0]:.1f} MB at first, "
            f"{max(memory.memory_mb):.1f} at most, {memory.memory_mb[-1]:.1f} at the end; "
            f"{memory.num_graphs} graphs of at most {memory.bound}: {mark(memory.is_flat)}",
            highlight=False,
        )
    for part in report.left_out:
        console.print(f"left out, no time: {part}", style="yellow", highlight=False)
    for failure in report.failures:
        console.print(f"FAILED: {failure}", style="red", highlight=False)
    if not report.failures:
        console.print("every check that ran passed")


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table, if there is anything in it."""
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def speed_row(figures: ShapeFigures, index: int) -> tuple[str, ...]:
    """Return the cells of one mode of a shape."""
    mode = figures.modes[index]
    launches, ratio = mode.launches, mode.over_dense
    kernels = launches.profiled_kernels
    return (
        figures.shape, mode.name, f"{mode.ms_per_token.median:.3f}", f"{mode.bandwidth_share:.0%}",
        "1" if ratio is None else f"{ratio.ratio:.2f}" + ("" if ratio.conclusive else " (noisy)"),
        "1" if ratio is None else f"{figures.limit:.2f}",
        "-" if kernels is None else f"{kernels:.0f}",
        f"{launches.graphs:.2f}", f"{launches.host_reads:.2f}",
        f"{mode.capture_s:.1f}", str(mode.num_graphs), f"{mode.pool_mb:.1f}",
    )  # fmt: skip


def rate_row(row: RateFigures) -> tuple[str, ...]:
    """Return the cells of one exit rate; at 0%, also whether it costs more than stated."""
    cost = "-"
    if row.exit_rate == 0 and row.limit is not None:
        is_kept = row.over_dense.ratio * (1 + STATED_COST) >= row.limit
        cost = f"{'within' if is_kept else 'OVER'} {STATED_COST:.0%}"
    return (
        row.shape, str(row.batch), f"{row.exit_rate:.0%}", f"{row.dense_ms:.3f}",
        f"{row.nvium_ms:.3f}", f"{row.over_dense.ratio:.2f}",
        "-" if row.limit is None else f"{row.limit:.2f}", f"{row.host_reads_per_token:.2f}", cost,
    )  # fmt: skip


def mark(passed: bool) -> str:
    """Return the word for a check's result."""
    return "passed" if passed else "FAILED"


# --- training -------------------------------------------------------------------------------------

NUM_STEPS, BATCH, SEQ_LEN = 10, 16, 1024
# Compiled and captured by then, and between two logged steps, at which the host does wait.
LOG_EVERY = 5
QUIET_STEPS = range(LOG_EVERY + 1, NUM_STEPS)


def check_train() -> bool:
    """Train ten steps of 768x24 in bfloat16, layers compiled, steps replayed from a CUDA graph.

    Returns whether training worked and our code never made the host wait for the device in a step.
    """
    from nvium_titan.report.records import read_metrics
    from nvium_titan.train import compat
    from nvium_titan.train import launch as train

    try:
        compat.require_torchtitan()
    except DependencyError as error:
        print(f"train: nothing checked: {error}")
        return True
    from nvium_titan.train.trainer import NviumTrainer

    waits: Counter[str] = Counter()
    run_step = NviumTrainer.train_step

    def watched_step(self: Any, batches: Any) -> Any:
        if self.step not in QUIET_STEPS:
            return run_step(self, batches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run_step(self, batches)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.update(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))

    NviumTrainer.train_step = watched_step
    with tempfile.TemporaryDirectory() as folder:
        code = train.main([
            "--config-file", str(ROOT / "train_configs" / "quadrivium-768x24.toml"),
            "--dump_folder", folder, "--hf_assets_path", "byte",
            "--training.steps", str(NUM_STEPS), "--training.local_batch_size", str(BATCH),
            "--training.global_batch_size", str(BATCH), "--metrics.log_freq", str(LOG_EVERY),
            "--dataloader.dataset", "", "--dataloader.corpus", "python_docs",
            "--validator.no_enable", "--checkpoint.no_enable",
        ])  # fmt: skip
        if code:
            print(f"train: FAILED with exit code {code}")
            return False
        last = read_metrics(Path(folder) / "metrics.jsonl")[-1]
    flops = 3 * sum(forward_flops(flavor_shape("quadrivium-768x24"), seq_len=SEQ_LEN).values())
    peak = peak_flops(torch.cuda.get_device_name(), dtype="bfloat16")
    mfu = "unknown peak" if peak is None else f"{flops * last.tokens_per_s / peak:.1%}"
    print(
        f"train: {torch.cuda.get_device_name()}, step {last.step}, loss {last.loss:.3f}, "
        f"{last.tokens_per_s:,.0f} tokens/s, MFU {mfu}, "
        f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
    )
    for place, count in waits.most_common():
        print(f"train: the host waited {count} times in {len(QUIET_STEPS)} steps at {place}")
    ours = [place for place in waits if "nvium_titan" in Path(place.split(":")[0]).parts]
    if ours:
        print("train: FAILED: our code makes the host wait for the device")
    return not ours


def main() -> int:
    """Run the checks asked for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="check decoding; the folder for its figures")
    parser.add_argument("--dry-run", action="store_true", help="decoding on the CPU, tiny")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for decoding; default: 8")
    parser.add_argument("--train", action="store_true", help="check training")
    args = parser.parse_args()
    if args.out is None and not args.train:
        parser.error("give --out DIR to check decoding, or --train")
    if not torch.cuda.is_available() and (args.train or not args.dry_run):
        hint = "" if args.out is None else "; --dry-run checks decoding on the CPU"
        print(f"gpu_check: nothing checked: torch sees no CUDA GPU here{hint}")
        return 0
    passed = True
    if args.out is not None:
        passed = check_decoding(args.out, is_dry_run=args.dry_run, minutes=args.minutes)
    if args.train:
        passed = check_train() and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
