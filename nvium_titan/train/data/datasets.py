"""Text as packed sequences: documents end to end, the end token a label, positions per document.

A document is BOS (if the tokenizer has one), its text, EOS. A sequence takes T inputs and the T
labels that follow them; it is full where it may, and what it cuts off goes on in the next one. A
label never belongs to another document than its input. Positions count from 0 in every document,
and again where a sequence cuts one, because attention does not reach back beyond either.

Letters: T tokens of a sequence.
"""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader

from nvium_titan.errors import ConfigError, DataError, TokenizerError
from nvium_titan.text.documents import Split, Store, TextStore, open_files
from nvium_titan.train.data.encoding import Encoder, Ids, encode_document
from nvium_titan.train.data.hub import open_dataset
from nvium_titan.train.data.python_docs import python_docs
from nvium_titan.train.data.shards import ShardStore, is_prepared
from nvium_titan.train.data.sources import IndexedSource, Source, StreamSource

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
"""The label of padding, which no loss counts."""
VERIFIED_TOKENS = 1 << 27
"""Prepared folders up to this size are read whole before training; of larger ones each document is
checked when its turn comes, and `nvium data check` reads them whole."""

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Share(NamedTuple):
    """Which sequences of the common order a rank takes: in turn, one each."""

    rank: int
    num_ranks: int
    batch_size: int
    """Sequences of one rank in a batch; worker processes take batches in turn."""

    def takes(self, index: int) -> bool:
        """Return whether sequence `index` is for this rank and this worker process."""
        worker = get_worker_info()
        own, rank = divmod(index, self.num_ranks)
        batch = own // self.batch_size
        return rank == self.rank and (worker is None or batch % worker.num_workers == worker.id)


