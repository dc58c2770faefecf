"""Capturing a function into a graph, replaying it, branching inside it; on CUDA and, faked, on CPU.

A captured function takes no arguments and returns nothing. It must keep to what a graph can do:

    inputs    tensors at fixed addresses, whose contents the host replaces between replays; a
              Python number is baked in, once and for all
    outputs   written in place into tensors that outlive the graph; what the function allocates is
              the graph's own, and is overwritten at any later replay
    branches  on a bool that only the device reads (`GraphBackend.branch`)
    never     a read by the host, a shape that depends on values, a tensor made from host data

A CUDA graph breaks most of these rules without a word. `FakeGraphs` runs the same function on the
CPU and is strict: it refuses what a capture cannot hold, bakes what a capture bakes, and poisons
what nobody may read, before and after every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class CaptureError(ValueError):
    """A function cannot be a graph; the message names the operation and what to do instead."""


@dataclass(slots=True)
class GraphCounters:
    """What graphs have done since the model was built; every launch is one of these."""

    captures: int = 0
    """Functions captured."""
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


# --- CUDA -----------------------------------------------------------------------------------------


class CudaGraphs:
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
    def pool_bytes(self) -> int:
        """See `GraphBackend`; counts whole segments of the allocator."""
        segments = torch.cuda.memory_snapshot(self._pool)  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments)

    def capture(self, function: Callable[[], object], *, outputs: Sequence[Tensor] = ()) -> Graph:
        """See `GraphBackend`. After the run before it, nothing compiles inside."""
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

    def branch(self, is_taken: Tensor, body: Callable[[], object]) -> None:
        """See `GraphBackend`; outside a capture, in the run before it, every branch is taken."""
        graph: Any = self._capturing
        if graph is None:
            body()
            return
        graph.begin_capture_to_if_node(is_taken)
        try:
            body()
        finally:
            graph.end_capture_to_conditional_node()

    def send(self, host_I: Tensor, device_I: Tensor) -> None:
        """See `GraphBackend`. Waits only while the copy before this one is still on its way."""
        self._sent.synchronize()
        if len(self._outbox_I) < len(host_I):
            self._outbox_I = torch.empty_like(host_I, pin_memory=True)
        outbox_I = self._outbox_I[: len(host_I)]
        outbox_I.copy_(host_I)
        device_I.copy_(outbox_I, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))
        self.counters.copies += 1

    def fetch(self, device_I: Tensor) -> Fetch:
        """See `GraphBackend`."""
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


# --- fake -----------------------------------------------------------------------------------------


class FakeGraphs:
    """Graphs on the CPU: a list of operations on fixed tensors, and no mercy."""

    def __init__(self) -> None:
        self.counters = GraphCounters()
        self.why_no_branches: str | None = None
        self._tape: _Tape | None = None
        self._is_before = False
        self._graphs: WeakSet[_FakeGraph] = WeakSet()

    @property
    def pool_bytes(self) -> int:
        """See `GraphBackend`."""
        return sum(graph.own_bytes for graph in self._graphs)

    @torch.inference_mode()
    def capture(self, function: Callable[[], object], *, outputs: Sequence[Tensor] = ()) -> Graph:
        """See `GraphBackend`. As the real one, it runs the function once before, in all branches.

        Raises:
            CaptureError: If a rule of the module is broken.
        """
        self._is_before = True
        try:
            function()
        finally:
            self._is_before = False
        tape = self._tape = _Tape()
        try:
            with _NoHostReads(), tape:
                result = function()
        finally:
            self._tape = None
        for tensor in _tensors(result):
            maker = next((step for step in tape.own_steps() if step.makes(tensor)), None)
            made_by = f"made by {maker.func}" if maker else "which it did not make"
            raise CaptureError(
                f"the function returns a tensor {made_by}; what a graph allocates is overwritten "
                "by later replays: copy it into a static output"
            )
        self.counters.captures += 1
        graph = _FakeGraph(tape, outputs, self.counters)
        self._graphs.add(graph)
        return graph

    def branch(self, is_taken: Tensor, body: Callable[[], object]) -> None:
        """See `GraphBackend`.

        Raises:
            CaptureError: Outside a capture, or if `is_taken` is not one bool.
        """
        tape = self._tape
        if tape is None and not self._is_before:
            raise CaptureError("a branch exists only inside a capture")
        if is_taken.dtype != torch.bool or is_taken.dim() != 0:
            raise CaptureError(
                f"a branch needs one bool of shape (), not {is_taken.dtype} of shape "
                f"{tuple(is_taken.shape)}"
            )
        if tape is None:
            body()
            return
        outer = tape.steps
        tape.steps = []
        try:
            body()
            outer.append(_Branch(is_taken, tape.steps))
        finally:
            tape.steps = outer

    def send(self, host_I: Tensor, device_I: Tensor) -> None:
        """See `GraphBackend`."""
        device_I.copy_(host_I)
        self.counters.copies += 1

    def fetch(self, device_I: Tensor) -> Fetch:
        """See `GraphBackend`."""
        self.counters.copies += 1
        return _FakeFetch(device_I.clone(), self.counters)


class _FakeFetch:
    def __init__(self, inbox_I: Tensor, counters: GraphCounters) -> None:
        self._inbox_I = inbox_I
        self._counters = counters

    def wait(self) -> list[int]:
        self._counters.host_reads += 1
        return self._inbox_I.tolist()


@dataclass(slots=True)
class _Write:
    """An operation that writes into tensors it was given."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> None:
        self.func(*self.args, **self.kwargs)


