"""The forward pass in plain torch operations: the slow twin of every other, on every device.

The layer is one function over explicit positions, so that it can run as it is and be captured in a
graph.

Shapes: T rows at hand, C columns (slots) attended, D width, F MLP width, G key/value heads, N heads
of queries and keys, H head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from nvium_titan.core.mixture import at_least_float32
from nvium_titan.core.shape import ModelShape
from nvium_titan.decode.forward.base import Forward, Group, TokenJob, TokenRun
from nvium_titan.decode.params import DecoderParams, LayerParams
from nvium_titan.decode.sampling import Draw, draw_token
from nvium_titan.decode.sequence import BufferPool, DecodeState, LayerSlots, SequenceBuffers


def rope_angles(shape: ModelShape, *, num_slots: int) -> Tensor:
    """Return by how much each rotary pair turns at each slot, shape (num_slots, H / 2), float64."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    return torch.outer(torch.arange(num_slots, dtype=torch.float64), shape.rope_theta**-exponents)


class Rope(NamedTuple):
    """What turns the heads of rows, or of all slots; at least float32."""

    cos_TH: Tensor
    """Cosine, twice: the features of a pair are half a head apart, as in Hugging Face."""
    sin_TH: Tensor
    """Sine, negative for the first feature of a pair."""

    @classmethod
    def table(cls, params: DecoderParams, *, num_slots: int) -> Rope:
        """Return the table of all slots, on the device of the weights."""
        angles = rope_angles(params.shape, num_slots=num_slots)
        dtype = torch.float64 if params.dtype == torch.float64 else torch.float32
        cos, sin = angles.cos(), angles.sin()
        return cls(
            torch.cat((cos, cos), 1).to(params.device, dtype),
            torch.cat((-sin, sin), 1).to(params.device, dtype),
        )

    def at(self, positions_T: Tensor) -> Rope:
        """Return the rows of some positions, which only the device knows."""
        return Rope(*(table.index_select(0, positions_T) for table in self))

    def of(self, groups: Sequence[Group]) -> Rope:
        """Return the rows of some groups."""
        parts = [[table[at : at + rows] for table in self] for _, at, rows in groups]
        return Rope(*map(_stack, map(list, zip(*parts, strict=True))))


class Seen(NamedTuple):
    """One sequence's share of a layer call: its rows, and what they see."""

    slots: LayerSlots
    """Keys and values of this layer; written."""
    positions_T: Tensor
    """Where its rows stand, int64."""
    mask_TC: Tensor | None
    """0 where a row sees a slot, else -inf; None if every row sees all columns."""
    columns: int
    """Slots to attend over, from the first."""


class RmsNorm:
    """RMSNorm of rows as wide as the model, x / sqrt(mean(x^2) + eps)."""

    def __init__(self, params: DecoderParams) -> None:
        """Take width, epsilon, type and device of a model."""
        width, self._eps = params.shape.dim, params.shape.norm_eps
        self._root = math.sqrt(width)
        self._zero, self._least = torch.tensor(
            [0.0, math.sqrt(width * self._eps)],
            dtype=at_least_float32(params.embedding_VD[:0]).dtype,
            device=params.device,
        ).unbind()

    def __call__(self, x_TD: Tensor, gain_D: Tensor) -> Tensor:
        """Return the norm of the rows times a gain, a new tensor."""
        if x_TD.device.type != "cpu" or x_TD.dtype != self._zero.dtype:
            return F.rms_norm(x_TD, gain_D.shape, gain_D, self._eps)
        # F.rms_norm is seven operations on a CPU, which at a few rows take twice as long.
        size_T1 = torch.hypot(torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True), self._least)
        return torch.addcdiv(self._zero, x_TD, size_T1, value=self._root).mul_(gain_D)


