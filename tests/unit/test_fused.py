"""Junction and draw for graphs: the torch twin against the engine, Triton against the twin.

Without a GPU the kernels run in Triton's interpreter, and are compiled for GPUs, but not run there.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvium_titan.decode.forward.graphs.fused import (
    JunctionResult,
    TorchJunction,
    TritonJunction,
    build_junction,
    draw_in_graph,
    draw_in_triton,
    has_kernels,
)
from nvium_titan.decode.forward.torch import TorchForward
from nvium_titan.decode.noise import Noise
from nvium_titan.decode.sampling import Draw, Filters, SamplingParams, draw_token
from tests.gpu.imitation import ImitatedGraphs
from tests.helpers.triton_worker import tiny_params

ROOT = Path(__file__).resolve().parents[2]
SEED = 11
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TEMPERATURES = (1.0, 0.0, 0.7, 2.5, 1e-6, 1e-300)
VOCAB = 1100
"""Three blocks of ids, the last one not full."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def tiny_model(dtype: torch.dtype) -> TorchForward:
    return TorchForward(tiny_params(dtype), num_slots=8)


def states(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(8, 32, generator=generator).to(dtype)


def at(position: int) -> Tensor:
    return torch.tensor([position])


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def draw_inputs(position: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return key and temperature of the noise at a position, as a graph's static inputs."""
    key = Noise(SEED, vocab_size=VOCAB).token_key(position)
    key = key - (1 << 64) if key >> 63 else key
    return torch.tensor([key]), torch.tensor([temperature], dtype=torch.float64)


def draw_plain(logits_V: Tensor, key_1: Tensor, temperature_1: Tensor) -> Tensor:
    return draw_in_graph(logits_V, key_1, Filters(temperature_1))


def random_logits(position: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(position)
    return torch.randn(VOCAB, generator=generator, dtype=torch.float64).to(dtype)


# --- the twin -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("junction_index", [0, 1])
def test_twin_gives_to_the_bit_what_the_engine_does(
    dtype: torch.dtype, junction_index: int
) -> None:
    model, states_SD = tiny_model(dtype), states(dtype)
    for position in range(8):
        n_1D = model.exit_norm(junction_index, states_SD[position : position + 1])
        z = model.router_logit(junction_index, n_1D)
        for threshold in (float(z), float(z) - 1e-3, 0.3, math.inf, -math.inf):
            found = TorchJunction(model, junction_index)(states_SD, at(position), number(threshold))
            assert torch.equal(found.n_1D, n_1D)
            assert torch.equal(found.router_logit_1, z)
            assert found.leaves.shape == found.goes_on.shape == ()
            assert bool(found.leaves) == (float(z) > threshold)
            assert bool(found.goes_on) != bool(found.leaves)


def test_a_forced_exit_is_taken_whatever_the_router_says() -> None:
    junction = TorchJunction(tiny_model(torch.float32), 0)
    broken_SD = torch.full((8, 32), math.nan)
    assert bool(junction(broken_SD, at(3), number(-math.inf)).leaves)
    assert not bool(junction(broken_SD, at(3), number(math.inf)).leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=5, temperature=0.6),
        SamplingParams(top_k=VOCAB + 9, temperature=2.0),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.3, temperature=3.0),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=9, top_p=0.9, min_p=0.05, temperature=1.5),
    ],
    ids=str,
)
def test_a_filtered_draw_is_that_of_noise(dtype: torch.dtype, sampling: SamplingParams) -> None:
    noise = Noise(SEED, vocab_size=VOCAB)
    _, top_k, top_p, log_min_p = sampling.filters
    for position in range(60):
        logits_V = random_logits(position, dtype)
        if position % 3 == 0:
            logits_V = (2 * logits_V).round()  # ties
        if position % 5 == 0:
            logits_V[::2] = -math.inf
        expected = draw_token(logits_V, Draw(noise, position, sampling))
        key_1, temperature_1 = draw_inputs(position, sampling.temperature)
        filters = Filters(
            temperature_1,
            torch.tensor([VOCAB if top_k is None else top_k]),
            number(math.inf if top_p is None else top_p)[None],
            number(-math.inf if log_min_p is None else log_min_p)[None],
        )
        found_1 = draw_in_graph(logits_V, key_1, filters)
        assert found_1.tolist() == [expected]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twin_draws_the_token_of_noise_draw(dtype: torch.dtype, temperature: float) -> None:
    noise = Noise(SEED, vocab_size=VOCAB)
    sampling = SamplingParams(temperature=temperature)
    for position in range(60):
        logits_V = random_logits(position, dtype)
        expected = draw_token(logits_V, Draw(noise, position, sampling))
        found_1 = draw_plain(logits_V, *draw_inputs(position, temperature))
        assert (found_1.shape, found_1.dtype) == ((1,), torch.int64)
        assert int(found_1) == expected


def test_on_the_cpu_the_twin_is_taken() -> None:
    assert not has_kernels(torch.device("cpu"))
    assert isinstance(build_junction(tiny_model(torch.float32), 0), TorchJunction)
    draw = Draw(Noise(SEED, vocab_size=VOCAB), 5, SamplingParams())
    expected = draw_token(random_logits(5), draw)
    assert draw_plain(random_logits(5), *draw_inputs(5, 1.0)).tolist() == [expected]


