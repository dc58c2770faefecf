"""`nvium data prepare`, killed and interrupted, then trained on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nvium_titan import cli
from tests.helpers import HANG_S
from tests.helpers.runs import rows_of, train_here, write_toml

pytestmark = pytest.mark.e2e


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_prepare_killed_interrupted_finished_and_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"path": "", "corpus": "python_docs", "split": "train"}
    held_out = {"enable": True, "freq": 2, "steps": 2}
    toml = write_toml(
        tmp_path,
        training={"steps": 2},
        dataloader=data,
        validator={**held_out, "dataloader": {**data, "split": "validation"}},
    )
    out, unfinished = tmp_path / "shards", tmp_path / "shards.unfinished"
    words = ["data", "prepare", "--config-file", str(toml), "--out", str(out), "--workers", "2"]
    words += ["--documents-per-shard", "3"]
    command = [sys.executable, "-m", "nvium_titan.cli", *words]

    def num_done() -> int:
        return len(list(unfinished.glob("shard-*.json")))

    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        before = num_done()
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        wait_until(lambda least=before + 3: num_done() >= least)
        workers = children(process.pid)
        assert len(workers) >= 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == code, errors
        assert "Traceback" not in errors
        wait_until(lambda workers=workers: not any(map(is_alive, workers)))
        assert not out.exists()
    times = {file.name: file.stat().st_mtime_ns for file in unfinished.glob("shard-*.json")}
    kept = {name: (unfinished / name).with_suffix(".bin").stat().st_mtime_ns for name in times}

    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert f'[dataloader]\npath = "{out}"' in shown
    assert not unfinished.exists()
    for name, written in kept.items():
        assert (out / name).with_suffix(".bin").stat().st_mtime_ns == written
    assert cli.main(["data", "check", str(out)]) == 0

    assert train_here(toml) == 0
    flags = ["--dump_folder", str(tmp_path / "on_shards")]
    for table in ("dataloader", "validator.dataloader"):
        flags += [f"--{table}.corpus=", f"--{table}.path", str(out)]
    assert train_here(toml, *flags) == 0
    for split in ("train", "val"):
        of_text = [row.loss for row in rows_of(tmp_path / "run", split)]
        assert [row.loss for row in rows_of(tmp_path / "on_shards", split)] == of_text
        assert of_text
