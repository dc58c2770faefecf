"""What `nvium bench` prints: a report as JSON, or as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

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
    Ratio,
    Report,
    SystemFigures,
    TrainReport,
    to_json,
)

_WIDTH = 120
_DISAGREE = (
    "The pairs disagree too much: this run shows nothing. Stop what else is running and repeat it."
)


def warn_if_busy(cpu: Cpu) -> None:
    """Say on stderr if other processes use the machine."""
    if cpu.is_busy:
        print(
            f"nvium: warning: other processes keep {cpu.busy_cores:.1f} cores busy; figures "
            "show nothing until they are stopped",
            file=sys.stderr,
        )


def show(report: BenchReport | PromptsReport | TrainReport, *, as_json: bool) -> None:
    """Print a report; with JSON, say on stderr which pairs disagree."""
    if as_json:
        print(to_json(report))
        for entry in report.dtypes if isinstance(report, BenchReport) else ():
            if not entry.over_dense.conclusive:
                print(f"nvium: warning: {entry.dtype}: {_DISAGREE}", file=sys.stderr)
    elif isinstance(report, BenchReport):
        _show_decoding(report)
    elif isinstance(report, PromptsReport):
        _show_prompts(report)
    else:
        _show_training(report)


def _show_machine(report: Report) -> None:
    cpu = report.cpu
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    print(
        f"CPU: {cpu.name}, {cpu.num_cores} cores, {threads}; flags that matter: "
        f"{' '.join(cpu.flags) or 'none'}; torch {report.versions['torch']}"
    )
    if cpu.is_busy:
        print(f"Not alone: others kept {cpu.busy_cores:.1f} cores busy at the start.")


def _pairs(num_pairs: int, *, wanted: int) -> str:
    note = f" (interrupted; {wanted} were asked for)" if num_pairs < wanted else ""
    return f"{num_pairs} interleaved pairs{note}"


def _table(first: str, *columns: str, no_wrap: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=no_wrap)
    return table


def _draw(table: Table) -> None:
    Console(width=_WIDTH).print(table)


def _figure(value: float) -> str:
    """Return a number with three digits or more, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(ratio: Ratio) -> str:
    """Return the spread, with a question mark where the pairs disagree."""
    return f"{ratio.spread:.1%}" + ("" if ratio.conclusive else " ?")


# --- nvium bench ----------------------------------------------------------------------------------


def _show_decoding(report: BenchReport) -> None:
    forced = "routers decide" if report.forced_shares is None else "forced, routers run and read"
    print(
        f"{report.model}: {report.num_params:,} parameters, exits after layers "
        f"{', '.join(map(str, report.exits))} ({forced})\n"
        f"prompt {report.prompt_tokens} tokens, {report.new_tokens} new, "
        f"{report.batch} at once{f', {report.schedule}' if report.batch > 1 else ''}, "
        f"seed {report.seed}"
    )
    _show_machine(report)
    if report.device != "cpu":
        print(f"our engine on: {report.device}")
    for entry in report.dtypes:
        print(f"\n{entry.dtype}, {_pairs(entry.num_pairs, wanted=report.num_pairs_wanted)}")
        table = _table(
            "system", "type", "ms/token", "quartiles", "first\ntoken ms", "total ms", "tokens/s",
            "N-vium is", "spread",
        )  # fmt: skip
        ratios = [None, entry.over_dense, *entry.other_ratios]
        for system, ratio in zip(entry.systems, ratios, strict=True):
            style = "bold" if system.name == "N-vium" else None
            table.add_row(*_system_cells(system, ratio), style=style)
        _draw(table)
        print("\n".join([*_verdict(entry), *_details(entry)]))


def _system_cells(system: SystemFigures, ratio: Ratio | None) -> Sequence[str]:
    ms = system.ms_per_token
    is_peer = system.name not in OURS
    speed = ""
    if ratio is not None:
        speed = f"{ratio.ratio:.2f}x ({'faster' if ratio.ratio >= 1 else 'slower'})"
    return (
        f"{system.name} {system.version.split()[0]}" if is_peer else system.name,
        system.dtype,
        f"{ms.median:.3g}",
        f"{ms.q1:.3g} - {ms.q3:.3g}",
        f"{system.ttft_ms:.3g}",
        _figure(system.total_ms),
        _figure(system.tokens_per_s),
        speed,
        "" if ratio is None else _spread(ratio),
    )