def test_both_can_be_captured_and_read_their_inputs_anew_at_every_replay() -> None:
    model, states_SD = tiny_model(torch.float64), states(torch.float64)
    junction = build_junction(model, 1)
    position_1, threshold = at(0), number(0.0)
    key_1, temperature_1 = draw_inputs(0, 1.0)
    logits_V = random_logits(0)
    z_1 = torch.zeros(1, dtype=torch.float64)
    decisions_2 = torch.zeros(2, dtype=torch.int64)
    token_1 = torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        found = junction(states_SD, position_1, threshold)
        z_1.copy_(found.router_logit_1)
        decisions_2[:1].copy_(found.leaves)
        decisions_2[1:].copy_(found.goes_on)
        token_1.copy_(draw_plain(logits_V, key_1, temperature_1))

    graph = ImitatedGraphs().capture(step, outputs=(z_1, decisions_2, token_1))
    for position, temperature in enumerate((1.0, 0.0, 0.7, 1e-6)):
        position_1.fill_(position)
        for static, value in zip((key_1, temperature_1), draw_inputs(position, temperature)):  # noqa: B905
            static.copy_(value)
        logits_V.copy_(random_logits(position))
        graph.replay()
        expected = TorchJunction(model, 1)(states_SD, position_1, threshold)
        assert torch.equal(z_1, expected.router_logit_1)
        assert decisions_2.tolist() == [int(expected.leaves), int(expected.goes_on)]
        assert int(token_1) == int(draw_plain(logits_V, key_1, temperature_1))


# --- Triton ---------------------------------------------------------------------------------------


def junction_cases() -> list[tuple[torch.dtype, int, Tensor, Tensor, Tensor]]:
    """Return for each type and junction: thresholds just below and above z, and the infinite."""
    cases = []
    for dtype in DTYPES:
        model, states_SD = tiny_model(dtype), states(dtype)
        for junction_index, position in ((0, 0), (0, 5), (1, 7)):
            twin = TorchJunction(model, junction_index)
            z = float(twin(states_SD, at(position), number(0.0)).router_logit_1)
            gap = 0.5 if dtype == torch.bfloat16 else 1e-3
            for threshold in (z - gap, z + gap, math.inf, -math.inf):
                cases.append((dtype, junction_index, states_SD, at(position), number(threshold)))
    return cases


def draw_cases() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return draws at every temperature and type, then vocabularies of odd sizes, then ties."""
    cases = [
        (random_logits(position, dtype), *draw_inputs(position, temperature))
        for dtype in DTYPES
        for temperature in TEMPERATURES
        for position in range(4)
    ]
    cases += [(random_logits(7)[:size], *draw_inputs(7, 1.0)) for size in (1, 2, 512, 513)]
    tied_V = torch.zeros(VOCAB)
    removed_V = random_logits(3).masked_fill(torch.arange(VOCAB) != 1050, -math.inf)
    cases += [(logits_V, *draw_inputs(3, t)) for logits_V in (tied_V, removed_V) for t in (0, 1.0)]
    return cases


@cache
def interpreted(folder: Path) -> dict[str, list[Tensor]]:
    """Return what the kernels give in Triton's interpreter; one process for all tests."""
    torch.save({"junctions": junction_cases(), "draws": draw_cases()}, folder / "cases.pt")
    subprocess.run(
        [
            sys.executable, "-m", "tests.helpers.triton_worker",
            str(folder / "cases.pt"), str(folder / "results.pt"),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, check=True,
    )  # fmt: skip
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def check_junctions(results: list[JunctionResult]) -> None:
    # bfloat16: the twin rounds between the layers, the kernels do not.
    bounds = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.1}
    for case, found in zip(junction_cases(), results, strict=True):
        dtype, junction_index, *inputs = case
        expected = TorchJunction(tiny_model(dtype), junction_index)(*inputs)
        bound = bounds[dtype]
        rounding = 2**-7 if dtype == torch.bfloat16 else bound
        torch.testing.assert_close(found.n_1D, expected.n_1D, atol=rounding, rtol=rounding)
        torch.testing.assert_close(
            found.router_logit_1, expected.router_logit_1, atol=bound, rtol=bound
        )
        assert bool(found.leaves) == bool(expected.leaves)
        assert bool(found.goes_on) == bool(expected.goes_on)


def check_draws(tokens: list[int]) -> None:
    expected = [int(draw_plain(*case)) for case in draw_cases()]
    assert tokens == expected
    assert expected[-4] == 0, "of equal logits the first"
    assert expected[-2:] == [1050, 1050], "removed tokens are never drawn"


@needs_triton
def test_triton_junction_equals_its_twin(folder: Path) -> None:
    check_junctions([JunctionResult(*result) for result in interpreted(folder)["junctions"]])


@needs_triton
def test_triton_draws_the_token_of_its_twin(folder: Path) -> None:
    check_draws([int(token_1) for token_1 in interpreted(folder)["draws"]])


@needs_triton
def test_triton_kernels_compile_for_gpus() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.triton_compile"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_triton_kernels_on_a_gpu_equal_their_twins() -> None:
    found = []
    for dtype, junction_index, *inputs in junction_cases():
        junction = TritonJunction(tiny_params(dtype, device="cuda"), junction_index)
        result = junction(*(tensor.cuda() for tensor in inputs))
        found.append(JunctionResult(*(tensor.cpu() for tensor in result)))
    check_junctions(found)
    check_draws([int(draw_in_triton(*(tensor.cuda() for tensor in case))) for case in draw_cases()])
