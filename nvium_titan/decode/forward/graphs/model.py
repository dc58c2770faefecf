"""Decoding in graphs: one launch for a token, junctions decided on the device.

    a token     one graph for each tuple of row counts, which the host knows before the launch:
                token t brings t + 1 - filled_k rows to block k if it gets there, whatever it
                decides on the way (N-vium, arXiv:2605.13190, Sec. 4.2, as the contiguous runs of
                `decode.deferred`). Blocks, junctions as nested branches, the adapter of the exit
                where it leaves, head, draw, and the embedding of the token that was drawn. One
                graph, two copies, one host read.
    a block     one graph for each block and row count: prompts, flushes, and tokens that cannot be
                one graph (the first after a prompt, runs over the largest bucket, laws that look at
                several exits). The host reads the router at every junction.
    a batch     torch operations one by one, as `DecoderModel` has them.

The next token is launched before this one is read, where the asker says what it will need: the
token drawn and the counts are on the device, and of the counts the host knows a bound, one row more
than now, which is all that a bucket needs. So the device does not wait for the host. If the next
token is not wanted after all, what it wrote is overwritten before it is read.

A graph bakes addresses and Python numbers, so positions, thresholds, key and temperature are static
inputs, and buffers come from a pool; graphs and inputs belong to a set of buffers.

Shapes: E exits, T rows, S slots, D width, G key/value heads, R query heads per key/value head,
M = R T, H head width, N heads, P = H / 2 rotary pairs, V vocabulary, I inputs; 1 is one row.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nvium_titan.decode.deferred import (
    DECODE_BUCKETS,
    PREFILL_BUCKETS,
    FilledCounts,
    bucket_rows,
)
from nvium_titan.decode.forward.base import Group, TokenRun, TokenRunner
from nvium_titan.decode.forward.graphs.capture import Fetch, Graph, GraphBackend
from nvium_titan.decode.forward.graphs.fused import build_junction, draw_filtered, draw_token
from nvium_titan.decode.forward.torch import DecoderModel, rope_table
from nvium_titan.decode.kv_cache import BufferPool, SequenceBuffers, WorkSpace
from nvium_titan.decode.needs import NeedToken
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.sampling import Sampler, filter_limits

logger = logging.getLogger(__name__)

MAX_TOKEN_GRAPHS = 56
"""Token graphs kept for a set of buffers: as many as there are tuples for four exits, where all
draws have a filter or none has."""
LAUNCHES_PER_TOKEN = 3
"""Of a token in one graph: the inputs' copy, the graph, the result's copy."""
_MAX_COMPILATIONS = 128


class GraphModel:
    """A `BlockModel` over static buffers. One call runs at a time, on CUDA all on one stream."""

    looks_ahead = True

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
            num_slots: Slots of every set of buffers, slack for padded rows included.
            backend: Captures and replays. If it has no branches, tokens run block by block.
            compiles: Compile the layer, once for each number of rows.
            max_token_graphs: Most token graphs kept for a set of buffers.
        """
        config, device = params.config, params.device
        self.params = params
        self.state_dtype = params.dtype
        self.sampler: Sampler | None = None
        self.backend = backend
        self.counters = backend.counters
        self._max_token_graphs = max_token_graphs
        self._lock = threading.Lock()
        self._eager = DecoderModel(params, num_slots=num_slots)
        self.exit_norm = self._eager.exit_norm
        self.router_logit = self._eager.router_logit
        self.exit_state = self._eager.exit_state
        self.logits = self._eager.logits
        self._junctions = [
            build_junction(self._eager, index) for index in range(config.shape.num_exits - 1)
        ]
        self._compiles = compiles
        self._run_layer = run_layer
        if compiles:
            self._run_layer = torch.compile(run_layer, fullgraph=True, dynamic=False)
        self._layers = tuple(
            tuple(_LayerWeights.of(params, index) for index in block)
            for block in config.shape.blocks
        )
        self._scale = config.shape.head_dim**-0.5 if params.is_low_precision else 1.0
        self._slots_S = torch.arange(num_slots, device=device)
        turns_SP = rope_table(config, num_slots=num_slots)
        rope_dtype = torch.float64 if params.dtype == torch.float64 else torch.float32
        self._rope_SP2 = torch.view_as_real(turns_SP).to(device, rope_dtype)
        # What a token graph leaves: all of it is written anew by every replay.
        self._o_1D = torch.zeros(1, config.shape.dim, dtype=params.dtype, device=device)
        self._result_2 = torch.zeros(2, dtype=torch.int64, device=device)
        work = WorkSpace(params, max_rows=PREFILL_BUCKETS[-1], buckets=PREFILL_BUCKETS)
        self.buffer_pool: BufferPool | None = BufferPool(
            lambda: SequenceBuffers(params, num_slots=num_slots, dtype=params.dtype, work=work)
        )
        self._graphs: dict[SequenceBuffers, _BufferGraphs] = {}
        self.token_runner: TokenRunner | None = self._run_token
        if backend.why_no_branches is not None:
            logger.warning("tokens run block by block: %s", backend.why_no_branches)
            self.token_runner = None

    # --- what an engine calls -------------------------------------------------------------------

    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        """Write the embeddings of `token_ids`; the token that a graph drew is there already."""
        graphs = self._graphs.get(buffers)
        if graphs is not None:
            if graphs.embedded == (first, *token_ids):
                return
            graphs.embedded = None
            self._drop_ahead(buffers)
        self._eager.embed(buffers, token_ids, first=first)

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Run the layers of one block: a graph for one sequence of the pool, else operations."""
        buffers, first, rows, _ = groups[0]
        with self._lock:
            for group in groups:
                self._drop_ahead(group.buffers)
            if len(groups) > 1 or not self._owns(buffers):
                self.counters.eager_calls += 1
                self._eager.run_block(block_index, groups)
                return
            graphs = self._graphs_on(buffers)
            graphs.inputs.filled[block_index] = first
            graphs.inputs.send(self.backend)
            self._block_graph(graphs, block_index, rows).replay()

    def _run_token(
        self, buffers: SequenceBuffers, counts: FilledCounts, need: NeedToken
    ) -> TokenRun | None:
        """Run a token as one graph, begin the next, read exit and token; see `TokenRunner`.

        One host read; a capture where the tuple of row counts is new. Declines a token whose rows
        have run (the first after a prompt), a run over the largest bucket, and foreign buffers.
        """
        with self._lock:
            result = self._launch(buffers, counts, need) if self._owns(buffers) else None
            if result is None:
                self.counters.declined_tokens += 1
                return None
            graphs = self._graphs[buffers]
            if need.following is not None:
                graphs.ahead = self._launch_ahead(graphs, counts, need.following())
            exit_index, token_id = result.wait()
        counts.filled[: exit_index + 1] = [counts.length] * (exit_index + 1)
        graphs.embedded = (counts.length, token_id)
        return TokenRun(exit_index, None, token_id)

    def _launch(
        self, buffers: SequenceBuffers, counts: FilledCounts, need: NeedToken
    ) -> Fetch | None:
        """Launch a token, if it does not run already; None if it cannot be one graph."""
        graphs = self._graphs_on(buffers)
        ahead = graphs.ahead
        if ahead is not None and ahead.is_for(counts, need):
            graphs.ahead = None
            return ahead.result
        self._drop_ahead(buffers)
        owed = [counts.length - filled for filled in counts.filled]
        graphs.inputs.filled[:] = counts.filled
        return self._start(graphs, owed, counts.length - 1, need, with_filled=True)

    def _launch_ahead(
        self, graphs: _BufferGraphs, counts: FilledCounts, need: NeedToken | None
    ) -> _Ahead | None:
        """Launch the token behind the one that runs; None if it cannot be one graph.

        Of what the blocks will owe, one row more than now is the most: the first block owes exactly
        one, and how far the others have come is on the device.
        """
        if need is None:
            return None
        owed = [1, *(counts.length + 1 - filled for filled in counts.filled[1:])]
        result = self._start(graphs, owed, counts.length, need, with_filled=False)
        return None if result is None else _Ahead(counts.length + 1, need, result)

    def _start(
        self,
        graphs: _BufferGraphs,
        owed: Sequence[int],
        position: int,
        need: NeedToken,
        *,
        with_filled: bool,
    ) -> Fetch | None:
        """Launch the graph of a token fed at `position`, with at most `owed` rows in each block."""
        rows = _bucket_tuple(owed)
        if rows is None:
            return None
        graphs.inputs.set_token(position, need)
        graphs.inputs.send(self.backend, with_filled=with_filled)
        self._token_graph(graphs, rows, has_filter=need.draw.has_filter).replay()
        return self.backend.fetch(self._result_2)

    def _drop_ahead(self, buffers: SequenceBuffers) -> None:
        """Forget the token that was begun, since it is not the one that comes."""
        graphs = self._graphs.get(buffers)
        if graphs is not None and graphs.ahead is not None:
            self.counters.unused_tokens += 1
            graphs.ahead = None

    # --- graphs ---------------------------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept."""
        return sum(len(g.blocks) + len(g.tokens) for g in self._graphs.values())

    def _owns(self, buffers: SequenceBuffers) -> bool:
        return self.buffer_pool is not None and buffers in self.buffer_pool

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
        if not self._compiles:
            return self.backend.capture(function, outputs=outputs)
        # Each number of rows is a compilation of its own, and so is each model in the process.
        with torch._dynamo.config.patch(recompile_limit=_MAX_COMPILATIONS):
            return self.backend.capture(function, outputs=outputs)

    # --- what is captured -----------------------------------------------------------------------

    def _token(self, graphs: _BufferGraphs, rows: tuple[int, ...], *, has_filter: bool) -> None:
        """All of a token: where it leaves, the logits there, the draw, the next embedding."""
        self._descend(graphs, rows, 0)
        inputs = graphs.inputs
        logits_V = self.logits(self._o_1D)[0, : self.params.num_tokens]
        if has_filter:
            token_1 = draw_filtered(
                logits_V, inputs.key_1, inputs.temperature_1,
                top_k_1=inputs.top_k_1, top_p_1=inputs.top_p_1, log_min_p_1=inputs.log_min_p_1,
            )  # fmt: skip
        else:
            token_1 = draw_token(logits_V, inputs.key_1, inputs.temperature_1)
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
        buffers, inputs = graphs.buffers, graphs.inputs
        config = self.params.config
        positions_T = inputs.filled_E[block_index] + self._slots_S[:rows]
        x_TD = buffers.boundary_SD[block_index].index_select(0, positions_T)
        rope_TP2 = self._rope_SP2.index_select(0, positions_T)
        visible_TS = self._slots_S <= positions_T.unsqueeze(1)
        per_group = config.shape.num_heads // config.shape.num_kv_heads
        visible_MS = visible_TS.repeat(per_group, 1)
        slots_LGSH = buffers.slots_LGSH[block_index]
        for index, weights in enumerate(self._layers[block_index]):
            x_TD = self._run_layer(
                x_TD,
                slots_LGSH[index],
                positions_T,
                rope_TP2,
                visible_MS,
                *weights,
                eps=config.shape.norm_eps,
                scale=self._scale,
            )
        buffers.boundary_SD[block_index + 1].index_copy_(0, positions_T, x_TD)


