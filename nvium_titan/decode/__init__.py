"""Decoding: exact early-exit generation and scoring on torch alone; torchtitan is not needed."""

from nvium_titan.decode.engine import (
    DecodeState,
    DecodeStats,
    Engine,
    GeneratedToken,
    Generation,
    GenerationResult,
)
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.policy import (
    ExitPolicy,
    FixedExit,
    RouterGreedy,
    SampledRouter,
    ScriptedExits,
)
from nvium_titan.decode.sampling import Noise, SamplingParams

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
    "ScriptedExits",
]
