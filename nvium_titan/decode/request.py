"""One request: what is asked for, and its way through as a coroutine of needs and tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvium_titan.decode.choice import choose_next
from nvium_titan.decode.needs import Need, NeedBlock
from nvium_titan.decode.policy import ExitPolicy, SampledRouter
from nvium_titan.decode.results import DecodeStats, FinishReason, GeneratedToken, GenerationResult
from nvium_titan.decode.runner import BlockRunner, DecodeState
from nvium_titan.decode.sampling import Noise, SamplingParams
from nvium_titan.decode.score import score_positions

PLAIN = SamplingParams()
"""Each distribution as it is."""
ROUTED = SampledRouter()
"""The model's own mixture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What to continue, and how; the fields are the arguments of `Engine.generate`."""

    prompt_ids: Sequence[int]
    """What to continue, at least one token."""
    max_new_tokens: int
    """Most new tokens, at least 1."""
    sampling: SamplingParams = PLAIN
    """How each token is drawn."""
    policy: ExitPolicy = ROUTED
    """Who decides at junctions."""
    seed: int = 0
    """Any integer; with the position it decides every random number."""
    stop_ids: Sequence[int] = ()
    """Tokens that end the generation; the stop token is the last one given."""
    with_log_probs: bool = False
    """Give every token log p_k and log pi_k, and the result log pi_mix."""
    lazy_prefill: bool = False
    """Leave the prompt owed to the blocks above the exit of the first token."""


class RequestRun:
    """A request on its sequence: what it needs next, and what has come of it."""

    def __init__(
        self,
        runner: BlockRunner,
        state: DecodeState,
        request: GenerationRequest,
        *,
        law: str,
        num_new: int,
        max_owed: int | None,
        is_whole: bool,
    ) -> None:
        """Take a checked request; nothing runs yet.

        Args:
            runner: The model.
            state: The sequence; may hold earlier turns.
            request: What is asked for.
            law: What is sampled, for the result.
            num_new: Most new tokens that also fit.
            max_owed: See `Engine`.
            is_whole: Whether to ask for a token as a whole where its law allows it.
        """
        self.state = state
        self.tokens: list[GeneratedToken] = []
        self.finish_reason: FinishReason | None = None
        self._runner = runner
        self._request = request
        self._law = law
        self._num_new = num_new
        self._max_owed = max_owed
        self._is_whole = is_whole
        self._coroutine = self._needs_and_tokens()

    @torch.inference_mode()
    def prefill(self) -> None:
        """Feed the prompt and run it to the top; the counters start at zero behind it.

        A lazy one runs the first block only: the rest is paid when a token goes that deep.
        """
        prompt_ids = self._request.prompt_ids
        self._runner.feed(self.state, prompt_ids)
        self.state.stats = DecodeStats()
        self._runner.prefill(self.state, num_blocks=1 if self._request.lazy_prefill else None)
        self.state.stats = DecodeStats(num_prompt_tokens=len(prompt_ids))

    def advance(self, answer: Any) -> Need | GeneratedToken:
        """Return the next need, or the next token.

        Args:
            answer: That to the last need; None at first and after a token. Must not be called once
                `finish_reason` is known.
        """
        return self._coroutine.send(answer)

    @torch.inference_mode()
    def next_token(self) -> GeneratedToken:
        """Return the next token, doing what it needs as it comes."""
        need = self._coroutine.send(None)
        while not isinstance(need, GeneratedToken):
            need = self._coroutine.send(self._runner.answer(self.state, need))
        return need

    def stop(self) -> None:
        """End it here, with the tokens so far."""
        self.finish_reason = self.finish_reason or "stop"
        self._coroutine.close()

    def result(self) -> GenerationResult:
        """Return what has come; for log pi_mix the rows that are still owed are run."""
        assert self.finish_reason is not None, "asked for the result of an unfinished request"
        request, tokens = self._request, self.tokens
        stats = self.state.stats
        return GenerationResult(
            token_ids=tuple(token.token_id for token in tokens),
            exit_indices=tuple(token.exit_index for token in tokens),
            num_exits=self._runner.num_exits,
            finish_reason=self.finish_reason,
            law=self._law,
            sampling=request.sampling,
            policy=request.policy,
            seed=request.seed,
            stats=stats,
            log_exits=_known(token.log_exit for token in tokens),
            log_probs=_known(token.log_prob for token in tokens),
            log_mix=self._late_log_mix() if request.with_log_probs else None,
        )

    def _needs_and_tokens(self) -> Generator[Need | GeneratedToken, Any, None]:
        request, state, params = self._request, self.state, self._runner.params
        noise = Noise(
            request.seed,
            vocab_size=params.num_tokens,
            device=params.device,
            sampler=self._runner.model.sampler,
        )
        stop_ids = frozenset(request.stop_ids)
        # Blocks that are run in between, to pay what is owed, would make what was begun useless.
        looks_ahead = self._runner.model.looks_ahead and self._max_owed is None
        while True:
            token = yield from choose_next(
                params,
                state,
                noise=noise,
                sampling=request.sampling,
                policy=request.policy,
                with_log_probs=request.with_log_probs,
                is_whole=self._is_whole,
                will_feed=looks_ahead and len(self.tokens) + 1 < self._num_new,
            )
            if self._max_owed is not None and state.counts.num_deferred >= self._max_owed:
                for block_index in range(self._runner.num_exits):
                    yield NeedBlock(block_index, False)
            self.tokens.append(token)
            state.stats.num_new_tokens += 1
            if token.token_id in stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) == self._num_new:
                self.finish_reason = "length"
            yield token
            self._runner.feed(state, (token.token_id,))

    @torch.inference_mode()
    def _late_log_mix(self) -> tuple[float, ...]:
        """Return log pi_mix of the tokens, after paying the rows that are still owed."""
        self.state.stats = DecodeStats()  # the flush is not part of the decoding that was measured
        self._runner.flush(self.state)
        scores = score_positions(
            self._runner,
            self.state,
            first=self.tokens[0].position - 1,
            next_ids=[token.token_id for token in self.tokens],
        )
        return tuple(scores.log_mix_R.tolist())


def _known(values: Iterable[float | None]) -> tuple[float, ...] | None:
    """Return the values, or None if they were not asked for."""
    known = tuple(value for value in values if value is not None)
    return known or None
