"""`nvium train` with `dataset = "stand_in"`: a stream of numbered documents in two shards.

The variable STREAM says what becomes of it: `fine`; `uneven`, shard 0 has 30 documents and shard 1
has 10; `once` and `forever`, the connection is lost at document 7 of shard 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

NUM_CHARS = 63
"""With BOS and EOS a document is one sequence of 64."""


def documents(shards: list[int], kind: str) -> Iterator[dict[str, str]]:
    """Yield the documents of the shards that this rank has."""
    for shard in shards:
        for index in range(10 if (kind, shard) == ("uneven", 1) else 30):
            is_lost = (shard, index) == (1, 7) and kind in ("once", "forever")
            if is_lost and (kind == "forever" or "LOST" not in os.environ):
                os.environ["LOST"] = "1"
                raise ConnectionError("the line is dead")
            yield {"text": f"shard {shard}, document {index}".ljust(NUM_CHARS, "x")}


def main() -> int:
    """Register the stream, then train."""
    from nvium_titan.train.compat import use_cpu_without_accelerator

    use_cpu_without_accelerator()
    from datasets import IterableDataset
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    from nvium_titan.train import launch as train
    from nvium_titan.train.data import sources

    sources.RETRY_WAITS_S = (0.05, 0.1)
    kind = os.environ["STREAM"]
    text_datasets.DATASETS["stand_in"] = DatasetConfig(
        path="nowhere",
        loader=lambda _: IterableDataset.from_generator(
            documents, gen_kwargs={"shards": [0, 1], "kind": kind}
        ),
        sample_processor=lambda sample: sample["text"],
    )
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
