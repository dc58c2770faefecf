"""What the checks of decoding in graphs decode, and in which ways."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from nvium_titan.bench.exits import exit_script
from nvium_titan.decode import Engine, ExitPolicy, ScriptedExits
from nvium_titan.decode.graph.model import GraphModel

Mode = Literal["blocks", "tokens", "ahead"]
"""A graph per block with a host read at every junction; a graph per token; the same, the next token
launched before this one is read, as engines do."""


class Workload(NamedTuple):
    """How much to decode."""

    prompt_tokens: int
    """Tokens of a prompt."""
    new_tokens: int
    """Tokens to make."""
    num_pairs: int
    """Rounds in which every system runs once."""
    seed: int
    """Decides weights, prompts, exits and tokens."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence."""
        return self.prompt_tokens + self.new_tokens

    def prompts(self, num_tokens: int) -> list[list[int]]:
        """Return a prompt of random ids below `num_tokens` for each pair."""
        rng = random.Random(self.seed)
        return [
            [rng.randrange(num_tokens) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_pairs)
        ]

    def policies(self, shares: Sequence[float], *, batch: int = 1) -> list[ExitPolicy]:
        """Return scripts of exits with these shares behind the first token; routers are run."""
        return [
            ScriptedExits(
                exit_indices=exit_script(shares, self.new_tokens - 1, seed=self.seed + row),
                first_position=self.prompt_tokens + 1,
                runs_router=True,
            )
            for row in range(batch)
        ]


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


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
