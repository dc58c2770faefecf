"""Bytes of live tensors, counted by storage as operators run, not by the allocator.

So the figure is the same on every device and in every run, and a test can hold the code to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors made, and still alive, inside `with LiveBytes() as live:`.

    Views share a storage, which counts once. Tensors made before do not count, nor does what an
    operator allocates and frees within itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and count what it makes."""
        self._add((args, kwargs), counts=False)
        out = func(*args, **(kwargs or {}))
        self._add(out, counts=True)
        return out

    def _add(self, tree: Any, *, counts: bool) -> None:
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in self._storages:
                continue
            size = storage.nbytes() if counts else 0
            # torch keeps a storage's Python object for as long as the storage itself.
            gone = weakref.ref(storage, partial(self._remove, key))
            self._storages[key] = (gone, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, _gone: weakref.ref[Any]) -> None:
        self.now -= self._storages.pop(key)[1]
