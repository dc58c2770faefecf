"""`TextDataLoader`: from the text that a configuration names to batches of packed sequences."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import default_collate
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader

from nvium_titan.errors import ConfigError, DataError, TokenizerError
from nvium_titan.text.documents import Split, Store, TextStore, open_files
from nvium_titan.train.data.encoding import Encoder, encode_document
from nvium_titan.train.data.hub import open_dataset
from nvium_titan.train.data.packing import PackedTextDataset, Share, to_sample
from nvium_titan.train.data.python_docs import python_docs
from nvium_titan.train.data.shards import ShardStore, is_prepared
from nvium_titan.train.data.sources import IndexedSource, Source, StreamSource, no_text

# Of a larger folder each document is checked when it is read; `nvium data check` checks it all.
VERIFIED_TOKENS = 1 << 27
"""Prepared folders of up to so many tokens are checked as a whole before training."""

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class TextDataLoader(ParallelAwareDataloader):
    """Batches of packed text: files, a prepared folder, the demo corpus, a torchtitan data set.

    Its state is a position in the order of sequences, common to all ranks and worker processes: a
    run resumes with any number of either, and neither skips nor repeats a sequence. Only in a
    stream from the hub has each rank a position of its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Set exactly one of `path`, `corpus` and `dataset`."""

        path: str | list[str] = ""
        """Files, folders or globs: each row of .jsonl, .json or .parquet is a document, and each
        file of another kind. Or one folder of `nvium data prepare`, with the same sequences."""

        text_column: str = "text"
        """The key of the text in a row."""

        corpus: Literal["", "python_docs"] = ""
        """Built-in text: `python_docs`, the documentation installed with Python."""

        split: Split = "train"
        """Of `path` and `corpus`: `validation` is 5% of the documents, chosen by their text,
        `train` is the rest, `all` is both."""

        infinite: bool = True
        """Whether to start over when the text ends; otherwise one epoch, its last batch padded."""

        seed: int = 0
        """Shuffles the documents, anew in every epoch."""

        def __post_init__(self) -> None:
            """Check that the keys agree.

            Raises:
                ConfigError: If there are several places to read from, or a key has no effect.
            """
            given = [key for key in ("path", "corpus", "dataset") if getattr(self, key)]
            if len(given) > 1:
                raise ConfigError(
                    f"{' and '.join(given)} are both set: keep one, set the others to ''"
                )
            if self.dataset_path and not self.dataset:
                raise ConfigError(
                    f"dataset_path={self.dataset_path!r} is the location of a named dataset, but "
                    "dataset is not set; for files of your own set path"
                )
            self._check_split(self.dataset)

        def _check_split(self, dataset: str) -> None:
            # It is the validator's default, and right for a data set such as c4_validation.
            if self.split == "validation" and dataset and "validation" not in dataset:
                raise ConfigError(
                    f"split='validation' is for path and corpus; dataset={dataset!r} is one split "
                    "already: name the validation set, such as c4_validation"
                )

        def open(
            self, *, dp_rank: int = 0, dp_world_size: int = 1
        ) -> Store | ShardStore | StreamSource:
            """Return the documents, unordered: by index, or as a stream.

            Raises:
                ConfigError: If no key says where to read.
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
                tokenizer: If given, a prepared folder must have been made with it.
                dp_rank: This rank.
                dp_world_size: Ranks that share a stream.

            Raises:
                ConfigError: If no key says where to read, or several worker processes would read
                    a stream.
                DataError: If the data is missing or malformed.
                TokenizerError: If a prepared folder was made with another tokenizer.
            """
            store = self.open(dp_rank=dp_rank, dp_world_size=dp_world_size)
            return self._ordered(store, tokenizer)

        def _ordered(
            self, store: Store | ShardStore | StreamSource, tokenizer: Encoder | None
        ) -> Source:
            if isinstance(store, StreamSource):
                # Each worker would need documents and a position of its own.
                if self.num_workers > 1:
                    raise ConfigError(
                        f"num_workers={self.num_workers}: {store.name} is a stream, which only one "
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
            # A data set is a split already.
            split = "all" if dataset else self.split
            return IndexedSource(store, name=self._shown(), split=split, seed=self.seed)

        def _shown(self) -> str:
            if self.dataset:
                return f"dataset {self.dataset!r}"
            place = f"corpus {self.corpus!r}" if self.corpus else f"path {self.path!r}"
            return f"{place}, split {self.split!r}"

        def check(self, tokenizer: Encoder) -> None:
            """Check that there is text to train on; a small prepared folder is checked as a whole.

            Raises:
                ConfigError: If no key says where to read.
                DataError: If the data is missing, malformed or has no text.
                TokenizerError: If the tokenizer has no end token, or another one prepared the data.
            """
            _check_end_token(tokenizer)
            store = self.open()
            source = self._ordered(store, tokenizer)
            if not any(len(encode_document(d, tokenizer)) for d in source.documents()):
                raise DataError(no_text(source))
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
        """Open the data; `check` tells whether there is text in it, or else the first batch.

        Args:
            config: What to read, and how.
            dp_world_size: Ranks that share the data.
            dp_rank: This rank.
            tokenizer: Must have an end token.
            seq_len: T, inputs in a sequence.
            local_batch_size: Sequences in a batch.
            snapshot_every_n_steps: How often worker processes send their position.

        Raises:
            ConfigError: If no key says where to read.
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
        """Yield this rank's batches from the current position on."""
        self._has_started = True
        for batch in super().__iter__():
            self._num_sequences += self._round_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        if self._held is not None:
            return self._held
        walked = self.dataset.state_dict()
        if self.num_workers and self._has_started:
            # The workers' snapshots are never ahead; from the furthest there is least to redo.
            snapshot = StatefulDataLoader.state_dict(self)["_snapshot"]
            walks = [worker["dataset_state"] for worker in snapshot["_worker_snapshots"].values()]
            walked = max(walks, key=lambda walk: walk["num_sequences"])
        # As bytes, since a checkpoint would store each number in it as an entry of its own.
        position = {"num_sequences": self._num_sequences, "walked": walked}
        return {self._state_key: pickle.dumps(position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position, saved by any number of ranks and worker processes.

        Args:
            state_dict: From `state_dict`; if empty, the position stays.
        """
        if not state_dict:
            return
        position = pickle.loads(state_dict[self._state_key])
        self._num_sequences = position["num_sequences"]
        self.dataset.load_state_dict(position["walked"])
        self.dataset.pass_over(self._num_sequences)

    def hold(self, state: dict[str, Any]) -> None:
        """Let `state_dict` return this earlier state from now on, as the step after it failed."""
        self._held = state

    def padding(self) -> Batch:
        """Return a batch in which no label counts, for a rank whose text has ended."""
        batch_size, seq_len = self._shape
        sample = to_sample([], seq_len=seq_len, pad_id=0)
        return default_collate([sample] * batch_size)


def _check_end_token(tokenizer: Encoder) -> None:
    if tokenizer.eos_id is None:
        raise TokenizerError(
            "the tokenizer has no end token, so a model could not learn to stop; set eos_token in "
            "tokenizer_config.json"
        )
