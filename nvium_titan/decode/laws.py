"""Choosing the next token of a sequence: one function, and a law for each way to choose.

    draw      a policy decides at each junction, pi_k of the exit it leaves at is sampled
    certify   argmax pi_mix, leaving as soon as no deeper exit can change it
    blend     all exits, F(pi_mix) is sampled

A law is told what each block's router says, and answers which exits it wants the logits of; told
the logits, it answers the token, or that it must go deeper. So one sequence and a batch are driven
by the same laws. The module owns the certificate of greedy decoding and the names of the laws.

Shapes: N exits of one token, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from nvium_titan.core.mixture import at_least_float32, mixture_log_prob
from nvium_titan.decode.forward.base import Forward, TokenJob
from nvium_titan.decode.policy import ExitPolicy
from nvium_titan.decode.results import GeneratedToken
from nvium_titan.decode.runner import Runner
from nvium_titan.decode.sampling import SamplingParams
from nvium_titan.decode.sequence import DecodeState
from nvium_titan.errors import PromptError


def choose_token(
    runner: Runner, state: DecodeState, job: TokenJob, *, will_feed: bool = False
) -> GeneratedToken:
    """Return the token that follows the last one fed, running only the blocks that it needs.

    Host reads: one per router asked and one for the token; certified greedy adds one per
    certificate tried, log-probabilities one. A token that a forward runs as a whole takes one.

    Args:
        runner: The model.
        state: The sequence.
        job: How to choose.
        will_feed: The token will most likely be fed next and continued in the same way.
    """
    kind = law_of(job.sampling, job.policy)
    if kind is Drawn and not job.with_log_probs:
        run = runner.run_token(state, job, begins_next=will_feed)
        if run is not None:
            return GeneratedToken(run.token_id, run.exit_index, state.length)
    law = kind(runner.forward, state, job)
    exit_index = 0
    while True:
        runner.fill(state, exit_index)
        router_logit = math.nan
        if law.asks_router(exit_index):
            router_logit = runner.router_logits([state], exit_index)[0]
        if wanted := law.after_block(exit_index, router_logit):
            token = law.after_logits(runner.logits([(state, wanted)])[0])
            if token is not None:  # at the last exit at the latest
                return token
        exit_index += 1


def law_of(sampling: SamplingParams, policy: ExitPolicy) -> type[Law]:
    """Return how the tokens of a request are chosen."""
    if policy.router_temperature is None:
        return Drawn
    if sampling.temperature == 0:
        return Certified
    return Blended if _needs_mixture(sampling) else Drawn


def law_name(sampling: SamplingParams, policy: ExitPolicy) -> str:
    """Return what is sampled, for people; starts with "exact" or "approximate".

    Raises:
        PromptError: If the mixture is to be filtered under a policy that has none.
    """
    has_mixture = policy.router_temperature is not None
    if _needs_mixture(sampling) and not has_mixture:
        raise PromptError(
            f"filter_scope='mixture' needs the mixture, but the exit policy is "
            f"{type(policy).__name__}; use filter_scope='exit' or the sampled router"
        )
    if sampling.temperature == 0:
        return f"{policy.law}, argmax" + (" (certified)" if has_mixture else "")
    if sampling.is_plain:
        return policy.law
    settings = ", ".join(
        f"{name} {getattr(sampling, name):g}"
        for name, off in (("temperature", 1), ("top_k", 0), ("top_p", 1), ("min_p", 0))
        if getattr(sampling, name) != off
    )
    of_what = "of the mixture" if _needs_mixture(sampling) else "of each exit"
    return f"{policy.law}, {settings} {of_what}"


def _needs_mixture(sampling: SamplingParams) -> bool:
    return sampling.filter_scope == "mixture" and not sampling.is_plain


class ExitLogProbs:
    """log p_k, junction by junction: p_k = w_k prod_{j<k} (1 - w_j), w_k = sigmoid(z_k)."""

    def __init__(self, temperature: float | None = None) -> None:
        """Begin before the first junction.

        Args:
            temperature: Divides the router logits; 1 if None.
        """
        self.log_arrive = 0.0
        """log prod_{j<k} (1 - w_j); p of the last exit, in the end."""
        self._temperature = 1.0 if temperature is None else temperature

    def pass_junction(self, router_logit: float) -> float:
        """Return log p_k of leaving at the next junction, and go past it."""
        z = router_logit / self._temperature
        log_exit = self.log_arrive + log_sigmoid(z)
        self.log_arrive += log_sigmoid(-z)
        return log_exit


class Law(ABC):
    """One token being chosen: what each law does is in these three answers."""

    def __init__(self, forward: Forward, state: DecodeState, job: TokenJob) -> None:
        """Begin below the first block.

        Args:
            forward: The model.
            state: The sequence whose next token is chosen.
            job: How.
        """
        self.forward = forward
        self.state = state
        self.job = job
        self.exit_index = 0
        self.log_exit = 0.0
        self._own = ExitLogProbs()

    def asks_router(self, exit_index: int) -> bool:
        """Return whether the router logit of an exit is wanted."""
        return exit_index < self.job.num_junctions

    @abstractmethod
    def after_block(self, exit_index: int, router_logit: float) -> tuple[int, ...]:
        """Return the exits whose logits are wanted now; none to go deeper.

        Args:
            exit_index: The exit behind the block that has just run; they come in order.
            router_logit: Its z_k, exit minus continue; NaN if it was not asked for.
        """

    @abstractmethod
    def after_logits(self, logits_NV: Tensor) -> GeneratedToken | None:
        """Return the token, from the logits just asked for; None to go deeper."""

    def _arrive(self, exit_index: int, router_logit: float) -> None:
        """Take note of an exit, and of log p_k by the model's own routers."""
        self.exit_index = exit_index
        if exit_index < self.job.num_junctions:
            self.log_exit = self._own.pass_junction(router_logit)
        else:
            self.log_exit = self._own.log_arrive

    def _token(self, token_id: int, logits_V: Tensor) -> GeneratedToken:
        """Return the token, chosen at the current exit, which has these logits."""
        self.state.stats.host_reads += 1
        position = self.state.length
        if not self.job.with_log_probs:
            return GeneratedToken(token_id, self.exit_index, position)
        self.state.stats.host_reads += 1
        log_prob = float(at_least_float32(logits_V).log_softmax(-1)[token_id])
        return GeneratedToken(token_id, self.exit_index, position, self.log_exit, log_prob)