def _verdict(entry: DtypeFigures) -> Iterator[str]:
    ratio = entry.over_dense
    limit = ""
    if entry.limit is not None and entry.fraction_of_limit is not None:
        limit = f" (limit {entry.limit:.2f}x, {entry.fraction_of_limit:.0%} of it)"
    yield f"N-vium over dense {ratio.ratio:.2f}x{limit}, spread {ratio.spread:.1%}"
    if not ratio.conclusive:
        yield _DISAGREE
    elif entry.exit_shares[-1] == 1:
        yield f"No token left early: that costs {1 / ratio.ratio - 1:.1%} over dense."
    elif ratio.ratio < 1:
        yield f"N-vium loses here: {1 / ratio.ratio:.2f}x as slow as dense."


def _details(entry: DtypeFigures) -> Iterator[str]:
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
    return (f"{name:22}{text}" for name, text in lines.items())


def _by_system(values: Mapping[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.3g} {unit}" for name, value in values.items())


# --- nvium bench --prompts ------------------------------------------------------------------------


def _show_prompts(report: PromptsReport) -> None:
    print(
        f"{report.model}: {report.num_questions} questions of {report.prompts}, "
        f"{report.num_trials} trials, at most {report.max_new_tokens} tokens per prompt"
    )
    _show_machine(report)
    for entry in report.dtypes:
        print(f"\n{entry.dtype}" + ("" if entry.is_complete else " (interrupted)"))
        table = _table(
            "category", "prompts", "cut", "N-vium ms/token", "dense ms/token", "N-vium tokens/s",
            "dense tokens/s", "speed-up", no_wrap=False,
        )  # fmt: skip
        for row in entry.categories:
            figures = [*row.ms_per_token.values(), *row.tokens_per_s.values()]
            table.add_row(
                row.category,
                str(row.num_prompts),
                str(row.num_truncated),
                *(f"{value:.3g}" for value in figures),
                f"{row.ratio:.2f}x",
            )
        _draw(table)
        print(
            f"mean of the categories {entry.ratio:.2f}x (limit {entry.limit:.2f}x at exit shares "
            f"{shown(entry.exit_shares)})\nms/token: all time over all tokens, the prompt's time "
            "included; tokens/s: after the first token; cut: prompts longer than the context"
        )


# --- nvium bench train ----------------------------------------------------------------------------


def _show_training(report: TrainReport) -> None:
    print(
        f"{report.config_file}, exits after layers {', '.join(map(str, report.exits))}\n"
        f"forward and backward of {report.batch} x {report.seq_len} tokens, seed {report.seed}"
    )
    _show_machine(report)
    compiled = ", layers compiled" if report.is_compiled else ""
    pairs = _pairs(report.num_pairs, wanted=report.num_pairs_wanted)
    print(f"\n{report.dtype} on {report.device}{compiled}, {pairs}")
    table = _table(
        "model", "parameters", "TFLOP", "ms/step", "quartiles", "tokens/s", "MFU", "time", "FLOPs",
        "time/\nFLOPs", "spread",
    )  # fmt: skip
    for system, ratio in zip(report.systems, [None, *report.ratios], strict=True):
        ms = system.step_ms
        cells = ["", "", "", ""]
        if ratio is not None:
            cells = [
                f"{ratio.time.ratio:.3f}x",
                f"{ratio.flop_ratio:.3f}x",
                f"{ratio.cost:.3f}",
                _spread(ratio.time),
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
    _draw(table)
    print("time, FLOPs: N-vium's over that model's; time/FLOPs 1 is what the operations say")
    memory = report.loss_memory
    print(
        f"loss memory {memory.nvium_mb:.1f} MB, of dense {memory.dense_mb:.1f} MB at as many live "
        f"logits ({memory.live_logit_rows} rows): {memory.ratio:.3f}x"
    )
    if not all(ratio.time.conclusive for ratio in report.ratios):
        print(_DISAGREE)
