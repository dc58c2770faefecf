"""The same dense LLaMA in other people's decoders: what a user of this machine could run instead.

Each engine is measured with its own defaults, greedy, one sequence; only the threads, the longest
sequence and the dtype are set. Wall clock by us around their calls: a peer hands every token over
as it makes it, and `Peer.run` notes the time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from nvium_titan.bench.peers.peer import Peer
from nvium_titan.bundle import read_bundle
from nvium_titan.errors import BenchError, nearest

__all__ = ["PEER_DTYPES", "Peer", "load_peer"]

PEER_DTYPES: Mapping[str, tuple[str, ...]] = {
    "hf": ("float32", "bfloat16"),
    "ctranslate2": ("float32", "bfloat16", "int8"),
    "llama.cpp": ("float32", "bfloat16", "float16", "q8_0"),
    "onnxruntime-genai": ("float32", "int8", "int4"),
}
"""The types of weights that each peer can be measured with."""

_CLASSES = {
    "hf": ("hf", "TransformersPeer"),
    "ctranslate2": ("ctranslate2", "CTranslate2Peer"),
    "llama.cpp": ("llama_cpp", "LlamaCppPeer"),
    "onnxruntime-genai": ("onnxruntime_genai", "OnnxRuntimePeer"),
}


def load_peer(
    name: str, bundle: Path, *, dtype: str, threads: int, max_seq_len: int, work_dir: Path
) -> Peer:
    """Return somebody else's engine with our dense model in it, converted to its format.

    Args:
        name: A key of `PEER_DTYPES`.
        bundle: A dense bundle; only its weights and dimensions matter.
        dtype: Type of the weights there, of `PEER_DTYPES[name]`.
        threads: CPU threads it computes with, at least 1.
        max_seq_len: Longest sequence, prompt and new tokens.
        work_dir: An existing folder for the converted model; must outlive the peer.

    Raises:
        BenchError: If there is no such peer, its package is missing, it cannot compute in `dtype`
            (on this CPU), or the bundle has early exits.
        BundleError: If the bundle is incomplete or malformed.
    """
    if name not in PEER_DTYPES:
        raise BenchError(f"peer {name!r}{nearest(name, PEER_DTYPES)}")
    if dtype not in PEER_DTYPES[name]:
        raise BenchError(f"peer {name}: dtype {dtype!r}{nearest(dtype, PEER_DTYPES[name])}")
    checked = read_bundle(bundle)
    if not checked.config.is_plain_llama:
        raise BenchError(
            f"{bundle}: exit_layers={list(checked.config.shape.exit_layers)}, "
            f"final_adapter={checked.config.final_adapter}: other engines run dense models only"
        )
    module_name, class_name = _CLASSES[name]
    try:
        module = importlib.import_module(f"nvium_titan.bench.peers.{module_name}")
    except ImportError as error:
        raise BenchError(
            f"peer {name}: {error}; install it with: pip install 'nvium-titan[peers]'"
        ) from error
    peer: Peer = getattr(module, class_name)(
        checked, dtype=dtype, threads=threads, max_seq_len=max_seq_len, work_dir=work_dir
    )
    return peer