class Drawn(Law):
    """Leave where the policy says, sample that exit.

    N-vium (arXiv:2605.13190), Sec. 4.2 and App. B.2: with the routers' own draws this samples
    pi_mix, whatever the exit.
    """

    def __init__(self, forward: Forward, state: DecodeState, job: TokenJob) -> None:
        super().__init__(forward, state, job)
        self._thresholds: list[float] | None = None

    @override
    def asks_router(self, exit_index: int) -> bool:
        wanted = self.job.policy.reads_router or self.job.with_log_probs
        return wanted and super().asks_router(exit_index)

    @override
    def after_block(self, exit_index: int, router_logit: float) -> tuple[int, ...]:
        self._arrive(exit_index, router_logit)
        if exit_index < self.job.num_junctions:
            if self._thresholds is None:
                self._thresholds = self.job.thresholds(self.state.length)
            threshold = self._thresholds[exit_index]
            if threshold != -math.inf and not router_logit > threshold:
                return ()
        return (exit_index,)

    @override
    def after_logits(self, logits_NV: Tensor) -> GeneratedToken | None:
        logits_V = logits_NV[0, : self.forward.params.num_tokens]
        token_id = self.forward.draw(logits_V, self.job.draw(self.state.length))
        return self._token(token_id, logits_NV[0])


