"""`nvium data`: text encoded once, before training."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nvium_titan.cli.common import check_at_least, progress
from nvium_titan.errors import ConfigError

if TYPE_CHECKING:
    from nvium_titan.train.data.shards import Manifest


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Encode the text of a training run into shards of token ids, with several processes.

    The run's file names the text ([dataloader] path, corpus or dataset) and the tokenizer
    (hf_assets_path). Training on the folder gives the same sequences as training on the text, to
    the token, for any seed, split, sequence length and number of ranks, without encoding anything;
    a stream from the hub is shuffled as well, and any number of ranks share it. It pays for large
    text, many GPUs, Parquet files and hub streams.

    Interrupt it at any time: the same command continues and redoes only unfinished shards. The
    folder appears once it is complete.

    nvium data prepare --config-file train_configs/demo.toml --out data/demo

    nvium train --config-file demo.toml --dataloader.corpus= --dataloader.path data/demo

    nvium data prepare --config-file run.toml --table validator.dataloader --out data/held_out
    """

    config_file: Path
    """The TOML file of the training run."""

    out: Path
    """Folder to write, whole or not at all; nothing is done if it holds this text already."""

    table: Literal["dataloader", "validator.dataloader"] = "dataloader"
    """Table of the file that names the text. Prepare files and the corpus once: shards know the
    split of each document, so one folder serves training and validation."""

    workers: int = field(default_factory=_num_cores)
    """Processes that encode; default: one per core."""

    documents_per_shard: int = 32768
    """Most documents of a shard, which is one file, and what an interrupt costs each process."""

    def run(self) -> None:
        """Prepare, then say how to train on the folder.

        Raises:
            ConfigError: If a number is not positive.
        """
        check_at_least(self, ConfigError, workers=1, documents_per_shard=1)
        from nvium_titan.train import compat

        compat.require_torchtitan()
        compat.use_cpu_without_accelerator()
        from nvium_titan.train import launch as train
        from nvium_titan.train.data.prepare import prepare

        run = train.load(["--config-file", str(self.config_file)])
        config = run.dataloader if self.table == "dataloader" else run.validator.dataloader
        manifest = prepare(
            config,
            tokenizer=run.hf_assets_path,
            out=self.out,
            num_workers=self.workers,
            documents_per_shard=self.documents_per_shard,
            progress=partial(progress, "documents prepared"),
        )
        print(f"{self.out}: {_summary(manifest)}")
        first = next((s.first_rejected for s in manifest.shards if s.first_rejected), None)
        if first:
            print(f"skipped {manifest.num_rejected:,} documents, the first {first}")
        print(
            f'\nto train on it, name it instead of the text:\n\n[{self.table}]\npath = "{self.out}"'
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    """Read all of a prepared folder and compare it with its manifest.

    Training checks small folders whole; of others, the size and index of each shard when it opens
    it, and each document when it reads it. This finds all damage at once, such as after copying.

    nvium data check data/demo
    """

    folder: tyro.conf.Positional[Path]
    """A folder from nvium data prepare."""

    workers: int = field(default_factory=_num_cores)
    """Processes that read; default: one per core."""

    def run(self) -> None:
        """Check and print what is in the folder.

        Raises:
            ConfigError: If the number of processes is not positive.
        """
        check_at_least(self, ConfigError, workers=1)
        from nvium_titan.train.data.prepare import check

        shown = partial(progress, "documents checked")
        manifest = check(self.folder, num_workers=self.workers, progress=shown)
        print(f"{self.folder}: whole: {_summary(manifest)}")


@tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
@dataclass(frozen=True, kw_only=True)
class Data:
    """Encode text into shards before training (prepare), or check such shards (check).

    nvium data prepare --config-file train_configs/demo.toml --out data/demo

    nvium data check data/demo
    """

    command: (
        Annotated[Prepare, tyro.conf.subcommand("prepare")]
        | Annotated[Check, tyro.conf.subcommand("check")]
    )
    """What to do."""

    def run(self) -> None:
        """Do it."""
        self.command.run()


def _summary(manifest: Manifest) -> str:
    plan = manifest.plan
    return (
        f"{manifest.num_tokens:,} tokens in {manifest.num_documents:,} documents, "
        f"{len(manifest.shards):,} shards of {plan.dtype}; tokenizer: {plan.tokenizer}"
    )
