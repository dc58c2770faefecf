"""One sequence: its tokens, which positions are owed to which block, and its buffers.

For one sequence the positions still owed to block k are a contiguous run [filled_k, length),
because the positions that went at least k blocks deep are nested in k (N-vium, arXiv:2605.13190,
Sec. 4.2, "piggybacking"; the paper keeps one group per exit depth, a run needs none of that
bookkeeping). The module owns the terms deferred token and piggyback group.

Shapes: L layers, G key/value heads, S slots, H head width, D model width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nvium_titan.core.shape import ModelShape
from nvium_titan.decode.results import DecodeStats

LARGEST_GROUP = 32
"""Most rows of a piggyback group in a decode step; a longer run is paid in chunks."""

LARGEST_PREFILL = 128
"""Most rows of one block call, in a prefill and of all sequences of a batch together."""


class LayerSlots(NamedTuple):
    """What one layer of a sequence stores, as attention wants it."""

    kv_1GSH: Tensor
    """Keys (first half of the heads), then values."""
    keys_1GSH: Tensor
    """The keys, in the same memory."""
    values_1GSH: Tensor
    """The values, likewise."""


class SequenceBuffers:
    """What one sequence stores: keys and values, and the states at the borders of blocks.

    They start as zeros, since a masked NaN in a value would still poison attention.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate, zeroed.

        Args:
            shape: Dimensions and exits.
            num_slots: Positions to hold.
            dtype: Type of everything stored, the forward's `state_dtype`.
            device: Where to store it.
        """

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.num_slots = num_slots
        self.num_kv_heads = shape.num_kv_heads
        self.kv_LGSH = zeros(shape.num_layers, 2 * shape.num_kv_heads, num_slots, shape.head_dim)
        """Keys (first G heads) and values (last G heads), in the layout of Hugging Face."""
        self.layers = tuple(
            LayerSlots(kv_1GSH, *torch.split(kv_1GSH, shape.num_kv_heads, dim=1))
            for kv_1GSH in self.kv_LGSH.unsqueeze(1).unbind(0)
        )
        self.boundary_SD = tuple(zeros(num_slots, shape.dim) for _ in range(shape.num_exits + 1))
        """Boundary states: embeddings, then the residual stream behind each block."""

    @torch.inference_mode()
    def zero(self) -> None:
        """Make them as new: what a sequence left may be NaN, which masks do not stop."""
        self.kv_LGSH.zero_()
        for boundary_SD in self.boundary_SD:
            boundary_SD.zero_()

    def keys(self, layer_index: int, *, length: int) -> Tensor:
        """Return a copy of one layer's keys, shape (G, length, H)."""
        return self.kv_LGSH[layer_index, : self.num_kv_heads, :length].clone()

    def values(self, layer_index: int, *, length: int) -> Tensor:
        """Return a copy of one layer's values, shape (G, length, H)."""
        return self.kv_LGSH[layer_index, self.num_kv_heads :, :length].clone()


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
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = self._make()
            self._all.add(buffers)
        else:
            buffers.zero()
        return buffers

    def give_back(self, buffers: SequenceBuffers) -> None:
        """Take back a set that nobody uses any more; safe in a finalizer."""
        self._free.append(buffers)


@dataclass(slots=True, eq=False, weakref_slot=True)
class DecodeState:
    """One sequence. Never shared; only the runner moves its counts."""

    buffers: SequenceBuffers
    """Keys, values, boundary states."""
    max_length: int
    """Most tokens of the sequence, sampled ones included."""
    filled: list[int]
    """Positions whose keys, values and output exist in each block; length >= filled[0] >= ..."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens fed so far. A token that was sampled last is not among them."""
    stats: DecodeStats = field(default_factory=DecodeStats)
    """Counters of the generation at hand."""
    exit_inputs: dict[int, Tensor] = field(default_factory=dict)
    """n_k of the last token fed, shape (1, D), by exit, as far as it was needed."""
    _give_back: Callable[[], object] | None = None

    @classmethod
    def empty(
        cls, buffers: SequenceBuffers, *, max_length: int, pool: BufferPool | None = None
    ) -> DecodeState:
        """Return a sequence to which nothing has been fed.

        Args:
            buffers: Its own, zeroed.
            max_length: Most tokens it will hold.
            pool: Where the buffers go back to, on `close` or with the last reference.
        """
        state = cls(buffers, max_length, filled=[0] * (len(buffers.boundary_SD) - 1))
        if pool is not None:
            state._give_back = weakref.finalize(state, pool.give_back, buffers)
        return state

    @property
    def length(self) -> int:
        """Tokens fed so far."""
        return len(self.token_ids)

    @property
    def num_deferred(self) -> int:
        """Positions that some block still owes; the length of the longest owed run."""
        return self.length - self.filled[-1]

    def payable(self, block_index: int) -> int:
        """Return how many positions the block owes that the block below has run."""
        below = self.filled[block_index - 1] if block_index else self.length
        return below - self.filled[block_index]

    def feed(self, token_ids: Sequence[int]) -> None:
        """Append tokens; every block owes them from now on."""
        self.token_ids.extend(token_ids)
        self.exit_inputs.clear()

    def clear(self) -> None:
        """Forget every token; the buffers are as new."""
        self.buffers.zero()
        self.filled = [0] * len(self.filled)
        self.token_ids = []
        self.exit_inputs = {}

    def close(self) -> None:
        """Give up buffers of a pool, for the next sequence; the state must not be used again."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None
            del self.buffers
