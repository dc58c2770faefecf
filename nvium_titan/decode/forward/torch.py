"""The forward pass of inference: blocks of layers over a static cache, junctions, the head.

The model holds weights and constant tables only; every tensor that a sequence writes lives in its
`SequenceBuffers`. At small sizes the Python and dispatch time of each operation decides the speed,
so a layer is few operations, nearly all into preallocated work space.

RMSNorm(x) is computed as the first half of LayerNorm([x, -x]), whose mean is zero and whose
variance is mean(x^2): one fused kernel with float32 moments on every device, where a composed
RMSNorm on the CPU is six operations. "2D" in a shape is such a pair.

Shapes: T rows at hand, C columns (slots) attended, D width, F MLP width, G key/value heads,
R query heads per key/value head, M = R T, H head width, P = H / 2 rotary pairs, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nvium_titan.bundle import BundleConfig
from nvium_titan.core.mixture import at_least_float32
from nvium_titan.decode.deferred import DECODE_BUCKETS
from nvium_titan.decode.forward.base import Group, TokenRunner
from nvium_titan.decode.kv_cache import BufferPool, GroupViews, Scratch, SequenceBuffers
from nvium_titan.decode.params import DecoderParams, LayerParams
from nvium_titan.decode.sampling import Sampler


def rope_table(config: BundleConfig, *, num_slots: int) -> Tensor:
    """Return what turns each rotary pair at each slot, shape (S, P), complex128."""
    exponent_P = (
        torch.arange(0, config.shape.head_dim, 2, dtype=torch.float64) / config.shape.head_dim
    )
    angle_SP = torch.outer(
        torch.arange(num_slots, dtype=torch.float64), config.shape.rope_theta**-exponent_P
    )
    return torch.polar(torch.ones_like(angle_SP), angle_SP)


class _Part(NamedTuple):
    """One group's share of a block call: views per layer where there is a tuple."""

    views: GroupViews
    x_TD: Tensor
    below_TD: Tensor
    above_TD: Tensor
    rope_T1P: Tensor
    keys_GHC: tuple[Tensor, ...]
    values_GCH: tuple[Tensor, ...]
    slots_GTH: tuple[Tensor, ...]
    mask_TC: Tensor | None


