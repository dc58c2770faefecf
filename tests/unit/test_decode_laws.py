"""Every law of sampling, log-probabilities, scoring and stop strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from nvium_titan.core.mixture import exit_log_probs, mixture_log_prob
from nvium_titan.decode import (
    DecoderParams,
    Engine,
    ExitPolicy,
    FixedExit,
    Noise,
    RouterGreedy,
    SampledRouter,
    SamplingParams,
    ScriptedExits,
    TextGeneration,
)
from nvium_titan.decode.laws import is_decided
from nvium_titan.decode.noise import gumbel_noise, uniform
from nvium_titan.decode.policy import forced_thresholds
from nvium_titan.decode.sampling import choose, filtered_logits
from nvium_titan.errors import PromptError
from nvium_titan.text.tokenizer import ByteTokenizer
from tests.helpers.engines import make_engine
from tests.helpers.exits import Failing, exit_of
from tests.helpers.reference import reference_forward
from tests.helpers.statistics import chi_square_p
from tests.helpers.tiny_decoder import lively_tensors, tiny_config

NUM_DRAWS = 200_000
NUM_ENGINE_DRAWS = 300
VOCAB = 16
P_LIMIT = 1e-3  # chance of a false failure of each chi-square; seeds are fixed


@dataclass(frozen=True)
class Law:
    """A setting, and the distribution it promises for three exits with fixed logits."""

    sampling: SamplingParams
    policy: ExitPolicy


LAWS = {
    "exact": Law(SamplingParams(), SampledRouter()),
    "temperature": Law(SamplingParams(temperature=0.6), SampledRouter()),
    "top-k": Law(SamplingParams(top_k=3), SampledRouter()),
    "top-p": Law(SamplingParams(top_p=0.7), SampledRouter()),
    "min-p": Law(SamplingParams(min_p=0.2), SampledRouter()),
    "all-filters": Law(
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05), SampledRouter()
    ),
    "mixture-temperature": Law(
        SamplingParams(temperature=0.6, filter_scope="mixture"), SampledRouter()
    ),
    "mixture-top-k": Law(SamplingParams(top_k=3, filter_scope="mixture"), SampledRouter()),
    "mixture-top-p": Law(SamplingParams(top_p=0.7, filter_scope="mixture"), SampledRouter()),
    "mixture-min-p": Law(SamplingParams(min_p=0.2, filter_scope="mixture"), SampledRouter()),
    "router-temperature": Law(SamplingParams(), SampledRouter(temperature=3.0)),
    "router-temperature-mixture": Law(
        SamplingParams(top_k=5, filter_scope="mixture"), SampledRouter(temperature=0.5)
    ),
    "forced-exit": Law(SamplingParams(temperature=0.8), FixedExit(exit_index=1)),
    "router-greedy": Law(SamplingParams(), RouterGreedy()),
}


def on_paper(logits_EV: Tensor, z_J: Tensor, law: Law) -> Tensor:
    """Return the promised distribution, with the filters written out again."""

    def filtered(p_V: Tensor) -> Tensor:
        s = law.sampling
        p_V = p_V ** (1 / s.temperature)
        p_V = p_V / p_V.sum()
        order = sorted(range(len(p_V)), key=lambda v: -float(p_V[v]))
        keep = order[: s.top_k] if s.top_k else order
        total, mass, nucleus = float(p_V[keep].sum()), 0.0, []
        for v in keep:
            if nucleus and mass >= s.top_p:
                break
            nucleus.append(v)
            mass += float(p_V[v]) / total
        nucleus = [v for v in nucleus if p_V[v] >= s.min_p * p_V[order[0]]]
        out = torch.zeros_like(p_V)
        out[nucleus] = p_V[nucleus]
        return out / out.sum()

    probs_EV = logits_EV.softmax(-1)
    if isinstance(law.policy, FixedExit):
        return filtered(probs_EV[law.policy.exit_index])
    if isinstance(law.policy, RouterGreedy):
        leaving = [k for k in range(len(z_J)) if z_J[k] > 0]
        return filtered(probs_EV[leaving[0] if leaving else len(z_J)])
    assert law.policy.router_temperature is not None
    weight_E = exit_log_probs(z_J / law.policy.router_temperature).exp()
    if law.sampling.filter_scope == "mixture":
        return filtered((weight_E[:, None] * probs_EV).sum(0))
    return sum(w * filtered(p) for w, p in zip(weight_E, probs_EV, strict=True))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def gumbel() -> Tensor:
    return gumbel_noise(7, range(NUM_DRAWS), VOCAB)


@pytest.fixture(scope="module")
def uniforms() -> list[tuple[float, float]]:
    return [(uniform(7, p, 1), uniform(7, p, 2)) for p in range(NUM_DRAWS)]


@pytest.mark.parametrize("name", LAWS)
def test_each_law_on_200000_draws(
    name: str, gumbel: Tensor, uniforms: list[tuple[float, float]]
) -> None:
    law = LAWS[name]
    generator = torch.Generator().manual_seed(4)
    logits_EV = 1.5 * torch.randn(3, VOCAB, generator=generator, dtype=torch.float64)
    z_J = torch.tensor([-0.4, 0.3], dtype=torch.float64)
    if law.sampling.filter_scope == "mixture":
        assert law.policy.router_temperature is not None
        log_exit_E1 = exit_log_probs(z_J / law.policy.router_temperature)[:, None]
        logits = mixture_log_prob(log_exit_E1, logits_EV.log_softmax(-1)).expand(NUM_DRAWS, -1)
    else:
        exits = [
            exit_of(law.policy.thresholds(position=p, uniforms=u), z_J.tolist())
            for p, u in enumerate(uniforms)
        ]
        logits = logits_EV[torch.tensor(exits)]
    tokens = choose(logits, gumbel, law.sampling.filters)
    promised = on_paper(logits_EV, z_J, law)
    assert promised.sum() == pytest.approx(1)
    assert chi_square_p(tokens.bincount(minlength=VOCAB), promised) > P_LIMIT


@pytest.mark.parametrize("name", LAWS)
def test_each_law_in_the_engine(name: str) -> None:
    """The token after a prefill, an early exit, a flush and a second turn."""
    law = LAWS[name]
    config = tiny_config(vocab_size=VOCAB, max_positions=16)
    tensors = lively_tensors(config, seed=3, router_gain=0.7)
    params = DecoderParams.from_tensors(config, {n: t.double() for n, t in tensors.items()})
    engine = Engine(params)
    first, owed, flushed, turned = (engine.new_state() for _ in range(4))
    for state in (first, owed, flushed, turned):
        engine.prefill(state, [1, 5, 2])
    for state in (owed, flushed, turned):
        engine.step(
            state,
            6,
            noise=Noise(0, vocab_size=VOCAB),
            policy=ScriptedExits(exit_indices=(0,)),
        )
    engine.flush(flushed)
    engine.prefill(turned, [4, 4])
    for state in (first, owed, flushed, turned):
        twin = reference_forward(config, tensors, state.token_ids)
        promised = on_paper(twin.logits_ETV[:, -1], twin.router_logit_JT[:, -1], law)
        counts = torch.zeros(VOCAB)
        for seed in range(NUM_ENGINE_DRAWS):
            noise = Noise(seed, vocab_size=VOCAB)
            token = engine.choose(state, noise=noise, sampling=law.sampling, policy=law.policy)
            counts[token.token_id] += 1
        common = promised * NUM_ENGINE_DRAWS >= 5
        rare = counts[~common].sum().reshape(1), promised[~common].sum().reshape(1)
        assert counts[promised == 0].sum() == 0
        if rare[1] * NUM_ENGINE_DRAWS < 5:  # too few to test; the big draw above does
            assert chi_square_p(counts[common], promised[common]) > P_LIMIT
        else:
            merged = torch.cat([counts[common], rare[0]]), torch.cat([promised[common], rare[1]])
            assert chi_square_p(*merged) > P_LIMIT


# --- temperature ---------------------------------------------------------------------------------


def tiny_engine(dtype: torch.dtype = torch.float64, **kwargs: object) -> Engine:
    config = tiny_config()
    tensors = {n: t.to(dtype) for n, t in lively_tensors(config, router_gain=0.7).items()}
    return make_engine(DecoderParams.from_tensors(config, tensors), **kwargs)  # type: ignore[arg-type]


def twin_of(engine: Engine, ids: list[int]):  # type: ignore[no-untyped-def]
    config = engine.params.config
    return reference_forward(config, lively_tensors(config, router_gain=0.7), ids)


@pytest.mark.cases
def test_dec_03_temperature_zero_is_the_argmax_of_the_mixture() -> None:
    engine = tiny_engine()
    runs = {
        seed: engine.generate(
            [1, 2], max_new_tokens=40, sampling=SamplingParams(temperature=0), seed=seed
        ).result()
        for seed in (0, 1)
    }
    assert runs[0].token_ids == runs[1].token_ids, "no randomness is left"
    log_mix_TV = twin_of(engine, [1, 2, *runs[0].token_ids]).log_mix_TV
    assert tuple(log_mix_TV[1:-1].argmax(-1).tolist()) == runs[0].token_ids
    assert runs[0].law == "exact mixture, argmax (certified)"
    assert runs[0].exit_counts[0] + runs[0].exit_counts[1] > 0, "some must be certain early"


@pytest.mark.cases
def test_dec_03_a_tiny_temperature_over_the_mixture_is_greedy() -> None:
    engine = tiny_engine()
    tiny = SamplingParams(temperature=1e-6, filter_scope="mixture")
    assert (
        engine.generate([1, 2], max_new_tokens=40, sampling=tiny).result().token_ids
        == engine.generate([1, 2], max_new_tokens=40, sampling=SamplingParams(temperature=0))
        .result()
        .token_ids
    )


@pytest.mark.cases
def test_dec_03_a_tiny_temperature_per_exit_mixes_the_argmaxes() -> None:
    engine = tiny_engine()
    tokens = list(
        engine.generate([1, 2], max_new_tokens=60, sampling=SamplingParams(temperature=1e-6))
    )
    twin = twin_of(engine, [1, 2, *(token.token_id for token in tokens)])
    for token in tokens:
        argmax = twin.logits_ETV[token.exit_index, token.position - 1].argmax()
        assert token.token_id == argmax
    assert len({token.exit_index for token in tokens}) == 3


@pytest.mark.cases
@pytest.mark.parametrize("scope", ["exit", "mixture"])
def test_dec_03_a_huge_temperature_is_uniform_and_one_is_the_plain_law(scope: str) -> None:
    engine = tiny_engine()
    huge = SamplingParams(temperature=1e6, filter_scope=scope)  # type: ignore[arg-type]
    result = engine.generate([1], max_new_tokens=250, sampling=huge).result()
    assert len(set(result.token_ids)) > 35
    one = SamplingParams(temperature=1.0, filter_scope=scope)  # type: ignore[arg-type]
    assert (
        engine.generate([1], max_new_tokens=30, sampling=one).result().token_ids
        == engine.generate([1], max_new_tokens=30).result().token_ids
    )
    for wrong in (-1.0, math.nan):
        with pytest.raises(PromptError, match="temperature="):
            SamplingParams(temperature=wrong)


# --- certified greedy ----------------------------------------------------------------------------


def test_certified_greedy_is_the_full_argmax_on_50000_random_mixtures() -> None:
    """Wherever the certificate holds, the argmax of the partial sum is that of the whole."""
    num, exits, vocab = 50_000, 4, 50
    g = torch.Generator().manual_seed(0)
    base = 1.5 * torch.randn(num, 1, vocab, generator=g, dtype=torch.float64)
    spread = torch.tensor([2.4, 1.8, 1.2, 0.6], dtype=torch.float64)[:, None]
    pi = (2 * base + spread * torch.randn(num, exits, vocab, generator=g)).softmax(-1)
    z_J = 2 * torch.randn(exits - 1, num, generator=g, dtype=torch.float64)
    weight = exit_log_probs(z_J).exp().T[..., None]
    partial = (weight * pi).cumsum(1)
    rest = 1 - weight[..., 0].cumsum(1)
    rest[:, -1] = 0
    decided = is_decided(partial, rest, margin=8 * torch.finfo(torch.float64).eps)
    early = decided[:, :-1]
    truth = partial[:, -1].argmax(-1)
    assert (partial[:, :-1].argmax(-1) == truth[:, None])[early].all()
    assert not early[rest[:, :-1] >= 0.5].any(), "undecidable while r_k >= 1/2"
    assert 0.2 < early.any(1).double().mean() < 0.95, "both kinds must occur"


@pytest.mark.parametrize("kernels", ["auto", "graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certified_greedy_reads_the_head_only_when_it_can_decide(
    dtype: torch.dtype, kernels: str
) -> None:
    engine = tiny_engine(dtype, kernels=kernels)
    generation = engine.generate(
        [3], max_new_tokens=60, sampling=SamplingParams(temperature=0), with_log_probs=True
    )
    tokens = list(generation)
    result = generation.result()
    twin = twin_of(engine, [3, *result.token_ids])
    mix_TV = twin.log_mix_TV.exp()
    head_rows = 0
    for token in tokens:
        row = token.position - 1
        top = mix_TV[row].topk(2).values
        if top[0] - top[1] > 1e-5:  # below, rounding may choose
            assert token.token_id == mix_TV[row].argmax()
        rest_E = 1 - twin.log_exit_ET[:, row].exp().cumsum(0)
        assert token.exit_index == 2 or rest_E[token.exit_index] < 0.5
        head_rows += token.exit_index + 1
    assert result.stats.head_rows == head_rows, "each exit once, none beyond the certificate"
    assert result.stats.layers_run < 59 * 5


def test_a_mixture_needs_the_routers() -> None:
    engine = tiny_engine()
    sampling = SamplingParams(top_k=2, filter_scope="mixture")
    for policy in (FixedExit(exit_index=0), RouterGreedy()):
        with pytest.raises(PromptError, match=f"{type(policy).__name__}; use filter_scope='exit'"):
            engine.generate([1], max_new_tokens=1, sampling=sampling, policy=policy)


def test_greedy_with_a_forced_exit_or_router_is_that_exits_argmax() -> None:
    engine = tiny_engine()
    for policy in (FixedExit(exit_index=1), RouterGreedy()):
        tokens = list(
            engine.generate(
                [1, 2], max_new_tokens=30, sampling=SamplingParams(temperature=0), policy=policy
            )
        )
        twin = twin_of(engine, [1, 2, *(token.token_id for token in tokens)])
        for token in tokens:
            row = token.position - 1
            assert token.token_id == twin.logits_ETV[token.exit_index, row].argmax()
            if isinstance(policy, RouterGreedy):
                leaving = [k for k in range(2) if twin.router_logit_JT[k, row] > 0]
                assert token.exit_index == (leaving[0] if leaving else 2)


# --- log-probabilities and scores ----------------------------------------------------------------


@pytest.mark.cases
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("kernels", ["auto", "graph"])
def test_dec_17_every_step_equals_a_full_forward(
    dtype: torch.dtype, tolerance: float, kernels: str
) -> None:
    """50 random prompts: the exit's, the path's and the mixture's log-probability at every step."""
    engine = tiny_engine(dtype, kernels=kernels)
    g = torch.Generator().manual_seed(1)
    near = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    for seed in range(50):
        length = int(torch.randint(1, 20, (), generator=g))
        prompt = torch.randint(0, 40, (length,), generator=g).tolist()
        generation = engine.generate(prompt, max_new_tokens=8, seed=seed, with_log_probs=True)
        tokens = list(generation)
        ids = [*prompt, *(token.token_id for token in tokens)]
        twin = twin_of(engine, ids)
        rows, nexts = torch.arange(length - 1, len(ids) - 1), torch.tensor(ids[length:])
        exits = torch.tensor([token.exit_index for token in tokens])
        log_pi = twin.logits_ETV.log_softmax(-1)
        ours = torch.tensor([token.log_prob for token in tokens], dtype=torch.float64)
        assert_close(ours, log_pi[exits, rows, nexts], **near)
        ours = torch.tensor([token.log_exit for token in tokens], dtype=torch.float64)
        assert_close(ours, twin.log_exit_ET[exits, rows], **near)
        ours = torch.tensor(generation.result().log_mix, dtype=torch.float64)
        assert_close(ours, twin.log_mix_TV[rows, nexts], **near)
        scores = engine.score([ids])
        all_rows, all_nexts = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        assert_close(scores.log_exits[0], log_pi[:, all_rows, all_nexts].T, **near)


