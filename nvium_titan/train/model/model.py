"""`NviumLayer` and `NviumModel`: Llama layers with junctions.

A junction is part of the last layer of its block, so FSDP units, activation checkpointing,
compilation per layer and the pipeline split are torchtitan's. The model ends with the exit states:
the loss applies the head, to one chunk of tokens at a time.

Shapes: E exits, J = E - 1 junctions, B sequences, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

from nvium_titan.core.cost import forward_flops
from nvium_titan.core.shape import ModelShape
from nvium_titan.train.model.junction import Junction
from nvium_titan.train.model.sharding import set_nvium_sharding


class PortableAttention(FlexAttention):
    """FlexAttention on accelerators, SDPA with a dense mask on the CPU."""

    # FlexAttention has no backward pass on the CPU.

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """FlexAttention's settings, which the CPU ignores."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Return attention outputs, (B, L, N, H): L positions, N heads, H head width."""
        if q_BLNH.device.type != "cpu":
            return super().forward(
                q_BLNH,
                k_BLNH,
                v_BLNH,
                attention_masks=attention_masks,
                scale=scale,
                enable_gqa=enable_gqa,
                **kwargs,
            )
        out_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


class NviumLayer(Llama3TransformerBlock):
    """A Llama layer, with a junction if it is the last of an early block."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):
        """A Llama layer's settings, and the junction's."""

        junction: Junction.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.junction = config.junction.build() if config.junction is not None else None

    def forward(
        self, x: Tensor, attention_masks: Any, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the residual stream (B, T, D), with a junction also o (B, T, D) and z (B, T)."""
        hidden_BTD = super().forward(x, attention_masks, positions)
        if self.junction is None:
            return hidden_BTD
        return (hidden_BTD, *self.junction(hidden_BTD))


class NviumModel(Llama3Model):
    """The mixture-of-exits transformer; with one exit and no adapter, the dense Llama.

    N-vium (arXiv:2605.13190), Sec. 4.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """The model's config tree, as `train.model.build` makes it."""

        shape: ModelShape
        """The shape that it was built from."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Set the RoPE length and the parameter placements of a run."""
            Llama3Model.Config.update_from_config(self, config=config, **kwargs)
            set_nvium_sharding(self, enable_sp=config.parallelism.enable_sequence_parallel)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the number of parameters and the training FLOPs per token (3 x forward)."""
            flops = sum(forward_flops(self.shape, seq_len=seq_len).values())
            return sum(p.numel() for p in model.parameters()), 3 * flops

    def get_attention_masks(self, positions: Tensor) -> Any:
        """Return the attention mask of packed documents: causal, and within each document.

        Args:
            positions: Position of each token in its document, (B, T); each starts at 0.

        Returns:
            A BlockMask on accelerators; on the CPU a boolean tensor (B, 1, T, T), True to attend.
        """
        if positions.device.type != "cpu":
            return super().get_attention_masks(positions)
        num_tokens = positions.shape[1]
        document_BT = (positions == 0).cumsum(dim=1)
        causal_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
        return (same_BTT & causal_TT)[:, None]

    def forward(
        self,
        tokens: Tensor,
        exit_states_EBTD: Tensor | None = None,
        router_logits_JBT: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        attention_masks: Any = None,
    ) -> Any:
        """Return the exit states o (E, B, T, D) and the router logits z (J, B, T), float32.

        In a pipeline a stage is called with what the one before it returned; each but the last
        returns (hidden, o so far, z so far), or hidden alone before the first exit.

        Args:
            tokens: Token ids (B, T), or the residual stream (B, T, D) on a later stage.
            exit_states_EBTD: o of earlier stages.
            router_logits_JBT: z of earlier stages.
            positions: Position in the document, (B, T), on every stage.
            attention_masks: From `get_attention_masks`, on every stage.
        """
        for given in (tokens, exit_states_EBTD, router_logits_JBT):
            if given is not None and given.requires_grad:  # from another stage
                # Ranks exchange contiguous tensors only; torch leaves the method untyped.
                given.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        hidden_BTD = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        exit_states = [] if exit_states_EBTD is None else list(exit_states_EBTD.unbind())
        router_logits = [] if router_logits_JBT is None else list(router_logits_JBT.unbind())
        for layer in self.layers.values():
            out = layer(hidden_BTD, attention_masks, positions)
            if isinstance(out, tuple):
                hidden_BTD, exit_state_BTD, router_logit_BT = out
                exit_states.append(exit_state_BTD)
                router_logits.append(router_logit_BT)
            else:
                hidden_BTD = out
        if self.norm is None:
            # As above: sequence parallelism makes others.
            hidden_BTD = hidden_BTD.contiguous()
            if not exit_states:
                return hidden_BTD
            return hidden_BTD, torch.stack(exit_states), torch.stack(router_logits)
        exit_states.append(self.norm(hidden_BTD))
        if router_logits:
            z_JBT = torch.stack(router_logits)
        else:
            z_JBT = hidden_BTD.new_zeros((0, *hidden_BTD.shape[:2]), dtype=torch.float32)
        return torch.stack(exit_states), z_JBT
