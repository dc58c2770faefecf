"""The launchers: what they say is what torchrun gets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvium_titan.report.records import read_metrics
from tests.helpers import HANG_S

TOOLS = Path(__file__).resolve().parents[2] / "tools"
DEBUG = TOOLS.parent / "train_configs" / "debug.toml"


def environment_of(**variables: str) -> dict[str, str]:
    launch = re.compile(r"(LOCAL_)?RANK|WORLD_SIZE|MASTER_|NGPU|CONFIG_FILE|PYTHON$|SLURM_")
    kept = {name: value for name, value in os.environ.items() if not launch.match(name)}
    return kept | variables


def test_the_scripts_are_bash() -> None:
    for name in ("launch.sh", "slurm.sbatch"):
        subprocess.run(["bash", "-n", str(TOOLS / name)], check=True)
    assert os.access(TOOLS / "launch.sh", os.X_OK)


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A stand-in for a command: it prints its words, one a line."""
    path = tmp_path / "echo"
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return path


def test_words_before_the_dashes_go_to_torchrun(echo: Path, tmp_path: Path) -> None:
    def launched(*words: str, **variables: str) -> list[str]:
        environment = environment_of(PYTHON=str(echo), **variables)
        done = subprocess.run(
            [str(TOOLS / "launch.sh"), *words],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    train = ["-m", "nvium_titan.train", "--config-file"]
    assert launched("--loss.beta", "0.3", NGPU="4", CONFIG_FILE="a b.toml") == [
        "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone",
        *train, "a b.toml", "--loss.beta", "0.3",
    ]  # fmt: skip
    assert launched("--nnodes=2", "--rdzv-endpoint=h:1", "--", "--x.y", "1 2", NGPU="8") == [
        "-m", "torch.distributed.run", "--nproc-per-node=8", "--nnodes=2", "--rdzv-endpoint=h:1",
        *train, str(DEBUG), "--x.y", "1 2",
    ]  # fmt: skip
    # Without NGPU: the GPUs that nvidia-smi lists, or one process.
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    smi.chmod(0o755)
    path = os.environ["PATH"]
    assert launched(PATH=f"{tmp_path}:{path}")[2] == "--nproc-per-node=2"
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert launched(PATH=f"{tmp_path}:{path}")[2] == "--nproc-per-node=1"
    assert launched("--max-restarts=1", "--", NGPU="1")[3:5] == ["--max-restarts=1", "--standalone"]


def test_a_slurm_job_meets_on_its_first_node_and_requeues_itself(
    echo: Path, tmp_path: Path
) -> None:
    def stand_in(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    log = tmp_path / "log"
    stand_in("scontrol", f'[ $1 = show ] && printf "n1\\nn2\\n" || echo "$@" >>{log}')
    # A step that saves when it is told to end, as training does.
    stand_in(
        "srun",
        f"printf '%s\\n' \"$@\" >>{log}\ntrap 'echo saved >>{log}; exit 143' TERM\n"
        "while :; do sleep 0.1; kill -USR1 $PPID; done",
    )
    environment = environment_of(
        PATH=f"{tmp_path}:{os.environ['PATH']}", CONFIG_FILE="c.toml", SLURM_JOB_ID="20007",
        SLURM_NNODES="2", SLURM_JOB_NODELIST="n[1-2]", SLURM_RESTART_COUNT="3",
    )  # fmt: skip
    done = subprocess.run(
        ["bash", str(TOOLS / "slurm.sbatch"), "--training.steps", "9"],
        env=environment, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 143
    words = log.read_text().splitlines()
    assert words[1] == "tools/launch.sh"
    assert {"--nnodes=2", "--rdzv-id=20007-3", "--rdzv-endpoint=n1:20007"} <= set(words)
    assert words[-5:] == ["--", "--training.steps", "9", "saved", "requeue 20007"]


@pytest.mark.distributed
def test_launch_trains_on_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    environment = environment_of(
        NGPU="2", CONFIG_FILE=str(DEBUG), PYTHON=sys.executable, OMP_NUM_THREADS="1"
    )
    command = [
        str(TOOLS / "launch.sh"), "--log-dir", str(tmp_path / "logs"), "--",
        "--training.steps", "2", "--metrics.log_freq", "1", "--dump_folder", str(tmp_path / "run"),
        "--validator.no_enable", "--checkpoint.no_enable",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2]
    assert rows[-1].tokens == 2 * 2 * 4 * 128