def test_log_probs_do_not_change_the_tokens_and_cover_every_law() -> None:
    engine = tiny_engine()
    for law in LAWS.values():
        args = {"max_new_tokens": 12, "sampling": law.sampling, "policy": law.policy, "seed": 3}
        plain = engine.generate([1, 2], **args).result()  # type: ignore[arg-type]
        generation = engine.generate([1, 2], with_log_probs=True, **args)  # type: ignore[arg-type]
        tokens = list(generation)
        assert tuple(token.token_id for token in tokens) == plain.token_ids
        twin = twin_of(engine, [1, 2, *plain.token_ids])
        for token in tokens:
            row = token.position - 1
            assert token.log_exit == pytest.approx(
                float(twin.log_exit_ET[token.exit_index, row]), abs=1e-9
            )
            log_pi_V = twin.logits_ETV[token.exit_index, row].log_softmax(-1)
            assert token.log_prob == pytest.approx(float(log_pi_V[token.token_id]), abs=1e-9)
    assert plain.log_mix is None


@pytest.mark.parametrize("kernels", ["auto", "graph"])
def test_scores_equal_the_twin(kernels: str) -> None:
    engine = tiny_engine(kernels=kernels)
    ids_BT = torch.randint(0, 40, (3, 150), generator=torch.Generator().manual_seed(2))
    scores = engine.score(ids_BT)
    assert scores.log_mix.shape == (3, 149)
    assert scores.log_exits.shape == scores.log_exit_probs.shape == (3, 149, 3)
    for b, ids_T in enumerate(ids_BT):
        twin = twin_of(engine, ids_T.tolist())
        nexts = ids_T[1:]
        rows = torch.arange(149)
        near = {"atol": 1e-10, "rtol": 1e-10}
        assert_close(scores.log_mix[b], twin.log_mix_TV[rows, nexts], **near)
        labels_TE = twin.logits_ETV.log_softmax(-1)[:, rows, nexts].T
        assert_close(scores.log_exits[b], labels_TE, **near)
        assert_close(scores.log_exit_probs[b], twin.log_exit_ET[:, :-1].T, **near)
    low, high = scores.log_exits.amin(-1), scores.log_exits.amax(-1)
    assert ((low <= scores.log_mix + 1e-12) & (scores.log_mix <= high + 1e-12)).all()


