"""What subcommands share: loading a model, checking flags, a progress bar, figures as text."""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvium_titan.errors import NviumError, PromptError

if TYPE_CHECKING:
    from nvium_titan.convert.load import LoadedModel

_BAR_AFTER_S = 5.0
_DRAW_EVERY_S = 0.2


def load(path: Path, *, dtype: str | None, device: str) -> LoadedModel:
    """Return the model of a bundle or a checkpoint.

    Args:
        path: The bundle, a step folder, or a run's folder.
        dtype: Name of a torch type; None keeps the one it has.
        device: Where to put it.

    Raises:
        PromptError: If there is no such device.
    """
    import torch

    from nvium_titan.convert.load import load_model

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise PromptError(f"--device {device}: torch sees no CUDA GPU here; use cpu")
    return load_model(path, dtype=getattr(torch, dtype) if dtype else None, device=device)


def check_at_least(flags: object, error: type[NviumError], **least: int) -> None:
    """Check the numbers among a subcommand's flags; None, a default, passes.

    Args:
        flags: The subcommand.
        error: What to raise.
        **least: The least value of each flag, by the name of its field.

    Raises:
        NviumError: If one is too small.
    """
    for name, limit in least.items():
        value = getattr(flags, name)
        if value is not None and value < limit:
            raise error(f"--{name.replace('_', '-')} {value}: must be at least {limit}")


@contextmanager
def progress(title: str, *, total: int | None) -> Iterator[Callable[[int], None]]:
    """Give a function to call with how much is done; a bar appears on stderr after five seconds."""
    from rich.console import Console
    from rich.progress import Progress

    # Whoever reports draws: a thread that draws would disturb what is being measured.
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


def counted(report: Callable[[int], None]) -> Callable[[], None]:
    """Return a function that reports one more each time it is called."""
    done = itertools.count(1)
    return lambda: report(next(done))


def command_line() -> str:
    """Return the command that was typed, for a report."""
    return shlex.join(["nvium", *sys.argv[1:]])


def shown(value: Any) -> str:
    """Return a figure for people: two decimals, lists with spaces, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return " ".join(map(shown, value)) if isinstance(value, list) else str(value)
