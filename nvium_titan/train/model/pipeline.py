"""Pipeline parallelism: torchtitan's split and schedules, with junctions on any stage.

A stage passes (hidden, exit states so far, router logits so far) to the next one; the last one has
the head and the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm


def pipeline_nvium(model: nn.Module, **kwargs: Any) -> tuple[Any, list[nn.Module], bool, bool]:
    """Split a model into pipeline stages and parallelise each.

    Args:
        model: The whole model, on the meta device.
        **kwargs: torchtitan's `pipelining_fn` arguments.

    Returns:
        The schedule, this rank's stages in order, and whether these include the first and the last.
    """
    schedule, parts, has_first, has_last = pipeline_llm(model, **kwargs)
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    for stage in stages:
        _infer_shapes_without_loss(stage)
    return schedule, parts, has_first, has_last


def _infer_shapes_without_loss(stage: Any) -> None:
    """Let a stage learn the shapes of its gradients from a stand-in for the loss."""
    # Before the first step torch 2.14 runs the stages on uninitialised memory, to infer shapes. The
    # mixture loss would count that in its figures, and would add noise to the head's gradient,
    # since it runs the head's backward pass itself. This can go once torch does not call the loss.
    infer = stage._backward_metadata_inference

    def infer_without_loss(loss_fn: Any = None, **kwargs: Any) -> Any:
        return infer(loss_fn=None if loss_fn is None else _sum_of_outputs, **kwargs)

    stage._backward_metadata_inference = infer_without_loss


def _sum_of_outputs(outputs: tuple[Tensor, ...], _labels: Tensor, **_kwargs: Any) -> Tensor:
    return sum((t.sum() for t in outputs if t.requires_grad), start=outputs[0].new_zeros(()))
