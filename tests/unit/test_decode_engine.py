"""The engine's contract: laws, limits, errors, and that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import math
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nvium_titan.decode import (
    DecoderParams,
    Engine,
    FixedExit,
    Noise,
    RouterGreedy,
    SampledRouter,
    SamplingParams,
    ScriptedExits,
)
from nvium_titan.decode.forward.native.forward import NativeForward
from nvium_titan.decode.params import random_tensors
from nvium_titan.decode.policy import forced_thresholds
from nvium_titan.errors import BundleError, PromptError
from tests.helpers.engines import make_engine
from tests.helpers.exits import Failing
from tests.helpers.reference import reference_forward
from tests.helpers.statistics import chi_square_p
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

P_LIMIT = 1e-3  # chance of a false failure of each chi-square; seeds are fixed


def make(*, num_tokens: int | None = None, **kwargs: object) -> Engine:
    config = tiny_config()
    params = DecoderParams.from_tensors(config, lively_tensors(config), num_tokens=num_tokens)
    return make_engine(params, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", ["auto", "graph"])
def test_tokens_follow_the_enumerated_mixture(kernels: str) -> None:
    """First token after prefill, a decoded token, after a flush, and after a suffix prefill."""
    config = tiny_config(vocab_size=8, max_positions=32)
    tensors = lively_tensors(config, seed=3, router_gain=0.7)
    engine = make_engine(DecoderParams.from_tensors(config, tensors), kernels=kernels)
    num_draws = 2500
    prompt, turn = [1, 5, 2], [4, 4]
    seen: dict[str, list[int]] = {"first": [], "second": [], "flushed": [], "turn": []}
    fixed_exit = ScriptedExits(exit_indices=(0,))
    base = engine.new_state()
    engine.prefill(base, prompt)
    owed, flushed, turned = engine.new_state(), engine.new_state(), engine.new_state()
    for state in (owed, flushed, turned):
        engine.prefill(state, prompt)
        engine.step(state, 6, noise=Noise(0, vocab_size=8), policy=fixed_exit)
    engine.flush(flushed)
    engine.prefill(turned, turn)
    for seed in range(num_draws):
        noise = Noise(seed, vocab_size=8)
        seen["first"].append(engine.choose(base, noise=noise).token_id)
        # Rewinding what block 2 and 3 have done makes the same owed run every time.
        owed.filled[1:] = [3, 3]
        seen["second"].append(engine.choose(owed, noise=noise).token_id)
        seen["flushed"].append(engine.choose(flushed, noise=noise).token_id)
        seen["turn"].append(engine.choose(turned, noise=noise).token_id)
    for name, ids in (
        ("first", prompt),
        ("second", [*prompt, 6]),
        ("flushed", [*prompt, 6]),
        ("turn", [*prompt, 6, *turn]),
    ):
        twin = reference_forward(config, tensors, ids)
        assert twin.log_exit_ET[:, -1].exp().min() > 0.05, "every exit must matter"
        exact = twin.log_mix_TV[-1].exp()
        counts = torch.tensor(seen[name]).bincount(minlength=8)
        assert chi_square_p(counts, exact) > P_LIMIT, name


def test_exits_follow_the_routers() -> None:
    config, prompt = tiny_config(), [1, 2, 3]
    tensors = lively_tensors(config, router_gain=0.7)
    engine = Engine(DecoderParams.from_tensors(config, tensors))
    exact = reference_forward(config, tensors, prompt).log_exit_ET[:, -1].exp()
    state = engine.new_state()
    engine.prefill(state, prompt)
    exits = [
        engine.choose(state, noise=Noise(seed, vocab_size=40)).exit_index for seed in range(4000)
    ]
    assert chi_square_p(torch.tensor(exits).bincount(minlength=3), exact) > P_LIMIT


def test_a_fixed_exit_samples_that_exit_and_runs_no_deeper() -> None:
    engine = make()
    result = engine.generate([1, 2], max_new_tokens=20, policy=FixedExit(exit_index=0)).result()
    assert set(result.exit_indices) == {0}
    assert result.exit_counts == (20, 0, 0)
    assert result.stats.layers_run == 19, "one layer in the first block, for every further token"
    assert result.stats.layers_per_token == 1
    assert result.stats.mean_group_size == 1
    assert result.stats.host_reads == 20
    assert result.law == "approximate: exit 1 alone"


def test_settings_are_echoed_and_counted() -> None:
    engine = make()
    sampling, policy = SamplingParams(temperature=0.7), SampledRouter()
    result = engine.generate(
        [1], max_new_tokens=30, sampling=sampling, policy=policy, seed=8
    ).result()
    assert (result.sampling, result.policy, result.seed) == (sampling, policy, 8)
    assert sum(result.exit_counts) == 30 == result.stats.num_new_tokens
    assert result.stats.host_reads == 30  # the native kernels decide at the junctions themselves
    in_pieces = make(kernels="torch").generate([1], max_new_tokens=30, policy=policy).result()
    routers_asked = sum(min(e + 1, 2) for e in in_pieces.exit_indices)
    assert in_pieces.stats.host_reads == routers_asked + 30


def test_seed_decides_and_differs() -> None:
    engine = make()
    runs = [
        engine.generate([1, 2], max_new_tokens=25, seed=seed).result().token_ids
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_stop_ids_end_the_generation() -> None:
    engine = make()
    free = engine.generate([1, 2], max_new_tokens=25, seed=4).result()
    assert free.finish_reason == "length"
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    stopped = engine.generate([1, 2], max_new_tokens=25, seed=4, stop_ids=[stop]).result()
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.cases
@pytest.mark.parametrize("kernels", ["auto", "graph"])
def test_dec_01_generation_stops_where_the_cache_ends(kernels: str) -> None:
    prompt = [i % 40 for i in range(60)]
    big = make(kernels=kernels).generate(prompt, max_new_tokens=100, seed=1).result()
    small = make(kernels=kernels, max_seq_len=64)
    for wanted in (4, 5, 100):
        result = small.generate(prompt, max_new_tokens=wanted, seed=1).result()
        assert result.token_ids == big.token_ids[:4]
        assert result.finish_reason == "length"
    assert len(small.generate([1], max_new_tokens=63).result().token_ids) == 63


@pytest.mark.cases
@pytest.mark.parametrize("length", [64, 65, 1000])
def test_dec_02_a_prompt_that_does_not_fit_is_refused_with_numbers(length: int) -> None:
    engine = make(max_seq_len=64)
    with pytest.raises(PromptError, match=f"{length} tokens.*64 positions.*--max-seq-len"):
        engine.generate([1] * length, max_new_tokens=4)
    assert len(engine.generate([1] * 63, max_new_tokens=4).result().token_ids) == 1


@pytest.mark.cases
def test_dec_02_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptError, match="prompt is empty"):
        make().generate([], max_new_tokens=4)


def test_requests_are_checked_before_anything_runs() -> None:
    engine = make()
    with pytest.raises(PromptError, match=r"token id 40 is unknown.*0 to 39"):
        engine.generate([1, 40], max_new_tokens=4)
    with pytest.raises(PromptError, match="token id -1 is unknown"):
        engine.generate([-1], max_new_tokens=4)
    with pytest.raises(PromptError, match="max_new_tokens=0"):
        engine.generate([1], max_new_tokens=0)
    with pytest.raises(PromptError, match="exit 4: the model has exits 1 to 3"):
        engine.generate([1], max_new_tokens=1, policy=FixedExit(exit_index=3))
    with pytest.raises(PromptError, match="max_length=999 exceeds max_seq_len=256"):
        engine.new_state(max_length=999)
    with pytest.raises(PromptError, match="max_seq_len=0"):
        make(max_seq_len=0)


def test_a_second_turn_that_does_not_fit_names_the_earlier_one() -> None:
    engine = make()
    state = engine.new_state(max_length=16)
    engine.generate([1] * 8, max_new_tokens=4, state=state).result()
    with pytest.raises(PromptError, match="9 tokens after 11 tokens of earlier turns"):
        engine.generate([1] * 9, max_new_tokens=4, state=state)


@pytest.mark.cases
def test_tok_02_padded_ids_are_never_sampled() -> None:
    engine = make(num_tokens=33)
    for temperature in (1.0, 2.0, 1e6):
        result = engine.generate(
            [1], max_new_tokens=200, sampling=SamplingParams(temperature=temperature)
        ).result()
        assert max(result.token_ids) < 33
    assert max(result.token_ids) > 28, "a huge temperature must reach the last real ids"
    with pytest.raises(PromptError, match="token id 33 is unknown"):
        engine.generate([33], max_new_tokens=1)
    with pytest.raises(BundleError, match=r"41 ids.*vocab_size=40"):
        make(num_tokens=41)


class Interrupting:
    """A policy that fails in the middle of a token."""

    law = "approximate: test"
    reads_router = False
    router_temperature = None

    def __init__(self, error: BaseException, at_position: int) -> None:
        self.error = error
        self.at_position = at_position

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        if position == self.at_position:
            return [math.inf, Failing(self.error)]  # type: ignore[list-item]
        return forced_thresholds(position % 3, len(uniforms))


def leave_things_behind(engine: Engine, how: int) -> None:
    """End one generation badly: closed, failed, interrupted, or merely finished with rows owed."""
    if how == 0:
        generation = engine.generate([5, 6, 7], max_new_tokens=50, seed=how)
        list(itertools.islice(generation, 9))
        generation.close()
    elif how == 1:
        policy = Interrupting(ValueError("broken policy"), at_position=9)
        with pytest.raises(ValueError, match="broken policy"):
            engine.generate([9, 9], max_new_tokens=50, policy=policy).result()
    elif how == 2:
        policy = Interrupting(KeyboardInterrupt(), at_position=13)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([9, 9], max_new_tokens=50, policy=policy).result()
    else:
        engine.generate([8] * 40, max_new_tokens=30, policy=FixedExit(exit_index=0)).result()


@pytest.mark.cases
@pytest.mark.parametrize("kernels", ["auto", "graph"])
def test_dec_11_no_call_sees_the_one_before(kernels: str) -> None:
    def observe(engine: Engine) -> tuple[object, ...]:
        state = engine.new_state(max_length=40)
        result = engine.generate([3, 1], max_new_tokens=30, seed=1, state=state).result()
        engine.flush(state)
        kv_LGSH = state.buffers.kv_LGSH[:, :, : state.length].clone()
        return result.token_ids, result.exit_indices, kv_LGSH

    tokens, exits, kv = observe(make(kernels=kernels))
    engine = make(kernels=kernels)
    for call in range(20):
        leave_things_behind(engine, call % 4)
        again_tokens, again_exits, again_kv = observe(engine)
        assert (again_tokens, again_exits) == (tokens, exits)
        assert torch.equal(again_kv, kv), "bitwise"  # type: ignore[arg-type]


@pytest.mark.cases
def test_dec_11_memory_stays_flat() -> None:
    engine = make()

    def live_tensors() -> int:
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    leave_things_behind(engine, 0)
    before = live_tensors()
    for call in range(20):
        leave_things_behind(engine, call % 4)
    assert live_tensors() == before


def test_a_failed_step_can_be_continued() -> None:
    """The token was fed, what its blocks did not finish is owed, and the choice can be repeated."""
    engine = make()
    state, fresh = engine.new_state(), engine.new_state()
    noise = Noise(0, vocab_size=40)
    for s in (state, fresh):
        engine.prefill(s, [1, 2])
    with pytest.raises(ValueError, match="stop here"):
        engine.step(
            state, 7, noise=noise, policy=Interrupting(ValueError("stop here"), at_position=3)
        )
    assert engine.choose(state, noise=noise) == engine.step(fresh, 7, noise=noise)


def test_interleaved_sequences_do_not_touch_each_other() -> None:
    engine = make()
    alone = [
        engine.generate([k + 1, 2], max_new_tokens=25, seed=k).result().token_ids for k in range(3)
    ]
    together: list[list[int]] = [[], [], []]
    runs = [engine.generate([k + 1, 2], max_new_tokens=25, seed=k) for k in range(3)]
    for round_of_tokens in zip(*runs, strict=True):
        for k, token in enumerate(round_of_tokens):
            together[k].append(token.token_id)
    assert [tuple(tokens) for tokens in together] == alone


def test_a_second_turn_continues_the_first() -> None:
    """Generating in two turns on one state gives what one long prompt gives."""
    engine = make()
    state = engine.new_state()
    first = engine.generate([1, 2, 3], max_new_tokens=10, seed=5, state=state).result()
    turn = [first.token_ids[-1], 4, 5]
    second = engine.generate(turn, max_new_tokens=10, seed=5, state=state).result()
    whole = engine.generate([1, 2, 3, *first.token_ids, 4, 5], max_new_tokens=10, seed=5).result()
    assert second.token_ids == whole.token_ids
    assert second.exit_indices == whole.exit_indices


def test_closed_generation_has_no_result() -> None:
    generation = make().generate([1], max_new_tokens=5)
    next(generation)
    generation.close()
    with pytest.raises(RuntimeError, match="closed or failed"):
        generation.result()


def test_positions_count_from_the_start_of_the_sequence() -> None:
    tokens = list(make().generate([1, 2, 3], max_new_tokens=3))
    assert [token.position for token in tokens] == [3, 4, 5]


def test_router_greedy_leaves_at_the_first_router_above_one_half() -> None:
    engine = make()
    config = engine.params.config
    result = engine.generate(
        [1, 2], max_new_tokens=20, policy=RouterGreedy(), sampling=SamplingParams(temperature=0.5)
    ).result()
    ids = [1, 2, *result.token_ids]
    z_JT = reference_forward(config, lively_tensors(config), ids).router_logit_JT
    for t, exit_index in zip(range(1, 21), result.exit_indices, strict=True):
        leaves = [k for k in range(2) if z_JT[k, t] > 0]
        assert exit_index == (leaves[0] if leaves else 2)


def test_wrong_tensors_are_refused_by_name() -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed=0)
    del tensors["router_heads.1.bias"]
    with pytest.raises(BundleError, match=r"router_heads\.1\.bias.*found nothing"):
        DecoderParams.from_tensors(config, tensors)
    tensors = random_tensors(config, seed=0)
    tensors["model.norm.weight"] = torch.ones(31)
    with pytest.raises(BundleError, match=r"model\.norm\.weight: expected \[32\], found \[31\]"):
        DecoderParams.from_tensors(config, tensors)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_decode_step_is_six_frames_in_four_files_at_most(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the caller's `next` to the attention of a layer, or to the call into C."""
    engine = make(kernels=kernels)
    seen: list[list[str]] = []

    def note() -> None:
        stack = [frame.filename for frame in traceback.extract_stack()]
        seen.append([name for name in stack if "/nvium_titan/" in name])

    generation = engine.generate([1, 2, 3], max_new_tokens=6, seed=1)
    next(generation)
    if kernels == "torch":
        attention = torch.nn.functional.scaled_dot_product_attention

        def noted(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            note()
            return attention(*args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    else:
        assert isinstance(engine.forward, NativeForward)
        library = engine.forward._library

        class Noted:
            def __getattr__(self, name: str) -> Any:
                if name == "nvium_run_token":
                    note()
                return getattr(library, name)

        monkeypatch.setattr(engine.forward, "_library", Noted())
    generation.result()
    assert len(seen) >= 5
    assert max(map(len, seen)) <= 6
    assert max(len(set(files)) for files in seen) <= 4
