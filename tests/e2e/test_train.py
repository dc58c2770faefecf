"""Training from TOML in one process: logs, checkpoints, resume, and what goes wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import torch
from torch import Tensor

from nvium_titan.bundle import read_bundle
from nvium_titan.convert.export import export_checkpoint
from nvium_titan.train import loss as loss_module
from tests.helpers.runs import rows_of, train_here, write_toml

pytestmark = pytest.mark.e2e

ROW_KEYS = {
    "step", "split", "loss", "mixture_nll", "perplexity", "exit_ce", "exit_shares",
    "expected_depth", "beta", "grad_norm", "lr", "tokens", "tokens_per_s", "limit_speedup",
}  # fmt: skip


def test_a_run_leaves_its_settings_metrics_and_checkpoints(tmp_path: Path) -> None:
    toml = write_toml(
        tmp_path, validator={"enable": True, "freq": 3, "steps": 2},
        metrics={"enable_tensorboard": True},
    )  # fmt: skip
    assert train_here(toml) == 0
    run = tmp_path / "run"
    settings = tomli.loads((run / "config.toml").read_text())
    assert settings["model"]["num_layers"] == 4
    assert settings["nvium"] == {
        "num_exits": 3, "exit_layers": [1, 3], "router_dim": 24, "adapter_dim": 32,
        "trainable": "all",
    }  # fmt: skip
    assert sorted(p.name for p in (run / "checkpoint").iterdir()) == ["step-3", "step-6"]
    assert list((run / "tb").rglob("events.*"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(set(line) >= ROW_KEYS for line in lines)
    train, val = rows_of(run), rows_of(run, "val")
    assert [row.step for row in train] == [1, 2, 3, 4, 5, 6]
    assert [row.step for row in val] == [1, 3, 6]
    assert train[-1].loss < train[0].loss
    assert train[-1].tokens == 6 * 2 * 64
    assert [row.beta for row in train] == [0, 0, 0.03, 0.03, 0.03, 0.03]
    for row in train + val:
        assert len(row.exit_ce) == len(row.exit_shares) == 3
        assert sum(row.exit_shares) == pytest.approx(1, abs=1e-6)
        assert row.perplexity == pytest.approx(math.exp(row.mixture_nll))
        assert min(row.exit_ce) - 1e-6 <= row.mixture_nll
        assert row.limit_speedup is not None
        # At this width the junctions' own weights eat what the exits save.
        assert 0.7 < row.limit_speedup < 4
        depth = sum(s * d for s, d in zip(row.exit_shares, (0.25, 0.75, 1), strict=True))
        assert row.expected_depth == pytest.approx(depth, rel=1e-5)
    last = train[-1]
    assert last.loss == pytest.approx(last.mixture_nll + 0.03 * last.expected_depth, rel=1e-5)


def test_a_piped_log_has_no_colour_codes_and_on_a_cpu_no_word_of_gpus(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    validator = {"enable": True, "freq": 1, "steps": 1}
    assert train_here(write_toml(tmp_path, training={"steps": 1}, validator=validator)) == 0
    said = _said(capfd)
    assert "step:  1" in said
    assert "validate step:  1" in said
    assert "\x1b" not in said
    if not torch.accelerator.is_available():
        assert "lspci" not in said
        assert "A100" not in said


def test_a_resumed_run_logs_what_an_uninterrupted_one_logs(tmp_path: Path) -> None:
    toml = write_toml(tmp_path)
    assert train_here(toml) == 0
    whole = rows_of(tmp_path / "run")
    other = ["--dump_folder", str(tmp_path / "other")]
    # Stopped at 3 of 6: the schedule is that of 6 steps, as for a run that was killed.
    assert train_here(toml, *other, "--training.steps", "3", "--lr_scheduler.total_steps", "6") == 0
    assert train_here(toml, *other, "--lr_scheduler.total_steps", "6") == 0
    resumed = rows_of(tmp_path / "other")
    assert [row.step for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert [row.loss for row in resumed] == [row.loss for row in whole]
    assert [row.grad_norm for row in resumed] == [row.grad_norm for row in whole]
    assert [row.exit_shares for row in resumed] == [row.exit_shares for row in whole]


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, training={"steps": 3})
    assert train_here(toml) == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    late = json.loads(metrics.read_text().splitlines()[-1]) | {"step": 5, "loss": 99.0}
    with metrics.open("a") as file:
        file.write(json.dumps(late) + "\n" + '{"step": 6, "cut off')
    assert train_here(toml, "--training.steps", "6") == 0
    assert [row.step for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert max(row.loss for row in rows_of(tmp_path / "run")) < 99


@pytest.mark.cases
def test_cfg_07_a_flag_beats_the_file_and_is_recorded(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, loss={"beta": 0.1}, training={"steps": 1})
    flags = ["--loss.beta", "0.3", "--model.num_layers", "6", "--nvium.exit_layers", "2", "4"]
    assert train_here(toml, *flags) == 0
    settings = tomli.loads((tmp_path / "run" / "config.toml").read_text())
    assert settings["loss"]["beta"] == 0.3
    assert settings["model"]["num_layers"] == 6
    (tmp_path / "run" / "config.toml").unlink()
    export_checkpoint(tmp_path / "run" / "checkpoint" / "step-1", tmp_path / "bundle")
    config = read_bundle(tmp_path / "bundle").config
    assert (config.shape.num_layers, config.shape.exit_layers) == (6, (2, 4))


@pytest.mark.cases
def test_lrs_03_more_steps_are_announced_and_a_finished_run_has_nothing_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(tmp_path, training={"steps": 5}, checkpoint={"interval": 5})
    assert train_here(toml) == 0
    capfd.readouterr()
    assert train_here(toml) == 0
    assert "nothing to do: the checkpoint is at step 5 and [training] steps=5" in _said(capfd)
    assert train_here(toml, "--training.steps", "10") == 0
    said = _said(capfd)
    assert "[training] steps changed from 5 to 10" in said
    assert "to keep the old curve, set lr_scheduler.total_steps=5" in said
    rows = rows_of(tmp_path / "run")
    assert [row.step for row in rows] == list(range(1, 11))
    assert all(row.lr is not None and 0 <= row.lr <= 3e-3 for row in rows)


def _said(capfd: pytest.CaptureFixture[str]) -> str:
    captured = capfd.readouterr()
    return captured.out + captured.err


@pytest.mark.cases
@pytest.mark.parametrize("steps", [0, -1])
def test_lrs_01_a_run_without_steps_is_refused(
    steps: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(tmp_path)
    assert train_here(toml, "--training.steps", str(steps)) == 2
    assert f"steps={steps}" in _said(capfd)
    assert not (tmp_path / "run").exists()


@pytest.mark.cases
@pytest.mark.parametrize(
    ("warmup", "decay", "router_warmup"),
    [(0, None, 0.0), (5, None, 1.0), (0, 0.0, 0.5), (0, 1.0, 0.0)],
    ids=["no-warm-up", "warm-up-only", "no-decay", "decay-only"],
)
def test_lrs_01_edge_ratios_give_finite_rates(
    warmup: int, decay: float | None, router_warmup: float, tmp_path: Path
) -> None:
    schedule = {"warmup_steps": warmup} | ({} if decay is None else {"decay_ratio": decay})
    toml = write_toml(
        tmp_path, training={"steps": 5}, lr_scheduler=schedule, checkpoint={"enable": False},
        loss={"warmup_fraction": router_warmup},
    )  # fmt: skip
    assert train_here(toml) == 0
    rates = [row.lr for row in rows_of(tmp_path / "run")]
    assert len(rates) == 5
    assert all(rate is not None and 0 <= rate <= 3e-3 for rate in rates)


@pytest.mark.cases
@pytest.mark.parametrize("beta", [0.0, 0.15, 100.0])
def test_ext_04_router_collapse_is_logged_and_warned_of(
    beta: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(
        tmp_path, loss={"beta": beta, "warmup_fraction": 0.0}, training={"steps": 40},
        checkpoint={"enable": False}, metrics={"log_freq": 10, "enable_tensorboard": True},
    )  # fmt: skip
    assert train_here(toml) == 0
    rows = rows_of(tmp_path / "run")
    assert all(math.isfinite(value) for row in rows for value in (row.loss, row.router_entropy))
    collapsed = any(max(row.exit_shares) > 0.95 for row in rows)
    assert ("router collapse" in _said(capfd)) == collapsed
    if beta == 100.0:
        assert rows[-1].exit_shares[0] > 0.95
        assert rows[-1].expected_depth < 0.3


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = write_toml(
        tmp_path, training={"steps": 9}, metrics={"log_freq": 100}, checkpoint={"interval": 3}
    )
    chunk_loss = loss_module.MixtureLoss._chunk_loss
    calls = []

    def poisoned(self: loss_module.MixtureLoss, o: Tensor, *args: Tensor) -> Tensor:
        calls.append(None)
        bad = len(calls) > 8  # 2 chunks a step: from step 5 on
        return chunk_loss(self, o * math.nan if bad else o, *args)

    monkeypatch.setattr(loss_module.MixtureLoss, "_chunk_loss", poisoned)
    assert train_here(toml) == 1
    said = _said(capfd)
    assert "not finite at step 5" in said
    assert "the last good checkpoint is" in said
    assert "step-3" in said
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-3"]


@pytest.mark.cases
def test_tok_02_a_vocabulary_smaller_than_the_tokenizer_is_refused_at_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(tmp_path)
    assert train_here(toml, "--model.vocab_size", "257") == 2
    said = _said(capfd)
    assert "258" in said
    assert "257" in said
    assert not (tmp_path / "run").exists()
    for size in ("258", "320"):
        flags = ["--model.vocab_size", size, "--training.steps", "1"]
        assert train_here(toml, *flags, "--dump_folder", str(tmp_path / size)) == 0


def test_missing_data_is_refused_before_anything_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(tmp_path)
    assert train_here(toml, "--dataloader.path", str(tmp_path / "nowhere.txt")) == 2
    assert "nowhere.txt" in _said(capfd)
    assert not (tmp_path / "run").exists()


def test_the_phases_change_without_recompiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    from nvium_titan.train.trainer import NviumTrainer

    graphs = []
    train_step = NviumTrainer.train_step

    def counted(self: NviumTrainer, data: object) -> None:
        train_step(self, data)
        graphs.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(NviumTrainer, "train_step", counted)
    torch._dynamo.reset()
    counters.clear()
    toml = write_toml(
        tmp_path, compile={"enable": True, "backend": "aot_eager"}, checkpoint={"enable": False},
        loss={"warmup_fraction": 0.5},
    )  # fmt: skip
    assert train_here(toml) == 0
    torch._dynamo.reset()
    assert [row.beta for row in rows_of(tmp_path / "run")] == [0, 0, 0, 0.03, 0.03, 0.03]
    assert graphs[0] > 0, "compile was off"
    assert graphs == [graphs[0]] * 6


@pytest.mark.cases
def test_dat_07_the_end_of_a_document_is_learnt_and_stops_generation(tmp_path: Path) -> None:
    from nvium_titan.decode import Engine

    data = tmp_path / "ab.jsonl"
    data.write_text('{"text": "ab"}\n' * 50)
    toml = write_toml(
        tmp_path, training={"steps": 120, "seq_len": 32, "local_batch_size": 4},
        dataloader={"path": str(data)}, metrics={"log_freq": 40}, checkpoint={"interval": 120},
        optimizer={"lr": 1e-2},
    )  # fmt: skip
    assert train_here(toml) == 0
    export_checkpoint(tmp_path / "run", tmp_path / "bundle")
    tokenizer = read_bundle(tmp_path / "bundle").load_tokenizer()
    engine = Engine.from_bundle(tmp_path / "bundle")
    ends = []
    for seed in range(10):
        result = engine.generate(
            tokenizer.encode("a", add_bos=True), max_new_tokens=20, seed=seed,
            stop_ids=[tokenizer.eos_id],
        ).result()  # fmt: skip
        ends.append((result.finish_reason, tokenizer.decode(result.token_ids)))
    assert ends.count(("stop", "b")) >= 8


def test_ctrl_c_saves_the_step_at_hand_and_the_run_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import signal

    from nvium_titan.train.trainer import NviumTrainer

    toml = write_toml(tmp_path, training={"steps": 5}, checkpoint={"interval": 100})
    train_step = NviumTrainer.train_step

    def interrupted(self: NviumTrainer, data: object) -> None:
        train_step(self, data)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(NviumTrainer, "train_step", interrupted)
    assert train_here(toml) == 130
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-2"]
    monkeypatch.undo()
    assert train_here(toml) == 0
    assert [row.step for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_what_torchtitan_refuses_is_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(tmp_path)
    assert train_here(toml, "--training.global_batch_size", "3") == 2
    said = _said(capfd)
    assert "nvium: error: torchtitan refuses the settings: global batch size must be" in said
    assert "Traceback" not in said


def test_text_that_ends_early_saves_the_last_step_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(
        tmp_path, training={"steps": 1000}, dataloader={"infinite": False},
        checkpoint={"interval": 1000},
    )  # fmt: skip
    assert train_here(toml) == 2
    last = rows_of(tmp_path / "run")[-1].step
    assert f"the text ended after step {last} of 1000" in _said(capfd)
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == [f"step-{last}"]


def test_bfloat16_compute_trains_what_float32_trains(tmp_path: Path) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        run = tmp_path / dtype
        run.mkdir()
        toml = write_toml(
            run, training={"steps": 3, "mixed_precision_param": dtype},
            checkpoint={"enable": False},
        )  # fmt: skip
        assert train_here(toml) == 0
        losses.append([row.loss for row in rows_of(run / "run")])
    # bf16 keeps 8 bits; the loss is made in float32 from bf16 logits.
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1] != losses[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parallelism.expert_parallel_degree", "2"], "the model has no experts"),
        (["--parallelism.context_parallel_degree", "2"], "no attention over a split sequence"),
        (["--training.enable_cpu_offload"], "there is no accelerator to offload from"),
        (["--parallelism.spmd_backend", "full_dtensor"], "the mixture loss needs plain tensors"),
    ],
)
def test_layouts_that_are_not_supported_are_refused_by_name(
    flags: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(tmp_path)
    assert train_here(toml, *flags) == 2
    assert message in _said(capfd)


DENORMALS = """
import sys
import torch
from nvium_titan.train import compat, launch

compat.use_cpu_without_accelerator()
from nvium_titan.train.loss import MixtureLoss

start_step = MixtureLoss.start_step

def noted(self, step, *, num_steps):
    tiny = torch.full((1 << 22,), 2e-38) * 1e-3  # more than one thread's share
    print("largest:", float(tiny.max()), "threads:", torch.get_num_threads())
    start_step(self, step, num_steps=num_steps)

MixtureLoss.start_step = noted
sys.exit(launch.main(sys.argv[1:]))
"""


def test_every_thread_that_trains_flushes_denormal_numbers(tmp_path: Path) -> None:
    """They made a step of a model with a large vocabulary five times as slow."""
    toml = write_toml(tmp_path, training={"steps": 2})
    done = subprocess.run(
        [sys.executable, "-c", DENORMALS, "--config-file", str(toml)],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("largest")]
    assert said == ["largest: 0.0 threads: 2"] * 2
