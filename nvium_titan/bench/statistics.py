"""Medians, quartiles and paired ratios of interleaved measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nvium_titan.report.bench_records import Quartiles, Ratio

MAX_SPREAD = 0.15
"""A run whose ratios spread more than this shows nothing and must be repeated."""


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles around it; a quartile between two values is linear."""
    if len(values) == 1:
        return Quartiles(q1=values[0], median=values[0], q3=values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(q1=q1, median=median, q3=q3)


def paired_ratio(over: str, slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """Return the median of slow / fast, pair by pair, and how much the pairs disagree.

    Args:
        over: Name of the system in the numerator.
        slow: Its time in each pair.
        fast: The other system's time in the same pair.

    Example:
        Times 2, 3, 4 over 1, 1, 1 give the ratio 3, the interquartile range 1, the spread 1/3.
    """
    found = quartiles([a / b for a, b in zip(slow, fast, strict=True)])
    iqr = found.q3 - found.q1
    spread = iqr / found.median
    return Ratio(
        over=over,
        ratio=found.median,
        ratio_iqr=iqr,
        spread=spread,
        # One pair has no spread to judge by.
        conclusive=len(slow) > 1 and spread <= MAX_SPREAD,
    )
