"""Other engines run our dense model: greedy, the same tokens, exactly as many as asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from nvium_titan.bench.peers import PEER_DTYPES, Peer, load_peer
from nvium_titan.bundle import BundleConfig, write_bundle
from nvium_titan.core.shape import ModelShape
from nvium_titan.decode import Engine, SamplingParams
from nvium_titan.decode.params import random_tensors
from nvium_titan.errors import BenchError
from nvium_titan.text.tokenizer import ByteTokenizer

PACKAGES = {
    "hf": ["transformers"],
    "ctranslate2": ["ctranslate2", "transformers"],
    "llama.cpp": ["xllamacpp", "gguf"],
    "onnxruntime-genai": ["onnxruntime_genai", "onnx_ir", "transformers"],
}
END_ID = 1
NUM_IDS = 258
PROMPT = [121, 70, 38, 167]  # at every step the two best logits lie 0.05 apart or more
NUM_NEW = 24
NUM_SAME = {"float32": NUM_NEW, "int4": 2}
"""Tokens that must be ours, else 4: rounded weights lead elsewhere once two tokens are close."""


def write_small_bundle(path: Path, *, exit_layers: tuple[int, ...] = ()) -> None:
    config = BundleConfig(
        shape=ModelShape(
            vocab_size=NUM_IDS,
            dim=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            ffn_dim=128,
            rope_theta=5000.0,
            norm_eps=1e-5,
            max_seq_len=128,
            tie_embeddings=False,
            exit_layers=exit_layers,
            router_dim=48 if exit_layers else 0,
            adapter_dim=64 if exit_layers else 0,
        ),
        final_adapter=False,
        bos_token_id=0,
        eos_token_id=END_ID,
        dtype="float32",
    )
    tensors = random_tensors(config, seed=0)
    write_bundle(path, config=config, tensors=tensors, tokenizer=ByteTokenizer(), provenance={})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "dense"
    write_small_bundle(path)
    return path


@pytest.fixture(scope="module")
def greedy_ids(bundle: Path) -> list[int]:
    generation = Engine.from_bundle(bundle).generate(
        PROMPT, max_new_tokens=NUM_NEW, sampling=SamplingParams(temperature=0)
    )
    return [token.token_id for token in generation]


def every_peer_and_dtype() -> list[ParameterSet]:
    cases = []
    for name, dtypes in PEER_DTYPES.items():
        for dtype in dtypes:
            # Its model builder takes a while to start; once is enough on every run.
            is_slow = name == "onnxruntime-genai" and dtype != "float32"
            cases.append(pytest.param(name, dtype, marks=[pytest.mark.slow] if is_slow else []))
    return cases


@pytest.mark.parametrize(("name", "dtype"), every_peer_and_dtype())
def test_peer_continues_with_our_greedy_tokens(
    name: str, dtype: str, bundle: Path, greedy_ids: list[int], tmp_path: Path
) -> None:
    for package in PACKAGES[name]:
        pytest.importorskip(package)
    if name == "ctranslate2":
        possible = pytest.importorskip("ctranslate2").get_supported_compute_types("cpu")
        if dtype not in possible:
            pytest.skip(f"CTranslate2 computes in {sorted(possible)} on this CPU")
    assert END_ID in greedy_ids, "or nothing shows that the end token ends nothing"
    assert NUM_IDS - 1 not in greedy_ids, "some engines never choose it"
    peer = load_peer(name, bundle, dtype=dtype, threads=1, max_seq_len=128, work_dir=tmp_path)
    got: list[int] = []
    peer.generate(PROMPT, NUM_NEW, got.append)
    timing = peer.run(PROMPT, 3)
    peer.close()
    same = NUM_SAME.get(dtype, 4)
    assert got[:same] == greedy_ids[:same]
    assert len(got) == NUM_NEW
    assert (timing.num_new_tokens, peer.dtype, peer.threads) == (3, dtype, 1)
    assert timing.ttft_s > 0
    assert timing.decode_s > 0


class HalfHearted(Peer):
    def generate(
        self, prompt_ids: Sequence[int], num_new_tokens: int, on_token: Callable[[int], object]
    ) -> None:
        for token_id in range(num_new_tokens // 2):
            on_token(token_id)

    def close(self) -> None:
        pass


def test_a_peer_that_stops_early_is_not_timed() -> None:
    peer = HalfHearted(name="half", dtype="float32", version="1", threads=1)
    with pytest.raises(BenchError, match="half: made 4 tokens, asked for 8"):
        peer.run([0], 8)


def test_llama_cpp_says_why_it_refuses_a_prompt(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    peer = load_peer(
        "llama.cpp", bundle, dtype="float32", threads=1, max_seq_len=128, work_dir=tmp_path
    )
    with pytest.raises(BenchError, match=r"300 tokens.*128"):
        peer.run([5] * 300, 2)
    peer.close()


def load_anything(name: str, path: Path, *, dtype: str = "float32") -> Peer:
    return load_peer(name, path, dtype=dtype, threads=1, max_seq_len=64, work_dir=path)


def test_load_peer_names_what_it_cannot_do(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match=r"did you mean 'llama.cpp'\?.*ctranslate2, hf"):
        load_anything("llamacpp", bundle)
    with pytest.raises(BenchError, match=r"'int3'.*valid: float32, int4, int8"):
        load_anything("onnxruntime-genai", bundle, dtype="int3")
    write_small_bundle(tmp_path / "nvium", exit_layers=(1,))
    with pytest.raises(BenchError, match=r"exit_layers=\[1\].*dense models only"):
        load_anything("hf", tmp_path / "nvium")
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.delitem(sys.modules, "nvium_titan.bench.peers.llama_cpp", raising=False)
    with pytest.raises(BenchError, match=r"(xllamacpp|gguf).*nvium-titan\[peers\]"):
        load_anything("llama.cpp", bundle)
