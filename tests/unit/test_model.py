"""The training model: exits, routers, tying, names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from nvium_titan.convert.layout import names_of, to_interleaved, to_rotate_half
from nvium_titan.convert.names import native_to_hf
from nvium_titan.core.cost import ModelDims
from nvium_titan.core.flavors import flavor_dims
from nvium_titan.core.shape import ExitPlan, resolve_exit_plan
from nvium_titan.errors import ConfigError
from nvium_titan.train.config.tables import ModelTable, NviumTable, resolve_dims
from nvium_titan.train.model import model_spec
from nvium_titan.train.model.model import NviumModel


def build(dims: ModelDims, *, seed: int = 0) -> NviumModel:
    torch.manual_seed(seed)
    model = model_spec(dims, flavor="test").model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def run(
    model: NviumModel, tokens: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    masks = model.get_attention_masks(positions=positions)
    return model(tokens, positions=positions, attention_masks=masks)


@pytest.mark.parametrize(
    "dims",
    [
        flavor_dims("debug"),
        dataclasses.replace(flavor_dims("debug"), exit_layers=(1, 2, 5), num_kv_heads=2),
        dataclasses.replace(flavor_dims("debug"), tie_embeddings=True),
        dataclasses.replace(flavor_dims("debug"), exit_layers=(), router_dim=0),
        flavor_dims("dense-debug"),
    ],
    ids=["even", "uneven-gqa", "tied", "one-exit-with-adapter", "dense"],
)
def test_every_kind_of_model_gives_exit_states_and_router_logits(dims: ModelDims) -> None:
    model = build(dims)
    tokens = torch.randint(0, dims.vocab_size, (2, 12))
    o, z = run(model, tokens)
    assert o.shape == (dims.plan.num_exits, 2, 12, dims.dim)
    assert z.shape == (dims.plan.num_exits - 1, 2, 12)
    assert z.dtype == torch.float32
    if dims.tie_embeddings:
        assert model.tok_embeddings.weight is model.lm_head.weight


def test_no_exit_equals_the_one_exit_model_bit_for_bit() -> None:
    dims = flavor_dims("debug")
    model = build(dims)
    one = build(dataclasses.replace(dims, exit_layers=(), router_dim=0), seed=1)
    state = model.state_dict()
    missing, unexpected = one.load_state_dict(state, strict=False)
    assert not missing
    assert all(".junction." in key for key in unexpected)
    tokens = torch.randint(0, dims.vocab_size, (2, 12))
    assert torch.equal(run(model, tokens)[0][-1], run(one, tokens)[0][-1])


def test_a_fresh_adapter_is_the_identity() -> None:
    model = build(flavor_dims("debug"))
    h = torch.randn(1, 3, 64)
    junction = model.layers["1"].junction
    assert torch.equal(junction(h)[0], junction.norm(h))
    assert torch.equal(model.norm(h), model.norm.norm(h))


def test_initialisation_is_the_papers() -> None:
    dims = dataclasses.replace(flavor_dims("debug"), dim=256, head_dim=64, adapter_dim=256)
    model = build(dims)
    junction = model.layers["1"].junction
    std = {name: p.std().item() for name, p in model.named_parameters() if p.ndim == 2}
    assert std["tok_embeddings.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["lm_head.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["layers.0.feed_forward.w1.weight"] == pytest.approx(0.02, rel=0.05)
    assert junction.adapter.fc_in.weight.std().item() == pytest.approx(1 / 16, rel=0.05)
    assert not junction.adapter.fc_out.weight.any()
    assert junction.router.head.weight.std().item() == pytest.approx(0.4 / 16, rel=0.15)
    assert not junction.router.head.bias.any()
    assert not junction.router.fc1.bias.any()


def test_packed_documents_do_not_see_each_other() -> None:
    model = build(flavor_dims("debug"))
    a, b = torch.randint(0, 264, (1, 5)), torch.randint(0, 264, (1, 7))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed, _ = run(model, torch.cat([a, b], dim=1), positions)
    torch.testing.assert_close(packed[:, :, :5], run(model, a)[0])
    torch.testing.assert_close(packed[:, :, 5:], run(model, b)[0])


@pytest.mark.parity
@pytest.mark.parametrize("golden", ["nvium_mha", "nvium_gqa", "nvium_uneven"])
def test_names_are_those_of_the_authors_checkpoints(golden: str, golden_dir: Path) -> None:
    plan = {
        "nvium_mha": ExitPlan(num_layers=8, exit_layers=(2, 4, 6)),
        "nvium_gqa": ExitPlan(num_layers=8, exit_layers=(2, 4, 6)),
        "nvium_uneven": ExitPlan(num_layers=8, exit_layers=(1, 5)),
    }[golden]
    ours = native_to_hf(plan, final_adapter=True, tie_embeddings=False)
    with safe_open(golden_dir / golden / "model.safetensors", "pt") as file:
        assert set(ours.values()) == set(file.keys())


@pytest.mark.parametrize("flavor", ["debug", "dense-debug"])
def test_names_cover_the_model(flavor: str) -> None:
    dims = flavor_dims(flavor)
    assert set(names_of(dims)) == set(build(dims).state_dict())


def test_rotary_permutation_moves_pairs_to_halves() -> None:
    rows = torch.arange(12.0)[:, None]
    half = to_rotate_half(rows, num_heads=2)
    assert half[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(to_interleaved(half, num_heads=2), rows)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"num_layers": 6, "num_exits": 4, "exit_layers": None}, r"num_exits=4 does not divide"),
        ({"num_layers": 6, "num_exits": 7, "exit_layers": None}, r"num_exits=7: must lie in"),
        ({"num_layers": 6, "num_exits": 2, "exit_layers": [6]}, r"6 must lie in \[1, 5\]"),
        ({"num_layers": 6, "num_exits": 3, "exit_layers": [3, 3]}, r"must increase strictly"),
        ({"num_layers": 6, "num_exits": 2, "exit_layers": [1, 2]}, r"but num_exits=2"),
    ],
)
def test_impossible_exits_are_refused(plan: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_exit_plan(**plan)


def test_tables_change_a_flavor() -> None:
    dims = resolve_dims(ModelTable(flavor="debug", num_layers=9), NviumTable())
    assert dims.exit_layers == (3, 6)
    dims = resolve_dims(ModelTable(flavor="debug", dim=128), NviumTable(num_exits=2))
    assert (dims.head_dim, dims.exit_layers, dims.router_dim, dims.adapter_dim) == (
        32,
        (3,),
        88,
        128,
    )
    dims = resolve_dims(ModelTable(flavor="debug"), NviumTable(num_exits=1, adapter_dim=0))
    assert (dims.exit_layers, dims.adapter_dim, dims.router_dim) == ((), 0, 0)
    dims = resolve_dims(ModelTable(flavor="dense-debug"), NviumTable())
    assert dims == flavor_dims("dense-debug")


@pytest.mark.parametrize(
    ("model", "nvium", "message"),
    [
        ({"num_heads": 5}, {}, "num_heads=5 does not divide dim=64"),
        ({"num_kv_heads": 3}, {}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"head_dim": 15}, {}, "head_dim=15: RoPE needs an even number"),
        ({"vocab_size": 0}, {}, "vocab_size=0: must be at least 1"),
        ({}, {"adapter_dim": 0}, "adapter_dim=0: must be at least 1 with early exits"),
        ({}, {"router_dim": 0}, "router_dim=0: must be at least 1"),
    ],
)
def test_impossible_models_are_refused(model: dict, nvium: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_dims(ModelTable(**model), NviumTable(**nvium))
