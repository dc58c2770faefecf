"""The engine: prefill, decode step, flush, generate, score. Token ids in, token ids out.

One token t enters block k together with every position still owed to it, as one group of rows; it
leaves at a junction with probability w_k and is sampled from pi_k, and the blocks above stay owed
until a later token goes that deep (N-vium, arXiv:2605.13190, Sec. 4.2). No computation is skipped
or approximated: keys, values and logits equal those of a full forward pass, up to the rounding of
matrix products of other shapes, so the token law is the promised one (App. B.2). A dense model is
the case of one exit and runs through the same lines.

Shapes: B sequences, T tokens, E exits, V vocabulary, D width.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nvium_titan.decode.deferred import (
    DECODE_BUCKETS,
    PREFILL_BUCKETS,
    FilledCounts,
    bucket_rows,
    chunks,
)
from nvium_titan.decode.kv_cache import SequenceBuffers
from nvium_titan.decode.model import DecoderModel
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.policy import ExitPolicy, FixedExit, SampledRouter
from nvium_titan.decode.sampling import Noise, SamplingParams, choose
from nvium_titan.errors import PromptError

_PLAIN = SamplingParams()
_ROUTED = SampledRouter()


class GeneratedToken(NamedTuple):
    """One new token."""

    token_id: int
    """The token."""
    exit_index: int
    """The exit it left at, from 0."""
    position: int
    """Its index in the sequence."""


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
    host_reads: int = 0
    """Values that came from the device: one per router asked, one per token."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """A finished generation, with the settings it ran under."""

    token_ids: tuple[int, ...]
    """New tokens, a stop id included."""
    exit_indices: tuple[int, ...]
    """The exit of each."""
    num_exits: int
    """Exits of the model."""
    finish_reason: Literal["stop", "length"]
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

    @property
    def exit_counts(self) -> tuple[int, ...]:
        """Tokens that left at each exit."""
        counts = Counter(self.exit_indices)
        return tuple(counts[index] for index in range(self.num_exits))


@dataclass(slots=True, eq=False)
class DecodeState:
    """One sequence: what has been fed, what is owed, and every buffer. Never shared."""

    buffers: SequenceBuffers
    """Keys, values, boundary states."""
    counts: FilledCounts
    """What each block has done."""
    max_length: int
    """Most tokens of the sequence, sampled ones included."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens fed so far. A token that was sampled last is not among them."""
    stats: DecodeStats = field(default_factory=DecodeStats)
    """Counters of the generation at hand."""

    @property
    def length(self) -> int:
        """Tokens fed so far."""
        return self.counts.length


class Generation(Iterator[GeneratedToken]):
    """Tokens as they come; `result()` runs to the end. Closing it early leaves nothing behind."""

    def __init__(self, run: Generator[GeneratedToken, None, GenerationResult]) -> None:
        """Wrap the generator that makes the tokens."""
        self._run = run
        self._result: GenerationResult | None = None

    def __next__(self) -> GeneratedToken:
        """Return the next token.

        Raises:
            StopIteration: After the last token.
        """
        try:
            return next(self._run)
        except StopIteration as stop:
            self._result = self._result or stop.value
            raise

    def close(self) -> None:
        """Stop before the end; there is no result then."""
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


