"""Several requests decoded together: their rows share block calls, their tokens stay their own.

Each token is chosen by a law of its own; the batch looks at what the laws want and answers many in
one call. When a block runs, every other sequence with positions owed to it rides along: the weights
are read once whatever the rows, and those positions need not be run later. What a sequence computes
depends on the others only in the rounding of matrix products of other shapes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from nvium_titan.core.cost import head_cost
from nvium_titan.decode.generation import GenerationResult, RequestRun
from nvium_titan.decode.laws import Law, law_of
from nvium_titan.decode.results import BatchStats, GeneratedToken
from nvium_titan.decode.runner import Runner
from nvium_titan.decode.schedule import LockStep, Schedule, choose_schedule

_MEASURED_ROUNDS = 16
"""Rounds in lock-step, which give the exit shares that "auto" chooses by."""


@dataclass(slots=True, eq=False)
class _Row:
    """A request that is being decoded."""

    index: int
    run: RequestRun
    admitted_s: float
    """When it was admitted, on the clock of the batch."""
    law: Law | None = None
    """Of the token being chosen; None where it has just given one, or begins."""
    block_index: int = 0
    """The block that it wants, or has run last."""
    wanted: tuple[int, ...] = ()
    """The exits whose logits it waits for; none while it waits for a block."""
    first_token_s: float = 0.0


class BatchGeneration(Iterator[tuple[int, GeneratedToken]]):
    """Row indices and tokens as they come, those of one row in order; see `Engine.generate_batch`.

    Rows end on their own, at a stop id or at their length; then the next request takes the place.
    """

    def __init__(
        self,
        runner: Runner,
        openers: Sequence[Callable[[], RequestRun]],
        *,
        batch_size: int,
        schedule: Schedule | Literal["auto"],
    ) -> None:
        """Take checked requests; nothing runs yet.

        Args:
            runner: The model.
            openers: For each request, what makes its run and its buffers when its turn comes.
            batch_size: Most rows at once.
            schedule: When which block runs; "auto" chooses after `_MEASURED_ROUNDS` rounds.
        """
        self.stats = BatchStats()
        self._runner = runner
        self._waiting = deque(enumerate(openers))
        self._batch_size = batch_size
        self._is_auto = schedule == "auto"
        self._schedule = LockStep() if schedule == "auto" else schedule
        self._limits: deque[int] = deque()
        self._num_rounds = 0
        self._exit_counts = [0] * runner.num_exits
        self._rows: list[_Row] = []
        self._tokens: deque[tuple[int, GeneratedToken]] = deque()
        self._results: list[GenerationResult | None] = [None] * len(openers)
        self._busy_s = 0.0
        self._round_start = 0.0

    def __next__(self) -> tuple[int, GeneratedToken]:
        """Return the next token and the index of its row.

        Raises:
            StopIteration: After the last token of the last row.
        """
        while not self._tokens:
            if not self._rows and not self._waiting:
                raise StopIteration
            try:
                self._round()
            except BaseException:
                self.close()
                raise
        return self._tokens.popleft()

    def stop(self, row_index: int) -> None:
        """End a row with the tokens it has, finish reason "stop"; a row that has ended stays so.

        Raises:
            RuntimeError: If it has not given a token yet.
        """
        if self._results[row_index] is not None:
            return
        row = next((row for row in self._rows if row.index == row_index), None)
        if row is None or not row.run.tokens:
            raise RuntimeError(f"row {row_index} has not given a token yet")
        row.run.finish_reason = row.run.finish_reason or "stop"
        try:
            self._drop_finished()
        except BaseException:
            self.close()
            raise

    def result(self, row_index: int) -> GenerationResult | None:
        """Return the result of a row whose last token has been given; None before that."""
        is_due = any(index == row_index for index, _ in self._tokens)
        return None if is_due else self._results[row_index]

    def close(self) -> None:
        """Drop what is unfinished; there are no results then."""
        self._rows = []
        self._waiting.clear()
        self._tokens.clear()

    def results(self) -> list[GenerationResult]:
        """Return the results, in the order of the requests, after running what is left.

        Raises:
            RuntimeError: If the batch was closed or failed before its end.
        """
        for _ in self:
            pass
        results = [result for result in self._results if result is not None]
        if len(results) < len(self._results):
            raise RuntimeError("the batch was closed or failed before its end")
        return results

    # --- one round ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _round(self) -> None:
        """Run the blocks below the limit of this round, then the head; see `decode.schedule`."""
        self._round_start = time.perf_counter()
        limit = self._next_limit()
        for row in self._rows:
            if row.law is None:
                row.run.prepare()
                self._begin_token(row)
        self._admit()
        while True:
            while (block_index := self._shallowest_block()) is not None and block_index < limit:
                self._run_block(block_index)
            if not self._run_heads():
                break  # until now an answer may have been "not certain yet: one block more"
        self._busy_s = self._now()
        self.stats.decode_s = self._busy_s - self.stats.prefill_s
        self._drop_finished()

    def _next_limit(self) -> int:
        """Return how many blocks this round may run."""
        self._num_rounds += 1
        if self._is_auto and self._num_rounds > _MEASURED_ROUNDS:
            self._is_auto = False
            total = sum(self._exit_counts)
            self._schedule = choose_schedule(
                [count / total for count in self._exit_counts],
                num_rows=min(self._batch_size, len(self._rows) + len(self._waiting)),
                head_cost=head_cost(self._runner.params.shape),
            )
        if not self._limits:
            self._limits.extend(self._schedule.limits(self._runner.num_exits))
        return self._limits.popleft()

    def _now(self) -> float:
        """Return the seconds that the batch itself has taken; a slow consumer does not count."""
        return self._busy_s + time.perf_counter() - self._round_start

    def _admit(self) -> None:
        """Prefill new requests into the free places, each alone."""
        while self._waiting and len(self._rows) < self._batch_size:
            index, opener = self._waiting.popleft()
            row = _Row(index, opener(), admitted_s=self._now())
            row.run.prepare()
            row.run.state.stats.prefill_s = self._now() - row.admitted_s
            self.stats.prefill_s += row.run.state.stats.prefill_s
            self._rows.append(row)
            self._begin_token(row)

    def _begin_token(self, row: _Row) -> None:
        state, job = row.run.state, row.run.job
        row.law = law_of(job.sampling, job.policy)(self._runner.forward, state, job)
        row.block_index = 0

    def _shallowest_block(self) -> int | None:
        """Return the shallowest block that a row wants."""
        return min((row.block_index for row in self._rows if _wants_block(row)), default=None)

    def _run_block(self, block_index: int) -> None:
        """Run a block for all rows that want it; what others owe it rides along."""
        rows = [row for row in self._rows if _wants_block(row) and row.block_index == block_index]
        if any(row.run.state.payable(block_index) for row in rows):
            wanting = [row.run.state for row in rows]
            riders = [row.run.state for row in self._rows if row not in rows]
            self.stats.layers_run += self._runner.fill_all(wanting, block_index, riders=riders)
        router_logits = dict.fromkeys(rows, math.nan)
        asking = [row for row in rows if row.law is not None and row.law.asks_router(block_index)]
        if asking:
            states = [row.run.state for row in asking]
            answers = self._runner.router_logits(states, block_index)
            router_logits.update(zip(asking, answers, strict=True))
        for row, router_logit in router_logits.items():
            assert row.law is not None, "it wants a block"
            row.wanted = row.law.after_block(block_index, router_logit)
            if not row.wanted:
                row.block_index += 1

    def _run_heads(self) -> bool:
        """Give all rows that wait for logits theirs, from one call; return whether there were any.

        A row that gets its token goes on in the next round.
        """
        rows = [row for row in self._rows if row.wanted]
        if not rows:
            return False
        self.stats.head_calls += 1
        all_logits = self._runner.logits([(row.run.state, row.wanted) for row in rows])
        for row, logits_NV in zip(rows, all_logits, strict=True):
            assert row.law is not None, "it asked for logits"
            row.wanted = ()
            token = row.law.after_logits(logits_NV)
            if token is None:
                row.block_index += 1
            else:
                row.law = None
                self._give(row, token)
        return True

    def _give(self, row: _Row, token: GeneratedToken) -> None:
        row.run.take(token)
        self._tokens.append((row.index, token))
        self.stats.num_new_tokens += 1
        self._exit_counts[token.exit_index] += 1
        now, stats = self._now(), row.run.state.stats
        if len(row.run.tokens) == 1:
            row.first_token_s = now
            stats.ttft_s = now - row.admitted_s
        else:
            stats.decode_s = now - row.first_token_s

    def _drop_finished(self) -> None:
        """Take the results of rows that have ended; their buffers are free then."""
        for row in self._rows:
            if row.run.finish_reason is not None:
                self._results[row.index] = row.run.result()
        self._rows = [row for row in self._rows if row.run.finish_reason is None]


def _wants_block(row: _Row) -> bool:
    return row.law is not None and not row.wanted
