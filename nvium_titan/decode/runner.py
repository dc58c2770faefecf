"""Runs blocks on sequences: feeding tokens, paying owed runs, answering needs; in two shapes.

The runner owns the moment at which a count moves: only after its run, so that a failure in between
leaves the rows owed and nothing inconsistent.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from nvium_titan.decode.deferred import (
    DECODE_BUCKETS,
    PREFILL_BUCKETS,
    FilledCounts,
    bucket_rows,
)
from nvium_titan.decode.forward.base import BlockModel, Group, TokenRun
from nvium_titan.decode.kv_cache import SequenceBuffers, WorkSpace
from nvium_titan.decode.needs import Need, NeedBlock, NeedLogits, NeedToken
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.results import DecodeStats, GeneratedToken

Shapes = Literal["exact", "bucket"]


@dataclass(slots=True, eq=False, weakref_slot=True)
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
    exit_inputs: dict[int, Tensor] = field(default_factory=dict)
    """n_k of the last token fed, shape (1, D), by exit, as far as it was needed."""
    give_back: Callable[[], object] | None = None
    """Returns the buffers to the model, where they are its own; happens once, here or at the end
    of this object."""

    @property
    def length(self) -> int:
        """Tokens fed so far."""
        return self.counts.length

    def close(self) -> None:
        """Give up the buffers, for the next sequence; the state must not be used again."""
        if self.give_back is not None:
            self.give_back()

    def clear(self) -> None:
        """Forget every token; the buffers stay and are written before they are read."""
        self.counts = FilledCounts.empty(len(self.counts.filled))
        self.token_ids = []
        self.exit_inputs = {}


def slots_for(max_length: int, *, shapes: Shapes) -> int:
    """Return the slots of a sequence: in buckets a padded row may lie past its end.

    There the number is a multiple of 16, which is how fused attention wants the rows of a mask.
    """
    if shapes == "exact":
        return max_length
    return math.ceil((max_length + PREFILL_BUCKETS[-1] - 1) / 16) * 16


class BlockRunner:
    """A model with a choice of shapes. Read-only; all state is in a `DecodeState`."""

    def __init__(self, params: DecoderParams, model: BlockModel, *, shapes: Shapes) -> None:
        """Take a model.

        Args:
            params: Gives the dimensions, dtype and device.
            model: Has tables for `slots_for` the longest sequence.
            shapes: See `Engine`.
        """
        plan = params.config.shape
        self.params = params
        self.model = model
        self.shapes = shapes
        self.num_exits = plan.num_exits
        self.block_sizes = tuple(len(block) for block in plan.blocks)

    @property
    def runs_tokens(self) -> bool:
        """Whether a token can run as a whole."""
        return self.model.token_runner is not None

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
        pool = self.model.buffer_pool if work is None else None
        buffers = (
            pool.take()
            if pool is not None
            else SequenceBuffers(
                self.params,
                num_slots=slots_for(max_length, shapes=self.shapes),
                dtype=self.model.state_dtype,
                work=work or self.new_work_space(),
            )
        )
        state = DecodeState(
            buffers=buffers, counts=FilledCounts.empty(self.num_exits), max_length=max_length
        )
        if pool is not None:
            state.give_back = weakref.finalize(state, pool.give_back, buffers)
        return state

    def feed(self, state: DecodeState, token_ids: Sequence[int]) -> None:
        """Append tokens, which must fit: embed them; every block owes them from now on."""
        first = state.length
        self.model.embed(state.buffers, token_ids, first=first)
        state.exit_inputs.clear()
        state.token_ids.extend(token_ids)
        state.counts.length = first + len(token_ids)

    def prefill(self, state: DecodeState, *, num_blocks: int | None = None) -> None:
        """Run the first blocks, or all, up to the last token, in long groups."""
        for block_index in range(num_blocks or self.num_exits):
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
        counts = state.counts
        while (owed := counts.length - counts.filled[block_index]) > 0:
            rows = min(owed, largest)
            self.model.run_block(block_index, (self._group(state, block_index, rows=rows),))
            self._book(state, block_index, rows=rows)

    def fill_all(self, states: Sequence[DecodeState], block_index: int) -> int:
        """Pay what some sequences owe to one block, together: its weights are read once for all.

        Args:
            states: The sequences, written; a position counts where the block below has run it.
            block_index: Which block.

        Returns:
            The number of calls: 1, or more where the rows exceed the largest bucket; 0 if nothing
            is owed.
        """
        num_calls = 0
        while True:
            groups, taken, total = [], [], 0
            for state in states:
                rows = min(state.counts.payable(block_index), DECODE_BUCKETS[-1])
                if rows == 0:
                    continue
                group = self._group(state, block_index, rows=rows)
                total += group.rows
                if total > PREFILL_BUCKETS[-1]:
                    break
                groups.append(group)
                taken.append((state, rows))
            if not groups:
                return num_calls
            self.model.run_block(block_index, groups)
            num_calls += 1
            for state, rows in taken:
                self._book(state, block_index, rows=rows)

    def _group(self, state: DecodeState, block_index: int, *, rows: int) -> Group:
        buffers, first = state.buffers, state.counts.filled[block_index]
        if self.shapes == "exact":
            return Group(buffers, first, rows, first + rows)
        return Group(buffers, first, bucket_rows(rows), buffers.num_slots)

    def _book(self, state: DecodeState, block_index: int, *, rows: int) -> None:
        state.counts.filled[block_index] += rows
        state.stats.layers_run += self.block_sizes[block_index]
        state.stats.group_sizes[rows] += 1

    # --- behind the blocks ----------------------------------------------------------------------

    def serve(
        self, state: DecodeState, choice: Generator[Need, Any, GeneratedToken]
    ) -> GeneratedToken:
        """Return the token of a choice, doing what it needs as it comes."""
        answer = None
        try:
            while True:
                answer = self.answer(state, choice.send(answer))
        except StopIteration as end:
            token: GeneratedToken = end.value
            return token

    def answer(self, state: DecodeState, need: Need) -> TokenRun | float | Tensor | None:
        """Do what one sequence needs, now. A router in a need of its own is one host read."""
        if isinstance(need, NeedToken):
            return self._run_token(state, need)
        if isinstance(need, NeedBlock):
            block_index = need.block_index
            self.fill(state, block_index)
            if not need.with_router:
                return math.nan
            state.stats.host_reads += 1
            n_1D = self._exit_input(state, block_index)
            return self.model.router_logit(block_index, n_1D).item()
        state.stats.head_rows += len(need.exit_indices)
        o_parts = [self.model.exit_state(k, self._exit_input(state, k)) for k in need.exit_indices]
        return self.model.logits(_stack(o_parts))

    def _run_token(self, state: DecodeState, need: NeedToken) -> TokenRun | None:
        run_token, counts = self.model.token_runner, state.counts
        assert run_token is not None, "asked for only where `runs_tokens`"
        owed = [counts.length - filled for filled in counts.filled]
        run = run_token(state.buffers, counts, need)
        if run is None:
            return None
        stats = state.stats
        for block_index in range(run.exit_index + 1):
            while owed[block_index] > 0:
                rows = min(owed[block_index], DECODE_BUCKETS[-1])
                owed[block_index] -= rows
                stats.layers_run += self.block_sizes[block_index]
                stats.group_sizes[rows] += 1
        stats.head_rows += 1
        # The asker counts the read of the token; if it draws that, the exit was one of its own.
        stats.host_reads += run.token_id is None
        return run

    def router_logits(self, states: Sequence[DecodeState], junction_index: int) -> list[float]:
        """Return z_k of the last token of some sequences. One host read for all.

        Args:
            states: Block k must be filled; each counts a host read, as if it were alone.
            junction_index: k.
        """
        for state in states:
            state.stats.host_reads += 1
        n_BD = self._exit_inputs(states, junction_index)
        return self.model.router_logit(junction_index, n_BD).tolist()

    def logits(self, wanted: Sequence[tuple[DecodeState, NeedLogits]]) -> list[Tensor]:
        """Return the logits that some sequences need, from one call of the head.

        Each adapter is called once, with the rows of all sequences that want its exit.

        Returns:
            Shape (exits, V) for each sequence.
        """
        by_exit: dict[int, list[int]] = {}
        for index, (state, need) in enumerate(wanted):
            state.stats.head_rows += len(need.exit_indices)
            for exit_index in need.exit_indices:
                by_exit.setdefault(exit_index, []).append(index)
        o_parts = [
            self.model.exit_state(k, self._exit_inputs([wanted[i][0] for i in members], k))
            for k, members in by_exit.items()
        ]
        order = [(i, k) for k, members in by_exit.items() for i in members]
        logits_V = dict(zip(order, self.model.logits(_stack(o_parts)).unbind(0), strict=True))
        return [
            torch.stack([logits_V[index, k] for k in need.exit_indices])
            for index, (_, need) in enumerate(wanted)
        ]

    def _exit_input(self, state: DecodeState, exit_index: int) -> Tensor:
        """Return n_k of the last token, shape (1, D); block k must be filled."""
        n_1D = state.exit_inputs.get(exit_index)
        if n_1D is None:
            h_1D = state.buffers.boundary_SD[exit_index + 1].narrow(0, state.length - 1, 1)
            n_1D = state.exit_inputs[exit_index] = self.model.exit_norm(exit_index, h_1D)
        return n_1D

    def _exit_inputs(self, states: Sequence[DecodeState], exit_index: int) -> Tensor:
        """Return n_k of the last token of some sequences, shape (B, D)."""
        fresh = [state for state in states if exit_index not in state.exit_inputs]
        if fresh:
            h_BD = torch.cat(
                [
                    state.buffers.boundary_SD[exit_index + 1].narrow(0, state.length - 1, 1)
                    for state in fresh
                ]
            )
            n_BD = self.model.exit_norm(exit_index, h_BD)
            for state, n_D in zip(fresh, n_BD.unbind(0), strict=True):
                state.exit_inputs[exit_index] = n_D.unsqueeze(0)
            if len(fresh) == len(states):
                return n_BD
        return _stack([state.exit_inputs[exit_index] for state in states])


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
