"""Property: whatever the exits, prompts, turns, buckets, the cache is the full forward's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from nvium_titan.decode import DecoderParams, SampledRouter, ScriptedExits
from tests.helpers.engines import make_engine
from tests.helpers.reference import reference_forward
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

TOLERANCE = 1e-10
CONFIGS = (
    tiny_config(),
    tiny_config(exit_layers=(1, 2, 4), num_layers=5, num_kv_heads=4),
    tiny_config(exit_layers=(2,), num_layers=3, num_kv_heads=1, tie=True),
)
TENSORS = tuple(lively_tensors(config, router_gain=0.7) for config in CONFIGS)

turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 39), min_size=1, max_size=40),  # prompt
        st.lists(st.integers(0, 3), min_size=1, max_size=12),  # exits, taken in turn
        st.integers(1, 40),  # new tokens
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parity
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    turns=turns,
    which=st.integers(0, len(CONFIGS) - 1),
    kernels=st.sampled_from(["torch", "graph"]),
    is_sampled=st.booleans(),
    seed=st.integers(0, 2**64),
)
def test_any_history_leaves_the_exact_cache(
    turns: list[tuple[list[int], list[int], int]],
    which: int,
    kernels: str,
    is_sampled: bool,
    seed: int,
) -> None:
    config, tensors = CONFIGS[which], TENSORS[which]
    params = DecoderParams.from_tensors(config, {n: t.double() for n, t in tensors.items()})
    engine = make_engine(params, kernels=kernels)
    state = engine.new_state()
    last: list[int] = []
    for prompt, exits, num_new in turns:
        policy = SampledRouter() if is_sampled else ScriptedExits(exit_indices=tuple(exits))
        generation = engine.generate(
            [*last, *prompt], max_new_tokens=num_new, policy=policy, seed=seed, state=state
        )
        tokens = list(generation)
        last = [tokens[-1].token_id]
        filled = state.filled
        assert state.length >= filled[0]
        assert filled == sorted(filled, reverse=True)
        twin = reference_forward(config, tensors, [*state.token_ids, *last])
        near = {"atol": TOLERANCE, "rtol": TOLERANCE}
        for block, blocks_filled in zip(config.shape.blocks, filled, strict=True):
            for layer in block:
                keys = state.buffers.keys(layer, length=blocks_filled)
                assert_close(keys, twin.keys_LGTH[layer][:, :blocks_filled], **near)
                values = state.buffers.values(layer, length=blocks_filled)
                assert_close(values, twin.values_LGTH[layer][:, :blocks_filled], **near)
        scores = engine.score([[*state.token_ids, *last]])
        nexts = torch.tensor([*state.token_ids, *last])[1:]
        rows = torch.arange(len(nexts))
        assert_close(scores.log_exits[0], twin.logits_ETV.log_softmax(-1)[:, rows, nexts].T, **near)
    engine.flush(state)
    for k, boundary_TD in enumerate(twin.boundary_ETD):
        ours = state.buffers.boundary_SD[k][: state.length]
        assert_close(ours, boundary_TD[: state.length], **near)
