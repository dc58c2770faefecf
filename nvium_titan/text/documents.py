"""Documents in files: found, indexed and read one at a time; bad ones are told with their place.

Each row of `.jsonl`, `.json` or `.parquet` is a document. Any other file is text and one document;
a long one is read in pieces of about `PIECE_BYTES`, cut at a blank line if possible, so that it can
be shuffled and split as well.
"""

from __future__ import annotations

import bisect
import glob
import hashlib
import itertools
import json
import mmap
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from typing_extensions import override

from nvium_titan.errors import DataError
from nvium_titan.text.parquet import ParquetRows

PIECE_BYTES = 8192
"""Length of a piece of a text file, give or take half."""
ROW_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson", ".parquet"})
TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts",
     ".go", ".rs", ".sh"}
)  # fmt: skip

Split = Literal["train", "validation", "all"]
VALIDATION_PERCENT = 5
"""Percentage of the documents in the split "validation"; the others are in "train"."""


class Document(NamedTuple):
    """A text, or a piece of one."""

    text: str
    """The text or piece."""
    is_end: bool = True
    """Whether the text ends with it, so that the end token follows."""


class Rejected(NamedTuple):
    """A document that cannot be used."""

    place: str
    """File and line."""
    reason: str
    """What is wrong with it."""


class Store(Protocol):
    """Documents by index."""

    def __len__(self) -> int:
        """Return the number of documents, with bad ones."""
        ...

    def read(self, index: int) -> Document | Rejected:
        """Return a document, or why it cannot be used."""
        ...


class TextStore(Store):
    """Documents in memory."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    @override
    def __len__(self) -> int:
        return len(self._texts)

    @override
    def read(self, index: int) -> Document:
        return Document(self._texts[index])


class JoinedStore(Store):
    """Several stores one after the other."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = [store for store in stores if len(store)]
        self._ends = list(itertools.accumulate(map(len, self._stores)))

    @override
    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @override
    def read(self, index: int) -> Document | Rejected:
        which = bisect.bisect_right(self._ends, index)
        return self._stores[which].read(index - (self._ends[which - 1] if which else 0))


def split_of(text: str) -> Split:
    """Return the split that a document belongs to; only its text decides."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "validation" if int.from_bytes(digest) % 100 < VALIDATION_PERCENT else "train"


class _PieceStore:
    """The pieces of a text file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends = array("q", _piece_ends(path))

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, index: int) -> Document | Rejected:
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        try:
            text = _read_range(self._path, start, end).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return Rejected(f"{self._path}: byte {start + error.start}", "not UTF-8 text")
        if "\0" in text:
            return Rejected(f"{self._path}: byte {start}", "holds NUL, so it is not text")
        return Document(text, is_end=end == self._ends[-1])


class _LineStore:
    """The rows of a .jsonl file."""

    def __init__(self, path: Path, text_column: str) -> None:
        self._path = path
        self._text_column = text_column
        self._ends = array("q", _line_ends(path))

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, index: int) -> Document | Rejected:
        place = f"{self._path}:{index + 1}"
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        line = _read_range(self._path, start, end)
        if not line.strip():
            return Document("")
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            return Rejected(place, "not UTF-8 text")
        except (ValueError, RecursionError) as error:
            return Rejected(place, f"not valid JSON: {error}")
        return row_document(row, self._text_column, place)


class _Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class _RowStore:
    """The rows of a .json or .parquet file."""

    def __init__(self, path: Path, rows: _Rows, text_column: str) -> None:
        self._path = path
        self._rows = rows
        self._text_column = text_column

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Document | Rejected:
        place = f"{self._path}: row {index + 1}"
        return row_document(self._rows[index], self._text_column, place)


def _json_rows(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not valid JSON: {error}; a file with a row on each line must end in .jsonl"
        ) from error
    return rows if isinstance(rows, list) else [rows]


