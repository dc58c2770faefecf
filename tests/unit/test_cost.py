"""Parameters, FLOPs and limits against the paper's tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from nvium_titan.core.cost import count_params, forward_flops, limit_speedup, weights_read_per_token
from nvium_titan.core.flavors import dense_twin, flavor_names, flavor_shape
from nvium_titan.errors import ConfigError
from nvium_titan.train.model import model_registry

# N-vium (arXiv:2605.13190), Table 2 (millions) to the digits the authors' code gives, and App. G.
TABLE_2 = {
    "quadrivium-768x6": 98.72,
    "quadrivium-768x12": 141.20,
    "quadrivium-768x24": 226.15,
    "quadrivium-768x36": 311.10,
    "quadrivium-768x48": 396.06,
    "quadrivium-128x24": 13.14,
    "quadrivium-256x24": 36.17,
    "quadrivium-512x24": 111.55,
    "quadrivium-1024x24": 380.60,
    "quadrivium-1536x24": 806.12,
    "quadrivium-1536x48": 1485.67,
}
PUBLISHED_TWIN_WIDTHS = {
    "quadrivium-768x24": 2184,
    "quadrivium-768x6": 2568,
    "quadrivium-1536x24": 4352,
    "quadrivium-128x24": 368,
    "quadrivium-512x24": 1456,
}


@pytest.mark.parametrize(("flavor", "millions"), TABLE_2.items())
def test_parameters_reproduce_table_2(flavor: str, millions: float) -> None:
    assert round(sum(count_params(flavor_shape(flavor)).values()) / 1e6, 2) == millions


def test_parameters_reproduce_every_shape_of_the_authors_grid(shared_dir: Path) -> None:
    grid = json.loads((shared_dir / "golden/experiments.json").read_text())["scaling_grid"]
    seen = 0
    for row in grid:
        name = f"{row['hidden']}x{row['layers']}"
        if f"quadrivium-{name}" not in flavor_names():
            continue
        seen += 1
        shape, twin = flavor_shape(f"quadrivium-{name}"), flavor_shape(f"dense-{name}")
        assert sum(count_params(shape).values()) == row["nvium_params"]
        assert list(shape.exit_layers) == row["exits"]
        assert twin.ffn_dim == row["baseline_intermediate"]
        assert sum(count_params(twin).values()) == row["baseline_params"]
    assert seen == len(TABLE_2)


@pytest.mark.parametrize("flavor", [n for n in flavor_names() if not n.startswith("dense-")])
def test_dense_twins_match_within_three_per_mille(flavor: str) -> None:
    shape = flavor_shape(flavor)
    twin = flavor_shape(f"dense-{flavor.removeprefix('quadrivium-')}")
    ratio = sum(count_params(twin).values()) / sum(count_params(shape).values())
    assert 1 <= ratio < 1.003
    assert twin.exit_layers == ()
    assert twin.num_layers == shape.num_layers


@pytest.mark.parametrize(("flavor", "width"), PUBLISHED_TWIN_WIDTHS.items())
def test_twin_widths_are_the_published_ones(flavor: str, width: int) -> None:
    assert dense_twin(flavor_shape(flavor)).ffn_dim == width


@pytest.mark.parametrize("flavor", flavor_names())
def test_count_equals_the_built_model(flavor: str) -> None:
    spec = model_registry(flavor)
    with torch.device("meta"):
        model = spec.model.build()
    assert sum(p.numel() for p in model.parameters()) == sum(
        count_params(flavor_shape(flavor)).values()
    )


def test_count_with_a_tied_head_equals_the_built_model() -> None:
    from nvium_titan.train.model import model_spec

    shape = dataclasses.replace(flavor_shape("debug"), tie_embeddings=True)
    with torch.device("meta"):
        model = model_spec(shape, flavor="tied").model.build()
    assert sum(p.numel() for p in model.parameters()) == sum(count_params(shape).values())


# N-vium (arXiv:2605.13190), Table 4, in GFLOPs; seq_len 1024.
TABLE_4 = {36: 0.834, 48: 1.041}
TABLE_4_DENSE = {26: 0.499, 33: 0.620}


@pytest.mark.parametrize(("layers", "total"), TABLE_4.items())
def test_flops_reproduce_table_4(layers: int, total: float) -> None:
    terms = forward_flops(flavor_shape(f"quadrivium-768x{layers}"), seq_len=1024)
    assert round(sum(terms.values()) / 1e9, 3) == total
    assert round(terms["heads"] / 1e6, 1) == 196.6
    assert round(terms["adapters"] / 1e6, 1) == 9.4
    assert round(terms["routers"] / 1e6, 1) == 4.7


@pytest.mark.parametrize(("layers", "total"), TABLE_4_DENSE.items())
def test_dense_flops_reproduce_table_4(layers: int, total: float) -> None:
    shape = dataclasses.replace(
        flavor_shape("quadrivium-768x36"),
        num_layers=layers, exit_layers=(), router_dim=0, adapter_dim=0,
    )  # fmt: skip
    assert round(sum(forward_flops(shape, seq_len=1024).values()) / 1e9, 3) == total


@pytest.mark.parametrize(
    ("flavor", "shares", "limit"),
    [
        ("quadrivium-768x24", (0.35, 0.2, 0.15, 0.3), 1.50),
        ("quadrivium-768x48", (0.35, 0.2, 0.15, 0.3), 1.58),
        ("quadrivium-1536x24", (0.35, 0.2, 0.15, 0.3), 1.56),
        ("quadrivium-1536x48", (0.35, 0.2, 0.15, 0.3), 1.61),
        ("quadrivium-768x24", (0.6, 0.2, 0.1, 0.1), 1.96),
    ],
)
def test_bandwidth_limit(flavor: str, shares: tuple[float, ...], limit: float) -> None:
    assert round(limit_speedup(flavor_shape(flavor), shares), 2) == pytest.approx(limit, abs=0.006)


def test_block_reads_per_token_are_the_tail_sums() -> None:
    shape = flavor_shape("quadrivium-768x24")
    parts = count_params(shape)
    block, junction = parts["layers"] / 4, parts["routers"] / 3 + shape.dim
    exit_weights = parts["lm_head"] + parts["adapters"] / 4 + shape.dim
    # Blocks are entered by 1, .65, .45 and .30 of the tokens: 2.40 of 4 in the mean.
    expected = exit_weights + 2.40 * block + (1 + 0.65 + 0.45) * junction
    assert weights_read_per_token(shape, (0.35, 0.2, 0.15, 0.3)) == pytest.approx(expected)


def test_dense_has_no_speed_up() -> None:
    assert limit_speedup(flavor_shape("dense-768x24"), (1.0,)) == 1.0


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.5, 0.5, 0.5), (1.5, -0.5, 0, 0)])
def test_wrong_shares_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="exit shares"):
        limit_speedup(flavor_shape("demo"), shares)


def test_an_unknown_flavor_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'quadrivium-768x24'"):
        flavor_shape("quadrivum-768x24")
