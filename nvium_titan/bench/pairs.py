"""Systems that take turns: the pairs of their runs, and what the pairs say.

Speed drifts with heat, neighbours and caches. Systems that take turns in one process drift
together, so the ratio of a pair says more than two medians. The module owns the term pair: one run
of every system on the same work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from nvium_titan.report.bench_records import Quartiles, Ratio

MAX_SPREAD = 0.15
"""Pairs whose ratios spread more than this are inconclusive."""

System = TypeVar("System")
Work = TypeVar("Work")
Run = TypeVar("Run")


def run_pairs(
    systems: Sequence[System],
    work: Sequence[Work],
    run: Callable[[System, Work], Run],
    *,
    on_run: Callable[[], None],
    settle_s: float = 0.0,
) -> list[list[Run]]:
    """Run all systems on one piece of work after the other, in turns.

    Each system warms up on the first piece. An interrupt (Ctrl-C) ends the pairs.

    Args:
        systems: What to compare.
        work: One piece per pair.
        run: Runs a system on a piece.
        on_run: Called after every run, warm-up included (`count_runs` in all).
        settle_s: Seconds to wait after each run of a pair.

    Returns:
        What `run` returned: for each pair one entry per system.

    Raises:
        KeyboardInterrupt: If interrupted before the first pair is complete.
    """
    for system in systems:
        run(system, work[0])
        on_run()
    pairs: list[list[Run]] = []
    try:
        for number, piece in enumerate(work):
            # The order alternates, so that no system always inherits the caches and the clock speed
            # of the same other one.
            order = range(len(systems))
            found = {}
            for index in order if number % 2 == 0 else reversed(order):
                found[index] = run(systems[index], piece)
                on_run()
                time.sleep(settle_s)
            pairs.append([found[index] for index in order])
    except KeyboardInterrupt:
        if not pairs:
            raise
    return pairs


def count_runs(num_systems: int, num_pairs: int) -> int:
    """Return how often `run_pairs` runs a system."""
    return num_systems * (1 + num_pairs)


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles around it, interpolated linearly between values."""
    if len(values) == 1:
        return Quartiles(q1=values[0], median=values[0], q3=values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(q1=q1, median=median, q3=q3)


def paired_ratio(over: str, above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the median of above / below, pair by pair, and how much the pairs disagree.

    Args:
        over: The system that N-vium is compared with.
        above: One system's time in each pair.
        below: The other system's time in the same pair.

    Example:
        Times 2, 3, 4 over 1, 1, 1 give the ratio 3, the interquartile range 1, the spread 1/3.
    """
    found = quartiles([a / b for a, b in zip(above, below, strict=True)])
    iqr = found.q3 - found.q1
    spread = iqr / found.median
    return Ratio(
        over=over,
        ratio=found.median,
        ratio_iqr=iqr,
        spread=spread,
        # A single pair has no spread to judge by.
        conclusive=len(above) > 1 and spread <= MAX_SPREAD,
    )