def test_scores_in_small_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    ids = [[(5 * i) % 40 for i in range(100)]]
    whole = engine.score(ids)
    monkeypatch.setattr("nvium_titan.decode.score._LOGIT_ELEMENTS", 40 * 7)
    for a, b in zip(whole, engine.score(ids), strict=True):
        assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_a_dense_model_scores_through_the_same_call() -> None:
    config = tiny_config(exit_layers=(), final_adapter=False)
    params = DecoderParams.random(config, seed=0, dtype=torch.float64)
    scores = Engine(params).score([[1, 2, 3, 4]])
    assert torch.equal(scores.log_mix, scores.log_exits[..., 0])
    assert torch.equal(scores.log_exit_probs, torch.zeros(1, 3, 1, dtype=torch.float64))


def test_impossible_scoring_is_refused() -> None:
    engine = tiny_engine(max_seq_len=8)
    engine.score([[1] * 9])
    for ids in ([], [[1]], [[1, 2], [1, 2, 3]]):
        with pytest.raises(PromptError, match="at least one sequence, all of the same length"):
            engine.score(ids)
    with pytest.raises(PromptError, match="9 tokens does not fit into 8"):
        engine.score([[1] * 10])
    with pytest.raises(PromptError, match="token id 40 is unknown"):
        engine.score([[1, 40]])


