"""What runs blocks: the interface between the runner and a model, whatever its kernels.

Shapes: T rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nvium_titan.decode.deferred import FilledCounts
from nvium_titan.decode.kv_cache import BufferPool, SequenceBuffers
from nvium_titan.decode.needs import NeedToken
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.sampling import Sampler


class Group(NamedTuple):
    """The rows of one sequence in a block call: consecutive positions."""

    buffers: SequenceBuffers
    """The sequence, written."""
    first: int
    """Position of the first row."""
    rows: int
    """Rows to run, padding included."""
    columns: int
    """Slots to attend over, at least first + rows; what a row must not see is masked."""


class TokenRun(NamedTuple):
    """What running one token as a whole gives."""

    exit_index: int
    """Where it left."""
    logits_V: Tensor | None
    """The logits of that exit, for the asker to draw from; None if the model has drawn."""
    token_id: int | None
    """The token, if the model has drawn it."""


class TokenRunner(Protocol):
    """Runs all that one token needs at once, where that is cheaper than in pieces."""

    def __call__(
        self,
        buffers: SequenceBuffers,
        counts: FilledCounts,
        need: NeedToken,
    ) -> TokenRun | None:
        """Run blocks and junctions until the token leaves, its exit, the head, and the draw.

        Args:
            buffers: The sequence, written.
            counts: Its counts, written.
            need: What is wanted.

        Returns:
            None, with nothing done, if this token must be run in pieces.
        """


class BlockModel(Protocol):
    """The forward pass in the pieces that decoding needs. Weights only; sequences own the rest."""

    params: DecoderParams
    """Dimensions, and the weights as far as the model has no packed copy of its own."""
    state_dtype: torch.dtype
    """Type of the boundary states and of the KV cache."""
    sampler: Sampler | None
    """What draws tokens from its logits; torch if None."""
    token_runner: TokenRunner | None
    """What runs a token as a whole; if None, it is run in the pieces below."""
    looks_ahead: bool
    """Whether running a token may begin with the next, if told what that needs."""
    buffer_pool: BufferPool | None
    """Where sequences that are decoded alone get their buffers; if None, each makes its own."""

    def embed(self, buffers: SequenceBuffers, token_ids: Sequence[int], *, first: int) -> None:
        """Write the embeddings of `token_ids` at positions `first`, `first` + 1, ..."""

    def run_block(self, block_index: int, groups: Sequence[Group]) -> None:
        """Run the layers of one block on groups of rows, each of another sequence.

        Weights are read once for all rows. Row i of a group attends to slots 0 .. first + i of its
        own sequence; keys and values of earlier positions must be there. Writes the rows' keys and
        values, and the boundary state behind the block. Rows beyond a sequence (padding) write
        garbage into slots that are overwritten before they are read.

        Args:
            block_index: Which block, from 0.
            groups: At least one; together at most as many rows as the first one's work space has.
        """

    def exit_norm(self, exit_index: int, h_TD: Tensor) -> Tensor:
        """Return n_k = RMSNorm_k(h_k), which the router and the adapter share; a new tensor."""

    def router_logit(self, junction_index: int, n_TD: Tensor) -> Tensor:
        """Return z_k, exit minus continue, shape (T,), at least float32."""

    def exit_state(self, exit_index: int, n_TD: Tensor) -> Tensor:
        """Return o_k = n_k + A_k(n_k), what the shared head reads at this exit."""

    def logits(self, o_TD: Tensor) -> Tensor:
        """Return W_lm o, shape (T, V); a new tensor."""
