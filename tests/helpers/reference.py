"""The slow twin: a plain teacher-forced forward pass in float64, straight from the equations.

`reference_forward` shares no line with `nvium_titan.decode`: HF-named tensors in, every layer over
every position, one causal softmax, no cache. Its letters: T tokens, E exits, J = E - 1 junctions,
D width, V vocabulary, G key/value heads, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing import assert_close

from nvium_titan.bundle import BundleConfig
from nvium_titan.decode import DecodeState


@dataclass(frozen=True)
class Reference:
    """Everything a full forward pass knows."""

    boundary_ETD: list[Tensor]
    """Embeddings, then the residual stream after each block."""
    keys_LGTH: list[Tensor]
    values_LGTH: list[Tensor]
    router_logit_JT: Tensor
    logits_ETV: Tensor
    log_exit_ET: Tensor
    log_mix_TV: Tensor


def reference_forward(
    config: BundleConfig, tensors: Mapping[str, Tensor], token_ids: Sequence[int]
) -> Reference:
    """Run every layer on every token."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    num_heads, groups = config.shape.num_heads, config.shape.num_kv_heads
    head, num_tokens = config.shape.head_dim, len(token_ids)
    exits = [*config.shape.exit_layers, config.shape.num_layers]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.shape.norm_eps).sqrt() * w[name]

    position = torch.arange(num_tokens).double()
    inverse = config.shape.rope_theta ** (-torch.arange(0, head, 2).double() / head)
    angle = torch.cat([torch.outer(position, inverse)] * 2, dim=-1)

    def rope(x_THd: Tensor) -> Tensor:
        a, b = x_THd[..., : head // 2], x_THd[..., head // 2 :]
        rotated = torch.cat([-b, a], dim=-1)
        return x_THd * angle.cos()[:, None] + rotated * angle.sin()[:, None]

    x = w["model.embed_tokens.weight"][torch.tensor(token_ids)]
    boundary, keys, values = [x], [], []
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    for layer in range(config.shape.num_layers):
        p = f"model.layers.{layer}"
        n = norm(x, f"{p}.input_layernorm.weight")
        q = rope((n @ w[f"{p}.self_attn.q_proj.weight"].T).view(num_tokens, num_heads, head))
        k = rope((n @ w[f"{p}.self_attn.k_proj.weight"].T).view(num_tokens, groups, head))
        v = (n @ w[f"{p}.self_attn.v_proj.weight"].T).view(num_tokens, groups, head)
        out = []
        for h in range(num_heads):
            g = h * groups // num_heads
            score = q[:, h] @ k[:, g].T / math.sqrt(head)
            out.append(score.masked_fill(future, -math.inf).softmax(-1) @ v[:, g])
        x = x + torch.cat(out, dim=-1) @ w[f"{p}.self_attn.o_proj.weight"].T
        n = norm(x, f"{p}.post_attention_layernorm.weight")
        gate, up = n @ w[f"{p}.mlp.gate_proj.weight"].T, n @ w[f"{p}.mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{p}.mlp.down_proj.weight"].T
        keys.append(k.transpose(0, 1))
        values.append(v.transpose(0, 1))
        if layer + 1 in exits:
            boundary.append(x)

    head_VD = w["model.embed_tokens.weight" if config.shape.tie_embeddings else "lm_head.weight"]
    logits, router_logits = [], []
    for k_index, h in enumerate(boundary[1:]):
        is_final = k_index == len(exits) - 1
        n = norm(h, "model.norm.weight" if is_final else f"early_norms.{k_index}.weight")
        adapter = "final_adapter" if is_final else f"early_adapters.{k_index}"
        o = n
        if f"{adapter}.0.weight" in w:
            a = n @ w[f"{adapter}.0.weight"].T
            o = n + (a * torch.sigmoid(a)) @ w[f"{adapter}.2.weight"].T
        logits.append(o @ head_VD.T)
        if not is_final:
            layer_name = f"router_layers.{k_index}.layers.0"
            a = n @ w[f"{layer_name}.fc1.weight"].T + w[f"{layer_name}.fc1.bias"]
            a = 0.5 * a * (1 + torch.erf(a / math.sqrt(2)))
            y = a @ w[f"{layer_name}.fc2.weight"].T + w[f"{layer_name}.fc2.bias"]
            y = norm(y, f"router_final_norms.{k_index}.weight")
            r = y @ w[f"router_heads.{k_index}.weight"].T + w[f"router_heads.{k_index}.bias"]
            router_logits.append(r[:, 1] - r[:, 0])

    z = torch.stack(router_logits) if router_logits else torch.empty(0, num_tokens).double()
    arrive, log_exit = torch.zeros(num_tokens).double(), []
    for z_T in z:
        log_exit.append(arrive + torch.sigmoid(z_T).log())
        arrive = arrive + torch.sigmoid(-z_T).log()
    log_exit.append(arrive)
    log_exit_ET, logits_ETV = torch.stack(log_exit), torch.stack(logits)
    mix = (log_exit_ET.exp()[..., None] * logits_ETV.softmax(-1)).sum(0)
    return Reference(boundary, keys, values, z, logits_ETV, log_exit_ET, mix.log())


def assert_cache_equals(
    config: BundleConfig, tensors: Mapping[str, Tensor], state: DecodeState, *, tolerance: float
) -> Reference:
    """Compare every stored position of every layer with a full forward pass of the sequence."""
    twin = reference_forward(config, tensors, state.token_ids)
    blocks = config.shape.blocks
    near = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    for block, filled, boundary in zip(
        blocks, state.filled, range(1, len(blocks) + 1), strict=True
    ):
        assert_close(
            state.buffers.boundary_SD[boundary][:filled],
            twin.boundary_ETD[boundary][:filled],
            **near,
        )
        for layer in block:
            keys = state.buffers.keys(layer, length=filled)
            assert_close(keys, twin.keys_LGTH[layer][:, :filled], **near)
            values = state.buffers.values(layer, length=filled)
            assert_close(values, twin.values_LGTH[layer][:, :filled], **near)
    return twin
