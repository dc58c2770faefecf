"""All ranks take a batch, or none does, so that none waits for another in a collective.

A stream or a disk may fail on one rank alone, and streams from the hub end at different times. So
before each batch the hosts exchange two flags over gloo, which waits for no device. A rank whose
text has ended trains on padding until all have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from nvium_titan.errors import NviumError, StreamError
from nvium_titan.train.data.loader import Batch, TextDataLoader

logger = logging.getLogger(__name__)

LONGEST_WAIT = timedelta(hours=1)
"""How long a rank waits for another's batch, with the retries of its stream."""


def host_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks, or None if there is one; every rank must call it."""
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


def in_step(loader: TextDataLoader, group: dist.ProcessGroup | None) -> Iterator[Batch]:
    """Yield a loader's batches, on every rank as many as on the one with the most.

    Args:
        loader: This rank's.
        group: From `host_group`.

    Raises:
        NviumError: On all ranks, if the loader of any fails; the message names the rank.
    """
    batches = iter(loader)
    while True:
        batch: Batch | None = None
        failure: NviumError | None = None
        try:
            batch = next(batches, None)
        except Exception as error:
            failure = _named(error)
        if group is not None:
            has_batch, has_failed = _any(batch is not None, failure is not None, group=group)
            if has_failed:
                failure = _failures(failure, group)
            elif batch is None and has_batch:
                batch = loader.padding()
        if failure is not None:
            raise failure
        if batch is None:
            return
        yield batch


def _any(*flags: bool, group: dist.ProcessGroup) -> list[bool]:
    """Return for each flag whether it is set on any rank."""
    found = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]


def _named(error: Exception) -> NviumError:
    """Return an error that every rank can raise; log the trace of an unexpected one."""
    if isinstance(error, NviumError):
        return error
    logger.error("reading the text failed", exc_info=error)
    return StreamError(f"reading the text failed: {type(error).__name__}: {error}")


def _failures(own: NviumError | None, group: dist.ProcessGroup) -> NviumError:
    """Return this rank's failure, or that of the first rank that has one, with its number."""
    found: list[NviumError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    if own is not None:
        return own
    rank, first = next((rank, error) for rank, error in enumerate(found) if error is not None)
    return type(first)(f"rank {rank}: {first}")
