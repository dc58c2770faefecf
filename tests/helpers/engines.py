"""Engines over every forward there is, graphs imitated where there is no GPU."""

from __future__ import annotations

from typing import Any

from nvium_titan.decode import DecoderParams, Engine
from tests.gpu.imitation import graph_engine


def make_engine(params: DecoderParams, *, kernels: str = "auto", **options: Any) -> Engine:
    """Return an engine; "graph" means imitated graphs on the CPU."""
    if kernels == "graph":
        return graph_engine(params, **options)
    return Engine(params, kernels=kernels, **options)  # type: ignore[arg-type]
