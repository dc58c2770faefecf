"""Check how many launches a token takes."""

from __future__ import annotations

from nvium_titan.bench.graphs import ShapeFigures
from nvium_titan.decode.forward.graphs.forward import LAUNCHES_PER_TOKEN


def launch_failures(figures: ShapeFigures) -> list[str]:
    """Return what is wrong with the launches of tokens that run as one graph, a sentence each."""
    failures = []
    for mode in figures.modes:
        launches, name = mode.launches, f"{figures.shape}, {mode.name}"
        if launches.num_skipped and mode.name != "blocks":
            failures.append(f"{name}: {launches.num_skipped} tokens did not run as a graph")
        if mode.name not in ("tokens", "ahead"):
            continue
        if launches.graphs + launches.copies != LAUNCHES_PER_TOKEN:
            failures.append(
                f"{name}: {launches.graphs} graphs and {launches.copies} copies per token, "
                f"documented are {LAUNCHES_PER_TOKEN} launches"
            )
        if launches.profiled_graphs not in (None, launches.graphs):
            failures.append(
                f"{name}: the profiler saw {launches.profiled_graphs} graphs per token, the "
                f"engine counted {launches.graphs}"
            )
    return failures
