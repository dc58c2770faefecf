"""Resuming on another number of ranks; killed and terminated ranks."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired

import pytest

from nvium_titan.convert.step_folders import finished_folders, is_finished, step_of
from nvium_titan.report.records import MetricsRow
from tests.helpers import HANG_S
from tests.helpers.runs import (
    MEAN_ROUNDING,
    rows_of,
    start_torchrun,
    train_here,
    train_under_torchrun,
    write_toml,
)

pytestmark = pytest.mark.distributed


def passed(toml: Path, *flags: str, num_processes: int = 2) -> None:
    done = train_under_torchrun(toml, *flags, num_processes=num_processes)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def settings_of(num_steps: int) -> dict[str, dict[str, object]]:
    """Return the tables of a run that saves every second step and keeps all it saves."""
    return {
        "training": {"steps": num_steps, "global_batch_size": 4, "local_batch_size": 2},
        "checkpoint": {"interval": 2, "keep_latest_k": 0},
    }


def trained_whole(folder: Path, *, num_steps: int) -> Path:
    """Train on two ranks, undisturbed; return the folder of `text.jsonl` and `run`."""
    passed(write_toml(folder, **settings_of(num_steps)))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_whole(tmp_path_factory.mktemp("whole"), num_steps=20)


def assert_same_curve(got: list[MetricsRow], want: list[MetricsRow]) -> None:
    assert [row.step for row in got] == [row.step for row in want]
    for a, b in zip(got, want, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=MEAN_ROUNDING)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        assert a.exit_shares == pytest.approx(b.exit_shares, rel=1e-5)
        assert a.tokens == b.tokens


@pytest.mark.cases
@pytest.mark.parametrize(
    "num_processes", [1, pytest.param(4, marks=pytest.mark.slow)], ids=["2-to-1", "2-to-4"]
)
def test_ckp_01_resuming_on_another_number_of_ranks_goes_on_with_the_same_curve(
    num_processes: int, tmp_path: Path, whole: Path
) -> None:
    shutil.copytree(whole / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        if step_of(path) > 6:
            shutil.rmtree(path)
    shutil.copy(whole / "text.jsonl", tmp_path)
    toml = write_toml(tmp_path, **settings_of(20))
    if num_processes == 1:
        assert train_here(toml) == 0
    else:
        passed(toml, "--training.local_batch_size", "1", num_processes=num_processes)
    assert_same_curve(rows_of(tmp_path / "run"), rows_of(whole / "run"))


class Run:
    """A run under torchrun on two ranks that is killed again and again."""

    def __init__(self, toml: Path, folder: Path) -> None:
        self.toml = toml
        self.folder = folder
        self.process: Popen[str] | None = None
        self._log = toml.with_suffix(".log")

    @property
    def log(self) -> str:
        """What torchrun and the ranks have said since the start."""
        return self._log.read_text(errors="replace")

    def start(self, *flags: str, hold: tuple[int, int, str] | None = None) -> None:
        """Start or go on.

        Args:
            flags: Flags of `nvium train`.
            hold: Rank and step whose saving is to stop, and "before" or "after" its writing.
        """
        if hold is not None:
            os.environ["HOLD"] = " ".join(map(str, hold))
        module = "nvium_titan.train" if hold is None else "tests.helpers.held_run"
        self.process = start_torchrun(
            self.toml, *flags, num_processes=2, module=module, log=self._log
        )

    def logged(self) -> int:
        """Return the last step with a row of metrics; only where no rank is alive."""
        return rows_of(self.folder)[-1].step

    def wait_for_step(self, step: int) -> None:
        """Wait until that step is trained, counting from this start alone."""

        def is_done() -> bool:
            return max(map(int, re.findall(r"train step (\d+):", self.log)), default=0) >= step

        self._wait(is_done)

    def wait_for_saving(self, step: int) -> None:
        """Wait until the files of that step are being written."""
        self._wait((self.folder / "checkpoint" / f"step-{step}").is_dir)

    def _wait(self, condition: Callable[[], bool]) -> None:
        assert self.process is not None
        end = time.monotonic() + HANG_S
        while not condition():
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < end, self.log[-3000:]
            time.sleep(0.01)

    def kill(self, rank: int) -> str:
        """Kill one rank with SIGKILL, wait for the end of the others; return what happened."""
        before = time.monotonic()
        code = self.end(lambda pids: os.kill(pids[rank], signal.SIGKILL))
        seconds = time.monotonic() - before
        assert code != 0
        # A rank that hangs ends too, once its collective gives up waiting.
        assert "Timed out waiting" not in self.log, self.log[-3000:]
        # torchrun lists the killed rank; another that noticed at once may stand as the root cause.
        assert re.search(rf"rank\s*: {rank} .*\n\s*exitcode\s*: -9 ", self.log), self.log[-3000:]
        finished = finished_folders(self.folder / "checkpoint")
        return (
            f"rank {rank} killed, {self.logged()} steps logged, last checkpoint "
            f"{finished[-1].name if finished else 'none'}: torchrun ended with {code} after "
            f"{seconds:.1f} s"
        )

    def terminate(self) -> int:
        process = self.process
        assert process is not None
        return self.end(lambda _: process.terminate())

    def end(self, do: Callable[[dict[int, int]], None]) -> int:
        """Do something to the ranks, by their process ids; return torchrun's exit code."""
        assert self.process is not None
        pids = self._pids()
        assert len(pids) == 2, self.log[-3000:]
        do(pids)
        code = self.process.wait(HANG_S)
        assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids.values())
        return code

    def clear_away(self) -> None:
        """End what a failed test has left."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        with suppress(TimeoutExpired):
            self.process.wait(HANG_S)
        self.process.kill()

    def _pids(self) -> dict[int, int]:
        """Return the process of each rank that is alive; any of them may end meanwhile."""
        assert self.process is not None
        found = {}
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):
                for pid in map(int, children.read_text().split()):
                    with suppress(OSError):
                        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                        found |= {r: pid for r in range(2) if b"RANK=%d" % r in words}
        return found


@pytest.fixture
def disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("HOLD", "")
    run = Run(tmp_path / "tiny.toml", tmp_path / "run")
    yield run
    run.clear_away()


def finish(run: Run, whole: Path) -> None:
    run.start()
    assert run.process is not None
    assert run.process.wait(HANG_S) == 0, run.log[-3000:]
    assert [row.loss for row in rows_of(run.folder)] == [row.loss for row in rows_of(whole / "run")]


def test_killed_twice_and_terminated_once_a_run_gives_the_same_curve(
    tmp_path: Path, whole: Path, disturbed: Run
) -> None:
    shutil.copy(whole / "text.jsonl", tmp_path)
    write_toml(tmp_path, **settings_of(20))
    run = disturbed
    run.start()
    run.wait_for_step(3)
    run.kill(1)
    saved = run.logged() // 2 * 2 + 2
    run.start(hold=(0, saved, "before"))
    run.wait_for_saving(saved)
    run.kill(0)
    assert not is_finished(run.folder / "checkpoint" / f"step-{saved}")
    run.start()
    run.wait_for_step(saved + 2)
    assert run.terminate() == 1  # torchrun's own code; each rank's is 143
    last = finished_folders(run.folder / "checkpoint")[-1]
    assert step_of(last) == run.logged(), "the step at hand is saved"
    assert len(re.findall("stopped by SIGTERM; run the same command again to resume", run.log)) == 2
    finish(run, whole)


@pytest.mark.slow
def test_killed_at_ten_random_moments_a_run_gives_the_same_curve(
    tmp_path: Path, disturbed: Run, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "whole").mkdir()
    whole = trained_whole(tmp_path / "whole", num_steps=80)
    shutil.copy(whole / "text.jsonl", tmp_path)
    write_toml(tmp_path, **settings_of(80))
    run = disturbed
    draw = random.Random(0)
    done = 0
    for moment in range(10):
        rank = draw.randrange(2)
        mode = "async" if moment % 4 > 1 else "disabled"
        step = done + draw.randint(1, 6)
        if moment % 2:
            step = step // 2 * 2 + 2
            place = draw.choice(["before", "after"])
            run.start("--checkpoint.async_mode", mode, hold=(rank, step, place))
            run.wait_for_saving(step)
        else:
            place = "between"
            run.start("--checkpoint.async_mode", mode)
            run.wait_for_step(step)
        time.sleep(draw.uniform(0, 0.1))
        what = run.kill(rank)
        record_property("moment", f"{mode}, {place} step {step}: {what}")
        done = run.logged()
        if moment % 2:
            assert not is_finished(run.folder / "checkpoint" / f"step-{step}")
    finish(run, whole)
