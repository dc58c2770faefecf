"""Tiny models made by transformers, saved as anyone would save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nvium_titan.text.tokenizer import ByteTokenizer


def save_tiny_llama(folder: Path, *, max_shard_size: str = "5GB", **changes: Any) -> Any:
    """Save a random LLaMA of 4 layers and width 32 with a byte tokenizer; return the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 272, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "initializer_range": 0.2, "rms_norm_eps": 1e-5, "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    ByteTokenizer().save(folder)
    return model
