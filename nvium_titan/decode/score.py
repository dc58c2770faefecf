"""Log-probabilities of given tokens: under every exit and under the mixture.

Shapes: R positions, E exits, J = E - 1 junctions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvium_titan.core.mixture import at_least_float32, exit_log_probs, mixture_log_prob
from nvium_titan.decode.runner import Runner
from nvium_titan.decode.sequence import DecodeState

_LOGIT_ELEMENTS = 1 << 22


class PositionScores(NamedTuple):
    """Scores of consecutive positions, nats, at least float32."""

    log_mix_R: Tensor
    log_label_ER: Tensor
    log_exit_ER: Tensor


def score_positions(
    runner: Runner, state: DecodeState, *, first: int, next_ids: list[int]
) -> PositionScores:
    """Return the log-probability of each next token, from stored boundary states.

    The softmax runs over every row of the head, padding included, as in training. Logits exist for
    a few positions of one exit at a time.

    Args:
        runner: The model.
        state: The sequence; every block must be filled at the positions asked for.
        first: First position whose next token is scored.
        next_ids: The token after each position.
    """
    params, forward = runner.params, runner.forward
    num_rows = max(1, _LOGIT_ELEMENTS // params.shape.vocab_size)
    ids_R = torch.tensor(next_ids, device=params.device)
    parts = []
    for start in range(0, len(next_ids), num_rows):
        ids_C = ids_R[start : start + num_rows]
        labels, routers = [], []
        for k in range(runner.num_exits):
            h_CD = state.buffers.boundary_SD[k + 1].narrow(0, first + start, len(ids_C))
            n_CD = forward.exit_norm(k, h_CD)
            if k < runner.num_exits - 1:
                routers.append(forward.router_logit(k, n_CD))
            logits_CV = at_least_float32(forward.logits(forward.exit_state(k, n_CD)))
            picked_C = logits_CV.gather(1, ids_C[:, None])[:, 0]
            labels.append(picked_C - logits_CV.logsumexp(-1))
        log_label_EC = torch.stack(labels)
        router_JC = torch.stack(routers) if routers else log_label_EC[:0]
        log_exit_EC = exit_log_probs(router_JC)
        parts.append(
            PositionScores(mixture_log_prob(log_exit_EC, log_label_EC), log_label_EC, log_exit_EC)
        )
    return PositionScores(*(torch.cat(group, dim=-1) for group in zip(*parts, strict=True)))
