"""Settings: from TOML files and command-line flags to typed, strict dataclasses."""

from nvium_titan.train.config.toml import dump_config, load_config, save_config

__all__ = ["dump_config", "load_config", "save_config"]