class Engine:
    """Decodes one model. Read-only after construction: all state is in a `DecodeState`."""

    def __init__(
        self,
        params: DecoderParams,
        *,
        max_seq_len: int | None = None,
        shapes: Literal["exact", "bucket"] = "exact",
        max_owed: int | None = None,
    ) -> None:
        """Build the tables for the longest sequence.

        Args:
            params: The weights, on the device and in the dtype to compute with.
            max_seq_len: Longest sequence, prompt and new tokens; the model's
                `max_position_embeddings` if None. A larger value extends RoPE beyond training.
            shapes: "exact" runs groups as they are and attends over the filled slots; "bucket" pads
                rows to a power of two and attends over all slots under a mask, so that only a few
                static shapes occur. Both give the same numbers up to rounding.
            max_owed: Pay every owed run once this many positions are owed; bounds the latency of a
                single token. None never does, which is cheapest.

        Raises:
            PromptError: If `max_seq_len` or `max_owed` is not positive.
        """
        config = params.config
        self.params = params
        self.max_seq_len = config.max_position_embeddings if max_seq_len is None else max_seq_len
        if self.max_seq_len < 1:
            raise PromptError(f"max_seq_len={max_seq_len}: must be at least 1")
        if max_owed is not None and max_owed < 1:
            raise PromptError(f"max_owed={max_owed}: must be at least 1")
        self.shapes = shapes
        self.max_owed = max_owed
        self.num_exits = config.plan.num_exits
        self._block_sizes = tuple(len(block) for block in config.plan.blocks)
        # A padded row of the last group may lie this far past the sequence.
        self._slack = PREFILL_BUCKETS[-1] - 1 if shapes == "bucket" else 0
        self.model = DecoderModel(params, num_slots=self.max_seq_len + self._slack)

    @classmethod
    def from_bundle(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_seq_len: int | None = None,
        shapes: Literal["exact", "bucket"] = "exact",
        max_owed: int | None = None,
    ) -> Engine:
        """Return an engine for the bundle at `path`; the arguments are those of the two classes.

        Raises:
            BundleError: If the bundle is incomplete or malformed.
        """
        params = DecoderParams.from_bundle(path, dtype=dtype, device=device)
        return cls(params, max_seq_len=max_seq_len, shapes=shapes, max_owed=max_owed)

    # --- one sequence, step by step -------------------------------------------------------------

    @torch.inference_mode()
    def new_state(self, *, max_length: int | None = None) -> DecodeState:
        """Return an empty sequence with its own buffers, zeroed.

        Args:
            max_length: Most tokens it will hold; `max_seq_len` if None.

        Raises:
            PromptError: If it exceeds `max_seq_len`.
        """
        max_length = self.max_seq_len if max_length is None else max_length
        if max_length > self.max_seq_len:
            raise PromptError(
                f"max_length={max_length} exceeds max_seq_len={self.max_seq_len} of the engine"
            )
        buffers = SequenceBuffers(
            self.params, num_slots=max_length + self._slack, max_rows=PREFILL_BUCKETS[-1]
        )
        return DecodeState(
            buffers=buffers, counts=FilledCounts.empty(self.num_exits), max_length=max_length
        )

    @torch.inference_mode()
    def prefill(self, state: DecodeState, token_ids: Sequence[int]) -> None:
        """Feed a prompt, or a further turn, and run every block up to its last token.

        What an earlier turn left owed is paid in the same runs.

        Args:
            state: The sequence; may hold earlier tokens.
            token_ids: What to append, at least one.

        Raises:
            PromptError: If it is empty, does not fit, or holds an unknown id.
        """
        self._feed(state, token_ids)
        for block_index in range(self.num_exits):
            self._fill(state, block_index, largest=PREFILL_BUCKETS[-1])

    @torch.inference_mode()
    def flush(self, state: DecodeState) -> None:
        """Run every owed position to the top, so that all keys, values and states exist."""
        for block_index in range(self.num_exits):
            self._fill(state, block_index, largest=DECODE_BUCKETS[-1])

    @torch.inference_mode()
    def step(
        self,
        state: DecodeState,
        token_id: int,
        *,
        noise: Noise,
        sampling: SamplingParams = _PLAIN,
        policy: ExitPolicy = _ROUTED,
    ) -> GeneratedToken:
        """Feed one token and choose the next; the token to feed next is the caller's business.

        Args:
            state: The sequence.
            token_id: The token to append.
            noise: The request's random numbers.
            sampling: How the token is drawn.
            policy: Who decides at junctions.

        Raises:
            PromptError: If the sequence is full or the id is unknown.
        """
        self._feed(state, (token_id,))
        return self.choose(state, noise=noise, sampling=sampling, policy=policy)

    @torch.inference_mode()
    def choose(
        self,
        state: DecodeState,
        *,
        noise: Noise,
        sampling: SamplingParams = _PLAIN,
        policy: ExitPolicy = _ROUTED,
    ) -> GeneratedToken:
        """Choose the token that follows the last one fed, running only the blocks that it needs.

        Host reads: one per router asked, one for the token.
        """
        position = state.length
        exit_index, n_1D = self._walk(state, noise, policy)
        logits_1V = self.model.logits(self.model.exit_state(exit_index, n_1D))
        gumbel_V = noise.gumbel(position) if sampling.temperature else None
        token_1 = choose(logits_1V[:, : self.params.num_tokens], gumbel_V, sampling)
        state.stats.host_reads += 1
        return GeneratedToken(int(token_1), exit_index, position)

    # --- whole requests -------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = _PLAIN,
        policy: ExitPolicy = _ROUTED,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        state: DecodeState | None = None,
    ) -> Generation:
        """Return the new tokens one by one; the prompt is checked at once.

        The same arguments give the same tokens, whatever ran before or runs in between.

        Args:
            prompt_ids: What to continue, at least one token. In a further turn on the same `state`
                it starts with the last token of the turn before, which was sampled but not fed.
            max_new_tokens: Most tokens, at least 1. Fewer come where the sequence is full first,
                with finish reason "length".
            sampling: How each token is drawn.
            policy: Who decides at junctions.
            seed: Any integer; with the position it decides every random number.
            stop_ids: Tokens that end the generation; the stop token is the last one given.
            state: A sequence to continue; a new one, just large enough, if None.

        Raises:
            PromptError: If the prompt is empty, leaves no room, or holds an unknown id; if
                `max_new_tokens` or the policy is impossible.
        """
        if max_new_tokens < 1:
            raise PromptError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        if isinstance(policy, FixedExit) and not 0 <= policy.exit_index < self.num_exits:
            raise PromptError(
                f"exit {policy.exit_index + 1}: the model has exits 1 to {self.num_exits}"
            )
        used = state.length if state else 0
        limit = state.max_length if state else self.max_seq_len
        self._check_ids(prompt_ids, used=used, limit=limit - 1, reserve=1)
        room = limit - used - len(prompt_ids)
        num_new = min(max_new_tokens, room)
        if state is None:
            state = self.new_state(max_length=len(prompt_ids) + num_new)
        return Generation(
            self._generate(state, prompt_ids, num_new, sampling, policy, seed, frozenset(stop_ids))
        )

    def _generate(
        self,
        state: DecodeState,
        prompt_ids: Sequence[int],
        num_new: int,
        sampling: SamplingParams,
        policy: ExitPolicy,
        seed: int,
        stop_ids: frozenset[int],
    ) -> Generator[GeneratedToken, None, GenerationResult]:
        noise = Noise(seed, vocab_size=self.params.num_tokens, device=self.params.device)
        tokens: list[GeneratedToken] = []
        start = time.perf_counter()
        state.stats = DecodeStats()
        self.prefill(state, prompt_ids)
        prefill_s = time.perf_counter() - start
        stats = state.stats = DecodeStats(num_prompt_tokens=len(prompt_ids), prefill_s=prefill_s)
        token = self.choose(state, noise=noise, sampling=sampling, policy=policy)
        stats.ttft_s = time.perf_counter() - start
        while True:
            tokens.append(token)
            stats.num_new_tokens += 1
            yield token
            if token.token_id in stop_ids or len(tokens) == num_new:
                break
            start = time.perf_counter()
            token = self.step(state, token.token_id, noise=noise, sampling=sampling, policy=policy)
            if self.max_owed is not None and state.counts.num_deferred >= self.max_owed:
                self.flush(state)
            stats.decode_s += time.perf_counter() - start
        return GenerationResult(
            token_ids=tuple(token.token_id for token in tokens),
            exit_indices=tuple(token.exit_index for token in tokens),
            num_exits=self.num_exits,
            finish_reason="stop" if tokens[-1].token_id in stop_ids else "length",
            law=policy.law,
            sampling=sampling,
            policy=policy,
            seed=seed,
            stats=stats,
        )

    # --- parts ----------------------------------------------------------------------------------

    def _check_ids(
        self, token_ids: Sequence[int], *, used: int, limit: int, reserve: int = 0
    ) -> None:
        if not len(token_ids):
            raise PromptError("the prompt is empty; give at least one token, for example BOS")
        if used + len(token_ids) > limit:
            before = f" after {used} tokens of earlier turns" if used else ""
            room = " and one new token" if reserve else ""
            raise PromptError(
                f"a prompt of {len(token_ids)} tokens{before}{room} does not fit into "
                f"{limit + reserve} positions; shorten it, or raise max_seq_len (--max-seq-len)"
            )
        for token_id in token_ids:
            if not 0 <= token_id < self.params.num_tokens:
                raise PromptError(
                    f"token id {token_id} is unknown: the vocabulary has ids 0 to "
                    f"{self.params.num_tokens - 1}"
                )

    def _feed(self, state: DecodeState, token_ids: Sequence[int]) -> None:
        """Append tokens: embed them; every block owes them from now on."""
        first = state.length
        self._check_ids(token_ids, used=first, limit=state.max_length)
        self.model.embed(state.buffers, list(token_ids), first=first)
        state.token_ids.extend(token_ids)
        state.counts.length = first + len(token_ids)

    def _fill(self, state: DecodeState, block_index: int, *, largest: int) -> None:
        """Pay what is owed to one block; the count moves only after a run, so a failure owes it."""
        counts, buffers, stats = state.counts, state.buffers, state.stats
        for first, rows in chunks(counts.filled[block_index], counts.length, largest=largest):
            if self.shapes == "exact":
                self.model.run_block(
                    block_index, buffers, first=first, rows=rows, columns=first + rows
                )
            else:
                self.model.run_block(
                    block_index,
                    buffers,
                    first=first,
                    rows=bucket_rows(rows),
                    columns=buffers.num_slots,
                )
            counts.filled[block_index] = first + rows
            stats.layers_run += self._block_sizes[block_index]
            stats.group_sizes[rows] += 1

    def _walk(self, state: DecodeState, noise: Noise, policy: ExitPolicy) -> tuple[int, Tensor]:
        """Run blocks until the policy leaves; return the exit and n_k of the last token."""
        row, position = state.length - 1, state.length
        for exit_index in range(self.num_exits):
            self._fill(state, exit_index, largest=DECODE_BUCKETS[-1])
            h_1D = state.buffers.boundary_SD[exit_index + 1].narrow(0, row, 1)
            n_1D = self.model.exit_norm(exit_index, h_1D)
            if exit_index == self.num_exits - 1:
                break
            router_logit = uniform = math.nan
            if policy.reads_router:
                router_logit = self._read(state, self.model.router_logit(exit_index, n_1D))
                uniform = noise.uniform(position, exit_index)
            if policy.leaves(
                exit_index, position=position, router_logit=router_logit, uniform=uniform
            ):
                break
        return exit_index, n_1D

    def _read(self, state: DecodeState, value_1: Tensor) -> float:
        """Bring one number to the host; the only place where a decision waits for the device."""
        state.stats.host_reads += 1
        return value_1.item()
