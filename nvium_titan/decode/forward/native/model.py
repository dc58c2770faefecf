"""The forward pass of inference on the CPU, in the kernels of `kernels.c`.

Does what `decode.forward.torch.DecoderModel` does, which is its slow twin in the tests. Weights are
float32, bfloat16 or int8; the residual stream, the KV cache and all sums are float32.

Shapes: T rows, D width, V vocabulary, O outputs, I inputs, P panels of 16 outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import (
    Array,
    Structure,
    addressof,
    byref,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_long,
    c_uint64,
    c_void_p,
)
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from nvium_titan.bundle.quantization import int8_scales
from nvium_titan.decode.deferred import DECODE_BUCKETS, PREFILL_BUCKETS, FilledCounts
from nvium_titan.decode.forward.base import Group, TokenRun, TokenRunner
from nvium_titan.decode.forward.native.build import load_library
from nvium_titan.decode.forward.torch import rope_table
from nvium_titan.decode.kv_cache import BufferPool, SequenceBuffers
from nvium_titan.decode.needs import NeedToken
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.sampling import Draw, Sampler

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_PANEL = 16
_STRIP = 4 * _PANEL
_STRIP = 4 * _PANEL
_PLAIN_ACT, _SILU, _GELU = 0, 1, 2
_MOST_ROWS = PREFILL_BUCKETS[-1]


class _Linear(Structure):
    _fields_ = (
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("levels", c_float),
    )


class _Layer(Structure):
    _fields_ = (
        ("attn_norm", c_void_p),
        ("mlp_norm", c_void_p),
        *((name, _Linear) for name in ("qkv", "attn_out", "gate", "up", "down")),
    )


class _Dims(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kind", "width", "heads", "kv_heads", "head_dim", "ffn")),
        ("eps", c_float),
        ("scale", c_float),
        ("rope", c_void_p),
    )


class _Group(Structure):
    _fields_ = (
        ("kv", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("slots", c_int64),
        ("first", c_int32),
        ("rows", c_int32),
    )


class _Exit(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("norm", "router_norm", "leave")),
        ("leave_bias", c_float),
        ("has_adapter", c_int32),
        *((name, _Linear) for name in ("adapter_in", "adapter_out", "fc1", "fc2")),
    )


class _Model(Structure):
    _fields_ = (
        ("dims", _Dims),
        ("blocks", c_void_p),
        ("num_layers", c_void_p),
        ("exits", c_void_p),
        ("num_exits", c_int32),
        ("head", _Linear),
    )


class NativeModel:
    """Packed weights; runs blocks on a sequence's buffers. Read-only after construction.

    One call runs at a time: it uses all threads of torch's setting and one work space.
    """

    looks_ahead = False

    def __init__(self, params: DecoderParams, *, num_slots: int) -> None:
        """Pack the weights.

        Args:
            params: The weights, on the CPU. float32, bfloat16, or float32 on an int8 grid.
            num_slots: Largest number of slots that any sequence will have.

        Raises:
            DependencyError: If there is no C compiler, or it fails.
        """
        config = params.config
        self.params = params.without_weights()
        self.state_dtype = torch.float32
        self.sampler: Sampler | None = self._sample
        self.token_runner: TokenRunner | None = self._run_token
        self.buffer_pool: BufferPool | None = None
        self._library = load_library()
        self._library.nvium_work_floats.restype = c_long
        self._kept: list[Tensor] = []
        self._dtype = torch.int8 if params.is_int8 else params.dtype
        self._kind = _KINDS[self._dtype]
        self._width = config.shape.dim
        self._num_tokens = params.num_tokens
        self._eps = config.shape.norm_eps
        self._num_slots = num_slots
        self._dims = _Dims(
            kind=self._kind,
            width=config.shape.dim,
            heads=config.shape.num_heads,
            kv_heads=config.shape.num_kv_heads,
            head_dim=config.shape.head_dim,
            ffn=config.shape.ffn_dim,
            eps=config.shape.norm_eps,
            scale=config.shape.head_dim**-0.5 if params.is_low_precision else 1.0,
            rope=self._keep(torch.view_as_real(rope_table(config, num_slots=num_slots)).float()),
        )
        ffn = config.shape.ffn_dim
        self._blocks = []
        for block in config.shape.blocks:
            layers = (_Layer * len(block))()
            for packed, index in zip(layers, block, strict=True):
                layer = params.layers[index]
                packed.attn_norm = self._keep(layer.attn_norm_2D[: self._width].float())
                packed.mlp_norm = self._keep(layer.mlp_norm_2D[: self._width].float())
                packed.qkv = self._pack(layer.qkv_DW)
                packed.attn_out = self._pack(layer.attn_out_QD)
                packed.gate = self._pack(layer.gate_up_D2F[:, :ffn])
                packed.up = self._pack(layer.gate_up_D2F[:, ffn:])
                packed.down = self._pack(layer.down_FD)
            self._blocks.append(layers)
        exits = (_Exit * len(params.exits))()
        for packed_exit, weights in zip(exits, params.exits, strict=True):
            packed_exit.norm = self._keep(weights.norm_2D[: self._width].float())
            if weights.adapter_in_DA is not None and weights.adapter_out_AD is not None:
                packed_exit.has_adapter = 1
                packed_exit.adapter_in = self._pack(weights.adapter_in_DA)
                packed_exit.adapter_out = self._pack(weights.adapter_out_AD)
            if weights.router is not None:
                router = weights.router
                packed_exit.fc1 = self._pack(router.fc1_DR, bias=router.fc1_bias_R)
                packed_exit.fc2 = self._pack(
                    router.fc2_R2D[:, : self._width], bias=router.fc2_bias_2D[: self._width]
                )
                packed_exit.router_norm = self._keep(router.norm_2D[: self._width].float())
                packed_exit.leave = self._keep(router.leave_2D[: self._width].float())
                packed_exit.leave_bias = float(router.leave_bias)
        self._exits = exits
        self._head = self._pack(params.head_VD.t())
        self._block_pointers = (c_void_p * len(self._blocks))(*map(addressof, self._blocks))
        self._layer_counts = (c_int32 * len(self._blocks))(*map(len, self._blocks))
        self._model = _Model(
            dims=self._dims,
            blocks=addressof(self._block_pointers),
            num_layers=addressof(self._layer_counts),
            exits=addressof(exits),
            num_exits=len(exits),
            head=self._head,
        )
        # The groups of a sequence, one per block: addresses that stay as long as its buffers.
        self._groups: WeakKeyDictionary[SequenceBuffers, Array[_Group]] = WeakKeyDictionary()
        self._work = torch.empty(0)
        self._lock = threading.Lock()
        self._token_threads = self._token_floats = 0

    def _keep(self, tensor: Tensor) -> int:
        """Return the address of a tensor that lives as long as the model."""
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _pack(self, weight_IO: Tensor, *, bias: Tensor | None = None) -> _Linear:
        """Return a matrix in panels of 16 outputs, (P, I, 16), in the order the kernels read.

        bfloat16: a 32-bit word holds outputs j and j + 8. int8: inputs go in pairs, (P, I / 2, 16,
        2).
        """
        num_inputs, num_outputs = weight_IO.shape
        short = -num_outputs % _PANEL
        weight_OI = F.pad(weight_IO.t(), (0, 0, 0, short))
        linear = _Linear(inputs=num_inputs, outputs=num_outputs)
        if self._dtype == torch.int8:
            scales_O = int8_scales(weight_OI)
            integers_OI = F.pad((weight_OI / scales_O[:, None]).round(), (0, num_inputs % 2))
            panels = integers_OI.to(torch.int8).view(-1, _PANEL, (num_inputs + 1) // 2, 2)
            linear.weights = self._keep(panels.transpose(1, 2))
            linear.scales = self._keep(scales_O)
            linear.levels = min(32767, (2**31 - 1) // (127 * num_inputs))
        else:
            panels = weight_OI.to(self._dtype).view(-1, _PANEL, num_inputs).transpose(1, 2)
            if self._dtype == torch.bfloat16:
                panels = panels.reshape(*panels.shape[:2], 2, _PANEL // 2).transpose(2, 3)
            linear.weights = self._keep(panels)
        if bias is not None:
            linear.bias = self._keep(F.pad(bias.float(), (0, short)))
        return linear

    def _work_space(self, num_floats: int) -> int:
        if self._work.numel() < num_floats:
            self._work = torch.empty(num_floats)
        return self._work.data_ptr()

    # --- what an engine calls -------------------------------------------------------------------

    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        """Write the embeddings of `token_ids` at positions `first`, `first` + 1, ..."""
        rows_TD = buffers.boundary_SD[0].narrow(0, first, len(token_ids))
        if len(token_ids) == 1:
            rows_TD.copy_(self.params.embedding_VD[token_ids[0]])
        else:
            rows_TD.copy_(self.params.embedding_VD[torch.tensor(token_ids)])

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Run the layers of one block on rows of one or several sequences.

        See `DecoderModel.run_block`. No host reads, no allocation after the largest group.
        """
        packed = (_Group * len(groups))()
        num_rows = most_slots = 0
        for index, group in enumerate(groups):
            item = self._groups_of(group.buffers)[block_index]
            item.first = group.first
            item.rows = group.rows
            packed[index] = item
            num_rows += group.rows
            most_slots = max(most_slots, group.first + group.rows)
        assert num_rows <= _MOST_ROWS, "the runner caps the rows of a call"
        layers = self._blocks[block_index]
        threads = torch.get_num_threads()
        with self._lock:
            size = self._library.nvium_work_floats(
                byref(self._dims), num_rows, c_long(most_slots), threads
            )
            self._library.nvium_run_block(
                byref(self._dims), layers, len(layers), packed, len(groups), c_long(most_slots),
                c_void_p(self._work_space(size)), threads,
            )  # fmt: skip

    def _groups_of(self, buffers: SequenceBuffers) -> Array[_Group]:
        groups = self._groups.get(buffers)
        if groups is None:
            groups = self._groups[buffers] = (_Group * len(self._blocks))()
            for block_index, item in enumerate(groups):
                item.kv = buffers.slots_LGSH[block_index].data_ptr()
                item.input = buffers.boundary_SD[block_index].data_ptr()
                item.output = buffers.boundary_SD[block_index + 1].data_ptr()
                item.slots = buffers.num_slots
        return groups

    def _run_token(
        self,
        buffers: SequenceBuffers,
        counts: FilledCounts,
        need: NeedToken,
    ) -> TokenRun:
        """Run all that the next token of a sequence needs, in one call and one host read.

        The kernels are those of the pieces, so the numbers are the same to the bit. Runs longer
        than the largest bucket go in chunks. The logits are a new tensor. See `TokenRunner`.
        """
        num_blocks, threads = len(self._blocks), torch.get_num_threads()
        filled = (c_int32 * num_blocks)(*counts.filled)
        logits_V = torch.empty(self._head.outputs)
        with self._lock:
            if threads != self._token_threads:
                self._token_threads = threads
                self._token_floats = self._floats_for_a_token(threads)
            exit_index: int = self._library.nvium_run_token(
                byref(self._model), self._groups_of(buffers), filled, counts.length,
                DECODE_BUCKETS[-1], (c_double * len(need.thresholds))(*need.thresholds),
                need.reads_router, c_void_p(logits_V.data_ptr()),
                c_void_p(self._work_space(self._token_floats)), threads,
            )  # fmt: skip
        counts.filled[:] = filled
        if need.draw.has_filter:
            return TokenRun(exit_index, logits_V, None)
        token_id = self._sample(logits_V[: self._num_tokens], need.draw)
        return TokenRun(exit_index, None, token_id)

    def _floats_for_a_token(self, threads: int) -> int:
        size: int = self._library.nvium_work_floats(
            byref(self._dims), _MOST_ROWS, c_long(self._num_slots), threads
        )
        layers = [self._head]
        for item in self._exits:
            layers += [item.adapter_in, item.adapter_out, item.fc1, item.fc2]
        widest = max(max(layer.inputs, layer.outputs) for layer in layers[1:])
        widest = max(widest, self._head.inputs) + 2 * _STRIP
        return 3 * self._width + max(int(size), (threads + 1) * int(widest))

    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        """Return n_k = RMSNorm_k(h_k); see `DecoderModel.exit_norm`."""
        n_TD = torch.empty_like(h_TD)
        self._library.nvium_norm(
            c_void_p(h_TD.data_ptr()), c_void_p(self._exits[exit_index].norm),
            self._width, c_float(self._eps), len(h_TD), c_void_p(n_TD.data_ptr()),
        )  # fmt: skip
        return n_TD

    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
        """Return z_k, exit minus continue, shape (T,); see `DecoderModel.router_logit`."""
        weights = self._exits[junction_index]
        assert weights.router_norm, "the last exit has no router"
        score_TD = self._two_layers(weights.fc1, weights.fc2, _GELU, n_TD, residual_TD=None)
        z_T = torch.empty(len(n_TD))
        self._library.nvium_score(
            c_void_p(score_TD.data_ptr()), c_void_p(weights.router_norm),
            c_void_p(weights.leave), c_float(weights.leave_bias),
            self._width, c_float(self._eps), len(n_TD), c_void_p(z_T.data_ptr()),
        )  # fmt: skip
        return z_T

    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
        """Return o_k = n_k + A_k(n_k); see `DecoderModel.exit_state`."""
        item = self._exits[exit_index]
        if not item.has_adapter:
            return n_TD
        return self._two_layers(item.adapter_in, item.adapter_out, _SILU, n_TD, residual_TD=n_TD)

    def _two_layers(
        self,
        first: _Linear,
        second: _Linear,
        act: int,
        n_TD: Tensor,
        *,
        residual_TD: Tensor | None,
    ) -> Tensor:
        num_rows, threads = len(n_TD), torch.get_num_threads()
        out_TD = torch.empty_like(n_TD)
        widest = max(first.inputs, second.inputs) + 2 * _STRIP
        with self._lock:
            work = self._work_space(num_rows * (first.outputs + threads * widest))
            self._library.nvium_two_layers(
                self._kind, byref(first), byref(second), act, c_void_p(n_TD.data_ptr()),
                c_void_p(None if residual_TD is None else residual_TD.data_ptr()), num_rows,
                c_void_p(out_TD.data_ptr()), c_void_p(work), threads,
            )  # fmt: skip
        return out_TD

    def logits(self, o_TD: Tensor) -> Tensor:
        """Return W_lm o, shape (T, V), float32; see `DecoderModel.logits`."""
        num_rows, threads = len(o_TD), torch.get_num_threads()
        logits_TV = torch.empty(num_rows, self._head.outputs)
        with self._lock:
            work = self._work_space(threads * num_rows * (self._head.inputs + 2 * _STRIP))
            self._library.nvium_linear(
                self._kind, byref(self._head), c_void_p(o_TD.data_ptr()), num_rows,
                c_void_p(logits_TV.data_ptr()), c_void_p(work), threads,
            )  # fmt: skip
        return logits_TV

    def _sample(self, logits_V: Tensor, draw: Draw) -> int:
        """See `decode.sampling.Sampler`."""
        token_id: int = self._library.nvium_sample(
            c_void_p(logits_V.data_ptr()), len(logits_V), c_uint64(draw.key),
            c_double(draw.sampling.temperature),
        )  # fmt: skip
        return token_id
