"""`nvium train --dry-run`: what a configuration would train on N ranks, found out on one.

The model is built on the meta device and parallelised as in training, in a process group that only
pretends to have N ranks; then parameters are counted. It reads the configuration and nothing else:
no data, no tokenizer, no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend, init_fake_mode, set_spmd_backend

from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import ConfigError
from nvium_titan.train.trainer import NviumTrainer

TOKENS_PER_PARAM = 20
"""The paper's length of training (N-vium, arXiv:2605.13190, App. A)."""

_ADAM_MOMENTS = 2
# At its peak a logit is there in bfloat16 and in float32; its gradient reuses that memory.
_BYTES_PER_LIVE_LOGIT = 2 + 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on the fullest rank of a pipeline stage."""

    pipeline_rank: int
    """Place in the pipeline, from 0; 0 without a pipeline."""
    num_params: int
    """Number of parameters in this rank's shards (no bytes)."""
    parameters: int
    """Bytes of these."""
    gradients: int
    """Bytes of the gradients of those that are trained."""
    optimizer: int
    """Bytes of their two moments."""
    gathered: int
    """Bytes that FSDP holds unsharded: two layers (all, without resharding), the head and its
    gradient."""
    activations: int
    """Bytes of what the backward pass needs: the estimate that `ACTIVATIONS` describes."""

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations


ACTIVATIONS = """\
activations: an estimate of what the backward pass of a micro-batch needs: inputs of norms and
matmuls, q, k and v (with recomputation: what [activation_checkpoint] keeps, and one whole layer);
exit states and their gradients; the logits of one chunk of the loss. Without the allocator's
overhead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """What a configuration would train."""

    layout: dict[str, int]
    """Degree of each kind of parallelism."""
    world_size: int
    """Number of ranks."""
    flavor: str
    """Named size that the model is based on."""
    exits: tuple[int, ...]
    """Layers run before each exit."""
    num_params: int
    """Parameters of the whole model."""
    num_sequences: int
    """Sequences in a step, over all ranks."""
    seq_len: int
    """Tokens in a sequence."""
    accumulation_steps: int
    """Micro-batches per step on each data-parallel rank."""
    steps: int
    """Steps of the run."""
    memory: list[RankMemory]
    """Memory at each place in the pipeline."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step, over all ranks."""
        return self.num_sequences * self.seq_len

    @property
    def steps_for_20_tokens(self) -> int:
        """Steps that make 20 tokens per parameter."""
        return round(TOKENS_PER_PARAM * self.num_params / self.tokens_per_step)

    def to_text(self) -> str:
        """Return the figures for people."""
        degrees = ", ".join(f"{name} {n}" for name, n in self.layout.items() if n > 1)
        rows = [
            ("ranks", f"{self.world_size} ({degrees or 'one process'})"),
            (
                "model",
                f"{self.flavor}: {self.num_params:,} parameters, exits after layers "
                f"{', '.join(map(str, self.exits))}",
            ),
            (
                "step",
                f"{self.tokens_per_step:,} tokens: {self.num_sequences} sequences of "
                f"{self.seq_len}, in {self.accumulation_steps} micro-batches on each "
                "data-parallel rank",
            ),
            (
                "run",
                f"{self.steps:,} steps; {TOKENS_PER_PARAM} tokens per parameter are "
                f"{self.steps_for_20_tokens:,}",
            ),
        ]
        lines = [f"{name:8}{text}" for name, text in rows]
        parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "total")
        lines += ["", "GB per rank  " + "".join(f"{part:>13}" for part in parts)]
        for memory in self.memory:
            name = f"stage {memory.pipeline_rank}" if len(self.memory) > 1 else ""
            figures = "".join(f"{getattr(memory, part) / 1e9:13.2f}" for part in parts)
            lines.append(f"{name:13}{figures}")
        return "\n".join([*lines, ACTIVATIONS])


