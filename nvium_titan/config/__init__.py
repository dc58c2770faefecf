"""Settings: TOML files and command-line flags onto typed, strict dataclasses."""

from nvium_titan.config.toml import load_config, save_config

__all__ = ["load_config", "save_config"]