class TorchForward(Forward):
    """The `Forward` in torch operations. Read-only after construction."""

    buffer_pool: BufferPool | None = None

    def __init__(self, params: DecoderParams, *, num_slots: int) -> None:
        """Build the rotary table.

        Args:
            params: The weights; int8 ones are computed with as the numbers that they stand for.
            num_slots: Largest number of slots that any sequence will have.
        """
        self.params = params.dense()
        self.state_dtype = params.dtype
        self.rope = Rope.table(params, num_slots=num_slots)
        self._blocks = params.shape.blocks
        self._norm = RmsNorm(params)

    @override
    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        rows_TD = buffers.boundary_SD[0].narrow(0, first, len(token_ids))
        ids_T = torch.tensor(token_ids, device=self.params.device)
        torch.index_select(self.params.embedding_VD, 0, ids_T, out=rows_TD)

    @override
    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Linears see all rows at once, attention one group at a time. No host reads."""
        device = self.params.device
        positions = [torch.arange(at, at + rows, device=device) for _, at, rows in groups]
        masks = [
            causal_mask(positions_T, at + rows, self.state_dtype) if rows > 1 else None
            for positions_T, (_, at, rows) in zip(positions, groups, strict=True)
        ]
        x_TD = torch.cat([b.boundary_SD[block_index][at : at + rows] for b, at, rows in groups])
        rope = self.rope.of(groups)
        for index in self._blocks[block_index]:
            seen = [
                Seen(buffers.layers[index], positions_T, mask_TC, at + rows)
                for (buffers, at, rows), positions_T, mask_TC in zip(
                    groups, positions, masks, strict=True
                )
            ]
            run_layer(x_TD, self.params.layers[index], rope, seen, norm=self._norm)
        start = 0
        for buffers, first, rows in groups:
            above_TD = buffers.boundary_SD[block_index + 1][first : first + rows]
            above_TD.copy_(x_TD[start : start + rows])
            start += rows

    @override
    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        return self._norm(h_TD, self.params.exits[exit_index].norm_D)

    @override
    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
        router = self.params.exits[junction_index].router
        assert router is not None, "the last exit has no router"
        hidden_TR = F.gelu(torch.mm(n_TD, router.fc1.weight_IO).add_(router.fc1_bias_R))
        score_TD = torch.mm(hidden_TR, router.fc2.weight_IO).add_(router.fc2_bias_D)
        normed_TD = self._norm(at_least_float32(score_TD), router.norm_D)
        return torch.addmv(router.leave_bias, normed_TD, router.leave_D)

    @override
    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
        adapter = self.params.exits[exit_index].adapter
        if adapter is None:
            return n_TD
        hidden_TA = F.silu(torch.mm(n_TD, adapter.inner.weight_IO), inplace=True)
        return torch.mm(hidden_TA, adapter.outer.weight_IO).add_(n_TD)

    @override
    def logits(self, o_TD: Tensor) -> Tensor:
        return torch.mm(o_TD, self.params.head.weight_IO)

    @override
    def draw(self, logits_V: Tensor, draw: Draw) -> int:
        return draw_token(logits_V, draw)

    def run_token(self, state: DecodeState, job: TokenJob, *, begins_next: bool) -> TokenRun | None:
        """Decline: here a token is cheapest in pieces."""
        return None


def run_layer(
    x_TD: Tensor, layer: LayerParams, rope: Rope, seen: Sequence[Seen], *, norm: RmsNorm
) -> None:
    """Run a layer in place; writes the rows' keys and values.

    Everything is an argument, so that one compilation serves all layers.

    Args:
        x_TD: The residual stream, the rows of all sequences; written.
        layer: The weights.
        rope: Of the rows.
        seen: The sequences, in the order of the rows.
        norm: RMSNorm, without its gain.
    """
    groups, head_dim = seen[0].slots.keys_1GSH.shape[1], rope.cos_TH.shape[1]
    qkv_TW = torch.mm(norm(x_TD, layer.attn_norm_D), layer.qkv.weight_IO)
    heads_1NTH = qkv_TW.view(1, len(x_TD), -1, head_dim).transpose(1, 2)
    num_queries = heads_1NTH.shape[1] - 2 * groups
    _turn_(heads_1NTH[:, : num_queries + groups], rope)
    attended = []
    start = 0
    for (kv_1GSH, keys_1GSH, values_1GSH), positions_T, mask_TC, columns in seen:
        rows = len(positions_T)
        part_1NTH = heads_1NTH if len(seen) == 1 else heads_1NTH[:, :, start : start + rows]
        start += rows
        kv_1GSH.index_copy_(2, positions_T, part_1NTH[:, num_queries:])
        attended_1NTH = F.scaled_dot_product_attention(
            part_1NTH[:, :num_queries],
            keys_1GSH.narrow(2, 0, columns),
            values_1GSH.narrow(2, 0, columns),
            attn_mask=mask_TC,
            enable_gqa=num_queries > groups,
        )
        attended.append(attended_1NTH.transpose(1, 2).reshape(rows, -1))
    x_TD.addmm_(_stack(attended), layer.attn_out.weight_IO)
    gate_up_T2F = torch.mm(norm(x_TD, layer.mlp_norm_D), layer.gate_up.weight_IO)
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    x_TD.addmm_(F.silu(gate_TF, inplace=True).mul_(up_TF), layer.down.weight_IO)


def causal_mask(positions_T: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return 0 where a row sees a slot, else -inf, shape (T, columns)."""
    slots_C = torch.arange(columns, device=positions_T.device)
    hidden_TC = slots_C > positions_T.unsqueeze(1)
    return torch.zeros_like(hidden_TC, dtype=dtype).masked_fill_(hidden_TC, -torch.inf)


def _turn_(heads_1NTH: Tensor, rope: Rope) -> None:
    """Apply RoPE in place: (x cos - y sin, y cos + x sin), in the type of the table."""
    cos_TH, sin_TH = rope
    wide_1NTH = heads_1NTH.to(cos_TH.dtype)
    swapped_1NTH = wide_1NTH.roll(cos_TH.shape[1] // 2, -1)
    wide_1NTH.mul_(cos_TH).addcmul_(swapped_1NTH, sin_TH)
    if wide_1NTH is not heads_1NTH:
        heads_1NTH.copy_(wide_1NTH)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
