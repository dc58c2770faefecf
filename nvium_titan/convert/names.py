"""Parameter names: native (torchtitan module tree) and Hugging Face / reference (the bundle).

The backbone carries HF LLaMA names, the junctions the names of the authors' code. Strings only:
`convert.layout` moves the tensors.
"""

from __future__ import annotations

from nvium_titan.core.shape import ModelShape

_LAYER = {
    "attention.qkv_linear.wq.weight": "self_attn.q_proj.weight",
    "attention.qkv_linear.wk.weight": "self_attn.k_proj.weight",
    "attention.qkv_linear.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}

_JUNCTION = {
    "norm.weight": "early_norms.{k}.weight",
    "adapter.fc_in.weight": "early_adapters.{k}.0.weight",
    "adapter.fc_out.weight": "early_adapters.{k}.2.weight",
    "router.fc1.weight": "router_layers.{k}.layers.0.fc1.weight",
    "router.fc1.bias": "router_layers.{k}.layers.0.fc1.bias",
    "router.fc2.weight": "router_layers.{k}.layers.0.fc2.weight",
    "router.fc2.bias": "router_layers.{k}.layers.0.fc2.bias",
    "router.norm.weight": "router_final_norms.{k}.weight",
    "router.head.weight": "router_heads.{k}.weight",
    "router.head.bias": "router_heads.{k}.bias",
}


def native_to_hf(shape: ModelShape) -> dict[str, str]:
    """Return the HF name of every native parameter of a model.

    Args:
        shape: The model's; junction k hangs on layer `exit_layers[k] - 1`, and a tied head has no
            HF name.

    Returns:
        Native name to HF name, in the order of the forward pass; no two values are alike.
    """
    names = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for layer in range(shape.num_layers):
        for native, hf in _LAYER.items():
            names[f"layers.{layer}.{native}"] = f"model.layers.{layer}.{hf}"
    for k, position in enumerate(shape.exit_layers):
        for native, hf in _JUNCTION.items():
            names[f"layers.{position - 1}.junction.{native}"] = hf.format(k=k)
    if shape.adapter_dim:
        names["norm.norm.weight"] = "model.norm.weight"
        names["norm.adapter.fc_in.weight"] = "final_adapter.0.weight"
        names["norm.adapter.fc_out.weight"] = "final_adapter.2.weight"
    else:
        names["norm.weight"] = "model.norm.weight"
    if not shape.tie_embeddings:
        names["lm_head.weight"] = "lm_head.weight"
    return names
