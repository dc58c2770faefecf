"""torchtitan's state-dict adapter: a shell over `convert.names` and `convert.rope`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from nvium_titan.convert.names import native_to_hf
from nvium_titan.convert.rope import to_interleaved, to_rotate_half
from nvium_titan.flops import ModelDims
from nvium_titan.model.model import NviumModel


class NviumStateDictAdapter(StateDictAdapter):
    """Native state dicts to the bundle's names and layout, and back."""

    def __init__(self, model_config: NviumModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self._dims: ModelDims = model_config.dims
        self._to_hf = native_to_hf(
            self._dims.plan,
            final_adapter=self._dims.adapter_dim > 0,
            tie_embeddings=self._dims.tie_embeddings,
        )
        self._from_hf = {hf: native for native, hf in self._to_hf.items()}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors under HF names, q and k in rotate-half layout.

        Args:
            state_dict: Native names; keys that are not model parameters are passed over.
        """
        out = {}
        for native, tensor in state_dict.items():
            if native in self._to_hf:
                hf = self._to_hf[native]
                out[hf] = self._permuted(hf, tensor, to_rotate_half)
        return out

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors under native names, q and k in interleaved layout.

        Args:
            hf_state_dict: HF names; others are passed over.
        """
        out = {}
        for hf, tensor in hf_state_dict.items():
            if hf in self._from_hf:
                out[self._from_hf[hf]] = self._permuted(hf, tensor, to_interleaved)
        if self._dims.tie_embeddings and "tok_embeddings.weight" in out:
            out["lm_head.weight"] = out["tok_embeddings.weight"]
        return out

    def _permuted(self, hf_name: str, tensor: Tensor, permute: Any) -> Tensor:
        if hf_name.endswith("q_proj.weight"):
            return permute(tensor, num_heads=self._dims.num_heads)
        if hf_name.endswith("k_proj.weight"):
            return permute(tensor, num_heads=self._dims.num_kv_heads)
        return tensor
