"""Checkpoints that are cut off, damaged, foreign or cannot be written; async saving; retention."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from nvium_titan.train.data.loader import TextDataLoader
from nvium_titan.train.trainer import NviumTrainer
from tests.helpers.runs import rows_of, train_here, write_toml

pytestmark = pytest.mark.e2e


def said(capfd: pytest.CaptureFixture[str]) -> str:
    captured = capfd.readouterr()
    return captured.out + captured.err


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoint").iterdir())


def curve(run: Path) -> list[tuple[int, float, float | None]]:
    return [(row.step, row.loss, row.grad_norm) for row in rows_of(run)]


def tensors_of(step_folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint: weights and optimizer state."""
    entries = FileSystemReader(step_folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(dict(tensors), checkpoint_id=step_folder, no_dist=True)
    return tensors


@pytest.mark.cases
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ckp_03_an_unfinished_checkpoint_is_passed_over_and_a_damaged_one_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(tmp_path, checkpoint={"interval": 2})
    assert train_here(toml) == 0
    whole = curve(tmp_path / "run")

    def stopped_at_4(name: str) -> tuple[Path, list[str]]:
        run = tmp_path / name
        shutil.copytree(tmp_path / "run", run)
        shutil.rmtree(run / "checkpoint" / "step-6")
        capfd.readouterr()
        return run / "checkpoint" / "step-4", ["--dump_folder", str(run)]

    step, flags = stopped_at_4("cut off")
    (step / ".metadata").unlink()
    assert train_here(toml, *flags) == 0
    assert f"{step}: no .metadata in it, so it was not saved to the end; skipped, resuming" in (
        text := said(capfd)
    )
    assert "step-2" in text
    assert curve(tmp_path / "cut off") == whole

    step, flags = stopped_at_4("truncated")
    shard = next(step.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:10])
    assert train_here(toml, *flags) == 2
    text = said(capfd)
    assert f"{step}: {shard.name} is cut off: 10 bytes of at least" in text
    assert "to resume from the last good one, add --checkpoint.load_step 2" in text
    assert "Traceback" not in text
    assert curve(tmp_path / "truncated") == whole, "nothing may change"
    assert train_here(toml, *flags, "--checkpoint.load_step", "2") == 0
    assert curve(tmp_path / "truncated") == whole

    step, flags = stopped_at_4("no metadata")
    (step / ".metadata").write_bytes(b"")
    assert train_here(toml, *flags) == 2
    assert f"{step}: .metadata cannot be read" in said(capfd)
    shutil.rmtree(step.parent / "step-2")
    assert train_here(toml, *flags) == 2
    assert f"there is no good checkpoint; to start anew, remove {step}" in said(capfd)


def test_a_foreign_or_weights_only_checkpoint_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(tmp_path, training={"steps": 3})
    assert train_here(toml) == 0
    assert train_here(toml, "--model.ffn_dim", "128", "--training.steps", "5") == 2
    text = said(capfd)
    assert "step-3: does not fit this run" in text
    assert "Size mismatch" in text
    step = tmp_path / "run" / "checkpoint" / "step-3"
    next(step.glob("*.distcp")).write_bytes(b"")
    other = ["--dump_folder", str(tmp_path / "other")]
    assert train_here(toml, *other, "--checkpoint.initial_load_path", str(step)) == 2
    assert "is cut off: 0 bytes" in said(capfd)
    assert not (tmp_path / "other").exists()
    assert train_here(toml, *other, "--checkpoint.last_save_model_only") == 0
    assert train_here(toml, *other, "--training.steps", "5") == 2
    assert "step-3: holds only the model's weights" in said(capfd)