class _Ahead(NamedTuple):
    """A token that was launched before the one before it was read."""

    length: int
    """Tokens fed, its own included."""
    need: NeedToken
    """What it was launched for."""
    result: Fetch
    """Its exit and its token."""

    def is_for(self, counts: FilledCounts, need: NeedToken) -> bool:
        """Return whether it is the token that is wanted now, on what was fed."""
        wanted = (counts.length, need.thresholds, need.draw)
        return (self.length, self.need.thresholds, self.need.draw) == wanted


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
        num_exits = params.config.shape.num_exits
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
        """`FilledCounts.filled`, where a launch gives it."""
        device_F = device_I.view(torch.float64)
        self.position_1 = device_I[:1]
        """Position of the last token fed."""
        self.next_1 = device_I[1:2]
        """Position of the token drawn."""
        self.key_1 = device_I[2:3]
        """`Draw.key`, as int64."""
        self.top_k_1 = device_I[3:4]
        """See `filter_limits`."""
        self.temperature_1 = device_F[4:5]
        """`SamplingParams.temperature`."""
        self.top_p_1 = device_F[5:6]
        """See `filter_limits`."""
        self.log_min_p_1 = device_F[6:7]
        """See `filter_limits`."""
        self.thresholds = device_F[7:num_sent]
        """`NeedToken.thresholds`."""
        self.filled_E = device_I[num_sent:]
        """Position of the first row of each block; a token graph leaves what is right after it."""

    def set_token(self, position: int, need: NeedToken) -> None:
        """Fill in what a token graph reads but the counts; the token fed last is at `position`."""
        draw = need.draw
        sampling = draw.sampling
        top_k, top_p, log_min_p = filter_limits(sampling, vocab_size=self._num_tokens)
        self._positions[:] = position, position + 1
        self._key[0] = np.uint64(draw.key).astype(np.int64)
        self._top_k[0] = top_k
        self._temperature_and_filters[:] = sampling.temperature, top_p, log_min_p
        self._thresholds[:] = need.thresholds

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


