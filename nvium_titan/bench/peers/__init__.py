"""Peers: other people's engines, with the same dense LLaMA in them.

Each runs with its own defaults, greedily, on one sequence; only the threads, the longest sequence
and the dtype are set. A peer hands over each token as it makes it, and `Peer.run` notes the time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from nvium_titan.bench.peers.peer import Peer
from nvium_titan.bundle import read_bundle
from nvium_titan.errors import BenchError, nearest

__all__ = ["PEER_DTYPES", "Peer", "PeerChoice", "load_peer", "parse_peer"]

PEER_DTYPES: Mapping[str, tuple[str, ...]] = {
    "hf": ("float32", "bfloat16"),
    "ctranslate2": ("float32", "bfloat16", "int8"),
    "llama.cpp": ("float32", "bfloat16", "float16", "q8_0"),
    "onnxruntime-genai": ("float32", "int8", "int4"),
}
"""The types of weights that each peer can be measured with."""

_THEIR_NAMES = {"int8": ("int8", "q8_0")}
"""What peers call a type of ours, where names differ."""

_CLASSES = {
    "hf": ("hf", "TransformersPeer"),
    "ctranslate2": ("ctranslate2", "CTranslate2Peer"),
    "llama.cpp": ("llama_cpp", "LlamaCppPeer"),
    "onnxruntime-genai": ("onnxruntime_genai", "OnnxRuntimePeer"),
}


class PeerChoice(NamedTuple):
    """A peer to run, and in which type."""

    name: str
    """A key of `PEER_DTYPES`."""
    dtype: str | None
    """One of its types; None follows N-vium's."""

    def dtype_beside(self, dtype: str) -> str | None:
        """Return the type to run it in beside N-vium in `dtype`; None leaves it out."""
        wanted = (self.dtype,) if self.dtype else _THEIR_NAMES.get(dtype, (dtype,))
        return next((name for name in wanted if name in PEER_DTYPES[self.name]), None)


def parse_peer(text: str) -> PeerChoice:
    """Return the peer that NAME or NAME:DTYPE means.

    Raises:
        BenchError: If there is no such peer, or it has no such type.
    """
    name, _, dtype = text.partition(":")
    if name not in PEER_DTYPES:
        raise BenchError(f"--peer {text}: {name!r} is unknown{nearest(name, PEER_DTYPES)}")
    if dtype and dtype not in PEER_DTYPES[name]:
        raise BenchError(f"--peer {text}: {dtype!r} is unknown{nearest(dtype, PEER_DTYPES[name])}")
    return PeerChoice(name, dtype or None)


def load_peer(
    name: str, bundle: Path, *, dtype: str, threads: int, max_seq_len: int, work_dir: Path
) -> Peer:
    """Return a peer with our dense model in it, converted to its format.

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
