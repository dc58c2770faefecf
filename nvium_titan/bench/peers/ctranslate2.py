"""CTranslate2: its own converter and `Generator.generate_batch`, beam size 1.

Timed through `callback`, which it calls for each token it has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import ctranslate2
from ctranslate2.converters import TransformersConverter

from nvium_titan.bench.peers.peer import Peer, token_words, write_plain_folder
from nvium_titan.bundle import Bundle
from nvium_titan.errors import BenchError


class CTranslate2Peer(Peer):
    """One worker with all the threads."""

    def __init__(
        self, bundle: Bundle, *, dtype: str, threads: int, max_seq_len: int, work_dir: Path
    ) -> None:
        """Convert and load the model, with the arguments of `load_peer`.

        Raises:
            BenchError: If this CPU cannot compute in `dtype`.
        """
        super().__init__(
            name="CTranslate2", dtype=dtype, version=ctranslate2.__version__, threads=threads
        )
        possible = ctranslate2.get_supported_compute_types("cpu")
        if dtype not in possible:
            raise BenchError(
                f"peer ctranslate2: dtype {dtype!r}: this CPU computes in {sorted(possible)}"
            )
        source, target = work_dir / "ctranslate2-source", work_dir / f"ctranslate2-{dtype}"
        write_plain_folder(bundle, source, max_seq_len=max_seq_len)
        TransformersConverter(str(source)).convert(str(target), quantization=dtype, force=True)
        self._generator = ctranslate2.Generator(
            str(target), compute_type=dtype, inter_threads=1, intra_threads=threads
        )
        self._words = token_words(bundle.config.shape.vocab_size)

    def generate(
        self, prompt_ids: Sequence[int], num_new_tokens: int, on_token: Callable[[int], object]
    ) -> None:
        """Continue the prompt greedily, past any end token."""

        def give(step: ctranslate2.GenerationStepResult) -> bool:
            on_token(step.token_id)
            return False

        self._generator.generate_batch(
            [[self._words[token_id] for token_id in prompt_ids]],
            max_length=num_new_tokens,
            end_token=[],  # nothing ends the text
            # So the prompt runs at once, as its documentation advises.
            include_prompt_in_result=False,
            callback=give,
        )

    def close(self) -> None:
        """Drop the model and stop its threads."""
        self._generator.unload_model()
        del self._generator
