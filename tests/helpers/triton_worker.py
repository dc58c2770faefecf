"""Runs the Triton kernels in their interpreter, on the CPU: python -m tests.helpers.triton_worker.

Takes a file of cases and writes what the kernels gave. A process of its own, because Triton decides
between compiler and interpreter when a kernel is defined (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import sys

import torch

from nvium_titan.decode.forward.graphs.fused import TritonJunction, draw_in_triton
from nvium_titan.decode.params import DecoderParams
from tests.helpers.tiny_decoder import lively_tensors, tiny_config


def main(cases_file: str, results_file: str) -> None:
    cases = torch.load(cases_file)
    results: dict[str, list[object]] = {"junctions": [], "draws": []}
    for dtype, junction_index, states_SD, position_1, threshold in cases["junctions"]:
        junction = TritonJunction(tiny_params(dtype), junction_index)
        results["junctions"].append(tuple(junction(states_SD, position_1, threshold)))
    for logits_V, key_1, temperature_1 in cases["draws"]:
        results["draws"].append(draw_in_triton(logits_V, key_1, temperature_1))
    torch.save(results, results_file)


def tiny_params(dtype: torch.dtype, *, device: str = "cpu") -> DecoderParams:
    """Return a decoder whose widths are no powers of 2, so that every mask has work to do."""
    config = tiny_config()
    tensors = {name: tensor.to(device, dtype) for name, tensor in lively_tensors(config).items()}
    return DecoderParams.from_tensors(config, tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])
