"""`nvium info`: the parameters and costs of a model size."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show a model size: parameters, FLOPs per token, exits, highest decode speed-up.

    nvium info --list

    nvium info --flavor quadrivium-768x24 --exit-probs .35 .2 .15 .3
    """

    flavor: str = "quadrivium-768x24"
    """A named size, as in [model] flavor of a TOML file."""

    list: bool = False
    """List the named sizes with their parameters."""

    seq_len: int | None = None
    """Tokens over which attention is counted; default: the longest sequence of the size."""

    exit_probs: tuple[float, ...] | None = None
    """Share of the tokens that leave at each exit, to bound the decode speed-up; default: equal."""

    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Print the figures."""
        from nvium_titan.core.cost import count_params, forward_flops, limit_speedup
        from nvium_titan.core.flavors import flavor_names, flavor_shape

        if self.list:
            sizes = {
                name: sum(count_params(flavor_shape(name)).values()) for name in flavor_names()
            }
            print(json.dumps(sizes) if self.json else _rows(sizes, unit=1e6, suffix=" M"))
            return
        shape = flavor_shape(self.flavor)
        params = count_params(shape)
        flops = forward_flops(shape, seq_len=self.seq_len or shape.max_seq_len)
        num_exits = shape.num_exits
        shares = self.exit_probs or (1 / num_exits,) * num_exits
        limit = limit_speedup(shape, shares)
        exits = list(shape.block_ends)
        if self.json:
            record = {
                "flavor": self.flavor,
                "params": sum(params.values()),
                "params_by_part": params,
                "flops_per_token": sum(flops.values()),
                "flops_by_term": flops,
                "exits": exits,
                "exit_probs": shares,
                "limit_speedup": limit,
            }
            print(json.dumps(record))
            return
        print(f"{self.flavor}: exits after layers {', '.join(map(str, exits))}\n")
        print("parameters\n" + _rows(params | {"total": sum(params.values())}, 1e6, " M"))
        print(
            "\nforward FLOPs per token\n"
            + _rows(flops | {"total": sum(flops.values())}, 1e9, " G", digits=4)
        )
        shown = " ".join(f"{share:.3g}" for share in shares)
        print(f"\nexit shares {shown} allow decoding at most {limit:.2f}x as fast as dense")


def _rows(values: dict[str, int], unit: float, suffix: str, *, digits: int = 2) -> str:
    width = max(map(len, values))
    return "\n".join(
        f"  {name:{width}}  {value / unit:10.{digits}f}{suffix}" for name, value in values.items()
    )
