"""What a decode benchmark runs: anything that continues a prompt by a given number of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nvium_titan import __version__
from nvium_titan.decode import (
    Engine,
    ExitPolicy,
    GenerationRequest,
    GenerationResult,
    SampledRouter,
)
from nvium_titan.decode.schedule import ScheduleName

SETTLE_S = 0.1
"""Pause between runs: the threads of another engine go on spinning after its last token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long one generation took."""

    num_new_tokens: int
    """Tokens made, at least 1."""
    ttft_s: float
    """Seconds from the call to the first token: the prompt and one choice."""
    decode_s: float
    """Seconds for all tokens after the first."""
    num_sequences: int = 1
    """Sequences decoded at once; the first token of each is part of `ttft_s`."""

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token after the first, of which there must be one."""
        return 1000 * self.decode_s / (self.num_new_tokens - self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRun(Timing):
    """One generation of our own engine."""

    results: list[GenerationResult]
    """One per sequence."""
    layers_run: int
    """Layer calls after the prompt, each for any number of rows."""


def host_reads_per_token(runs: Sequence[EngineRun]) -> float:
    """Return how many values the host read from the device for each new token."""
    stats = [result.stats for run in runs for result in run.results]
    return sum(s.host_reads for s in stats) / sum(s.num_new_tokens for s in stats)


class System(Protocol):
    """An engine with a model in it, ready to run."""

    name: str
    """Shown in tables: "N-vium", "dense", or the package of a peer."""
    dtype: str
    """Type of its weights, such as "float32", "bfloat16", "int8"."""
    version: str
    """Of the package that computes."""
    threads: int
    """CPU threads it computes with."""

    def run(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Timing:
        """Sample exactly `num_new_tokens` tokens after the prompt; an end token ends nothing."""

    def close(self) -> None:
        """Give back memory and files; nothing may be run afterwards."""


class EngineSystem:
    """Our own engine, sampling at temperature 1 without filters."""

    version = __version__

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        dtype: str,
        policies: Sequence[ExitPolicy] = (SampledRouter(),),
        seed: int,
        schedule: ScheduleName = "lockstep",
    ) -> None:
        """Wrap an engine.

        Args:
            name: Shown in tables.
            engine: Has the model.
            dtype: Type of its weights, one of `bench.models.ENGINE_DTYPES`.
            policies: Who decides at junctions, for each of the sequences decoded at once.
            seed: Of the first sequence of the first run; each further one takes the next.
            schedule: When a batch runs which block.
        """
        self.name = name
        self.dtype = dtype
        self.threads = torch.get_num_threads()
        self.engine = engine
        self.policies = policies
        self._seed = seed
        self._schedule: ScheduleName = schedule

    def run(self, prompt_ids: Sequence[int], num_new_tokens: int) -> EngineRun:
        """Sample exactly `num_new_tokens` tokens for each policy; an end token ends nothing."""
        size, seed = len(self.policies), self._seed
        self._seed += size
        # Timed from outside the engine, so that all of its Python counts.
        start = time.perf_counter()
        if size == 1:
            generation = self.engine.generate(
                prompt_ids, max_new_tokens=num_new_tokens, policy=self.policies[0], seed=seed
            )
            next(generation)
            first = time.perf_counter()
            results = [generation.result()]
            end = time.perf_counter()
            layers_run = results[0].stats.layers_run
        else:
            batch = self.engine.generate_batch(
                [
                    GenerationRequest(
                        prompt_ids=prompt_ids,
                        max_new_tokens=num_new_tokens,
                        policy=policy,
                        seed=seed + row,
                    )
                    for row, policy in enumerate(self.policies)
                ],
                schedule=self._schedule,
            )
            # In lock-step these are the first token of each row.
            for _ in range(size):
                next(batch)
            first = time.perf_counter()
            results = batch.results()
            end = time.perf_counter()
            layers_run = batch.stats.layers_run
        return EngineRun(
            num_new_tokens=size * num_new_tokens,
            ttft_s=first - start,
            decode_s=end - first,
            num_sequences=size,
            results=results,
            layers_run=layers_run,
        )

    def close(self) -> None:
        """Drop the engine."""
        del self.engine
