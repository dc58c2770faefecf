"""Every layout trains the same model: from one seed checkpoint, 20 steps in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import tomli_w
import torch
from torch import Tensor

from nvium_titan.convert.export import load_native_tensors, read_step_folder
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.text.tokenizer import ByteTokenizer
from tests.helpers.layouts import (
    decoded_logits,
    decoder_of,
    largest_deviations,
    rank_pieces,
    train_layouts,
    validated,
)
from tests.helpers.runs import MEAN_ROUNDING, rows_of, tiny_settings, train_here, write_toml
from tests.helpers.tolerance import assert_alike, model_rounding

pytestmark = pytest.mark.distributed

IDS = list(b"the quick brown fox jumps over the lazy dog, and 3 more dogs")

# What `tables` below and `tiny_settings` make of it.
SHAPE = replace(
    flavor_shape("debug"), num_layers=5, dim=32, num_heads=2, num_kv_heads=2, ffn_dim=64,
    exit_layers=(2, 4),
)  # fmt: skip

Tables = Mapping[str, Mapping[str, object]]


def tables(
    local_batch_size: int,
    *,
    steps: int = 20,
    precision: str = "float32",
    kind: str = "none",
    is_compiled: bool = False,
    validates: bool = False,
    **parallelism: object,
) -> Tables:
    """Return the tables of a layout of the tiny model; 8 sequences a step in any layout."""
    training: dict[str, object] = {
        "steps": steps, "global_batch_size": 8, "local_batch_size": local_batch_size,
        "mixed_precision_param": precision,
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
    "fsdp2": tables(4, validates=True),
    "tp2": tables(8, steps=30, validates=True, **TP),
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
MIXED: Mapping[str, Tables] = {"fsdp2-bf16": tables(4, precision="bfloat16")}
MIXED_SLOW: Mapping[str, Tables] = {
    "fsdp2-accumulate4-bf16": tables(1, precision="bfloat16"),
    "tp2-bf16": tables(8, precision="bfloat16", **TP),
    "pp2-1f1b-bf16": tables(8, precision="bfloat16", **PP),
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

    @cached_property
    def long(self) -> Path:
        """The same run, 30 steps long."""
        return self.train("one-long", tables(8, steps=30))

    def decoded(self, run: Path) -> tuple[Tensor, Tensor]:
        """Return logits (E, T, V) and router logits (J, T) of `IDS`."""
        bundle = self.folder / f"{run.name}-bundle"
        return decoded_logits(decoder_of(run, bundle), IDS)

    def settings(self, layouts: Mapping[str, Tables]) -> dict[str, dict[str, object]]:
        """Return the settings of layouts that start from the same seed checkpoint."""
        start = {"initial_load_path": str(self.folder / "seed" / "checkpoint" / "step-0")}
        lines = {"path": str(self.folder / "lines.jsonl"), "split": "all"}
        return {
            name: tiny_settings(
                self.folder,
                **{
                    **layout,
                    "checkpoint": {**layout["checkpoint"], **start},
                    "validator": {**layout["validator"], "dataloader": lines},
                },
            )
            for name, layout in layouts.items()
        }

    def train(self, name: str, layout: Tables) -> Path:
        """Train in this process from the same seed checkpoint; return the run."""
        run = self.folder / name
        if not run.exists():
            toml = self.folder / f"{name}.toml"
            toml.write_text(tomli_w.dumps(self.settings({name: layout})[name]))
            assert train_here(toml, "--dump_folder", str(run)) == 0
        return run


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    folder = tmp_path_factory.mktemp("layouts")
    # With BOS and EOS each document is a sequence of 64 and the label of its last token.
    lines = [json.dumps({"text": f"{n}: the lazy dog looks on".ljust(63, "!")}) for n in range(16)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    toml = write_toml(folder, **tables(8))
    where = ["--dump_folder", str(folder / "seed"), "--checkpoint.create_seed_checkpoint"]
    assert train_here(toml, *where) == 0
    one = OneProcess(folder=folder)
    one.train("one", tables(8, validates=True))
    return one


def native_sizes(run: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, tensor in load_native_tensors(read_step_folder(run)).items():
        name = re.sub(r"\.w[qkv]\.weight$", ".wqkv.weight", name)  # saved apart, trained as one
        sizes[name] = sizes.get(name, 0) + tensor.numel()
    return sizes


@pytest.fixture(scope="module")
def two(one: OneProcess) -> OneProcess:
    train_layouts(one.folder, one.settings({**TWO, **MIXED}), num_processes=2)
    return one


@pytest.fixture(scope="module")
def two_slow(one: OneProcess) -> OneProcess:
    layouts = {**MIXED_SLOW, **TWO_SLOW}
    train_layouts(one.folder, one.settings(layouts), num_processes=2)
    return one


@pytest.fixture(scope="module")
def four(one: OneProcess) -> OneProcess:
    train_layouts(one.folder, one.settings(FOUR), num_processes=4)
    return one


def near(num_tokens: int) -> dict[str, float]:
    """Return how near the logits of two float32 programs are, for `assert_alike`."""
    rounding = model_rounding(torch.float32, SHAPE, num_tokens=num_tokens)
    return {"tolerance": 2 * rounding, "as_a_whole": 1e-5}


def assert_trains_alike(one: OneProcess, name: str) -> None:
    run = one.folder / name
    alone = one.long if name == "tp2" else one.folder / "one"
    found = largest_deviations(run, alone)
    print(name, {key: f"{value:.1e}" for key, value in found.items()})
    assert len(rows_of(run)) == (30 if name == "tp2" else 20)
    assert max(found.values()) < 1e-4, found
    (logits_ETV, routers_JT), (want_ETV, want_JT) = one.decoded(run), one.decoded(alone)
    print("logits", (logits_ETV - want_ETV).abs().max().item())
    assert_alike(logits_ETV, want_ETV, **near(len(IDS)))
    assert_alike(routers_JT, want_JT, **near(len(IDS)))


def assert_trains_alike_in_bfloat16(one: OneProcess, name: str) -> None:
    """Check a layout with bfloat16 weights and activations, and float32 reductions.

    A rank's gradients are rounded to bfloat16 (8 bits) before they are summed over ranks or
    micro-batches, so another layout rounds others. The curve stays as near to one process as that
    stays to float32, whose master weights it has.
    """
    alone = one.train("one-bf16", tables(8, precision="bfloat16"))
    found = largest_deviations(one.folder / name, alone)
    print(name, {key: f"{value:.1e}" for key, value in found.items()})
    from_float32 = largest_deviations(alone, one.folder / "one")
    print("float32", {key: f"{value:.1e}" for key, value in from_float32.items()})
    assert 1e-5 < from_float32["loss"] < 1e-3
    assert len(rows_of(one.folder / name)) == 20
    assert max(found["loss"], found["exit_ce"]) < 3e-4
    assert max(found["exit_shares"], found["expected_depth"]) < 4e-3
    assert found["grad_norm"] < 1e-2
    pieces = [piece for rank in rank_pieces(one.folder / name) for piece, _ in rank.values()]
    assert {piece.dtype for piece in pieces} == {torch.float32}


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
        assert got.loss == pytest.approx(want.loss, rel=MEAN_ROUNDING)
        assert got.exit_ce == pytest.approx(want.exit_ce, rel=MEAN_ROUNDING)
        assert got.exit_shares == pytest.approx(want.exit_shares, rel=1e-5)
        assert got.expected_depth == pytest.approx(want.expected_depth, rel=1e-5)


def test_two_processes_train_alike_in_bfloat16(two: OneProcess) -> None:
    assert_trains_alike_in_bfloat16(two, "fsdp2-bf16")


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED_SLOW)
def test_two_processes_train_alike_in_bfloat16_slowly(two_slow: OneProcess, name: str) -> None:
    assert_trains_alike_in_bfloat16(two_slow, name)


@pytest.mark.cases
def test_dis_05_tensor_ranks_train_alike_for_30_steps_and_keep_equal_copies(
    two: OneProcess,
) -> None:
    run = two.folder / "tp2"
    assert len(rows_of(run)) == 30
    assert max(largest_deviations(run, two.long).values()) < 1e-4
    assert_tensor_ranks_agree(run)


@pytest.mark.cases
@pytest.mark.parametrize(("name", "layout"), [("pp2-1f1b", "pp"), ("tp2", "tp"), ("fsdp2", "fsdp")])
def test_ckp_10_one_process_decodes_what_each_layout_computes(
    two: OneProcess, name: str, layout: str
) -> None:
    seen = validated(two.folder / name, layout=layout)
    engine = decoder_of(two.folder / name, two.folder / f"{name}-again")
    assert len({tuple(ids) for ids in seen.ids_ST.tolist()}) == 16
    for ids_T, logits_ETV, routers_JT in zip(*seen, strict=True):
        is_start = ids_T == ByteTokenizer.bos_id
        assert is_start[0]
        assert is_start.sum() == 1
        found_ETV, found_JT = decoded_logits(engine, ids_T.tolist())
        assert found_ETV.shape == (3, 64, 264)
        assert_alike(found_ETV, logits_ETV, **near(64))
        assert_alike(found_JT, routers_JT, **near(64))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-fsdp2", "pp2-tp2"])
def test_replicated_weights_stay_equal_in_products(four: OneProcess, name: str) -> None:
    assert_tensor_ranks_agree(four.folder / name)


@pytest.mark.cases
@pytest.mark.parametrize("name", ["pp2-1f1b", "pp2-interleaved"])
def test_dis_03_every_layer_and_exit_lies_on_one_stage(two: OneProcess, name: str) -> None:
    ranks = rank_pieces(two.folder / name)
    held = [(key, piece.numel()) for rank in ranks for key, (piece, _) in rank.items()]
    sizes = native_sizes(two.folder / "one")
    assert len(held) == len(sizes)
    assert dict(held) == sizes
    for rank in ranks:
        for layer in (1, 3):  # exits after layers 2 and 4
            inside = [key for key in rank if key.startswith(f"layers.{layer}.")]
            assert any("junction" in key for key in inside) == bool(inside)
