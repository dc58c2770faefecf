"""What callers do that nobody meant: each once gave a wrong token without a word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from nvium_titan.decode import (
    DecoderParams,
    Engine,
    FixedExit,
    GenerationRequest,
    Noise,
    SamplingParams,
    ScriptedExits,
)
from nvium_titan.decode import noise as noise_module
from nvium_titan.errors import PromptError
from tests.helpers.engines import make_engine
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

KERNELS = pytest.mark.parametrize("kernels", ["torch", "native", "graph"])


def make(kernels: str = "native", **options: int) -> Engine:
    params = DecoderParams.from_tensors(tiny_config(), lively_tensors(tiny_config()))
    return make_engine(params, kernels=kernels, **options)


@dataclass(frozen=True)
class Answering:
    """A policy that gives the same thresholds for ever."""

    answer: tuple[float, ...]
    reads_router: bool = True
    law = "approximate: test"
    router_temperature = None

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        return list(self.answer)


class Coin:
    """Leaves where the uniform number is small; asks no router."""

    law = "approximate: test"
    reads_router = False
    router_temperature = None

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        return [-math.inf if u < 0.4 else math.inf for u in uniforms]


@KERNELS
@pytest.mark.parametrize("answer", [(), (0.5,), (0.5, 0.5, 0.5)], ids=len)
def test_a_policy_must_answer_for_every_junction(kernels: str, answer: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=f"Answering gives {len(answer)} thresholds for 2"):
        make(kernels).generate([1], max_new_tokens=3, policy=Answering(answer)).result()


@KERNELS
def test_a_policy_without_routers_must_force(kernels: str) -> None:
    policy = Answering((0.5, math.inf), reads_router=False)
    with pytest.raises(ValueError, match="without reads_router all must be infinite"):
        make(kernels).generate([1], max_new_tokens=3, policy=policy).result()


@KERNELS
def test_a_policy_without_routers_gets_the_uniform_numbers(kernels: str) -> None:
    result = make(kernels).generate([1], max_new_tokens=60, policy=Coin(), seed=1).result()
    assert min(result.exit_counts) > 5


def test_a_prompt_is_what_it_was_when_it_was_checked() -> None:
    first, second = [1, 2], [3, 4]
    engine = make(max_seq_len=16)
    requests = [GenerationRequest(prompt_ids=ids, max_new_tokens=3) for ids in (first, second)]
    batch = engine.generate_batch(requests, batch_size=1)
    second.extend([5] * 60)
    assert [result.stats.num_prompt_tokens for result in batch.results()] == [2, 2]


def test_a_state_of_another_engine_ends_where_this_one_does() -> None:
    state = make().new_state()
    small = make(max_seq_len=16)
    result = small.generate([1, 2], max_new_tokens=60, state=state).result()
    assert len(result.token_ids) == 14
    with pytest.raises(PromptError, match="does not fit into 16 positions"):
        small.prefill(state, [1, 2, 3])


def test_noise_interrupted_while_it_is_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, fresh = (Noise(3, vocab_size=5000) for _ in range(2))
    noise.gumbel(3)

    def interrupted(*args: object, **kwargs: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(noise_module, "gumbel_noise", interrupted)
        with pytest.raises(KeyboardInterrupt):
            noise.gumbel(100)
    assert torch.equal(noise.gumbel(100), fresh.gumbel(100))


@KERNELS
def test_a_cleared_state_forgets_what_was_not_a_number(kernels: str) -> None:
    engine = make(kernels)
    state = engine.new_state()
    engine.prefill(state, [1, 2, 3])
    with torch.inference_mode():
        state.buffers.kv_LGSH.fill_(math.nan)
    state.clear()
    engine.prefill(state, [1, 2])
    engine.flush(state)
    assert state.buffers.boundary_SD[-1][:2].isfinite().all()


def test_a_closed_state_of_a_pool_cannot_touch_the_next_one() -> None:
    engine = make("graph")
    state = engine.new_state()
    state.close()
    other = engine.new_state()
    with pytest.raises(AttributeError, match="buffers"):
        engine.prefill(state, [1, 2])
    assert other.length == 0


def test_single_steps_are_checked_as_requests_are() -> None:
    engine = make()
    state = engine.new_state()
    engine.prefill(state, [1])
    noise = Noise(0, vocab_size=40)
    with pytest.raises(PromptError, match="exit -6: the model has exits 1 to 3"):
        engine.choose(state, noise=noise, policy=FixedExit(exit_index=-7))
    mixture = SamplingParams(top_k=3, filter_scope="mixture")
    with pytest.raises(PromptError, match="needs the mixture"):
        engine.step(state, 2, noise=noise, policy=FixedExit(exit_index=0), sampling=mixture)


def test_riders_take_what_fits_into_the_calls_that_others_need() -> None:
    """A lazy prompt of 200 tokens beside one row that goes deep."""
    engine = make("torch")
    requests = [
        GenerationRequest(
            prompt_ids=[1] * 200, max_new_tokens=4, lazy_prefill=True,
            policy=FixedExit(exit_index=0),
        ),
        GenerationRequest(prompt_ids=[2], max_new_tokens=4, policy=FixedExit(exit_index=2)),
    ]  # fmt: skip
    calls = []
    run_block = engine.forward.run_block

    def counted(block_index: int, groups: Sequence[object]) -> None:
        calls.append((block_index, len(groups)))
        run_block(block_index, groups)  # type: ignore[arg-type]

    engine.forward.run_block = counted  # type: ignore[method-assign]
    engine.generate_batch(requests).results()
    deep = [groups for block_index, groups in calls if block_index == 2]
    assert deep[0] == 1, "the prefill of the deep row"
    assert len(deep) <= 4, "one call for each further token"


@pytest.mark.parametrize("script", [(), (0, -1)], ids=["empty", "negative"])
def test_impossible_scripts_are_refused(script: tuple[int, ...]) -> None:
    with pytest.raises(PromptError, match="exit_indices"):
        ScriptedExits(exit_indices=script)


def test_an_unknown_schedule_is_refused_at_once() -> None:
    request = GenerationRequest(prompt_ids=[1], max_new_tokens=2)
    with pytest.raises(PromptError, match=r"schedule='periodical'.*periodic"):
        make().generate_batch([request], schedule="periodical")  # type: ignore[arg-type]


def test_a_vocabulary_of_one_token_is_decoded_greedily() -> None:
    params = DecoderParams.from_tensors(tiny_config(), lively_tensors(tiny_config()), num_tokens=1)
    engine = Engine(params)
    result = engine.generate([0], max_new_tokens=3, sampling=SamplingParams(temperature=0)).result()
    assert result.token_ids == (0, 0, 0)
