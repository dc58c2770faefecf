"""The native kernels equal the slow twin on their own weights, and themselves to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from nvium_titan.bundle import BundleConfig
from nvium_titan.bundle.quantization import dequantize, quantize_int8
from nvium_titan.decode import (
    DecoderParams,
    DecodeState,
    Engine,
    ExitPolicy,
    FixedExit,
    GenerationRequest,
    Noise,
    RouterGreedy,
    SampledRouter,
    SamplingParams,
    ScriptedExits,
)
from nvium_titan.decode.forward.base import Group
from nvium_titan.decode.forward.native.forward import NativeForward
from nvium_titan.decode.forward.torch import TorchForward
from nvium_titan.decode.sampling import Draw, draw_token
from tests.helpers.reference import reference_forward
from tests.helpers.tiny_decoder import exit_scripts, lively_tensors, tiny_config

pytestmark = pytest.mark.parity

# Against a float64 forward pass with the weights that the kernels hold. Activations are float32;
# with int8 weights each row of them is rounded to 15 bits once per product.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.int8: 3e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda d: str(d).removeprefix("torch."))

CONFIGS = {
    "gqa-uneven": tiny_config(),
    "mha-even-tied": tiny_config(exit_layers=(1, 2, 3), num_layers=4, num_kv_heads=4, tie=True),
    "dense": tiny_config(exit_layers=(), num_layers=3, final_adapter=False),
    # No dimension a multiple of the panels; odd, so that int8 pairs are padded.
    "ragged": tiny_config(dim=37, ffn_dim=45, router_dim=19, adapter_dim=21),
    # Heads of every width that has its own loop.
    **{f"head-{h}": tiny_config(head_dim=h) for h in (16, 32, 64, 128)},
}


def stored_tensors(config: BundleConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights that an engine of this type holds, in float32."""
    tensors = lively_tensors(config)
    if dtype == torch.int8:
        return dequantize(quantize_int8(tensors), dtype=torch.float32)
    return {name: tensor.to(dtype).float() for name, tensor in tensors.items()}


def make_params(config: BundleConfig, dtype: torch.dtype) -> DecoderParams:
    tensors = stored_tensors(config, dtype)
    return DecoderParams.from_tensors(config, tensors, dtype=dtype)


def make(config: BundleConfig, dtype: torch.dtype, **kwargs: object) -> Engine:
    return Engine(make_params(config, dtype), kernels="native", **kwargs)  # type: ignore[arg-type]


def decode(engine: Engine, state: DecodeState, script: tuple[int, ...]) -> None:
    noise = Noise(3, vocab_size=engine.params.num_tokens)
    policy = ScriptedExits(exit_indices=script, first_position=state.length + 5)
    engine.prefill(state, [1, 2, 3, 4, 5])
    token = engine.choose(state, noise=noise, policy=policy)
    for _ in script[1:]:
        token = engine.step(state, token.token_id, noise=noise, policy=policy)


def outputs(engine: Engine, state: DecodeState) -> tuple[Tensor, Tensor]:
    """Return the logits of every exit and of every router, at all positions."""
    model, hidden = engine.forward, state.buffers.boundary_SD
    normed = [model.exit_norm(k, hidden[k + 1][: state.length]) for k in range(engine.num_exits)]
    logits = [model.logits(model.exit_state(k, n_TD)) for k, n_TD in enumerate(normed)]
    routers = [model.router_logit(k, n_TD) for k, n_TD in enumerate(normed[:-1])]
    return torch.stack(logits), torch.stack(routers) if routers else logits[0][:0, :0]


