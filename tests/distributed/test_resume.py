"""Resuming on another number of ranks; killed and terminated ranks."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import pytest

from nvium_titan.results import MetricsRow
from nvium_titan.step_folders import finished_folders, step_folders, step_of
from tests.helpers.runs import (
    rows_of,
    start_torchrun,
    train_here,
    train_under_torchrun,
    write_toml,
)

pytestmark = pytest.mark.distributed

LIMIT_S = 60
"""How long the other ranks may live after one is killed; a hang would last for minutes."""


def passed(toml: Path, *flags: str, num_processes: int = 2) -> None:
    done = train_under_torchrun(toml, *flags, num_processes=num_processes)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def assert_same_curve(got: list[MetricsRow], want: list[MetricsRow]) -> None:
    assert [row.step for row in got] == [row.step for row in want]
    for a, b in zip(got, want, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        assert a.exit_shares == pytest.approx(b.exit_shares, rel=1e-5)
        assert a.tokens == b.tokens


@pytest.mark.cases
@pytest.mark.parametrize(
    "num_processes", [1, pytest.param(4, marks=pytest.mark.slow)], ids=["2-to-1", "2-to-4"]
)
def test_ckp_01_resuming_on_another_number_of_ranks_goes_on_with_the_same_curve(
    num_processes: int, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path, training={"global_batch_size": 4, "local_batch_size": 2})
    passed(toml)
    whole = rows_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-6")
    if num_processes == 1:
        assert train_here(toml) == 0
    else:
        passed(toml, "--training.local_batch_size", "1", num_processes=num_processes)
    assert_same_curve(rows_of(tmp_path / "run"), whole)


class Run:
    """A run under torchrun on two ranks that is killed again and again."""

    def __init__(self, toml: Path, folder: Path) -> None:
        self.toml = toml
        self.folder = folder
        self.process: Popen[str] | None = None
        self.log = ""

    def start(self, *flags: str) -> None:
        self.process = start_torchrun(self.toml, *flags, num_processes=2)

    def step(self) -> int:
        rows = rows_of(self.folder) if (self.folder / "metrics.jsonl").exists() else []
        return rows[-1].step if rows else 0

    def wait_for_step(self, step: int) -> None:
        self._wait(lambda: self.step() >= step)

    def wait_for_saving(self, after: int) -> None:
        """Return while a checkpoint is being written."""

        def is_saving() -> bool:
            folder = self.folder / "checkpoint"
            finished = finished_folders(folder)
            return any(
                path not in finished and step_of(path) > after for path in step_folders(folder)
            )

        self._wait(is_saving, every_s=0)

    def _wait(self, condition: object, every_s: float = 0.01) -> None:
        assert self.process is not None
        assert callable(condition)
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(every_s)

    def kill(self, rank: int) -> str:
        """Kill one rank with SIGKILL, wait for the end of the others; return what happened."""
        folders = step_folders(self.folder / "checkpoint")
        finished = finished_folders(self.folder / "checkpoint")
        before = time.monotonic()
        os.kill(self._pid_of(rank), signal.SIGKILL)
        code = self.end()
        seconds = time.monotonic() - before
        assert code != 0
        # torchrun lists the killed rank; another that noticed at once may stand as the root cause.
        assert re.search(rf"rank\s*: {rank} .*\n\s*exitcode\s*: -9 ", self.log), self.log[-3000:]
        saving = [path.name for path in folders if path not in finished]
        return (
            f"rank {rank} killed, {self.step()} steps logged, "
            f"{'saving ' + saving[-1] if saving else 'between saves'}, last checkpoint "
            f"{finished[-1].name if finished else 'none'}: torchrun ended with {code} after "
            f"{seconds:.1f} s"
        )

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.end()

    def end(self) -> int:
        assert self.process is not None
        pids = [self._pid_of(rank) for rank in range(2) if self._alive(rank)]
        output, errors = self.process.communicate(timeout=LIMIT_S)
        self.log = output + errors
        assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)
        return self.process.returncode

    def _alive(self, rank: int) -> bool:
        try:
            return bool(self._pid_of(rank))
        except LookupError:
            return False

    def _pid_of(self, rank: int) -> int:
        assert self.process is not None
        for child in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in map(int, child.read_text().split()):
                words: list[bytes] = []
                with suppress(OSError):  # it has ended by now
                    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if b"RANK=%d" % rank in words:
                    return pid
        raise LookupError(f"rank {rank}")


@pytest.fixture(scope="module")
def whole_curve(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run on two ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    toml = write_toml(folder, training={"steps": 60}, checkpoint={"interval": 2})
    passed(toml)
    return folder / "text.jsonl", [row.loss for row in rows_of(folder / "run")]


def disturbed(tmp_path: Path, text: Path) -> Run:
    toml = write_toml(
        tmp_path, training={"steps": 60}, checkpoint={"interval": 2},
        dataloader={"path": str(text)},
    )  # fmt: skip
    return Run(toml, tmp_path / "run")


def finish(run: Run, want: list[float]) -> None:
    run.start()
    assert run.process is not None
    output, errors = run.process.communicate(timeout=300)
    assert run.process.returncode == 0, output[-3000:] + errors[-3000:]
    assert [row.loss for row in rows_of(run.folder)] == want


def test_killed_twice_and_terminated_once_a_run_gives_the_same_curve(
    tmp_path: Path, whole_curve: tuple[Path, list[float]]
) -> None:
    text, want = whole_curve
    run = disturbed(tmp_path, text)
    run.start()
    run.wait_for_step(5)
    run.kill(1)
    run.start()
    run.wait_for_saving(after=run.step() + 1)
    run.kill(0)
    run.start()
    run.wait_for_step(20)
    assert run.terminate() == 1  # torchrun's own code; each rank's is 143
    last = finished_folders(run.folder / "checkpoint")[-1]
    assert step_of(last) == run.step(), "the step at hand is saved"
    assert "stopped by SIGTERM; the same command goes on from here" in run.log
    finish(run, want)


@pytest.mark.slow
def test_killed_at_ten_random_moments_a_run_gives_the_same_curve(
    tmp_path: Path,
    whole_curve: tuple[Path, list[float]],
    record_property: Callable[[str, object], None],
) -> None:
    text, want = whole_curve
    run = disturbed(tmp_path, text)
    draw = random.Random(0)
    for moment in range(10):
        run.start("--checkpoint.async_mode", "async" if moment % 4 > 1 else "disabled")
        done = run.step()
        if moment % 2:
            run.wait_for_saving(after=done + 1)
        else:
            run.wait_for_step(min(done + draw.randint(1, 6), 50))
            time.sleep(draw.uniform(0, 0.1))
        record_property("moment", run.kill(draw.randrange(2)))
    finish(run, want)
