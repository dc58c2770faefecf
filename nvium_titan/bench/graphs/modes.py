"""The ways to decode in graphs that are checked and measured."""

from __future__ import annotations

import copy
from typing import Literal

from nvium_titan.decode import Engine
from nvium_titan.decode.forward.graphs.model import GraphModel

Mode = Literal["blocks", "tokens", "ahead"]
"""A graph per block with a host read at every junction; a graph per token; the same, the next token
launched before this one is read, as engines do."""


def graphs_of(engine: Engine) -> GraphModel:
    """Return the model of an engine that decodes in graphs."""
    model = engine.runner.model
    assert isinstance(model, GraphModel), "an engine with kernels='graph'"
    return model


def in_mode(engine: Engine, mode: Mode) -> Engine:
    """Return the engine decoding in a mode; weights, buffers, graphs and counters are shared."""
    if mode == "ahead":
        return engine
    other = copy.copy(engine)
    other.runner = copy.copy(engine.runner)
    other.runner.model = copy.copy(engine.runner.model)
    other.runner.model.looks_ahead = False
    if mode == "blocks":
        other.runner.model.token_runner = None
    return other


def available_modes(engine: Engine) -> list[Mode]:
    """Return the modes that the engine's device and torch can do."""
    return ["blocks", "tokens", "ahead"] if engine.runner.runs_tokens else ["blocks"]
