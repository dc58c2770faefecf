"""How far apart two right results may lie, from the arithmetic alone.

In which order a sum is made, and so how it is rounded, is up to the machine: its vector width, its
caches, its libraries. A gap seen on one machine bounds nothing on the next. What bounds it is the
type, how often a number is rounded on its way, and how large the terms are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvium_titan.core.shape import ModelShape


def rounding(dtype: torch.dtype, num_roundings: int) -> float:
    """Return the largest relative error of a number that is rounded `num_roundings` times.

    A rounding is at most u = eps / 2, so n of them are at most n u. Where they are independent, as
    those of a long sum nearly are, they exceed 8 sqrt(n) u with a chance below 2 exp(-8^2 / 2), or
    1e-13 (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).

    A sum or a product of n terms is n roundings; torch's own reductions add in a tree, so theirs
    are log2(n). "Relative" means to the sum of the terms' magnitudes, which where terms cancel is
    more than the result. Of two rounded results, count the roundings of both.
    """
    unit = torch.finfo(dtype).eps / 2
    return min(num_roundings, 8 * math.sqrt(num_roundings)) * unit


def model_rounding(dtype: torch.dtype, shape: ModelShape, *, num_tokens: int) -> float:
    """Return the largest error of what a model computes, relative to its size.

    It counts the roundings between a token and a logit. The norms keep the size of what they are
    given, so an error made early is as large at the end.

    Args:
        dtype: Of weights and activations.
        shape: Of the model.
        num_tokens: Positions that attention sums over.
    """
    if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
        # Sums are made in float32. A product rounds a weight and its result; norms, rotation,
        # softmax, SiLU, gating and the residual sums round their results.
        in_layer = 20
    else:
        # Two norms, q, output and gate; a score; softmax and mean of the values; down.
        in_layer = 5 * shape.dim + shape.head_dim + 2 * num_tokens + shape.ffn_dim
    # An exit's norm, adapter and head are less than one more layer.
    return rounding(dtype, (shape.num_layers + 1) * in_layer)


def assert_alike(
    got: Tensor, want: Tensor, *, tolerance: float, as_a_whole: float | None = None
) -> None:
    """Check that two tensors differ by roundings alone.

    Args:
        got: A result.
        want: What it should be.
        tolerance: Of an element, relative to the largest one: from `rounding`.
        as_a_whole: Of the norm of the difference, relative to the norm; default: a quarter of
            `tolerance`, two of the eight standard deviations that it leaves a single element.
    """
    if not want.numel():
        return
    got, want = got.double(), want.double()
    atol = tolerance * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=atol)
    gap, size = float((got - want).norm()), float(want.norm())
    assert gap <= (as_a_whole or tolerance / 4) * size, (
        f"differ by {gap:.1e} at a norm of {size:.1e}"
    )
