"""Tiny training runs, in this process or under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import tomli_w
import torch

from nvium_titan import cli
from nvium_titan.report.records import MetricsRow, read_metrics
from nvium_titan.train import launch as train
from tests.helpers import HANG_S
from tests.helpers.tolerance import rounding

pytest.importorskip("torchtitan")  # whoever imports this trains

MEAN_ROUNDING = rounding(torch.float32, 2 * (9 + 2 + 8 + 2))
"""How far a mean over 8 sequences of 64 tokens may move when it is added up in another order: in a
tree of 9 levels within a chunk, over 2 chunks, up to 8 micro-batches and 2 ranks."""

LINE = "the quick brown fox jumps over the lazy dog, and {n} more dogs look on.\n"


def write_text(folder: Path, *, num_documents: int = 40) -> Path:
    """Write a jsonl of short documents and return it."""
    path = folder / "text.jsonl"
    rows = [{"text": LINE.format(n=n) * (1 + n % 4)} for n in range(num_documents)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_settings(folder: Path, **tables: Mapping[str, object]) -> dict[str, object]:
    """Return settings of a model that trains in a second: 4 layers, 3 exits, width 32."""
    text = folder / "text.jsonl"
    if not text.exists():
        write_text(folder)
    data = {"path": str(text), "split": "all"}
    settings: dict[str, dict[str, object]] = {
        "model": {
            "flavor": "debug", "num_layers": 4, "dim": 32, "num_heads": 2, "ffn_dim": 64,
        },
        "nvium": {"exit_layers": [1, 3], "num_exits": 3},
        "loss": {"beta": 0.03, "warmup_fraction": 0.25, "num_chunks": 2},
        "optimizer": {"lr": 3e-3},
        "training": {
            "steps": 6, "local_batch_size": 2, "seq_len": 64, "mixed_precision_param": "float32",
        },
        "activation_checkpoint": {"kind": "none"},
        "dataloader": dict(data),
        "validator": {"enable": False, "dataloader": dict(data)},
        "metrics": {"log_freq": 1},
        "checkpoint": {"enable": True, "interval": 3},
        "debug": {"seed": 7},
    }  # fmt: skip
    for name, table in tables.items():
        settings[name] = {**settings.get(name, {}), **table}
    return {"dump_folder": str(folder / "run"), "hf_assets_path": "byte", **settings}


def write_toml(folder: Path, **tables: Mapping[str, object]) -> Path:
    """Write `tiny_settings` to a TOML file and return it."""
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(tiny_settings(folder, **tables)))
    return path


def train_here(toml: Path, *flags: str) -> int:
    """Train in this process; return the exit code."""
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(key, None)
    return train.main(["--config-file", str(toml), *flags])


def train_under_torchrun(
    toml: Path,
    *flags: str,
    num_processes: int,
    module: str = "nvium_titan.train",
) -> subprocess.CompletedProcess[str]:
    """Train under torchrun on gloo; return the finished process."""
    process = start_torchrun(toml, *flags, num_processes=num_processes, module=module)
    try:
        output, errors = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def start_torchrun(
    toml: Path,
    *flags: str,
    num_processes: int,
    module: str = "nvium_titan.train",
    log: Path | None = None,
) -> subprocess.Popen[str]:
    """Start training under torchrun on gloo, its output in a file or in pipes, to be emptied."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={num_processes}", "-m", module,
        "--config-file", str(toml), *flags,
    ]  # fmt: skip
    launch = re.compile(r"(LOCAL_)?RANK|WORLD_SIZE|MASTER_")
    environment = {k: v for k, v in os.environ.items() if not launch.match(k)}
    environment["OMP_NUM_THREADS"] = "1"
    if log is not None:
        with log.open("w") as file:
            return subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True
            )
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rows_of(run: Path, split: str = "train") -> list[MetricsRow]:
    """Return the logged rows of one split."""
    return [row for row in read_metrics(run / "metrics.jsonl") if row.split == split]


def assert_evaluates_alike(
    models: Sequence[Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that `nvium eval` gives every model the same numbers, to the bit."""
    results = []
    for model in models:
        capsys.readouterr()
        words = ["eval", str(model), "--text", str(text), "--window", "48", "--stride", "32"]
        assert cli.main([*words, "--tokens", "500", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        del result["model"]
        results.append(result)
    assert results[0]["num_tokens"] == 500
    assert len({mode["log_likelihood"] for mode in results[0]["modes"]}) > 2
    assert all(result == results[0] for result in results[1:])
