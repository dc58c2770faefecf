"""The bar chart of a benchmark."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from nvium_titan.report.bench_records import BenchReport


def plot_bench(report: BenchReport, out: Path) -> None:
    """Write milliseconds per token by type and system, with the bandwidth limit, as a PNG.

    Args:
        report: As measured, or as read back by `read_report`.
        out: The file to write.
    """
    rows = [(entry, system) for entry in report.dtypes for system in entry.systems]
    figure = Figure(figsize=(8, 1.4 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, (entry, system) in enumerate(rows):
        ms = system.ms_per_token
        is_nvium = system.name == "N-vium"
        axes.barh(
            y,
            ms.median,
            xerr=[[ms.median - ms.q1], [ms.q3 - ms.median]],
            color="C1" if is_nvium else "C0",
            alpha=1.0 if is_nvium else 0.55,
            error_kw={"elinewidth": 1, "capsize": 3},
        )
        label = f" {ms.median:.3g}"
        if is_nvium:
            label += f"  {entry.ratio:.2f}x dense"
            if entry.limit is not None:
                at = entry.systems[1].ms_per_token.median / entry.limit
                axes.plot([at, at], [y - 0.45, y + 0.45], "k--", linewidth=1.5)
                label += f" (limit {entry.limit:.2f}x)"
            label += "" if entry.conclusive else ", inconclusive"
        axes.text(ms.q3, y, label, va="center", fontsize=8)
    axes.plot([], [], "k--", linewidth=1.5, label="limit: dense time over the weights saved")
    axes.set_yticks(range(len(rows)), [f"{system.name}, {system.dtype}" for _, system in rows])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per token after the first", title=f"Decode, {report.model}")
    slowest = max(system.ms_per_token.q3 for _, system in rows)
    axes.set_xlim(0, 1.6 * slowest)  # room for the figures beside the bars
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    figure.savefig(out, dpi=130)
