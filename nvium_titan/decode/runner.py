"""Runs a forward on sequences: feeding tokens, paying owed runs, reading what exits say.

The runner alone moves the counts of a sequence, and only after their run, so that a failure in
between leaves the rows owed and nothing inconsistent.

Shapes: B sequences, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvium_titan.decode.forward.base import Forward, Group, TokenJob, TokenRun
from nvium_titan.decode.sequence import (
    LARGEST_GROUP,
    LARGEST_PREFILL,
    DecodeState,
    SequenceBuffers,
)


class Runner:
    """A forward, and the bookkeeping around it. Read-only; all state is in a `DecodeState`."""

    def __init__(self, forward: Forward) -> None:
        """Take a forward."""
        self.forward = forward
        self.params = forward.params
        self.num_exits = forward.params.shape.num_exits
        self._block_sizes = tuple(map(len, forward.params.shape.blocks))

    def new_state(self, max_length: int, *, is_pooled: bool = True) -> DecodeState:
        """Return an empty sequence with its own buffers, zeroed.

        Args:
            max_length: Most tokens it will hold.
            is_pooled: Take the buffers from the forward's pool, if it has one.
        """
        pool = self.forward.buffer_pool if is_pooled else None
        if pool is not None:
            return DecodeState.empty(pool.take(), max_length=max_length, pool=pool)
        buffers = SequenceBuffers(
            self.params.shape,
            num_slots=max_length,
            dtype=self.forward.state_dtype,
            device=self.params.device,
        )
        return DecodeState.empty(buffers, max_length=max_length)

    # --- blocks ---------------------------------------------------------------------------------

    def feed(self, state: DecodeState, token_ids: Sequence[int]) -> None:
        """Append tokens, which must fit: embed them; every block owes them from now on."""
        self.forward.embed(state.buffers, token_ids, first=state.length)
        state.feed(token_ids)

    def prefill(self, state: DecodeState, *, num_blocks: int | None = None) -> None:
        """Run the first blocks, or all, up to the last token, in long groups."""
        for block_index in range(num_blocks or self.num_exits):
            self.fill(state, block_index, largest=LARGEST_PREFILL)

    def flush(self, state: DecodeState) -> None:
        """Run every block up to the last token, in groups of a decode step."""
        for block_index in range(self.num_exits):
            self.fill(state, block_index)

    def fill(self, state: DecodeState, block_index: int, *, largest: int = LARGEST_GROUP) -> None:
        """Pay what is owed to one block.

        Args:
            state: The sequence, written.
            block_index: Which block; the ones below must be filled.
            largest: Most rows of one group.
        """
        while (owed := state.length - state.filled[block_index]) > 0:
            rows = min(owed, largest)
            group = Group(state.buffers, state.filled[block_index], rows)
            self.forward.run_block(block_index, (group,))
            self._book(state, block_index, rows=rows)

    def fill_all(
        self,
        states: Sequence[DecodeState],
        block_index: int,
        *,
        riders: Sequence[DecodeState] = (),
    ) -> int:
        """Pay what some sequences owe to one block, together: its weights are read once for all.

        Args:
            states: The sequences, written; a position counts where the block below has run it.
            block_index: Which block.
            riders: Others, which pay what fits into the calls that the first ones need.

        Returns:
            The number of layer calls, each for any number of sequences; 0 if nothing is owed.
        """
        num_calls = 0
        while any(state.payable(block_index) for state in states):
            groups: list[Group] = []
            taken: list[DecodeState] = []
            free = LARGEST_PREFILL
            for state in (*states, *riders):
                rows = min(state.payable(block_index), LARGEST_GROUP)
                if 0 < rows <= free:
                    free -= rows
                    groups.append(Group(state.buffers, state.filled[block_index], rows))
                    taken.append(state)
            self.forward.run_block(block_index, groups)
            num_calls += 1
            for state, group in zip(taken, groups, strict=True):
                self._book(state, block_index, rows=group.rows)
        return num_calls * self._block_sizes[block_index]

    def run_token(self, state: DecodeState, job: TokenJob, *, begins_next: bool) -> TokenRun | None:
        """Run all that the next token needs at once; None if the forward wants it in pieces."""
        run = self.forward.run_token(state, job, begins_next=begins_next)
        if run is not None:
            for block_index in range(run.exit_index + 1):
                while (owed := state.length - state.filled[block_index]) > 0:
                    self._book(state, block_index, rows=min(owed, LARGEST_GROUP))
            state.stats.head_rows += 1
            state.stats.host_reads += 1
        return run

    def _book(self, state: DecodeState, block_index: int, *, rows: int) -> None:
        state.filled[block_index] += rows
        state.stats.layers_run += self._block_sizes[block_index]
        state.stats.group_sizes[rows] += 1

    # --- behind the blocks ----------------------------------------------------------------------

    def router_logits(self, states: Sequence[DecodeState], junction_index: int) -> list[float]:
        """Return z_k of the last token of some sequences. One host read for all.

        Args:
            states: Block k must be filled; each counts a host read, as if it were alone.
            junction_index: k.
        """
        for state in states:
            state.stats.host_reads += 1
        n_BD = self._exit_inputs(states, junction_index)
        values: list[float] = self.forward.router_logit(junction_index, n_BD).tolist()
        return values

    def logits(self, wanted: Sequence[tuple[DecodeState, Sequence[int]]]) -> list[Tensor]:
        """Return the logits of the last token of some sequences, from one call of the head.

        Each adapter is called once, with the rows of all sequences that want its exit.

        Args:
            wanted: Sequences, each with the exits it wants; their blocks must be filled.

        Returns:
            Shape (exits, V) for each sequence.
        """
        by_exit: dict[int, list[int]] = {}
        for index, (state, exit_indices) in enumerate(wanted):
            state.stats.head_rows += len(exit_indices)
            for exit_index in exit_indices:
                by_exit.setdefault(exit_index, []).append(index)
        o_parts = [
            self.forward.exit_state(k, self._exit_inputs([wanted[i][0] for i in members], k))
            for k, members in by_exit.items()
        ]
        logits_BV = self.forward.logits(_stack(o_parts))
        if len(wanted) == 1:
            return [logits_BV]
        order = [(i, k) for k, members in by_exit.items() for i in members]
        logits_V = dict(zip(order, logits_BV.unbind(0), strict=True))
        return [
            torch.stack([logits_V[index, k] for k in exit_indices])
            for index, (_, exit_indices) in enumerate(wanted)
        ]

    def _exit_inputs(self, states: Sequence[DecodeState], exit_index: int) -> Tensor:
        """Return n_k of the last token of some sequences, shape (B, D)."""
        fresh = [state for state in states if exit_index not in state.exit_inputs]
        if fresh:
            h_parts = [
                state.buffers.boundary_SD[exit_index + 1].narrow(0, state.length - 1, 1)
                for state in fresh
            ]
            n_BD = self.forward.exit_norm(exit_index, _stack(h_parts))
            for state, n_1D in zip(fresh, torch.split(n_BD, 1), strict=True):
                state.exit_inputs[exit_index] = n_1D
            if len(fresh) == len(states):
                return n_BD
        return _stack([state.exit_inputs[exit_index] for state in states])


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
