"""Settings: TOML files and command-line flags onto typed, strict dataclasses."""
