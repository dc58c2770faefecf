"""Which positions are owed to which block, and in what runs they are paid: host integers only.

For one sequence the positions still owed to block k are a contiguous run [filled_k, length),
because the positions that went at least k blocks deep are nested in k (N-vium, arXiv:2605.13190,
Sec. 4.2, "piggybacking"; the paper keeps one group per exit depth, a run needs none of that
bookkeeping). The module owns the terms deferred token, piggyback group and bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32)
"""Row counts of a decode step in bucket mode; a longer run is paid in chunks of the largest."""

PREFILL_BUCKETS = (*DECODE_BUCKETS, 64, 128)
"""Row counts of a prefill in bucket mode."""


@dataclass(slots=True)
class FilledCounts:
    """How far each block has come in one sequence: length >= filled[0] >= filled[1] >= ..."""

    filled: list[int]
    """Positions whose keys, values and output exist in each block."""

    length: int = 0
    """Positions fed so far."""

    @classmethod
    def empty(cls, num_blocks: int) -> FilledCounts:
        """Return the counts of a sequence to which nothing has been fed."""
        return cls(filled=[0] * num_blocks)

    @property
    def num_deferred(self) -> int:
        """Positions that some block still owes; the length of the longest owed run."""
        return self.length - self.filled[-1]

    def payable(self, block_index: int) -> int:
        """Return how many positions the block owes that the block below has run."""
        below = self.filled[block_index - 1] if block_index else self.length
        return below - self.filled[block_index]


def bucket_rows(rows: int, buckets: tuple[int, ...] = PREFILL_BUCKETS) -> int:
    """Return the smallest bucket that holds a group of `rows` rows.

    Args:
        rows: Rows of the group, at most the largest bucket.
        buckets: Sizes in increasing order.
    """
    return buckets[bisect_left(buckets, rows)]
