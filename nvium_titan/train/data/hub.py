"""torchtitan's named data sets: C4, and what a user registers."""

from __future__ import annotations

from nvium_titan.errors import DataError, nearest
from nvium_titan.train.data.sources import SampleStore, StreamSource


def open_dataset(
    name: str, *, path: str | None, dp_rank: int, dp_world_size: int
) -> SampleStore | StreamSource:
    """Return a data set of `torchtitan.hf_datasets.text_datasets.DATASETS`.

    A downloaded one is shuffled and shared out like local files; of a stream each rank gets
    documents of its own.

    Args:
        name: Its name there.
        path: Where to load it from instead, such as a local copy.
        dp_rank: This rank.
        dp_world_size: Ranks that share a stream.

    Raises:
        DataError: If there is no such name, or it cannot be loaded.
    """
    # Not at the top of the file: it imports torchtitan's utilities, which choose the device.
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    from torchtitan.hf_datasets.text_datasets import DATASETS

    if name not in DATASETS:
        raise DataError(f"dataset {name!r}: unknown{nearest(name, DATASETS)}; fix [dataloader]")
    entry = DATASETS[name]
    where = path or entry.path
    try:
        data = entry.loader(where)
    except Exception as error:  # the library raises whatever its readers raise
        raise DataError(f"dataset {name!r}: cannot be loaded from {where}: {error}") from error
    shown = f"dataset {name!r}"
    if isinstance(data, Dataset):
        return SampleStore(data, entry.sample_processor, name=shown)
    data = split_dataset_by_node(data, dp_rank, dp_world_size)
    return StreamSource(data, entry.sample_processor, name=shown)
