"""What decoding counts and gives back: tokens, counters, times, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

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
    """Seconds to run the prompt, and what an earlier turn left owed."""
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


class Scores(NamedTuple):
    """Log-probabilities of the next tokens of B sequences of T tokens, nats, at least float32."""

    log_mix: Tensor
    """log pi_mix(next token), shape (B, T - 1)."""
    log_exits: Tensor
    """log pi_k(next token) of every exit, shape (B, T - 1, N_V)."""
    log_exit_probs: Tensor
    """log p_k of every exit, shape (B, T - 1, N_V)."""