# --- control of one request ----------------------------------------------------------------------


class FailingExit:
    """A forced exit that fails at one position."""

    law = "approximate: test"
    reads_router = False
    router_temperature = None

    def thresholds(self, *, position: int, uniforms: Sequence[float]) -> list[float]:
        if position == 9:
            return [Failing(ValueError("inside forced mode"))] * len(uniforms)  # type: ignore[list-item]
        return forced_thresholds(0, len(uniforms))


@pytest.mark.cases
def test_ext_07_forcing_an_exit_leaves_no_trace() -> None:
    engine = tiny_engine()

    def normal() -> tuple[object, ...]:
        result = engine.generate([1, 2], max_new_tokens=30, seed=6).result()
        return result.token_ids, result.exit_indices

    before = normal()
    forced = engine.generate([1, 2], max_new_tokens=30, policy=FixedExit(exit_index=0)).result()
    assert set(forced.exit_indices) == {0}
    assert normal() == before
    with pytest.raises(ValueError, match="inside forced mode"):
        engine.generate([1, 2], max_new_tokens=30, policy=FailingExit()).result()
    assert normal() == before


@pytest.mark.cases
def test_ext_09_requests_side_by_side_keep_their_own_settings() -> None:
    """Full depth, forced exit 1 and router-greedy on one engine, token by token in turn."""
    engine = tiny_engine()
    policies = (FixedExit(exit_index=2), FixedExit(exit_index=0), RouterGreedy())
    args = {"max_new_tokens": 25, "sampling": SamplingParams(temperature=0.9), "seed": 4}
    alone = [engine.generate([1, 2], policy=p, **args).result() for p in policies]  # type: ignore[arg-type]
    runs = [engine.generate([1, 2], policy=p, **args) for p in policies]  # type: ignore[arg-type]
    for _ in zip(*runs, strict=True):
        pass
    for policy, single, run in zip(policies, alone, runs, strict=True):
        result = run.result()
        assert result.token_ids == single.token_ids
        assert result.exit_indices == single.exit_indices
        assert result.policy == policy
        assert result.sampling == args["sampling"]
        assert result.law.startswith("approximate")