def open_files(paths: str | Sequence[str], *, text_column: str) -> JoinedStore:
    """Return the documents of files, folders and globs, in the order given, each file once.

    Args:
        paths: Folders are searched for files with known suffixes, but not hidden ones.
        text_column: The key of the text in a row.

    Raises:
        DataError: If a path does not exist or has no file to read, or if no row of a file has text
            under `text_column`.
        DependencyError: If a file is Parquet and pyarrow is not installed.
    """
    stores: list[Store] = []
    for file in find_files(paths):
        try:
            store = _open(file, text_column)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error
        if file.suffix.lower() in ROW_SUFFIXES:
            _refuse_useless(file, store, text_column)
        stores.append(store)
    return JoinedStore(stores)


def find_files(paths: str | Sequence[str]) -> list[Path]:
    """Return the files that `open_files` reads, in its order.

    Raises:
        DataError: If a path does not exist or has no file to read.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    return list(dict.fromkeys(file for path in given for file in _find(path)))


def _find(path: str) -> Iterator[Path]:
    root = Path(path).expanduser()
    if root.is_dir():
        known = ROW_SUFFIXES | TEXT_SUFFIXES
        found = [
            file
            for file in sorted(root.rglob("*"))
            if file.suffix.lower() in known
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(root).parts)
        ]
        if not found:
            raise DataError(
                f"path {path!r}: no file in this folder has a known suffix "
                f"({' '.join(sorted(known))}); name the files or use a glob"
            )
    elif root.is_file():
        found = [root]
    else:
        matches = sorted(glob.glob(str(root), recursive=True))
        found = [file for file in map(Path, matches) if file.is_file()]
        if not found:
            where = Path.cwd() if not root.is_absolute() else root.parent
            raise DataError(
                f"path {path!r}: no such file, folder or glob (looked in {where}); "
                "fix [dataloader] path"
            )
    yield from found


def _open(file: Path, text_column: str) -> Store:
    suffix = file.suffix.lower()
    if suffix == ".json":
        return _RowStore(file, _json_rows(file), text_column)
    if suffix == ".parquet":
        return _RowStore(file, ParquetRows(file, text_column), text_column)
    return _LineStore(file, text_column) if suffix in ROW_SUFFIXES else _PieceStore(file)


def _refuse_useless(file: Path, store: Store, text_column: str) -> None:
    # If every row is bad, the column is wrong: that is no stray damage.
    first: Rejected | None = None
    for index in range(len(store)):
        item = store.read(index)
        if isinstance(item, Document):
            if item.text:
                return
        else:
            first = first or item
    if first is not None:
        raise DataError(
            f"{file}: none of its {len(store)} rows has text under {text_column!r}; the first: "
            f"{first.place}: {first.reason}; fix [dataloader] text_column "
            "(in nvium eval: --text-column) or the file"
        )


def row_document(row: Any, text_column: str, place: str) -> Document | Rejected:
    """Return the document in a row of a file, or why it has none."""
    if not isinstance(row, dict):
        return Rejected(place, f"is {_json_name(row)}, must be an object")
    if text_column not in row:
        keys = ", ".join(sorted(row)[:8])
        return Rejected(place, f"no key {text_column!r} (keys: {keys})")
    text = row[text_column]
    if not isinstance(text, str):
        return Rejected(place, f"{text_column!r} is {_json_name(text)}, must be a string")
    return Document(text)


def _json_name(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        dict: "an object",
        list: "a list",
        str: "a string",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), f"of type {type(value).__name__}")


def _read_range(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _line_ends(path: Path) -> Iterator[int]:
    """Yield where each line ends; the last need not end in a newline."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            yield end


def _piece_ends(path: Path) -> Iterator[int]:
    """Yield where each piece of a text file ends, never within a UTF-8 character."""
    size = path.stat().st_size
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 0
        while size - start > PIECE_BYTES * 3 // 2:
            start = _cut(data, start + PIECE_BYTES // 2, start + PIECE_BYTES)
            yield start
    yield size


def _cut(data: mmap.mmap, low: int, high: int) -> int:
    for separator in (b"\n\n", b"\n\r\n", b"\n", b" "):
        found = data.rfind(separator, low, high)
        if found >= 0:
            return found + len(separator)
    while high > low and data[high] & 0xC0 == 0x80:  # a continuation byte
        high -= 1
    return high
