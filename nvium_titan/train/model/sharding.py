"""Placements of the junctions' parameters and activations under tensor parallelism.

Routers and adapters are small: their weights are replicated, and they run on the residual stream,
sequence-sharded or not.
"""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
)
from torchtitan.protocols.sharding import ShardingConfig

from nvium_titan.train.model.junction import AdaptedNorm, Adapter, Router


def set_nvium_sharding(config: Any, *, enable_sp: bool) -> None:
    """Set the placements of every junction and of the final exit.

    Args:
        config: `NviumModel.Config`; Llama's own placements are set already.
        enable_sp: Whether the residual stream is sequence-sharded (table `[parallelism]`).
    """
    # Exit states go to R: of the column-parallel head each rank has a partial gradient. Router
    # logits go to I: every rank computes the same loss of them, and with R their gradients would
    # count once per rank.
    for layer in config.layers:
        if layer.junction is not None:
            layer.junction.norm.sharding_config = norm_config(enable_sp=enable_sp)
            _shard_branch(layer.junction.router, tp_out=spmd.I, enable_sp=enable_sp)
            _shard_branch(layer.junction.adapter, tp_out=spmd.R, enable_sp=enable_sp)
    if isinstance(config.norm, AdaptedNorm.Config):
        config.norm.sharding_config = None
        config.norm.norm.sharding_config = norm_config(enable_sp=enable_sp)
        _shard_branch(config.norm.adapter, tp_out=spmd.R, enable_sp=enable_sp)


def _shard_branch(branch: Router.Config | Adapter.Config, *, tp_out: Any, enable_sp: bool) -> None:
    stream = (
        dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)
    )
    branch.sharding_config = ShardingConfig(
        in_src_shardings={"hidden_BTD": stream},
        out_src_shardings=stream,
        out_dst_shardings=dense_activation_placement(tp=tp_out),
    )
    weight = dense_param_placement(tp=spmd.R if enable_sp else spmd.I)
    if isinstance(branch, Router.Config):
        branch.norm.sharding_config = norm_config(enable_sp=enable_sp)
        linears = [branch.fc1, branch.fc2, branch.head]
    else:
        linears = [branch.fc_in, branch.fc_out]
    for linear in linears:
        linear.sharding_config = ShardingConfig(state_shardings={"weight": weight, "bias": weight})
