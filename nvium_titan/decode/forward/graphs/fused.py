"""A junction and a draw for the inside of a graph: a few Triton kernels each, or torch operations.

    junction(states_SD, position_1, threshold)      n, the router logit, does the token leave
    draw_in_graph(logits_V, key_1, filters)         the token; with top-k, top-p, min-p in torch

The torch operations are the oracle of the kernels, and what runs wherever Triton does not: a
junction is about a dozen of them where three kernels do, a draw about thirty where two do. Both
read positions, thresholds, key and temperature on the device, give tensors of fixed shape, and
read nothing on the host. The first run compiles the kernels, so it must not be inside a capture.

Shapes: S slots, D width, R router width, V vocabulary, B blocks of it; 1 is one row or number.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from nvium_titan.decode.forward.torch import TorchForward
from nvium_titan.decode.noise import gumbel_of_keys
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.sampling import Filters, choose

_ROWS_PER_PROGRAM = 2
"""Outputs of a router's layer that one program makes: enough programs for every multiprocessor."""
_IDS_PER_PROGRAM = 512
"""Tokens whose noise one program makes."""


class JunctionResult(NamedTuple):
    """What a junction says about one token; new tensors."""

    n_1D: Tensor
    """RMSNorm_k(h_k), which the adapter of the exit takes."""
    router_logit_1: Tensor
    """z_k, exit minus continue, shape (1,), at least float32."""
    leaves: Tensor
    """Whether the token leaves here, bool, shape (): a branch's condition."""
    goes_on: Tensor
    """The opposite, for the other branch."""


