"""Which forward decodes a model: torch's operations, graphs of them, or native CPU kernels."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from nvium_titan.decode.forward.base import Forward
from nvium_titan.decode.forward.graphs.capture import CudaGraphs
from nvium_titan.decode.forward.graphs.forward import GraphForward
from nvium_titan.decode.forward.native.forward import NativeForward
from nvium_titan.decode.forward.torch import TorchForward
from nvium_titan.decode.params import DecoderParams
from nvium_titan.errors import DependencyError

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "torch", "native", "graph"]


def build_forward(params: DecoderParams, *, kernels: Kernels, num_slots: int) -> Forward:
    """Return what computes a model.

    The native kernels are for the CPU, float32, bfloat16 and int8. They cost no more for a
    piggyback group of 2 to 6 rows than for one, and a row's result is the same to the bit in every
    group and batch. They are compiled at first use, which takes seconds.

    Graphs are for CUDA: one launch for a token. Batches run in torch's own operations.

    Args:
        params: The weights.
        kernels: "auto" takes graphs on CUDA and the native kernels where they can run, and says so
            where only a compiler is missing; "graph" and "native" insist; "torch" is their slow
            twin, for every device and type.
        num_slots: Largest number of slots that any sequence will have.

    Raises:
        DependencyError: If kernels are asked for and cannot be had; the message says why.
    """
    device = params.device.type
    if kernels == "graph" and device != "cuda":
        raise DependencyError(f"kernels='graph' run on CUDA, not on {device}; use kernels='auto'")
    if device == "cuda" and kernels in ("auto", "graph"):
        backend = CudaGraphs(params.device)
        return GraphForward(params, num_slots=num_slots, backend=backend, compiles=True)
    has_native = device == "cpu" and params.dtype in (torch.float32, torch.bfloat16)
    if kernels == "native" and not has_native:
        raise DependencyError(
            f"kernels='native' run on the CPU in float32, bfloat16 and int8; this is {device}, "
            f"{params.dtype}; use kernels='auto'"
        )
    if has_native and kernels != "torch":
        try:
            return NativeForward(params, num_slots=num_slots)
        except DependencyError as error:
            if kernels == "native":
                raise
            logger.warning("decoding slowly, in torch operations: %s", error)
    return TorchForward(params, num_slots=num_slots)
