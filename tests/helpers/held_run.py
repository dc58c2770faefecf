"""`nvium train` whose saving stops half-way and waits to be killed.

The variable HOLD says where, as `RANK STEP before` or `RANK STEP after`: that rank, saving that
step, before or after it has written its own file. The other ranks write theirs; no `.metadata` is
written, for which every rank must be done.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tests.helpers import HANG_S

HELD_S = 2 * HANG_S
"""Longer than any test waits, shorter than for ever: nothing is left over if a test dies."""


def main() -> int:
    """Put the stop into the writer of checkpoints, then train."""
    from nvium_titan.train.compat import use_cpu_without_accelerator

    use_cpu_without_accelerator()
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from nvium_titan.train import launch as train

    rank, step, place = os.environ["HOLD"].split()
    write_data = FileSystemWriter.write_data

    def write_and_hold(self: Any, *args: Any) -> Any:
        is_held = self.path.name == f"step-{step}" and os.environ["RANK"] == rank
        if is_held and place == "before":
            time.sleep(HELD_S)
        written = write_data(self, *args)
        if is_held and place == "after":
            time.sleep(HELD_S)
        return written

    FileSystemWriter.write_data = write_and_hold  # type: ignore[method-assign]
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
