"""From logits and noise to a token id; every law of sampling that is offered.

    temperature 1, no filter     pi_mix exactly (the exit is drawn from the routers)
    filter_scope="exit"          sum_k p_k F(pi_k): exact for that law, which is not F(pi_mix)
    filter_scope="mixture"       F(pi_mix): full depth, one head call with a row per exit
    temperature 0                argmax pi_mix (certified: it leaves once no exit can change it)

F is temperature, then top-k, then top-p, then min-p, then renormalisation.

Shapes: V vocabulary; any leading axes where `*` is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nvium_titan.decode.noise import Noise
from nvium_titan.errors import PromptError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a token is drawn from the distribution of an exit, or of the mixture."""

    temperature: float = 1.0
    """Divides the logits; 0 means the argmax (of pi_mix, if the policy samples the mixture)."""

    top_k: int = 0
    """Keep the k most likely tokens (ties: the lower id first); 0 keeps all."""

    top_p: float = 1.0
    """Keep the fewest most likely tokens that together reach this, at least one; in [0, 1]."""

    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; in [0, 1]."""

    filter_scope: Literal["exit", "mixture"] = "exit"
    """What the temperature and the filters act on: each exit's distribution, or the mixture."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            PromptError: If a value is out of range or not a number.
        """
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise PromptError(
                f"temperature={self.temperature}: must be a finite number >= 0 (0 is greedy)"
            )
        if self.top_k < 0:
            raise PromptError(f"top_k={self.top_k}: must be >= 0 (0 keeps every token)")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise PromptError(f"{name}={getattr(self, name)}: must lie in [0, 1]")
        if self.filter_scope not in ("exit", "mixture"):
            raise PromptError(f"filter_scope={self.filter_scope!r}: must be 'exit' or 'mixture'")

    @property
    def is_plain(self) -> bool:
        """Whether the distribution is sampled as it is, so that both filter scopes agree."""
        return self.temperature == 1 and not self.has_filter

    @property
    def has_filter(self) -> bool:
        """Whether any token may be removed."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1, 0)

    @property
    def filters(self) -> Filters:
        """The same as numbers for `choose`."""
        return Filters(
            self.temperature,
            self.top_k or None,
            self.top_p if self.top_p < 1 else None,
            math.log(self.min_p) if self.min_p > 0 else None,
        )


class Filters(NamedTuple):
    """F as numbers, or as tensors of shape (1,) that only the device reads; None is off."""

    temperature: float | Tensor
    """Divides the logits; 0, a number, is the argmax."""
    top_k: int | Tensor | None = None
    """Most tokens that stay."""
    top_p: float | Tensor | None = None
    """What the tokens that stay must reach together, after `top_k`."""
    log_min_p: float | Tensor | None = None
    """Least log-probability over that of the likeliest token."""


class Draw(NamedTuple):
    """One draw from F(softmax(logits)): whose noise, for which position, by which law."""

    noise: Noise
    """The request's random numbers."""
    position: int
    """Position of the token being chosen."""
    sampling: SamplingParams
    """The law F; at temperature 0 the argmax, without noise."""


def draw_token(logits_V: Tensor, draw: Draw) -> int:
    """Return the token of a draw. One host read.

    Args:
        logits_V: Logits or log-probabilities of the tokens that may be sampled, shape (V,).
        draw: What to draw.
    """
    is_greedy = draw.sampling.temperature == 0
    gumbel_V = None if is_greedy else draw.noise.gumbel(draw.position)
    return int(choose(logits_V, gumbel_V, draw.sampling.filters))


def choose(logits_V: Tensor, gumbel_V: Tensor | None, filters: Filters) -> Tensor:
    """Return a token drawn from F(softmax(logits)), or its argmax without noise.

    The maximum of logits plus Gumbel noise is an exact draw from their softmax; no cumulative sum,
    no host read.

    Args:
        logits_V: Logits or log-probabilities, shape (*, V).
        gumbel_V: Standard Gumbel noise, float64, broadcastable; None for the argmax.
        filters: The law F; its temperature is positive where there is noise.

    Returns:
        Shape (*), int64.
    """
    if gumbel_V is None:
        return logits_V.argmax(-1)
    return (filtered_logits(logits_V, filters) + gumbel_V).argmax(-1)


def filtered_logits(logits_V: Tensor, filters: Filters) -> Tensor:
    """Return F(softmax(logits)) as logits: removed tokens at -inf, the rest not normalised.

    Args:
        logits_V: Logits or log-probabilities, shape (*, V), any float dtype; -inf allowed.
        filters: Its temperature must be positive.

    Returns:
        Shape (*, V), float64. The likeliest token always survives. No host read.

    Raises:
        ValueError: If the temperature is the number 0.

    Example:
        Probabilities [.5, .3, .2] with top_p = .6 give logits that softmax to [.625, .375, 0].
    """
    logits_V = logits_V.double()
    temperature, top_k, top_p, log_min_p = filters
    if not isinstance(temperature, Tensor):
        if temperature == 0:
            raise ValueError("temperature 0 has no logits; take the argmax")
        if temperature == 1 and top_k is None and top_p is None and log_min_p is None:
            return logits_V
    # The maximum goes first, so that a tiny temperature gives -inf and never inf - inf.
    logits_V = (logits_V - logits_V.amax(-1, keepdim=True)) / temperature
    if top_k is not None or top_p is not None:
        logits_V = _keep_likeliest(logits_V, top_k=top_k, top_p=top_p)
    if log_min_p is not None:
        logits_V = logits_V.masked_fill(logits_V < log_min_p, -math.inf)
    return logits_V


def _keep_likeliest(
    logits_V: Tensor, *, top_k: int | Tensor | None, top_p: float | Tensor | None
) -> Tensor:
    # Stable: equal logits stay in the order of their ids.
    ordered_V, order_V = torch.sort(logits_V, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_V.shape[-1], device=logits_V.device)
    if top_k is not None:
        ordered_V = ordered_V.masked_fill(rank_V >= top_k, -math.inf)
    if top_p is not None:
        probs_V = torch.softmax(ordered_V, dim=-1)
        before_V = probs_V.cumsum(-1) - probs_V
        ordered_V = ordered_V.masked_fill((before_V >= top_p) & (rank_V > 0), -math.inf)
    return torch.empty_like(logits_V).scatter_(-1, order_V, ordered_V)
