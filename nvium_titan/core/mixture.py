"""Exit log-probabilities, mixture log-likelihood and expected depth: pure functions.

Everything works in log space, in at least float32 (float64 stays float64), without clamps: a router
logit of +-inf gives a probability of exactly 0 or 1, a finite loss and finite gradients.

Shapes: E exits (N_V), J junctions (N_V - 1); `*` is any number of trailing axes, the same in every
argument. Exits and junctions are the leading axis because that is how the model stacks them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def exit_log_probs(router_logit_J: Tensor) -> Tensor:
    """Return log p_k, the log-probability of leaving at each exit.

    N-vium (arXiv:2605.13190), Sec. 4: p_k = w_k prod_{j<k} (1 - w_j) with w = sigmoid(z) and
    w_{N_V} = 1. The authors' code clamps p at 1e-8; this does not.

    Args:
        router_logit_J: z = exit minus continue, shape (J, *), any float dtype; +-inf allowed.

    Returns:
        Shape (J + 1, *), float32 (float64 for float64), nats, at most 0, -inf where p_k is 0; a new
        tensor. With J = 0 it is a row of zeros: the dense model always leaves at its last exit.

    Example:
        z = [0, 0] gives log [1/2, 1/4, 1/4].
    """
    z_J = at_least_float32(router_logit_J)
    log_leave_E = torch.cat([F.logsigmoid(z_J), z_J.new_zeros((1, *z_J.shape[1:]))])
    log_arrive_E = torch.cat([z_J.new_zeros((1, *z_J.shape[1:])), F.logsigmoid(-z_J).cumsum(dim=0)])
    return log_arrive_E + log_leave_E


def mixture_log_prob(log_exit_E: Tensor, log_label_E: Tensor) -> Tensor:
    """Return log pi_mix(y), the log-likelihood of each label under the mixture of exits.

    N-vium (arXiv:2605.13190), Sec. 4: pi_mix = sum_k p_k pi_k.

    Args:
        log_exit_E: Exit log-probabilities log p_k, shape (E, *), nats.
        log_label_E: log pi_k(y), shape (E, *), nats. Add a vocabulary axis to both (the first as a
            broadcast axis of 1) to get the whole distribution.

    Returns:
        Shape (*), at least float32, nats; a new tensor. It lies between the smallest and the
        largest log pi_k(y) (the paper's Prop. 2).

    Raises:
        ValueError: If the two differ in the number of exits.
    """
    if log_exit_E.shape[0] != log_label_E.shape[0]:
        raise ValueError(f"{log_exit_E.shape[0]} exit weights for {log_label_E.shape[0]} exits")
    return torch.logsumexp(at_least_float32(log_exit_E) + at_least_float32(log_label_E), dim=0)


def expected_depth(log_exit_E: Tensor, depth_fractions: tuple[float, ...]) -> Tensor:
    """Return sum_k p_k l_k / L, the expected depth of the prediction path.

    N-vium (arXiv:2605.13190), Sec. 4.1, the compute penalty before the mean over tokens.

    Args:
        log_exit_E: Exit log-probabilities, shape (E, *), nats.
        depth_fractions: l_k / L of every exit, E of them.

    Returns:
        Shape (*), a fraction of num_layers in (0, 1]; a new tensor.

    Raises:
        ValueError: If the number of fractions is not the number of exits.
    """
    if log_exit_E.shape[0] != len(depth_fractions):
        raise ValueError(f"{len(depth_fractions)} depth fractions for {log_exit_E.shape[0]} exits")
    return sum(
        (p * fraction for p, fraction in zip(log_exit_E.exp(), depth_fractions, strict=True)),
        start=torch.zeros_like(log_exit_E[0]),
    )
