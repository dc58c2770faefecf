"""Where the time of a token goes.

Shapes: T rows, D width, V vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from nvium_titan.decode import Engine, ExitPolicy, Noise, SamplingParams
from nvium_titan.decode.forward.base import BlockModel, Group, TokenRunner

PARTS = ("blocks", "junctions", "head", "sampling", "python")
"""Block kernels; norms and routers; adapter and lm_head; random numbers and the draw; the rest."""

R = TypeVar("R")


def split_time(
    engine: Engine, prompt_ids: Sequence[int], num_new_tokens: int, *, policy: ExitPolicy, seed: int
) -> dict[str, float]:
    """Return the milliseconds per token after the first by `PARTS`, from one run with timers."""
    spent: defaultdict[str, float] = defaultdict(float)
    forward = TimedForward(engine.runner.model, spent)
    timed = copy.copy(engine)
    timed.runner = copy.copy(engine.runner)
    timed.runner.model = forward
    noise = Noise(
        seed, vocab_size=engine.params.num_tokens, device=engine.params.device,
        sampler=forward.sampler,
    )  # fmt: skip
    noise.draw = partial(forward.timed, "sampling", noise.draw)  # type: ignore[method-assign]
    noise.uniform = partial(forward.timed, "sampling", noise.uniform)  # type: ignore[method-assign]
    sampling = SamplingParams()
    state = timed.new_state(max_length=len(prompt_ids) + num_new_tokens)
    timed.prefill(state, prompt_ids)
    token = timed.choose(state, noise=noise, sampling=sampling, policy=policy)
    spent.clear()
    start = time.perf_counter()
    for _ in range(num_new_tokens - 1):
        token = timed.step(state, token.token_id, noise=noise, sampling=sampling, policy=policy)
    total = time.perf_counter() - start
    spent["python"] = total - sum(spent.values())
    return {part: 1000 * spent[part] / (num_new_tokens - 1) for part in PARTS}


class TimedForward:
    """A forward that adds up how long its parts take."""

    # A token runs in pieces, or there would be nothing to split.
    token_runner: TokenRunner | None = None

    def __init__(self, forward: BlockModel, spent: defaultdict[str, float]) -> None:
        """Wrap a forward.

        Args:
            forward: What computes.
            spent: Receives seconds, by `PARTS`.
        """
        self._forward = forward
        self._spent = spent

    def timed(self, part: str, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call a function on the account of one of `PARTS`."""
        start = time.perf_counter()
        value = call(*args, **kwargs)
        self._spent[part] += time.perf_counter() - start
        return value

    def __getattr__(self, name: str) -> Any:
        """Return what needs no timer, such as `params` and `embed`."""
        return getattr(self._forward, name)

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Run the layers of one block."""
        self.timed("blocks", self._forward.run_block, block_index, groups)

    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        """Return n_k."""
        return self.timed("junctions", self._forward.exit_norm, exit_index, h_TD)

    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
        """Return z_k."""
        return self.timed("junctions", self._forward.router_logit, junction_index, n_TD)

    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
        """Return o_k."""
        return self.timed("head", self._forward.exit_state, exit_index, n_TD)

    def logits(self, o_TD: Tensor) -> Tensor:
        """Return W_lm o."""
        return self.timed("head", self._forward.logits, o_TD)
