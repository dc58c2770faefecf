"""Loss curves and exit shares of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from nvium_titan.report.records import MetricsRow


def plot_loss_curves(runs: Mapping[str, Sequence[MetricsRow]], out: Path) -> None:
    """Write the mixture's negative log-likelihood over steps as a PNG.

    Args:
        runs: Rows of `metrics.jsonl` by the name of the run.
        out: The file to write.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, (name, rows) in enumerate(runs.items()):
        for split, style in (("train", "-"), ("val", "o--")):
            points = [(row.step, row.mixture_nll) for row in rows if row.split == split]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color=f"C{index}",
                    alpha=0.45 if split == "train" else 1.0,
                    markersize=4,
                    label=f"{name}, {'training' if split == 'train' else 'validation'}",
                )
    axes.set(xlabel="step", ylabel="negative log-likelihood, nats/token", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=130)


def plot_exit_shares(rows: Sequence[MetricsRow], out: Path) -> None:
    """Write the share of each exit over steps, stacked, with the expected depth, as a PNG.

    Args:
        rows: Rows of `metrics.jsonl`; the training rows are drawn.
        out: The file to write.
    """
    rows = [row for row in rows if row.split == "train"]
    steps = [row.step for row in rows]
    shares = list(zip(*(row.exit_shares for row in rows), strict=True))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(steps, shares, labels=[f"exit {k}" for k in range(1, len(shares) + 1)])
    axes.plot(steps, [row.expected_depth for row in rows], "k--", label="expected depth")
    axes.set(
        xlabel="step", ylabel="share of tokens", title="Exits", ylim=(0, 1),
        xlim=(steps[0], max(steps[-1], steps[0] + 1)),
    )  # fmt: skip
    axes.legend(loc="lower left")
    figure.savefig(out, dpi=130)
