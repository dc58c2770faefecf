"""From a DCP step folder to a bundle, and what a wrong path gets."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch
import torch.distributed.checkpoint as dcp

from nvium_titan.bundle import read_bundle
from nvium_titan.convert.export import SETTINGS_KEY, export_checkpoint
from nvium_titan.convert.layout import to_native, to_rotate_half
from nvium_titan.convert.step_folders import find_step_folder
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import CheckpointError
from nvium_titan.report.records import MetricsRow
from nvium_titan.train.model import model_spec


def settings_of(shape: ModelShape) -> str:
    numbers = dataclasses.asdict(shape)
    nvium = {key: numbers.pop(key) for key in ("exit_layers", "router_dim", "adapter_dim")}
    return tomli_w.dumps({"hf_assets_path": "byte", "model": numbers, "nvium": nvium})


def write_checkpoint(
    folder: Path, shape: ModelShape, *, step: int = 4
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a random model as the trainer would, and return its step folder and weights."""
    model = model_spec(shape, flavor="test").model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    path = folder / "checkpoint" / f"step-{step}"
    dcp.save({**state, SETTINGS_KEY: settings_of(shape)}, checkpoint_id=path, no_dist=True)
    return path, state


@pytest.mark.parametrize(
    "shape",
    [
        flavor_shape("debug"),
        dataclasses.replace(flavor_shape("debug"), exit_layers=(1, 4), num_kv_heads=2),
        dataclasses.replace(flavor_shape("debug"), tie_embeddings=True),
        flavor_shape("dense-debug"),
    ],
    ids=["nvium", "uneven-gqa", "tied", "dense"],
)
def test_a_checkpoint_becomes_a_bundle(shape: ModelShape, tmp_path: Path) -> None:
    path, state = write_checkpoint(tmp_path, shape)
    export_checkpoint(path, tmp_path / "bundle")
    bundle = read_bundle(tmp_path / "bundle")
    assert bundle.config.shape.exit_layers == shape.exit_layers
    assert bundle.config.is_plain_llama == (not shape.exit_layers)
    tensors = bundle.load_tensors()
    name = "model.layers.0.self_attn.k_proj.weight"
    native = state["layers.0.attention.qkv_linear.wk.weight"]
    assert torch.equal(tensors[name], to_rotate_half(native, num_heads=shape.num_kv_heads))
    assert not torch.equal(tensors[name], native)
    back = to_native(tensors, shape)
    assert all(torch.equal(back[key], state[key]) for key in back)
    assert set(back) == set(state) - ({"lm_head.weight"} if shape.tie_embeddings else set())


def test_the_bundle_says_where_it_came_from(tmp_path: Path) -> None:
    path, _ = write_checkpoint(tmp_path, flavor_shape("debug"))
    row = MetricsRow(
        step=2, split="val", loss=3.0, mixture_nll=3.0, perplexity=20.0, exit_ce=[3.0] * 3,
        exit_shares=[0.1, 0.2, 0.7], expected_depth=0.8, beta=0.1, router_means=[0.1, 0.2],
        router_entropy=0.8, grad_norm=None, lr=None, tokens=5, tokens_per_s=9.0, limit_speedup=1.2,
    )  # fmt: skip
    rows = [
        row,
        replace(row, step=4, split="train", tokens=640, lr=0.1, grad_norm=1.0),
        replace(row, step=8, exit_shares=[1.0, 0.0, 0.0]),
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
    )
    export_checkpoint(path, tmp_path / "bundle", dtype="bfloat16")
    bundle = read_bundle(tmp_path / "bundle")
    assert bundle.config.dtype == "bfloat16"
    assert bundle.provenance["step"] == 4
    assert bundle.provenance["tokens_seen"] == 640
    assert bundle.provenance["validation"]["exit_shares"] == [0.1, 0.2, 0.7]
    assert "[model]" in bundle.provenance["settings"]


def test_a_model_only_checkpoint_reads_the_settings_beside_it(tmp_path: Path) -> None:
    shape = flavor_shape("debug")
    model = model_spec(shape, flavor="test").model.build()
    path = tmp_path / "checkpoint" / "step-1"
    dcp.save(dict(model.state_dict()), checkpoint_id=path, no_dist=True)
    with pytest.raises(CheckpointError, match="not a checkpoint of nvium_titan"):
        export_checkpoint(path, tmp_path / "bundle")
    (tmp_path / "config.toml").write_text(settings_of(shape))
    export_checkpoint(path, tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle").config.shape.num_layers == shape.num_layers


@pytest.mark.cases
def test_cfg_05_a_missing_or_empty_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such folder"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "bundle")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"looked for \.metadata, step-N/\.metadata"):
        export_checkpoint(tmp_path / "empty", tmp_path / "bundle")
    (tmp_path / "step-3").mkdir()
    with pytest.raises(CheckpointError, match=r"step-3: no \.metadata file"):
        export_checkpoint(tmp_path / "step-3", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.cases
def test_cfg_05_one_level_too_high_takes_the_newest_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, flavor_shape("debug"), step=9)
    newest, _ = write_checkpoint(tmp_path, flavor_shape("debug"), step=10)
    caplog.set_level("INFO")
    assert find_step_folder(tmp_path) == newest
    assert find_step_folder(tmp_path / "checkpoint") == newest
    assert "using its newest checkpoint" in caplog.text


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = write_checkpoint(tmp_path, flavor_shape("debug"))
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:10])
    with pytest.raises(CheckpointError, match=r"step-4: cannot be read \("):
        export_checkpoint(path, tmp_path / "bundle")
    (path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        export_checkpoint(path, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
