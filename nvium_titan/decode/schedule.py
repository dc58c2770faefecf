"""When a batch runs which block: schedules, and the choice between them by a cost model.

A schedule changes only the time at which blocks run, never a token. It is a cycle of rounds; a
round runs the blocks below its limit, shallowest first, for the sequences that want them, and then
the head for all that wait for it, until each has its token. Sequences that want a deeper block wait
for a later round; the last round of a cycle has no limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

from typing_extensions import override

from nvium_titan.errors import PromptError, nearest

_MOST_REPLAYS = 8
_LEAST_GAIN = 1.01


class Schedule(Protocol):
    """When a batch runs which block."""

    def limits(self, num_blocks: int) -> tuple[int, ...]:
        """Return the number of blocks that each round of a cycle may run; the last has all."""


ScheduleName = Literal["lockstep", "periodic", "auto"]
"""`LockStep`; `Periodic` with one replay of the first block; the better of all of them, by
`choose_schedule`, from the exit shares of a batch's first tokens."""


def named_schedule(schedule: Schedule | ScheduleName) -> Schedule | Literal["auto"]:
    """Return the schedule of a name; "auto", which a batch chooses, and schedules stay.

    Raises:
        PromptError: If there is no such name.
    """
    if not isinstance(schedule, str) or schedule == "auto":
        return schedule
    named: dict[str, Schedule] = {"lockstep": LockStep(), "periodic": Periodic(num_replays=1)}
    if schedule not in named:
        raise PromptError(f"schedule={schedule!r}{nearest(schedule, (*named, 'auto'))}")
    return named[schedule]


@dataclass(frozen=True, kw_only=True, slots=True)
class LockStep(Schedule):
    """Every round gives every sequence a token: a block runs if any sequence wants it."""

    @override
    def limits(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Periodic(Schedule):
    """Replay the shallow blocks for those that leave there, then sweep down for all."""

    num_replays: int
    """Rounds of shallow blocks before each sweep, at least 1."""
    num_shallow: int = 1
    """Blocks that a replay runs, at least 1; as many as the model has means lock-step."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            PromptError: If one is not positive.
        """
        for name in ("num_replays", "num_shallow"):
            if getattr(self, name) < 1:
                raise PromptError(f"{name}={getattr(self, name)}: must be at least 1")

    @override
    def limits(self, num_blocks: int) -> tuple[int, ...]:
        return (*(min(self.num_shallow, num_blocks),) * self.num_replays, num_blocks)


def choose_schedule(
    exit_shares: Sequence[float], *, num_rows: int, head_cost: float
) -> LockStep | Periodic:
    """Return the schedule with the most tokens per unit of time, by `tokens_per_cost`.

    Lock-step unless a periodic one gains over 1%, since its tokens come less evenly.

    Args:
        exit_shares: Measured share of tokens that left at each exit; sums to 1.
        num_rows: Sequences decoded together.
        head_cost: Time of a head call, in block calls.

    Raises:
        ValueError: If the shares are no distribution.

    Example:
        At shares (.6, .2, .1, .1), 8 rows and a head of 0.145 blocks, one block is replayed
        before each sweep; at (.1, .1, .1, .7) nothing is.
    """
    if min(exit_shares) < 0 or abs(sum(exit_shares) - 1) > 1e-6:
        raise ValueError(f"exit_shares={exit_shares}: must be shares that sum to 1")

    def rate(schedule: LockStep | Periodic) -> float:
        return tokens_per_cost(schedule, exit_shares, num_rows=num_rows, head_cost=head_cost)

    candidates = [
        Periodic(num_shallow=num_shallow, num_replays=num_replays)
        for num_shallow in range(1, len(exit_shares))
        for num_replays in range(1, _MOST_REPLAYS + 1)
    ]
    best = max(candidates, key=rate, default=LockStep())
    return best if rate(best) > _LEAST_GAIN * rate(LockStep()) else LockStep()


def tokens_per_cost(
    schedule: LockStep | Periodic,
    exit_shares: Sequence[float],
    *,
    num_rows: int,
    head_cost: float,
) -> float:
    """Return the expected tokens per block call of a cycle, all rows together.

    The model: a block call costs 1 and a head call h, whatever their rows, since both read weights;
    blocks are equally deep; rows exit independently, with probability p_k at exit k. Let
    S_k = p_k + p_{k+1} + ... (a fresh token wants block k), d the shallow blocks, F = 1 - S_{d+1},
    and a_i = F^i the probability that a row has left early in all of the first i replays.

        replay i     block k <= d runs if any of the B rows wants it: 1 - (1 - a_{i-1} S_k)^B;
                     the head if any left: h (1 - (1 - a_i)^B); tokens B a_i
        sweep        a row wants block k <= d with probability a_r S_k; k > d with
                     a_r S_k + (1 - a_r) S_k / S_{d+1}, since those that wait are known to go
                     deeper; head h; tokens B

    With many rows one replay of one block pays where p_1 > (1 + h) / (N_V + h). Lock-step (r = 0)
    gives 1.63, 1.28, 1.09, 1.02 times a dense model's tokens at B = 1, 2, 4, 8 for shares
    (.35, .2, .15, .3) and h = 0.145; a simulation with a small cost per row 1.60, 1.26, 1.08, 1.00.

    Args:
        schedule: A cycle.
        exit_shares: p_1, p_2, ...
        num_rows: B.
        head_cost: h.
    """
    num_blocks = len(exit_shares)
    *replays, _ = schedule.limits(num_blocks)
    num_shallow = replays[0] if replays else 0
    reach = [1 - left for left in accumulate(exit_shares[:-1], initial=0.0)]
    leaves_early = 1 - reach[num_shallow] if num_shallow < num_blocks else 1.0

    def any_row(probability: float) -> float:
        return 1 - (1 - min(max(probability, 0.0), 1.0)) ** num_rows

    fresh, tokens, cost = 1.0, float(num_rows), head_cost
    for _ in replays:
        cost += sum(any_row(fresh * reach[k]) for k in range(num_shallow))
        fresh *= leaves_early
        cost += head_cost * any_row(fresh)
        tokens += num_rows * fresh
    for k in range(num_blocks):
        wants = fresh * reach[k]
        if k >= num_shallow and fresh < 1:
            wants += (1 - fresh) * reach[k] / reach[num_shallow]
        cost += any_row(wants)
    return tokens / cost
