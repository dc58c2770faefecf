"""From a shape to torchtitan's config tree, with the paper's initialisation."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init

from nvium_titan.core.shape import ModelShape
from nvium_titan.train.model.junction import AdaptedNorm, Adapter, Junction, Router
from nvium_titan.train.model.model import NviumLayer, NviumModel, PortableAttention


def _linear(in_features: int, out_features: int, *, std: float, bias: bool = False) -> Any:
    init = {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}
    return Linear.Config(
        in_features=in_features, out_features=out_features, bias=bias, param_init=init
    )


def _norm(shape: ModelShape) -> Any:
    return RMSNorm.Config(
        normalized_shape=shape.dim, eps=shape.norm_eps, param_init={"weight": nn.init.ones_}
    )


def _adapter(shape: ModelShape) -> Any:
    return Adapter.Config(
        fc_in=_linear(shape.dim, shape.adapter_dim, std=shape.dim**-0.5),
        fc_out=_linear(shape.adapter_dim, shape.dim, std=0.0),
    )


def _junction(shape: ModelShape) -> Any:
    router = Router.Config(
        fc1=_linear(shape.dim, shape.router_dim, std=0.02, bias=True),
        fc2=_linear(shape.router_dim, shape.dim, std=0.02, bias=True),
        norm=_norm(shape),
        head=_linear(shape.dim, 2, std=0.4 * shape.dim**-0.5, bias=True),
    )
    return Junction.Config(norm=_norm(shape), router=router, adapter=_adapter(shape))


def _layer(shape: ModelShape, *, has_junction: bool) -> Any:
    init = {"weight": partial(nn.init.normal_, std=0.02)}
    return NviumLayer.Config(
        attention_norm=_norm(shape),
        ffn_norm=_norm(shape),
        attention=make_gqa_config(
            dim=shape.dim,
            n_heads=shape.num_heads,
            n_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=PortableAttention.Config(),
            fuse_qkv=True,
            rope=ComplexRoPE.Config(
                dim=shape.head_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta
            ),
        ),
        feed_forward=make_ffn_config(
            dim=shape.dim, hidden_dim=shape.ffn_dim, w1_param_init=init, w2w3_param_init=init
        ),
        junction=_junction(shape) if has_junction else None,
    )


def build_model_config(shape: ModelShape) -> NviumModel.Config:
    """Return torchtitan's config tree of a shape, with the paper's initialisation.

    Weights of linear layers and the embedding are N(0, 0.02), biases 0; adapters start as the
    identity; router heads have std 0.4 / sqrt(fan_in).
    """
    norm = _norm(shape)
    if shape.adapter_dim:
        norm = AdaptedNorm.Config(norm=norm, adapter=_adapter(shape))
    embedding_init = skip_param_init if shape.tie_embeddings else partial(nn.init.normal_, std=0.02)
    return NviumModel.Config(
        shape=shape,
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        layers=[
            _layer(shape, has_junction=index + 1 in shape.exit_layers)
            for index in range(shape.num_layers)
        ],
        norm=norm,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.dim,
            param_init={"weight": embedding_init},
        ),
        lm_head=_linear(shape.dim, shape.vocab_size, std=0.02),
        enable_weight_tying=shape.tie_embeddings,
    )
