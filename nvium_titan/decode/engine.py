"""The engine: prefill, decode step, flush, generate (one or many), score. Token ids in and out.

One token t enters block k together with every position still owed to it, as one group of rows; it
leaves at a junction with probability w_k and is sampled from pi_k, and the blocks above stay owed
until a later token goes that deep (N-vium, arXiv:2605.13190, Sec. 4.2). No computation is skipped
or approximated: keys, values and logits equal those of a full forward pass, up to the rounding of
matrix products of other shapes, so the token law is the promised one (App. B.2). A dense model is
the case of one exit and runs through the same lines.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nvium_titan.decode.batch import BatchGeneration
from nvium_titan.decode.forward.base import Forward, TokenJob
from nvium_titan.decode.forward.build import Kernels, build_forward
from nvium_titan.decode.generation import (
    PLAIN,
    ROUTED,
    Generation,
    GenerationRequest,
    RequestRun,
)
from nvium_titan.decode.laws import choose_token, law_name
from nvium_titan.decode.noise import Noise
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.policy import ExitPolicy, FixedExit
from nvium_titan.decode.results import GeneratedToken, Scores
from nvium_titan.decode.runner import Runner
from nvium_titan.decode.sampling import SamplingParams
from nvium_titan.decode.schedule import Schedule, ScheduleName, named_schedule
from nvium_titan.decode.score import score_positions
from nvium_titan.decode.sequence import DecodeState
from nvium_titan.errors import PromptError


class Engine:
    """Decodes one model. Read-only after construction: all state is in a `DecodeState`."""

    def __init__(
        self,
        params: DecoderParams,
        *,
        max_seq_len: int | None = None,
        kernels: Kernels = "auto",
    ) -> None:
        """Build the forward, with tables for the longest sequence.

        Args:
            params: The weights, on the device and in the dtype to compute with.
            max_seq_len: Longest sequence, prompt and new tokens; the model's own limit if None. A
                larger value extends RoPE beyond training.
            kernels: What computes; see `build_forward`.

        Raises:
            PromptError: If `max_seq_len` is not positive.
            DependencyError: If kernels are asked for and cannot be had.
        """
        max_seq_len = params.shape.max_seq_len if max_seq_len is None else max_seq_len
        if max_seq_len < 1:
            raise PromptError(f"max_seq_len={max_seq_len}: must be at least 1")
        forward = build_forward(params, kernels=kernels, num_slots=max_seq_len)
        self._use(forward, max_seq_len)

    @classmethod
    def with_forward(cls, forward: Forward, *, max_seq_len: int) -> Engine:
        """Return an engine over a forward of your own, or of another engine's in a wrapper.

        Args:
            forward: What computes; has tables for `max_seq_len` positions.
            max_seq_len: Longest sequence, prompt and new tokens.
        """
        engine = cls.__new__(cls)
        engine._use(forward, max_seq_len)
        return engine

    def _use(self, forward: Forward, max_seq_len: int) -> None:
        self.forward = forward
        self.params = forward.params
        self.max_seq_len = max_seq_len
        self.runner = Runner(forward)
        self.num_exits = self.runner.num_exits

    @classmethod
    def from_bundle(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_seq_len: int | None = None,
        kernels: Kernels = "auto",
    ) -> Engine:
        """Return an engine for the bundle at `path`; the arguments are those of the two classes.

        Raises:
            BundleError: If the bundle is incomplete or malformed.
        """
        params = DecoderParams.from_bundle(path, dtype=dtype, device=device)
        return cls(params, max_seq_len=max_seq_len, kernels=kernels)

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
        return self.runner.new_state(max_length)

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
        self._check_ids(token_ids, used=state.length, limit=self._limit(state))
        self.runner.feed(state, token_ids)
        self.runner.prefill(state)

    @torch.inference_mode()
    def flush(self, state: DecodeState) -> None:
        """Run every owed position to the top, so that all keys, values and states exist."""
        self.runner.flush(state)

    @torch.inference_mode()
    def step(
        self,
        state: DecodeState,
        token_id: int,
        *,
        noise: Noise,
        sampling: SamplingParams = PLAIN,
        policy: ExitPolicy = ROUTED,
        with_log_probs: bool = False,
    ) -> GeneratedToken:
        """Feed one token and choose the next; the token to feed next is the caller's business.

        Args:
            state: The sequence.
            token_id: The token to append.
            noise: The request's random numbers.
            sampling: How the token is drawn.
            policy: Who decides at junctions.
            with_log_probs: Also return the log-probabilities of exit and token.

        Raises:
            PromptError: If the sequence is full or the id is unknown.
        """
        self._check_ids((token_id,), used=state.length, limit=self._limit(state))
        self.runner.feed(state, (token_id,))
        return self.choose(
            state, noise=noise, sampling=sampling, policy=policy, with_log_probs=with_log_probs
        )

    @torch.inference_mode()
    def choose(
        self,
        state: DecodeState,
        *,
        noise: Noise,
        sampling: SamplingParams = PLAIN,
        policy: ExitPolicy = ROUTED,
        with_log_probs: bool = False,
    ) -> GeneratedToken:
        """Choose the token that follows the last one fed, running only the blocks that it needs.

        Host reads: one per router asked, one for the token; see `choose_token`.
        """
        self._check_law(sampling, policy)
        job = TokenJob(
            noise=noise,
            num_junctions=self.num_exits - 1,
            sampling=sampling,
            policy=policy,
            with_log_probs=with_log_probs,
        )
        return choose_token(self.runner, state, job)

    # --- whole requests -------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = PLAIN,
        policy: ExitPolicy = ROUTED,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        state: DecodeState | None = None,
        with_log_probs: bool = False,
        lazy_prefill: bool = False,
    ) -> Generation:
        """Return the new tokens one by one; the request is checked at once.

        The same arguments give the same tokens, whatever ran before or runs in between. What is
        sampled, by setting (F is the temperature with the filters):

            defaults                                  pi_mix exactly
            temperature, top_k, top_p, min_p          sum_k p_k F(pi_k), exact for that law
            the same with filter_scope="mixture"      F(pi_mix), at full depth
            temperature=0                             argmax pi_mix, leaving once it is certain
            policy=FixedExit(exit_index=k)            F(pi_k)
            policy=RouterGreedy()                     F(pi_k) of the first exit with w_k > 1/2
            policy=SampledRouter(temperature=...)     a mixture with other weights

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
            with_log_probs: Give every token log p_k and log pi_k, and the result log pi_mix, for
                which the rows still owed at the end are run. Asks every router on the way.
            lazy_prefill: Leave the prompt owed to the blocks above the exit of the first token: it
                comes sooner, the first token that goes deeper later. The tokens are the same.

        Raises:
            PromptError: If the prompt is empty, leaves no room, or holds an unknown id; if
                `max_new_tokens`, the policy or its combination with the sampling is impossible.
        """
        request = GenerationRequest(
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            policy=policy,
            seed=seed,
            stop_ids=stop_ids,
            with_log_probs=with_log_probs,
            lazy_prefill=lazy_prefill,
        )
        return Generation(self._open(request, state=state)(), owns_state=state is None)

    def generate_batch(
        self,
        requests: Sequence[GenerationRequest],
        *,
        batch_size: int | None = None,
        schedule: Schedule | ScheduleName = "lockstep",
    ) -> BatchGeneration:
        """Return the new tokens of several requests as they come; all are checked at once.

        Each row gets what `generate` gives for its request alone, whatever its companions, their
        order, their seeds, the batch size or the schedule: the same numbers up to the rounding of
        matrix products of other shapes, hence the same tokens but where a decision is that close.

        Args:
            requests: At least one; each with its own settings and seed.
            batch_size: Most rows at once, which bounds the memory; all if None. Where a row ends,
                the next request begins.
            schedule: When which block runs: one of your own, or by name.

        Raises:
            PromptError: If there is no request, `batch_size` is not positive, there is no such
                schedule, or a request is impossible, see `generate`; the message says which.
        """
        if not requests:
            raise PromptError("the batch is empty; give at least one request")
        batch_size = len(requests) if batch_size is None else batch_size
        if batch_size < 1:
            raise PromptError(f"batch_size={batch_size} (--batch): must be at least 1")
        schedule = named_schedule(schedule)
        openers = []
        for index, request in enumerate(requests):
            try:
                openers.append(self._open(request, is_pooled=False))
            except PromptError as error:
                raise PromptError(f"request {index + 1}: {error}") from error
        return BatchGeneration(self.runner, openers, batch_size=batch_size, schedule=schedule)

    def _open(
        self,
        request: GenerationRequest,
        *,
        state: DecodeState | None = None,
        is_pooled: bool = True,
    ) -> Callable[[], RequestRun]:
        """Check a request; return what makes its run, on a new sequence if there is no state.

        Raises:
            PromptError: If it is impossible.
        """
        # A list may change before its turn comes; what was checked must be what is run.
        request = replace(request, prompt_ids=tuple(request.prompt_ids))
        prompt_ids = request.prompt_ids
        if request.max_new_tokens < 1:
            raise PromptError(f"max_new_tokens={request.max_new_tokens}: must be at least 1")
        law = self._check_law(request.sampling, request.policy)
        used = state.length if state else 0
        limit = self._limit(state) if state else self.max_seq_len
        self._check_ids(prompt_ids, used=used, limit=limit - 1, reserve=1)
        num_new = min(request.max_new_tokens, limit - used - len(prompt_ids))

        def run() -> RequestRun:
            max_length = len(prompt_ids) + num_new
            own = state or self.runner.new_state(max_length, is_pooled=is_pooled)
            return RequestRun(self.runner, own, request, law=law, num_new=num_new)

        return run

    @torch.inference_mode()
    def score(self, ids_BT: Tensor | Sequence[Sequence[int]]) -> Scores:
        """Return the log-probabilities of every token but the first, in one prefill per sequence.

        The softmax runs over every row of the head, padding included, as in training.

        Args:
            ids_BT: B sequences of T tokens each, T from 2 to `max_seq_len` + 1.

        Returns:
            Three tensors on the engine's device; see `Scores`.

        Raises:
            PromptError: If a sequence is too short or too long, or holds an unknown id.
        """
        rows = ids_BT.tolist() if isinstance(ids_BT, Tensor) else [list(row) for row in ids_BT]
        if not rows or len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
            raise PromptError("scoring needs at least one sequence, all of the same length >= 2")
        state = self.new_state(max_length=min(len(rows[0]) - 1, self.max_seq_len))
        parts = []
        for row in rows:
            self._check_ids(row[-1:], used=0, limit=1)
            state.clear()
            self.prefill(state, row[:-1])
            parts.append(score_positions(self.runner, state, first=0, next_ids=row[1:]))
        state.close()
        return Scores(
            log_mix=torch.stack([part.log_mix_R for part in parts]),
            log_exits=torch.stack([part.log_label_ER.T for part in parts]),
            log_exit_probs=torch.stack([part.log_exit_ER.T for part in parts]),
        )

    def _limit(self, state: DecodeState) -> int:
        """Return the most tokens of a sequence, which may come from another engine."""
        return min(state.max_length, self.max_seq_len)

    def _check_law(self, sampling: SamplingParams, policy: ExitPolicy) -> str:
        if isinstance(policy, FixedExit) and not 0 <= policy.exit_index < self.num_exits:
            raise PromptError(
                f"exit {policy.exit_index + 1}: the model has exits 1 to {self.num_exits}"
            )
        return law_name(sampling, policy)

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
