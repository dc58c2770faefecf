"""The buffers of a sequence: KV cache, boundary states; and work space. Written in place.

Shapes: L layers, G key/value heads, R query heads per key/value head, S slots, T rows at hand,
H head width, N = (R + 2) G heads, D model width, W = N H packed features, Q = R G H query features,
F MLP width.

All memory is allocated at construction; the views for a number of rows are cut when it is first
met. Buffers start as zeros, since a masked NaN in V would still poison attention.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nvium_titan.decode.deferred import bucket_rows
from nvium_titan.decode.params import DecoderParams


class GroupViews:
    """The rows of one group in a `Scratch`, as attention wants them."""

    def __init__(self, scratch: Scratch, *, start: int, rows: int) -> None:
        """Cut the views.

        Args:
            scratch: The work space, for rows of any number of groups.
            start: First row of this group.
            rows: T.
        """
        heads = scratch.heads_TNH.narrow(0, start, rows)
        head = heads.shape[2]
        groups, per_group = scratch.num_groups, scratch.per_group
        self.rows = rows
        self.kv_GTH = heads[:, per_group * groups :].transpose(0, 1)
        """Keys, then values: 2G heads."""
        self.queries_GRTH = (
            heads[:, : per_group * groups].view(rows, groups, per_group, head).permute(1, 2, 0, 3)
        )
        attended_TQ = scratch.attended_TQ.narrow(0, start, rows)
        self.attended_GRTH = attended_TQ.view(rows, groups, per_group, head).permute(1, 2, 0, 3)
        # With one query head per group, or one row, (R, T) is one axis without a copy.
        self.is_flat = per_group == 1 or rows == 1
        if self.is_flat:
            shape = (groups, per_group * rows, head)
            self.queries_GMH = self.queries_GRTH.reshape(shape)
            self.attended_GMH = self.attended_GRTH.view(shape)


class Scratch:
    """A work space cut for `rows` rows, of one group or several; every layer overwrites it."""

    def __init__(self, params: DecoderParams, flat: Tensor, *, rows: int) -> None:
        """Cut the views.

        Args:
            params: Gives the dimensions.
            flat: The shared work space, at least `rows * work_features(params)` elements.
            rows: T.
        """
        config = params.config
        width, ffn, head = config.shape.dim, config.shape.ffn_dim, config.shape.head_dim
        groups = config.shape.num_kv_heads
        per_group = config.shape.num_heads // groups
        sizes = (2 * width, (per_group + 2) * groups * head, per_group * groups * head, 2 * ffn)
        pair, qkv, attended, gate_up = (
            flat[rows * start : rows * end].view(rows, end - start)
            for start, end in pairwise(accumulate(sizes, initial=0))
        )
        self.rows, self.num_groups, self.per_group = rows, groups, per_group
        self.pair_T2D = pair
        """The residual stream beside its negative; see `decode.forward.torch`."""
        self.x_TD = pair[:, :width]
        self.mirror_TD = pair[:, width:]
        self.qkv_TW = qkv
        self.heads_TNH = qkv.view(rows, (per_group + 2) * groups, head)
        self.rotated_TNH = self.heads_TNH[:, : (per_group + 1) * groups]
        """Queries and keys, the heads that RoPE turns."""
        self.attended_TQ = attended
        self.gate_up_T2F = gate_up
        self.gate_TF = gate_up[:, :ffn]
        self.up_TF = gate_up[:, ffn:]
        if not params.is_low_precision:
            pairs = self.rotated_TNH.view(rows, -1, head // 2, 2)
            self.rotated_complex_TNP = torch.view_as_complex(pairs)
        self.whole = GroupViews(self, start=0, rows=rows)
        """All rows as one group."""


def work_features(params: DecoderParams) -> int:
    """Return the elements of work space that one row needs."""
    config = params.config
    q_features = config.shape.num_heads * config.shape.head_dim
    kv_features = config.shape.num_kv_heads * config.shape.head_dim
    return 2 * (config.shape.dim + q_features + kv_features + config.shape.ffn_dim)


class WorkSpace:
    """What a block call writes and forgets; sequences that never run at once may share one."""

    def __init__(
        self, params: DecoderParams, *, max_rows: int, buckets: tuple[int, ...] | None = None
    ) -> None:
        """Allocate, zeroed.

        Args:
            params: Gives the dimensions, dtype and device.
            max_rows: Most rows of one block call, all groups together.
            buckets: The row counts to cut for, the last one `max_rows`; any if None.
        """
        self._params = params
        self._buckets = buckets
        self._flat = torch.zeros(
            max_rows * work_features(params), dtype=params.dtype, device=params.device
        )
        self._scratch: dict[int, Scratch] = {}

    def scratch(self, rows: int) -> Scratch:
        """Return the views for a call of `rows` rows; in buckets they may have more rows."""
        scratch = self._scratch.get(rows)
        if scratch is None:
            cut_rows = bucket_rows(rows, self._buckets) if self._buckets else rows
            scratch = self._scratch.get(cut_rows)
            scratch = scratch or Scratch(self._params, self._flat, rows=cut_rows)
            self._scratch[rows] = self._scratch[cut_rows] = scratch
        return scratch


class SequenceBuffers:
    """Everything one sequence stores: keys and values, boundary states; and where it works."""

    def __init__(
        self, params: DecoderParams, *, num_slots: int, dtype: torch.dtype, work: WorkSpace
    ) -> None:
        """Allocate, zeroed.

        Args:
            params: Gives the dimensions and the device.
            dtype: Type of everything stored, the model's `state_dtype`.
            num_slots: Positions to hold, slack for padded rows included.
            work: The work space; its own, or that of its batch.
        """
        config, plan = params.config, params.config.shape
        groups = config.shape.num_kv_heads
        self._params = params
        self.num_slots = num_slots

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=params.device)

        self.kv_LGSH = zeros(config.shape.num_layers, 2 * groups, num_slots, config.shape.head_dim)
        """Keys (first G heads, interleaved RoPE layout) and values (last G heads)."""
        self.boundary_SD = tuple(
            zeros(num_slots, config.shape.dim) for _ in range(plan.num_exits + 1)
        )
        """Boundary states: embeddings, then the residual stream after each block."""
        by_block = [self.kv_LGSH[block.start : block.stop] for block in plan.blocks]
        self.slots_LGSH = tuple(by_block)
        self.keys_LGHS = tuple(kv[:, :groups].transpose(2, 3) for kv in by_block)
        self.values_LGSH = tuple(kv[:, groups:] for kv in by_block)
        self.work = work

    def zero(self) -> None:
        """Make them as new: what a sequence left may be NaN, which masks do not stop."""
        self.kv_LGSH.zero_()
        for boundary_SD in self.boundary_SD:
            boundary_SD.zero_()

    def keys(self, layer_index: int, *, length: int) -> Tensor:
        """Return a copy of one layer's keys in HF's rotate-half layout, shape (G, length, H)."""
        groups = self._params.config.shape.num_kv_heads
        keys_GTH = self.kv_LGSH[layer_index, :groups, :length]
        pairs = keys_GTH.reshape(groups, length, -1, 2)
        return pairs.transpose(-1, -2).reshape(keys_GTH.shape)

    def values(self, layer_index: int, *, length: int) -> Tensor:
        """Return a copy of one layer's values, shape (G, length, H)."""
        groups = self._params.config.shape.num_kv_heads
        return self.kv_LGSH[layer_index, groups:, :length].clone()


class BufferPool:
    """Buffers at addresses that stay, handed from one sequence to the next."""

    def __init__(self, make: Callable[[], SequenceBuffers]) -> None:
        """Start empty.

        Args:
            make: Returns another set of buffers, for the longest sequence.
        """
        self._make = make
        self._all: set[SequenceBuffers] = set()
        self._free: list[SequenceBuffers] = []

    def __len__(self) -> int:
        """Return how many sets there are, in use or not."""
        return len(self._all)

    def __contains__(self, buffers: SequenceBuffers) -> bool:
        """Return whether a set is from here."""
        return buffers in self._all

    @torch.inference_mode()
    def take(self) -> SequenceBuffers:
        """Return a free set, zeroed; a new one if there is none."""
        if not self._free and self._all:
            # A request and its coroutine refer to each other, so dropping one does not free it.
            gc.collect()
        if self._free:
            buffers = self._free.pop()
            buffers.zero()
        else:
            buffers = self._make()
            self._all.add(buffers)
        return buffers

    def give_back(self, buffers: SequenceBuffers) -> None:
        """Take back a set that nobody uses any more; safe in a finalizer."""
        self._free.append(buffers)
