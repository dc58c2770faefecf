"""The rotary permutation between torchtitan's layout and Hugging Face's.

torchtitan rotates adjacent pairs (0,1), (2,3), ...; HF rotates dimension i with i + head_dim / 2.
The rows of q and k are permuted head by head, so both give the same attention.
"""

from __future__ import annotations

from torch import Tensor


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
