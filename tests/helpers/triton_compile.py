"""Compiles all Triton kernels for GPUs, without one: python -m tests.helpers.triton_compile."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nvium_titan.decode.forward.graphs import triton_kernels as kernels

CAPABILITIES = (80, 90)
WIDTH, RANK = 1536, 1016


def compile_all(*, dtype: str, wide: str, capability: int) -> None:
    """Compile for weights of `dtype` and sums in `wide`."""
    weights, sums = f"*{dtype}", f"*{wide}"
    cases = [
        (
            kernels.norm_and_first_layer,
            [weights, "*i64", weights, weights, weights, weights, sums],
            {"WIDTH": WIDTH, "RANK": RANK, "EPS": 1e-6, "BLOCK_WIDTH": 2048, "ROWS": 2},
        ),
        (
            kernels.second_layer,
            [sums, weights, weights, sums, sums],
            {"WIDTH": WIDTH, "RANK": RANK, "BLOCK_RANK": 1024, "ROWS": 2},
        ),
        (
            kernels.decide,
            [sums, sums, "*fp64", sums, "*i1", "*i1"],
            {"WIDTH": WIDTH, "EPS": 1e-6, "NUM_PARTS": WIDTH // 2, "BLOCK_PARTS": 1024},
        ),
        (
            kernels.draw_in_blocks,
            [weights, "*i64", "*fp64", "*fp64", "*fp64", "*i64", "i32"],
            {"BLOCK": 512},
        ),
        (
            kernels.best_of_blocks,
            ["*fp64", "*fp64", "*i64", "*fp64", "*i64", "i32", "i32"],
            {"BLOCK": 64},
        ),
    ]
    for kernel, types, constants in cases:
        names = kernel.arg_names
        signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"], "no machine code"
        print(capability, dtype, kernel.__name__)


if __name__ == "__main__":
    for capability in CAPABILITIES:
        compile_all(dtype="bf16", wide="fp32", capability=capability)
    compile_all(dtype="fp32", wide="fp32", capability=CAPABILITIES[-1])
    compile_all(dtype="fp64", wide="fp64", capability=CAPABILITIES[-1])
