"""What cannot be split as asked is refused by a rule, before anything is built."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

from nvium_titan.core.flavors import flavor_shape
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import ConfigError
from nvium_titan.train.model.layout import check_layout
from tests.helpers.runs import train_here, write_toml

SHAPE = flavor_shape("debug")  # 6 layers, 4 heads


def check(
    *, shape: ModelShape = SHAPE, seq_len: int = 64, trainable: str = "all",
    disable_cuda_graphs: bool = True, local_batch_size: int = 4, **parallelism: object,
) -> None:  # fmt: skip
    training = TrainingConfig(
        seq_len=seq_len,
        disable_cuda_graphs=disable_cuda_graphs,
        local_batch_size=local_batch_size,
    )
    check_layout(
        shape,
        parallelism=ParallelismConfig(**parallelism),
        training=training,
        trainable=trainable,
    )


@pytest.mark.cases
@pytest.mark.parametrize(
    ("changed", "seq_len", "message"),
    [
        (
            {"num_kv_heads": 1},
            64,
            "tensor_parallel_degree=2 does not divide [model] num_kv_heads=1",
        ),
        ({"num_heads": 3, "num_kv_heads": 3}, 64, "does not divide [model] num_heads=3"),
        ({}, 127, "does not divide [training] seq_len=127"),
        ({"ffn_dim": 177}, 64, "does not divide [model] ffn_dim=177"),
    ],
    ids=["kv heads", "heads", "sequence", "mlp"],
)
def test_dis_02_what_tensor_parallelism_cannot_split_is_refused(
    changed: dict[str, int], seq_len: int, message: str
) -> None:
    shape = replace(SHAPE, **changed)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(shape=shape, seq_len=seq_len, tensor_parallel_degree=2)


@pytest.mark.cases
def test_dis_01_a_vocabulary_that_the_ranks_cannot_share_is_refused() -> None:
    shape = replace(SHAPE, vocab_size=257)
    rule = r"tensor_parallel_degree=2 does not divide \[model\] vocab_size=257; .*: 1$"
    with pytest.raises(ConfigError, match=rule):
        check(shape=shape, tensor_parallel_degree=2)
    check(shape=replace(SHAPE, vocab_size=258), tensor_parallel_degree=2)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("flag", "value"),
    [("model.vocab_size", 257), ("model.num_kv_heads", 1), ("training.seq_len", 127)],
)
def test_dis_01_and_dis_02_training_ends_before_it_starts(
    flag: str, value: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{flag}", str(value), "--parallelism.tensor_parallel_degree", "2"]
    assert train_here(write_toml(tmp_path), *words) == 2
    error = capfd.readouterr().err
    assert "tensor_parallel_degree=2 does not divide" in error
    assert f"{flag.partition('.')[2]}={value}" in error
    assert not (tmp_path / "run").exists()


def test_the_message_lists_the_degrees_that_work() -> None:
    shape = replace(SHAPE, num_heads=12, num_kv_heads=12)
    with pytest.raises(ConfigError, match=r"num_kv_heads=12, .*: 1, 2, 4$"):
        check(shape=shape, tensor_parallel_degree=3, seq_len=64)
    check(shape=shape, tensor_parallel_degree=4)


def test_without_sequence_parallelism_any_length_fits() -> None:
    check(seq_len=127, tensor_parallel_degree=2, enable_sequence_parallel=False)


PP = {"pipeline_parallel_degree": 2}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"disable_cuda_graphs": False}, "set [training] disable_cuda_graphs = true"),
        ({"shape": replace(SHAPE, tie_embeddings=True)}, "tie_embeddings = false"),
        ({"trainable": "junctions"}, 'trainable="junctions"'),
        ({"pipeline_parallel_microbatch_size": 3}, "must divide [training] local_batch_size=4"),
        ({"pipeline_parallel_schedule": "Interleaved1F1b"}, "did you mean 'Interleaved1F1B'?"),
        ({"pipeline_parallel_schedule": "ZBVZeroBubble"}, "not supported"),
        (
            {"pipeline_parallel_layers_per_stage": 2},
            "4 pipeline stages on pipeline_parallel_degree=2",
        ),
        (
            {"pipeline_parallel_layers_per_stage": 4, "pipeline_parallel_schedule": "LoopedBFS"},
            "needs 2 or more stages on each",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_pipelines_that_cannot_run_are_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(**PP, **asked)


@pytest.mark.cases
@pytest.mark.parametrize(
    "asked",
    [
        {"pipeline_parallel_degree": 8},
        {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "Interleaved1F1B"},
        {**PP, "module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["norm", "lm_head"]]},
        {
            **PP,
            "module_fqns_per_model_part": [
                ["tok_embeddings"],
                [*(f"layers.{i}" for i in range(6)), "norm", "lm_head"],
            ],
        },
    ],
    ids=["more stages than layers", "interleaved", "layers left out", "no layer on a stage"],
)
def test_dis_03_a_split_that_loses_layers_is_refused(asked: dict[str, object]) -> None:
    message = "every stage needs a layer|the stages together must list"
    with pytest.raises(ConfigError, match=message):
        check(**asked)


@pytest.mark.cases
@pytest.mark.parametrize("num_layers", range(2, 13))
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("weights", [(0, 0), (1, 1), (2, 0)], ids=str)
def test_dis_03_an_accepted_split_has_every_layer_once(
    num_layers: int, num_stages: int, weights: tuple[int, int]
) -> None:
    shape = replace(SHAPE, num_layers=num_layers, exit_layers=(1,))
    asked = {
        "pipeline_parallel_first_stage_less_layers": weights[0],
        "pipeline_parallel_last_stage_less_layers": weights[1],
    }
    try:
        check(shape=shape, pipeline_parallel_degree=num_stages, **asked)
    except ConfigError:
        # torchtitan refuses it too, or leaves a stage without a layer.
        assert num_layers + sum(weights) < 3 * num_stages
        return
    split = _generate_llm_fqn_per_model_part(num_stages, num_layers, *weights)
    names = [name for stage in split for name in stage]
    layers = [f"layers.{i}" for i in range(num_layers)]
    assert names == ["tok_embeddings", *layers, "norm", "lm_head"]
    assert all(any(name in layers for name in stage) for stage in split)
