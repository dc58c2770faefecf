"""What a benchmark measures: anything that continues a prompt by a given number of tokens.

No torch here: an engine of somebody else needs only this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One generation: what it made and how long it took."""

    num_new_tokens: int
    """Tokens made, at least 1."""
    ttft_s: float
    """Seconds from the call to the first token: the prompt and one choice."""
    decode_s: float
    """Seconds for all tokens after the first."""
    num_sequences: int = 1
    """Sequences decoded at once; the first token of each is part of `ttft_s`."""

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token after the first, of which there must be one."""
        return 1000 * self.decode_s / (self.num_new_tokens - self.num_sequences)


class System(Protocol):
    """An engine with a model in it, ready to run."""

    name: str
    """For the table: "N-vium", "dense", or the package of a peer."""
    dtype: str
    """Type of its weights, such as "float32", "bfloat16", "int8"."""
    version: str
    """Of the package that computes."""
    threads: int
    """CPU threads it computes with."""

    def run(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Timing:
        """Sample exactly `num_new_tokens` tokens after the prompt; an end token ends nothing."""

    def close(self) -> None:
        """Give back memory and files; nothing may be run afterwards."""
