"""CUDA graphs imitated on the CPU: a list of operations on fixed tensors, and no mercy.

A CUDA graph breaks most of the rules of `decode.forward.graphs.capture` without a word. This
refuses what a capture cannot hold, bakes what a capture bakes, and poisons what nobody may read,
before and after every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvium_titan.decode import DecoderParams, Engine
from nvium_titan.decode.forward.graphs.capture import CaptureError, Fetch, Graph, GraphCounters
from nvium_titan.decode.forward.graphs.forward import GraphForward


def graph_engine(
    params: DecoderParams, *, max_seq_len: int | None = None, **options: Any
) -> Engine:
    """Return an engine in graphs: CUDA's own, or imitated where the weights are on the CPU.

    Args:
        params: The weights.
        max_seq_len: As for `Engine`.
        options: Of `GraphForward`.
    """
    if params.device.type == "cuda":
        return Engine(params, max_seq_len=max_seq_len, kernels="graph")
    num_slots = max_seq_len or params.shape.max_seq_len
    options = {"backend": ImitatedGraphs(), "compiles": False, **options}
    forward = GraphForward(params, num_slots=num_slots, **options)
    return Engine.with_forward(forward, max_seq_len=num_slots)


class ImitatedGraphs:
    """Graphs on the CPU: a list of operations on fixed tensors, and no mercy."""

    def __init__(self) -> None:
        self.counters = GraphCounters()
        self.why_no_branches: str | None = None
        self._tape: _Tape | None = None
        self._is_before = False
        self._graphs: WeakSet[_ImitatedGraph] = WeakSet()

    @property
    def pool_bytes(self) -> int:
        return sum(graph.own_bytes for graph in self._graphs)

    @torch.inference_mode()
    def capture(self, function: Callable[[], object], *, outputs: Sequence[Tensor] = ()) -> Graph:
        """As the real one, it runs the function once before, in all branches.

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
        graph = _ImitatedGraph(tape, outputs, self.counters)
        self._graphs.add(graph)
        return graph

    def branch(self, is_taken: Tensor, body: Callable[[], object]) -> None:
        """Raise CaptureError outside a capture, or if `is_taken` is not one bool."""
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
        device_I.copy_(host_I)
        self.counters.copies += 1

    def fetch(self, device_I: Tensor) -> Fetch:
        self.counters.copies += 1
        return _ImitatedFetch(device_I.clone(), self.counters)


class _ImitatedFetch:
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


class _ImitatedGraph:
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
