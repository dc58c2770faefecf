"""A request, the tokens that come of it, and the result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nvium_titan.decode.forward.base import TokenJob
from nvium_titan.decode.laws import choose_token
from nvium_titan.decode.noise import Noise
from nvium_titan.decode.policy import ExitPolicy, SampledRouter
from nvium_titan.decode.results import DecodeStats, FinishReason, GeneratedToken
from nvium_titan.decode.runner import Runner
from nvium_titan.decode.sampling import SamplingParams
from nvium_titan.decode.score import score_positions
from nvium_titan.decode.sequence import DecodeState

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """A finished generation, with the settings it ran under."""

    token_ids: tuple[int, ...]
    """New tokens, a stop id included."""
    exit_indices: tuple[int, ...]
    """The exit of each."""
    num_exits: int
    """Exits of the model."""
    finish_reason: FinishReason
    """Whether a stop id came, or the wanted or possible number of tokens was reached."""
    law: str
    """What was sampled; starts with "exact" or "approximate"."""
    sampling: SamplingParams
    """As given."""
    policy: ExitPolicy
    """As given."""
    seed: int
    """As given."""
    stats: DecodeStats
    """What it took."""
    log_exits: tuple[float, ...] | None = None
    """log p_k of each token's exit by the model's own routers, nats; None unless asked for."""
    log_probs: tuple[float, ...] | None = None
    """log pi_k of each token, before temperature and filters, nats; None unless asked for."""
    log_mix: tuple[float, ...] | None = None
    """log pi_mix of each token, nats, before temperature and filters; None unless asked for."""

    @property
    def certified_early(self) -> float | None:
        """Share of tokens known to be argmax pi_mix before the last exit.

        None where nothing was certified: above temperature 0, or without a mixture.
        """
        if self.sampling.temperature > 0 or self.policy.router_temperature is None:
            return None
        return 1 - self.exit_counts[-1] / len(self.exit_indices)

    @property
    def exit_counts(self) -> tuple[int, ...]:
        """Tokens that left at each exit."""
        counts = Counter(self.exit_indices)
        return tuple(counts[index] for index in range(self.num_exits))


class RequestRun:
    """A checked request on its sequence: the tokens so far, and what ends it."""

    def __init__(
        self,
        runner: Runner,
        state: DecodeState,
        request: GenerationRequest,
        *,
        law: str,
        num_new: int,
    ) -> None:
        """Take it; nothing runs yet.

        Args:
            runner: The model.
            state: The sequence; may hold earlier turns.
            request: What is asked for.
            law: What is sampled, for the result.
            num_new: Most new tokens that also fit.
        """
        params = runner.params
        self.state = state
        self.tokens: list[GeneratedToken] = []
        self.finish_reason: FinishReason | None = None
        self.job = TokenJob(
            noise=Noise(request.seed, vocab_size=params.num_tokens, device=params.device),
            num_junctions=runner.num_exits - 1,
            sampling=request.sampling,
            policy=request.policy,
            with_log_probs=request.with_log_probs,
        )
        self.runner = runner
        self._request = request
        self._law = law
        self._num_new = num_new
        self._stop_ids = frozenset(request.stop_ids)

    def prepare(self) -> None:
        """Feed what the next token follows: the prompt, run to the top, or the last token.

        The counters start at zero behind the prompt. A lazy prefill runs the first block only: the
        rest is paid when a token goes that deep.
        """
        if self.tokens:
            self.runner.feed(self.state, (self.tokens[-1].token_id,))
            return
        prompt_ids = self._request.prompt_ids
        self.runner.feed(self.state, prompt_ids)
        self.runner.prefill(self.state, num_blocks=1 if self._request.lazy_prefill else None)
        self.state.stats = DecodeStats(num_prompt_tokens=len(prompt_ids))

    @property
    def wants_more(self) -> bool:
        """Whether a token will follow the next one, unless that ends it."""
        return len(self.tokens) + 1 < self._num_new

    def take(self, token: GeneratedToken) -> None:
        """Append a token; it may be the last one."""
        self.tokens.append(token)
        self.state.stats.num_new_tokens += 1
        if token.token_id in self._stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._num_new:
            self.finish_reason = "length"

    def result(self) -> GenerationResult:
        """Return what has come; for log pi_mix the rows that are still owed are run."""
        assert self.finish_reason is not None, "asked for the result of an unfinished request"
        request, tokens, stats = self._request, self.tokens, self.state.stats
        return GenerationResult(
            token_ids=tuple(token.token_id for token in tokens),
            exit_indices=tuple(token.exit_index for token in tokens),
            num_exits=self.runner.num_exits,
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

    @torch.inference_mode()
    def _late_log_mix(self) -> tuple[float, ...]:
        """Return log pi_mix of the tokens, after paying the rows that are still owed."""
        stats, self.state.stats = self.state.stats, DecodeStats()
        try:
            self.runner.flush(self.state)  # not part of the decoding that was measured
        finally:
            self.state.stats = stats
        scores = score_positions(
            self.runner,
            self.state,
            first=self.tokens[0].position - 1,
            next_ids=[token.token_id for token in self.tokens],
        )
        return tuple(scores.log_mix_R.tolist())


class Generation(Iterator[GeneratedToken]):
    """Tokens as they come. Ending it early leaves nothing behind but a state of the caller's."""

    def __init__(self, run: RequestRun, *, owns_state: bool) -> None:
        """Take a request; nothing runs yet.

        Args:
            run: The request on its sequence.
            owns_state: Whether the sequence ends with it.
        """
        self._run: RequestRun | None = run
        self._owns_state = owns_state
        self._result: GenerationResult | None = None

    def __next__(self) -> GeneratedToken:
        """Return the next token.

        Raises:
            StopIteration: After the last token.
        """
        run = self._run
        if run is None:
            raise StopIteration
        try:
            if run.finish_reason is not None:
                self._result = run.result()
                self.close()
                raise StopIteration
            # Times are the engine's own: a slow consumer does not count.
            start = time.perf_counter()
            is_first = not run.tokens
            with torch.inference_mode():
                run.prepare()
                prepared = time.perf_counter()
                token = choose_token(run.runner, run.state, run.job, will_feed=run.wants_more)
            run.take(token)
            seconds, stats = time.perf_counter() - start, run.state.stats
            if is_first:
                stats.prefill_s, stats.ttft_s = prepared - start, seconds
            else:
                stats.decode_s += seconds
        except BaseException:
            self.close()
            raise
        return token

    def stop(self) -> GenerationResult:
        """Return the result with the tokens given so far, finish reason "stop".

        Raises:
            RuntimeError: If no token has been asked for yet, or it was closed or failed.
        """
        if self._run is not None:
            if not self._run.tokens:
                raise RuntimeError("no token has been asked for yet")
            self._run.finish_reason = self._run.finish_reason or "stop"
        return self.result()

    def close(self) -> None:
        """Drop it before its end; there is no result then."""
        if self._run is not None and self._owns_state:
            self._run.state.close()
        self._run = None

    def result(self) -> GenerationResult:
        """Return the result, after running what is left.

        Raises:
            RuntimeError: If the generation was closed or failed before its end.
        """
        for _ in self:
            pass
        if self._result is None:
            raise RuntimeError("the generation was closed or failed before its end")
        return self._result


def _known(values: Iterable[float | None]) -> tuple[float, ...] | None:
    """Return the values, or None if they were not asked for."""
    known = tuple(value for value in values if value is not None)
    return known or None
