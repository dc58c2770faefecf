"""Every layout trains the same model: from one seed checkpoint, 20 steps in float32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from nvium_titan.convert.export import load_native_tensors, read_step_folder
from tests.helpers.layouts import decoded_logits, largest_deviations, rank_pieces, train_layouts
from tests.helpers.runs import rows_of, tiny_settings, train_here, write_toml

pytestmark = pytest.mark.distributed

IDS = list(b"the quick brown fox jumps over the lazy dog, and 3 more dogs")

Tables = Mapping[str, Mapping[str, object]]


def tables(
    local_batch_size: int,
    *,
    kind: str = "none",
    is_compiled: bool = False,
    validates: bool = False,
    **parallelism: object,
) -> Tables:
    """Return the tables of a layout of the tiny model; 8 sequences a step in any layout."""
    training: dict[str, object] = {
        "steps": 20, "global_batch_size": 8, "local_batch_size": local_batch_size,
    }  # fmt: skip
    if "pipeline_parallel_degree" in parallelism:
        training["disable_cuda_graphs"] = True
        parallelism["pipeline_parallel_microbatch_size"] = 2
    return {
        "training": training,
        "model": {"num_layers": 5},
        "nvium": {"num_exits": 3, "exit_layers": [2, 4]},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"interval": 100},
        "parallelism": parallelism,
        "activation_checkpoint": {"kind": kind},
        "compile": {"enable": is_compiled},
        "validator": {"enable": validates, "freq": 10, "steps": 2},
    }


PP = {"pipeline_parallel_degree": 2}
# Embedding and head count as a layer each: 3 + 2 layers. Without the head: 2 + 3, or 1 + 2 + 1 + 1.
HEAD_COUNTS_NOTHING = {**PP, "pipeline_parallel_last_stage_less_layers": 0}
INTERLEAVED = {**HEAD_COUNTS_NOTHING, "pipeline_parallel_schedule": "Interleaved1F1B"}
TP = {"tensor_parallel_degree": 2}

TWO: Mapping[str, Tables] = {
    "fsdp2": tables(4),
    "tp2": tables(8, **TP),
    "pp2-1f1b": tables(8, validates=True, **PP),
    "pp2-interleaved": tables(8, validates=True, **INTERLEAVED),
    "fsdp2-accumulate4": tables(1),
    "fsdp2-ac-full": tables(4, kind="full"),
    "fsdp2-ac-selective": tables(4, kind="selective"),
}
TWO_SLOW: Mapping[str, Tables] = {
    "tp2-no-sp": tables(8, **TP, enable_sequence_parallel=False),
    "pp2-1f1b-uneven": tables(8, **HEAD_COUNTS_NOTHING),
    "pp2-gpipe": tables(8, **PP, pipeline_parallel_schedule="GPipe"),
    "pp2-looped-bfs": tables(8, **INTERLEAVED | {"pipeline_parallel_schedule": "LoopedBFS"}),
    "fsdp2-compile": tables(4, is_compiled=True),
    "tp2-compile": tables(8, is_compiled=True, **TP),
    # Last: the budget is a setting of the process.
    "fsdp2-memory-budget": tables(4, kind="memory_budget", is_compiled=True),
}
FOUR: Mapping[str, Tables] = {
    "fsdp4": tables(2),
    "hsdp2x2": tables(2, data_parallel_replicate_degree=2),
    "tp2-fsdp2": tables(4, **TP),
    "pp2-fsdp2": tables(4, **PP),
    "pp2-interleaved-fsdp2": tables(4, **INTERLEAVED),
    "pp2-tp2": tables(8, **PP, **TP),
}


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """The run that every layout is compared with."""

    folder: Path
    logits_ETV: Tensor
    routers_JT: Tensor
    parameters: dict[str, int]
    """Elements of each parameter."""

    def settings(self, layouts: Mapping[str, Tables]) -> dict[str, dict[str, object]]:
        """Return the settings of layouts that start from the same seed checkpoint."""
        start = {"initial_load_path": str(self.folder / "seed" / "checkpoint" / "step-0")}
        return {
            name: tiny_settings(
                self.folder, **{**layout, "checkpoint": {**layout["checkpoint"], **start}}
            )
            for name, layout in layouts.items()
        }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    folder = tmp_path_factory.mktemp("layouts")
    toml = write_toml(folder, **tables(8, validates=True))
    where = ["--dump_folder", str(folder / "seed"), "--checkpoint.create_seed_checkpoint"]
    assert train_here(toml, *where) == 0
    start = str(folder / "seed" / "checkpoint" / "step-0")
    where = ["--dump_folder", str(folder / "one"), "--checkpoint.initial_load_path", start]
    assert train_here(toml, *where) == 0
    logits_ETV, routers_JT = decoded_logits(folder / "one", folder / "one-bundle", IDS)
    sizes = native_sizes(folder / "one")
    return OneProcess(folder=folder, logits_ETV=logits_ETV, routers_JT=routers_JT, parameters=sizes)


def native_sizes(run: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, tensor in load_native_tensors(read_step_folder(run)).items():
        name = re.sub(r"\.w[qkv]\.weight$", ".wqkv.weight", name)  # saved apart, trained as one
        sizes[name] = sizes.get(name, 0) + tensor.numel()
    return sizes


@pytest.fixture(scope="module")
def two(one: OneProcess) -> OneProcess:
    train_layouts(one.folder, one.settings(TWO), num_processes=2, timeout_s=400)
    return one


@pytest.fixture(scope="module")
def two_slow(one: OneProcess) -> OneProcess:
    train_layouts(one.folder, one.settings(TWO_SLOW), num_processes=2, timeout_s=1500)
    return one


@pytest.fixture(scope="module")
def four(one: OneProcess) -> OneProcess:
    train_layouts(one.folder, one.settings(FOUR), num_processes=4, timeout_s=900)
    return one


def assert_trains_alike(one: OneProcess, name: str) -> None:
    run = one.folder / name
    found = largest_deviations(run, one.folder / "one")
    print(name, {key: f"{value:.1e}" for key, value in found.items()})
    assert len(rows_of(run)) == 20
    assert max(found.values()) < 1e-4, found
    logits_ETV, routers_JT = decoded_logits(run, one.folder / f"{name}-bundle", IDS)
    print("logits", (logits_ETV - one.logits_ETV).abs().max().item())
    assert_close(logits_ETV, one.logits_ETV, rtol=0, atol=1e-5)
    assert_close(routers_JT, one.routers_JT, rtol=0, atol=1e-5)


def assert_tensor_ranks_agree(run: Path) -> None:
    """Check that what TP keeps whole is the same on both ranks of a pair, to the bit."""
    ranks = rank_pieces(run)
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        assert first.keys() == second.keys()
        whole = [name for name, (_, is_whole) in first.items() if is_whole]
        assert any("router.fc1.weight" in name for name in whole)
        assert not any("feed_forward" in name for name in whole)
        for name in whole:
            assert torch.equal(first[name][0], second[name][0]), name


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_alike(two: OneProcess, name: str) -> None:
    assert_trains_alike(two, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_SLOW)
def test_two_processes_train_alike_slowly(two_slow: OneProcess, name: str) -> None:
    assert_trains_alike(two_slow, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_alike(four: OneProcess, name: str) -> None:
    assert_trains_alike(four, name)


@pytest.mark.parametrize("name", ["pp2-1f1b", "pp2-interleaved"])
def test_pipelines_validate_alike(two: OneProcess, name: str) -> None:
    found, wanted = rows_of(two.folder / name, "val"), rows_of(two.folder / "one", "val")
    assert [row.step for row in found] == [row.step for row in wanted] == [1, 10, 20]
    for got, want in zip(found, wanted, strict=True):
        assert got.loss == pytest.approx(want.loss, rel=1e-6)
        assert got.exit_ce == pytest.approx(want.exit_ce, rel=1e-6)
        assert got.exit_shares == pytest.approx(want.exit_shares, rel=1e-5)
        assert got.expected_depth == pytest.approx(want.expected_depth, rel=1e-5)


@pytest.mark.cases
def test_dis_05_replicated_weights_stay_equal_across_tensor_ranks(two: OneProcess) -> None:
    assert_tensor_ranks_agree(two.folder / "tp2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-fsdp2", "pp2-tp2"])
def test_replicated_weights_stay_equal_in_products(four: OneProcess, name: str) -> None:
    assert_tensor_ranks_agree(four.folder / name)


@pytest.mark.cases
@pytest.mark.parametrize("name", ["pp2-1f1b", "pp2-interleaved"])
def test_dis_03_every_layer_and_exit_lies_on_one_stage(two: OneProcess, name: str) -> None:
    ranks = rank_pieces(two.folder / name)
    held = [(key, piece.numel()) for rank in ranks for key, (piece, _) in rank.items()]
    assert len(held) == len(two.parameters)
    assert dict(held) == two.parameters
    for rank in ranks:
        for layer in (1, 3):  # exits after layers 2 and 4
            inside = [key for key in rank if key.startswith(f"layers.{layer}.")]
            assert any("junction" in key for key in inside) == bool(inside)
