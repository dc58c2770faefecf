"""What a generation and a scoring give back: tokens, counts, times, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from nvium_titan.decode.policy import ExitPolicy
from nvium_titan.decode.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


class GeneratedToken(NamedTuple):
    """One new token."""

    token_id: int
    """The token."""
    exit_index: int
    """The exit it left at, from 0."""
    position: int
    """Its index in the sequence."""
    log_exit: float | None = None
    """log p_k of that exit by the model's own routers, nats; None unless asked for."""
    log_prob: float | None = None
    """log pi_k(token) at that exit, before temperature and filters, nats; None unless asked for."""


@dataclass(slots=True)
class DecodeStats:
    """What one generation did. Times are the engine's own; a slow consumer does not count."""

    num_prompt_tokens: int = 0
    """Tokens of this prompt."""
    num_new_tokens: int = 0
    """Tokens sampled."""
    prefill_s: float = 0.0
    """Seconds to run the prompt, and what an earlier turn left owed, through every block."""
    ttft_s: float = 0.0
    """Seconds to the first token: the prefill and one choice."""
    decode_s: float = 0.0
    """Seconds for all tokens after the first."""
    layers_run: int = 0
    """Layer calls after the prefill, whatever their rows."""
    group_sizes: Counter[int] = field(default_factory=Counter)
    """Block calls after the prefill, by their number of rows without padding."""
    head_rows: int = 0
    """Rows that went through the head to choose tokens."""
    host_reads: int = 0
    """Times a value came from the device: one per router asked, one or more per token."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, per second; NaN if there is none."""
        return (self.num_new_tokens - 1) / self.decode_s if self.decode_s else math.nan

    @property
    def mean_group_size(self) -> float:
        """Rows per block call; NaN if no block ran after the prefill."""
        calls = self.group_sizes.total()
        return sum(n * c for n, c in self.group_sizes.items()) / calls if calls else math.nan

    @property
    def layers_per_token(self) -> float:
        """Layer calls per token after the first (which is the prefill's); NaN if there is none."""
        further = self.num_new_tokens - 1
        return self.layers_run / further if further > 0 else math.nan


@dataclass(slots=True)
class BatchStats:
    """What a batch did. Times are the engine's own; a row counts until its last token."""

    num_new_tokens: int = 0
    """Tokens sampled, of all rows."""
    prefill_s: float = 0.0
    """Seconds to run the prompts."""
    decode_s: float = 0.0
    """Seconds for everything after the prompts, the first token of each row included."""
    layers_run: int = 0
    """Layer calls after the prefill, each for any number of rows."""
    head_calls: int = 0
    """Head calls to choose tokens, each for any number of rows."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all rows per second of `decode_s`; NaN if there is none."""
        return self.num_new_tokens / self.decode_s if self.decode_s else math.nan


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


class Scores(NamedTuple):
    """Log-probabilities of the next tokens of B sequences of T tokens, nats, at least float32."""

    log_mix: Tensor
    """log pi_mix(next token), shape (B, T - 1)."""
    log_exits: Tensor
    """log pi_k(next token) of every exit, shape (B, T - 1, N_V)."""
    log_exit_probs: Tensor
    """log p_k of every exit, shape (B, T - 1, N_V)."""


class Generation(Iterator[GeneratedToken]):
    """Tokens as they come. Ending it early, in any way, leaves nothing behind."""

    def __init__(self, run: Generator[GeneratedToken, bool | None, GenerationResult]) -> None:
        """Wrap the generator that makes the tokens; sending it True ends it with a result."""
        self._run = run
        self._result: GenerationResult | None = None

    def __next__(self) -> GeneratedToken:
        """Return the next token.

        Raises:
            StopIteration: After the last token.
        """
        try:
            return next(self._run)
        except StopIteration as end:
            self._result = self._result or end.value
            raise

    def stop(self) -> GenerationResult:
        """Return the result with the tokens given so far, finish reason "stop".

        Raises:
            RuntimeError: If no token has been asked for yet, or it was closed or failed.
        """
        if self._result is None:
            try:
                self._run.send(True)
            except StopIteration as end:
                self._result = end.value
            except TypeError as error:
                raise RuntimeError("no token has been asked for yet") from error
        return self.result()

    def close(self) -> None:
        """Drop it before its end; there is no result then."""
        self._run.close()

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