@dataclass(slots=True)
class _Make:
    """An operation that makes tensors: the memory of the graph, at the same addresses for ever."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    own: list[tuple[int, Tensor]]
    """Which of its results are new, and the tensors that hold them."""

    def makes(self, tensor: Tensor) -> bool:
        return any(_is_same_memory(own, tensor) for _, own in self.own)

    def run(self) -> None:
        results = list(_tensors(self.func(*self.args, **self.kwargs)))
        for index, own in self.own:
            own.copy_(results[index])


@dataclass(slots=True)
class _Branch:
    """A part that runs only where the device says so."""

    is_taken: Tensor
    steps: list[_Step]

    def run(self) -> None:
        if bool(self.is_taken):
            for step in self.steps:
                step.run()


_Step = _Write | _Make | _Branch


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations. New tensors are made, existing ones are left as they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []

    def own_steps(self, steps: list[_Step] | None = None) -> Iterator[_Make]:
        """Give every step that makes a tensor, those of branches included."""
        for step in self.steps if steps is None else steps:
            if isinstance(step, _Make):
                yield step
            elif isinstance(step, _Branch):
                yield from self.own_steps(step.steps)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:  # inference mode hands over whole functions; their parts are recorded
                return func.decompose(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise _refusal(func, "the host would read a value of the device")
        if torch.Tag.dynamic_output_shape in func.tags:
            raise _refusal(func, "the shape of its result depends on values")
        if func is torch.ops.aten.lift_fresh.default:
            raise _refusal(func, "a tensor made from host data is a copy that no graph can hold")
        written = [
            value
            for argument, value in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self.steps.append(_Write(func, args, kwargs))
            num_returns = len(func._schema.returns)
            return written[0] if num_returns == 1 else tuple(written) if num_returns else None
        result = func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        own = [
            (index, tensor)
            for index, tensor in enumerate(_tensors(result))
            if tensor.numel() and not any(_is_same_memory(tensor, other) for other in given)
        ]
        if own:
            self.steps.append(_Make(func, args, kwargs, own))
        return result


class _NoHostReads(TorchFunctionMode):
    """Refuses what reads a tensor of the CPU without an operation that a tape could see."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__):
            raise _refusal(f"Tensor.{func.__name__}", "the host would read values of the device")
        return func(*args, **(kwargs or {}))


class _FakeGraph:
    def __init__(self, tape: _Tape, outputs: Sequence[Tensor], counters: GraphCounters) -> None:
        self._steps = tape.steps
        self._outputs = tuple(outputs)
        self._own = [own for step in tape.own_steps() for _, own in step.own]
        self._counters = counters
        self.own_bytes = sum(own.numel() * own.element_size() for own in self._own)

    @torch.inference_mode()
    def replay(self) -> None:
        for output in self._outputs:
            _poison(output)
        for step in self._steps:
            step.run()
        # The pool is shared: another graph may lie there by the time that anybody looks.
        for own in self._own:
            _poison(own)
        self._counters.replays += 1


def _refusal(operation: object, reason: str) -> CaptureError:
    return CaptureError(
        f"{operation} cannot be part of a graph: {reason}; keep it outside, or use static tensors"
    )


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Give each argument of a call with its entry in the schema."""
    schema = func._schema.arguments
    yield from zip(schema, args, strict=False)
    yield from ((argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs)


def _tensors(value: object) -> Iterator[Tensor]:
    """Give every tensor in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _poison(tensor: Tensor) -> None:
    """Fill with what no computation gives by chance; a bool has no such value."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
