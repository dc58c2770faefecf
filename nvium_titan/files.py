"""Replacing files safely."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file that replaces `path` once it is on the disk; `path` is never half written."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
