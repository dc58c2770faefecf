"""Choosing the next token of a sequence, under every law; asks only for what the law needs.

    draw      a policy decides at each junction, pi_k of the exit it leaves at is sampled
    certify   argmax pi_mix, leaving as soon as no deeper exit can change it
    blend     all exits, F(pi_mix) is sampled

The module owns the certificate of greedy decoding and the names of the laws. Shapes: N exits of one
token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvium_titan.core.mixture import at_least_float32, mixture_log_prob
from nvium_titan.decode.forward.base import TokenRun
from nvium_titan.decode.needs import Need, NeedBlock, NeedLogits, NeedToken
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.policy import ExitPolicy, exit_thresholds, log_sigmoid
from nvium_titan.decode.results import GeneratedToken
from nvium_titan.decode.runner import DecodeState
from nvium_titan.decode.sampling import Noise, SamplingParams
from nvium_titan.errors import PromptError


class Chosen(NamedTuple):
    """A token, and what is known about it on the device."""

    token_id: int
    exit_index: int
    log_exit: float
    logits_1V: Tensor | None
    """Shape (1, V), of the exit; None where a model ran the token as a whole."""


def choose_next(
    params: DecoderParams,
    state: DecodeState,
    *,
    noise: Noise,
    sampling: SamplingParams,
    policy: ExitPolicy,
    with_log_probs: bool,
    is_whole: bool,
    will_feed: bool,
) -> Generator[Need, Any, GeneratedToken]:
    """Return the token that follows the last one fed; yields needs, each to be answered.

    Host reads here: one for the token; certified greedy adds one per certificate tried,
    log-probabilities one.

    Args:
        params: The model.
        state: The sequence; only its counters are written here.
        noise: The request's random numbers.
        sampling: How the token is drawn.
        policy: Who decides at junctions.
        with_log_probs: Also return log p_k and log pi_k; asks routers that the policy ignores.
        is_whole: Ask for a token as a whole where the law allows it.
        will_feed: The token drawn will most likely be fed next and continued in the same way, so
            that a model may begin with that.
    """
    if policy.router_temperature is not None and sampling.temperature == 0:
        chosen = yield from _certify(params, state, policy.router_temperature)
    elif policy.router_temperature is not None and _needs_mixture(sampling):
        chosen = yield from _blend(params, state, noise, sampling, policy.router_temperature)
    else:
        chosen = yield from _draw(
            params, state, noise, sampling, policy,
            with_log_probs=with_log_probs, is_whole=is_whole, will_feed=will_feed,
        )  # fmt: skip
    state.stats.host_reads += 1
    log_exit = log_prob = None
    if with_log_probs:
        assert chosen.logits_1V is not None, "log-probabilities are for tokens in pieces"
        log_exit = chosen.log_exit
        log_prob = float(at_least_float32(chosen.logits_1V).log_softmax(-1)[0, chosen.token_id])
        state.stats.host_reads += 1
    return GeneratedToken(chosen.token_id, chosen.exit_index, state.length, log_exit, log_prob)


def _needs_mixture(sampling: SamplingParams) -> bool:
    return sampling.filter_scope == "mixture" and not sampling.is_plain


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


def _draw(
    params: DecoderParams,
    state: DecodeState,
    noise: Noise,
    sampling: SamplingParams,
    policy: ExitPolicy,
    *,
    with_log_probs: bool,
    is_whole: bool,
    will_feed: bool,
) -> Generator[Need, Any, Chosen]:
    """Leave where the policy says, sample that exit.

    N-vium (arXiv:2605.13190), Sec. 4.2 and App. B.2: with the routers' own draws this samples
    pi_mix, whatever the exit.
    """
    position, last = state.length, len(params.config.shape.exit_layers)
    need = None
    if is_whole and not with_log_probs:
        need = _need_token(position, last, noise, sampling, policy)
    if need is not None:
        if will_feed:
            following = partial(_need_token, position + 1, last, noise, sampling, policy)
            need = need._replace(following=following)
        run: TokenRun | None = yield need
        if run is not None:
            token_id = run.token_id
            if token_id is None:
                assert run.logits_V is not None, "for a token that was not drawn"
                logits_V = run.logits_V[: params.num_tokens]
                token_id = noise.draw(logits_V, position=position, sampling=sampling)
            return Chosen(token_id, run.exit_index, math.nan, None)
    asks_router = policy.reads_router or with_log_probs
    log_arrive = log_exit = 0.0
    for exit_index in range(last + 1):
        router_logit: float = yield NeedBlock(exit_index, asks_router and exit_index < last)
        log_exit = log_arrive
        if exit_index == last:
            break
        uniform = math.nan
        if asks_router:
            uniform = noise.uniform(position, exit_index)
            log_exit = log_arrive + log_sigmoid(router_logit)
            log_arrive += log_sigmoid(-router_logit)
        if policy.leaves(exit_index, position=position, router_logit=router_logit, uniform=uniform):
            break
    logits_1V: Tensor = yield NeedLogits((exit_index,))
    logits_V = logits_1V[0, : params.num_tokens]
    token_id = noise.draw(logits_V, position=position, sampling=sampling)
    return Chosen(token_id, exit_index, log_exit, logits_1V)


def _need_token(
    position: int, num_junctions: int, noise: Noise, sampling: SamplingParams, policy: ExitPolicy
) -> NeedToken | None:
    """Return what the token at a position needs as a whole, None under a policy not our own."""
    uniforms = [0.5] * num_junctions
    if policy.reads_router:
        uniforms = [noise.uniform(position, index) for index in range(num_junctions)]
    thresholds = exit_thresholds(policy, position=position, uniforms=uniforms)
    if thresholds is None:
        return None
    return NeedToken(thresholds, policy.reads_router, noise.plan(position, sampling))


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
    top_2 = partial_V.topk(2, dim=-1).values
    return top_2[..., 0] - top_2[..., 1] > rest + margin


def _certify(
    params: DecoderParams, state: DecodeState, router_temperature: float
) -> Generator[Need, Any, Chosen]:
    """Take argmax pi_mix as soon as it is certain.

    No head is evaluated while r_k >= 1/2; then all exits so far go through it in one call, and each
    further exit as it comes. The margin is 8 units in the last place of the dtype: the logits of
    one exit may round differently beside other rows.
    """
    num_tokens, last = params.num_tokens, len(params.config.shape.exit_layers)
    margin = 8 * torch.finfo(params.dtype).eps
    log_arrive = log_arrive_own = log_exit = 0.0
    waiting: list[int] = []
    weights: list[float] = []
    partial_V = torch.zeros(num_tokens, dtype=torch.float64, device=params.device)
    for exit_index in range(last + 1):
        own_logit: float = yield NeedBlock(exit_index, exit_index < last)
        waiting.append(exit_index)
        if exit_index == last:
            weights.append(math.exp(log_arrive))
            log_exit, rest = log_arrive_own, 0.0
        else:
            log_exit = log_arrive_own + log_sigmoid(own_logit)
            log_arrive_own += log_sigmoid(-own_logit)
            router_logit = own_logit / router_temperature
            weights.append(math.exp(log_arrive + log_sigmoid(router_logit)))
            log_arrive += log_sigmoid(-router_logit)
            rest = math.exp(log_arrive)
            if rest >= 0.5:
                continue
        logits_NV: Tensor = yield NeedLogits(tuple(waiting))
        probs_NV = logits_NV.double().softmax(-1)[:, :num_tokens]
        partial_V += torch.tensor(weights, dtype=torch.float64, device=probs_NV.device) @ probs_NV
        waiting, weights = [], []
        if exit_index == last:
            break
        state.stats.host_reads += 1
        if bool(is_decided(partial_V, rest, margin=margin)):
            break
    return Chosen(int(partial_V.argmax()), exit_index, log_exit, logits_NV[-1:])


def _blend(
    params: DecoderParams,
    state: DecodeState,
    noise: Noise,
    sampling: SamplingParams,
    router_temperature: float,
) -> Generator[Need, Any, Chosen]:
    """Sample F(pi_mix): every block, every router, one head call with a row per exit."""
    last = len(params.config.shape.exit_layers)
    log_arrive = log_arrive_own = 0.0
    log_exits = []
    for exit_index in range(last + 1):
        own_logit: float = yield NeedBlock(exit_index, exit_index < last)
        if exit_index == last:
            log_exits.append(log_arrive)
            break
        log_arrive_own += log_sigmoid(-own_logit)
        log_exits.append(log_arrive + log_sigmoid(own_logit / router_temperature))
        log_arrive += log_sigmoid(-own_logit / router_temperature)
    logits_NV: Tensor = yield NeedLogits(tuple(range(last + 1)))
    log_exit_N1 = torch.tensor(log_exits, dtype=torch.float64, device=logits_NV.device)[:, None]
    log_mix_V = mixture_log_prob(log_exit_N1, logits_NV.double().log_softmax(-1))
    log_mix_V = log_mix_V[: params.num_tokens]
    token_id = noise.draw(log_mix_V, position=state.length, sampling=sampling)
    return Chosen(token_id, exit_index, log_arrive_own, logits_NV[-1:])