class Junction(Protocol):
    """The junction behind a block."""

    def __call__(self, states_SD: Tensor, position_1: Tensor, threshold: Tensor) -> JunctionResult:
        """Return n, the router logit, and whether the token leaves. No host read.

        N-vium (arXiv:2605.13190), Sec. 4: w_k = sigmoid(z_k), z_k from the router behind n_k. The
        router is the authors' code's, as in `TorchForward.router_logit`.

        Args:
            states_SD: The boundary state behind the block, contiguous.
            position_1: Which row of it, int64, on the device.
            threshold: The router logit above which the token leaves, float64, shape (); at -inf it
                leaves and at +inf it goes on, whatever the router says (`ExitPolicy.thresholds`).
        """


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton can be used on a device."""
    return device.type == "cuda" and find_spec("triton") is not None


def build_junction(model: TorchForward, junction_index: int) -> Junction:
    """Return a junction: Triton kernels where they can run, torch operations elsewhere."""
    if has_kernels(model.params.device):
        return TritonJunction(model.params, junction_index)
    return TorchJunction(model, junction_index)


class TorchJunction(Junction):
    """A junction in torch operations: to the bit what the engine gives without graphs."""

    def __init__(self, model: TorchForward, junction_index: int) -> None:
        self._model = model
        self._junction_index = junction_index

    @override
    def __call__(self, states_SD: Tensor, position_1: Tensor, threshold: Tensor) -> JunctionResult:
        h_1D = states_SD.index_select(0, position_1)
        n_1D = self._model.exit_norm(self._junction_index, h_1D)
        router_logit_1 = self._model.router_logit(self._junction_index, n_1D)
        leaves = (router_logit_1[0] > threshold) | threshold.isneginf()
        return JunctionResult(n_1D, router_logit_1, leaves, ~leaves)


class TritonJunction(Junction):
    """A junction in three kernels: norm and first layer; second layer; norm, head, comparison.

    Sums and what lies between the layers are float32 (float64 in a float64 model), where the torch
    operations of a bfloat16 model round to bfloat16.
    """

    def __init__(self, params: DecoderParams, junction_index: int) -> None:
        """Pack the router: each output's weights side by side, norm gain times head in one row.

        Args:
            params: The weights.
            junction_index: Which junction, from 0.
        """
        weights = params.exits[junction_index]
        router = weights.router
        assert router is not None, "the last exit has no router"
        self._eps = params.shape.norm_eps
        self._gain_D = weights.norm_D
        self._fc1_RD = router.fc1.weight_IO.t().contiguous()
        self._fc1_bias_R = router.fc1_bias_R
        self._fc2_DR = router.fc2.weight_IO.t().contiguous()
        self._fc2_bias_D = router.fc2_bias_D
        self._leave_D = router.norm_D * router.leave_D
        self._leave_bias_1 = router.leave_bias

    @override
    def __call__(self, states_SD: Tensor, position_1: Tensor, threshold: Tensor) -> JunctionResult:
        # Triton is there only with torch's CUDA builds.
        import triton

        from nvium_titan.decode.forward.graphs import triton_kernels as kernels

        rank, width = self._fc1_RD.shape
        dtype, device = self._leave_D.dtype, states_SD.device
        block_width, block_rank = triton.next_power_of_2(width), triton.next_power_of_2(rank)
        num_parts = triton.cdiv(width, _ROWS_PER_PROGRAM)
        n_1D = torch.empty_like(states_SD[:1])
        hidden_R = torch.empty(rank, dtype=dtype, device=device)
        parts_2B = torch.empty(2, num_parts, dtype=dtype, device=device)
        router_logit_1 = torch.empty(1, dtype=dtype, device=device)
        leaves, goes_on = torch.empty(2, dtype=torch.bool, device=device).unbind()
        kernels.norm_and_first_layer[triton.cdiv(rank, _ROWS_PER_PROGRAM),](
            states_SD, position_1, self._gain_D, self._fc1_RD, self._fc1_bias_R, n_1D, hidden_R,
            WIDTH=width, RANK=rank, EPS=self._eps,
            BLOCK_WIDTH=block_width, ROWS=_ROWS_PER_PROGRAM,
        )  # fmt: skip
        kernels.second_layer[num_parts,](
            hidden_R, self._fc2_DR, self._fc2_bias_D, self._leave_D, parts_2B,
            WIDTH=width, RANK=rank, BLOCK_RANK=block_rank, ROWS=_ROWS_PER_PROGRAM,
        )  # fmt: skip
        kernels.decide[1,](
            parts_2B, self._leave_bias_1, threshold, router_logit_1, leaves, goes_on,
            WIDTH=width, EPS=self._eps, NUM_PARTS=num_parts,
            BLOCK_PARTS=triton.next_power_of_2(num_parts),
        )  # fmt: skip
        return JunctionResult(n_1D, router_logit_1, leaves, goes_on)


def draw_in_graph(logits_V: Tensor, key_1: Tensor, filters: Filters) -> Tensor:
    """Return the token that `sampling.draw_token` gives for these logits. No host read.

    Args:
        logits_V: Logits of the tokens that may be sampled, shape (V,), contiguous.
        key_1: `Noise.token_key`, as int64, shape (1,).
        filters: The law F as tensors of shape (1,), float64 or int64; temperature 0 is the argmax.

    Returns:
        Shape (1,), int64, below V whatever the logits are.
    """
    has_filter = any(limit is not None for limit in filters[1:])
    temperature_1 = filters.temperature
    assert isinstance(temperature_1, Tensor), "a graph bakes numbers in"
    if has_kernels(logits_V.device) and not has_filter:
        return draw_in_triton(logits_V, key_1, temperature_1)
    is_greedy_1 = temperature_1 == 0
    gumbel_V = gumbel_of_keys(key_1, len(logits_V))[0].masked_fill(is_greedy_1, 0.0)
    filters = filters._replace(temperature=temperature_1.masked_fill(is_greedy_1, 1.0))
    return choose(logits_V, gumbel_V, filters).view(1)


def draw_in_triton(logits_V: Tensor, key_1: Tensor, temperature_1: Tensor) -> Tensor:
    """Return the token in two kernels: the best of each block of ids, the best of those.

    The same up to the rounding of float64: a block knows its own largest logit only, and the
    difference to the largest of all is taken off at the end.
    """
    # Triton is there only with torch's CUDA builds.
    import triton

    from nvium_titan.decode.forward.graphs import triton_kernels as kernels

    num_tokens, device = len(logits_V), logits_V.device
    num_blocks = triton.cdiv(num_tokens, _IDS_PER_PROGRAM)
    top_B, score_B = torch.empty(2, num_blocks, dtype=torch.float64, device=device).unbind()
    id_B = torch.empty(num_blocks, dtype=torch.int64, device=device)
    token_1 = torch.empty(1, dtype=torch.int64, device=device)
    kernels.draw_in_blocks[num_blocks,](
        logits_V, key_1, temperature_1, top_B, score_B, id_B, num_tokens, BLOCK=_IDS_PER_PROGRAM
    )
    kernels.best_of_blocks[1,](
        top_B, score_B, id_B, temperature_1, token_1, num_tokens, num_blocks,
        BLOCK=triton.next_power_of_2(num_blocks),
    )  # fmt: skip
    return token_1
