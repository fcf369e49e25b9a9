"""Arrays of a checkpoint that are read by rows of their first dim, so that of a stack of layers one is in memory at a time.

TensorStore decodes whole chunks, and Orbax makes one of all that a device holds of an array. So stacks are saved with a chunk
for each layer, and each row's part of the digest is summed as the row is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import EllipsisType
from typing import Any

import jax
import numpy as np

from ejdist.training.integrity import Changed, digest_of_row, digests_of
from ejdist.training.pytree_io import bits_of, name_of

# A device's part of a stack that is smaller is one chunk: chunks of a few bytes cost more than they save.
_LEAST = 1 << 20
# Stacks of several layers a chunk are held whole while layers are read one after the other, up to this in all.
_MOST = 1 << 30
_CACHED = 32 << 20  # bytes of the index of the arrays, which would otherwise be fetched again for each row


def is_stack(name: str) -> bool:
    """Returns whether a leaf of a state has a row for each layer."""
    return "layers" in name.split(".")


def save_args(arrays: Any) -> Any:
    """Returns what Orbax is to write each array with: large stacks a layer at a time."""
    import orbax.checkpoint as ocp

    def one(path: Any, leaf: Any) -> Any:
        shape = leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape
        large = is_stack(name_of(path)) and leaf.ndim > 1 and leaf.dtype.itemsize * np.prod(shape) > _LEAST
        return ocp.SaveArgs(shard_axes=(0,)) if large else ocp.SaveArgs()

    return jax.tree_util.tree_map_with_path(one, arrays)


class StoredArray:
    """An array of a checkpoint. `array[3]` reads a row of its first dim, and `array[...]` all of it, as NumPy arrays.

    Attributes:
      rows: how many are read at once; they are kept until the last of them has been asked for.
    """

    def __init__(self, name: str, store: Any, digest: int | None, reading: Callable[[], AbstractContextManager[Any]]):
        self.name, self.shape, self.rows = name, tuple(store.shape), 1
        if self.shape:
            self.rows = min(self.shape[0], store.chunk_layout.read_chunk.shape[0] or self.shape[0])
        self.nbytes = int(np.prod(self.shape)) * store.dtype.numpy_dtype.itemsize
        self._store, self._digest, self._reading = store, digest, reading
        self._sum = 0
        self._summed: set[int] = set()
        self._kept: tuple[int, np.ndarray] | None = None

    def __getitem__(self, index: int | EllipsisType) -> np.ndarray:
        """Raises CheckpointError if it cannot be read, or if all rows have been read and are not what was saved."""
        with self._reading():
            if isinstance(index, EllipsisType):
                whole = self._store.read().result()
                self._sum = digests_of({self.name: whole})[self.name]
                self.check()
                return whole
            first = index - index % self.rows
            if self._kept is None or self._kept[0] != first:
                self._kept = None  # before the next are read
                self._kept = first, self._store[first : first + self.rows].read().result()
                self._add(*self._kept)
            block = self._kept[1]
            if index == first + len(block) - 1:
                self._kept = None
            return block[index - first]

    def _add(self, first: int, block: np.ndarray) -> None:
        for row, x in enumerate(block, first):
            if row not in self._summed:
                self._summed.add(row)
                self._sum = (self._sum + int(digest_of_row(bits_of(np.asarray(x)), np.uint32(row)))) % 2**32
        if len(self._summed) == self.shape[0]:
            self.check()

    def check(self) -> None:
        """Raises Changed if what has been read is not all that was saved."""
        if self._sum != self._digest:
            raise Changed(f"{self.name} is not what was saved")


def open_arrays(
    folder: Any, digests: Mapping[str, int], names: list[str], reading: Callable[[], AbstractContextManager[Any]]
) -> dict[str, StoredArray]:
    """Returns name -> array, of which nothing but the shape has been read.

    Args:
      folder: the item of a checkpoint that has them.
      reading: a context of each read.
    """
    import tensorstore as ts

    base = str(folder)
    base = f"{base}/" if "://" in base else {"driver": "file", "path": f"{base}/"}
    context = ts.Context({"cache_pool#index": {"total_bytes_limit": _CACHED}})
    opened = []
    for name in names:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#index"}
        # Without the last key a chunk that is gone would be read as zeros.
        spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
        opened.append(ts.open(spec, read=True, open=True, context=context))
    return {
        name: StoredArray(name, future.result(), digests.get(name), reading)
        for name, future in zip(names, opened, strict=True)
    }


def layer_by_layer(arrays: Mapping[str, StoredArray]) -> bool:
    """Returns whether stacks may be read side by side: not those of a checkpoint that has many layers in a chunk, as older ones
    do, because each would stay in memory until its last layer."""
    held = sum(a.nbytes for a in arrays.values() if is_stack(a.name) and a.rows > 1)
    layer = sum(a.nbytes // a.shape[0] for a in arrays.values() if is_stack(a.name))
    return held <= max(_MOST, layer)
