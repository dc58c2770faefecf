"""Where the time of a token goes.

Shapes: T rows, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import override

from nvium_titan.decode import DecodeState, Engine, ExitPolicy, Noise
from nvium_titan.decode.forward.base import Forward, Group, TokenJob
from nvium_titan.decode.sampling import Draw
from nvium_titan.decode.sequence import SequenceBuffers

PARTS = ("blocks", "junctions", "head", "sampling", "python")
"""Block kernels; norms and routers; adapter and lm_head; noise and draw; the rest."""

R = TypeVar("R")


def split_time(
    engine: Engine, prompt_ids: Sequence[int], num_new_tokens: int, *, policy: ExitPolicy, seed: int
) -> dict[str, float]:
    """Return the milliseconds per token after the first by `PARTS`, from one run with timers."""
    spent: defaultdict[str, float] = defaultdict(float)
    forward = TimedForward(engine.forward, spent)
    timed = Engine.with_forward(forward, max_seq_len=engine.max_seq_len)
    params = engine.params
    noise = Noise(seed, vocab_size=params.num_tokens, device=params.device)
    state = timed.new_state(max_length=len(prompt_ids) + num_new_tokens)
    timed.prefill(state, prompt_ids)
    token = timed.choose(state, noise=noise, policy=policy)
    spent.clear()
    start = time.perf_counter()
    for _ in range(num_new_tokens - 1):
        token = timed.step(state, token.token_id, noise=noise, policy=policy)
    total = time.perf_counter() - start
    spent["python"] = total - sum(spent.values())
    return {part: 1000 * spent[part] / (num_new_tokens - 1) for part in PARTS}


class TimedForward(Forward):
    """Another forward, run in pieces to add up how long each of them takes."""

    def __init__(self, forward: Forward, spent: defaultdict[str, float]) -> None:
        """Wrap a forward.

        Args:
            forward: What computes.
            spent: Receives seconds, by `PARTS`.
        """
        self.params = forward.params
        self.state_dtype = forward.state_dtype
        self.buffer_pool = forward.buffer_pool
        self._forward = forward
        self._spent = spent

    def _time(self, part: str, call: Callable[..., R], *args: Any) -> R:
        start = time.perf_counter()
        value = call(*args)
        self._spent[part] += time.perf_counter() - start
        return value

    @override
    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        self._forward.embed(buffers, token_ids, first=first)

    @override
    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        self._time("blocks", self._forward.run_block, block_index, groups)

    @override
    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        return self._time("junctions", self._forward.exit_norm, exit_index, h_TD)

    @override
    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
        return self._time("junctions", self._forward.router_logit, junction_index, n_TD)

    @override
    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
        return self._time("head", self._forward.exit_state, exit_index, n_TD)

    @override
    def logits(self, o_TD: Tensor) -> Tensor:
        return self._time("head", self._forward.logits, o_TD)

    @override
    def draw(self, logits_V: Tensor, draw: Draw) -> int:
        return self._time("sampling", self._forward.draw, logits_V, draw)

    @override
    def run_token(self, state: DecodeState, job: TokenJob, *, begins_next: bool) -> None:
        # Declined: a token run as a whole has no pieces to time.
        return None