@DTYPES
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_over_two_turns_equals_a_full_forward(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    engine = make(config, dtype)
    state = engine.new_state()
    script = exit_scripts(engine.num_exits, 40)["random"]
    decode(engine, state, (*script, 0, 0))
    decode(engine, state, script)  # on a cache with owed rows
    engine.flush(state)
    twin = reference_forward(config, stored_tensors(config, dtype), state.token_ids)
    near = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype], "check_dtype": False}
    for boundary, expected in zip(state.buffers.boundary_SD, twin.boundary_ETD, strict=True):
        assert_close(boundary[: state.length], expected, **near)
    for layer in range(config.shape.num_layers):
        assert_close(state.buffers.keys(layer, length=state.length), twin.keys_LGTH[layer], **near)
        assert_close(
            state.buffers.values(layer, length=state.length), twin.values_LGTH[layer], **near
        )
    logits_ETV, router_JT = outputs(engine, state)
    assert_close(logits_ETV, twin.logits_ETV, **near)
    if engine.num_exits > 1:
        assert_close(router_JT, twin.router_logit_JT, **near)


@DTYPES
@pytest.mark.parametrize("pattern", exit_scripts(3, 51))
def test_deferred_decoding_is_a_prefill_to_the_bit(pattern: str, dtype: torch.dtype) -> None:
    engine = make(CONFIGS["gqa-uneven"], dtype)
    decoded, prefilled = engine.new_state(), engine.new_state()
    decode(engine, decoded, exit_scripts(3, 51)[pattern])
    engine.flush(decoded)
    engine.prefill(prefilled, decoded.token_ids)
    assert torch.equal(decoded.buffers.kv_LGSH, prefilled.buffers.kv_LGSH)
    for ours, theirs in zip(
        decoded.buffers.boundary_SD, prefilled.buffers.boundary_SD, strict=True
    ):
        assert torch.equal(ours, theirs)


@DTYPES
def test_a_batch_gives_the_single_runs_to_the_bit(dtype: torch.dtype) -> None:
    engine = make(CONFIGS["gqa-uneven"], dtype)
    requests = [
        GenerationRequest(
            prompt_ids=[(3 * row + i) % 40 for i in range(1 + 5 * row)],
            max_new_tokens=30,
            sampling=SamplingParams(temperature=0.8),
            seed=row,
            with_log_probs=True,
        )
        for row in range(8)
    ]
    for row, result in enumerate(engine.generate_batch(requests).results()):
        single = engine.generate_batch([requests[row]]).results()[0]
        assert result.token_ids == single.token_ids
        assert result.exit_indices == single.exit_indices
        assert result.log_exits == single.log_exits
        assert result.log_probs == single.log_probs
        assert result.log_mix == single.log_mix


