"""Decoding: exact early-exit generation and scoring on torch alone; torchtitan is not needed."""

from nvium_titan.decode.batch import BatchGeneration
from nvium_titan.decode.engine import Engine
from nvium_titan.decode.generation import Generation, GenerationRequest, GenerationResult
from nvium_titan.decode.noise import Noise
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.policy import (
    ExitPolicy,
    FixedExit,
    RouterGreedy,
    SampledRouter,
    ScriptedExits,
)
from nvium_titan.decode.results import BatchStats, DecodeStats, GeneratedToken, Scores
from nvium_titan.decode.sampling import SamplingParams
from nvium_titan.decode.schedule import LockStep, Periodic, Schedule, choose_schedule
from nvium_titan.decode.sequence import DecodeState
from nvium_titan.decode.text import TextGeneration, TextPieces, TextResult

__all__ = [
    "BatchGeneration",
    "BatchStats",
    "DecodeState",
    "DecodeStats",
    "DecoderParams",
    "Engine",
    "ExitPolicy",
    "FixedExit",
    "GeneratedToken",
    "Generation",
    "GenerationRequest",
    "GenerationResult",
    "LockStep",
    "Noise",
    "Periodic",
    "RouterGreedy",
    "SampledRouter",
    "SamplingParams",
    "Schedule",
    "Scores",
    "ScriptedExits",
    "TextGeneration",
    "TextPieces",
    "TextResult",
    "choose_schedule",
]
