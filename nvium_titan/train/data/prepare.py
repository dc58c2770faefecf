"""From text to a folder of shards: encoded in parallel, resumable, complete or not there at all.

This process reads the documents in order and hands them to worker processes, a shard at a time.
Until all shards are done the folder is called `OUT.unfinished`; each finished shard has its record
beside it. Run again, the command keeps the shards that match their records and makes the others.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nvium_titan.errors import DataError, StreamError
from nvium_titan.files import replacing
from nvium_titan.text.documents import Document, Rejected, Store, find_files
from nvium_titan.text.tokenizer import Tokenizer, load_tokenizer
from nvium_titan.train.data.shards import (
    MANIFEST_FILE,
    PLAN_FILE,
    UINT16_IDS,
    Manifest,
    Plan,
    Shard,
    ShardRecord,
    TokenizerIdentity,
    is_prepared,
    parse_plan,
    read_manifest,
    write_manifest,
    write_shard,
)

if TYPE_CHECKING:
    from nvium_titan.train.data.loader import TextDataLoader
    from nvium_titan.train.data.sources import StreamSource

logger = logging.getLogger(__name__)

# What waits for a worker process must fit in memory.
SHARD_CHARS = 1 << 27
"""Characters after which a shard ends, however few documents it has."""


class Progress(Protocol):
    """Shows progress."""

    def __call__(self, *, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        """Give a function to call with the number done; a total of None is unknown."""
        ...


class _Reader(Protocol):
    """Reads documents in order, from any position."""

    total: int | None
    """How many there are; None for a stream, whose end nobody knows."""

    @property
    def position(self) -> Any:
        """The current position, as JSON can hold it."""
        ...

    @position.setter
    def position(self, position: Any) -> None: ...

    def documents(self) -> Iterator[Document | Rejected]:
        """Yield the rest; the position moves before each is yielded."""
        ...


class _StoreReader:
    """Documents by index."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.total: int | None = len(store)
        self.position = 0

    def documents(self) -> Iterator[Document | Rejected]:
        while self.position < len(self._store):
            self.position += 1
            yield self._store.read(self.position - 1)


