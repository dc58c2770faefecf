"""`nvium bench train`: its figures, its table, its traces and its errors, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nvium_titan import cli
from nvium_titan.bench.machine import peak_flops
from nvium_titan.bench.pairs import run_pairs
from nvium_titan.bench.training import TrainComparison, TrainingSystem, step_ratios
from nvium_titan.config_registry import config_files
from nvium_titan.core.cost import count_params, forward_flops
from nvium_titan.core.flavors import dense_twin, flavor_shape
from nvium_titan.train.loss import MixtureLoss

DEBUG = config_files()["debug"]
WORDS = ["bench", "train", "--config-file", str(DEBUG), "--seq-len", "32", "--pairs", "2"]


def comparison_of(**changes: object) -> TrainComparison:
    comparison = TrainComparison(
        config_file=DEBUG,
        shape=flavor_shape("debug"),
        loss=MixtureLoss.Config(num_chunks=2),
        batch=2,
        seq_len=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        compiles=False,
        with_twin=True,
        num_pairs=3,
        seed=0,
    )
    return replace(comparison, **changes)


def test_the_report_names_what_each_model_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "--twin", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    shape = flavor_shape("debug")
    bare = replace(shape, exit_layers=(), router_dim=0, adapter_dim=0)
    models = {"N-vium": shape, "dense": bare, "twin": dense_twin(shape)}
    assert [system["name"] for system in report["systems"]] == list(models)
    flops = {name: sum(forward_flops(d, seq_len=32).values()) for name, d in models.items()}
    for system in report["systems"]:
        name = system["name"]
        assert system["num_params"] == sum(count_params(models[name]).values())
        assert system["tflops"] == pytest.approx(3 * 32 * flops[name] / 1e12)
        assert system["tokens_per_s"] == pytest.approx(32000 / system["step_ms"]["median"])
        assert system["mfu"] is None
    assert [ratio["time"]["over"] for ratio in report["ratios"]] == ["dense", "twin"]
    for ratio in report["ratios"]:
        assert ratio["flop_ratio"] == pytest.approx(flops["N-vium"] / flops[ratio["time"]["over"]])
        assert ratio["cost"] == pytest.approx(ratio["time"]["ratio"] / ratio["flop_ratio"])
    assert report["num_pairs"] == 2
    assert report["exits"] == [2, 4, 6]
    # 8 chunks of 4 tokens, 3 exits.
    assert report["loss_memory"]["live_logit_rows"] == 12
    assert 0.8 < report["loss_memory"]["ratio"] < 1.25


def test_the_table_and_the_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "--profile", str(tmp_path / "traces")]) == 0
    captured = capsys.readouterr()
    for word in ("N-vium", "dense", "time/FLOPs", "loss memory", "2 interleaved pairs"):
        assert word in captured.out
    assert "twin" not in captured.out
    for name in ("N-vium", "dense"):
        trace = json.loads((tmp_path / "traces" / f"{name}.json").read_text())
        assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


def test_a_step_is_the_training_step() -> None:
    system = TrainingSystem("N-vium", flavor_shape("debug"), comparison_of())
    assert system.run() > 0
    first = {name: p.grad.clone() for name, p in system._model.named_parameters()}
    assert all(grad.isfinite().all() for grad in first.values())
    # Adapters start as the identity, so their inner weight has no gradient yet; all else has.
    still = [name for name, grad in first.items() if not grad.any()]
    assert all("adapter.fc_in" in name for name in still)
    system.run()
    for name, parameter in system._model.named_parameters():
        assert torch.equal(parameter.grad, first[name]), name


def test_pairs_take_turns_and_the_first_is_the_numerator(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = comparison_of()
    systems = comparison.systems()
    order: list[str] = []
    seconds = {"N-vium": 3.0, "dense": 2.0, "twin": 4.0}

    def run(self: TrainingSystem) -> float:
        order.append(self.name)
        return seconds[self.name]

    monkeypatch.setattr(TrainingSystem, "run", run)
    runs: list[None] = []
    pairs = run_pairs(
        systems, range(3), lambda system, _: system.run(), on_run=lambda: runs.append(None)
    )
    names = list(seconds)
    assert order == names + names + names[::-1] + names
    assert len(runs) == comparison.num_runs == 12
    assert pairs == [[3.0, 2.0, 4.0]] * 3
    assert [ratio.time.ratio for ratio in step_ratios(systems, pairs)] == [1.5, 0.75]


def test_an_interrupt_keeps_the_pairs_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = iter(range(100))

    def run(self: TrainingSystem) -> float:
        if next(count) == 5:  # two to warm up, one pair, and half of the next
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(TrainingSystem, "run", run)
    assert cli.main([*WORDS, "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["num_pairs"], report["num_pairs_wanted"]) == (1, 2)
    assert report["ratios"][0]["time"]["conclusive"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pairs", "0"], "--pairs 0: must be at least 1"),
        (["--seq-len", "4096"], "the model is declared for max_seq_len=1024"),
        (["--device", "cuda:0"], "torch sees no CUDA GPU here"),
        (["--config-file", str(config_files()["demo_dense"])], "a model with one exit is dense"),
        (["--config-file", "nowhere.toml"], "no such config file"),
    ],
)
def test_mistakes_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in message.lower() and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["bench", "train", "--config-file", str(DEBUG), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_peak_is_known_for_named_gpus_only() -> None:
    assert peak_flops("NVIDIA H200", dtype="bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", dtype="bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", dtype="bfloat16") == 989e12
    assert peak_flops("NVIDIA H200", dtype="float32") is None
    assert peak_flops("cpu", dtype="bfloat16") is None
