"""From logits and counter-based noise to a token id; every law of sampling that is offered.

    temperature 1, no filter     pi_mix exactly (the exit is drawn from the routers)
    filter_scope="exit"          sum_k p_k F(pi_k): exact for that law, which is not F(pi_mix)
    filter_scope="mixture"       F(pi_mix): full depth, one head call with a row per exit
    temperature 0                argmax pi_mix (`engine`: certified, leaves once it is decided)

F is temperature, then top-k, then top-p, then min-p, then renormalisation.

Randomness is a pure function of (seed, position, stream), so a token depends neither on the
schedule nor on the batch nor on the device. Stream 0 is the Gumbel noise over the vocabulary,
stream 1 + k the uniform of junction k; position is that of the token being chosen.

Shapes: B rows, V vocabulary; any leading axes where `*` is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from nvium_titan.errors import PromptError

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_TOKEN_STREAM = 0
_MASK = (1 << 64) - 1
_NOISE_BLOCK_ELEMENTS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a token is drawn from the distribution of an exit, or of the mixture."""

    temperature: float = 1.0
    """Divides the logits; 0 means the argmax (of pi_mix, if the policy samples the mixture)."""

    top_k: int = 0
    """Keep the k most likely tokens (ties: the lower id first); 0 keeps all."""

    top_p: float = 1.0
    """Keep the fewest most likely tokens that together reach this, at least one; in [0, 1]."""

    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; in [0, 1]."""

    filter_scope: Literal["exit", "mixture"] = "exit"
    """What the temperature and the filters act on: each exit's distribution, or the mixture."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            PromptError: If a value is out of range or not a number.
        """
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise PromptError(
                f"temperature={self.temperature}: must be a finite number >= 0 (0 is greedy)"
            )
        if self.top_k < 0:
            raise PromptError(f"top_k={self.top_k}: must be >= 0 (0 keeps every token)")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise PromptError(f"{name}={getattr(self, name)}: must lie in [0, 1]")
        if self.filter_scope not in ("exit", "mixture"):
            raise PromptError(f"filter_scope={self.filter_scope!r}: must be 'exit' or 'mixture'")

    @property
    def is_plain(self) -> bool:
        """Whether the distribution is sampled as it is, so that both filter scopes agree."""
        return self.temperature == 1 and not self.has_filter

    @property
    def has_filter(self) -> bool:
        """Whether any token may be removed."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1, 0)


class Draw(NamedTuple):
    """A draw from F(softmax(logits)) with the noise of `gumbel_noise`."""

    key: int
    """Of seed, position and stream; what `gumbel_noise` adds token ids to."""
    sampling: SamplingParams
    """The law F; at temperature 0 the argmax, without noise."""

    @property
    def has_filter(self) -> bool:
        """Whether any token may be removed before the draw."""
        return self.sampling.temperature > 0 and self.sampling.has_filter


class Sampler(Protocol):
    """Draws a token, faster than `choose` would."""

    def __call__(self, logits_V: Tensor, draw: Draw) -> int:
        """Return the token of a draw without a filter; `logits_V` has shape (V,)."""


def filtered_logits(logits_V: Tensor, sampling: SamplingParams) -> Tensor:
    """Return F(softmax(logits)) as logits: removed tokens at -inf, the rest not normalised.

    Args:
        logits_V: Logits or log-probabilities, shape (*, V), any float dtype; -inf allowed.
        sampling: Its temperature must be positive; the filter scope is the caller's business.

    Returns:
        Shape (*, V), float64. The likeliest token always survives. No host read.

    Raises:
        ValueError: If the temperature is 0.

    Example:
        Probabilities [.5, .3, .2] with top_p = .6 give logits that softmax to [.625, .375, 0].
    """
    if sampling.temperature == 0:
        raise ValueError("temperature 0 has no logits; take the argmax")
    logits_V = logits_V.double()
    if sampling.is_plain:
        return logits_V
    # The maximum goes first, so that a tiny temperature gives -inf and never inf - inf.
    logits_V = (logits_V - logits_V.amax(-1, keepdim=True)) / sampling.temperature
    top_k, top_p, log_min_p = filter_limits(sampling, vocab_size=logits_V.shape[-1])
    if sampling.top_k or sampling.top_p < 1:
        logits_V = keep_likeliest(logits_V, top_k=top_k, top_p=top_p)
    if sampling.min_p > 0:
        logits_V = logits_V.masked_fill(logits_V < log_min_p, -math.inf)
    return logits_V


def filter_limits(sampling: SamplingParams, *, vocab_size: int) -> tuple[int, float, float]:
    """Return top_k, top_p and log(min_p) as limits that remove nothing where a filter is off."""
    top_p = sampling.top_p if sampling.top_p < 1 else math.inf  # sums round past 1
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    return sampling.top_k or vocab_size, top_p, log_min_p


