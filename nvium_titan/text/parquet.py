"""The rows of a Parquet file."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

from nvium_titan.errors import DataError, DependencyError, nearest

KEPT_BYTES = 1 << 30
"""Decoded text of a file that is kept; the row group used longest ago is dropped first."""


class ParquetRows:
    """The text column of a Parquet file, decoded by row group.

    Read in order, each row group is decoded once; in random order too, if the column fits in
    `KEPT_BYTES`. Of a larger one `nvium data prepare` makes shards, quick to read in any order.
    """

    def __init__(self, path: Path, text_column: str) -> None:
        """Open the file.

        Raises:
            DataError: If the file is damaged or has no such column.
            DependencyError: If pyarrow is not installed.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DependencyError(
                f"{path}: Parquet files need pyarrow: pip install 'nvium-titan[train]'"
            ) from error
        self._path = path
        self._text_column = text_column
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}: not a Parquet file: {error}") from error
        names = self._file.schema_arrow.names
        if text_column not in names:
            raise DataError(
                f"{path}: no column {text_column!r}{nearest(text_column, names)}; fix "
                "[dataloader] text_column (in nvium eval: --text-column)"
            )
        footer = self._file.metadata
        counts = (footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        self._ends = list(itertools.accumulate(counts))
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row, with the text column alone.

        Raises:
            DataError: If the row group is damaged.
        """
        group = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        return {self._text_column: self._column(group)[row].as_py()}

    def _column(self, group: int) -> Any:
        if group not in self._groups:
            import pyarrow

            try:
                table = self._file.read_row_group(group, columns=[self._text_column])
            except (OSError, pyarrow.ArrowException) as error:
                raise DataError(f"{self._path}: row group {group} is damaged: {error}") from error
            self._groups[group] = table.column(0)
            while len(self._groups) > 1 and self._num_bytes() > KEPT_BYTES:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group]

    def _num_bytes(self) -> int:
        return sum(int(column.nbytes) for column in self._groups.values())

    def __reduce__(self) -> tuple[Any, ...]:
        # Each worker process opens the file itself.
        return ParquetRows, (self._path, self._text_column)
