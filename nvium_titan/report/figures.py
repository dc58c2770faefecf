"""Figures of a benchmark and of training runs. They need the extra plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nvium_titan.errors import DependencyError
from nvium_titan.report.bench_records import BenchReport
from nvium_titan.report.records import MetricsRow

_DPI = 130


def require_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises:
        DependencyError: If matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise DependencyError("figures need matplotlib: pip install 'nvium-titan[plots]'")


def plot_bench(report: BenchReport, out: Path) -> None:
    """Write a bar chart of milliseconds per token by system and type, with the limit, as a PNG.

    Args:
        report: As measured, or as read back by `read_report`.
        out: The file to write.

    Raises:
        DependencyError: If matplotlib is missing.
    """
    rows = [(entry, system) for entry in report.dtypes for system in entry.systems]
    figure, axes = _new_figure(width=8, height=1.4 + 0.42 * len(rows))
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
            label += f"  {entry.over_dense.ratio:.2f}x dense"
            if entry.limit is not None:
                at = entry.systems[1].ms_per_token.median / entry.limit
                axes.plot([at, at], [y - 0.45, y + 0.45], "k--", linewidth=1.5)
                label += f" (limit {entry.limit:.2f}x)"
            label += "" if entry.over_dense.conclusive else ", inconclusive"
        axes.text(ms.q3, y, label, va="center", fontsize=8)
    axes.plot([], [], "k--", linewidth=1.5, label="limit: dense time over the weights saved")
    axes.set_yticks(range(len(rows)), [f"{system.name}, {system.dtype}" for _, system in rows])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per token after the first", title=f"Decode, {report.model}")
    # Room for the labels beside the bars.
    axes.set_xlim(0, 1.6 * max(system.ms_per_token.q3 for _, system in rows))
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    figure.savefig(out, dpi=_DPI)


def plot_loss_curves(runs: Mapping[str, Sequence[MetricsRow]], out: Path) -> None:
    """Write the mixture's negative log-likelihood over steps as a PNG.

    Args:
        runs: Rows of `metrics.jsonl` by the name of the run.
        out: The file to write.

    Raises:
        DependencyError: If matplotlib is missing.
    """
    figure, axes = _new_figure(width=7, height=4.2)
    for index, (name, rows) in enumerate(runs.items()):
        for split, title, style, alpha in (
            ("train", "training", "-", 0.45), ("val", "validation", "o--", 1.0),
        ):  # fmt: skip
            points = [(row.step, row.mixture_nll) for row in rows if row.split == split]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style,
                    color=f"C{index}", alpha=alpha, markersize=4, label=f"{name}, {title}",
                )  # fmt: skip
    axes.set(xlabel="step", ylabel="negative log-likelihood, nats/token", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=_DPI)


def plot_exit_shares(rows: Sequence[MetricsRow], out: Path) -> None:
    """Write the share of each exit over steps, stacked, with the expected depth, as a PNG.

    Args:
        rows: Rows of `metrics.jsonl`; the training rows are drawn.
        out: The file to write.

    Raises:
        DependencyError: If matplotlib is missing.
    """
    rows = [row for row in rows if row.split == "train"]
    steps = [row.step for row in rows]
    shares = list(zip(*(row.exit_shares for row in rows), strict=True))
    figure, axes = _new_figure(width=7, height=4.2)
    axes.stackplot(steps, shares, labels=[f"exit {k}" for k in range(1, len(shares) + 1)])
    axes.plot(steps, [row.expected_depth for row in rows], "k--", label="expected depth")
    axes.set(
        xlabel="step", ylabel="share of tokens", title="Exits", ylim=(0, 1),
        xlim=(steps[0], max(steps[-1], steps[0] + 1)),
    )  # fmt: skip
    axes.legend(loc="lower left")
    figure.savefig(out, dpi=_DPI)


def _new_figure(*, width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and its axes; sizes in inches."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