class PackedTextDataset(IterableDataset, Stateful):
    """Sequences of exactly `seq_len` tokens from the documents of a source, for one rank.

    Every rank walks the whole order and keeps its share, so the order of training does not depend
    on the number of ranks, and all ranks have equally many sequences. So every rank encodes all of
    a text, which may be too slow for many GPUs; the documents of a prepared folder are encoded
    already, and to walk them costs little. (A stream from the hub is divided by documents instead.)
    The walk stops only where each rank has had its turn, so the
    position is the same on all of them, and any number of ranks can go on from it. Without
    `infinite` there is one epoch: the last sequence is padded, and padding fills the last batch of
    every rank, so each token counts exactly once.
    """

    def __init__(
        self, source: Source, tokenizer: Encoder, *, seq_len: int, share: Share, infinite: bool
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._share = share
        self._infinite = infinite
        # What the last sequence left of its document.
        self._rest: Ids = np.empty(0, dtype=np.int64)
        self._num_sequences = 0
        # Where the shares are dealt from; sequences before it are passed over.
        self._first_sequence = 0
        self._num_epoch_tokens = 0
        self._has_warned = False
        # Any id will do: its label is ignored and nothing attends to it.
        self._pad_id = tokenizer.eos_id or 0

    def __iter__(self) -> Iterator[Sample]:
        """Yield this rank's sequences from the present position on.

        Each is ({"input": (T,), "positions": (T,)}, labels (T,)), int64.
        """
        own: list[Ids] | None = None
        for runs in self._sequences():
            index = self._num_sequences - self._first_sequence
            self._num_sequences += 1
            if index >= 0 and self._share.takes(index):
                own = runs
            if own is not None and (index + 1) % self._share.num_ranks == 0:
                yield to_sample(own, seq_len=self._seq_len, pad_id=self._pad_id)
                own = None

    def _sequences(self) -> Iterator[list[Ids]]:
        """Yield the runs of ids of each sequence; a run's inputs are all but its last."""
        runs: list[Ids] = []
        num_inputs = 0
        for document in itertools.chain([self._rest], self._documents()):
            self._rest = document
            while (num_left := len(self._rest) - 1) > 0:
                take = min(num_left, self._seq_len - num_inputs)
                runs.append(self._rest[: take + 1])
                num_inputs += take
                self._rest = self._rest[take:]
                if num_inputs == self._seq_len:
                    yield runs
                    runs, num_inputs = [], 0
        # One epoch is over: pad to whole batches on every rank.
        round_size = self._share.num_ranks * self._share.batch_size
        while runs or (self._num_sequences - self._first_sequence) % round_size:
            yield runs
            runs = []

    def _documents(self) -> Iterator[Ids]:
        """Yield the ids of each document that is left, epoch after epoch."""
        while True:
            for document in self._source.documents():
                ids = encode_document(document, self._tokenizer)
                if len(ids):
                    self._num_epoch_tokens += len(ids)
                    yield ids
            self._check_epoch()
            if not self._infinite:
                return
            self._source.next_epoch()
            self._num_epoch_tokens = 0

    def _check_epoch(self) -> None:
        # Without this an endless run would search for text for ever.
        if not self._num_epoch_tokens:
            raise DataError(_no_text(self._source))
        if self._infinite and self._num_epoch_tokens < self._seq_len and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: all of it is %d tokens, less than one sequence (seq_len=%d); it is repeated",
                self._source.name,
                self._num_epoch_tokens,
                self._seq_len,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which does not depend on the rank or the number of ranks."""
        return {
            "source": self._source.state_dict(),
            "ids": self._rest.copy(),
            "num_sequences": self._num_sequences,
            "num_epoch_tokens": self._num_epoch_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; the sequences that follow are those of an uninterrupted run."""
        self._source.load_state_dict(state["source"])
        self._rest = state["ids"]
        self._num_sequences = self._first_sequence = state["num_sequences"]
        self._num_epoch_tokens = state["num_epoch_tokens"]

    def pass_over(self, num_sequences: int) -> None:
        """Leave out the sequences of the common order before this one; shares start with it."""
        self._first_sequence = num_sequences


class TextDataLoader(ParallelAwareDataloader):
    """Batches of packed text: files, a prepared folder, the demo corpus, a torchtitan data set.

    Its state is a position in the common order of sequences, one for all ranks and worker
    processes, so a run goes on with any number of either and neither skips nor repeats a sequence.
    Only of a stream from the hub does each rank keep its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Set exactly one of `path`, `corpus` and `dataset`."""

        path: str | list[str] = ""
        """Files, folders or globs. A .jsonl, .json or .parquet row is a document, any other file
        is one. Or one folder of `nvium data prepare`, which gives the same sequences."""

        text_column: str = "text"
        """The key of a row that holds the text."""

        corpus: Literal["", "python_docs"] = ""
        """Built-in text: `python_docs`, the documentation installed with Python."""

        split: Split = "train"
        """For `path` and `corpus`: `validation` is 5% of the documents, chosen by their text;
        `train` the others; `all` both (for a file of its own)."""

        infinite: bool = True
        """Start over when the text ends; otherwise one epoch, the last batch padded."""

        seed: int = 0
        """Orders the documents, anew in every epoch."""

        def __post_init__(self) -> None:
            """Check that there is at most one place to read from, and no key that it ignores.

            Raises:
                ConfigError: If there are several, or a key does not go with the others.
            """
            given = [key for key in ("path", "corpus", "dataset") if getattr(self, key)]
            if len(given) > 1:
                raise ConfigError(
                    f"{' and '.join(given)} are both set: keep one, set the others to ''"
                )
            if self.dataset_path and not self.dataset:
                raise ConfigError(
                    f"dataset_path={self.dataset_path!r} is where a named dataset lies, but "
                    "dataset is not set; for files of your own set path"
                )
            self._check_split(self.dataset)

        def _check_split(self, dataset: str) -> None:
            # The validator's own default is split="validation": right with such a data set.
            if self.split == "validation" and dataset and "validation" not in dataset:
                raise ConfigError(
                    f"split='validation' is for path and corpus; dataset={dataset!r} names "
                    "its own, such as c4_validation"
                )

        def open(
            self, *, dp_rank: int = 0, dp_world_size: int = 1
        ) -> Store | ShardStore | StreamSource:
            """Return the documents as they lie: by index, or as a stream.

            Raises:
                ConfigError: If nothing says where to read, or the split is not there.
                DataError: If the data is missing or malformed.
            """
            if self.dataset:
                return open_dataset(
                    self.dataset,
                    path=self.dataset_path,
                    dp_rank=dp_rank,
                    dp_world_size=dp_world_size,
                )
            if self.corpus:
                return TextStore(python_docs())
            if not self.path:
                raise ConfigError(
                    "no training text: set path, corpus or dataset under [dataloader], "
                    'for example path = "my_text.txt" or corpus = "python_docs"'
                )
            if not is_prepared(self.path):
                return open_files(self.path, text_column=self.text_column)
            path = self.path if isinstance(self.path, str) else self.path[0]
            return ShardStore(Path(path).expanduser())

        def source(
            self,
            tokenizer: Encoder | None = None,
            *,
            dp_rank: int = 0,
            dp_world_size: int = 1,
        ) -> Source:
            """Return the documents in the order of training.

            Args:
                tokenizer: A prepared folder must be made with it, if given.
                dp_rank: This rank.
                dp_world_size: Ranks that share a stream.

            Raises:
                ConfigError: If nothing says where to read, or more worker processes than one are
                    to read a stream.
                DataError: If the data is missing or malformed.
                TokenizerError: If a prepared folder was made with another tokenizer.
            """
            store = self.open(dp_rank=dp_rank, dp_world_size=dp_world_size)
            return self._ordered(store, tokenizer)

        def _ordered(
            self, store: Store | ShardStore | StreamSource, tokenizer: Encoder | None
        ) -> Source:
            if isinstance(store, StreamSource):
                # Each would have to have documents and a position of its own.
                if self.num_workers > 1:
                    raise ConfigError(
                        f"num_workers={self.num_workers}: {store.name} is a stream, which one "
                        "worker process can read; set num_workers to 1 or 0, or make shards of it "
                        "with nvium data prepare"
                    )
                return store
            dataset = self.dataset
            if isinstance(store, ShardStore):
                if tokenizer is not None:
                    store.check_tokenizer(tokenizer)
                dataset = str(store.manifest.plan.text.get("dataset", ""))
                self._check_split(dataset)
            # A data set is one split already.
            split = "all" if dataset else self.split
            return IndexedSource(store, name=self._shown(), split=split, seed=self.seed)

        def _shown(self) -> str:
            if self.dataset:
                return f"dataset {self.dataset!r}"
            place = f"corpus {self.corpus!r}" if self.corpus else f"path {self.path!r}"
            return f"{place}, split {self.split!r}"

        def check(self, tokenizer: Encoder) -> None:
            """Look for the first document, so that a run without text ends before it starts.

            Raises:
                ConfigError: If nothing says where to read.
                DataError: If the data is missing, malformed or has no text.
                TokenizerError: If the tokenizer has no end token, or is not the one that prepared
                    the data.
            """
            _check_end_token(tokenizer)
            store = self.open()
            source = self._ordered(store, tokenizer)
            if not any(len(encode_document(d, tokenizer)) for d in source.documents()):
                raise DataError(_no_text(source))
            if isinstance(store, ShardStore) and store.manifest.num_tokens <= VERIFIED_TOKENS:
                store.verify()

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Encoder,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **_: Any,
    ) -> None:
        """Open the data; whether it has text shows at the first batch, or before by `check`.

        Args:
            config: Where to read, and how to go on.
            dp_world_size: Ranks that share the data.
            dp_rank: This one.
            tokenizer: Must have an end token.
            seq_len: T, inputs of a sequence.
            local_batch_size: Sequences of a batch.
            snapshot_every_n_steps: How often worker processes send their position.

        Raises:
            ConfigError: If nothing says where to read.
            DataError: If the data is missing or malformed.
            TokenizerError: If the tokenizer has no end token.
        """
        _check_end_token(tokenizer)
        source = config.source(tokenizer, dp_rank=dp_rank, dp_world_size=dp_world_size)
        rank, num_ranks = (0, 1) if source.is_sharded else (dp_rank, dp_world_size)
        self._state_key = f"rank_{dp_rank}_of_{dp_world_size}" if source.is_sharded else "position"
        self._round_size = num_ranks * local_batch_size
        self._num_sequences = 0
        self._has_started = False
        self._held: dict[str, Any] | None = None
        self._shape = (local_batch_size, seq_len)
        dataset = PackedTextDataset(
            source,
            tokenizer,
            seq_len=seq_len,
            share=Share(rank=rank, num_ranks=num_ranks, batch_size=local_batch_size),
            infinite=config.infinite,
        )
        super().__init__(
            dataset,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches from the present position on."""
        self._has_started = True
        for batch in super().__iter__():
            self._num_sequences += self._round_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch: sequences so far, and a walk to there."""
        if self._held is not None:
            return self._held
        walked = self.dataset.state_dict()
        if self.num_workers and self._has_started:
            # Their walks are in step snapshots, none of them ahead; the furthest has least to redo.
            snapshot = StatefulDataLoader.state_dict(self)["_snapshot"]
            walks = [worker["dataset_state"] for worker in snapshot["_worker_snapshots"].values()]
            walked = max(walks, key=lambda walk: walk["num_sequences"])
        # Bytes, or a checkpoint would hold every number of it as an entry of its own.
        position = {"num_sequences": self._num_sequences, "walked": walked}
        return {self._state_key: pickle.dumps(position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position that any number of ranks and worker processes saved.

        Args:
            state_dict: From `state_dict`; empty leaves the position alone.
        """
        if not state_dict:
            return
        position = pickle.loads(state_dict[self._state_key])
        self._num_sequences = position["num_sequences"]
        self.dataset.load_state_dict(position["walked"])
        self.dataset.pass_over(self._num_sequences)

    def hold(self, state: dict[str, Any]) -> None:
        """Let `state_dict` return this earlier one from now on: a step could not be run."""
        self._held = state

    def padding(self) -> Batch:
        """Return a batch without a label that counts, for a rank whose text has ended."""
        batch_size, seq_len = self._shape
        sample = to_sample([], seq_len=seq_len, pad_id=0)
        return default_collate([sample] * batch_size)


def _check_end_token(tokenizer: Encoder) -> None:
    if tokenizer.eos_id is None:
        raise TokenizerError(
            "the tokenizer has no end token, so a model could not learn to stop: name one as "
            "eos_token in tokenizer_config.json"
        )


def _no_text(source: Source) -> str:
    faults = f" ({source.faults()})" if source.faults() else ""
    return f"{source.name}: no text to train on{faults}; fix [dataloader]"


def to_sample(runs: list[Ids], *, seq_len: int, pad_id: int) -> Sample:
    """Return the sequence of some runs of ids, padded behind them.

    Args:
        runs: Each of one document; its ids but the last are inputs, its ids but the first labels.
        seq_len: T, at least the number of inputs.
        pad_id: Any id: its label is ignored and nothing attends to it.
    """
    inputs_T = np.full(seq_len, pad_id, dtype=np.int64)
    labels_T = np.full(seq_len, IGNORED_LABEL, dtype=np.int64)
    positions_T = np.empty(seq_len, dtype=np.int64)
    start = 0
    for ids in runs:
        end = start + len(ids) - 1
        inputs_T[start:end] = ids[:-1]
        labels_T[start:end] = ids[1:]
        positions_T[start:end] = np.arange(end - start)
        start = end
    positions_T[start:] = np.arange(seq_len - start)
    return (
        {"input": torch.from_numpy(inputs_T), "positions": torch.from_numpy(positions_T)},
        torch.from_numpy(labels_T),
    )
