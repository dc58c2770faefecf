"""The checkpoint manager: torchtitan's, with the defaults of a run that may be extended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchtitan.components.checkpointer import CheckpointManager

from nvium_titan.errors import ConfigError


class NviumCheckpointManager(CheckpointManager):
    """torchtitan's DCP checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's settings; the last step keeps its optimizer state by default."""

        initial_load_model_only: bool = True
        """Whether an initial checkpoint restores only the model's weights."""

        last_save_model_only: bool = False
        """Whether the final checkpoint holds the model only: smaller, but no run can go on."""

        def __post_init__(self) -> None:
            """Check the settings, without a warning about a default that does nothing.

            Raises:
                ConfigError: If the initial checkpoint has no absolute path.
            """
            path = self.initial_load_path
            if path and not path.startswith("/") and "://" not in path:
                raise ConfigError(
                    f"[checkpoint] initial_load_path={path!r}: must be an absolute path, as "
                    f"{str(Path(path).resolve())!r}"
                )
            if self.initial_load_in_hf and not path:
                raise ConfigError(
                    "[checkpoint] initial_load_in_hf=true: initial_load_path must name the bundle"
                )
            wanted = self.initial_load_model_only
            self.initial_load_model_only = wanted and self.initial_load_path is not None
            CheckpointManager.Config.__post_init__(self)
            self.initial_load_model_only = wanted
