"""What computes: the protocol between the runner and a forward, whatever its kernels.

Shapes: T rows, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nvium_titan.decode.noise import Noise
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.policy import ExitPolicy
from nvium_titan.decode.sampling import Draw, SamplingParams
from nvium_titan.decode.sequence import BufferPool, DecodeState, SequenceBuffers


class Group(NamedTuple):
    """The rows of one sequence in a block call: consecutive positions."""

    buffers: SequenceBuffers
    """The sequence's, written."""
    first: int
    """Position of the first row."""
    rows: int
    """How many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenJob:
    """How the tokens of a request are chosen; the same for all of them."""

    noise: Noise
    """The request's random numbers."""
    num_junctions: int
    """N_V - 1."""
    sampling: SamplingParams
    """How a token is drawn."""
    policy: ExitPolicy
    """Who decides at junctions."""
    with_log_probs: bool = False
    """Whether log p_k and log pi_k are wanted too."""

    def thresholds(self, position: int) -> list[float]:
        """Return the policy's thresholds for the token at a position.

        Raises:
            ValueError: If the policy breaks the contract of `ExitPolicy.thresholds`.
        """
        uniforms = [self.noise.uniform(position, k) for k in range(self.num_junctions)]
        thresholds = self.policy.thresholds(position=position, uniforms=uniforms)
        name = type(self.policy).__name__
        # Kernels read exactly as many as there are junctions.
        if len(thresholds) != self.num_junctions:
            raise ValueError(
                f"{name} gives {len(thresholds)} thresholds for {self.num_junctions} junctions"
            )
        if not self.policy.reads_router and not all(map(math.isinf, thresholds)):
            raise ValueError(
                f"{name} gives thresholds {thresholds}: without reads_router all must be infinite"
            )
        return thresholds

    def draw(self, position: int) -> Draw:
        """Return how the token at a position is drawn."""
        return Draw(self.noise, position, self.sampling)


class TokenRun(NamedTuple):
    """What running one token as a whole gives."""

    exit_index: int
    """Where it left; every block up to there is filled now."""
    token_id: int
    """The token that was drawn."""


class Forward(Protocol):
    """The forward pass in the pieces that decoding needs. Weights only; sequences own the rest."""

    params: DecoderParams
    """Dimensions, and the weights as far as the forward has no packed copy of its own."""
    state_dtype: torch.dtype
    """Type of the boundary states and of the KV cache."""
    buffer_pool: BufferPool | None
    """Where sequences that are decoded alone get their buffers; if None, each makes its own."""

    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        """Write the embeddings of `token_ids` at positions `first`, `first` + 1, ..."""

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Run the layers of one block on groups of rows, each of another sequence.

        Weights are read once for all rows. Row i of a group attends to slots 0 .. first + i of its
        own sequence; keys and values of earlier positions must be there. Writes the rows' keys and
        values, and the boundary state behind the block.

        Args:
            block_index: Which block, from 0.
            groups: At least one; together at most `LARGEST_PREFILL` rows.
        """

    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        """Return n_k = RMSNorm_k(h_k), which the router and the adapter share; a new tensor."""

    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
        """Return z_k, exit minus continue, shape (T,), at least float32.

        N-vium (arXiv:2605.13190), Sec. 4: w_k = sigmoid(z_k). The router is that of the authors'
        code, with a norm before its head; the two rows of the head are folded into their
        difference.
        """

    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
        """Return o_k = n_k + A_k(n_k), what the shared head reads at this exit."""

    def logits(self, o_TD: Tensor) -> Tensor:
        """Return W_lm o, shape (T, V), a new tensor; rows past `params.num_tokens` are padding."""

    def draw(self, logits_V: Tensor, draw: Draw) -> int:
        """Return the token of a draw, as `sampling.draw_token`. One host read."""

    def run_token(self, state: DecodeState, job: TokenJob, *, begins_next: bool) -> TokenRun | None:
        """Run all that the next token of a sequence needs at once, where that is cheaper.

        Args:
            state: The sequence; its buffers are written, its counts are not.
            job: How the token is chosen: drawn from the exit at which it leaves.
            begins_next: Whether the token will most likely be fed next and continued with the same
                job, so that the forward may begin with that.

        Returns:
            None, with nothing done, if this token must be run in pieces.
        """