def _bucket_tuple(owed: Sequence[int]) -> tuple[int, ...] | None:
    """Return the rows of each block in a token graph; None where there is none."""
    if owed[0] == 0 or owed[-1] > DECODE_BUCKETS[-1]:
        return None
    return tuple(bucket_rows(num_rows, DECODE_BUCKETS) for num_rows in owed)


class _LayerWeights(NamedTuple):
    """The weights of a layer, in the order of `run_layer`."""

    attn_norm_D: Tensor
    qkv_DW: Tensor
    attn_out_QD: Tensor
    mlp_norm_D: Tensor
    gate_up_D2F: Tensor
    down_FD: Tensor

    @classmethod
    def of(cls, params: DecoderParams, index: int) -> _LayerWeights:
        layer, width = params.layers[index], params.config.shape.dim
        return cls(
            layer.attn_norm_2D[:width],
            layer.qkv_DW,
            layer.attn_out_QD,
            layer.mlp_norm_2D[:width],
            layer.gate_up_D2F,
            layer.down_FD,
        )


def run_layer(
    x_TD: Tensor,
    slots_GSH: Tensor,
    positions_T: Tensor,
    rope_TP2: Tensor,
    visible_MS: Tensor,
    attn_norm_D: Tensor,
    qkv_DW: Tensor,
    attn_out_QD: Tensor,
    mlp_norm_D: Tensor,
    gate_up_D2F: Tensor,
    down_FD: Tensor,
    *,
    eps: float,
    scale: float,
) -> Tensor:
    """Return a layer's output; writes the rows' keys and values into their slots.

    Weights are arguments, so that one compilation serves all layers.

    Args:
        x_TD: The residual stream.
        slots_GSH: Keys (first half of the heads) and values of this layer; written.
        positions_T: Where the rows stand, int64.
        rope_TP2: Cosine and sine of every pair at those positions, at least float32.
        visible_MS: Which slots each query sees, bool.
        attn_norm_D: See `LayerParams`, as the others.
        qkv_DW: Likewise.
        attn_out_QD: Likewise.
        mlp_norm_D: Likewise.
        gate_up_D2F: Likewise.
        down_FD: Likewise.
        eps: Of both norms.
        scale: Of the scores.
    """
    rows, (num_slot_heads, _, head) = len(x_TD), slots_GSH.shape
    groups = num_slot_heads // 2
    normed_TD = F.rms_norm(x_TD, attn_norm_D.shape, attn_norm_D, eps)
    heads_TNH = (normed_TD @ qkv_DW).view(rows, -1, head)
    num_queries = heads_TNH.shape[1] - 2 * groups
    pairs_TNP2 = heads_TNH[:, : num_queries + groups].view(rows, -1, head // 2, 2)
    x, y = pairs_TNP2.to(rope_TP2.dtype).unbind(-1)
    cos_T1P, sin_T1P = rope_TP2.unsqueeze(1).unbind(-1)
    turned_TNP2 = torch.stack((x * cos_T1P - y * sin_T1P, x * sin_T1P + y * cos_T1P), dim=-1)
    turned_TNH = turned_TNP2.flatten(-2).to(x_TD.dtype)
    kv_TNH = torch.cat((turned_TNH[:, num_queries:], heads_TNH[:, num_queries + groups :]), dim=1)
    slots_GSH[:, positions_T] = kv_TNH.transpose(0, 1)
    queries_TGRH = turned_TNH[:, :num_queries].view(rows, groups, -1, head)
    queries_GMH = queries_TGRH.permute(1, 2, 0, 3).reshape(groups, -1, head)
    attended_GMH = F.scaled_dot_product_attention(
        queries_GMH.unsqueeze(0),
        slots_GSH[:groups].unsqueeze(0),
        slots_GSH[groups:].unsqueeze(0),
        attn_mask=visible_MS,
        scale=scale,
    )
    attended_GRTH = attended_GMH.view(groups, -1, rows, head)
    x_TD = x_TD + attended_GRTH.permute(2, 0, 1, 3).reshape(rows, -1) @ attn_out_QD
    normed_TD = F.rms_norm(x_TD, mlp_norm_D.shape, mlp_norm_D, eps)
    gate_TF, up_TF = (normed_TD @ gate_up_D2F).chunk(2, dim=-1)
    return x_TD + (F.silu(gate_TF) * up_TF) @ down_FD
