"""The forward pass in plain torch operations: the slow twin of every other, on every device.

The layer is one function over explicit positions, so that it can run as it is and be captured in a
graph.

Shapes: T rows at hand, C columns (slots) attended, D width, F MLP width, G key/value heads, N heads
of queries and keys, H head width, V vocabulary.
"""

from __future__ import annotations

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
from nvium_titan.decode.sequence import BufferPool, DecodeState, SequenceBuffers


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
        """Return the rows of some positions."""
        return Rope(*(table.index_select(0, positions_T) for table in self))


class Seen(NamedTuple):
    """One sequence's share of a layer call: its rows, and what they see."""

    slots_GSH: Tensor
    """Keys (first half of the heads) and values of this layer; written."""
    positions_T: Tensor
    """Where its rows stand, int64."""
    mask_TC: Tensor | None
    """0 where a row sees a slot, else -inf; None if every row sees all columns."""
    columns: int
    """Slots to attend over, from the first."""


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

    @override
    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        rows_TD = buffers.boundary_SD[0].narrow(0, first, len(token_ids))
        ids_T = torch.tensor(token_ids, device=self.params.device)
        torch.index_select(self.params.embedding_VD, 0, ids_T, out=rows_TD)

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Linears see all rows at once, attention one group at a time. No host reads."""
        shape = self.params.shape
        seen = [self._seen(group) for group in groups]
        rope = self.rope.at(_stack([part.positions_T for part in seen]))
        x_TD = _stack(
            [
                buffers.boundary_SD[block_index].narrow(0, first, rows)
                for buffers, first, rows in groups
            ]
        )
        for index in shape.blocks[block_index]:
            in_layer = [part._replace(slots_GSH=part.slots_GSH[index]) for part in seen]
            x_TD = run_layer(x_TD, self.params.layers[index], rope, in_layer, eps=shape.norm_eps)
        parts = torch.split(x_TD, [group.rows for group in groups])
        for (buffers, first, rows), part_TD in zip(groups, parts, strict=True):
            buffers.boundary_SD[block_index + 1].narrow(0, first, rows).copy_(part_TD)

    def _seen(self, group: Group) -> Seen:
        """Return a group's share, of all layers yet."""
        buffers, first, rows = group
        positions_T = torch.arange(first, first + rows, device=self.params.device)
        mask_TC = None if rows == 1 else causal_mask(positions_T, first + rows, self.params.dtype)
        return Seen(buffers.kv_LGSH, positions_T, mask_TC, first + rows)

    @override
    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        return _rms_norm(h_TD, self.params.exits[exit_index].norm_D, self.params.shape.norm_eps)

    @override
    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
        router = self.params.exits[junction_index].router
        assert router is not None, "the last exit has no router"
        hidden_TR = F.gelu(torch.addmm(router.fc1_bias_R, n_TD, router.fc1.weight_IO))
        score_TD = torch.addmm(router.fc2_bias_D, hidden_TR, router.fc2.weight_IO)
        score_TD = at_least_float32(score_TD)
        normed_TD = _rms_norm(score_TD, router.norm_D, self.params.shape.norm_eps)
        return torch.addmv(router.leave_bias, normed_TD, router.leave_D)

    @override
    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
        adapter = self.params.exits[exit_index].adapter
        if adapter is None:
            return n_TD
        hidden_TA = F.silu(torch.mm(n_TD, adapter.inner.weight_IO))
        return torch.addmm(n_TD, hidden_TA, adapter.outer.weight_IO)

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
    x_TD: Tensor,
    layer: LayerParams,
    rope: Rope,
    seen: Sequence[Seen],
    *,
    eps: float,
) -> Tensor:
    """Return the residual stream behind a layer; writes the rows' keys and values.

    Everything is an argument, so that one compilation serves all layers.

    Args:
        x_TD: The residual stream, the rows of all sequences.
        layer: The weights.
        rope: Of the rows.
        seen: The sequences, in the order of the rows.
        eps: Of both norms.
    """
    slots_GSH = seen[0].slots_GSH
    groups, head_dim = slots_GSH.shape[0] // 2, slots_GSH.shape[2]
    normed_TD = _rms_norm(x_TD, layer.attn_norm_D, eps)
    heads_TNH = torch.mm(normed_TD, layer.qkv.weight_IO).view(len(x_TD), -1, head_dim)
    num_queries = heads_TNH.shape[1] - 2 * groups
    _turn_(heads_TNH[:, : num_queries + groups], rope)
    parts = []
    start = 0
    for part in seen:
        rows_RNH = heads_TNH[start : start + len(part.positions_T)].transpose(0, 1)
        start += len(part.positions_T)
        part.slots_GSH.index_copy_(1, part.positions_T, rows_RNH[num_queries:])
        seen_1GCH = part.slots_GSH[:, : part.columns].unsqueeze(0)
        out_1NRH = F.scaled_dot_product_attention(
            rows_RNH[:num_queries].unsqueeze(0),
            seen_1GCH[:, :groups],
            seen_1GCH[:, groups:],
            attn_mask=part.mask_TC,
            enable_gqa=num_queries > groups,
        )
        parts.append(out_1NRH[0].transpose(0, 1).flatten(1))
    attended_TQ = _stack(parts)
    x_TD = torch.addmm(x_TD, attended_TQ, layer.attn_out.weight_IO)
    normed_TD = _rms_norm(x_TD, layer.mlp_norm_D, eps)
    gate_TF, up_TF = torch.mm(normed_TD, layer.gate_up.weight_IO).chunk(2, dim=-1)
    return torch.addmm(x_TD, F.silu(gate_TF) * up_TF, layer.down.weight_IO)


def causal_mask(positions_T: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return 0 where a row sees a slot, else -inf, shape (T, columns)."""
    slots_C = torch.arange(columns, device=positions_T.device)
    hidden_TC = slots_C > positions_T.unsqueeze(1)
    return torch.zeros_like(hidden_TC, dtype=dtype).masked_fill_(hidden_TC, -torch.inf)


def _rms_norm(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_TD, gain_D.shape, gain_D, eps)


def _turn_(heads_TNH: Tensor, rope: Rope) -> None:
    """Apply RoPE in place: (x cos - y sin, y cos + x sin), in the type of the table."""
    wide_TNH = heads_TNH.to(rope.cos_TH.dtype)
    swapped_TNH = wide_TNH.roll(wide_TNH.shape[-1] // 2, -1)
    wide_TNH.mul_(rope.cos_TH.unsqueeze(1)).addcmul_(swapped_TNH, rope.sin_TH.unsqueeze(1))
    if wide_TNH.dtype != heads_TNH.dtype:
        heads_TNH.copy_(wide_TNH)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
