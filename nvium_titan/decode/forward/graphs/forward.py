"""Decoding in graphs: one launch for a token, junctions decided on the device.

    a token     one graph for each tuple of row counts, which the host knows before the launch:
                token t brings t + 1 - filled_k rows to block k if it gets there, whatever it
                decides on the way (N-vium, arXiv:2605.13190, Sec. 4.2, as the contiguous runs of
                `decode.sequence`). Blocks, junctions as nested branches, the adapter of the exit
                where it leaves, head, draw, and the embedding of the token that was drawn. One
                graph, two copies, one host read.
    a block     one graph for each block and row count: prompts, flushes, and tokens that cannot be
                one graph (the first after a prompt, runs over the largest bucket, laws that look at
                several exits). The host reads the router at every junction.
    a batch     torch operations one by one, as in `TorchForward`.

The next token is launched before this one is read, where the asker says what it will need: the
token drawn and the counts are on the device, and of the counts the host knows a bound, one row more
than now, which is all that a bucket needs. So the device does not wait for the host. If the next
token is not wanted after all, what it wrote is overwritten before it is read.

A graph bakes addresses and Python numbers, so positions, thresholds, key and temperature are static
inputs, and buffers come from a pool; graphs and inputs belong to a set of buffers.

Shapes: E exits, T rows, S slots, D width, V vocabulary, I inputs; 1 is one row.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nvium_titan.decode.forward.base import Group, TokenJob, TokenRun
from nvium_titan.decode.forward.graphs.capture import Fetch, Graph, GraphBackend
from nvium_titan.decode.forward.graphs.fused import build_junction, draw_in_graph
from nvium_titan.decode.forward.torch import Seen, TorchForward, causal_mask, run_layer
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.sampling import Filters
from nvium_titan.decode.sequence import (
    LARGEST_GROUP,
    LARGEST_PREFILL,
    BufferPool,
    DecodeState,
    SequenceBuffers,
)

logger = logging.getLogger(__name__)

GROUP_BUCKETS = (1, 2, 4, 8, 16, LARGEST_GROUP)
"""Row counts of a block in a token graph."""
BLOCK_BUCKETS = (*GROUP_BUCKETS, 64, LARGEST_PREFILL)
"""Row counts of a block in a graph of its own."""
MAX_TOKEN_GRAPHS = 56
"""Token graphs kept for a set of buffers: as many as there are tuples for four exits, where all
draws have a filter or none has."""
LAUNCHES_PER_TOKEN = 3
"""Of a token in one graph: the inputs' copy, the graph, the result's copy."""
_MAX_COMPILATIONS = 128

Mode = Literal["blocks", "tokens", "ahead"]
"""A graph per block with a host read at every junction; a graph per token; the same, the next token
launched before this one is read."""


class GraphForward(TorchForward):
    """A `Forward` over static buffers. One call runs at a time, on CUDA all on one stream."""

    def __init__(
        self,
        params: DecoderParams,
        *,
        num_slots: int,
        backend: GraphBackend,
        compiles: bool,
        max_token_graphs: int = MAX_TOKEN_GRAPHS,
    ) -> None:
        """Allocate the static inputs and outputs; graphs are captured when they are first needed.

        Args:
            params: The weights, on the backend's device.
            num_slots: Largest number of slots that any sequence will have.
            backend: Captures and replays. If it has no branches, tokens run block by block.
            compiles: Compile the layer, once for each number of rows.
            max_token_graphs: Most token graphs kept for a set of buffers.
        """
        # A padded row may lie past the end of its sequence. Fused attention wants rows of a mask
        # in multiples of 16.
        num_slots = math.ceil((num_slots + LARGEST_PREFILL - 1) / 16) * 16
        super().__init__(params, num_slots=num_slots)
        shape, device = params.shape, params.device
        self.backend = backend
        self.counters = backend.counters
        self._max_token_graphs = max_token_graphs
        self._lock = threading.Lock()
        self._junctions = [build_junction(self, index) for index in range(shape.num_exits - 1)]
        self._compiles = compiles
        self._run_layer = (
            torch.compile(run_layer, fullgraph=True, dynamic=False) if compiles else run_layer
        )
        self._slots_S = torch.arange(num_slots, device=device)
        # What a token graph leaves: all of it is written anew by every replay.
        self._o_1D = torch.zeros(1, shape.dim, dtype=params.dtype, device=device)
        self._result_2 = torch.zeros(2, dtype=torch.int64, device=device)
        self.pool = self.buffer_pool = BufferPool(
            lambda: SequenceBuffers(shape, num_slots=num_slots, dtype=params.dtype, device=device)
        )
        self._graphs: dict[SequenceBuffers, _BufferGraphs] = {}
        self.mode: Mode = "ahead"
        if backend.why_no_branches is not None:
            logger.warning("tokens run block by block: %s", backend.why_no_branches)
            self.mode = "blocks"

    def in_mode(self, mode: Mode) -> GraphForward:
        """Return the forward decoding in a mode; weights, buffers, graphs, counters are shared."""
        other = copy.copy(self)
        other.mode = mode
        return other

    # --- what an engine calls -------------------------------------------------------------------

    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        """Write the embeddings, unless they are of the token that a graph drew and embedded."""
        graphs = self._graphs.get(buffers)
        if graphs is not None:
            if graphs.embedded == (first, *token_ids):
                return
            graphs.embedded = None
            self._drop_ahead(buffers)
        super().embed(buffers, token_ids, first=first)

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Run one sequence of the pool as a graph, anything else as operations."""
        buffers, first, rows = groups[0]
        with self._lock:
            for group in groups:
                self._drop_ahead(group.buffers)
            if len(groups) > 1 or buffers not in self.pool:
                self.counters.eager_calls += 1
                super().run_block(block_index, groups)
                return
            graphs = self._graphs_on(buffers)
            graphs.inputs.filled[block_index] = first
            graphs.inputs.send(self.backend)
            self._block_graph(graphs, block_index, bucket_rows(rows, BLOCK_BUCKETS)).replay()

    def run_token(self, state: DecodeState, job: TokenJob, *, begins_next: bool) -> TokenRun | None:
        """Run a token as one graph, begin the next, read exit and token.

        One host read; a capture where the tuple of row counts is new. Declines a token whose rows
        have run (the first after a prompt), a run over the largest bucket, and foreign buffers.
        """
        if self.mode == "blocks":
            return None
        with self._lock:
            result = self._launch(state, job) if state.buffers in self.pool else None
            if result is None:
                self.counters.declined_tokens += 1
                return None
            graphs = self._graphs[state.buffers]
            if begins_next and self.mode == "ahead":
                graphs.ahead = self._launch_ahead(graphs, state, job)
            exit_index, token_id = result.wait()
        graphs.embedded = (state.length, token_id)
        return TokenRun(exit_index, token_id)

    def _launch(self, state: DecodeState, job: TokenJob) -> Fetch | None:
        """Launch a token, if it does not run already; None if it cannot be one graph."""
        graphs = self._graphs_on(state.buffers)
        ahead = graphs.ahead
        if ahead is not None and (ahead.length, ahead.job) == (state.length, job):
            graphs.ahead = None
            return ahead.result
        self._drop_ahead(state.buffers)
        owed = [state.length - filled for filled in state.filled]
        graphs.inputs.filled[:] = state.filled
        return self._start(graphs, owed, state.length, job, with_filled=True)

    def _launch_ahead(
        self, graphs: _BufferGraphs, state: DecodeState, job: TokenJob
    ) -> _Ahead | None:
        """Launch the token behind the one that runs; None if it cannot be one graph.

        Each block will owe at most one row more than now: the first owes exactly one, and how far
        the others have come only the device knows yet.
        """
        length = state.length + 1
        try:
            job.thresholds(length)
        except Exception:  # of a policy, for a token that may never come: if it does, it is raised
            return None
        owed = [1, *(length - filled for filled in state.filled[1:])]
        result = self._start(graphs, owed, length, job, with_filled=False)
        return None if result is None else _Ahead(length, job, result)

    def _start(
        self,
        graphs: _BufferGraphs,
        owed: Sequence[int],
        length: int,
        job: TokenJob,
        *,
        with_filled: bool,
    ) -> Fetch | None:
        """Launch the token that follows `length` tokens, with at most `owed` rows in each block."""
        if owed[0] == 0 or owed[-1] > GROUP_BUCKETS[-1]:
            return None
        rows = tuple(bucket_rows(num_rows, GROUP_BUCKETS) for num_rows in owed)
        graphs.inputs.set_token(length, job)
        graphs.inputs.send(self.backend, with_filled=with_filled)
        has_filter = job.sampling.temperature > 0 and job.sampling.has_filter
        self._token_graph(graphs, rows, has_filter=has_filter).replay()
        return self.backend.fetch(self._result_2)

    def _drop_ahead(self, buffers: SequenceBuffers) -> None:
        """Forget the token that was begun: another one comes."""
        graphs = self._graphs.get(buffers)
        if graphs is not None and graphs.ahead is not None:
            self.counters.unused_tokens += 1
            graphs.ahead = None

    # --- graphs ---------------------------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept."""
        return sum(len(g.blocks) + len(g.tokens) for g in self._graphs.values())

    def _graphs_on(self, buffers: SequenceBuffers) -> _BufferGraphs:
        graphs = self._graphs.get(buffers)
        if graphs is None:
            inputs = _StaticInputs(self.params)
            graphs = self._graphs[buffers] = _BufferGraphs(buffers, inputs)
        return graphs

    def _block_graph(self, graphs: _BufferGraphs, block_index: int, rows: int) -> Graph:
        graph = graphs.blocks.get((block_index, rows))
        if graph is None:
            function = partial(self._block, graphs, block_index, rows)
            graph = graphs.blocks[block_index, rows] = self._capture(function)
        return graph

    def _token_graph(
        self, graphs: _BufferGraphs, rows: tuple[int, ...], *, has_filter: bool
    ) -> Graph:
        tokens, key = graphs.tokens, (rows, has_filter)
        graph = tokens.get(key)
        if graph is None:
            if len(tokens) == self._max_token_graphs:
                tokens.popitem(last=False)
                self.counters.dropped += 1
            with graphs.inputs.kept():
                graph = tokens[key] = self._capture(
                    partial(self._token, graphs, rows, has_filter=has_filter),
                    outputs=(self._o_1D, self._result_2),
                )
        tokens.move_to_end(key)
        return graph

    def _capture(self, function: Callable[[], object], *, outputs: Sequence[Tensor] = ()) -> Graph:
        start = time.perf_counter()
        # Each number of rows is a compilation of its own, and so is each model in the process.
        limit = torch._dynamo.config.patch(recompile_limit=_MAX_COMPILATIONS)
        with limit if self._compiles else nullcontext():
            graph = self.backend.capture(function, outputs=outputs)
        self.counters.capture_s += time.perf_counter() - start
        return graph

    # --- what is captured -----------------------------------------------------------------------

    def _token(self, graphs: _BufferGraphs, rows: tuple[int, ...], *, has_filter: bool) -> None:
        """All of a token: where it leaves, the logits there, the draw, the next embedding."""
        self._descend(graphs, rows, 0)
        inputs = graphs.inputs
        logits_V = self.logits(self._o_1D)[0, : self.params.num_tokens]
        filters = inputs.filters if has_filter else Filters(inputs.filters.temperature)
        token_1 = draw_in_graph(logits_V, inputs.key_1, filters)
        self._result_2[1:].copy_(token_1)
        graphs.buffers.boundary_SD[0].index_copy_(
            0, inputs.next_1, self.params.embedding_VD.index_select(0, token_1)
        )

    def _descend(self, graphs: _BufferGraphs, rows: tuple[int, ...], block_index: int) -> None:
        """Run a block, and those above it if the token goes on."""
        self._block(graphs, block_index, rows[block_index])
        states_SD = graphs.buffers.boundary_SD[block_index + 1]
        position_1 = graphs.inputs.position_1
        if block_index + 1 == len(rows):
            h_1D = states_SD.index_select(0, position_1)
            self._leave(graphs, block_index, self.exit_norm(block_index, h_1D))
            return
        junction = self._junctions[block_index]
        at_junction = junction(states_SD, position_1, graphs.inputs.thresholds[block_index])
        leave = partial(self._leave, graphs, block_index, at_junction.n_1D)
        go_on = partial(self._descend, graphs, rows, block_index + 1)
        self.backend.branch(at_junction.leaves, leave)
        self.backend.branch(at_junction.goes_on, go_on)

    def _leave(self, graphs: _BufferGraphs, exit_index: int, n_1D: Tensor) -> None:
        self._o_1D.copy_(self.exit_state(exit_index, n_1D))
        self._result_2[:1].fill_(exit_index)
        graphs.inputs.filled_E[: exit_index + 1].copy_(graphs.inputs.next_1)

    def _block(self, graphs: _BufferGraphs, block_index: int, rows: int) -> None:
        """Run a block on the first row owed and those behind; their boundary states are there."""
        buffers = graphs.buffers
        positions_T = graphs.inputs.filled_E[block_index] + self._slots_S[:rows]
        x_TD = buffers.boundary_SD[block_index].index_select(0, positions_T)
        rope = self.rope.at(positions_T)
        mask_TS = causal_mask(positions_T, buffers.num_slots, self.params.dtype)
        for index in self._blocks[block_index]:
            seen = [Seen(buffers.layers[index], positions_T, mask_TS, buffers.num_slots)]
            self._run_layer(x_TD, self.params.layers[index], rope, seen, norm=self._norm)
        buffers.boundary_SD[block_index + 1].index_copy_(0, positions_T, x_TD)


