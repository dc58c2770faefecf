"""The hook for torchtitan's `--module nvium_titan --config NAME`: a function per shipped TOML file.

torchtitan looks up the name in this module and calls it: `quadrivium_768x24()` loads
`train_configs/quadrivium-768x24.toml`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nvium_titan.train.config import load_config
from nvium_titan.train.trainer import NviumTrainer

__all__ = ["config_files"]


def config_files() -> dict[str, Path]:
    """Return the shipped TOML files by their names here, with `_` for `-`.

    Raises:
        FileNotFoundError: If the installation has none.
    """
    package = Path(__file__).parent
    # In a wheel they are inside the package, in a checkout beside it.
    for folder in (package / "train_configs", package.parent / "train_configs"):
        if folder.is_dir():
            return {file.stem.replace("-", "_"): file for file in sorted(folder.glob("*.toml"))}
    raise FileNotFoundError(f"no train_configs in {package} or beside it; reinstall nvium-titan")


def __getattr__(name: str) -> Callable[[], NviumTrainer.Config]:
    if name.startswith("_") or name not in (files := config_files()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(load_config, NviumTrainer.Config(), files[name])


def __dir__() -> list[str]:
    return list(config_files())
