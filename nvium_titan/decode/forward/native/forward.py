"""The forward pass of inference on the CPU, in the kernels of `kernels.c`.

Does what `TorchForward` does, which is its slow twin in the tests. Weights are float32, bfloat16 or
int8; the residual stream, the KV cache and all sums are float32.

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
from typing_extensions import override

from nvium_titan.decode.forward.base import Forward, Group, TokenJob, TokenRun
from nvium_titan.decode.forward.native.build import load_library
from nvium_titan.decode.forward.torch import rope_angles
from nvium_titan.decode.params import DecoderParams, Matrix
from nvium_titan.decode.sampling import Draw, draw_token
from nvium_titan.decode.sequence import (
    LARGEST_GROUP,
    LARGEST_PREFILL,
    BufferPool,
    DecodeState,
    SequenceBuffers,
)

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_PANEL = 16
_STRIP = 4 * _PANEL
_PLAIN_ACT, _SILU, _GELU = 0, 1, 2


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


class NativeForward(Forward):
    """Packed weights; runs blocks on a sequence's buffers. Read-only after construction.

    One call runs at a time: it uses all threads of torch's setting and one work space.
    """

    buffer_pool: BufferPool | None = None
    state_dtype = torch.float32

    def __init__(self, params: DecoderParams, *, num_slots: int) -> None:
        """Pack the weights.

        Args:
            params: The weights, on the CPU: float32, bfloat16 or int8.
            num_slots: Largest number of slots that any sequence will have.

        Raises:
            DependencyError: If there is no C compiler, or it fails.
        """
        shape = params.shape
        self.params = params.without_weights()
        self._library = load_library()
        self._library.nvium_work_floats.restype = c_long
        self._kept: list[Tensor] = []
        self._kind = _KINDS[torch.int8 if params.is_int8 else params.dtype]
        self._width = shape.dim
        self._eps = shape.norm_eps
        self._num_slots = num_slots
        angles = rope_angles(shape, num_slots=num_slots)
        self._dims = _Dims(
            kind=self._kind,
            width=shape.dim,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            ffn=shape.ffn_dim,
            eps=shape.norm_eps,
            scale=shape.head_dim**-0.5,
            rope=self._keep(torch.cat((angles.cos(), angles.sin()), dim=1)),
        )
        self._blocks = []
        for block in shape.blocks:
            layers = (_Layer * len(block))()
            for packed, index in zip(layers, block, strict=True):
                layer = params.layers[index]
                packed.attn_norm = self._keep(layer.attn_norm_D)
                packed.mlp_norm = self._keep(layer.mlp_norm_D)
                packed.qkv = self._pack(layer.qkv)
                packed.attn_out = self._pack(layer.attn_out)
                packed.gate = self._pack(layer.gate_up, outputs=slice(shape.ffn_dim))
                packed.up = self._pack(layer.gate_up, outputs=slice(shape.ffn_dim, None))
                packed.down = self._pack(layer.down)
            self._blocks.append(layers)
        exits = (_Exit * len(params.exits))()
        for packed_exit, weights in zip(exits, params.exits, strict=True):
            packed_exit.norm = self._keep(weights.norm_D)
            if weights.adapter is not None:
                packed_exit.has_adapter = 1
                packed_exit.adapter_in = self._pack(weights.adapter.inner)
                packed_exit.adapter_out = self._pack(weights.adapter.outer)
            if weights.router is not None:
                router = weights.router
                packed_exit.fc1 = self._pack(router.fc1, bias=router.fc1_bias_R)
                packed_exit.fc2 = self._pack(router.fc2, bias=router.fc2_bias_D)
                packed_exit.router_norm = self._keep(router.norm_D)
                packed_exit.leave = self._keep(router.leave_D)
                packed_exit.leave_bias = float(router.leave_bias)
        self._exits = exits
        self._head = self._pack(params.head)
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
        """Return the address of a tensor's float32 copy, which lives as long as the forward."""
        return self._keep_as_is(tensor.float())

    def _keep_as_is(self, tensor: Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _pack(
        self, matrix: Matrix, *, outputs: slice = slice(None), bias: Tensor | None = None
    ) -> _Linear:
        """Return some outputs of a matrix in panels of 16, (P, I, 16), in the kernels' order.

        bfloat16: a 32-bit word holds outputs j and j + 8. int8: inputs go in pairs, (P, I / 2, 16,
        2).
        """
        weight_IO = matrix.weight_IO[:, outputs]
        num_inputs, num_outputs = weight_IO.shape
        short = -num_outputs % _PANEL
        weight_OI = F.pad(weight_IO.t(), (0, 0, 0, short))
        linear = _Linear(inputs=num_inputs, outputs=num_outputs)
        if matrix.scale_O is not None:
            panels = F.pad(weight_OI, (0, num_inputs % 2))
            panels = panels.view(-1, _PANEL, (num_inputs + 1) // 2, 2).transpose(1, 2)
            linear.scales = self._keep(F.pad(matrix.scale_O[outputs], (0, short)))
            # As many bits of an activation as cannot overflow the int32 sum.
            linear.levels = min(32767, (2**31 - 1) // (127 * num_inputs))
        else:
            panels = weight_OI.view(-1, _PANEL, num_inputs).transpose(1, 2)
            if weight_OI.dtype == torch.bfloat16:
                panels = panels.reshape(*panels.shape[:2], 2, _PANEL // 2).transpose(2, 3)
        linear.weights = self._keep_as_is(panels)
        if bias is not None:
            linear.bias = self._keep(F.pad(bias, (0, short)))
        return linear

    def _work_space(self, num_floats: int) -> int:
        if self._work.numel() < num_floats:
            self._work = torch.empty(num_floats)
        return self._work.data_ptr()

    # --- what an engine calls -------------------------------------------------------------------

    @override
    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        rows_TD = buffers.boundary_SD[0].narrow(0, first, len(token_ids))
        if len(token_ids) == 1:
            rows_TD.copy_(self.params.embedding_VD[token_ids[0]])
        else:
            rows_TD.copy_(self.params.embedding_VD[torch.tensor(token_ids)])

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """No host reads, no allocation after the largest group."""
        packed = (_Group * len(groups))()
        num_rows = most_slots = 0
        for index, group in enumerate(groups):
            item = self._groups_of(group.buffers)[block_index]
            item.first = group.first
            item.rows = group.rows
            packed[index] = item
            num_rows += group.rows
            most_slots = max(most_slots, group.first + group.rows)
        assert num_rows <= LARGEST_PREFILL, "the runner caps the rows of a call"
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
                first_layer = self.params.shape.blocks[block_index].start
                item.kv = buffers.kv_LGSH[first_layer].data_ptr()
                item.input = buffers.boundary_SD[block_index].data_ptr()
                item.output = buffers.boundary_SD[block_index + 1].data_ptr()
                item.slots = buffers.num_slots
        return groups

    def run_token(self, state: DecodeState, job: TokenJob, *, begins_next: bool) -> TokenRun | None:
        """Run the token in one call: blocks, junctions, exit and head; then draw it.

        The kernels are those of the pieces, so the numbers are the same to the bit. Runs longer
        than the largest group go in chunks.
        """
        num_blocks, threads = len(self._blocks), torch.get_num_threads()
        filled = (c_int32 * num_blocks)(*state.filled)
        thresholds = job.thresholds(state.length)
        logits_V = torch.empty(self._head.outputs)
        with self._lock:
            if threads != self._token_threads:
                self._token_threads = threads
                self._token_floats = self._floats_for_a_token(threads)
            exit_index: int = self._library.nvium_run_token(
                byref(self._model), self._groups_of(state.buffers), filled, state.length,
                LARGEST_GROUP, (c_double * len(thresholds))(*thresholds),
                job.policy.reads_router, c_void_p(logits_V.data_ptr()),
                c_void_p(self._work_space(self._token_floats)), threads,
            )  # fmt: skip
        logits_V = logits_V[: self.params.num_tokens]
        return TokenRun(exit_index, self.draw(logits_V, job.draw(state.length)))

    def _floats_for_a_token(self, threads: int) -> int:
        size: int = self._library.nvium_work_floats(
            byref(self._dims), LARGEST_PREFILL, c_long(self._num_slots), threads
        )
        layers = [self._head]
        for item in self._exits:
            layers += [item.adapter_in, item.adapter_out, item.fc1, item.fc2]
        widest = max(max(layer.inputs, layer.outputs) for layer in layers[1:])
        widest = max(widest, self._head.inputs) + 2 * _STRIP
        return 3 * self._width + max(int(size), (threads + 1) * int(widest))

    @override
    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        n_TD = torch.empty_like(h_TD)
        self._library.nvium_norm(
            c_void_p(h_TD.data_ptr()), c_void_p(self._exits[exit_index].norm),
            self._width, c_float(self._eps), len(h_TD), c_void_p(n_TD.data_ptr()),
        )  # fmt: skip
        return n_TD

    @override
    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
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

    @override
    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
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

    @override
    def logits(self, o_TD: Tensor) -> Tensor:
        num_rows, threads = len(o_TD), torch.get_num_threads()
        logits_TV = torch.empty(num_rows, self._head.outputs)
        with self._lock:
            work = self._work_space(threads * num_rows * (self._head.inputs + 2 * _STRIP))
            self._library.nvium_linear(
                self._kind, byref(self._head), c_void_p(o_TD.data_ptr()), num_rows,
                c_void_p(logits_TV.data_ptr()), c_void_p(work), threads,
            )  # fmt: skip
        return logits_TV

    def draw(self, logits_V: Tensor, draw: Draw) -> int:
        """Draw natively where nothing is filtered: few tokens then need their noise."""
        sampling = draw.sampling
        is_filtered = sampling.temperature > 0 and sampling.has_filter
        if is_filtered or logits_V.dtype != torch.float32:
            return draw_token(logits_V, draw)
        token_id: int = self._library.nvium_sample(
            c_void_p(logits_V.data_ptr()), len(logits_V),
            c_uint64(draw.noise.token_key(draw.position)), c_double(sampling.temperature),
        )  # fmt: skip
        return token_id
