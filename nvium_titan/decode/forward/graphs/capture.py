"""Capturing a function into a CUDA graph, replaying it, branching inside it.

A captured function takes no arguments and returns nothing. It must keep to what a graph can do:

    inputs    tensors at fixed addresses, whose contents the host replaces between replays; a
              Python number is baked in, once and for all
    outputs   written in place into tensors that outlive the graph; what the function allocates is
              the graph's own, and is overwritten at any later replay
    branches  on a bool that only the device reads (`GraphBackend.branch`)
    never     a read by the host, a shape that depends on values, a tensor made from host data

A CUDA graph breaks most of these rules without a word; the tests imitate one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override


class CaptureError(ValueError):
    """A function cannot be a graph; the message names the operation and what to do instead."""


@dataclass(slots=True)
class GraphCounters:
    """What graphs have done since the model was built; every launch is one of these."""

    captures: int = 0
    """Functions captured."""
    capture_s: float = 0.0
    """Seconds of the host in captures, compilation included."""
    dropped: int = 0
    """Graphs given up for others, least recently used first."""
    replays: int = 0
    """Graphs launched."""
    copies: int = 0
    """Copies to the static inputs and from the results, each a launch of its own."""
    host_reads: int = 0
    """Times the host waited for a result."""
    unused_tokens: int = 0
    """Tokens that were begun before the one before them was read, and then not wanted; counted when
    the same buffers are used again."""
    eager_calls: int = 0
    """Block calls in separate operations, because a batch or foreign buffers came."""
    declined_tokens: int = 0
    """Tokens that could not be one graph and were run block by block."""


class Graph(Protocol):
    """A captured function."""

    def replay(self) -> None:
        """Run it on what the static inputs hold now. Does not wait for the device."""


class GraphBackend(Protocol):
    """Where graphs are captured and run. One capture at a time, one stream."""

    counters: GraphCounters
    """What has been done so far."""
    why_no_branches: str | None
    """In one line, why `branch` cannot be used; None if it can."""

    @property
    def pool_bytes(self) -> int:
        """Memory that all graphs together hold for their intermediate results."""

    def capture(self, function: Callable[[], object], *, outputs: Sequence[Tensor] = ()) -> Graph:
        """Return `function` as a graph, which has not run yet.

        Args:
            function: Runs once before it is captured, on what the static inputs hold now, and with
                every branch taken: what it must not leave behind is the caller's to put back.
            outputs: Static tensors that every replay writes completely.

        Raises:
            CaptureError: If the function breaks a rule of the module, as far as that can be seen.
        """

    def branch(self, is_taken: Tensor, body: Callable[[], object]) -> None:
        """Run `body` if a bool on the device says so, inside a capture; may be nested.

        Args:
            is_taken: Shape (), bool.
            body: As a captured function.
        """

    def send(self, host_I: Tensor, device_I: Tensor) -> None:
        """Copy to the device; `host_I` may be changed at once."""

    def fetch(self, device_I: Tensor) -> Fetch:
        """Begin to copy integers from the device, as they are behind what was launched so far."""


class Fetch(Protocol):
    """Integers on their way from the device."""

    def wait(self) -> list[int]:
        """Return them: the one place where the host waits for the device."""


class CudaGraphs(GraphBackend):
    """CUDA graphs, captured by hand into one memory pool; branches are conditional IF nodes."""

    def __init__(self, device: torch.device) -> None:
        """Make the pool and the stream to capture on, and try an IF node.

        Args:
            device: A CUDA device.
        """
        self.counters = GraphCounters()
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._capturing: torch.cuda.CUDAGraph | None = None
        self._outbox_I = torch.empty(0, dtype=torch.int64)
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.why_no_branches = self._try_a_branch()
        self.counters = GraphCounters()

    @property
    @override
    def pool_bytes(self) -> int:
        """Counts whole segments of the allocator."""
        segments = torch.cuda.memory_snapshot(self._pool)  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments)

    @override
    def capture(self, function: Callable[[], object], *, outputs: Sequence[Tensor] = ()) -> Graph:
        """After the run before it, nothing compiles inside."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)
        # What cuBLAS works in must be the pool's, not memory that others get after this; and every
        # stream that a branch is captured on would keep its own for ever.
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            self._capturing = graph
            try:
                function()
            finally:
                self._capturing = None
        torch._C._cuda_clearCublasWorkspaces()
        self.counters.captures += 1
        return _CudaGraph(graph, self.counters)

    @override
    def branch(self, is_taken: Tensor, body: Callable[[], object]) -> None:
        """Outside a capture, in the run before it, every branch is taken."""
        graph: Any = self._capturing
        if graph is None:
            body()
            return
        graph.begin_capture_to_if_node(is_taken)
        try:
            body()
        finally:
            graph.end_capture_to_conditional_node()

    @override
    def send(self, host_I: Tensor, device_I: Tensor) -> None:
        """Waits only while the copy before this one is still on its way."""
        self._sent.synchronize()
        if len(self._outbox_I) < len(host_I):
            self._outbox_I = torch.empty_like(host_I, pin_memory=True)
        outbox_I = self._outbox_I[: len(host_I)]
        outbox_I.copy_(host_I)
        device_I.copy_(outbox_I, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))
        self.counters.copies += 1

    @override
    def fetch(self, device_I: Tensor) -> Fetch:
        self.counters.copies += 1
        return _CudaFetch(device_I, self.counters)

    def _try_a_branch(self) -> str | None:
        """Return None if a graph with two branches does what it should, else why not."""
        if not hasattr(torch._C._CUDAGraph, "begin_capture_to_if_node"):
            return f"torch {torch.__version__} cannot capture IF nodes; 2.13 and newer can"
        is_taken_2 = torch.tensor([True, False], device=self._device)
        runs_2 = torch.zeros(2, dtype=torch.int64, device=self._device)

        def function() -> None:
            for index in range(2):
                self.branch(is_taken_2[index], partial(runs_2[index : index + 1].add_, 1))

        try:
            graph = self.capture(function)
            runs_2.zero_()
            graph.replay()
            runs = self.fetch(runs_2).wait()
        except RuntimeError as error:
            return f"a trial IF node failed: {str(error).splitlines()[0]}"
        return None if runs == [1, 0] else f"a trial IF node ran its branches {runs} times"


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, counters: GraphCounters) -> None:
        self._graph = graph
        self._counters = counters

    def replay(self) -> None:
        self._graph.replay()
        self._counters.replays += 1


class _CudaFetch:
    def __init__(self, device_I: Tensor, counters: GraphCounters) -> None:
        self._inbox_I = torch.empty(len(device_I), dtype=torch.int64, pin_memory=True)
        self._inbox_I.copy_(device_I, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record(torch.cuda.current_stream(device_I.device))
        self._counters = counters

    def wait(self) -> list[int]:
        self._arrived.synchronize()
        self._counters.host_reads += 1
        return self._inbox_I.tolist()
