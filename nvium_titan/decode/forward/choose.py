"""Which kernels run a model: torch's own, graphs of them, or the native ones for the CPU."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from nvium_titan.decode.forward.base import BlockModel
from nvium_titan.decode.forward.graphs.capture import CudaGraphs, FakeGraphs
from nvium_titan.decode.forward.graphs.model import GraphModel
from nvium_titan.decode.forward.native.model import NativeModel
from nvium_titan.decode.forward.torch import DecoderModel
from nvium_titan.decode.params import DecoderParams
from nvium_titan.decode.runner import Shapes
from nvium_titan.errors import DependencyError

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "torch", "native", "graph"]


def takes_graphs(params: DecoderParams, kernels: Kernels) -> bool:
    """Return whether `build_model` captures graphs, which means shapes in buckets."""
    return kernels == "graph" or (kernels == "auto" and params.device.type == "cuda")


def build_model(
    params: DecoderParams, *, kernels: Kernels, num_slots: int, shapes: Shapes
) -> BlockModel:
    """Return the model that runs blocks.

    The native kernels are for the CPU, float32, bfloat16 and int8, in exact shapes. They cost no
    more for a piggyback group of 2 to 6 rows than for one, and a row's result is the same to the
    bit in every group and batch. They are compiled at first use, which takes seconds.

    Graphs are for CUDA: one launch for a token, see `decode.forward.graphs`. Batches run in torch's
    own operations. On the CPU they are imitated, slowly, to test what a graph may and may not do.

    Args:
        params: The weights.
        kernels: "auto" takes graphs on CUDA and the native ones where they can run, and says so
            where only a compiler is missing; "graph" and "native" insist; "torch" is their slow
            twin, and the one for every other device, type and shape.
        num_slots: Largest number of slots that any sequence will have.
        shapes: See `Engine`.

    Raises:
        DependencyError: If kernels are asked for and cannot be had; the message says why.
    """
    if takes_graphs(params, kernels):
        if params.device.type not in ("cuda", "cpu"):
            raise DependencyError(
                f"kernels='graph' run on CUDA, or imitated on the CPU, not on "
                f"{params.device.type}; use kernels='auto'"
            )
        is_cuda = params.device.type == "cuda"
        backend = CudaGraphs(params.device) if is_cuda else FakeGraphs()
        return GraphModel(params, num_slots=num_slots, backend=backend, compiles=is_cuda)
    is_possible = (
        params.device.type == "cpu"
        and params.dtype in (torch.float32, torch.bfloat16)
        and shapes == "exact"
    )
    if kernels == "native" and not is_possible:
        raise DependencyError(
            f"kernels='native' run on the CPU in float32, bfloat16 and int8, in exact shapes; this "
            f"is {params.device.type}, {params.dtype}, {shapes!r}; use kernels='auto'"
        )
    if kernels != "torch" and is_possible:
        try:
            return NativeModel(params, num_slots=num_slots)
        except DependencyError as error:
            if kernels == "native":
                raise
            logger.warning("decoding slowly, in torch operations: %s", error)
    return DecoderModel(params, num_slots=num_slots)
