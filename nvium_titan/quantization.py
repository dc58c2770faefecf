"""Int8 weights: every matrix as integers in [-127, 127] with one scale per output.

A quantised bundle stores `X.weight` as int8 beside `X.weight_scale`. The same rounding is applied
to a bundle of any other type that is decoded with int8 weights, so both give the same numbers.

Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE_SUFFIX = "_scale"


def is_quantized(name: str, num_axes: int) -> bool:
    """Return whether a tensor is stored as int8: all matrices but the routers' two-row heads."""
    return num_axes == 2 and not name.startswith("router_heads.")


def int8_scales(weight_OI: Tensor) -> Tensor:
    """Return the step of each output's integers, max |w| / 127, shape (O,), float32.

    1 for a row of zeros. Applied to its own result times integers that reach 127, it gives the same
    scales again, up to one rounding.
    """
    largest_O = weight_OI.float().abs().amax(1)
    return torch.where(largest_O > 0, largest_O / 127, 1)


def quantize_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with every matrix as int8, each followed by its scales."""
    result = {}
    for name, tensor in tensors.items():
        if is_quantized(name, tensor.ndim):
            scales_O = int8_scales(tensor)
            result[name] = (tensor.float() / scales_O[:, None]).round().to(torch.int8)
            result[name + SCALE_SUFFIX] = scales_O
        else:
            result[name] = tensor
    return result


def dequantize(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors in one dtype, int8 matrices times their scales."""
    return {
        name: (tensor * tensors[name + SCALE_SUFFIX][:, None] if tensor.dtype == torch.int8 else tensor).to(dtype)
        for name, tensor in tensors.items()
        if not name.endswith(SCALE_SUFFIX)
    }
