"""A tensor in a bucket as an array, of which only what is taken from it is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejdist.buckets import BucketPath

_CHUNK = 1 << 20  # bytes that are read together, whatever part of them is wanted
_RUN = 8 << 20  # bytes of a request
_AT_ONCE = 16 * _RUN


class _Memory:
    """The bytes of a tensor: as much address space as it has, and memory only for what has been read."""

    def __init__(self, path: BucketPath, offset: int, size: int) -> None:
        self._path, self._offset, self._size = path, offset, size
        self.content = np.empty(size, np.uint8)
        self._read = np.zeros(-(-size // _CHUNK), bool)

    def read(self, begin: int, end: int) -> None:
        """Reads the bytes [begin, end), unless they have been read."""
        chunks = np.arange(begin // _CHUNK, -(-end // _CHUNK))
        missing = chunks[~self._read[chunks]]
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else ():
            stop = min((int(run[-1]) + 1) * _CHUNK, self._size)
            for first in range(int(run[0]) * _CHUNK, stop, _AT_ONCE):
                self._fill(first, min(first + _AT_ONCE, stop))
        self._read[chunks] = True

    def _fill(self, begin: int, end: int) -> None:
        spans = [(at, min(at + _RUN, end)) for at in range(begin, end, _RUN)]
        contents = self._path.read_ranges([(self._offset + b, self._offset + e) for b, e in spans])
        for (b, e), content in zip(spans, contents, strict=True):
            if len(content) != e - b:
                raise OSError(None, f"it ends {e - b - len(content):,} bytes too early; copy it again", str(self._path))
            self.content[b:e] = np.frombuffer(content, np.uint8)


class RemoteTensor:
    """A tensor, or a part of one. Indexing, reshaping and transposing read nothing; NumPy reads the bytes between the first and
    the last number of what it is asked to copy or to compare."""

    def __init__(self, numbers: np.ndarray, memory: _Memory) -> None:
        self._numbers, self._memory = numbers, memory

    @classmethod
    def of(cls, path: BucketPath, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> RemoteTensor:
        """Returns the tensor of an object, `offset` bytes from its start."""
        memory = _Memory(path, offset, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        return cls(memory.content.view(dtype).reshape(shape), memory)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._numbers.shape

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> RemoteTensor:
        return RemoteTensor(self._numbers[index], self._memory)

    def reshape(self, shape: Any) -> RemoteTensor:
        return RemoteTensor(self._numbers.reshape(shape), self._memory)

    def transpose(self, order: Any) -> RemoteTensor:
        return RemoteTensor(self._numbers.transpose(order), self._memory)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._numbers.size:
            first, end = np.lib.array_utils.byte_bounds(self._numbers)
            start = self._memory.content.__array_interface__["data"][0]
            self._memory.read(first - start, end - start)
        return np.array(self._numbers, dtype=dtype, copy=copy)
