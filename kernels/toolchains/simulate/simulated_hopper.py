"""A program on a Hopper multiprocessor, in Python over NumPy: its partitions, shared memory, barriers, copies and
products.

What Hopper may do at any time usually happens here as late as possible, so that code that does not wait for it gets
wrong numbers:

- the partitions of a program take turns, in an order drawn again whenever one waits or arrives at a barrier;
- a TMA copy fills its tile with NaN when it starts, and with the data when no partition can continue otherwise; for
  random periods, at once;
- a product is NaN until it is waited for and no other partition can continue; a TMA atomic add takes effect at the same
  time.

What Hopper does not tolerate is an error: a deadlock of partitions, a tile that changes while a product or an add may
still read it, one that the tensor cores or TMA read before a fence after it was written, more arrivals than a barrier
counts, copies of another shape than their tile, accesses past the end of an array, and an end before all of a program's
copies and products are done.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax_triton import triton_lib

from kernels.toolchains.simulate.offsets import offsets

here = threading.local()  # the current thread's program and partition
KERNEL = "__interpreted__"  # marks the globals of a kernel's functions
TURN = 1 / 16  # probability of switching between late and immediate copies
BARRIERS = object()  # the layout of barriers


class _Stopped(Exception):
    """Another partition of the program has failed."""


# -- registers and memory ----------------------------------------------------------------------------------------------


class Tensor(np.ndarray):
    """Entries in registers, or a scalar: an immutable array that divides integers as C does, and casts with `to`."""

    def __floordiv__(self, other: Any) -> Any:
        return np.floor_divide(self - np.fmod(self, other), other)

    def __mod__(self, other: Any) -> Any:
        return np.fmod(self, other)

    __iadd__, __isub__, __imul__, __ixor__ = (getattr(np.ndarray, f"__{n}__") for n in ("add", "sub", "mul", "xor"))

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None, shape=self.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, *dims: Any) -> Any:
        return self.transpose(*dims)

    def split(self) -> tuple[Any, Any]:
        return self[..., 0], self[..., 1]


def tensor(value: Any, dtype: Any = None) -> Any:
    """Returns a tensor; Python integers and floats become 32-bit."""
    if dtype is None and not isinstance(value, np.ndarray | np.generic):
        dtype = {bool: np.bool_, int: np.int32, float: np.float32}[type(value)]
    return np.asarray(value, dtype).view(Tensor)


class Pointer:
    """The address of one entry of an array, or of several."""

    __array_ufunc__ = None  # so that tensor + pointer is a pointer

    def __init__(self, name: str, array: np.ndarray, index: Any = 0):
        self._name, self._array, self._index = name, array, index
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, entries: Any) -> Any:
        return Pointer(self._name, self._array, np.asarray(entries, np.int64) + self._index)

    __radd__ = __add__

    def to(self, dtype: np.dtype) -> Any:
        """Returns the address of the same bytes as numbers of another size."""
        index = self._index * self._array.itemsize // dtype.itemsize
        return Pointer(self._name, self._array.view(dtype), index)

    def entries(self, mask: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (the flat array, indices of the entries in it, which entries are active)."""
        shape = np.broadcast_shapes(np.shape(self._index), np.shape(mask))
        index, meant = np.broadcast_to(self._index, shape), np.broadcast_to(mask, shape)
        outside = meant & ((index < 0) | (index >= self._array.size))
        if outside.any():
            raise IndexError(f"{self._name}: entry {index[outside][0]} is out of bounds, size {self._array.size}")
        return self._array.reshape(-1), np.where(meant, index, 0), meant


def poison(dtype: np.dtype) -> Any:
    return np.iinfo(dtype).max - 1 if dtype.kind in "iu" else np.nan