class _StreamReader:
    """A stream; it reports by itself what it rejects."""

    total: int | None = None

    def __init__(self, stream: StreamSource) -> None:
        self._stream = stream

    @property
    def position(self) -> Any:
        return self._stream.state_dict()

    @position.setter
    def position(self, position: Any) -> None:
        self._stream.load_state_dict(position)

    def documents(self) -> Iterator[Document | Rejected]:
        yield from self._stream.documents()


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A shard to make."""

    path: Path
    documents: list[Document | Rejected]
    position: Any
    tokenizer: str
    dtype: str


def prepare(
    config: TextDataLoader.Config,
    *,
    tokenizer: str,
    out: Path,
    num_workers: int,
    documents_per_shard: int,
    progress: Progress,
) -> Manifest:
    """Encode the text that a `[dataloader]` table names; training on the folder gives the same.

    Args:
        config: What to read. Seed, split and so on remain settings of the training run.
        tokenizer: Path of the tokenizer, as `hf_assets_path`.
        out: Folder to write; left alone if it holds this text already.
        num_workers: Processes that encode.
        documents_per_shard: Most documents in a shard; an interrupted process loses so many.
        progress: Is told the number of documents done, with those kept from before.

    Raises:
        DataError: If the text is missing, malformed or empty, if `out` or its unfinished folder
            holds something else, or if the disk is full.
        TokenizerError: If the tokenizer cannot be read.
        ConfigError: If the table names no text.
        StreamError: If a stream keeps failing, or a worker process was killed.
        KeyboardInterrupt: If it was interrupted.
    """
    if config.path and is_prepared(config.path):
        raise DataError(f"path {config.path!r}: is already prepared; give the text itself")
    plan = _plan(config, load_tokenizer(tokenizer), documents_per_shard)
    if out.exists():
        return _finished(out, plan)
    reader = _open(config)
    folder = out.with_name(out.name + ".unfinished")
    try:
        _begin(folder, plan)
        with _processes(num_workers) as pool, progress(total=reader.total) as report:
            shards = _make_shards(pool, reader, folder, plan, tokenizer, num_workers, report)
        manifest = Manifest(plan=plan, shards=tuple(shards))
        if not manifest.num_tokens:
            raise DataError(_no_text(manifest, plan))
        write_manifest(folder, manifest)
        folder.rename(out)
        wanted = {MANIFEST_FILE, *(shard.file for shard in shards)}
        for file in out.iterdir():
            if file.name not in wanted:
                file.unlink()
    except OSError as error:
        raise DataError(
            f"{out} was not prepared: {error}; run the same command again to continue"
        ) from error
    except KeyboardInterrupt:
        logger.warning("%s is kept; run the same command again to continue", folder)
        raise
    except BrokenProcessPool as error:
        raise StreamError(
            "a worker process was killed, perhaps for lack of memory; run the same command again "
            "to continue, with fewer --workers if need be"
        ) from error
    return manifest


def check(folder: Path, *, num_workers: int, progress: Progress) -> Manifest:
    """Check every document of a prepared folder; return its manifest.

    Args:
        folder: The folder with the manifest.
        num_workers: Processes that read.
        progress: Is told the number of documents done.

    Raises:
        DataError: If a shard is missing, truncated, changed or from another folder; the message
            names all such shards.
    """
    manifest = read_manifest(folder)
    faults = []
    done = 0
    with _processes(num_workers) as pool, progress(total=manifest.num_documents) as report:
        tasks = [(folder, record, manifest.plan.dtype) for record in manifest.shards]
        for record, fault in zip(manifest.shards, pool.map(_fault, tasks), strict=True):
            done += record.num_documents
            report(done)
            faults += [fault] if fault else []
    if faults:
        raise DataError("\n".join(faults))
    return manifest


def _open(config: TextDataLoader.Config) -> _Reader:
    store: Any = config.open()
    return _StoreReader(store) if hasattr(store, "__len__") else _StreamReader(store)


def _plan(config: TextDataLoader.Config, tokenizer: Tokenizer, documents_per_shard: int) -> Plan:
    files: list[list[Any]] = []
    text: dict[str, Any]
    if config.dataset:
        text = {"dataset": config.dataset, "dataset_path": config.dataset_path}
    elif config.corpus:
        text = {"corpus": config.corpus, "python": sys.version.split()[0]}
    else:
        text = {"path": config.path, "text_column": config.text_column}
        for file in find_files(config.path) if config.path else []:
            found = file.stat()
            files.append([str(file), found.st_size, found.st_mtime_ns])
    return Plan(
        text=text,
        files=files,
        tokenizer=TokenizerIdentity.of(tokenizer),
        dtype="uint16" if tokenizer.vocab_size <= UINT16_IDS else "uint32",
        documents_per_shard=documents_per_shard,
    )


def _finished(out: Path, plan: Plan) -> Manifest:
    """Return the manifest of a folder that exists already.

    Raises:
        DataError: If it holds another text, or is no prepared folder.
    """
    if not out.is_dir() or not (out / MANIFEST_FILE).is_file():
        raise DataError(f"{out}: exists but is not a prepared folder; choose another --out")
    manifest = read_manifest(out)
    differences = plan.differences(manifest.plan)
    if differences:
        raise DataError(
            f"{out}: was prepared from another text or with other settings (different: "
            f"{differences}); choose another --out or delete it"
        )
    logger.info("%s is prepared already", out)
    return manifest


def _begin(folder: Path, plan: Plan) -> None:
    """Make the unfinished folder, or check that the existing one has the same plan.

    Raises:
        DataError: If it has another plan.
        OSError: If the folder cannot be written.
    """
    file = folder / PLAN_FILE
    if file.is_file():
        try:
            differences = plan.differences(parse_plan(json.loads(file.read_bytes())))
        except (ValueError, KeyError, TypeError):
            differences = f"{PLAN_FILE} is damaged"
        if differences:
            raise DataError(
                f"{folder}: was begun with another text or other settings (different: "
                f"{differences}); delete it to start over"
            )
        logger.info("continuing %s", folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(file) as opened:
        opened.write(json.dumps(dataclasses.asdict(plan)).encode())


def _no_text(manifest: Manifest, plan: Plan) -> str:
    first = next((shard.first_rejected for shard in manifest.shards if shard.first_rejected), "")
    faults = f" (skipped {manifest.num_rejected} documents, the first {first})" if first else ""
    return f"{plan.text}: no text to prepare{faults}; fix [dataloader]"


def _make_shards(
    pool: ProcessPoolExecutor,
    reader: _Reader,
    folder: Path,
    plan: Plan,
    tokenizer: str,
    num_workers: int,
    report: Callable[[int], None],
) -> list[ShardRecord]:
    """Make the missing shards; return the records of all."""
    kept = _kept_shards(pool, folder, plan)
    shards = {index: record for index, (record, _) in kept.items()}
    report(sum(record.num_documents for record in shards.values()))
    running: dict[Future[ShardRecord], int] = {}

    def collect(*, most_running: int) -> None:
        while len(running) > most_running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                shards[running.pop(future)] = future.result()
            report(sum(record.num_documents for record in shards.values()))

    index = 0
    documents = reader.documents()
    while True:
        if index in kept:
            _, reader.position = kept[index]
            documents = reader.documents()
        else:
            taken = _take(documents, plan.documents_per_shard)
            if not taken:
                break
            task = _Task(
                path=folder / f"shard-{index:05d}.bin",
                documents=taken,
                position=reader.position,
                tokenizer=tokenizer,
                dtype=plan.dtype,
            )
            # One more than there are processes, so that none waits for this one to read.
            collect(most_running=num_workers)
            running[pool.submit(_make_shard, task)] = index
        index += 1
    collect(most_running=0)
    return [shards[index] for index in sorted(shards)]


def _take(documents: Iterator[Document | Rejected], most: int) -> list[Document | Rejected]:
    """Return the documents of the next shard, none at the end."""
    taken: list[Document | Rejected] = []
    num_chars = 0
    while len(taken) < most and num_chars < SHARD_CHARS:
        item = next(documents, None)
        if item is None:
            break
        taken.append(item)
        num_chars += len(item.text) if isinstance(item, Document) else 0
    return taken


def _kept_shards(
    pool: ProcessPoolExecutor, folder: Path, plan: Plan
) -> dict[int, tuple[ShardRecord, Any]]:
    """Return, by index, the record of each complete shard and the position after it."""
    kept = {}
    files = sorted(folder.glob("shard-*.json"))
    for file, is_whole in zip(
        files, pool.map(_is_whole, files, [plan.dtype] * len(files)), strict=True
    ):
        if is_whole:
            table = json.loads(file.read_bytes())
            index = int(file.stem.removeprefix("shard-"))
            kept[index] = (ShardRecord(**table["record"]), table["position"])
        else:
            logger.warning("%s: damaged; it is made again", file.with_suffix(".bin"))
    return kept


# What follows runs in the worker processes, but for `_processes`.


def _make_shard(task: _Task) -> ShardRecord:
    """Write a shard, then its record."""
    record = write_shard(task.path, task.documents, _tokenizer(task.tokenizer), task.dtype)
    table = {"record": dataclasses.asdict(record), "position": task.position}
    with replacing(task.path.with_suffix(".json")) as file:
        file.write(json.dumps(table).encode())
    return record


def _is_whole(file: Path, dtype: str) -> bool:
    """Return whether a shard matches its record, to the last id."""
    try:
        record = ShardRecord(**json.loads(file.read_bytes())["record"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return not _fault((file.parent, record, dtype))


def _fault(shard: tuple[Path, ShardRecord, str]) -> str:
    """Return what is wrong with a shard, "" if nothing is."""
    try:
        Shard(*shard).verify()
    except DataError as error:
        return str(error)
    return ""


@cache
def _tokenizer(path: str) -> Tokenizer:
    return load_tokenizer(path)


@contextmanager
def _processes(num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Give a pool whose processes end with the block, however it ends, and with this process."""
    # Spawned, since this process may have threads.
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_process)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise


def _begin_process() -> None:
    # Ctrl-C reaches the whole process group; only the parent reacts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "runs in a worker process"
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
