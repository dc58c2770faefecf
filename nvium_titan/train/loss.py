"""`MixtureLoss`: the mixture's objective from exit states and router logits, chunked over tokens.

The loss owns the head, and applies it to one chunk of tokens at a time. The logits of all exits are
there together for a chunk (the gradient needs the responsibility of each exit), never for all
tokens. Each exit state passes the head once, and a gradient takes the memory of its logits.

Shapes: E exits, J = E - 1 junctions, B sequences, T tokens, C tokens of a chunk, R = E B C rows of
logits, D width, V vocabulary (this rank's part of it under tensor parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from nvium_titan.core.mixture import at_least_float32
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import ConfigError
from nvium_titan.train.controller import ControllerConfig
from nvium_titan.train.metrics import sum_sizes, token_sums
from nvium_titan.train.objective import phase_weights, token_terms


class MixtureLoss(BaseLoss):
    """L_mix + alpha L_balance in the router warm-up, L_mix + beta L_compute afterwards.

    N-vium (arXiv:2605.13190), Sec. 4.1 and App. A. Each term is a sum over valid tokens, divided by
    their number in the whole step; the authors' code divides by the count of each micro-batch, and
    does not average over accumulation steps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """Weights of the objective, and its chunks (table `[loss]`)."""

        beta: float = 0.15
        """Weight of the expected depth in the main phase (paper: beta); >= 0, no unit. A
        controller starts from it."""

        alpha: float = 1.0
        """Weight of the balance term in the router warm-up (paper: alpha = 1); >= 0, no unit."""

        warmup_fraction: float = 0.05
        """Fraction of the training steps that is router warm-up (paper: 5%); in [0, 1]."""

        num_chunks: int = 8
        """Number of chunks of tokens, >= 1; more chunks need less memory for logits."""

        controller: ControllerConfig = field(default_factory=ControllerConfig)
        """How beta follows a dense baseline; without a baseline it is constant."""

        def __post_init__(self) -> None:
            """Check the ranges.

            Raises:
                ConfigError: If a value is out of range.
            """
            for key in ("beta", "alpha"):
                value = getattr(self, key)
                if not (math.isfinite(value) and value >= 0):
                    raise ConfigError(f"[loss] {key}={value}: must be finite and >= 0")
            if not 0 <= self.warmup_fraction <= 1:
                raise ConfigError(
                    f"[loss] warmup_fraction={self.warmup_fraction}: must lie in [0, 1]"
                )
            if self.num_chunks < 1:
                raise ConfigError(f"[loss] num_chunks={self.num_chunks}: must be at least 1")

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        # It runs autograd inside its forward pass, so it stays uncompiled.
        del compile_config
        self.config = config
        self.lm_head: nn.Module | None = None
        self.balance_weight = 0.0
        self.beta = config.beta
        self.compute_weight = config.beta

    def bind(self, lm_head: nn.Module | None, shape: ModelShape, *, device: torch.device) -> None:
        """Attach the head and make the device tensors: once, before the first step.

        Args:
            lm_head: The shared head; None on a pipeline stage that has none.
            shape: The model's, for its exits.
            device: Where weights and sums live.
        """
        self.lm_head = lm_head
        self.shape = shape
        # Written in place between steps, so that a new phase or beta neither recompiles nor
        # recaptures a step. 0-dim float64 scales a float32 tensor without making it float64.
        self._balance_weight = torch.zeros((), dtype=torch.float64, device=device)
        self._compute_weight = torch.zeros((), dtype=torch.float64, device=device)
        num_sums = sum(sum_sizes(shape.num_exits).values())
        self.sums = torch.zeros(num_sums, dtype=torch.float64, device=device)

    def warmup_steps(self, num_steps: int) -> int:
        """Return how many steps of a run are router warm-up."""
        return round(self.config.warmup_fraction * num_steps)

    def start_step(self, step: int, *, num_steps: int) -> None:
        """Set the weights for a training step and clear the sums.

        Args:
            step: The step about to be trained, from 1.
            num_steps: Steps of the whole run; the router warm-up is a fraction of them.
        """
        self.balance_weight, self.compute_weight = phase_weights(
            step,
            warmup_steps=self.warmup_steps(num_steps),
            alpha=self.config.alpha,
            beta=self.beta,
        )
        self._balance_weight.fill_(self.balance_weight)
        self._compute_weight.fill_(self.compute_weight)
        self.sums.zero_()

    def __call__(
        self,
        pred: tuple[Tensor, Tensor],
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, its share of the step's; figures go to `self.sums`.

        Args:
            pred: Exit states o (E, B, T, D) and router logits z (J, B, T).
            labels: Next token of each position, (B, T); -100 does not count.
            global_valid_tokens: Valid tokens in the step, over all ranks; None gives the sum.
            **kwargs: The trainer's other inputs; not used.

        Returns:
            The loss, 0-dim, at least float32, nats/token (nats without `global_valid_tokens`), and
            an empty dict.
        """
        del kwargs
        assert self.lm_head is not None, "bind() attaches the head before the first step"
        exit_states_EBTD, router_logits_JBT = pred
        needs_grad = exit_states_EBTD.requires_grad
        with spmd.local(), spmd.no_typecheck(), _unsharded(self.lm_head) as sync_gradients:
            grad_EBTD = torch.empty_like(exit_states_EBTD) if needs_grad else None
            grad_JBT = torch.zeros_like(router_logits_JBT) if needs_grad else None
            total = torch.zeros((), device=labels.device)
            num_tokens = labels.shape[1]
            size = math.ceil(num_tokens / self.config.num_chunks)
            for start in range(0, num_tokens, size):
                chunk = slice(start, start + size)
                if start + size >= num_tokens:
                    sync_gradients()
                o_EBCD = exit_states_EBTD[:, :, chunk].detach().contiguous()
                z_JBC = router_logits_JBT[:, :, chunk].detach().contiguous()
                if needs_grad:
                    o_EBCD.requires_grad_()
                    z_JBC.requires_grad_()
                loss = self._chunk_loss(o_EBCD, z_JBC, labels[:, chunk].contiguous())
                if global_valid_tokens is not None:
                    loss = loss / global_valid_tokens.clamp(min=1)
                total = total + loss.detach()
                if grad_EBTD is not None and grad_JBT is not None:
                    grad_EBTD[:, :, chunk], grad_JBT[:, :, chunk] = _backward(loss, o_EBCD, z_JBC)
        if grad_EBTD is None:
            return total, {}
        with spmd.no_typecheck():
            return _FeedGradients.apply(
                exit_states_EBTD, router_logits_JBT, grad_EBTD, grad_JBT, total
            ), {}

    def _chunk_loss(self, o_EBCD: Tensor, z_JBC: Tensor, labels_BC: Tensor) -> Tensor:
        """Return a chunk's sum over valid tokens, in nats, and add its figures to the sums."""
        assert self.lm_head is not None, "checked by the caller"
        num_exits, num_sequences = o_EBCD.shape[:2]
        # One call for all exits; the head's placements are for three axes.
        logits_NCV = self.lm_head(o_EBCD.flatten(0, 1))
        labels_R = labels_BC.expand(num_exits, *labels_BC.shape).flatten()
        nll_R = _LabelNll.apply(
            at_least_float32(logits_NCV.flatten(0, 1)), labels_R, _tensor_parallel_group()
        )
        log_label_EBC = -nll_R.view(num_exits, num_sequences, -1)
        terms = token_terms(z_JBC, log_label_EBC, self.shape)
        valid_BC = (labels_BC != IGNORE_INDEX).to(terms.mixture_nll.dtype)
        per_token = (
            terms.mixture_nll
            + self._balance_weight * terms.balance
            + self._compute_weight * terms.expected_depth
        )
        with torch.no_grad():
            self.sums += token_sums(terms, z_JBC, log_label_EBC, valid_BC)
        return (per_token * valid_BC).sum()


def _backward(loss: Tensor, o_EBCD: Tensor, z_JBC: Tensor) -> tuple[Tensor, Tensor]:
    """Add the head's gradient to its parameters; return that of exit states and router logits."""
    torch.autograd.backward(loss)
    assert o_EBCD.grad is not None, "every exit state goes through the head"
    assert z_JBC.grad is not None, "every router weighs an exit"
    return o_EBCD.grad, z_JBC.grad


@contextmanager
def _unsharded(lm_head: nn.Module) -> Iterator[Any]:
    """Keep an FSDP head gathered over all chunks; give what turns its gradient sync on again."""
    # The head runs once per chunk, outside the model's forward pass: FSDP would gather its weight
    # and reduce its gradient every time.
    if not isinstance(lm_head, FSDPModule):
        yield lambda: None
        return
    lm_head.set_reshard_after_forward(False)
    lm_head.set_reshard_after_backward(False)
    lm_head.set_requires_gradient_sync(False, recurse=False)
    lm_head.unshard()
    yield lambda: lm_head.set_requires_gradient_sync(True, recurse=False)
    lm_head.set_reshard_after_forward(True)
    lm_head.set_reshard_after_backward(True)
    lm_head.set_requires_gradient_sync(True, recurse=False)
    lm_head.reshard()


def _tensor_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks that share the rows of the head, None if each has all."""
    if get_spmd_backend() != "spmd_types" or spmd_mesh_size("tp") == 1:
        return None
    group: dist.ProcessGroup = current_spmd_mesh().get_group("tp")
    return group


class _LabelNll(torch.autograd.Function):
    """-log pi(y) of every row, 0 where the label is -100; overwrites the logits.

    With a group each rank has an equal part of the vocabulary, in the order of the ranks.
    """

    # Softmax and gradient are made in the memory of the logits. Logits fill most of the memory, and
    # passes over them are what the loss costs beside the head.

    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, labels_R: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        vocab_size = logits_RV.shape[1]
        counts_R = is_here_R = labels_R != IGNORE_INDEX
        if group is not None:
            labels_R = labels_R - vocab_size * dist.get_rank(group)
            is_here_R = counts_R & (labels_R >= 0) & (labels_R < vocab_size)
        index_R = labels_R.where(is_here_R, 0)

        work_RV = logits_RV.detach()
        largest_R = work_RV.amax(dim=1)
        if group is not None:
            dist.all_reduce(largest_R, dist.ReduceOp.MAX, group)
        work_RV.sub_(largest_R[:, None])
        label_R = work_RV.gather(1, index_R[:, None])[:, 0].where(is_here_R, 0)
        sum_R = work_RV.exp_().sum(dim=1)
        if group is not None:
            both_2R = torch.stack([label_R, sum_R])
            dist.all_reduce(both_2R, dist.ReduceOp.SUM, group)
            label_R, sum_R = both_2R.unbind()
        nll_R = (sum_R.log() - label_R).where(counts_R, 0)
        ctx.save_for_backward(work_RV, sum_R, nll_R, index_R, is_here_R, counts_R)
        return nll_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        work_RV, sum_R, nll_R, index_R, is_here_R, counts_R = ctx.saved_tensors
        grad_R = grad_outputs[0].where(counts_R, 0)
        grad_RV = work_RV.mul_((grad_R / sum_R)[:, None])
        rows_R = torch.arange(len(grad_R), device=grad_R.device)
        # pi(y) - 1, without cancellation.
        of_label_R = grad_R * torch.expm1(-nll_R)
        grad_RV[rows_R, index_R] = of_label_R.where(is_here_R, grad_RV[rows_R, index_R])
        return grad_RV, None, None


class _FeedGradients(torch.autograd.Function):
    """Hand the gradients of the chunked head to the model's backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        exit_states_EBTD: Tensor,
        router_logits_JBT: Tensor,
        grad_EBTD: Tensor,
        grad_JBT: Tensor,
        loss: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(grad_EBTD, grad_JBT)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        # The trainer calls backward on the loss itself, so the incoming gradient is 1.
        return (*ctx.saved_tensors, None, None, None)
