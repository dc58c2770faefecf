"""Which layouts a model can be trained in, checked before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import ConfigError, nearest

# These run the whole backward pass of a stage at once, and log on the last rank.
PIPELINE_SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
"""Schedules that a model can be trained with."""


def check_layout(shape: ModelShape, *, parallelism: Any, training: Any, trainable: str) -> None:
    """Check that a model can be split as asked.

    Args:
        shape: The model's.
        parallelism: torchtitan's table `[parallelism]`.
        training: torchtitan's table `[training]`.
        trainable: `[nvium] trainable`.

    Raises:
        ConfigError: If it cannot; the message states the rule.
    """
    if parallelism.spmd_backend != "spmd_types":
        raise ConfigError(
            f'[parallelism] spmd_backend="{parallelism.spmd_backend}": the mixture loss needs '
            'plain tensors; use "spmd_types"'
        )
    if parallelism.expert_parallel_degree > 1:
        raise ConfigError(
            f"[parallelism] expert_parallel_degree={parallelism.expert_parallel_degree}: the model "
            "has no experts; set it to 1"
        )
    if parallelism.tensor_parallel_degree > 1:
        _check_tensor_parallel(shape, parallelism, training)
    if parallelism.pipeline_parallel_degree > 1:
        _check_pipeline(shape, parallelism, training, trainable)


def _check_tensor_parallel(shape: ModelShape, parallelism: Any, training: Any) -> None:
    degree = parallelism.tensor_parallel_degree
    rules = {
        "[model] num_heads": shape.num_heads,
        "[model] num_kv_heads": shape.num_kv_heads,
        "[model] ffn_dim": shape.ffn_dim,
        # torchtitan would pad it, and checkpoints with it.
        "[model] vocab_size": shape.vocab_size,
    }
    if parallelism.enable_sequence_parallel:
        rules["[training] seq_len"] = training.seq_len
    for key, value in rules.items():
        if value % degree:
            allowed = [d for d in range(1, 65) if not any(v % d for v in rules.values())]
            raise ConfigError(
                f"[parallelism] tensor_parallel_degree={degree} does not divide {key}={value}; "
                f"degrees that divide {_listed([f'{k}={v}' for k, v in rules.items()])}: "
                f"{', '.join(map(str, allowed))}"
            )


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _check_pipeline(shape: ModelShape, parallelism: Any, training: Any, trainable: str) -> None:
    degree = parallelism.pipeline_parallel_degree
    asked = f"[parallelism] pipeline_parallel_degree={degree}"
    if shape.tie_embeddings:
        raise ConfigError(
            f"{asked}: embedding and head lie on different stages and cannot share a weight; set "
            "[model] tie_embeddings = false"
        )
    if trainable != "all":
        raise ConfigError(
            f'{asked}: with [nvium] trainable="{trainable}" a stage may have nothing to train; '
            "use data_parallel_shard_degree or tensor_parallel_degree"
        )
    if not training.disable_cuda_graphs:
        raise ConfigError(
            f"{asked}: a pipeline cannot be captured in a CUDA graph; set [training] "
            "disable_cuda_graphs = true"
        )
    size = parallelism.pipeline_parallel_microbatch_size
    if size < 1 or training.local_batch_size % size:
        raise ConfigError(
            f"{asked}: [parallelism] pipeline_parallel_microbatch_size={size} must divide "
            f"[training] local_batch_size={training.local_batch_size}"
        )
    name = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_schedule_csv or name not in PIPELINE_SCHEDULES:
        raise ConfigError(
            f'[parallelism] pipeline_parallel_schedule="{name}" '
            f'(csv "{parallelism.pipeline_parallel_schedule_csv or ""}"): not supported'
            + nearest(name, PIPELINE_SCHEDULES)
        )
    _check_stages(shape, parallelism, name)


def _check_stages(shape: ModelShape, parallelism: Any, schedule: str) -> None:
    degree, num_layers = parallelism.pipeline_parallel_degree, shape.num_layers
    is_single = issubclass(get_schedule_class(schedule), PipelineScheduleSingle)
    given = parallelism.module_fqns_per_model_part
    if given is not None:
        whole = ["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "lm_head"]
        if [name for stage in given for name in stage] != whole:
            raise ConfigError(
                f"[parallelism] module_fqns_per_model_part={given}: the stages together must list "
                f"tok_embeddings, layers.0 to layers.{num_layers - 1}, norm and lm_head, each once "
                "and in this order"
            )
        num_stages = len(given)
        has_layers = all(any(name.startswith("layers.") for name in stage) for stage in given)
    else:
        # torchtitan counts embedding and head as layers of the first and the last stage.
        first = parallelism.pipeline_parallel_first_stage_less_layers
        last = parallelism.pipeline_parallel_last_stage_less_layers
        weight = num_layers + first + last
        per_stage = parallelism.pipeline_parallel_layers_per_stage
        num_stages = (
            degree * (1 if is_single else 2) if per_stage is None else -(-weight // per_stage)
        )
        shares = [weight // num_stages + (i < weight % num_stages) for i in range(num_stages)]
        has_layers = min(shares) > 0 and shares[0] > first and shares[-1] > last
    per_rank = "1 stage" if is_single else "2 or more stages"
    fits = num_stages == degree if is_single else not num_stages % degree and num_stages > degree
    if not fits:
        raise ConfigError(
            f"[parallelism] {num_stages} pipeline stages on pipeline_parallel_degree={degree} "
            f'ranks: the schedule "{schedule}" needs {per_rank} on each; change '
            "pipeline_parallel_layers_per_stage or the schedule"
        )
    if not has_layers:
        raise ConfigError(
            f"[parallelism] {num_stages} pipeline stages for num_layers={num_layers}: every stage "
            "needs a layer, besides embedding and head, which count as pipeline_parallel_first_"
            "stage_less_layers and pipeline_parallel_last_stage_less_layers (1 each); use fewer "
            "stages or set these to 0"
        )
