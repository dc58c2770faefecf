"""Runs blocks on a sequence: feeding tokens, paying owed runs, in exact or bucketed shapes.

The runner owns the moment at which a count moves: only after its run, so that a failure in between
leaves the rows owed and nothing inconsistent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from nvium_titan.decode.block_model import BlockModel, Group
from nvium_titan.decode.deferred import (
    DECODE_BUCKETS,
    PREFILL_BUCKETS,
    FilledCounts,
    bucket_rows,
)
from nvium_titan.decode.kv_cache import SequenceBuffers, WorkSpace
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.results import DecodeStats

Shapes = Literal["exact", "bucket"]


@dataclass(slots=True, eq=False)
class DecodeState:
    """One sequence: what has been fed, what is owed, and every buffer. Never shared."""

    buffers: SequenceBuffers
    """Keys, values, boundary states."""
    counts: FilledCounts
    """What each block has done."""
    max_length: int
    """Most tokens of the sequence, sampled ones included."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens fed so far. A token that was sampled last is not among them."""
    stats: DecodeStats = field(default_factory=DecodeStats)
    """Counters of the generation at hand."""

    @property
    def length(self) -> int:
        """Tokens fed so far."""
        return self.counts.length

    def clear(self) -> None:
        """Forget every token; the buffers stay and are written before they are read."""
        self.counts = FilledCounts.empty(len(self.counts.filled))
        self.token_ids = []


def slots_for(max_length: int, *, shapes: Shapes) -> int:
    """Return the slots of a sequence: a padded row may lie past its end."""
    return max_length + (PREFILL_BUCKETS[-1] - 1 if shapes == "bucket" else 0)


class BlockRunner:
    """A model with a choice of shapes. Read-only; all state is in a `DecodeState`."""

    def __init__(self, params: DecoderParams, model: BlockModel, *, shapes: Shapes) -> None:
        """Take a model.

        Args:
            params: Gives the dimensions, dtype and device.
            model: Has tables for `slots_for` the longest sequence.
            shapes: See `Engine`.
        """
        plan = params.config.plan
        self.params = params
        self.model = model
        self.shapes = shapes
        self.num_exits = plan.num_exits
        self._block_sizes = tuple(len(block) for block in plan.blocks)

    def new_work_space(self) -> WorkSpace:
        """Return a work space for one block call at a time."""
        buckets = PREFILL_BUCKETS if self.shapes == "bucket" else None
        return WorkSpace(self.params, max_rows=PREFILL_BUCKETS[-1], buckets=buckets)

    def new_state(self, max_length: int, *, work: WorkSpace | None = None) -> DecodeState:
        """Return an empty sequence with its own buffers, zeroed.

        Args:
            max_length: Most tokens it will hold.
            work: The work space of a batch; its own if None.
        """
        buffers = SequenceBuffers(
            self.params,
            num_slots=slots_for(max_length, shapes=self.shapes),
            work=work or self.new_work_space(),
        )
        return DecodeState(
            buffers=buffers, counts=FilledCounts.empty(self.num_exits), max_length=max_length
        )

    def feed(self, state: DecodeState, token_ids: Sequence[int]) -> None:
        """Append tokens, which must fit: embed them; every block owes them from now on."""
        first = state.length
        self.model.embed(state.buffers, token_ids, first=first)
        state.token_ids.extend(token_ids)
        state.counts.length = first + len(token_ids)

    def prefill(self, state: DecodeState) -> None:
        """Run every block up to the last token, in long groups."""
        for block_index in range(self.num_exits):
            self.fill(state, block_index, largest=PREFILL_BUCKETS[-1])

    def flush(self, state: DecodeState) -> None:
        """Run every block up to the last token, in groups of a decode step."""
        for block_index in range(self.num_exits):
            self.fill(state, block_index)

    def fill(
        self, state: DecodeState, block_index: int, *, largest: int = DECODE_BUCKETS[-1]
    ) -> None:
        """Pay what is owed to one block.

        Args:
            state: The sequence, written.
            block_index: Which block; the ones below must be filled.
            largest: Most rows of one group.
        """
        counts, buffers, stats = state.counts, state.buffers, state.stats
        first, end = counts.filled[block_index], counts.length
        while first < end:
            rows = min(end - first, largest)
            is_exact = self.shapes == "exact"
            group = Group(
                buffers,
                first,
                rows if is_exact else bucket_rows(rows),
                first + rows if is_exact else buffers.num_slots,
            )
            self.model.run_block(block_index, (group,))
            first += rows
            counts.filled[block_index] = first
            stats.layers_run += self._block_sizes[block_index]
            stats.group_sizes[rows] += 1

    def exit_input(self, state: DecodeState, exit_index: int) -> Tensor:
        """Return n_k of the last token, shape (1, D); block k must be filled."""
        h_1D = state.buffers.boundary_SD[exit_index + 1].narrow(0, state.length - 1, 1)
        return self.model.exit_norm(exit_index, h_1D)

    def read_router(self, state: DecodeState, junction_index: int, n_1D: Tensor) -> float:
        """Return z_k of the last token on the host. One host read."""
        state.stats.host_reads += 1
        return self.model.router_logit(junction_index, n_1D).item()
