"""Deferred, piggybacked decoding equals one full teacher-forced forward pass, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from nvium_titan.bundle import BundleConfig
from nvium_titan.core.mixture import exit_log_probs
from nvium_titan.decode import (
    DecoderParams,
    DecodeState,
    Engine,
    FixedExit,
    Noise,
    SampledRouter,
    ScriptedExits,
)
from tests.helpers.engines import make_engine
from tests.helpers.reference import Reference, assert_cache_equals, reference_forward
from tests.helpers.tiny_decoder import exit_scripts, lively_tensors, tiny_config

TOLERANCE = 1e-10
KERNELS = ("torch", "graph")
NUM_NEW = 51

CONFIGS = {
    "gqa-uneven": tiny_config(),
    "mha-even-tied": tiny_config(exit_layers=(1, 2, 3), num_layers=4, num_kv_heads=4, tie=True),
    "dense": tiny_config(exit_layers=(), num_layers=3, final_adapter=False),
    "one-exit-with-adapter": tiny_config(exit_layers=(), num_layers=3),
}


def make(config: BundleConfig, dtype: torch.dtype = torch.float64, **kwargs: object) -> Engine:
    tensors = {name: tensor.to(dtype) for name, tensor in lively_tensors(config).items()}
    return make_engine(DecoderParams.from_tensors(config, tensors), **kwargs)  # type: ignore[arg-type]


def assert_state_equals(engine: Engine, state: DecodeState, tolerance: float) -> Reference:
    """Compare every stored position of every layer with the slow twin."""
    config = engine.params.config
    return assert_cache_equals(config, lively_tensors(config), state, tolerance=tolerance)


def logits_of_every_exit(engine: Engine, state: DecodeState) -> torch.Tensor:
    model, hidden = engine.forward, state.buffers.boundary_SD
    with torch.inference_mode():
        rows = [
            model.logits(model.exit_state(k, model.exit_norm(k, hidden[k + 1][: state.length])))
            for k in range(engine.num_exits)
        ]
    return torch.stack(rows)


def run_script(engine: Engine, state: DecodeState, script: tuple[int, ...]) -> None:
    """Prefill five tokens, then decode under a script; tokens are sampled as usual."""
    noise = Noise(3, vocab_size=engine.params.num_tokens)
    policy = ScriptedExits(exit_indices=script, first_position=state.length + 5)
    engine.prefill(state, [1, 2, 3, 4, 5])
    token = engine.choose(state, noise=noise, policy=policy)
    for exit_index in script[1:]:
        token = engine.step(state, token.token_id, noise=noise, policy=policy)
        assert token.exit_index == exit_index


@pytest.mark.parity
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pattern", exit_scripts(3, NUM_NEW))
def test_every_exit_pattern_keeps_the_cache_exact(pattern: str, kernels: str) -> None:
    engine = make(CONFIGS["gqa-uneven"], kernels=kernels)
    state = engine.new_state()
    run_script(engine, state, exit_scripts(3, NUM_NEW)[pattern])
    pending = state.num_deferred
    assert_state_equals(engine, state, TOLERANCE)
    engine.flush(state)
    assert state.num_deferred == 0
    twin = assert_state_equals(engine, state, TOLERANCE)
    assert_close(
        logits_of_every_exit(engine, state), twin.logits_ETV, atol=TOLERANCE, rtol=TOLERANCE
    )
    assert pending == (NUM_NEW - 1 if pattern == "all-early" else pending)


@pytest.mark.parity
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_is_exact_over_two_turns(name: str, kernels: str) -> None:
    engine = make(CONFIGS[name], kernels=kernels)
    state = engine.new_state()
    script = exit_scripts(engine.num_exits, 12)["random"]
    run_script(engine, state, (*script, 0, 0))
    run_script(engine, state, script)  # a second turn on a cache with owed rows
    assert_state_equals(engine, state, TOLERANCE)
    engine.flush(state)
    twin = assert_state_equals(engine, state, TOLERANCE)
    assert_close(
        logits_of_every_exit(engine, state), twin.logits_ETV, atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parity
@pytest.mark.parametrize("kernels", KERNELS)
def test_groups_longer_than_the_largest_bucket_run_in_chunks(kernels: str) -> None:
    engine = make(CONFIGS["gqa-uneven"], kernels=kernels)
    state = engine.new_state()
    run_script(engine, state, (0,) * 80 + (2,))
    assert max(state.stats.group_sizes) == 32
    assert_state_equals(engine, state, TOLERANCE)


@pytest.mark.parity
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_long_prompt_runs_in_chunks(kernels: str) -> None:
    engine = make(CONFIGS["gqa-uneven"], kernels=kernels)
    state = engine.new_state()
    engine.prefill(state, [i % 40 for i in range(200)])
    assert_state_equals(engine, state, TOLERANCE)


@pytest.mark.parity
def test_router_logits_and_the_mixture_equal_the_twin() -> None:
    engine = make(CONFIGS["gqa-uneven"])
    config = engine.params.config
    ids = [(7 * i) % 40 for i in range(30)]
    state = engine.new_state()
    engine.prefill(state, ids)
    twin = reference_forward(config, lively_tensors(config), ids)
    with torch.inference_mode():
        z_JT = torch.stack(
            [
                engine.forward.router_logit(
                    k, engine.forward.exit_norm(k, state.buffers.boundary_SD[k + 1][:30])
                )
                for k in range(2)
            ]
        )
    assert_close(z_JT, twin.router_logit_JT, atol=TOLERANCE, rtol=TOLERANCE)
    assert_close(exit_log_probs(z_JT), twin.log_exit_ET, atol=TOLERANCE, rtol=TOLERANCE)
    assert twin.router_logit_JT.std() > 0.5, "the routers must be worth testing"


@pytest.mark.parity
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.25)], ids=["f32", "bf16"]
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_lower_precision_stays_near_the_twin(
    dtype: torch.dtype, tolerance: float, kernels: str
) -> None:
    # Measured over all patterns, as |a - b| / (1 + |b|): float32 4e-6, bfloat16 (8 bits) 0.09.
    engine = make(CONFIGS["gqa-uneven"], dtype, kernels=kernels)
    state = engine.new_state()
    run_script(engine, state, exit_scripts(3, 40)["random"])
    engine.flush(state)
    assert_state_equals(engine, state, tolerance)


@pytest.mark.parity
def test_static_shapes_sample_the_same_tokens_in_float64() -> None:
    config = CONFIGS["gqa-uneven"]
    results = [
        make(config, kernels=kernels)
        .generate([3, 1, 4, 1, 5], max_new_tokens=60, seed=11, policy=SampledRouter())
        .result()
        for kernels in KERNELS
    ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].exit_indices == results[1].exit_indices
    assert min(results[0].exit_counts) > 0, "every exit must be used here"


@pytest.mark.cases
def test_ext_01_deferred_layers_restore_the_exact_cache() -> None:
    """Three exits; every scripted pattern; float64 at 1e-9 and float32 at 1e-5."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        engine = make(CONFIGS["gqa-uneven"], dtype)
        for script in exit_scripts(3, NUM_NEW).values():
            state = engine.new_state()
            run_script(engine, state, script)
            engine.flush(state)
            assert_state_equals(engine, state, tolerance)