def dry_run(config: NviumTrainer.Config, *, world_size: int | None = None) -> DryRun:
    """Return what a configuration would train on `world_size` ranks.

    Args:
        config: The run's configuration.
        world_size: Ranks; None: the product of the degrees, with a shard degree of -1 as 1.

    Raises:
        ConfigError: If it cannot run like this; the message states the rule.
    """
    layout = _resolve_layout(config, world_size)
    num_sequences, accumulation_steps = _resolve_batch(config, layout)
    shape: ModelShape = config.model_spec.model.shape
    memory, num_params = [], 0
    ranks = math.prod(layout.values())
    for pipeline_rank in range(layout["pp"]):
        rank = pipeline_rank * (ranks // layout["pp"])
        with _pretended_ranks(config, world_size=ranks, rank=rank) as parallel_dims:
            num_params, parts = _build_parts(config, parallel_dims)
            memory.append(_memory_of(parts, config, shape, layout, pipeline_rank))
    return DryRun(
        layout=layout,
        world_size=ranks,
        flavor=config.model.flavor,
        exits=shape.block_ends,
        num_params=num_params,
        num_sequences=num_sequences,
        seq_len=config.training.seq_len,
        accumulation_steps=accumulation_steps,
        steps=config.training.steps,
        memory=memory,
    )


def _resolve_layout(config: NviumTrainer.Config, world_size: int | None) -> dict[str, int]:
    asked = config.parallelism
    keys = {
        "dp_replicate": "data_parallel_replicate_degree",
        "dp_shard": "data_parallel_shard_degree",
        "cp": "context_parallel_degree",
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
    }
    layout = {name: getattr(asked, key) for name, key in keys.items()}
    for name, degree in layout.items():
        if degree < 1 and (name, degree) != ("dp_shard", -1):
            rest = ", or -1 for all ranks that are left" if name == "dp_shard" else ""
            raise ConfigError(f"[parallelism] {keys[name]}={degree}: must be at least 1{rest}")
    others = math.prod(degree for degree in layout.values() if degree > 0)
    if layout["dp_shard"] == -1:
        layout["dp_shard"] = 1 if world_size is None else max(1, world_size // others)
    product = math.prod(layout.values())
    if world_size is not None and product != world_size:
        shown = " x ".join(f"{keys[name]}={degree}" for name, degree in layout.items())
        raise ConfigError(
            f"[parallelism] {shown} makes {product} ranks, but there are {world_size}: the degrees "
            "must multiply to the number of ranks (data_parallel_shard_degree = -1 takes all that "
            "are left)"
        )
    sequence_parts = (layout["tp"] if asked.enable_sequence_parallel else 1) * (
        2 * layout["cp"] if layout["cp"] > 1 else 1
    )
    if config.training.seq_len % sequence_parts:
        raise ConfigError(
            f"[training] seq_len={config.training.seq_len}: must be a multiple of "
            f"{sequence_parts}: tensor_parallel_degree={layout['tp']} (for sequence parallelism) "
            f"times twice context_parallel_degree={layout['cp']} (if above 1)"
        )
    return layout


def _resolve_batch(config: NviumTrainer.Config, layout: dict[str, int]) -> tuple[int, int]:
    """Return the sequences of a step, and its micro-batches on each data-parallel rank.

    Raises:
        ConfigError: If the batch cannot be split like this.
    """
    local, total = config.training.local_batch_size, config.training.global_batch_size
    replicas = layout["dp_replicate"] * layout["dp_shard"]
    if total < 0:
        return local * replicas, 1
    if total == 0 or total % (local * replicas):
        raise ConfigError(
            f"[training] global_batch_size={total}: must be a multiple of local_batch_size={local} "
            f"times the {replicas} data-parallel ranks, {local * replicas}"
        )
    return total, total // (local * replicas)


@contextmanager
def _pretended_ranks(
    config: NviumTrainer.Config, *, world_size: int, rank: int
) -> Iterator[ParallelDims]:
    """Give the meshes of one rank of a group that does not exist.

    Raises:
        ConfigError: If torchtitan refuses what is built inside.
    """
    backend = get_spmd_backend()
    init_fake_mode(world_size, rank=rank)
    try:
        set_spmd_backend(config.parallelism.spmd_backend)
        parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
        parallel_dims.build_mesh()
        yield parallel_dims
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"torchtitan refuses the settings: {error}") from error
    finally:
        set_spmd_backend(backend)
        torch.distributed.destroy_process_group()
        # Its cache refers to the meshes of this group; the next group has its own.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _build_parts(config: NviumTrainer.Config, parallel_dims: ParallelDims) -> tuple[int, list[Any]]:
    """Return the number of parameters of the whole model, and this rank's parts of it."""
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    num_params = sum(p.numel() for p in model.parameters())
    settings = {
        "parallel_dims": parallel_dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": config.dump_folder,
    }
    if not parallel_dims.pp_enabled:
        return num_params, [spec.parallelize_fn(model, **settings)]
    _, parts, _, _ = spec.pipelining_fn(
        model,
        **settings,
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=config.loss.build(),
    )
    return num_params, parts


def _memory_of(
    parts: Sequence[Any],
    config: NviumTrainer.Config,
    shape: ModelShape,
    layout: dict[str, int],
    pipeline_rank: int,
) -> RankMemory:
    kept = [p for part in parts for p in part.parameters()]
    size = TORCH_DTYPE_MAP[config.training.dtype].itemsize
    num_params = sum(map(_numel, kept))
    trained = size * sum(_numel(p) for p in kept if p.requires_grad)
    return RankMemory(
        pipeline_rank=pipeline_rank,
        num_params=num_params,
        parameters=size * num_params,
        gradients=trained,
        optimizer=_ADAM_MOMENTS * trained,
        gathered=_gathered_bytes(parts, config, layout),
        activations=_activation_bytes(parts, config, shape, layout, pipeline_rank),
    )


def _numel(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel()


def _gathered_bytes(
    parts: Sequence[Any], config: NviumTrainer.Config, layout: dict[str, int]
) -> int:
    size = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
    shards = layout["dp_shard"] * layout["cp"]
    policy = config.parallelism.fsdp_reshard_after_forward
    reshards = policy == "always" or (policy == "default" and layout["pp"] == 1)

    def whole(module: nn.Module) -> int:
        return shards * size * sum(map(_numel, module.parameters()))

    layers = sorted(whole(layer) for part in parts for layer in part.layers.values())
    heads = [whole(part.lm_head) for part in parts if part.lm_head is not None]
    return sum(layers[-2:] if reshards else layers) + 2 * sum(heads)


def _activation_bytes(
    parts: Sequence[Any],
    config: NviumTrainer.Config,
    shape: ModelShape,
    layout: dict[str, int],
    pipeline_rank: int,
) -> int:
    """Estimate the bytes that the backward pass of this rank keeps at its peak."""
    tp, num_exits = layout["tp"], shape.num_exits
    stream = shape.dim // tp if config.parallelism.enable_sequence_parallel else shape.dim
    # In values per token: what a layer needs and keeps, and what a junction adds.
    whole, kept = _values_of_layer(config.activation_checkpoint, shape, tp=tp, stream=stream)
    junction = 4 * stream + 2 * shape.adapter_dim + 2 * shape.router_dim
    layers = [int(name) for part in parts for name in part.layers]
    num_junctions = sum(index + 1 in shape.exit_layers for index in layers)

    num_sequences, num_alive = config.training.local_batch_size, 1
    if layout["pp"] > 1:
        num_micro = num_sequences // config.parallelism.pipeline_parallel_microbatch_size
        num_sequences //= num_micro
        # With 1F1B a stage keeps the micro-batches that later stages work on; with the other
        # schedules it may keep them all.
        is_1f1b = config.parallelism.pipeline_parallel_schedule == "1F1B"
        num_alive = min(num_micro, layout["pp"] - pipeline_rank) if is_1f1b else num_micro
    num_tokens = num_sequences * config.training.seq_len // layout["cp"]

    values = num_alive * (len(layers) * kept + num_junctions * junction)
    if kept < whole:
        values += whole
    logit_bytes = 0
    if any(part.lm_head is not None for part in parts):
        values += 2 * num_exits * shape.dim
        rows = num_exits * math.ceil(num_tokens / config.loss.num_chunks)
        logit_bytes = _BYTES_PER_LIVE_LOGIT * rows * shape.vocab_size // tp
    size = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
    return size * num_tokens * values + logit_bytes


def _values_of_layer(
    recomputation: Any, shape: ModelShape, *, tp: int, stream: int
) -> tuple[int, int]:
    """Return the values per token that a layer's backward pass needs, and those kept for it."""
    attention = 2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads) // tp
    ffn = shape.ffn_dim // tp
    whole = 2 * stream + 2 * shape.dim + attention + 4 * ffn
    if isinstance(recomputation, SelectiveAC.Config):
        # Attention and every other matmul.
        return whole, stream + shape.dim + attention + ffn
    if isinstance(recomputation, FullAC.Config):
        return whole, stream
    if isinstance(recomputation, MemoryBudgetAC.Config):
        return whole, stream + round(recomputation.memory_budget * (whole - stream))
    return whole, whole