@DTYPES
@settings(max_examples=25, deadline=None)
@given(data=st.data())
@torch.inference_mode()
def test_a_row_does_not_depend_on_its_group_or_the_threads(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["gqa-uneven", "ragged", "head-16", "head-64"]))
    engine = make(CONFIGS[name], dtype)
    ids = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=40))
    other_ids = data.draw(st.lists(st.integers(0, 39), min_size=40, max_size=40))
    alone = engine.new_state()
    engine.prefill(alone, ids)
    together, other = engine.new_state(), engine.new_state()
    engine.runner.feed(together, ids)
    engine.runner.feed(other, other_ids)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        for block_index in range(engine.num_exits):
            first = 0
            while first < len(ids):
                rows = data.draw(st.integers(1, len(ids) - first))
                companions = data.draw(st.integers(0, 9))
                groups = [Group(together.buffers, first, rows)]
                if companions:
                    groups.insert(
                        data.draw(st.integers(0, 1)),
                        Group(other.buffers, 0, companions),
                    )
                engine.forward.run_block(block_index, groups)
                first += rows
    finally:
        torch.set_num_threads(num_threads)
    together.filled = [len(ids)] * engine.num_exits
    assert torch.equal(alone.buffers.kv_LGSH, together.buffers.kv_LGSH)
    for ours, theirs in zip(alone.buffers.boundary_SD, together.buffers.boundary_SD, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(outputs(engine, alone), outputs(engine, together), strict=True):
        assert torch.equal(ours, theirs)


@DTYPES
def test_rows_of_the_head_and_the_junctions_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    model = make(CONFIGS["ragged"], dtype).forward
    h_TD = torch.randn(13, 37, generator=torch.Generator().manual_seed(1))
    for function in (
        lambda rows_TD: model.exit_norm(0, rows_TD),
        lambda rows_TD: model.router_logit(0, rows_TD),
        lambda rows_TD: model.exit_state(1, rows_TD),
        model.logits,
    ):
        together = function(h_TD)
        assert torch.equal(together, torch.cat([function(h_TD[t : t + 1]) for t in range(13)]))


def test_int8_packing_recovers_the_grid() -> None:
    config = CONFIGS["ragged"]
    exact = TorchForward(make_params(config, torch.int8), num_slots=8)
    native = NativeForward(make_params(config, torch.int8), num_slots=8)
    # Small integers survive the rounding of activations, so that only the weights can differ.
    n_TD = torch.randint(-3, 4, (5, 37), generator=torch.Generator().manual_seed(2)).float()
    n_TD[:, 0] = native._head.levels  # the row's own scale becomes 1
    assert_close(native.logits(n_TD), exact.logits(n_TD), atol=1e-5, rtol=1e-5)


def test_extreme_rows_stay_finite() -> None:
    config = tiny_config()
    for dtype in TOLERANCES:
        model = make(config, dtype).forward
        h_TD = torch.stack([torch.zeros(32), torch.full((32,), 1e18), torch.full((32,), 1e-30)])
        n_TD = model.exit_norm(0, h_TD)
        assert n_TD.isfinite().all()
        assert model.router_logit(0, n_TD).isfinite().all()
        assert model.logits(model.exit_state(0, n_TD)).isfinite().all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10_000),
    vocab_size=st.sampled_from([2, 7, 255, 256, 257, 5000]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 10.0, 100.0]),
    temperature=st.sampled_from([1.0, 0.3, 2.5, 1e-3, 0.0]),
)
def test_native_draws_are_the_draws_of_the_noise(
    seed: int, position: int, vocab_size: int, spread: float, temperature: float
) -> None:
    model = make(CONFIGS["dense"], torch.float32).forward
    generator = torch.Generator().manual_seed(seed % 2**63)
    logits_V = torch.randn(vocab_size, generator=generator) * spread
    logits_V[int(torch.randint(vocab_size, (1,), generator=generator))] = float("-inf")
    sampling = SamplingParams(temperature=temperature)
    noise = Noise(seed, vocab_size=vocab_size)
    draw = Draw(noise, position, sampling)
    assert model.draw(logits_V, draw) == draw_token(logits_V, draw)


@DTYPES
@pytest.mark.parametrize(
    "policy",
    [
        SampledRouter(),
        SampledRouter(temperature=0.5),
        RouterGreedy(),
        FixedExit(exit_index=1),
        ScriptedExits(exit_indices=(0,) * 45 + (1, 2), first_position=3),
        ScriptedExits(exit_indices=(0, 2, 1), first_position=3, runs_router=True),
    ],
    ids=["sampled", "hot", "greedy", "fixed", "long-owed", "scripted-with-routers"],
)
def test_a_token_run_as_a_whole_is_the_one_run_in_pieces(
    policy: ExitPolicy, dtype: torch.dtype
) -> None:
    whole, pieces = (make(CONFIGS["gqa-uneven"], dtype) for _ in range(2))
    pieces.forward.run_token = TorchForward.run_token.__get__(pieces.forward)  # declines
    states = whole.new_state(), pieces.new_state()
    results = [
        engine.generate(
            [1, 2, 3],
            max_new_tokens=100,
            policy=policy,
            sampling=SamplingParams(temperature=0.9),
            seed=4,
            state=state,
        ).result()
        for engine, state in zip((whole, pieces), states, strict=True)
    ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].exit_indices == results[1].exit_indices
    assert states[0].filled == states[1].filled
    assert states[0].token_ids == states[1].token_ids
    assert torch.equal(states[0].buffers.kv_LGSH, states[1].buffers.kv_LGSH)
    stats = [result.stats for result in results]
    assert stats[0].group_sizes == stats[1].group_sizes
    assert stats[0].layers_run == stats[1].layers_run
    assert stats[0].host_reads == 100
