"""Int8 weights: every matrix as integers in [-127, 127] with one scale per output.

A quantised bundle stores `X.weight` as int8 beside `X.weight_scale`. The same rounding is applied
to a bundle of any other type that is decoded with int8 weights, so both give the same numbers.

Scales keep the upper 17 bits of a float32's 24, so their products with these integers are exact in
float32. Quantising dequantised float32 weights therefore gives the same integers and scales again,
to the bit.

Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nvium_titan.errors import BundleError

SCALE_SUFFIX = "_scale"
# The 7 lowest bits of a float32 are left to the factor of at most 127.
_SCALE_BITS = -128


def is_quantized(name: str, num_axes: int) -> bool:
    """Return whether a tensor is stored as int8: all matrices but the routers' two-row heads."""
    return num_axes == 2 and not name.startswith("router_heads.")


def int8_scales(weight_OI: Tensor) -> Tensor:
    """Return the step of each output's integers, max |w| / 127, shape (O,), float32.

    1 for a row of zeros, or of weights so small that their step is no normal float32. Of
    dequantised float32 weights: the very scales that they were made with.
    """
    scales_O = weight_OI.float().abs().amax(1) / 127
    return torch.where(scales_O < torch.finfo(torch.float32).tiny, 1, scales_O)


def quantize_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with every matrix as int8, each followed by its scales.

    Raises:
        BundleError: If a matrix holds NaN or an infinity, which no integer stands for.
    """
    result = {}
    for name, tensor in tensors.items():
        if is_quantized(name, tensor.ndim):
            scales_O = (int8_scales(tensor).view(torch.int32) & _SCALE_BITS).view(torch.float32)
            if not bool(scales_O.isfinite().all()):
                raise BundleError(
                    f"tensor {name}: holds NaN or infinity and cannot be int8; take weights from "
                    "before the divergence"
                )
            result[name] = (tensor.float() / scales_O[:, None]).round().to(torch.int8)
            result[name + SCALE_SUFFIX] = scales_O
        else:
            result[name] = tensor
    return result


def dequantize(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors in one dtype, int8 matrices times their scales, without the scales."""
    result = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            tensor = tensor * tensors[name + SCALE_SUFFIX][:, None]
        if not name.endswith(SCALE_SUFFIX):
            result[name] = tensor.to(dtype)
    return result
