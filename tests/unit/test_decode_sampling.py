"""Counter-based noise, filters and the law of the draw."""

from __future__ import annotations

import math

import pytest
import torch

from nvium_titan.core.mixture import exit_log_probs
from nvium_titan.decode import Noise, RouterGreedy, SampledRouter, SamplingParams
from nvium_titan.decode.laws import log_sigmoid
from nvium_titan.decode.noise import gumbel_noise, uniform
from nvium_titan.decode.policy import ExitPolicy
from nvium_titan.decode.sampling import choose, filtered_logits
from nvium_titan.errors import PromptError
from tests.helpers.exits import exit_of
from tests.helpers.statistics import chi_square_p

NUM_DRAWS = 200_000
# Every chi-square below fails by chance with this probability; the seeds are fixed.
P_LIMIT = 1e-3


def splitmix64(x: int) -> int:
    """The published finaliser, written out again."""
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_splitmix64_known_values() -> None:
    # First outputs of the reference generator (java.util.SplittableRandom's mix64) from state 0.
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    assert splitmix64(golden) == 0xE220A8397B1DCDAF
    assert splitmix64(2 * golden & mask) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 + 5, 10**30])
def test_tensor_noise_equals_integer_arithmetic(seed: int) -> None:
    """The vectorised int64 hash, wrapping and with masked shifts, is SplitMix64."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    noise = gumbel_noise(seed, range(5, 8), 11)
    for row, position in enumerate(range(5, 8)):
        stream_key = splitmix64((seed + golden) & mask)
        key = splitmix64((stream_key + (position + 1) * golden) & mask)
        for token in range(11):
            bits = splitmix64((key + (token + 1) * golden) & mask) >> 12
            u = (bits + 0.5) * 2.0**-52
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-14)


def test_noise_depends_on_seed_position_and_stream_only() -> None:
    noise = Noise(9, vocab_size=50)
    forward = [noise.gumbel(p).clone() for p in range(100)]
    backward = {p: Noise(9, vocab_size=50).gumbel(p).clone() for p in reversed(range(100))}
    assert all(torch.equal(forward[p], backward[p]) for p in range(100))
    draws = {uniform(s, p, k) for s in range(10) for p in range(10) for k in range(4)}
    assert len(draws) == 400
    assert uniform(0, 3, 1) == uniform(2**64, 3, 1)


def test_uniforms_are_uniform_and_open() -> None:
    values = torch.tensor([uniform(1, p, 1) for p in range(50_000)], dtype=torch.float64)
    assert 0 < values.min() < values.max() < 1
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert chi_square_p(counts, torch.full((20,), 1 / 20)) > P_LIMIT
    # Neighbouring positions are independent: the pairs fill a square.
    pairs = torch.histogramdd(values.view(-1, 2), bins=[6, 6], range=[0.0, 1.0, 0.0, 1.0]).hist
    assert chi_square_p(pairs.flatten(), torch.full((36,), 1 / 36)) > P_LIMIT


def three_exits(vocab_size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fixed logits of three exits and the router logits of two junctions."""
    generator = torch.Generator().manual_seed(4)
    return 2 * torch.randn(3, vocab_size, generator=generator).double(), torch.tensor([-0.4, 0.3])


def draw_tokens(
    logits_EV: torch.Tensor,
    router_logits: torch.Tensor,
    policy: ExitPolicy,
    sampling: SamplingParams,
) -> torch.Tensor:
    """Draw as the engine does: junctions in order, then the exit's Gumbel maximum."""
    uniforms = [[uniform(21, p, 1 + k) for k in range(2)] for p in range(NUM_DRAWS)]
    exits = torch.tensor(
        [
            exit_of(policy.thresholds(position=p, uniforms=u), router_logits.tolist())
            for p, u in enumerate(uniforms)
        ]
    )
    gumbel = gumbel_noise(21, range(NUM_DRAWS), logits_EV.shape[-1])
    return choose(logits_EV[exits], gumbel, sampling.filters)


@pytest.mark.cases
def test_ext_02_the_default_draws_from_the_mixture_and_router_greedy_does_not() -> None:
    logits_EV, z_J = three_exits()
    mixture = (exit_log_probs(z_J).exp()[:, None] * logits_EV.softmax(-1)).sum(0)
    tokens = draw_tokens(logits_EV, z_J, SampledRouter(), SamplingParams())
    assert chi_square_p(tokens.bincount(minlength=8), mixture) > P_LIMIT
    assert SampledRouter().law == "exact mixture"
    greedy = draw_tokens(logits_EV, z_J, RouterGreedy(), SamplingParams())
    assert chi_square_p(greedy.bincount(minlength=8), mixture) < 1e-12
    assert chi_square_p(greedy.bincount(minlength=8), logits_EV[1].softmax(-1)) > P_LIMIT
    for policy in (RouterGreedy(), SampledRouter(temperature=2.0)):
        assert policy.law.startswith("approximate")


@pytest.mark.parametrize("z", [-math.inf, -800.0, -3.0, 0.0, 3.0, 800.0, math.inf])
def test_the_host_log_sigmoid_does_not_overflow(z: float) -> None:
    log = torch.nn.functional.logsigmoid(torch.tensor(z, dtype=torch.float64)).item()
    assert log_sigmoid(z) == pytest.approx(log, rel=1e-14)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 2.0),
        ("filter_scope", "token"),
    ],
)
def test_impossible_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(PromptError, match=f"{field}="):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_impossible_router_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(PromptError, match="router temperature"):
        SampledRouter(temperature=temperature)


def probs(p: list[float], **settings: float) -> list[float]:
    logits = filtered_logits(
        torch.tensor(p, dtype=torch.float64).log(), SamplingParams(**settings).filters
    )  # type: ignore[arg-type]
    return [round(x, 12) for x in logits.softmax(-1).tolist()]


def test_filters_on_paper() -> None:
    p = [0.2, 0.5, 0.3]
    assert probs(p, top_k=1) == [0, 1, 0]
    assert probs(p, top_k=2) == [0, 0.625, 0.375]
    assert probs(p, top_k=99) == [0.2, 0.5, 0.3]
    assert probs(p, top_p=0.5) == [0, 1, 0]
    assert probs(p, top_p=0.51) == [0, 0.625, 0.375]
    assert probs(p, top_p=0.0) == [0, 1, 0]
    assert probs(p, top_p=1.0, top_k=3) == [0.2, 0.5, 0.3]
    assert probs(p, min_p=0.59) == [0, 0.625, 0.375]
    assert probs(p, min_p=0.61) == [0, 1, 0]
    assert probs(p, min_p=1.0) == [0, 1, 0]
    assert probs(p, temperature=0.5) == pytest.approx([4 / 38, 25 / 38, 9 / 38])


def test_ties_go_to_the_lower_id() -> None:
    p = [0.25, 0.25, 0.25, 0.25]
    assert probs(p, top_k=2) == [0.5, 0.5, 0, 0]
    assert probs(p, top_p=0.5) == [0.5, 0.5, 0, 0]
    assert probs(p, top_p=0.0) == [1, 0, 0, 0]
    assert probs(p, min_p=1.0) == p


@pytest.mark.parametrize("temperature", [1e-320, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0 - 1e-3, -math.inf, -2.0])
    out = filtered_logits(logits, SamplingParams(temperature=temperature).filters)
    p = out.softmax(-1)
    assert p.isfinite().all()
    assert p[3] == 0
    if temperature < 1:
        assert p[1] == 1
    else:
        assert p[[0, 1, 2, 4]].tolist() == pytest.approx([0.25] * 4, rel=1e-4)