class Shared:
    """A tile in shared memory, or barriers; views of it (an index, a slice) share its memory.

    Args:
      memory: the entries of an allocation.
      unfenced: True for entries written by instructions, with no fence since then to make them visible to tensor cores
        and TMA.
      entries: which of them belong to the tile.
    """

    def __init__(self, memory: np.ndarray, unfenced: np.ndarray, entries: np.ndarray):
        self._memory, self._unfenced, self._entries = memory, unfenced, entries
        self.shape, self.dtype = list(entries.shape), memory.dtype

    @classmethod
    def allocate(cls, dtype: Any, shape: Sequence[int], layout: Any = None) -> Shared:
        size = math.prod(shape)
        if layout is BARRIERS:
            memory = np.array([Barrier() for _ in range(size)], object)
        else:
            memory = np.full(size, poison(np.dtype(dtype)), dtype)
        return cls(memory, np.zeros(size, bool), offsets(shape, layout))

    def _some(self, entries: np.ndarray) -> Shared:
        return Shared(self._memory, self._unfenced, entries)

    def index(self, i: Any) -> Shared:
        if not 0 <= i < self.shape[0]:
            raise IndexError(f"tile {i} of {self.shape[0]}")
        return self._some(self._entries[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise IndexError(f"entries {start} to {start + length} of {self.shape[dim]}")
        return self._some(self._entries[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, dims: Sequence[int]) -> Shared:
        return self._some(self._entries.transpose(dims))

    def reinterpret(self, dtype: Any = None, shape: Sequence[int] | None = None, layout: Any = None) -> Shared:
        memory, entries = self._memory if dtype is None else self._memory.view(dtype), self._entries
        each = max(
            1, memory.itemsize // self._memory.itemsize
        )  # of our entries in one of these, which has the flags of all
        entries = entries if each == 1 else entries.reshape(-1, each)[:, 0] // each
        if shape is not None:
            first = int(entries.min())
            if math.prod(shape) != entries.size or int(entries.max()) - first != entries.size - 1:
                raise TypeError(f"a tile {self.dtype}{self.shape} is reinterpreted as {list(shape)}")
            entries = first + offsets(shape, layout)
        return Shared(memory, self._unfenced.reshape(-1, each), entries)

    def load(self, layout: Any = None) -> Any:
        return self._memory[self._entries].view(Tensor)

    def store(self, value: Any) -> None:
        if list(value.shape) != self.shape or value.dtype != self.dtype:
            raise TypeError(f"{value.dtype}{list(value.shape)} does not fit a tile {self.dtype}{self.shape}")
        self._memory[self._entries] = value
        self._unfenced[self._entries] = True
        here.partition.written.append((self._unfenced, self._entries))

    def begin_reading(self, who: str) -> Callable[[], np.ndarray]:
        """Returns a function, to be called as late as possible, that returns what the tensor cores or TMA read from the
        tile."""
        self._check_fence(f"{who} to read")
        before = self._memory[self._entries]

        def read() -> np.ndarray:
            if self._memory[self._entries].tobytes() != before.tobytes():
                raise RuntimeError(f"a tile {self.dtype}{self.shape} changed while {who} reading it")
            return before

        return read

    def begin_writing(self, copied: list[Any] | None = None) -> Callable[[np.ndarray], None]:
        """Fills the tile with NaN, and returns the function that writes TMA's data; or instructions', noted in `copied`."""

        def write(value: Any) -> None:
            if copied is None:
                self._check_fence("TMA is to write")
            else:
                self._unfenced[self._entries] = True
                copied.append((self._unfenced, self._entries))
            self._memory[self._entries] = value

        self._memory[self._entries] = poison(self.dtype)
        return write

    def _check_fence(self, what: str) -> None:
        if self._unfenced[self._entries].any():
            raise RuntimeError(f"{what} a tile before fence_async_shared() after it was written")

    def barrier(self) -> Barrier:
        if self.dtype != object or self._entries.size != 1:
            raise TypeError(f"{self.dtype}{self.shape} is not one barrier")
        return self._memory[int(self._entries.item())]


class Barrier:
    """Completes a phase when all expected arrivals and bytes have arrived."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.phase = self.missing = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int = 1) -> None:
        if self.count is None or count > self.missing:
            raise RuntimeError(f"{count} too many arrivals at a barrier of {self.count}")
        self.missing -= count
        self.pass_on()

    def pass_on(self) -> None:
        if not self.missing and not self.bytes:
            self.phase, self.missing = self.phase ^ 1, self.count or 0


class Descriptor:
    """An array in blocks, as TMA copies them: zeros where a block extends past its ends."""

    def __init__(self, descriptor: triton_lib.TensorDescriptor):
        self._array = np.asarray(descriptor.base).reshape(descriptor.shape, copy=False)
        self.block_type = types.SimpleNamespace(shape=list(descriptor.block_shape))
        self.dtype, self.layout = self._array.dtype, descriptor.layout
        self.nbytes_per_cta = math.prod(descriptor.block_shape) * self.dtype.itemsize

    def _places(self, start: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the slices (of the array, of the block) that are within bounds."""
        if int(start[-1]) * self.dtype.itemsize % 16:
            raise RuntimeError(f"TMA needs an address aligned to 16 bytes, not entry {start[-1]} of a row")
        array, block = [], []
        for first, size, length in zip(map(int, start), self.block_type.shape, self._array.shape, strict=True):
            low, high = min(max(first, 0), length), min(max(first + size, 0), length)
            array.append(slice(low, high))
            block.append(slice(low - first, high - first) if low < high else slice(0, 0))
        return tuple(array), tuple(block)

    def read(self, start: Sequence[Any]) -> np.ndarray:
        array, block = self._places(start)
        tile = np.zeros(self.block_type.shape, self.dtype)
        tile[block] = self._array[array]
        return tile

    def check(self, tile: Shared) -> None:
        if tile.shape != self.block_type.shape or tile.dtype != self.dtype:
            raise TypeError(
                f"TMA copies blocks {self.dtype}{self.block_type.shape}, but the tile is {tile.dtype}{tile.shape}"
            )

    def add(self, start: Sequence[Any], x: np.ndarray) -> None:
        array, block = self._places(start)
        self._array[array] += x[block]


# -- programs ----------------------------------------------------------------------------------------------------------


class _Partition:
    """The warps of a program that run one function."""

    def __init__(self, name: str, warps: int):
        self.warps = warps
        self.name, self.go, self.ended = name, threading.Semaphore(0), False
        self.waits: Callable[[], bool] = lambda: True
        self.where, self.late = "its beginning", False
        self.products: list[Callable[[], None]] = []  # started, not yet waited for
        self.sums: list[Callable[[], None]] = []  # likewise
        self.written: list[tuple[np.ndarray, np.ndarray]] = []  # written since its last fence: see `Shared`

    def finish(self, begun: list[Callable[[], None]], left: Any) -> None:
        if len(begun) > left:
            here.program.let_others()
        while len(begun) > left:
            begun.pop(0)()

    def check_end(self) -> None:
        if self.products or self.sums:
            raise RuntimeError(f"{self.name} ended before waiting for its products or TMA adds")


class Program:
    """One program of the grid. One of its partitions runs at a time."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count
        self.copies: list[Callable[[], None]] = []  # started, not yet done
        self.copied: list[Any] = []  # by instructions, since the last fence: see `Shared.begin_writing`
        self._draw, self._early = random.Random(index), False
        self._partitions: list[_Partition] = []
        self._failure: BaseException | None = None

    def run(self, functions: Sequence[tuple[Callable, Sequence[Any]]], warps: Sequence[int] = (4,)) -> None:
        """Runs functions concurrently, each by so many warps, until all have ended."""
        outer, self._partitions = self._partitions, []
        threads = []
        for i, (function, arguments) in enumerate(functions):
            partition = _Partition(f"{getattr(function, '__name__', 'kernel')} (partition {i})", warps[i])
            self._partitions.append(partition)
            threads.append(threading.Thread(target=self._run, args=(partition, function, arguments), daemon=True))
        for thread in threads:
            thread.start()
        self._next().go.release()
        for thread in threads:
            thread.join()
        self._partitions = outer
        if self._failure is not None:
            raise self._failure
        if self.copies:
            raise RuntimeError(f"program {self.index} ended before waiting for {len(self.copies)} copies")

    def _run(self, partition: _Partition, function: Callable, arguments: Sequence[Any]) -> None:
        here.program, here.partition = self, partition
        partition.go.acquire()
        try:
            if self._failure is None:
                with np.errstate(all="ignore"):
                    function(*arguments)
                partition.check_end()
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        partition.ended = True
        try:
            if any(not p.ended for p in self._partitions):
                self._next().go.release()
        except BaseException as error:  # a deadlock, or an error in a copy
            self._failure = self._failure or error
        if self._failure is not None:
            for p in self._partitions:
                p.go.release()

    def let_others(self) -> None:
        """Lets the other partitions run as far as they can."""
        self.wait(lambda: True, late=True)

    def perhaps_let_others(self) -> None:
        if self._draw.random() < 0.5:
            self.let_others()

    def wait(self, condition: Callable[[], bool], late: bool = False) -> None:
        """Lets partitions run in any order until the condition holds and this one is drawn; if `late`, until no other
        can run."""
        partition = here.partition
        partition.waits, partition.late, partition.where = condition, late, _line_of_kernel()
        following = self._next()
        if following is not partition:
            following.go.release()
            partition.go.acquire()
            if self._failure is not None:
                raise _Stopped

    def _next(self) -> _Partition:
        running = [p for p in self._partitions if not p.ended]
        if self._draw.random() < TURN:
            self._early = not self._early
        while self.copies and self._early:
            self._copy()
        while True:
            ready = [p for p in running if p.waits()]
            if soon := [p for p in ready if not p.late]:
                return self._draw.choice(soon)
            if not ready and not self.copies:
                waiting = "; ".join(f"{p.name} at {p.where}" for p in running)
                raise RuntimeError(f"program {self.index} deadlocks: {waiting}")
            if self._draw.randrange(len(ready) + len(self.copies)) < len(ready):
                return self._draw.choice(ready)
            self._copy()

    def _copy(self) -> None:
        self.copies.pop(self._draw.randrange(len(self.copies)))()


def _line_of_kernel() -> str:
    frame: Any = sys._getframe(1)
    while KERNEL not in frame.f_globals:
        frame = frame.f_back
    return f"{frame.f_code.co_name}, line {frame.f_lineno} of {frame.f_code.co_filename.rsplit('/', 1)[-1]}"
