# ruff: noqa: E501 - one case a line
"""`nvium train --dry-run`: the shipped large files, memory by rank, what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nvium_titan.config_registry import config_files
from nvium_titan.core.cost import count_params
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.errors import ConfigError
from nvium_titan.train import launch as train
from nvium_titan.train.config import load_config
from nvium_titan.train.dry_run import DryRun, dry_run
from nvium_titan.train.trainer import NviumTrainer

FILES = config_files()
H200_BYTES = 139 * 2**30


def dry_run_of(name: str, *flags: str, world_size: int | None = None) -> DryRun:
    config = load_config(NviumTrainer.Config(), FILES[name], flags)
    return dry_run(config, world_size=world_size)


def params_of(flavor: str) -> int:
    return sum(count_params(flavor_shape(flavor)).values())


@pytest.mark.parametrize(
    ("name", "ranks", "shards"),
    [
        ("quadrivium_1536x48_h200x4", 4, 4),
        ("quadrivium_1536x48_h200x8", 8, 8),
        ("quadrivium_3b_h200x16", 16, 8),
        ("quadrivium_8b_h200x32", 32, 8),
    ],
)
def test_the_large_files_fit_their_ranks(name: str, ranks: int, shards: int) -> None:
    found = dry_run_of(name, world_size=ranks)
    assert found == dry_run_of(name)  # their degrees alone say the same
    assert found.num_params == params_of(found.flavor)
    assert found.world_size == ranks
    # As many steps as 20 tokens per parameter take, to 0.1%.
    assert found.steps == pytest.approx(found.steps_for_20_tokens, rel=1e-3)
    (memory,) = found.memory
    assert memory.num_params == pytest.approx(found.num_params / shards, rel=0.01)
    assert memory.parameters == memory.gradients == memory.optimizer / 2 == 4 * memory.num_params
    assert memory.total < 0.9 * H200_BYTES


def test_no_setting_of_the_world_changes_the_whole(tmp_path: Path) -> None:
    layouts = {
        "fsdp": (4, ()),
        "hsdp": (4, ("--parallelism.data_parallel_replicate_degree", "2")),
        "tp": (4, ("--parallelism.tensor_parallel_degree", "2")),
        "pp": (
            4,
            (
                "--parallelism.pipeline_parallel_degree", "2",
                "--parallelism.tensor_parallel_degree", "2", "--training.disable_cuda_graphs",
            ),
        ),
    }  # fmt: skip
    found = {
        name: dry_run_of("debug", *flags, world_size=ranks)
        for name, (ranks, flags) in layouts.items()
    }
    whole = params_of("debug")
    assert {run.num_params for run in found.values()} == {whole}
    kept = {name: [m.num_params for m in run.memory] for name, run in found.items()}
    assert kept["fsdp"][0] == pytest.approx(whole / 4, rel=0.1)
    assert kept["hsdp"][0] == pytest.approx(whole / 2, rel=0.1)
    # Routers, adapters and norms are whole on both tensor-parallel ranks.
    assert whole / 4 < kept["tp"][0] < whole / 2
    assert len(kept["pp"]) == 2
    assert whole / 2 < sum(kept["pp"]) < whole
    batches = {name: (run.num_sequences, run.accumulation_steps) for name, run in found.items()}
    assert batches == {"fsdp": (16, 1), "hsdp": (16, 1), "tp": (8, 1), "pp": (4, 1)}
    assert not torch.distributed.is_initialized()


def test_recomputing_more_keeps_less() -> None:
    kinds = ("none", "selective", "full")
    kept = [
        dry_run_of("quadrivium_1536x48_h200x8", "--activation_checkpoint.kind", kind).memory[0]
        for kind in kinds
    ]
    sizes = [memory.activations for memory in kept]
    assert sizes[0] > sizes[1] > sizes[2]
    assert len({memory.gathered for memory in kept}) == 1


@pytest.mark.parametrize(
    ("world_size", "flags", "message"),
    [
        (3, ("--parallelism.tensor_parallel_degree", "2"), "makes 2 ranks, but there are 3"),
        (8, ("--parallelism.data_parallel_shard_degree", "4"), "makes 4 ranks, but there are 8"),
        (2, ("--parallelism.data_parallel_replicate_degree", "0"), "data_parallel_replicate_degree=0: must be at least 1"),
        (3, ("--training.global_batch_size", "16"), "global_batch_size=16: must be a multiple of local_batch_size=4 times the 3 data-parallel ranks, 12"),
        (3, ("--parallelism.tensor_parallel_degree", "3"), "tensor_parallel_degree=3 does not divide"),
        (8, ("--parallelism.pipeline_parallel_degree", "8", "--training.disable_cuda_graphs"), "every stage needs a layer"),
        (4, ("--parallelism.context_parallel_degree", "4", "--training.seq_len", "100"), "seq_len=100: must be a multiple of 8"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_rule(
    world_size: int, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        dry_run_of("debug", *flags, world_size=world_size)
    assert not torch.distributed.is_initialized()


def test_the_command_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--config-file", str(FILES["debug"]), "--world-size", "2"]
    assert train.main(words) == 0
    out = capsys.readouterr().out
    assert "ranks   2 (dp_shard 2)" in out
    assert f"{params_of('debug'):,} parameters, exits after layers 2, 4, 6" in out
    assert "1,024 tokens: 8 sequences of 128" in out
    for part in ("parameters", "gradients", "optimizer", "gathered", "activations", "total"):
        assert part in out
    assert train.main([*words[:-1], "none"]) == 2
    assert "--world-size none: must be the number of ranks" in capsys.readouterr().err