@pytest.mark.parity
def test_an_engine_that_never_leaves_early_is_the_dense_model() -> None:
    """It runs the layers of the one-exit model, operation for operation."""
    config = CONFIGS["gqa-uneven"]
    tensors = lively_tensors(config)
    one_exit = tiny_config(exit_layers=())
    kept = {name: t for name, t in tensors.items() if not name.startswith(("early", "router"))}
    engine = Engine(DecoderParams.from_tensors(config, tensors))
    dense = Engine(DecoderParams.from_tensors(one_exit, kept))
    args = {"max_new_tokens": 30, "seed": 2}
    full = engine.generate([1, 2, 3], policy=FixedExit(exit_index=2), **args).result()  # type: ignore[arg-type]
    assert full.token_ids == dense.generate([1, 2, 3], **args).result().token_ids  # type: ignore[arg-type]


@pytest.mark.parity
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_lazy_prefill_gives_the_same_tokens_and_pays_later(kernels: str) -> None:
    engine = make(CONFIGS["gqa-uneven"], kernels=kernels)
    prompt = [i % 40 for i in range(150)]
    policy = ScriptedExits(exit_indices=(0, 0, 1, 0, 2, 0), first_position=150)
    states = [engine.new_state() for _ in range(2)]
    runs = [
        engine.generate(prompt, max_new_tokens=12, policy=policy, state=state, lazy_prefill=lazy)
        for state, lazy in zip(states, (False, True), strict=True)
    ]
    first = [next(run) for run in runs]
    assert first[0] == first[1]
    assert states[0].filled == [150, 150, 150]
    assert states[1].filled == [150, 0, 0]
    assert runs[0].result().token_ids == runs[1].result().token_ids
    for state in states:
        engine.flush(state)
        assert_state_equals(engine, state, TOLERANCE)
