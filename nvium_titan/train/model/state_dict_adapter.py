"""torchtitan's state-dict adapter, over `convert.layout`."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from nvium_titan.convert.layout import to_bundle, to_native
from nvium_titan.train.model.model import NviumModel


class NviumStateDictAdapter(StateDictAdapter):
    """Converts native state dicts to the names and layout of a bundle, and back."""

    def __init__(self, model_config: NviumModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self._shape = model_config.shape

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters under Hugging Face's names, q and k in rotate-half layout."""
        return to_bundle(state_dict, self._shape)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters under native names, q and k in interleaved layout."""
        native = to_native(hf_state_dict, self._shape)
        if self._shape.tie_embeddings and "tok_embeddings.weight" in native:
            native["lm_head.weight"] = native["tok_embeddings.weight"]
        return native
