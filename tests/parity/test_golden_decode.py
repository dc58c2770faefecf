"""The engine against numbers recorded by running the N-vium authors' code on random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nvium_titan.bundle import BundleConfig
from nvium_titan.decode import DecoderParams, Engine, Noise, RouterGreedy, SamplingParams

MODELS = ("nvium_mha", "nvium_gqa", "nvium_uneven")
DTYPES = {"f32": torch.float32, "f64": torch.float64}


def load_engine(folder: Path, dtype: torch.dtype) -> Engine:
    llama = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    experiment = json.loads((folder / "exp_config.json").read_text(encoding="utf-8"))
    exits = {
        "exit_layers": experiment["early_layer_idx"],
        "router_dim": experiment["router"]["intermediate_size"],
        "adapter_dim": experiment["early_adapter"]["dim"],
        "final_adapter": experiment["final_adapter"]["enabled"],
    }
    config = BundleConfig.from_json(llama | exits | {"model_type": "nvium"})
    tensors = load_file(folder / "model.safetensors")
    return Engine(DecoderParams.from_tensors(config, {n: t.to(dtype) for n, t in tensors.items()}))


def load_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_of_every_exit(golden_dir: Path, name: str) -> None:
    folder = golden_dir / name
    golden = load_file(folder / "forward.safetensors")
    ids = load_json(folder / "forward.json")["input_ids"]
    scores = load_engine(folder, torch.float64).score(ids)
    near = {"rtol": 1e-9, "atol": 1e-12}
    log_exits_KBT = scores.log_exits.permute(2, 0, 1)
    torch.testing.assert_close(log_exits_KBT, golden["logprob_next_token"], **near)
    exits = golden["exit_probabilities"][:, :-1]
    torch.testing.assert_close(scores.log_exit_probs.exp(), exits, **near)


@pytest.mark.parity
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_router_greedy_token_for_token_and_exit_for_exit(
    golden_dir: Path, name: str, precision: str
) -> None:
    folder = golden_dir / name
    engine = load_engine(folder, DTYPES[precision])
    runs = [
        run for run in load_json(folder / "decode.json")["greedy"] if run["precision"] == precision
    ]
    assert len(runs) == 6
    for run in runs:
        result = engine.generate(
            run["prompt"],
            max_new_tokens=64,
            policy=RouterGreedy(),
            sampling=SamplingParams(temperature=0),
        ).result()
        assert list(result.token_ids) == run["tokens"]
        assert list(result.exit_indices) == run["decisions"]


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
def test_teacher_forced_decisions(golden_dir: Path, name: str) -> None:
    """96 given tokens fed one by one: the exit and the argmax of every step."""
    folder = golden_dir / name
    greedy: dict[str, Any] = {
        "policy": RouterGreedy(),
        "sampling": SamplingParams(temperature=0),
        "noise": Noise(0, vocab_size=256),
    }
    for run in load_json(folder / "decode.json")["forced"]:
        engine = load_engine(folder, DTYPES[run["precision"]])
        state, start = engine.new_state(), run["prompt_len"]
        engine.prefill(state, run["tokens"][:start])
        chosen = [engine.choose(state, **greedy)]
        chosen += [engine.step(state, token_id, **greedy) for token_id in run["tokens"][start:]]
        assert [token.token_id for token in chosen] == run["argmax"]
        assert [token.exit_index for token in chosen[1:]] == run["decisions"]
