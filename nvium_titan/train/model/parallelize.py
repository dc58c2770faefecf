"""The parallelism plan: torchtitan's plan for Llama, into which the junctions fit."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.tools import utils

from nvium_titan.errors import ConfigError
from nvium_titan.train.compat import sum_gradients_without_premul


def check_device(*, parallelism: Any, training: Any) -> None:
    """Check that this machine's devices can do what a layout asks.

    Args:
        parallelism: torchtitan's table `[parallelism]`.
        training: torchtitan's table `[training]`.

    Raises:
        ConfigError: If there is no accelerator and one is needed.
    """
    if utils.device_type != "cpu":
        return
    degree = parallelism.context_parallel_degree
    if degree > 1:
        raise ConfigError(
            f"[parallelism] context_parallel_degree={degree}: the CPU has no attention over a "
            "split sequence; set it to 1 or train on GPUs"
        )
    if training.enable_cpu_offload:
        raise ConfigError(
            "[training] enable_cpu_offload=true: there is no accelerator to offload from; "
            "set it to false"
        )


def parallelize_nvium(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing, compile and FSDP to a model part.

    Args:
        model: The model or a pipeline stage, on the meta device.
        **kwargs: torchtitan's `parallelize_fn` arguments.

    Returns:
        The same model, parallelised in place.
    """
    model = parallelize_llama(model, **kwargs)
    if utils.device_type == "cpu":
        sum_gradients_without_premul(model)
    return model


def parallelize_junctions(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Apply `parallelize_nvium`, then freeze all but the junctions; the final exit is frozen too.

    Args:
        model: As for `parallelize_nvium`.
        **kwargs: As for `parallelize_nvium`.
    """
    model = parallelize_nvium(model, **kwargs)
    # Only now, since distributing the parameters made new ones. FSDP2 allows units in which some
    # are frozen.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("junction" in name.split("."))
    return model
