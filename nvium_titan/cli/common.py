"""What several subcommands share: loading a model, a progress bar, figures as text."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvium_titan.errors import PromptError

if TYPE_CHECKING:
    from nvium_titan.convert.load import LoadedModel

_BAR_AFTER_S = 5.0
_DRAW_EVERY_S = 0.2


def load(path: Path, *, dtype: str | None, device: str) -> LoadedModel:
    """Return a bundle's or a checkpoint's model; `dtype` names a torch type, or is the bundle's.

    Raises:
        PromptError: If there is no such device.
    """
    import torch

    from nvium_titan.convert.load import load_model

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise PromptError(f"--device {device}: torch sees no CUDA GPU here; use cpu")
    return load_model(path, dtype=getattr(torch, dtype) if dtype else None, device=device)


@contextmanager
def progress(title: str, *, total: int | None) -> Iterator[Callable[[int], None]]:
    """Give a function that takes what is done; a bar appears on stderr after five seconds."""
    from rich.console import Console
    from rich.progress import Progress

    # Drawn by whoever reports: a thread that draws would run into what is being measured.
    bar = Progress(console=Console(stderr=True), auto_refresh=False)
    task = bar.add_task(title, total=total)
    start = drawn = time.monotonic()

    def report(done: int) -> None:
        nonlocal drawn
        bar.update(task, completed=done)
        now = time.monotonic()
        if not bar.live.is_started and now - start > _BAR_AFTER_S:
            bar.start()
        if bar.live.is_started and now - drawn > _DRAW_EVERY_S:
            bar.refresh()
            drawn = now

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def command_line() -> str:
    """Return the command as it was typed, for a report."""
    return shlex.join(["nvium", *sys.argv[1:]])


def shown(value: Any) -> str:
    """Return a figure for people: two decimals, a list with spaces, "-" where there is none."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return " ".join(map(shown, value)) if isinstance(value, list) else str(value)
