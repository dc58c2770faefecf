"""Tensors between the native layout and the bundle's: names, and the rotary permutation.

torchtitan rotates adjacent pairs (0,1), (2,3), ...; Hugging Face rotates dimension i with
i + head_dim / 2. The rows of q and k are permuted head by head, so both give the same attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from nvium_titan.convert.names import native_to_hf
from nvium_titan.core.cost import ModelDims


def to_rotate_half(weight_OI: Tensor, *, num_heads: int) -> Tensor:
    """Return a q or k projection in HF's layout.

    Args:
        weight_OI: Rows in torchtitan's layout; O = num_heads * head_dim outputs, I inputs.
        num_heads: Heads of this projection: key heads for k under grouped-query attention.
    """
    num_rows, num_inputs = weight_OI.shape
    pairs = weight_OI.view(num_heads, num_rows // num_heads // 2, 2, num_inputs)
    return pairs.transpose(1, 2).reshape(num_rows, num_inputs)


def to_interleaved(weight_OI: Tensor, *, num_heads: int) -> Tensor:
    """Return a q or k projection in torchtitan's layout; the inverse of `to_rotate_half`."""
    num_rows, num_inputs = weight_OI.shape
    halves = weight_OI.view(num_heads, 2, num_rows // num_heads // 2, num_inputs)
    return halves.transpose(1, 2).reshape(num_rows, num_inputs)


def names_of(dims: ModelDims) -> dict[str, str]:
    """Return the HF name of every native parameter of a shape."""
    return native_to_hf(
        dims.plan, final_adapter=dims.adapter_dim > 0, tie_embeddings=dims.tie_embeddings
    )


def to_bundle(tensors: Mapping[str, Tensor], dims: ModelDims) -> dict[str, Tensor]:
    """Return native tensors under the bundle's names and layout.

    Args:
        tensors: By native name; names that are not the model's parameters are passed over, and
            parameters may be missing (a pipeline stage holds some).
        dims: The shape of the model.
    """
    names = names_of(dims)
    return {
        names[native]: _permuted(names[native], tensor, dims, to_rotate_half)
        for native, tensor in tensors.items()
        if native in names
    }


def to_native(tensors: Mapping[str, Tensor], dims: ModelDims) -> dict[str, Tensor]:
    """Return a bundle's tensors under native names and layout; the inverse of `to_bundle`."""
    natives = {hf: native for native, hf in names_of(dims).items()}
    return {
        natives[hf]: _permuted(hf, tensor, dims, to_interleaved)
        for hf, tensor in tensors.items()
        if hf in natives
    }


def _permuted(
    hf_name: str, tensor: Tensor, dims: ModelDims, permute: Callable[..., Tensor]
) -> Tensor:
    if hf_name.endswith("q_proj.weight"):
        return permute(tensor, num_heads=dims.num_heads)
    if hf_name.endswith("k_proj.weight"):
        return permute(tensor, num_heads=dims.num_kv_heads)
    return tensor
