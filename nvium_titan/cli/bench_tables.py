"""What `nvium bench` prints: tables for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from nvium_titan.cli.common import shown
from nvium_titan.report.bench_records import (
    OURS,
    BenchReport,
    Cpu,
    DtypeFigures,
    PromptsReport,
    TrainReport,
)

_WIDTH = 120
_DISAGREE = (
    "The pairs disagree too much: this run shows nothing. Stop what else is running and repeat it."
)


def warn_if_busy(cpu: Cpu) -> None:
    """Say on stderr that others use the machine, if they do."""
    if cpu.is_busy:
        print(
            f"nvium: warning: other processes keep {cpu.busy_cores:.1f} cores busy; figures "
            "show nothing until they are stopped",
            file=sys.stderr,
        )


def warn_if_inconclusive(report: BenchReport | PromptsReport) -> None:
    """Say on stderr that pairs disagree; for a report that is printed as JSON."""
    if isinstance(report, BenchReport):
        for entry in report.dtypes:
            if not entry.conclusive:
                print(f"nvium: warning: {entry.dtype}: {_DISAGREE}", file=sys.stderr)


def print_report(report: BenchReport) -> None:
    """Print the comparisons of every type, each with its table."""
    forced = "routers decide" if report.forced_shares is None else "forced, routers run and read"
    print(
        f"{report.model}: {report.num_params:,} parameters, exits after layers "
        f"{', '.join(map(str, report.exits))} ({forced})\n"
        f"prompt {report.prompt_tokens} tokens, {report.new_tokens} new, "
        f"{report.batch} at once, seed {report.seed}"
    )
    _print_machine(report)
    if report.device != "cpu":
        print(f"our engine on: {report.device}")
    for entry in report.dtypes:
        _print_entry(entry, num_pairs_wanted=report.num_pairs_wanted)


def _print_machine(report: BenchReport | PromptsReport | TrainReport) -> None:
    cpu = report.cpu
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    print(
        f"CPU: {cpu.name}, {cpu.num_cores} cores, {threads}; flags that matter: "
        f"{' '.join(cpu.flags) or 'none'}; torch {report.versions['torch']}"
    )
    if cpu.is_busy:
        print(f"Not alone: others kept {cpu.busy_cores:.1f} cores busy at the start.")


def _print_entry(entry: DtypeFigures, *, num_pairs_wanted: int) -> None:
    pairs = f"{entry.num_pairs} interleaved pairs"
    if entry.num_pairs < num_pairs_wanted:
        pairs += f" (interrupted; {num_pairs_wanted} were asked for)"
    print(f"\n{entry.dtype}, {pairs}")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("system", no_wrap=True)
    for title in ("type", "ms/token", "quartiles", "first\ntoken ms", "total ms", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("N-vium is", justify="right", no_wrap=True)
    table.add_column("spread", justify="right", no_wrap=True)
    ratios = [None, (entry.ratio, entry.spread, entry.conclusive)]
    ratios += [(r.ratio, r.spread, r.conclusive) for r in entry.other_ratios]
    for system, ratio in zip(entry.systems, ratios, strict=True):
        ms = system.ms_per_token
        is_peer = system.name not in OURS
        table.add_row(
            f"{system.name} {system.version.split()[0]}" if is_peer else system.name,
            system.dtype,
            f"{ms.median:.3g}",
            f"{ms.q1:.3g} - {ms.q3:.3g}",
            f"{system.ttft_ms:.3g}",
            _figure(system.total_ms),
            _figure(system.tokens_per_s),
            *(("", "") if ratio is None else _speed(*ratio)),
            style="bold" if system.name == "N-vium" else None,
        )
    Console(width=_WIDTH).print(table)
    limit = ""
    if entry.limit is not None and entry.fraction_of_limit is not None:
        limit = f" (limit {entry.limit:.2f}x, {entry.fraction_of_limit:.0%} of it)"
    print(f"N-vium over dense {entry.ratio:.2f}x{limit}, spread {entry.spread:.1%}")
    if not entry.conclusive:
        print(_DISAGREE)
    elif entry.exit_shares[-1] == 1:
        print(f"No token left early: that costs {1 / entry.ratio - 1:.1%} over dense.")
    elif entry.ratio < 1:
        print(f"N-vium loses here: {1 / entry.ratio:.2f}x as slow as dense.")
    groups = "  ".join(f"{rows}: {count}" for rows, count in entry.group_size_histogram.items())
    lines = {
        "exit shares": shown(entry.exit_shares),
        "layers per token": f"{entry.layers_per_token:.2f}",
        "host reads per token": f"{entry.host_reads_per_token:.2f}",
        "rows of block calls": groups,
    }
    if entry.weight_mb_per_token:
        lines["weights per token"] = _by_system(entry.weight_mb_per_token, "MB")
        lines["achieved bandwidth"] = _by_system(entry.bandwidth_gb_s, "GB/s")
    for name, parts in entry.overhead.items():
        total = sum(parts.values())
        split = ", ".join(f"{part} {ms:.3g} ({ms / total:.0%})" for part, ms in parts.items())
        lines[f"{name} in pieces, ms"] = split
    print("\n".join(f"{name:22}{text}" for name, text in lines.items()))


def _speed(ratio: float, spread: float, is_conclusive: bool) -> tuple[str, str]:
    """Return the two cells of a ratio; a question mark stands where the pairs disagree."""
    word = "faster" if ratio >= 1 else "slower"
    return f"{ratio:.2f}x ({word})", f"{spread:.1%}" + ("" if is_conclusive else " ?")


def _figure(value: float) -> str:
    """Return a number with three digits or more, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _by_system(values: Mapping[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.3g} {unit}" for name, value in values.items())


def print_prompts(report: PromptsReport) -> None:
    """Print Spec-Bench's categories, a table for each type."""
    print(
        f"{report.model}: {report.num_questions} questions of {report.prompts}, "
        f"{report.num_trials} trials, at most {report.max_new_tokens} tokens per prompt"
    )
    _print_machine(report)
    for entry in report.dtypes:
        state = "" if entry.is_complete else " (interrupted)"
        print(f"\n{entry.dtype}{state}")
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("category", no_wrap=True)
        for title in (
            "prompts", "cut", "N-vium ms/token", "dense ms/token", "N-vium tokens/s",
            "dense tokens/s", "speed-up",
        ):  # fmt: skip
            table.add_column(title, justify="right")
        for row in entry.categories:
            figures = [*row.ms_per_token.values(), *row.tokens_per_s.values()]
            table.add_row(
                row.category,
                str(row.num_prompts),
                str(row.num_truncated),
                *(f"{value:.3g}" for value in figures),
                f"{row.ratio:.2f}x",
            )
        Console(width=_WIDTH).print(table)
        print(
            f"mean of the categories {entry.ratio:.2f}x (limit {entry.limit:.2f}x at exit shares "
            f"{shown(entry.exit_shares)})\nms/token: all time over all tokens, the prompt's time "
            "included; tokens/s: after the first token; cut: prompts longer than the context"
        )


def print_training(report: TrainReport) -> None:
    """Print what a training step costs, a row for each model."""
    print(
        f"{report.config_file}, exits after layers {', '.join(map(str, report.exits))}\n"
        f"forward and backward of {report.batch} x {report.seq_len} tokens, seed {report.seed}"
    )
    _print_machine(report)
    compiled = ", layers compiled" if report.is_compiled else ""
    pairs = f"{report.num_pairs} interleaved pairs"
    if report.num_pairs < report.num_pairs_wanted:
        pairs += f" (interrupted; {report.num_pairs_wanted} were asked for)"
    print(f"\n{report.dtype} on {report.device}{compiled}, {pairs}")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for title in (
        "parameters", "TFLOP", "ms/step", "quartiles", "tokens/s", "MFU", "time", "FLOPs",
        "time/\nFLOPs", "spread",
    ):  # fmt: skip
        table.add_column(title, justify="right", no_wrap=True)
    for system, ratio in zip(report.systems, [None, *report.ratios], strict=True):
        ms = system.step_ms
        cells = ["", "", "", ""]
        if ratio is not None:
            doubt = "" if ratio.conclusive else " ?"
            cells = [
                f"{ratio.time_ratio:.3f}x",
                f"{ratio.flop_ratio:.3f}x",
                f"{ratio.cost:.3f}",
                f"{ratio.spread:.1%}{doubt}",
            ]
        table.add_row(
            system.name,
            f"{system.num_params / 1e6:.1f} M",
            f"{system.tflops:.3g}",
            _figure(ms.median),
            f"{_figure(ms.q1)} - {_figure(ms.q3)}",
            _figure(system.tokens_per_s),
            "-" if system.mfu is None else f"{system.mfu:.1%}",
            *cells,
            style="bold" if system.name == "N-vium" else None,
        )
    Console(width=_WIDTH).print(table)
    print("time, FLOPs: N-vium's over that model's; time/FLOPs 1 is what the operations say")
    memory = report.loss_memory
    print(
        f"loss memory {memory.nvium_mb:.1f} MB, of dense {memory.dense_mb:.1f} MB at as many live "
        f"logits ({memory.live_logit_rows} rows): {memory.ratio:.3f}x"
    )
    if not all(ratio.conclusive for ratio in report.ratios):
        print(_DISAGREE)
