"""From a shape to torchtitan's config tree, with the paper's initialisation."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init

from nvium_titan.core.cost import ModelDims
from nvium_titan.train.model.junction import AdaptedNorm, Adapter, Junction, Router
from nvium_titan.train.model.model import NviumLayer, NviumModel, PortableAttention


def _linear(in_features: int, out_features: int, *, std: float, bias: bool = False) -> Any:
    init = {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}
    return Linear.Config(
        in_features=in_features, out_features=out_features, bias=bias, param_init=init
    )


def _norm(dims: ModelDims) -> Any:
    return RMSNorm.Config(
        normalized_shape=dims.dim, eps=dims.norm_eps, param_init={"weight": nn.init.ones_}
    )


def _adapter(dims: ModelDims) -> Any:
    return Adapter.Config(
        fc_in=_linear(dims.dim, dims.adapter_dim, std=dims.dim**-0.5),
        fc_out=_linear(dims.adapter_dim, dims.dim, std=0.0),
    )


def _junction(dims: ModelDims) -> Any:
    router = Router.Config(
        fc1=_linear(dims.dim, dims.router_dim, std=0.02, bias=True),
        fc2=_linear(dims.router_dim, dims.dim, std=0.02, bias=True),
        norm=_norm(dims),
        head=_linear(dims.dim, 2, std=0.4 * dims.dim**-0.5, bias=True),
    )
    return Junction.Config(norm=_norm(dims), router=router, adapter=_adapter(dims))


def _layer(dims: ModelDims, *, has_junction: bool) -> Any:
    init = {"weight": partial(nn.init.normal_, std=0.02)}
    return NviumLayer.Config(
        attention_norm=_norm(dims),
        ffn_norm=_norm(dims),
        attention=make_gqa_config(
            dim=dims.dim,
            n_heads=dims.num_heads,
            n_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=PortableAttention.Config(),
            fuse_qkv=True,
            rope=ComplexRoPE.Config(
                dim=dims.head_dim, max_seq_len=dims.max_seq_len, theta=dims.rope_theta
            ),
        ),
        feed_forward=make_ffn_config(
            dim=dims.dim, hidden_dim=dims.ffn_dim, w1_param_init=init, w2w3_param_init=init
        ),
        junction=_junction(dims) if has_junction else None,
    )


def build_model_config(dims: ModelDims) -> NviumModel.Config:
    """Return torchtitan's config tree for a shape, with the paper's initialisation.

    Linear and embedding weights N(0, 0.02); adapters start as the identity; router heads have
    std 0.4 / sqrt(fan_in), all biases 0.
    """
    plan = dims.plan
    norm = _norm(dims)
    if dims.adapter_dim:
        norm = AdaptedNorm.Config(norm=norm, adapter=_adapter(dims))
    embedding_init = skip_param_init if dims.tie_embeddings else partial(nn.init.normal_, std=0.02)
    return NviumModel.Config(
        dims=dims,
        dim=dims.dim,
        vocab_size=dims.vocab_size,
        layers=[
            _layer(dims, has_junction=index + 1 in plan.exit_layers)
            for index in range(dims.num_layers)
        ],
        norm=norm,
        tok_embeddings=Embedding.Config(
            num_embeddings=dims.vocab_size,
            embedding_dim=dims.dim,
            param_init={"weight": embedding_init},
        ),
        lm_head=_linear(dims.dim, dims.vocab_size, std=0.02),
        enable_weight_tying=dims.tie_embeddings,
    )
