"""onnxruntime-genai: its own model builder and `Generator`, on the CPU execution provider.

Timed around `append_tokens`, which runs the prompt, and each `generate_next_token`. Only the number
of threads is set; they spin for a moment after each run (`session.intra_op.allow_spinning`). int8
and int4 weights come in blocks of 32, with int8 activations (the builder's `accuracy_level` 4).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import onnxruntime_genai

from nvium_titan.bench.peers.peer import Peer, write_plain_folder
from nvium_titan.bundle import Bundle
from nvium_titan.errors import BenchError

_PRECISIONS = {"float32": "fp32", "int8": "int8", "int4": "int4"}


class OnnxRuntimePeer(Peer):
    """One session with all the threads."""

    def __init__(
        self, bundle: Bundle, *, dtype: str, threads: int, max_seq_len: int, work_dir: Path
    ) -> None:
        """Build and load the model, with the arguments of `load_peer`.

        Raises:
            BenchError: If the model builder fails, such as when one of its packages is missing.
        """
        super().__init__(
            name="onnxruntime-genai",
            dtype=dtype,
            version=f"{onnxruntime_genai.__version__} (onnxruntime {onnxruntime.__version__})",
            threads=threads,
        )
        source, target = work_dir / "onnx-source", work_dir / f"onnx-{dtype}"
        write_plain_folder(bundle, source, max_seq_len=max_seq_len)
        target.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "nvium_titan.bench.peers.onnx_build"]
        done = subprocess.run(
            [*command, str(source), str(target), _PRECISIONS[dtype]],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BenchError(f"peer onnxruntime-genai: its model builder failed: {reason}")
        config = onnxruntime_genai.Config(str(target))
        settings = {
            "eos_token_id": bundle.config.shape.vocab_size - 1,
            "decoder": {"session_options": {"intra_op_num_threads": threads}},
        }
        config.overlay(json.dumps({"model": settings}))
        self._model = onnxruntime_genai.Model(config)

    def generate(
        self, prompt_ids: Sequence[int], num_new_tokens: int, on_token: Callable[[int], object]
    ) -> None:
        """Continue the prompt greedily; the end token, the last id, is never chosen."""
        length = len(prompt_ids) + num_new_tokens
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, max_length=length, min_length=length)
        generator = onnxruntime_genai.Generator(self._model, params)
        generator.append_tokens(np.array([prompt_ids], dtype=np.int32))
        for _ in range(num_new_tokens):
            generator.generate_next_token()
            on_token(int(generator.get_next_tokens()[0]))

    def close(self) -> None:
        """Drop the model."""
        del self._model
