"""llama.cpp through xllamacpp: its server's engine, called in process.

Timed through the callback of a streamed completion, which receives each token as it is made. KV
cache in float16 and flash attention where it chooses are its defaults. The wheels on PyPI are built
for AVX2 (`xllamacpp.get_system_info()`); on a CPU with AVX-512 or AMX, one built from source may be
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
import xllamacpp
from torch import Tensor

from nvium_titan.bench.peers.peer import Peer, token_words
from nvium_titan.bundle import Bundle
from nvium_titan.bundle.config import BundleConfig
from nvium_titan.convert.layout import to_interleaved
from nvium_titan.errors import BenchError

_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


class LlamaCppPeer(Peer):
    """One slot of the server with all the threads."""

    def __init__(
        self, bundle: Bundle, *, dtype: str, threads: int, max_seq_len: int, work_dir: Path
    ) -> None:
        """Convert and load the model, with the arguments of `load_peer`."""
        super().__init__(
            name="llama.cpp",
            dtype=dtype,
            version=f"xllamacpp {xllamacpp.__version__}",
            threads=threads,
        )
        file = work_dir / f"llama.cpp-{dtype}.gguf"
        write_gguf(file, bundle.config, bundle.load_tensors(dtype=torch.float32), dtype=dtype)
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = max_seq_len
        params.n_parallel = 1
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0  # or each request starts by saving the one before
        params.verbosity = 1  # errors
        self._server = xllamacpp.Server(params)

    def generate(
        self, prompt_ids: Sequence[int], num_new_tokens: int, on_token: Callable[[int], object]
    ) -> None:
        """Continue the prompt greedily; the end token, the last id, is never chosen.

        Raises:
            BenchError: If the server refuses the request.
        """
        refusals: list[str] = []

        def give(chunk: Mapping[str, Any]) -> None:
            if "error" in chunk:
                refusals.append(chunk["error"]["message"])
                return
            # Timed here: its own `timings.predicted_ms` covers the same span, but is divided by all
            # tokens, though the first one is the prompt's.
            word = chunk["choices"][0]["text"]
            if word:  # the last chunk has none, but the server's statistics
                on_token(int(word.removeprefix("t")))

        request = {
            "prompt": list(prompt_ids),
            "max_tokens": num_new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        self._server.handle_completions(request, give)
        if refusals:
            raise BenchError(f"peer llama.cpp: {refusals[0]}")

    def close(self) -> None:
        """Stop the server and drop the model."""
        del self._server


def write_gguf(
    path: Path, config: BundleConfig, tensors: Mapping[str, Tensor], *, dtype: str
) -> None:
    """Write a dense model as llama.cpp's converter and `llama-quantize --pure` would.

    Matrices, embedding and head included, have the type `dtype`; gains are float32.

    Args:
        path: The file.
        config: A dense model's.
        tensors: HF-named, float32.
        dtype: One of `PEER_DTYPES["llama.cpp"]`.

    Raises:
        BenchError: If the rows of a matrix are no multiple of a block of q8_0.
    """
    shape = config.shape
    kind, file_type = _TYPES[dtype]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape.max_seq_len)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn_dim)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(token_words(shape.vocab_size))
    writer.add_token_scores([0.0] * shape.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocab_size)
    writer.add_eos_token_id(shape.vocab_size - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_layers)
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            tensor = to_interleaved(tensor, num_heads=shape.num_heads)
        elif name.endswith("k_proj.weight"):
            tensor = to_interleaved(tensor, num_heads=shape.num_kv_heads)
        of = kind if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        try:
            data = gguf.quants.quantize(tensor.numpy(), of)
        except gguf.quants.QuantError as error:
            raise BenchError(f"peer llama.cpp: {name}: {error}; choose float32") from error
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
