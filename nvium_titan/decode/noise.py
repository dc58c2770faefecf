"""Counter-based random numbers: pure functions of (seed, position, stream).

So a token depends neither on the schedule nor on the batch nor on the device. Stream 0 is the
Gumbel noise over the vocabulary, stream 1 + k the uniform number of junction k; position is that of
the token being chosen.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_TOKEN_STREAM = 0
_BLOCK_ELEMENTS = 1 << 14


class Noise:
    """The random numbers of one request.

    Gumbel rows are made for a few positions at a time, so that the many small integer operations
    are shared; this is a memo, not state.
    """

    def __init__(self, seed: int, *, vocab_size: int, device: torch.device | str = "cpu") -> None:
        """Remember the key.

        Args:
            seed: Any integer; taken modulo 2^64.
            vocab_size: Tokens that may be sampled.
            device: Where the Gumbel noise is wanted.
        """
        self.seed = seed
        self._vocab_size = vocab_size
        self._device = device
        self._num_rows = max(1, min(32, _BLOCK_ELEMENTS // vocab_size))
        self._memo = (range(0), torch.empty(0))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noise) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[int, int]:
        return self.seed & _MASK, self._vocab_size

    def uniform(self, position: int, junction_index: int) -> float:
        """Return the uniform number that decides a junction, in (0, 1)."""
        return uniform(self.seed, position, 1 + junction_index)

    def token_key(self, position: int) -> int:
        """Return what `gumbel_of_keys` adds token ids to, for the token at a position."""
        return _key(self.seed, position, _TOKEN_STREAM)

    def gumbel(self, position: int) -> Tensor:
        """Return the Gumbel noise that chooses the token at a position, shape (V,), float64."""
        rows, gumbel_BV = self._memo
        if position not in rows:
            rows = range(position, position + self._num_rows)
            gumbel_BV = gumbel_noise(self.seed, rows, self._vocab_size, device=self._device)
            # Both at once: an interrupt or another thread must not see one without the other.
            self._memo = rows, gumbel_BV
        return gumbel_BV[position - rows.start]


def uniform(seed: int, position: int, stream: int) -> float:
    """Return the uniform number of (seed, position, stream), in the open interval (0, 1).

    Args:
        seed: Any integer; taken modulo 2^64.
        position: Position of the token being chosen, at least 0.
        stream: 1 + junction_index for routers.
    """
    return ((_mix((_key(seed, position, stream) + GOLDEN) & _MASK) >> 12) + 0.5) * 2.0**-52


def gumbel_noise(
    seed: int,
    positions: range,
    vocab_size: int,
    *,
    device: torch.device | str = "cpu",
    stream: int = _TOKEN_STREAM,
) -> Tensor:
    """Return the standard Gumbel noise that chooses the tokens at some positions.

    SplitMix64 of (seed, position, stream, token id) on int64, then -log(-log(u)) in float64.

    Args:
        seed: Any integer; taken modulo 2^64.
        positions: Positions of the tokens being chosen.
        vocab_size: V.
        device: Where to compute; the integers are the same everywhere.
        stream: Which of the independent streams.

    Returns:
        Shape (len(positions), V), float64, finite. One small copy from host to device.
    """
    keys = [_signed(_key(seed, position, stream)) for position in positions]
    return gumbel_of_keys(torch.tensor(keys, dtype=torch.int64, device=device), vocab_size)


def gumbel_of_keys(key_B: Tensor, vocab_size: int) -> Tensor:
    """Return the Gumbel noise of some keys (`Noise.token_key`, as int64), shape (B, V).

    No host read, so it can be part of a graph.
    """
    ids_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=key_B.device)
    x_BV = key_B.unsqueeze(1) + ids_V * _signed(GOLDEN)
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
        x_BV ^= _shift_right(x_BV, shift)
        if factor is not None:
            x_BV *= _signed(factor)
    # 52 bits plus a half are exact in float64 and never 0 or 1.
    u_BV = (_shift_right(x_BV, 12).double() + 0.5) * 2.0**-52
    return u_BV.log_().neg_().log_().neg_()


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 on a Python integer."""
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, position: int, stream: int) -> int:
    return _mix((_mix((seed + (stream + 1) * GOLDEN) & _MASK) + (position + 1) * GOLDEN) & _MASK)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch's shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
