"""transformers: `LlamaForCausalLM.generate` as a user would call it, eager.

Timed through the streamer, to which `generate` hands each token it has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from nvium_titan.bench.peers.peer import Peer
from nvium_titan.bundle import Bundle
from nvium_titan.bundle.config import DTYPES


class TransformersPeer(Peer):
    """`generate` with its default cache and attention."""

    def __init__(
        self, bundle: Bundle, *, dtype: str, threads: int, max_seq_len: int, work_dir: Path
    ) -> None:
        """Load the bundle, with the arguments of `load_peer`."""
        del max_seq_len, work_dir  # its cache grows, and it reads the bundle where it lies
        super().__init__(
            name="transformers",
            dtype=dtype,
            version=f"{transformers.__version__} (torch {torch.__version__})",
            threads=threads,
        )
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            bundle.path, dtype=DTYPES[dtype], local_files_only=True
        ).eval()
        # On the model, where `generate` looks for what it is not given, such as an end token.
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def generate(
        self, prompt_ids: Sequence[int], num_new_tokens: int, on_token: Callable[[int], object]
    ) -> None:
        """Continue the prompt greedily, past any end token."""
        threads_before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        ids_BT = torch.tensor([list(prompt_ids)])
        try:
            self._model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                do_sample=False,
                max_new_tokens=num_new_tokens,
                streamer=_Streamer(on_token),
            )
        finally:
            torch.set_num_threads(threads_before)

    def close(self) -> None:
        """Drop the model."""
        del self._model


class _Streamer:
    """What `generate` expects of a streamer."""

    def __init__(self, on_token: Callable[[int], object]) -> None:
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Pass on a token; the first value is the prompt."""
        if not self._is_prompt:
            self._on_token(int(value))
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: every token has been passed on."""
