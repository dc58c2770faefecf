"""Decoding: exact early-exit generation and scoring on torch alone; torchtitan is not needed."""

from nvium_titan.decode.engine import Engine
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.policy import (
    ExitPolicy,
    FixedExit,
    RouterGreedy,
    SampledRouter,
    ScriptedExits,
)
from nvium_titan.decode.results import (
    DecodeStats,
    GeneratedToken,
    Generation,
    GenerationResult,
    Scores,
)
from nvium_titan.decode.runner import DecodeState
from nvium_titan.decode.sampling import Noise, SamplingParams
from nvium_titan.decode.text import TextGeneration, TextResult

__all__ = [
    "DecodeState",
    "DecodeStats",
    "DecoderParams",
    "Engine",
    "ExitPolicy",
    "FixedExit",
    "GeneratedToken",
    "Generation",
    "GenerationResult",
    "Noise",
    "RouterGreedy",
    "SampledRouter",
    "SamplingParams",
    "Scores",
    "ScriptedExits",
    "TextGeneration",
    "TextResult",
]
