"""Chi-square without scipy."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """Return the p-value of counts under probabilities; tokens of probability 0 must not occur."""
    counts, probs = counts.double(), probs.double()
    possible = probs > 0
    if counts[~possible].sum() > 0:
        return 0.0
    expected = probs[possible] / probs.sum() * counts.sum()
    assert expected.min() >= 5, "too few draws for a chi-square"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
