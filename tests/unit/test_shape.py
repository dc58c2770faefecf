"""A model's numbers: what its exits say, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from nvium_titan.core.flavors import flavor_shape
from nvium_titan.core.shape import resolve_exit_layers
from nvium_titan.errors import ConfigError


def test_blocks_and_fractions_follow_the_exits() -> None:
    shape = dataclasses.replace(flavor_shape("debug"), num_layers=8, exit_layers=(1, 5))
    assert shape.num_exits == 3
    assert shape.block_ends == (1, 5, 8)
    assert shape.blocks == (range(1), range(1, 5), range(5, 8))
    assert shape.depth_fractions == (1 / 8, 5 / 8, 1)
    assert shape.balance_targets() == (1 / 3, 1 / 2)
    dense = shape.dense()
    assert (dense.num_exits, dense.blocks, dense.balance_targets()) == (1, (range(8),), ())
    assert resolve_exit_layers(num_layers=8, num_exits=4, exit_layers=None) == (2, 4, 6)


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ({"num_layers": 6, "num_exits": 4, "exit_layers": None}, r"num_exits=4 does not divide"),
        ({"num_layers": 6, "num_exits": 7, "exit_layers": None}, r"num_exits=7: must lie in"),
        ({"num_layers": 6, "num_exits": 2, "exit_layers": [6]}, r"6 must lie in \[1, 5\]"),
        ({"num_layers": 6, "num_exits": 3, "exit_layers": [3, 3]}, r"must increase strictly"),
        ({"num_layers": 6, "num_exits": 2, "exit_layers": [1, 2]}, r"but num_exits=2"),
    ],
)
def test_impossible_exits_are_refused(exits: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_exit_layers(**exits)
