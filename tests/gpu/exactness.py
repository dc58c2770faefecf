"""Check that graphs give the states, exits and tokens of separate operations.

Shapes: S positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvium_titan.bench.graphs import available_modes, in_mode
from nvium_titan.bench.models import BenchModel
from nvium_titan.bench.workload import Workload
from nvium_titan.decode import (
    DecoderParams,
    DecodeState,
    Engine,
    ExitPolicy,
    Noise,
    SampledRouter,
)
from nvium_titan.decode.forward.graphs.forward import Mode
from tests.gpu.imitation import graph_engine

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest errors allowed, by type. States: as a fraction of the largest value in a buffer.
Decisions: the nats by which a token or an exit may miss the choice of separate operations."""
# Products of other shapes round differently, and bfloat16 has 8 bits.


@dataclass(frozen=True, kw_only=True, slots=True)
class Exactness:
    """How far graphs are from separate operations, on one generation."""

    mode: Mode
    """How it was decoded."""
    dtype: str
    """Type computed in."""
    exits: str
    """Who decided: "forced" (a script) or "drawn" (the routers)."""
    num_tokens: int
    """New tokens."""
    state_error: float
    """Largest difference between a key, value or boundary state and that of a full forward pass, as
    a fraction of the largest value in its buffer."""
    decision_error: float
    """By how much a token or an exit misses the choice of a full forward pass, nats; 0 if all are
    the same."""
    tolerance: float
    """Largest error allowed for either."""
    passed: bool
    """Whether both are within the tolerance."""


def check_exactness(
    model: BenchModel, *, dtype: torch.dtype, work: Workload, shares: Sequence[float]
) -> list[Exactness]:
    """Decode in every mode, with forced and with drawn exits, and compare with separate operations.

    Args:
        model: A small one.
        dtype: Type to compute in.
        work: What to decode, once.
        shares: Of the forced exits.
    """
    params = DecoderParams.from_tensors(model.config, model.load_tensors(dtype))
    reference = Engine(params, max_seq_len=work.max_seq_len, kernels="torch")
    engine = graph_engine(params, max_seq_len=work.max_seq_len)
    policies = {"forced": work.policies(shares)[0], "drawn": SampledRouter()}
    return [
        _exactness(in_mode(engine, mode), reference, mode=mode, exits=exits, work=work, policy=p)
        for mode in available_modes(engine)
        for exits, p in policies.items()
    ]


@torch.inference_mode()
def _exactness(
    engine: Engine,
    reference: Engine,
    *,
    mode: Mode,
    exits: str,
    work: Workload,
    policy: ExitPolicy,
) -> Exactness:
    dtype = engine.params.dtype
    prompt = work.prompts(engine.params.num_tokens)[0]
    state = engine.new_state()
    result = engine.generate(
        prompt, max_new_tokens=work.new_tokens, policy=policy, seed=work.seed, state=state
    ).result()
    engine.flush(state)
    full = reference.new_state()
    reference.prefill(full, [*prompt, *result.token_ids[:-1]])
    state_error = max(
        _difference(found[..., : full.length, :], expected[..., : full.length, :])
        for found, expected in (
            (state.buffers.kv_LGSH, full.buffers.kv_LGSH),
            *zip(state.buffers.boundary_SD, full.buffers.boundary_SD, strict=True),
        )
    )
    state.close()
    decision_error = max(
        _decision_error(reference, full, policy, work.seed, index + len(prompt), *chosen)
        for index, chosen in enumerate(zip(result.exit_indices, result.token_ids, strict=True))
    )
    tolerance = TOLERANCES[dtype]
    return Exactness(
        mode=mode,
        dtype=str(dtype).removeprefix("torch."),
        exits=exits,
        num_tokens=len(result.token_ids),
        state_error=state_error,
        decision_error=decision_error,
        tolerance=tolerance,
        passed=max(state_error, decision_error) <= tolerance,
    )


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value; infinite if anything is NaN."""
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def _decision_error(
    reference: Engine,
    full: DecodeState,
    policy: ExitPolicy,
    seed: int,
    position: int,
    exit_index: int,
    token_id: int,
) -> float:
    """Return by how much exit and token at a position miss the choice of the full pass, nats."""
    params, forward = reference.params, reference.forward
    noise = Noise(seed, vocab_size=params.num_tokens, device=params.device)
    num_junctions = reference.num_exits - 1
    uniforms = [noise.uniform(position, index) for index in range(num_junctions)]
    thresholds = policy.thresholds(position=position, uniforms=uniforms)
    error = 0.0
    for index in range(exit_index + 1):
        n_1D = forward.exit_norm(index, full.buffers.boundary_SD[index + 1][position - 1 :][:1])
        if index == num_junctions:
            break
        beyond = float(forward.router_logit(index, n_1D)) - thresholds[index]
        error = max(error, -beyond if index == exit_index else beyond)
    logits_V = forward.logits(forward.exit_state(exit_index, n_1D))[0, : params.num_tokens]
    scores_V = logits_V.double() + noise.gumbel(position)
    missed = float(scores_V.max() - scores_V[token_id])
    return max(error, missed) if missed == missed else float("inf")
