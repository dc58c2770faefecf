"""The step folders of a run: which there are, which are whole, which is the newest.

A checkpoint is a folder step-N in the format of torch.distributed.checkpoint. Its `.metadata` is
written last and renamed into place, so a folder without it is one whose saving was cut off.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from nvium_titan.errors import CheckpointError

logger = logging.getLogger(__name__)

METADATA = ".metadata"
"""The file that a finished checkpoint has: it says what lies where in the others."""


def step_folders(folder: Path | str) -> list[Path]:
    """Return the step-N folders in a folder, finished or not, the oldest first."""
    found = [path for path in Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=step_of)


def finished_folders(folder: Path | str) -> list[Path]:
    """Return the step-N folders in a folder whose saving came to its end, the oldest first."""
    return [path for path in step_folders(folder) if is_finished(path)]


def is_finished(step_folder: Path) -> bool:
    """Return whether the saving of a checkpoint came to its end."""
    return (step_folder / METADATA).is_file()


def step_of(step_folder: Path) -> int:
    """Return N of a folder named step-N."""
    return int(step_folder.name.removeprefix("step-"))


def read_metadata(step_folder: Path) -> Metadata:
    """Return what a checkpoint says of its entries.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        return FileSystemReader(step_folder).read_metadata()
    except Exception as error:  # unpickling raises anything
        raise CheckpointError(
            f"{step_folder / METADATA}: cannot be read ({error}): the checkpoint is damaged; "
            "give another step"
        ) from error


def fault_in(step_folder: Path) -> str:
    """Return what is wrong with the files of a finished checkpoint, empty if nothing is.

    Only sizes are compared, so this is quick whatever the size.
    """
    try:
        places = read_metadata(step_folder).storage_data.values()
    except CheckpointError as error:
        return f"{METADATA} cannot be read ({error.__cause__})"
    sizes: dict[str, int] = defaultdict(int)
    for place in places:
        sizes[place.relative_path] = max(sizes[place.relative_path], place.offset + place.length)
    for name, size in sorted(sizes.items()):
        file = step_folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size < size:
            return f"{name} is cut off: {file.stat().st_size} bytes of at least {size}"
    return ""


def describe(folder: Path | str, *, but: Path | None = None) -> str:
    """Return which good checkpoints a folder holds, for a message.

    Args:
        folder: A checkpoint folder, or the folder of a run.
        but: A step folder to leave out.
    """
    finished = [*finished_folders(folder), *finished_folders(Path(folder) / "checkpoint")]
    good = [path for path in finished if path != but and not fault_in(path)]
    return f"good checkpoints: {', '.join(map(str, good))}" if good else "no good checkpoint found"


def find_step_folder(path: Path | str) -> Path:
    """Return the step folder that a path names.

    Args:
        path: A step-N folder, or a folder that holds some (a run's folder or its checkpoint
            folder): then the newest finished one, which is logged.

    Raises:
        CheckpointError: If there is none; the message says what was looked for and found.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a step-N folder or a run's folder")
    if is_finished(path):
        return path
    if re.fullmatch(r"step-\d+", path.name):
        raise CheckpointError(
            f"{path}: no {METADATA} file in it: not a checkpoint, or its saving was cut off; "
            f"give another step ({describe(path.parent)})"
        )
    folders = [*finished_folders(path), *finished_folders(path / "checkpoint")]
    if not folders:
        raise CheckpointError(
            f"{path}: no checkpoint in it: looked for .metadata, step-N/.metadata and "
            "checkpoint/step-N/.metadata"
        )
    newest = max(folders, key=step_of)
    logger.info("%s: using its newest checkpoint, %s", path, newest)
    return newest
