"""The training objective per token, and its weights in the two phases: pure functions.

    warm-up:  L_mix + alpha L_balance          main:  L_mix + beta L_compute

N-vium (arXiv:2605.13190), Sec. 4.1 and App. A. Shapes: E exits, J = E - 1 junctions; `*` is any
number of trailing axes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvium_titan.core.mixture import (
    at_least_float32,
    exit_log_probs,
    expected_depth,
    mixture_log_prob,
)
from nvium_titan.core.shape import ModelShape


class TokenTerms(NamedTuple):
    """The parts of the objective for every token; shape (*) unless stated."""

    mixture_nll: Tensor
    """-log pi_mix(y), nats."""

    expected_depth: Tensor
    """sum_k p_k l_k / L, fraction of num_layers."""

    balance: Tensor
    """sum_{k<N_V} (w_k - 1 / (N_V - k + 1))^2, no unit."""

    log_exit_E: Tensor
    """log p_k, shape (E, *), nats."""


def token_terms(router_logit_J: Tensor, log_label_E: Tensor, shape: ModelShape) -> TokenTerms:
    """Return the parts of the objective for every token.

    N-vium (arXiv:2605.13190), Sec. 4.1 (L_mix, L_compute) and App. A (L_balance; its w_k is the
    conditional probability). The authors' code clamps p and w; this does not.

    Args:
        router_logit_J: z, shape (J, *).
        log_label_E: log pi_k(y), shape (E, *), nats.
        shape: The model's, for its exits.
    """
    log_exit_E = exit_log_probs(router_logit_J)
    w_J = torch.sigmoid(at_least_float32(router_logit_J))
    balance = sum(
        ((w - target) ** 2 for w, target in zip(w_J, shape.balance_targets(), strict=True)),
        start=torch.zeros_like(log_exit_E[0]),
    )
    return TokenTerms(
        mixture_nll=-mixture_log_prob(log_exit_E, log_label_E),
        expected_depth=expected_depth(log_exit_E, shape.depth_fractions),
        balance=balance,
        log_exit_E=log_exit_E,
    )


def phase_weights(
    step: int, *, warmup_steps: int, alpha: float, beta: float
) -> tuple[float, float]:
    """Return the weights of L_balance and L_compute at a step.

    N-vium (arXiv:2605.13190), App. A: alpha in the router warm-up, beta afterwards, never both.

    Args:
        step: The step about to be trained, from 1.
        warmup_steps: Steps of the router warm-up; 0 skips it.
        alpha: Weight of the balance term.
        beta: Weight of the compute penalty.
    """
    return (alpha, 0.0) if step <= warmup_steps else (0.0, beta)
