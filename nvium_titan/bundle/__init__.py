"""The bundle: the one directory format between training, decoding and export.

    config.json               HF style; "nvium", plain "llama" for a dense model, "nvium_int8"
    model.safetensors         or shards with model.safetensors.index.json
    generation_config.json    bos and eos for other loaders
    tokenizer files           as written by `Tokenizer.save`
    nvium.json                format version, tokenizer size, provenance of the run
    modeling_nvium.py         "nvium" only: the model for transformers, with trust_remote_code

Tensor names are HF LLaMA names (rotate-half RoPE layout) and, for the junctions, the names of the
N-vium authors' checkpoints. A quantised bundle holds each matrix X as int8 and X_scale, float32:
`quantization` says which and how. Writing and reading convert, so that nobody else sees integers.
The package owns the term bundle.
"""

from nvium_titan.bundle.config import BundleConfig, expected_tensors
from nvium_titan.bundle.directory import Bundle, read_bundle, write_bundle

__all__ = ["Bundle", "BundleConfig", "expected_tensors", "read_bundle", "write_bundle"]
