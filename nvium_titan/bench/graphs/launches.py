"""What a token launches, copies and reads."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from nvium_titan.bench.graphs.modes import graphs_of
from nvium_titan.bench.ours import EngineSystem


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """What a token after the first costs in launches and reads; means over `num_tokens`."""

    num_tokens: int
    """Tokens counted."""
    graphs: float
    """Graphs launched."""
    copies: float
    """Copies to static inputs and from results."""
    host_reads: float
    """Times the host waited for a value."""
    num_skipped: int
    """Tokens and block calls that did not run as the graphs they should have been."""
    profiled_graphs: float | None
    """Graph launches that torch's profiler saw; None without a GPU."""
    profiled_kernels: float | None
    """Kernels that ran on the device, those in graphs included; None without a GPU."""


def count_launches(system: EngineSystem, prompt: Sequence[int], *, num_tokens: int) -> Launches:
    """Decode once and count; everything must have been captured before.

    Args:
        system: An engine in graphs, with the policy to decode by.
        prompt: What to continue.
        num_tokens: Tokens to count, behind the first one.
    """
    counters = graphs_of(system.engine).counters
    is_cuda = system.engine.params.device.type == "cuda"
    generation = system.engine.generate(
        prompt, max_new_tokens=1 + num_tokens, policy=system.policies[0], seed=0
    )
    next(generation)
    before = copy.copy(counters)
    events: Counter[str] = Counter()
    with _profiled(events) if is_cuda else nullcontext():
        for _ in range(num_tokens):
            next(generation)
    skipped = (counters.declined_tokens - before.declined_tokens) + (
        counters.eager_calls - before.eager_calls
    )
    return Launches(
        num_tokens=num_tokens,
        graphs=(counters.replays - before.replays) / num_tokens,
        copies=(counters.copies - before.copies) / num_tokens,
        host_reads=generation.result().stats.host_reads / (num_tokens + 1),
        num_skipped=skipped,
        profiled_graphs=events["cudaGraphLaunch"] / num_tokens if is_cuda else None,
        profiled_kernels=events["kernels"] / num_tokens if is_cuda else None,
    )


@contextmanager
def _profiled(events: Counter[str]) -> Iterator[None]:
    """Count the calls of the CUDA runtime by name, and as "kernels" what ran on the device."""
    with torch.profiler.profile() as trace:
        yield
    for event in trace.events() or ():
        if event.device_type.name == "CPU":
            events[event.name] += 1
        elif not event.name.startswith(("Memcpy", "Memset")):
            events["kernels"] += 1