class Certified(Law):
    """Take argmax pi_mix as soon as it is certain; see `is_decided`.

    No head is evaluated while r_k >= 1/2; then all exits so far go through it in one call, and each
    further exit as it comes.
    """

    def __init__(self, forward: Forward, state: DecodeState, job: TokenJob) -> None:
        super().__init__(forward, state, job)
        params = forward.params
        # The logits of one exit may round differently beside other rows: 8 units in the last place.
        self._margin = 8 * torch.finfo(params.dtype).eps
        self._mixture = ExitLogProbs(job.policy.router_temperature)
        self._waiting: list[int] = []
        self._weights: list[float] = []
        self._partial_V = torch.zeros(params.num_tokens, dtype=torch.float64, device=params.device)

    @override
    def after_block(self, exit_index: int, router_logit: float) -> tuple[int, ...]:
        self._arrive(exit_index, router_logit)
        is_last = exit_index == self.job.num_junctions
        log_weight = (
            self._mixture.log_arrive if is_last else self._mixture.pass_junction(router_logit)
        )
        self._waiting.append(exit_index)
        self._weights.append(math.exp(log_weight))
        self._rest = 0.0 if is_last else math.exp(self._mixture.log_arrive)
        return () if self._rest >= 0.5 else tuple(self._waiting)

    @override
    def after_logits(self, logits_NV: Tensor) -> GeneratedToken | None:
        probs_NV = logits_NV.double().softmax(-1)[:, : self.forward.params.num_tokens]
        weights_N = torch.tensor(self._weights, dtype=torch.float64, device=probs_NV.device)
        self._partial_V += weights_N @ probs_NV
        self._waiting, self._weights = [], []
        if self.exit_index < self.job.num_junctions:
            self.state.stats.host_reads += 1
            if not bool(is_decided(self._partial_V, self._rest, margin=self._margin)):
                return None
        return self._token(int(self._partial_V.argmax()), logits_NV[-1])


class Blended(Law):
    """Sample F(pi_mix): every block, every router, one head call with a row per exit."""

    def __init__(self, forward: Forward, state: DecodeState, job: TokenJob) -> None:
        super().__init__(forward, state, job)
        self._mixture = ExitLogProbs(job.policy.router_temperature)
        self._log_exits: list[float] = []

    @override
    def after_block(self, exit_index: int, router_logit: float) -> tuple[int, ...]:
        self._arrive(exit_index, router_logit)
        if exit_index < self.job.num_junctions:
            self._log_exits.append(self._mixture.pass_junction(router_logit))
            return ()
        self._log_exits.append(self._mixture.log_arrive)
        return tuple(range(exit_index + 1))

    @override
    def after_logits(self, logits_NV: Tensor) -> GeneratedToken | None:
        log_exit_N = torch.tensor(self._log_exits, dtype=torch.float64, device=logits_NV.device)
        log_mix_V = mixture_log_prob(log_exit_N[:, None], logits_NV.double().log_softmax(-1))
        log_mix_V = log_mix_V[: self.forward.params.num_tokens]
        token_id = self.forward.draw(log_mix_V, self.job.draw(self.state.length))
        return self._token(token_id, logits_NV[-1])


def is_decided(partial_V: Tensor, rest: Tensor | float, *, margin: float) -> Tensor:
    """Return whether the argmax of a partly summed mixture is certain.

    With S_k = sum_{j<=k} p_j pi_j and rest r_k = prod_{j<=k} (1 - w_j), deeper exits add at most
    r_k to any token, so top1(S_k) - top2(S_k) > r_k settles the argmax of pi_mix. It cannot hold
    while r_k >= 1/2, since S_k sums to 1 - r_k.

    Args:
        partial_V: S_k, shape (*, V), V at least 2.
        rest: r_k, shape (*).
        margin: Added to r_k for the rounding of S_k.

    Returns:
        Shape (*), bool.
    """
    top_2 = partial_V.topk(min(2, partial_V.shape[-1]), dim=-1).values
    lead = top_2[..., 0] - top_2[..., 1] if top_2.shape[-1] == 2 else top_2[..., 0]
    return lead > rest + margin


def log_sigmoid(z: float) -> float:
    """Return log(1 / (1 + exp(-z))) without overflow; -inf at -inf, 0 at +inf."""
    return min(z, 0.0) - math.log1p(math.exp(-abs(z)))