class DecoderModel:
    """The `BlockModel` in torch operations. Read-only after construction."""

    looks_ahead = False

    def __init__(self, params: DecoderParams, *, num_slots: int) -> None:
        """Build the rotary table.

        Args:
            params: The weights.
            num_slots: Largest number of slots that any sequence will have.
        """
        config = params.config
        self.params = params
        self.state_dtype = params.dtype
        self.sampler: Sampler | None = None
        self.token_runner: TokenRunner | None = None
        self.buffer_pool: BufferPool | None = None
        self.blocks = tuple(
            tuple(params.layers[index] for index in block) for block in config.shape.blocks
        )
        self._width = config.shape.dim
        self._eps = config.shape.norm_eps
        self._is_low_precision = params.is_low_precision
        self._scale = config.shape.head_dim**-0.5 if self._is_low_precision else 1.0
        is_double = params.dtype == torch.float64
        self._rope_S1P = (
            rope_table(config, num_slots=num_slots)
            .to(device=params.device, dtype=torch.complex128 if is_double else torch.complex64)
            .unsqueeze(1)
        )
        self._head_DV = params.head_VD.t()

    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        """Write the embeddings of `token_ids` at positions `first`, `first` + 1, ..."""
        rows_TD = buffers.boundary_SD[0].narrow(0, first, len(token_ids))
        if len(token_ids) == 1:
            rows_TD.copy_(self.params.embedding_VD[token_ids[0]])
        else:
            ids_T = torch.tensor(token_ids, device=self.params.device)
            torch.index_select(self.params.embedding_VD, 0, ids_T, out=rows_TD)

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Run the layers of one block on the rows of some sequences; see `BlockModel`.

        The linears see all rows at once, attention one group at a time. No host reads. Allocates
        the attention scores and the normed rows.

        Args:
            block_index: Which block, from 0.
            groups: Their rows together fit into the first one's work space.
        """
        work = groups[0].buffers.work.scratch(sum(group.rows for group in groups))
        starts = tuple(accumulate((group.rows for group in groups), initial=0))
        parts = [
            self._part(block_index, group, work, start)
            for group, start in zip(groups, starts, strict=False)
        ]
        x_TD = work.x_TD
        for part in parts:
            part.x_TD.copy_(part.below_TD)
        rope_T1P = parts[0].rope_T1P
        if len(parts) > 1 or rope_T1P.shape[0] < work.rows:
            padding = self._rope_S1P.narrow(0, 0, work.rows - starts[-1])
            rope_T1P = torch.cat([*(part.rope_T1P for part in parts), padding])
        for index, layer in enumerate(self.blocks[block_index]):
            torch.neg(x_TD, out=work.mirror_TD)
            normed_T2D = self._pair_norm(work.pair_T2D, layer.attn_norm_2D)
            torch.mm(normed_T2D.narrow(1, 0, self._width), layer.qkv_DW, out=work.qkv_TW)
            if self._is_low_precision:
                _rotate_in_float32(work.rotated_TNH, rope_T1P)
            else:
                work.rotated_complex_TNP.mul_(rope_T1P)
            for part in parts:
                part.slots_GTH[index].copy_(part.views.kv_GTH)
                self._attend(part.views, part.keys_GHC[index], part.values_GCH[index], part.mask_TC)
            x_TD.addmm_(work.attended_TQ, layer.attn_out_QD)
            self._mlp(work, layer)
        for part in parts:
            part.above_TD.copy_(part.x_TD)

    def _part(self, block_index: int, group: Group, work: Scratch, start: int) -> _Part:
        """Cut what one group reads and writes, its rows beginning at `start` of the work space."""
        buffers, first, rows, columns = group
        is_plain = rows == 1 and columns == first + 1
        is_whole = rows == work.rows
        return _Part(
            views=work.whole if is_whole else GroupViews(work, start=start, rows=rows),
            x_TD=work.x_TD if is_whole else work.x_TD.narrow(0, start, rows),
            below_TD=buffers.boundary_SD[block_index].narrow(0, first, rows),
            above_TD=buffers.boundary_SD[block_index + 1].narrow(0, first, rows),
            rope_T1P=self._rope_S1P.narrow(0, first, rows),
            keys_GHC=buffers.keys_LGHS[block_index].narrow(3, 0, columns).unbind(0),
            values_GCH=buffers.values_LGSH[block_index].narrow(2, 0, columns).unbind(0),
            slots_GTH=buffers.slots_LGSH[block_index].narrow(2, first, rows).unbind(0),
            mask_TC=None if is_plain else self._mask(first, rows, columns),
        )

    def _mlp(self, work: Scratch, layer: LayerParams) -> None:
        torch.neg(work.x_TD, out=work.mirror_TD)
        normed_T2D = self._pair_norm(work.pair_T2D, layer.mlp_norm_2D)
        torch.mm(normed_T2D.narrow(1, 0, self._width), layer.gate_up_D2F, out=work.gate_up_T2F)
        F.silu(work.gate_TF, inplace=True)
        work.gate_TF.mul_(work.up_TF)
        work.x_TD.addmm_(work.gate_TF, layer.down_FD)

    def _attend(
        self, work: GroupViews, keys_GHC: Tensor, values_GCH: Tensor, mask_TC: Tensor | None
    ) -> None:
        """Write softmax(q k + mask) v into the group's rows; `LayerParams.qkv_DW` has the scale.

        Few rows in full precision take two batched products, which beat the fused kernel's start-up
        on the CPU; the fused kernel saves the memory of long runs and keeps float32 scores in bf16.
        """
        groups, per_group, rows = work.queries_GRTH.shape[:3]
        if rows > DECODE_BUCKETS[-1] or self._is_low_precision:
            queries_1NTH = work.queries_GRTH.flatten(0, 1).unsqueeze(0)
            attended_1NTH = F.scaled_dot_product_attention(
                queries_1NTH,
                keys_GHC.transpose(1, 2).unsqueeze(0),
                values_GCH.unsqueeze(0),
                attn_mask=mask_TC,
                scale=self._scale,
                enable_gqa=per_group > 1,
            )
            work.attended_GRTH.copy_(attended_1NTH.view(groups, per_group, rows, -1))
            return
        queries_GMH = work.queries_GMH if work.is_flat else work.queries_GRTH.flatten(1, 2)
        if mask_TC is None:
            scores_GMC = torch.bmm(queries_GMH, keys_GHC)
        else:
            mask_MC = mask_TC if per_group == 1 else mask_TC.repeat(per_group, 1)
            scores_GMC = torch.baddbmm(mask_MC, queries_GMH, keys_GHC)
        weights_GMC = torch.softmax(scores_GMC, dim=-1)
        if work.is_flat:
            torch.bmm(weights_GMC, values_GCH, out=work.attended_GMH)
        else:
            attended_GMH = torch.bmm(weights_GMC, values_GCH)
            work.attended_GRTH.copy_(attended_GMH.view(groups, per_group, rows, -1))

    def _mask(self, first: int, rows: int, columns: int) -> Tensor:
        """Return 0 where column <= first + row, else -inf."""
        mask_TC = torch.full(
            (rows, columns), float("-inf"), dtype=self.params.dtype, device=self.params.device
        )
        return mask_TC.triu_(first + 1)

    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        """Return n_k = RMSNorm_k(h_k), which the router and the adapter of the exit share."""
        pair_T2D = torch.cat((h_TD, -h_TD), dim=1)
        normed_T2D = self._pair_norm(pair_T2D, self.params.exits[exit_index].norm_2D)
        return normed_T2D.narrow(1, 0, self._width)

    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
        """Return z_k, exit minus continue, of the router behind n_k.

        N-vium (arXiv:2605.13190), Sec. 4: w_k = sigmoid(z_k). The router is the authors' code's,
        with a norm before its head; the two rows of the head are folded into their difference.

        Returns:
            Shape (T,), at least float32, a new tensor.
        """
        router = self.params.exits[junction_index].router
        assert router is not None, "the last exit has no router"
        hidden_TR = self._gelu(torch.addmm(router.fc1_bias_R, n_TD, router.fc1_DR))
        score_T2D = at_least_float32(torch.addmm(router.fc2_bias_2D, hidden_TR, router.fc2_R2D))
        normed_T2D = self._pair_norm(score_T2D, router.norm_2D)
        return torch.addmv(router.leave_bias, normed_T2D, router.leave_2D)

    def _pair_norm(self, pair_T2D: Tensor, gain_2D: Tensor) -> Tensor:
        """Return the RMSNorm of a pair [x, -x], as a pair."""
        return torch.native_layer_norm(pair_T2D, gain_2D.shape, gain_2D, None, self._eps)[0]

    def _gelu(self, x_TR: Tensor) -> Tensor:
        """Return the exact GELU; for one row F.gelu's set-up on the CPU costs twice as much."""
        if self._is_low_precision:
            return F.gelu(x_TR)
        return torch.addcmul(x_TR, x_TR, torch.erf(x_TR * math.sqrt(0.5))).mul_(0.5)

    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
        """Return o_k = n_k + A_k(n_k), what the shared head reads at this exit."""
        weights = self.params.exits[exit_index]
        if weights.adapter_in_DA is None or weights.adapter_out_AD is None:
            return n_TD
        hidden_TA = F.silu(torch.mm(n_TD, weights.adapter_in_DA), inplace=True)
        return torch.addmm(n_TD, hidden_TA, weights.adapter_out_AD)

    def logits(self, o_TD: Tensor) -> Tensor:
        """Return W_lm o, shape (T, V); rows of the head past `params.num_tokens` are padding."""
        return torch.mm(o_TD, self._head_DV)


def _rotate_in_float32(rotated_TNH: Tensor, rope_T1P: Tensor) -> None:
    """Apply RoPE in place to half-precision heads, in float32."""
    pairs_TNP2 = rotated_TNH.float().view(*rotated_TNH.shape[:-1], -1, 2)
    torch.view_as_complex(pairs_TNP2).mul_(rope_T1P)
    rotated_TNH.copy_(pairs_TNP2.flatten(-2))
