"""Our own engine as a system of a benchmark, and where its time goes."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvium_titan import __version__
from nvium_titan.bench.system import Timing
from nvium_titan.decode import Engine, GenerationResult, Noise, SampledRouter, SamplingParams
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


class EngineSystem:
    """One of our engines, sampling at temperature 1 without filters."""

    version = __version__

    def __init__(
        self, name: str, engine: Engine, *, dtype: str, policy: ExitPolicy | None, seed: int
    ) -> None:
        """Wrap an engine.

        Args:
            name: For the table.
            engine: Its model.
            dtype: Type of its weights, by its name in `bench.models`.
            policy: Who decides at junctions; the routers if None.
            seed: Of the first run; each further run takes the next one.
        """
        self.name = name
        self.dtype = dtype
        self.threads = torch.get_num_threads()
        self.engine = engine
        self.policy = SampledRouter() if policy is None else policy
        self.results: list[GenerationResult] = []
        """What each run gave back."""
        self._seed = seed

    def run(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Timing:
        """See `System`; timed from outside, so that all of the engine's Python counts."""
        start = time.perf_counter()
        generation = self.engine.generate(
            prompt_ids, max_new_tokens=num_new_tokens, policy=self.policy, seed=self._seed
        )
        next(generation)
        first = time.perf_counter()
        self.results.append(generation.result())
        end = time.perf_counter()
        self._seed += 1
        return Timing(num_new_tokens=num_new_tokens, ttft_s=first - start, decode_s=end - first)

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
        super().__init__(seed, vocab_size=engine.params.num_tokens, device=engine.params.device)
        self._spent = spent

    def uniform(self, position: int, junction_index: int) -> float:
        start = time.perf_counter()
        value = super().uniform(position, junction_index)
        self._spent["sampling"] += time.perf_counter() - start
        return value