def keep_likeliest(logits_V: Tensor, *, top_k: int | Tensor, top_p: float | Tensor) -> Tensor:
    """Return the logits with all but the likeliest at -inf; the likeliest one stays.

    Args:
        logits_V: Shape (*, V).
        top_k: Most tokens; a number or a tensor that broadcasts, as `filter_limits` gives it.
        top_p: What those that are kept must reach together, after `top_k`; likewise.
    """
    # Stable: equal logits stay in the order of their ids.
    ordered_V, order_V = torch.sort(logits_V, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_V.shape[-1], device=logits_V.device)
    ordered_V = ordered_V.masked_fill(rank_V >= top_k, -math.inf)
    probs_V = torch.softmax(ordered_V, dim=-1)
    before_V = probs_V.cumsum(-1) - probs_V
    ordered_V = ordered_V.masked_fill((before_V >= top_p) & (rank_V > 0), -math.inf)
    return torch.empty_like(logits_V).scatter_(-1, order_V, ordered_V)


def choose(logits_V: Tensor, gumbel_V: Tensor | None, sampling: SamplingParams) -> Tensor:
    """Return a token drawn from F(softmax(logits)), or its argmax at temperature 0.

    The maximum of logits plus Gumbel noise is an exact draw from their softmax; no cumulative sum,
    no host read.

    Args:
        logits_V: Logits or log-probabilities, shape (*, V).
        gumbel_V: Standard Gumbel noise, float64, broadcastable; unused (None) at temperature 0.
        sampling: The law F.

    Returns:
        Shape (*), int64.
    """
    if gumbel_V is None:
        return logits_V.argmax(-1)
    return (filtered_logits(logits_V, sampling) + gumbel_V).argmax(-1)


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 on a Python integer."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, position: int, stream: int) -> int:
    return _mix((_mix((seed + (stream + 1) * _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK)


def uniform(seed: int, position: int, stream: int) -> float:
    """Return the uniform number of (seed, position, stream), in the open interval (0, 1).

    Args:
        seed: Any integer; taken modulo 2^64.
        position: Position of the token being chosen, at least 0.
        stream: 1 + junction_index for routers.
    """
    return ((_mix((_key(seed, position, stream) + _GOLDEN) & _MASK) >> 12) + 0.5) * 2.0**-52


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
    """Return the Gumbel noise of some keys (`Draw.key`, as int64), shape (B, V); no host read."""
    ids_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=key_B.device)
    x_BV = key_B.unsqueeze(1) + ids_V * _signed(_GOLDEN)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        x_BV ^= _shift_right(x_BV, shift)
        if factor is not None:
            x_BV *= _signed(factor)
    # 52 bits plus a half are exact in float64 and never 0 or 1.
    u_BV = (_shift_right(x_BV, 12).double() + 0.5) * 2.0**-52
    return u_BV.log_().neg_().log_().neg_()


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch's shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class Noise:
    """The random numbers of one request, a pure function of (seed, position).

    Gumbel rows are made for a few positions at a time, so that the many small integer operations
    are shared; this is a memo, not state.
    """

    def __init__(
        self,
        seed: int,
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
        sampler: Sampler | None = None,
    ) -> None:
        """Remember the key.

        Args:
            seed: Any integer; taken modulo 2^64.
            vocab_size: Tokens that may be sampled.
            device: Where the Gumbel noise is wanted.
            sampler: A faster way to the same draw where no filter is set; torch's if None.
        """
        self.seed = seed
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._device = device
        self._num_rows = max(1, min(32, _NOISE_BLOCK_ELEMENTS // vocab_size))
        self._rows = range(0)
        self._gumbel_BV = torch.empty(0)

    def uniform(self, position: int, junction_index: int) -> float:
        """Return the uniform number that decides a junction, in (0, 1)."""
        return uniform(self.seed, position, 1 + junction_index)

    def draw(self, logits_V: Tensor, *, position: int, sampling: SamplingParams) -> int:
        """Return the token at `position`, from F(softmax(logits)). One host read.

        Args:
            logits_V: Logits or log-probabilities of the tokens that may be sampled, shape (V,).
            position: Position of the token being chosen.
            sampling: The law F.
        """
        if sampling.temperature == 0:
            return int(logits_V.argmax())
        draw = self.plan(position, sampling)
        if self._sampler is not None and not draw.has_filter and logits_V.dtype == torch.float32:
            return self._sampler(logits_V, draw)
        return int(choose(logits_V, self.gumbel(position), sampling))

    def plan(self, position: int, sampling: SamplingParams) -> Draw:
        """Return what `draw` does at a position, for a model to do itself."""
        return Draw(_key(self.seed, position, _TOKEN_STREAM), sampling)

    def gumbel(self, position: int) -> Tensor:
        """Return the Gumbel noise that chooses the token at `position`, shape (V,), float64."""
        if position not in self._rows:
            self._rows = range(position, position + self._num_rows)
            self._gumbel_BV = gumbel_noise(
                self.seed, self._rows, self._vocab_size, device=self._device
            )
        return self._gumbel_BV[position - self._rows.start]
