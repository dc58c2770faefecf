"""Our own engine as a system of a benchmark, and where its time goes."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvium_titan import __version__
from nvium_titan.bench.system import Timing
from nvium_titan.decode import (
    Engine,
    GenerationRequest,
    GenerationResult,
    Noise,
    SampledRouter,
    SamplingParams,
)
from nvium_titan.decode.forward.base import TokenRunner
from nvium_titan.decode.policy import ExitPolicy

PARTS = ("blocks", "junctions", "head", "sampling", "python")
"""Block kernels; norms and routers; adapter and lm_head; noise and choice; the rest."""

_PART_OF = {
    "run_block": "blocks",
    "exit_norm": "junctions",
    "router_logit": "junctions",
    "exit_state": "head",
    "logits": "head",
}


class EngineRun(NamedTuple):
    """What one run of our engine did."""

    results: list[GenerationResult]
    """One per sequence."""
    layers_run: int
    """Layer calls after the prompt, each for any number of rows."""


class EngineSystem:
    """One of our engines, sampling at temperature 1 without filters."""

    version = __version__

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        dtype: str,
        policies: Sequence[ExitPolicy] = (SampledRouter(),),
        seed: int,
    ) -> None:
        """Wrap an engine.

        Args:
            name: For the table.
            engine: Its model.
            dtype: Type of its weights, by its name in `bench.models`.
            policies: Who decides at junctions, for each of the sequences decoded at once.
            seed: Of the first sequence of the first run; each further one takes the next.
        """
        self.name = name
        self.dtype = dtype
        self.threads = torch.get_num_threads()
        self.engine = engine
        self.policies = policies
        self.runs: list[EngineRun] = []
        """What each run did."""
        self._seed = seed

    def run(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Timing:
        """See `System`; timed from outside, so that all of the engine's Python counts."""
        size, seed = len(self.policies), self._seed
        self._seed += size
        start = time.perf_counter()
        if size == 1:
            generation = self.engine.generate(
                prompt_ids, max_new_tokens=num_new_tokens, policy=self.policies[0], seed=seed
            )
            next(generation)
            first = time.perf_counter()
            result = generation.result()
            end = time.perf_counter()
            self.runs.append(EngineRun([result], result.stats.layers_run))
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
                ]
            )
            # Lock-step: every row gets its first token before any gets its second.
            for _ in range(size):
                next(batch)
            first = time.perf_counter()
            results = batch.results()
            end = time.perf_counter()
            self.runs.append(EngineRun(results, batch.stats.layers_run))
        return Timing(
            num_new_tokens=size * num_new_tokens,
            ttft_s=first - start,
            decode_s=end - first,
            num_sequences=size,
        )

    def close(self) -> None:
        """See `System`."""
        del self.engine


def split_time(
    engine: Engine, prompt_ids: Sequence[int], num_new_tokens: int, *, policy: ExitPolicy, seed: int
) -> dict[str, float]:
    """Return the milliseconds per token after the first by `PARTS`, from one run with timers.

    The timers stand in proxies around the model and the noise; the engine has none.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    timed = copy.copy(engine)
    timed.runner = copy.copy(engine.runner)
    model = _TimedModel(engine.runner.model, spent)
    timed.runner.model = model
    noise = _TimedNoise(seed, engine, spent)
    sampling = SamplingParams()
    state = timed.new_state(max_length=len(prompt_ids) + num_new_tokens)
    timed.prefill(state, prompt_ids)
    token = timed.choose(state, noise=noise, sampling=sampling, policy=policy)
    spent.clear()
    start = time.perf_counter()
    for _ in range(num_new_tokens - 1):
        token = timed.step(state, token.token_id, noise=noise, sampling=sampling, policy=policy)
        # What follows the last head call of a token is its noise and its choice.
        spent["sampling"] += time.perf_counter() - model.head_end
    total = time.perf_counter() - start
    spent["python"] = total - sum(spent.values())
    return {part: 1000 * spent[part] / (num_new_tokens - 1) for part in PARTS}


class _TimedModel:
    """Passes every call on and notes how long it took."""

    def __init__(self, model: Any, spent: defaultdict[str, float]) -> None:
        self.head_end = 0.0
        self._model = model
        self._spent = spent

    token_runner: TokenRunner | None = None
    """A token runs in pieces, or there would be nothing to split."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if name not in _PART_OF:
            return value
        timed = self._timed(name, value)
        setattr(self, name, timed)
        return timed

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        part = _PART_OF[name]

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            value = call(*args, **kwargs)
            end = time.perf_counter()
            self._spent[part] += end - start
            if part == "head":
                self.head_end = end
            return value

        return timed


class _TimedNoise(Noise):
    """Noise that notes how long the numbers of the routers took."""

    def __init__(self, seed: int, engine: Engine, spent: defaultdict[str, float]) -> None:
        super().__init__(
            seed,
            vocab_size=engine.params.num_tokens,
            device=engine.params.device,
            sampler=engine.runner.model.sampler,
        )
        self._spent = spent

    def uniform(self, position: int, junction_index: int) -> float:
        start = time.perf_counter()
        value = super().uniform(position, junction_index)
        self._spent["sampling"] += time.perf_counter() - start
        return value
