"""Text as packed sequences: documents end to end, the end token a label, positions per document.

A document is BOS (if the tokenizer has one), its text, EOS. A sequence takes T inputs and the T
labels that follow them; it is full where it may, and what it cuts off goes on in the next one. A
label never belongs to another document than its input. Positions count from 0 in every document,
and again where a sequence cuts one, because attention does not reach back beyond either.

Letters: T tokens of a sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.dataloader import ParallelAwareDataloader

from nvium_titan.data.documents import Document, Store, TextStore, open_files
from nvium_titan.data.hub import hub_source
from nvium_titan.data.python_docs import python_docs
from nvium_titan.data.sources import IndexedSource, Source, Split
from nvium_titan.errors import ConfigError, DataError, TokenizerError

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
"""The label of padding, which no loss counts."""

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class Encoder(Protocol):
    """What packing asks of a tokenizer."""

    @property
    def bos_id(self) -> int | None:
        """The id that starts a document, if there is one."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` alone."""
        ...


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
    on the number of ranks, and all ranks have equally many sequences. (A stream from the hub is
    divided by documents instead.) Without `infinite` there is one epoch: the last sequence is
    padded, and padding fills the last batch of every rank, so each token counts exactly once.
    """

    def __init__(
        self, source: Source, tokenizer: Encoder, *, seq_len: int, share: Share, infinite: bool
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._share = share
        self._infinite = infinite
        # The rest of the document that the last sequence cut, and where the next one starts.
        self._ids: list[int] = []
        self._start = 0
        self._num_sequences = 0
        self._num_epoch_tokens = 0
        self._has_warned = False
        # Any id will do: its label is ignored and nothing attends to it.
        self._pad_id = tokenizer.eos_id or 0

    def __iter__(self) -> Iterator[Sample]:
        """Yield this rank's sequences from the present position on.

        Each is ({"input": (T,), "positions": (T,)}, labels (T,)), int64.
        """
        for sample in self._sequences():
            self._num_sequences += 1
            if self._share.takes(self._num_sequences - 1):
                yield sample

    def _sequences(self) -> Iterator[Sample]:
        inputs: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for _ in self._encoded_documents():
            while (num_left := len(self._ids) - 1 - self._start) > 0:
                take = min(num_left, self._seq_len - len(inputs))
                end = self._start + take
                inputs += self._ids[self._start : end]
                labels += self._ids[self._start + 1 : end + 1]
                positions += range(take)
                self._start = end
                if len(inputs) == self._seq_len:
                    yield _to_sample(inputs, labels, positions)
                    inputs, labels, positions = [], [], []
        # One epoch is over: pad to whole batches on every rank.
        round_size = self._share.num_ranks * self._share.batch_size
        while inputs or self._num_sequences % round_size:
            num_pads = self._seq_len - len(inputs)
            inputs += [self._pad_id] * num_pads
            yield _to_sample(
                inputs, labels + [IGNORED_LABEL] * num_pads, [*positions, *range(num_pads)]
            )
            inputs, labels, positions = [], [], []

    def _encoded_documents(self) -> Iterator[None]:
        """Put the ids of one document after another into `self._ids`."""
        if self._start < len(self._ids):
            yield
        while True:
            for document in self._source.documents():
                self._ids, self._start = encode_document(document, self._tokenizer), 0
                if self._ids:
                    self._num_epoch_tokens += len(self._ids)
                    yield
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
        """Return the position: between two sequences of this rank there is no other state."""
        return {
            "source": self._source.state_dict(),
            "ids": self._ids[self._start :],
            "num_sequences": self._num_sequences,
            "num_epoch_tokens": self._num_epoch_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; the sequences that follow are those of an uninterrupted run."""
        self._source.load_state_dict(state["source"])
        self._ids, self._start = state["ids"], 0
        self._num_sequences = state["num_sequences"]
        self._num_epoch_tokens = state["num_epoch_tokens"]


class TextDataLoader(ParallelAwareDataloader):
    """Batches of packed text from local files, the demo corpus or a data set of torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Set exactly one of `path`, `corpus` and `dataset`."""

        path: str | list[str] = ""
        """Files, folders or globs. A .jsonl or .json row is a document, any other file is one."""

        text_column: str = "text"
        """The key of a JSON row that holds the text."""

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
            given = self._given()
            if len(given) > 1:
                raise ConfigError(
                    f"{' and '.join(given)} are both set: keep one, set the others to ''"
                )
            if self.dataset_path and not self.dataset:
                raise ConfigError(
                    f"dataset_path={self.dataset_path!r} is where a named dataset lies, but "
                    "dataset is not set; for files of your own set path"
                )
            # The validator's own default is split="validation": right with such a data set.
            if self.split == "validation" and self.dataset and "validation" not in self.dataset:
                raise ConfigError(
                    f"split='validation' is for path and corpus; dataset={self.dataset!r} names "
                    "its own, such as c4_validation"
                )

        def _given(self) -> list[str]:
            return [key for key in ("path", "corpus", "dataset") if getattr(self, key)]

        def source(self, *, dp_rank: int = 0, dp_world_size: int = 1) -> Source:
            """Return the documents.

            Raises:
                ConfigError: If nothing says where to read.
                DataError: If the data is missing or malformed.
            """
            if not self._given():
                raise ConfigError(
                    "no training text: set path, corpus or dataset under [dataloader], "
                    'for example path = "my_text.txt" or corpus = "python_docs"'
                )
            if self.dataset:
                return hub_source(
                    self.dataset,
                    path=self.dataset_path,
                    seed=self.seed,
                    dp_rank=dp_rank,
                    dp_world_size=dp_world_size,
                )
            if self.corpus:
                store: Store = TextStore(python_docs())
                name = f"corpus {self.corpus!r}, split {self.split!r}"
            else:
                store = open_files(self.path, text_column=self.text_column)
                name = f"path {self.path!r}, split {self.split!r}"
            return IndexedSource(store, name=name, split=self.split, seed=self.seed)

        def check(self, tokenizer: Encoder) -> None:
            """Look for the first document, so that a run without text ends before it starts.

            Raises:
                ConfigError: If nothing says where to read.
                DataError: If the data is missing, malformed or has no text.
                TokenizerError: If the tokenizer has no end token.
            """
            _check_end_token(tokenizer)
            source = self.source()
            if not any(encode_document(document, tokenizer) for document in source.documents()):
                raise DataError(_no_text(source))

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
        source = config.source(dp_rank=dp_rank, dp_world_size=dp_world_size)
        rank, num_ranks = (0, 1) if source.is_sharded else (dp_rank, dp_world_size)
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


def encode_document(document: Document, tokenizer: Encoder) -> list[int]:
    """Return the ids of a document, BOS and EOS included; none if it has no text."""
    ids = tokenizer.encode(document.text) if document.text.strip() else []
    if not ids:
        return []
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    eos = [tokenizer.eos_id] if document.is_end and tokenizer.eos_id is not None else []
    return [*bos, *ids, *eos]


def _check_end_token(tokenizer: Encoder) -> None:
    if tokenizer.eos_id is None:
        raise TokenizerError(
            "the tokenizer has no end token, so a model could not learn to stop: name one as "
            "eos_token in tokenizer_config.json"
        )


def _no_text(source: Source) -> str:
    faults = f" ({source.faults()})" if source.faults() else ""
    return f"{source.name}: no text to train on{faults}; fix [dataloader]"


def _to_sample(inputs: list[int], labels: list[int], positions: list[int]) -> Sample:
    return (
        {"input": torch.tensor(inputs), "positions": torch.tensor(positions)},
        torch.tensor(labels),
    )