class _Ahead(NamedTuple):
    """A token that was launched before the one before it was read."""

    length: int
    """Tokens fed, its own included."""
    job: TokenJob
    """What it was launched for."""
    result: Fetch
    """Its exit and its token."""


class _BufferGraphs:
    """The graphs that were captured on one set of buffers, with what they read and left last."""

    def __init__(self, buffers: SequenceBuffers, inputs: _StaticInputs) -> None:
        self.buffers = buffers
        self.inputs = inputs
        self.blocks: dict[tuple[int, int], Graph] = {}
        self.tokens: OrderedDict[tuple[tuple[int, ...], bool], Graph] = OrderedDict()
        """By rows of each block, and whether the draw has a filter."""
        self.embedded: tuple[int, ...] | None = None
        """Position and token that the last graph wrote the embedding of."""
        self.ahead: _Ahead | None = None
        """The token behind the last one read; dropped where anything else is fed or run."""


class _StaticInputs:
    """The numbers that differ from launch to launch: one array on the host, one on the device."""

    def __init__(self, params: DecoderParams) -> None:
        num_exits = params.shape.num_exits
        self._num_tokens = params.num_tokens
        num_sent = 7 + num_exits - 1
        host_I = torch.zeros(num_sent + num_exits, dtype=torch.int64)
        device_I = torch.zeros_like(host_I, device=params.device)
        self._host_I, self._device_I, self._num_sent = host_I, device_I, num_sent
        integers = host_I.numpy()
        floats = integers.view(np.float64)
        self._positions, self._key, self._top_k = integers[:2], integers[2:3], integers[3:4]
        self._temperature_and_filters, self._thresholds = floats[4:7], floats[7:num_sent]
        self.filled = integers[num_sent:]
        """`DecodeState.filled`, where a launch gives it."""
        device_F = device_I.view(torch.float64)
        self.position_1 = device_I[:1]
        """Position of the last token fed."""
        self.next_1 = device_I[1:2]
        """Position of the token drawn."""
        self.key_1 = device_I[2:3]
        """`Noise.token_key`, as int64."""
        self.filters = Filters(device_F[4:5], device_I[3:4], device_F[5:6], device_F[6:7])
        """F, with limits that remove nothing where a filter is off; temperature 0 is the argmax."""
        self.thresholds = device_F[7:num_sent]
        """Of the policy, for each junction."""
        self.filled_E = device_I[num_sent:]
        """Position of the first row of each block; a token graph leaves what is right after it."""

    def set_token(self, length: int, job: TokenJob) -> None:
        """Fill in all but the counts, for the token that follows `length` tokens."""
        temperature, top_k, top_p, log_min_p = job.sampling.filters
        self._positions[:] = length - 1, length
        self._key[0] = np.uint64(job.noise.token_key(length)).astype(np.int64)
        self._top_k[0] = self._num_tokens if top_k is None else top_k
        self._temperature_and_filters[:] = (
            temperature,
            math.inf if top_p is None else top_p,
            -math.inf if log_min_p is None else log_min_p,
        )
        self._thresholds[:] = job.thresholds(length)

    def send(self, backend: GraphBackend, *, with_filled: bool = True) -> None:
        """Copy to the device: all of it, or all but the counts, which a token graph has left."""
        num_sent = len(self._host_I) if with_filled else self._num_sent
        backend.send(self._host_I[:num_sent], self._device_I[:num_sent])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put back what the device holds: before a capture a function runs in all branches."""
        device_I = self._device_I.clone()
        try:
            yield
        finally:
            self._device_I.copy_(device_I)


def bucket_rows(rows: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds a group of rows.

    Args:
        rows: Rows of the group, at most the largest bucket.
        buckets: Sizes in increasing order.
    """
    return buckets[bisect_left(buckets, rows)]
