"""The training model: exits, routers, tying, names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from nvium_titan.convert.layout import to_interleaved, to_rotate_half
from nvium_titan.convert.names import native_to_hf
from nvium_titan.core.flavors import flavor_shape
from nvium_titan.core.shape import ModelShape
from nvium_titan.errors import ConfigError
from nvium_titan.train.config.tables import ModelTable, NviumTable, resolve_shape
from nvium_titan.train.model import model_spec
from nvium_titan.train.model.model import NviumModel


def build(shape: ModelShape, *, seed: int = 0) -> NviumModel:
    torch.manual_seed(seed)
    model = model_spec(shape, flavor="test").model.build()
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
    "shape",
    [
        flavor_shape("debug"),
        dataclasses.replace(flavor_shape("debug"), exit_layers=(1, 2, 5), num_kv_heads=2),
        dataclasses.replace(flavor_shape("debug"), tie_embeddings=True),
        dataclasses.replace(flavor_shape("debug"), exit_layers=(), router_dim=0),
        flavor_shape("dense-debug"),
    ],
    ids=["even", "uneven-gqa", "tied", "one-exit-with-adapter", "dense"],
)
def test_every_kind_of_model_gives_exit_states_and_router_logits(shape: ModelShape) -> None:
    model = build(shape)
    tokens = torch.randint(0, shape.vocab_size, (2, 12))
    o, z = run(model, tokens)
    assert o.shape == (shape.num_exits, 2, 12, shape.dim)
    assert z.shape == (shape.num_exits - 1, 2, 12)
    assert z.dtype == torch.float32
    if shape.tie_embeddings:
        assert model.tok_embeddings.weight is model.lm_head.weight


def test_no_exit_equals_the_one_exit_model_bit_for_bit() -> None:
    shape = flavor_shape("debug")
    model = build(shape)
    one = build(dataclasses.replace(shape, exit_layers=(), router_dim=0), seed=1)
    state = model.state_dict()
    missing, unexpected = one.load_state_dict(state, strict=False)
    assert not missing
    assert all(".junction." in key for key in unexpected)
    tokens = torch.randint(0, shape.vocab_size, (2, 12))
    assert torch.equal(run(model, tokens)[0][-1], run(one, tokens)[0][-1])


def test_a_fresh_adapter_is_the_identity() -> None:
    model = build(flavor_shape("debug"))
    h = torch.randn(1, 3, 64)
    junction = model.layers["1"].junction
    assert torch.equal(junction(h)[0], junction.norm(h))
    assert torch.equal(model.norm(h), model.norm.norm(h))


def test_initialisation_is_the_papers() -> None:
    shape = dataclasses.replace(flavor_shape("debug"), dim=256, head_dim=64, adapter_dim=256)
    model = build(shape)
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
    model = build(flavor_shape("debug"))
    a, b = torch.randint(0, 264, (1, 5)), torch.randint(0, 264, (1, 7))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed, _ = run(model, torch.cat([a, b], dim=1), positions)
    torch.testing.assert_close(packed[:, :, :5], run(model, a)[0])
    torch.testing.assert_close(packed[:, :, 5:], run(model, b)[0])


@pytest.mark.parity
@pytest.mark.parametrize("golden", ["nvium_mha", "nvium_gqa", "nvium_uneven"])
def test_names_are_those_of_the_authors_checkpoints(golden: str, golden_dir: Path) -> None:
    exits = {"nvium_mha": (2, 4, 6), "nvium_gqa": (2, 4, 6), "nvium_uneven": (1, 5)}[golden]
    shape = dataclasses.replace(flavor_shape("debug"), num_layers=8, exit_layers=exits)
    ours = native_to_hf(shape)
    with safe_open(golden_dir / golden / "model.safetensors", "pt") as file:
        assert set(ours.values()) == set(file.keys())


@pytest.mark.parametrize("flavor", ["debug", "dense-debug"])
def test_names_cover_the_model(flavor: str) -> None:
    shape = flavor_shape(flavor)
    assert set(native_to_hf(shape)) == set(build(shape).state_dict())


def test_rotary_permutation_moves_pairs_to_halves() -> None:
    rows = torch.arange(12.0)[:, None]
    half = to_rotate_half(rows, num_heads=2)
    assert half[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(to_interleaved(half, num_heads=2), rows)


def test_tables_change_a_flavor() -> None:
    shape = resolve_shape(ModelTable(flavor="debug", num_layers=9), NviumTable())
    assert shape.exit_layers == (3, 6)
    shape = resolve_shape(ModelTable(flavor="debug", dim=128), NviumTable(num_exits=2))
    assert (shape.head_dim, shape.exit_layers, shape.router_dim, shape.adapter_dim) == (
        32,
        (3,),
        88,
        128,
    )
    shape = resolve_shape(ModelTable(flavor="debug"), NviumTable(num_exits=1, adapter_dim=0))
    assert (shape.exit_layers, shape.adapter_dim, shape.router_dim) == ((), 0, 0)
    shape = resolve_shape(ModelTable(flavor="dense-debug"), NviumTable())
    assert shape == flavor_shape("dense-debug")


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
        resolve_shape(ModelTable(**model), NviumTable(**nvium))
