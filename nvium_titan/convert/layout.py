"""Tensors between the native layout and the bundle's: names, and the rotary permutation.

torchtitan rotates adjacent pairs (0,1), (2,3), ...; Hugging Face rotates dimension i with
i + head_dim / 2. The rows of q and k are permuted head by head, so both give the same attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from nvium_titan.convert.names import native_to_hf
from nvium_titan.core.shape import ModelShape


def to_rotate_half(weight_OI: Tensor, *, num_heads: int) -> Tensor:
    """Return a q or k projection in HF's layout.

    Args:
        weight_OI: Rows in torchtitan's layout; O = num_heads * head_dim outputs, I inputs.
        num_heads: Heads of this projection: key heads for k under grouped-query attention.
    """
    pairs = weight_OI.view(num_heads, -1, 2, weight_OI.shape[1])
    return pairs.transpose(1, 2).reshape(weight_OI.shape)


def to_interleaved(weight_OI: Tensor, *, num_heads: int) -> Tensor:
    """Return a q or k projection in torchtitan's layout; the inverse of `to_rotate_half`."""
    halves = weight_OI.view(num_heads, 2, -1, weight_OI.shape[1])
    return halves.transpose(1, 2).reshape(weight_OI.shape)


def to_bundle(tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return native tensors under the bundle's names and layout.

    Args:
        tensors: By native name; names that are not the model's parameters are passed over, and
            parameters may be missing (a pipeline stage holds some).
        shape: The shape of the model.
    """
    names = native_to_hf(shape)
    return {
        names[native]: _permuted(names[native], tensor, shape, to_rotate_half)
        for native, tensor in tensors.items()
        if native in names
    }


def to_native(tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return a bundle's tensors under native names and layout; the inverse of `to_bundle`."""
    natives = {hf: native for native, hf in native_to_hf(shape).items()}
    return {
        natives[hf]: _permuted(hf, tensor, shape, to_interleaved)
        for hf, tensor in tensors.items()
        if hf in natives
    }


def _permuted(
    hf_name: str, tensor: Tensor, shape: ModelShape, permute: Callable[..., Tensor]
) -> Tensor:
    if hf_name.endswith("q_proj.weight"):
        return permute(tensor, num_heads=shape.num_heads)
    if hf_name.endswith("k_proj.weight"):
        return permute(tensor, num_heads=shape.num_kv_heads)
    return tensor
