"""N-vium, the mixture-of-exits transformer, for Hugging Face transformers.

An exported N-vium carries this file as `modeling_nvium.py`, so that

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

opens it with torch and transformers alone. `logits` are log pi_mix, the log-probabilities of the
mixture of exits (N-vium, arXiv:2605.13190, Sec. 4); `generate` samples from them at full depth. The
decoder that leaves early is in the package nvium_titan, which reads the same folder.

Shapes: E exits, J = E - 1 junctions, B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class NviumConfig(LlamaConfig):
    """LLaMA's configuration, and where the exits are."""

    model_type = "nvium"

    def __init__(
        self,
        exit_layers: Sequence[int] = (),
        router_dim: int = 0,
        adapter_dim: int = 0,
        final_adapter: bool = False,
        **kwargs: Any,
    ) -> None:
        """Set the dimensions.

        Args:
            exit_layers: Layers run before each early exit.
            router_dim: Width of the routers' bottleneck.
            adapter_dim: Width of the adapters.
            final_adapter: Whether the final exit has an adapter.
            **kwargs: Everything of `LlamaConfig`.
        """
        self.exit_layers = list(exit_layers)
        self.router_dim = router_dim
        self.adapter_dim = adapter_dim
        self.final_adapter = final_adapter
        super().__init__(**kwargs)


@dataclass
class NviumCausalLMOutput(CausalLMOutputWithPast):
    """What a causal language model returns; with `output_exits=True` also each exit's part.

    `logits` (B, T, V) are log pi_mix = logsumexp_k(exit_log_probs + log_softmax(exit_logits)).
    """

    exit_logits: Tensor | None = None
    """Logits of every exit, (B, T, E, V), the final exit last."""
    router_logits: Tensor | None = None
    """Exit minus continue of every router, (B, T, J): w_k = sigmoid."""
    exit_log_probs: Tensor | None = None
    """log p_k, the probability of leaving at each exit, (B, T, E), nats; p sums to 1."""


class _RouterMLP(nn.Module):
    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.router_dim)
        self.fc2 = nn.Linear(config.router_dim, config.hidden_size)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden_BTD)))


class _RouterLayers(nn.Module):
    """The authors' checkpoints call the MLP `layers.0`."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_RouterMLP(config)])

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.layers[0](hidden_BTD)


def _adapter(config: NviumConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.hidden_size, config.adapter_dim, bias=False),
        nn.SiLU(),
        nn.Linear(config.adapter_dim, config.hidden_size, bias=False),
    )


def _norms(config: NviumConfig) -> nn.ModuleList:
    return nn.ModuleList(
        [LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in config.exit_layers]
    )


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _log_exit_probs(router_logits_BTJ: Tensor) -> Tensor:
    """Return log p_k (B, T, E): p_k = w_k prod_{j<k} (1 - w_j), w_E = 1."""
    log_leave = F.logsigmoid(router_logits_BTJ)
    log_continue = F.logsigmoid(-router_logits_BTJ).cumsum(dim=-1)
    return F.pad(log_leave, (0, 1)) + F.pad(log_continue, (1, 0))


class NviumForCausalLM(LlamaForCausalLM):
    """A LLaMA with early exits whose prediction is the mixture over all of them."""

    config_class = NviumConfig

    def __init__(self, config: NviumConfig) -> None:
        """Build the layers and the junctions."""
        super().__init__(config)
        exits = config.exit_layers
        self.early_norms = _norms(config)
        self.early_adapters = nn.ModuleList([_adapter(config) for _ in exits])
        self.final_adapter = _adapter(config) if config.final_adapter else None
        self.router_layers = nn.ModuleList([_RouterLayers(config) for _ in exits])
        self.router_final_norms = _norms(config)
        self.router_heads = nn.ModuleList([nn.Linear(config.hidden_size, 2) for _ in exits])
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        output_exits: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> NviumCausalLMOutput | tuple[Any, ...]:
        """Run every layer and every exit.

        Args:
            input_ids: Token ids (B, T); or give `inputs_embeds`.
            attention_mask: As of `LlamaModel`, like the next three.
            position_ids: Position of each token.
            past_key_values: The cache of earlier tokens.
            inputs_embeds: Embeddings (B, T, D) instead of ids.
            labels: Token ids (B, T), -100 does not count; gives `loss`, the mixture loss in nats.
            use_cache: Whether to return a cache.
            cache_position: Slots of the tokens in the cache.
            logits_to_keep: Last positions to return logits of, or their indices; 0: all.
            output_exits: Also return `exit_logits`, `router_logits` and `exit_log_probs`.
            output_hidden_states: Also return the residual stream before each layer and, last, the
                normalised one after all.
            return_dict: False: a tuple instead of the named result.
            **kwargs: Passed on to `LlamaModel` and the loss.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache_position=cache_position,
            output_hidden_states=True,
            return_dict=True,
            **kwargs,
        )
        kept: Any = logits_to_keep
        if isinstance(kept, int):
            kept = slice(-kept, None)  # -0 keeps all
        exit_states, router_logits = [], []
        for k, position in enumerate(self.config.exit_layers):
            # Entry l is the residual stream after l layers.
            normed_BTD = self.early_norms[k](outputs.hidden_states[position][:, kept])
            routed_BTD = self.router_final_norms[k](self.router_layers[k](normed_BTD))
            rows_BT2 = _at_least_float32(self.router_heads[k](routed_BTD))
            router_logits.append(rows_BT2[..., 1] - rows_BT2[..., 0])
            exit_states.append(normed_BTD + self.early_adapters[k](normed_BTD))
        last_BTD = outputs.last_hidden_state[:, kept]
        if self.final_adapter is not None:
            last_BTD = last_BTD + self.final_adapter(last_BTD)
        exit_states.append(last_BTD)

        exit_logits_BTEV = _at_least_float32(self.lm_head(torch.stack(exit_states, dim=2)))
        if router_logits:
            router_logits_BTJ = torch.stack(router_logits, dim=-1)
        else:
            router_logits_BTJ = exit_logits_BTEV.new_zeros((*last_BTD.shape[:2], 0))
        log_exit_BTE = _log_exit_probs(router_logits_BTJ)
        log_pi_BTEV = exit_logits_BTEV.log_softmax(dim=-1)
        log_mix_BTV = (log_exit_BTE[..., None] + log_pi_BTEV).logsumexp(dim=2)
        loss = None
        if labels is not None:
            # Cross-entropy of log-probabilities is the mixture loss itself.
            loss = self.loss_function(
                logits=log_mix_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        result = NviumCausalLMOutput(
            loss=loss,
            logits=log_mix_BTV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states if output_hidden_states else None,
            attentions=outputs.attentions,
            exit_logits=exit_logits_BTEV if output_exits else None,
            router_logits=router_logits_BTJ if output_exits else None,
            exit_log_probs=log_exit_BTE if output_exits else None,
        )
        return result.to_tuple() if return_dict is False else result
