"""torchtitan's checkpoint manager, made safe against incomplete, damaged and foreign files."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager

from nvium_titan.convert.step_folders import (
    METADATA,
    fault_in,
    finished_folders,
    is_finished,
    read_metadata,
    step_folders,
    step_of,
)
from nvium_titan.errors import CheckpointError, ConfigError, NviumError, SaveError

logger = logging.getLogger(__name__)


class NviumCheckpointManager(CheckpointManager):
    """Loads only complete checkpoints, and never deletes the last good one.

    A newest folder that was not saved to the end is skipped with a warning. A damaged or foreign
    checkpoint ends the run before training; the message names a good one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's settings; by default the last step keeps its optimizer state."""

        initial_load_model_only: bool = True
        """Whether an initial checkpoint restores only the model's weights."""

        last_save_model_only: bool = False
        """Whether the final checkpoint holds the model only: smaller, but no run can resume."""

        def __post_init__(self) -> None:
            """Check the settings.

            Raises:
                ConfigError: If the initial checkpoint has no absolute path, or the folder is a URL.
            """
            path = self.initial_load_path
            if path and not path.startswith("/") and "://" not in path:
                raise ConfigError(
                    f"[checkpoint] initial_load_path={path!r}: must be an absolute path, as "
                    f"{str(Path(path).resolve())!r}"
                )
            if "://" in self.folder:
                raise ConfigError(
                    f"[checkpoint] folder={self.folder!r}: must be on a local or mounted disk"
                )
            if self.initial_load_in_hf and not path:
                raise ConfigError(
                    "[checkpoint] initial_load_in_hf=true: initial_load_path must name the bundle"
                )
            # torchtitan would warn that this default does nothing without a path.
            wanted = self.initial_load_model_only
            self.initial_load_model_only = wanted and self.initial_load_path is not None
            CheckpointManager.Config.__post_init__(self)
            self.initial_load_model_only = wanted

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        is_pinned = config.enable and config.async_mode == "async_with_pinned_mem"
        if is_pinned and not torch.cuda.is_available():
            raise ConfigError(
                '[checkpoint] async_mode="async_with_pinned_mem" needs a CUDA device: use "async"'
            )

    def newest(self) -> Path | None:
        """Return the newest finished checkpoint of this run, if there is one."""
        found = finished_folders(self.folder) if self.enable else []
        return found[-1] if found else None

    def _load(self, step: int = -1) -> bool:
        # A shared disk may show each rank another state; what rank 0 sees counts.
        chosen: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                chosen[0] = self._choose(step)
            except CheckpointError as error:
                chosen[1] = error
        dist.broadcast_object_list(chosen, src=0)
        if chosen[1] is not None:
            raise chosen[1]
        return bool(super()._load(-1 if chosen[0] is None else chosen[0]))

    def _find_load_step(self, folder: str = "") -> int:
        # torchtitan asks only where rank 0 chose no step.
        return -1

    def _choose(self, step: int) -> int | None:
        """Return the step to resume from, None to start anew.

        Raises:
            CheckpointError: If that step is damaged or holds weights alone.
        """
        folders = step_folders(self.folder)
        target: Path | None = Path(self.folder) / f"step-{step}"
        if step < 0:
            # A folder in Hugging Face's format is finished too, but no run resumes from it.
            usable = [path for path in folders if is_finished(path) or _holds_weights_only(path)]
            target = usable[-1] if usable else None
            for path in folders[len(folders) if target is None else folders.index(target) + 1 :]:
                logger.warning(
                    "%s: no %s in it, so it was not saved to the end; skipped, %s",
                    path, METADATA, f"resuming from {target}" if target else "starting anew",
                )  # fmt: skip
        if target is None:
            return None
        if _holds_weights_only(target):
            fault = (
                "holds only the model's weights, so the run cannot resume from it (it was saved "
                "with [checkpoint] last_save_model_only); to train from these weights, set a new "
                "dump_folder and initial_load_path"
            )
        else:
            fault = fault_in(target)
        if fault:
            raise CheckpointError(f"{target}: {fault}; {self._offer(target)}")
        return step_of(target)

    def _offer(self, bad: Path) -> str:
        if bad.parent != Path(self.folder):
            return "give another [checkpoint] initial_load_path"
        good = [path for path in finished_folders(self.folder) if path != bad]
        good = [path for path in good if not fault_in(path) and not _holds_weights_only(path)]
        if not good:
            return f"there is no good checkpoint; to start anew, remove {bad}"
        return f"to resume from the last good one, add --checkpoint.load_step {step_of(good[-1])}"

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, **how: Any) -> None:
        """Load a checkpoint.

        Args:
            state_dict: What to fill.
            checkpoint_id: Its folder.
            how: torchtitan's `from_hf` and `from_quantized`.

        Raises:
            CheckpointError: If an entry is missing, has another shape or cannot be read.
        """
        try:
            super().dcp_load(state_dict, checkpoint_id, **how)
        except CheckpointException as error:
            cause = _cause(error)
            hint = (
                "if [model] or [nvium] changed since it was saved, undo that or set a new "
                "dump_folder; otherwise "
            )
            if "dataloader.rank_" in str(cause):
                hint = (
                    "a stream from the hub is divided among the ranks, so it resumes on as many "
                    "as before; --checkpoint.exclude_from_loading dataloader starts it anew; "
                )
            raise CheckpointError(
                f"{checkpoint_id}: does not fit this run ({cause}); {hint}"
                f"{self._offer(Path(checkpoint_id))}"
            ) from error

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, **how: Any) -> Any:
        """Save a checkpoint.

        Args:
            state_dict: What to save.
            checkpoint_id: Its folder.
            how: torchtitan's `async_mode`, `enable_garbage_collection` and `to_hf`.

        Raises:
            SaveError: If it cannot be written.
        """
        self._saving = Path(checkpoint_id)
        if dist.get_rank() == 0:
            # Until the new files are complete, the old ones must not pass for a checkpoint.
            (self._saving / METADATA).unlink(missing_ok=True)
        try:
            return super().dcp_save(state_dict, checkpoint_id, **how)
        except CheckpointException as error:
            raise self._save_error(error) from error

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = bool(super()._save(curr_step, last_step))
        if saved and last_step:
            self._purge_stale_checkpoints()
        return saved

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        except CheckpointException as error:
            self.save_future = None
            raise self._save_error(error) from error

    def _save_error(self, error: CheckpointException) -> NviumError:
        free = shutil.disk_usage(self.folder).free if Path(self.folder).exists() else 0
        if dist.get_rank() == 0:
            shutil.rmtree(self._saving, ignore_errors=True)
        newest = self.newest()
        kept = f"the last good checkpoint is {newest}" if newest else "no checkpoint was kept"
        return SaveError(
            f"{self._saving}: saving failed ({_cause(error)}; {free / 1e9:.3f} GB free on the "
            f"disk); {kept}; make room, then run the same command again to resume from there"
        )

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()

    def _purge_stale_checkpoints(self) -> None:
        if not self._should_purge():
            return
        finished = finished_folders(self.folder)
        if not finished:
            return
        # Newer folders without metadata are being written; older ones never were to the end.
        kept = finished[-self.keep_latest_k :]
        for path in step_folders(self.folder):
            if path not in kept and step_of(path) < step_of(finished[-1]):
                # A folder that is half deleted must not pass for a checkpoint.
                (path / METADATA).unlink(missing_ok=True)
                self.purge_queue.put(str(path))


def _holds_weights_only(step_folder: Path) -> bool:
    if not is_finished(step_folder):
        return any(step_folder.glob("*.safetensors"))
    if step_of(step_folder) == 0:  # a seed checkpoint, from which nothing but weights is loaded
        return False
    try:
        return "train_state.step" not in read_metadata(step_folder).state_dict_metadata
    except CheckpointError:
        return False


def _cause(error: CheckpointException) -> str:
    first, _ = next(iter(error.failures.values()))
    return f"{type(first).__name__}: {first}"
