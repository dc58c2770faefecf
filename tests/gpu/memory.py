"""Check that memory does not grow over many requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from nvium_titan.bench.graphs import graphs_of
from nvium_titan.bench.models import BenchModel
from nvium_titan.bench.workload import Workload
from nvium_titan.decode import Engine, ScriptedExits
from nvium_titan.decode.forward.graphs.forward import BLOCK_BUCKETS, MAX_TOKEN_GRAPHS
from tests.gpu.imitation import graph_engine

# Fragments of the allocator may add so much after the second round of requests.
_POOL_GROWTH = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """Memory over many requests of different lengths and exits."""

    num_requests: int
    """Requests served, in rounds: the same ones in another order."""
    memory_mb: list[float]
    """Held on the device at every sample, pools of graphs included (theirs alone, where graphs are
    imitated)."""
    num_graphs: int
    """Graphs held in the end."""
    bound: int
    """Most graphs that may be held."""
    is_flat: bool
    """Whether no later sample is above all those of the second round."""

    @property
    def failures(self) -> list[str]:
        """What is wrong, a sentence each."""
        failures = []
        if not self.is_flat:
            failures.append(f"memory grows: {self.memory_mb} MB")
        if self.num_graphs > self.bound:
            failures.append(f"{self.num_graphs} graphs are held, {self.bound} are allowed")
        return failures


def watch_memory(
    model: BenchModel, *, num_requests: int, num_rounds: int, sample_every: int, work: Workload
) -> MemoryFigures:
    """Serve requests of random lengths and exits in rounds, and watch memory and graphs.

    Args:
        model: A small one.
        num_requests: How many different requests.
        num_rounds: How often each is served, in another order every round; at least 3.
        sample_every: Requests between two samples.
        work: The longest prompt and generation.
    """
    engine = graph_engine(model.load_params(dtype="float32"), max_seq_len=work.max_seq_len)
    graphs, rng = graphs_of(engine), random.Random(work.seed)
    last = engine.num_exits - 1
    requests = []
    for seed in range(num_requests):
        num_new = rng.randint(2, work.new_tokens)
        prompt = [rng.randrange(engine.params.num_tokens)] * rng.randint(1, work.prompt_tokens)
        script = tuple(rng.choice((0, 0, rng.randint(0, last))) for _ in range(num_new))
        requests.append((prompt, num_new, ScriptedExits(exit_indices=script), seed))
    samples, ends, num_served = list[float](), list[int](), 0
    for _ in range(num_rounds):
        rng.shuffle(requests)
        for prompt, num_new, policy, seed in requests:
            engine.generate(prompt, max_new_tokens=num_new, policy=policy, seed=seed).result()
            num_served += 1
            if num_served % sample_every == 0:
                samples.append(_memory_bytes(engine) / 1e6)
        ends.append(len(samples))
    return MemoryFigures(
        num_requests=num_served,
        memory_mb=samples,
        num_graphs=graphs.num_graphs,
        bound=len(graphs.pool) * (MAX_TOKEN_GRAPHS + engine.num_exits * len(BLOCK_BUCKETS)),
        is_flat=max(samples[ends[1] :]) <= _POOL_GROWTH * max(samples[ends[0] : ends[1]]),
    )


def _memory_bytes(engine: Engine) -> int:
    if engine.params.device.type == "cuda":
        return torch.cuda.memory_reserved(engine.params.device)
    return graphs_of(engine).backend.pool_bytes
