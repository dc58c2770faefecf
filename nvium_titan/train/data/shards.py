"""Prepared text on disk: shards of token ids, and the manifest with their checksums.

    FOLDER/
      manifest.json      what was read, the tokenizer, a record of each shard
      shard-00000.bin    ids of its documents end to end | ends | checksums | splits

A shard holds the documents in the order of the text; those without text are empty, so that each
has the same index here as there. Ids are little-endian uint16, or uint32 for vocabularies above
65536. After them comes the index, three tables with an entry per document: where its ids end
(int64), their CRC-32 (uint32), whether it is for validation (uint8). Opening a shard checks the
SHA-256 of its index, reading a document its CRC-32: opening is quick however much text there is,
and no changed id is trained on.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import mmap
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvium_titan.errors import DataError, TokenizerError
from nvium_titan.files import replacing
from nvium_titan.text.documents import Document, Rejected, split_of
from nvium_titan.train.data.encoding import Encoder, Tokens, encode_document

FORMAT = "nvium-shards-1"
MANIFEST_FILE = "manifest.json"
PLAN_FILE = "plan.json"
"""In an unfinished folder, in place of the manifest."""
UINT16_IDS = 1 << 16
"""Largest vocabulary whose ids fit in uint16."""

_INDEX = (("<i8", 8), ("<u4", 4), ("u1", 1))  # ends, checksums, splits: type and bytes of each


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """Tells the tokenizer that made the ids from others."""

    kind: str
    """`byte`, `sentencepiece` or `hf`."""
    vocab_size: int
    """The largest id, plus one."""
    bos_id: int | None
    """The id that starts a document, if there is one."""
    eos_id: int | None
    """The id that ends a document."""
    sha256: str
    """Its fingerprint."""

    @classmethod
    def of(cls, tokenizer: Encoder) -> TokenizerIdentity:
        """Return the identity of a tokenizer."""
        return cls(
            kind=tokenizer.kind,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            sha256=tokenizer.fingerprint,
        )

    def __str__(self) -> str:
        return f"{self.kind}, {self.vocab_size} ids, sha256 {self.sha256[:12]}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to prepare; equal plans give equal shards."""

    text: dict[str, Any]
    """The keys of `[dataloader]` that say what is read: path, corpus or dataset."""
    files: list[list[Any]]
    """For `path`, each file with its size in bytes and its time of change in ns; else empty."""
    tokenizer: TokenizerIdentity
    """The tokenizer that encodes it."""
    dtype: Literal["uint16", "uint32"]
    """Type of an id."""
    documents_per_shard: int
    """Most documents in a shard."""

    def differences(self, other: Plan) -> str:
        """Return the names of the fields that differ."""
        names = (field.name for field in dataclasses.fields(self))
        return ", ".join(n for n in names if getattr(self, n) != getattr(other, n))


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What the manifest says about a shard."""

    file: str
    """Its name in the folder."""
    num_documents: int
    """Documents in it, with those without text."""
    num_tokens: int
    """Ids in it, with BOS and EOS."""
    num_rejected: int
    """Documents that could not be read; here they are empty."""
    first_rejected: str
    """Place and reason of the first of these, "" if there is none."""
    index_sha256: str
    """SHA-256 of the index."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a prepared folder holds."""

    plan: Plan
    """What was prepared."""
    shards: tuple[ShardRecord, ...]
    """Its shards, in the order of the text."""

    @property
    def num_documents(self) -> int:
        """Documents, with those without text."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Ids, with BOS and EOS."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_rejected(self) -> int:
        """Documents that could not be read."""
        return sum(shard.num_rejected for shard in self.shards)


class Shard:
    """A shard on disk, mapped into memory."""

    def __init__(self, folder: Path, record: ShardRecord, dtype: str) -> None:
        """Map the file; check its size and its index.

        Raises:
            DataError: If the file is missing, truncated, changed or from another folder.
        """
        self._arguments = (folder, record, dtype)
        self._path = folder / record.file
        size = _index_start(record.num_tokens, np.dtype(dtype).itemsize)
        starts = [size]
        for _, width in _INDEX:
            starts.append(starts[-1] + width * record.num_documents)
        try:
            found = self._path.stat().st_size
            if found != starts[-1]:
                what = "truncated" if found < starts[-1] else "too long, so not the same file"
                raise DataError(
                    f"{self._path}: {what}: {found} bytes, {MANIFEST_FILE} says {starts[-1]}; "
                    f"{_REMEDY}"
                )
            with self._path.open("rb") as file:
                data = np.frombuffer(
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8
                )
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}; {_REMEDY}") from error
        if hashlib.sha256(data[starts[0] :].data).hexdigest() != record.index_sha256:
            raise DataError(
                f"{self._path}: its index does not match {MANIFEST_FILE}: the file was changed or "
                f"belongs to another folder; {_REMEDY}"
            )
        ids = data[: record.num_tokens * np.dtype(dtype).itemsize]
        self._ids = ids.view(np.dtype(dtype).newbyteorder("<"))
        self._ends, self._checksums, self._is_validation = (
            data[start:end].view(kind)
            for (kind, _), start, end in zip(_INDEX, starts[:-1], starts[1:], strict=True)
        )

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, index: int) -> Tokens:
        """Return one document.

        Raises:
            DataError: If its ids were changed.
        """
        start = int(self._ends[index - 1]) if index else 0
        ids = self._ids[start : int(self._ends[index])]
        if zlib.crc32(ids.data) != self._checksums[index]:
            raise DataError(
                f"{self._path}: document {index + 1} of {len(self)} was changed since it was "
                f"written (CRC-32); {_REMEDY}"
            )
        return Tokens(ids, "validation" if self._is_validation[index] else "train")

    def verify(self) -> None:
        """Check every document.

        Raises:
            DataError: If one was changed.
        """
        for index in range(len(self)):
            self.read(index)

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes map the file themselves.
        return Shard, self._arguments


_REMEDY = "copy it again, or run nvium data prepare again"


class ShardStore:
    """The documents of a prepared folder by index, in the order of the text."""

    def __init__(self, folder: Path) -> None:
        """Map all shards; check their sizes and indices.

        Raises:
            DataError: If the manifest or a shard is missing, damaged or from another folder.
        """
        self.manifest = read_manifest(folder)
        """What the folder holds."""
        self._folder = folder
        plan = self.manifest.plan
        self._shards = [Shard(folder, record, plan.dtype) for record in self.manifest.shards]
        self._ends = list(itertools.accumulate(map(len, self._shards)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, index: int) -> Tokens:
        """Return one document.

        Raises:
            DataError: If its ids were changed.
        """
        which = bisect.bisect_right(self._ends, index)
        return self._shards[which].read(index - (self._ends[which - 1] if which else 0))

    def verify(self) -> None:
        """Check every document.

        Raises:
            DataError: If one was changed.
        """
        for shard in self._shards:
            shard.verify()

    def check_tokenizer(self, tokenizer: Encoder) -> None:
        """Check that a tokenizer made the ids.

        Raises:
            TokenizerError: If it was another one.
        """
        found, wanted = self.manifest.plan.tokenizer, TokenizerIdentity.of(tokenizer)
        if found != wanted:
            raise TokenizerError(
                f"{self._folder}: prepared with another tokenizer ({found}) than this run's "
                f"({wanted}); set hf_assets_path to that one, or run nvium data prepare with this "
                "one"
            )


def write_shard(
    path: Path, documents: Iterable[Document | Rejected], tokenizer: Encoder, dtype: str
) -> ShardRecord:
    """Encode documents into a file, which is written completely or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    ends, checksums, splits = array("q"), array("I"), bytearray()
    num_tokens = num_rejected = 0
    first_rejected = ""
    little = np.dtype(dtype).newbyteorder("<")
    with replacing(path) as file:
        for item in documents:
            is_validation = False
            ids: npt.NDArray[Any] = np.empty(0, dtype=little)
            if isinstance(item, Rejected):
                num_rejected += 1
                first_rejected = first_rejected or f"{item.place}: {item.reason}"
            else:
                ids = encode_document(item, tokenizer).astype(little)
                is_validation = split_of(item.text) == "validation"
            file.write(ids.tobytes())
            num_tokens += len(ids)
            ends.append(num_tokens)
            checksums.append(zlib.crc32(ids.data))
            splits.append(is_validation)
        index = b"".join(
            [np.array(ends, "<i8").tobytes(), np.array(checksums, "<u4").tobytes(), splits]
        )
        file.write(bytes(_index_start(num_tokens, little.itemsize) - num_tokens * little.itemsize))
        file.write(index)
    return ShardRecord(
        file=path.name,
        num_documents=len(ends),
        num_tokens=num_tokens,
        num_rejected=num_rejected,
        first_rejected=first_rejected,
        index_sha256=hashlib.sha256(index).hexdigest(),
    )