@pytest.mark.cases
def test_ckp_01_a_stream_divided_over_other_ranks_is_refused_unless_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = write_toml(tmp_path, training={"steps": 3})
    assert train_here(toml) == 0
    build = TextDataLoader.__init__

    def as_stream(self: TextDataLoader, *args: object, **parts: object) -> None:
        build(self, *args, **parts)
        self._state_key = "rank_0_of_2"

    monkeypatch.setattr(TextDataLoader, "__init__", as_stream)
    flags = ["--training.steps", "4"]
    assert train_here(toml, *flags) == 2
    text = said(capfd)
    assert "a stream from the hub is divided among the ranks" in text
    assert train_here(toml, *flags, "--checkpoint.exclude_from_loading", "dataloader") == 0
    assert [row.step for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_the_newest_checkpoints_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    toml = write_toml(
        tmp_path, training={"steps": 5}, checkpoint={"interval": 1, "keep_latest_k": 2}
    )
    folder = tmp_path / "run" / "checkpoint"
    for name in ("step-0", "my-step-3-backup"):
        (folder / name).mkdir(parents=True)
    assert train_here(toml) == 0
    assert steps_of(tmp_path / "run") == ["my-step-3-backup", "step-4", "step-5"]


@pytest.mark.cases
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ckp_05_async_saving_writes_what_sync_saving_writes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = write_toml(
        tmp_path, training={"steps": 4}, checkpoint={"interval": 2}, optimizer={"lr": 0.1}
    )
    flags = ["--dump_folder", str(tmp_path / "async"), "--checkpoint.async_mode", "async"]
    assert train_here(toml) == 0
    assert train_here(toml, *flags) == 0
    assert steps_of(tmp_path / "async") == ["step-2", "step-4"]
    for step in ("step-2", "step-4"):
        want = tensors_of(tmp_path / "run" / "checkpoint" / step)
        got = tensors_of(tmp_path / "async" / "checkpoint" / step)
        assert got.keys() == want.keys()
        assert len([name for name in want if "exp_avg_sq" in name]) > 10
        assert all(torch.equal(got[name], want[name]) for name in want)
    shutil.rmtree(tmp_path / "async" / "checkpoint" / "step-4")
    assert train_here(toml, *flags) == 0
    assert curve(tmp_path / "async") == curve(tmp_path / "run")
    if not torch.cuda.is_available():
        flags = ["--checkpoint.async_mode", "async_with_pinned_mem"]
        assert train_here(toml, *flags) == 2
        assert "needs a CUDA device" in said(capfd)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("tied", "exit_layers"),
    [(False, [1, 3]), (True, []), (True, [1, 3])],
    ids=["exits-to-head", "head-to-embedding", "all-to-embedding"],
)
def test_ckp_06_tied_heads_resume(
    tied: bool, exit_layers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    start = NviumTrainer._start

    def spy(self: NviumTrainer) -> None:
        start(self)
        model = self.model_parts[0]
        is_shared = model.lm_head.weight is model.tok_embeddings.weight
        seen.append((is_shared, sum(p.numel() for p in model.parameters())))

    monkeypatch.setattr(NviumTrainer, "_start", spy)
    toml = write_toml(
        tmp_path,
        training={"steps": 8},
        checkpoint={"interval": 4},
        model={"tie_embeddings": tied},
        nvium={"exit_layers": exit_layers, "num_exits": 1 + len(exit_layers)},
    )
    assert train_here(toml) == 0
    whole = curve(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-8")
    assert train_here(toml) == 0
    assert curve(tmp_path / "run") == whole
    assert seen[0] == seen[1]
    assert seen[1][0] == tied


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_full_disk_keeps_the_last_good_checkpoint_and_says_so(
    async_mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    toml = write_toml(tmp_path, checkpoint={"interval": 2, "async_mode": async_mode})
    assert train_here(toml) == 0
    whole = curve(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    write_data = FileSystemWriter.write_data

    def full(self: FileSystemWriter, *args: object) -> object:
        done = write_data(self, *args)
        if Path(self.path).name == "step-4":
            raise OSError(errno.ENOSPC, "No space left on device")
        return done

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    capfd.readouterr()
    assert train_here(toml) == 1
    text = said(capfd)
    assert "step-4: saving failed (OSError: [Errno 28] No space left on device" in text
    assert f"the last good checkpoint is {tmp_path / 'run' / 'checkpoint' / 'step-2'};" in text
    assert steps_of(tmp_path / "run") == ["step-2"]
    monkeypatch.undo()
    assert train_here(toml) == 0
    assert curve(tmp_path / "run") == whole
