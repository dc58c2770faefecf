"""Run onnxruntime-genai's model builder: python -m nvium_titan.bench.peers.onnx_build IN OUT fp32.

In a process of its own, since the builder prints, sets up logging and extends `sys.path` on import.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers

# onnxruntime-genai 0.18 imports these from transformers 5, for architectures other than LLaMA.
_NEW_NAMES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


def build(source: str, target: str, precision: str) -> None:
    """Write the ONNX model of a Hugging Face folder for the CPU, with the builder's defaults.

    Args:
        source: A folder from `write_plain_folder`.
        target: The folder to write.
        precision: "fp32", or "int8" or "int4" weights in blocks of 32.
    """
    for name in _NEW_NAMES:
        if not hasattr(transformers, name):
            setattr(transformers, name, None)
    from onnxruntime_genai.models import builder

    cache = str(Path(target) / "cache")
    options = builder.parse_extra_options("", source, target, precision, "cpu", cache, [])
    # The builder expects transformers 5, where plain RoPE has a name.
    options["hf_details"]["hf_config"].rope_scaling = {"rope_type": "default"}
    builder.create_model("", source, target, precision, "cpu", cache, **options)


if __name__ == "__main__":
    build(*sys.argv[1:])