def _index_start(num_tokens: int, width: int) -> int:
    """Return the first multiple of 8 after the ids: int64 must be aligned."""
    return -(-num_tokens * width // 8) * 8


def is_prepared(paths: str | Sequence[str]) -> bool:
    """Return whether `[dataloader] path` names a prepared folder.

    Raises:
        DataError: If the folder is not finished, or is one of several paths.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    for path in given:
        folder = Path(path).expanduser()
        if _is_manifest(folder / MANIFEST_FILE):
            if len(given) > 1:
                raise DataError(
                    f"path {path!r}: a prepared folder must be the only path; prepare the "
                    f"{len(given)} paths together"
                )
            return True
        if (folder / PLAN_FILE).is_file() and any(folder.glob("shard-*")):
            raise DataError(
                f"path {path!r}: an unfinished folder of nvium data prepare; run that command "
                "again to finish it"
            )
    return False


def _is_manifest(file: Path) -> bool:
    """Return whether a file is a manifest, of any version, not just a file of that name."""
    try:
        with file.open("rb") as opened:
            return b'"nvium-shards-' in opened.read(64)
    except OSError:
        return False


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into an existing folder.

    Raises:
        OSError: If it cannot be written.
    """
    # The format comes first: `_is_manifest` looks for it there.
    totals = {n: getattr(manifest, n) for n in ("num_documents", "num_tokens", "num_rejected")}
    table = {"format": FORMAT, **totals, **dataclasses.asdict(manifest)}
    with replacing(folder / MANIFEST_FILE) as file:
        file.write(json.dumps(table, indent=1).encode() + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a prepared folder.

    Raises:
        DataError: If it is missing, damaged or of another format.
    """
    file = folder / MANIFEST_FILE
    try:
        table = json.loads(file.read_bytes())
        if table["format"] != FORMAT:
            raise DataError(
                f"{file}: format {table['format']!r}, but this version reads {FORMAT!r}; run nvium "
                "data prepare again"
            )
        manifest = Manifest(
            plan=parse_plan(table["plan"]),
            shards=tuple(ShardRecord(**record) for record in table["shards"]),
        )
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read: {error.strerror}; give a folder of nvium data prepare"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file}: not a manifest of nvium data prepare ({type(error).__name__}: {error}); "
            f"{_REMEDY}"
        ) from error
    return manifest


def parse_plan(table: dict[str, Any]) -> Plan:
    """Return the plan in a parsed JSON object.

    Raises:
        TypeError: If it is not a plan.
    """
    return Plan(**{**table, "tokenizer": TokenizerIdentity(**table["tokenizer"])})