@pytest.mark.cases
@pytest.mark.parametrize("eos_at", [1, 5, None])
def test_dec_05_generation_ends_at_its_stop_id(
    eos_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EOS forced at step 1, 5 or never; without stop ids it is a token like any other."""
    eos, original = 39, Noise.gumbel

    def gumbel(self: Noise, position: int) -> Tensor:
        noise = original(self, position).clone()
        noise[eos] = 1e9 if eos_at is not None and position == 2 + eos_at - 1 else -1e9
        return noise

    monkeypatch.setattr(Noise, "gumbel", gumbel)
    engine = tiny_engine()
    result = engine.generate([1, 2], max_new_tokens=12, stop_ids=[eos], seed=1).result()
    ignoring = engine.generate([1, 2], max_new_tokens=12, seed=1).result()
    assert len(ignoring.token_ids) == 12
    assert ignoring.finish_reason == "length"
    if eos_at is None:
        assert result.token_ids == ignoring.token_ids
        assert result.finish_reason == "length"
    else:
        assert result.token_ids == ignoring.token_ids[:eos_at]
        assert result.token_ids[-1] == eos
        assert result.finish_reason == "stop"
        assert result.stats.num_new_tokens == eos_at, "nothing after it is counted"


# --- text ----------------------------------------------------------------------------------------


def text_engine() -> Engine:
    return Engine(DecoderParams.random(tiny_config(vocab_size=258), seed=0, num_tokens=256))


@pytest.mark.parametrize("size", [1, 3])
def test_a_stop_string_ends_the_text_before_it(size: int) -> None:
    engine, tokenizer = text_engine(), ByteTokenizer()
    args = {"max_new_tokens": 60, "seed": 2}
    free = TextGeneration(engine.generate([1], **args), tokenizer.stream()).result()  # type: ignore[arg-type]
    assert free.text == tokenizer.decode(list(free.generation.token_ids))
    assert free.stop_string is None
    stop = free.text[20 : 20 + size]
    run = TextGeneration(
        engine.generate([1], **args),  # type: ignore[arg-type]
        tokenizer.stream(),
        stop_strings=[stop, "never there"],
    )
    pieces = list(run)
    result = run.result()
    assert "".join(pieces) == result.text == free.text[: free.text.index(stop)]
    assert all(pieces)
    assert result.stop_string == stop
    assert result.generation.finish_reason == "stop"
    assert len(result.generation.token_ids) < 60


def test_a_held_back_prefix_of_a_stop_string_comes_out_in_the_end() -> None:
    engine, tokenizer = text_engine(), ByteTokenizer()
    generation = engine.generate([1], max_new_tokens=20, seed=2)
    free = tokenizer.decode(list(generation.result().token_ids))
    run = TextGeneration(
        engine.generate([1], max_new_tokens=20, seed=2),
        tokenizer.stream(),
        stop_strings=[free[-3:] + "\x00\x00"],
    )
    assert run.result().text == free
    with pytest.raises(PromptError, match="stop string is empty"):
        TextGeneration(generation, tokenizer.stream(), stop_strings=[""])


def test_stopping_gives_a_result_and_stopping_unstarted_is_an_error() -> None:
    generation = tiny_engine().generate([1], max_new_tokens=20, seed=2)
    with pytest.raises(RuntimeError, match="no token has been asked for"):
        generation.stop()
    generation = tiny_engine().generate([1], max_new_tokens=20, seed=2)
    first = next(generation)
    result = generation.stop()
    assert result.token_ids == (first.token_id,)
    assert result.finish_reason == "stop"


def test_the_thresholds_are_the_law_of_the_router() -> None:
    policy = SampledRouter(temperature=2.0)
    for z in (-3.0, 0.0, 1.5):
        w = 1 / (1 + math.exp(-z / 2))
        (below,) = policy.thresholds(position=0, uniforms=[w - 1e-9])
        (above,) = policy.thresholds(position=0, uniforms=[w + 1e-9])
        assert below < z < above


def test_filtering_at_temperature_zero_is_a_wrong_call() -> None:
    with pytest.raises(ValueError, match="take the argmax"):
        filtered_logits(torch.zeros(3), SamplingParams(temperature=0).filters)
