"""The N-vium model for torchtitan: `model_registry(flavor)` gives the spec of a named size."""

from __future__ import annotations

from torchtitan.protocols.model_spec import ModelSpec

from nvium_titan.core.flavors import flavor_shape
from nvium_titan.core.shape import ModelShape
from nvium_titan.train.config.tables import Trainable
from nvium_titan.train.model.build import build_model_config
from nvium_titan.train.model.parallelize import parallelize_junctions, parallelize_nvium
from nvium_titan.train.model.pipeline import pipeline_nvium
from nvium_titan.train.model.state_dict_adapter import NviumStateDictAdapter

__all__ = ["model_registry", "model_spec"]


def model_spec(shape: ModelShape, *, flavor: str, trainable: Trainable = "all") -> ModelSpec:
    """Return torchtitan's spec of a model.

    Args:
        shape: Its numbers.
        flavor: Its name in logs and checkpoints.
        trainable: What to train: everything, or the junctions alone.
    """
    return ModelSpec(
        name="nvium",
        flavor=flavor,
        model=build_model_config(shape),
        parallelize_fn=parallelize_nvium if trainable == "all" else parallelize_junctions,
        pipelining_fn=pipeline_nvium,
        post_optimizer_build_fn=None,
        state_dict_adapter=NviumStateDictAdapter,
    )


def model_registry(flavor: str) -> ModelSpec:
    """Return torchtitan's spec of a named size.

    Raises:
        ConfigError: If there is no such flavor.
    """
    return model_spec(flavor_shape(flavor), flavor=flavor)
