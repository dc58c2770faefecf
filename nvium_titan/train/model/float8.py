"""Matrix products of the layers in float8, by torchao."""

from __future__ import annotations

import importlib.util

from torchtitan.components.quantization import Float8LinearConverter

from nvium_titan.errors import ConfigError, DependencyError
from nvium_titan.train.config.tables import Float8Table
from nvium_titan.train.model.model import NviumModel


def use_float8(model: NviumModel.Config, table: Float8Table, *, is_compiled: bool) -> None:
    """Replace a model's linear layers, in place, by layers that multiply in float8.

    Weights, gradients and optimizer states keep their type, so checkpoints stay the same. A layer
    stays as it is if 16 does not divide both its dimensions.

    Args:
        model: The config tree, not built yet.
        table: Table `[float8]`.
        is_compiled: Whether the layers are compiled (table `[compile]`).

    Raises:
        DependencyError: If torchao is not installed.
        ConfigError: If this machine cannot multiply in float8 and is not told to emulate it.
    """
    if importlib.util.find_spec("torchao") is None:
        raise DependencyError(
            "[float8] enable=true needs torchao; fix: pip install 'nvium-titan[float8]'"
        )
    settings = Float8LinearConverter.Config(
        filter_fqns=list(table.skip), emulate=table.emulate, model_compile_enabled=is_compiled
    )
    try:
        converter = Float8LinearConverter(settings)
    except ValueError as error:
        raise ConfigError(
            "[float8] enable=true: this machine cannot multiply in float8 (NVIDIA SM89 or later "
            "and AMD MI300 or later can); set emulate = true, without [compile], to see what it "
            "would train"
        ) from error
    converter.convert(model)
