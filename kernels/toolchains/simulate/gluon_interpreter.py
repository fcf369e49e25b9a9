"""Runs Gluon kernels for Hopper on the CPU: Python over NumPy, the programs of the grid one after another.

A kernel's functions run as written, with this module's versions of Gluon's functions, on the multiprocessor simulated
by `simulated_hopper.py`. Register layouts are ignored: whether operands have the layout that an instruction needs is
left to the compiler. Only the functions that the kernels of this project use are defined; others raise an error that
says so.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jax_triton import triton_lib
from triton import language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime import jit as triton_jit

from kernels.toolchains.simulate.simulated_hopper import (
    BARRIERS,
    KERNEL,
    Descriptor,
    Pointer,
    Program,
    Shared,
    Tensor,
    here,
    poison,
    tensor,
)

__all__ = ["run_grid"]


def run_grid(kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
    """Runs every program of a kernel; arrays, and the arrays of descriptors, among its arguments are changed in
    place."""
    bindings = {}
    for name, value in arguments.items():
        if isinstance(value, triton_lib.TensorDescriptor):
            value = Descriptor(value)
        elif isinstance(value, np.ndarray):
            value = Pointer(name, value)
        bindings[name] = value
    count = math.prod(grid)
    for index in range(count):
        Program(index, count).run([(functools.partial(_interpretable(kernel.fn), **bindings), ())])


# -- the language ------------------------------------------------------------------------------------------------------


class _Words(types.SimpleNamespace):
    """Stands in for a module of Gluon."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *args, **kwargs: None
        raise NotImplementedError(f"Gluon's {name} is not implemented; add it to {__name__}")


def _where(condition: Any, x: Any, y: Any) -> Any:
    dtype = np.result_type(x, y)  # a Python number takes the dtype of the other
    python = not any(isinstance(v, np.ndarray) for v in (x, y))
    if python:
        dtype = {"i": np.int32, "f": np.float32, "b": np.bool_}[np.dtype(dtype).kind]
    return np.where(condition, x, y).astype(dtype).view(Tensor)


def _load(pointer: Pointer, mask: Any = True, other: Any = None) -> Any:
    array, index, meant = pointer.entries(mask)
    other = poison(array.dtype) if other is None else other
    return tensor(np.where(meant, array[index], np.asarray(other).astype(array.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    array, index, meant = pointer.entries(mask)
    array[index[meant]] = np.broadcast_to(np.asarray(value), index.shape)[meant].astype(array.dtype)


def _atomic_add(pointer: Pointer, value: Any, sem: str | None = None) -> Any:
    array, index, _ = pointer.entries(True)
    before = tensor(array[index])
    np.add.at(array, index, value)
    return before


def _tanh_approx(x: Any) -> Any:
    """Returns tanh rounded to 11 bits: the largest error of the instruction."""
    bits = np.tanh(x).view(np.int32)
    return ((bits + 0x800) & ~0xFFF).view(np.float32).view(Tensor)


def _fma_of_pairs(dtype: Any) -> Callable[..., Any]:
    """Returns x * y + z, rounded once, of the two 16-bit numbers in each int32."""
    bits = ml_dtypes.finfo(dtype).nmant

    def value(words: Any) -> Any:
        """Returns the numbers in float64, subnormal ones by their bits: JAX lets its threads take those for zero."""
        codes = np.ascontiguousarray(words).view(np.uint16)
        subnormal = np.ldexp((codes & (1 << bits) - 1).astype(np.float64), ml_dtypes.finfo(dtype).minexp - bits)
        exponent = codes << 1 >> bits + 1
        signed = np.where(codes >> 15, -subnormal, subnormal)
        return np.where(exponent == 0, signed, codes.view(dtype).astype(np.float64))

    def fma(*operands: Any) -> Any:
        x, y, z = map(value, np.broadcast_arrays(*operands))
        return (x * y + z).astype(dtype).view(np.int32).view(Tensor)

    return fma


def _fma_of_numbers_and_pairs(numbers: Any, *pairs: Any) -> Any:
    return _fma_of_pairs(ml_dtypes.bfloat16)(np.asarray(numbers).astype(np.int32) * 0x10001, *pairs)


def _permute_bytes(low: Any, high: Any, places: Any) -> Any:
    low, high, places = (np.asarray(w, np.int32).view(np.uint32) for w in np.broadcast_arrays(low, high, places))
    eight = low.astype(np.uint64) | high.astype(np.uint64) << 32
    result = np.zeros(low.shape, np.uint32)
    for i in range(4):
        place = (places >> 4 * i) & 15
        byte = (eight >> ((place & 7) * 8).astype(np.uint64)).astype(np.uint32) & 255
        result |= np.where(place & 8, (byte >> 7) * 255, byte) << 8 * i
    return result.view(np.int32).view(Tensor)


def _four_bytes(dtype: Any) -> Callable[..., Any]:
    """Returns the 8-bit floats next to four numbers, in one word."""

    def words(*numbers: Any) -> Any:
        codes = [
            np.asarray(x, np.float32).astype(dtype).view(np.uint8).astype(np.int32) << 8 * i
            for i, x in enumerate(numbers)
        ]
        return functools.reduce(np.bitwise_or, codes).view(Tensor)

    return words


_FOUR = (
    "{{ .reg .b16 lo, hi; cvt.rn.satfinite.{0}x2.f32 lo, $2, $1; "
    "cvt.rn.satfinite.{0}x2.f32 hi, $4, $3; mov.b32 $0, {{lo, hi}}; }}"
)
_INSTRUCTIONS: dict[str, Any] = {
    _FOUR.format("e4m3"): _four_bytes(ml_dtypes.float8_e4m3fn),
    _FOUR.format("e5m2"): _four_bytes(ml_dtypes.float8_e5m2),
    "ex2.approx.ftz.f32 $0, $1;": np.exp2,
    "rcp.approx.ftz.f32 $0, $1;": lambda x: np.divide(np.float32(1), x),
    "prmt.b32 $0, $1, $2, $3;": _permute_bytes,
    "fma.rn.bf16x2 $0, $1, $2, $3;": _fma_of_pairs(ml_dtypes.bfloat16),
    "fma.rn.f16x2 $0, $1, $2, $3;": _fma_of_pairs(np.float16),
    "{ .reg .b32 pair; mov.b32 pair, {$1, $1}; fma.rn.bf16x2 $0, pair, $2, $3; }": _fma_of_numbers_and_pairs,
    "tanh.approx.f32 $0, $1;": _tanh_approx,
    "mov.b32 $0, $1;": lambda x: x,
    "{ bar.warp.sync 0xffffffff; mov.b32 $0, $1; }": lambda x: x,
}
_erf = np.vectorize(math.erf, otypes=[np.float32])


def _fence() -> None:
    for written in (here.partition.written, here.program.copied):
        for unfenced, entries in written:
            unfenced[entries] = False
        written.clear()


def _wait(barrier: Shared, phase: Any, pred: Any = True) -> None:
    state = barrier.barrier()
    if state.count is None:
        raise RuntimeError("wait on a barrier that was never initialised")
    here.program.wait(lambda: not pred or state.phase != phase)


def _expect(barrier: Shared, size: int, pred: Any = True) -> None:
    if pred:
        barrier.barrier().bytes += size
        barrier.barrier().arrive()


def _arrive(barrier: Shared, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.barrier().arrive(count)
        here.program.perhaps_let_others()


def _async_load(desc: Descriptor, start: Sequence[Any], barrier: Shared, tile: Shared, pred: Any = True) -> None:
    if not pred:
        return
    desc.check(tile)
    start, arrived, write = [int(i) for i in start], barrier.barrier(), tile.begin_writing()

    def done() -> None:
        write(desc.read(start))
        arrived.bytes -= desc.nbytes_per_cta
        arrived.pass_on()

    here.program.copies.append(done)


class _Copying:
    """A partition's copies by instructions that are not yet done, and what is to follow them."""

    def __init__(self) -> None:
        self._left: set[object] = set()
        self._following: list[tuple[set[object], Callable[[], None]]] = []

    @classmethod
    def of_partition(cls) -> _Copying:
        return here.partition.__dict__.setdefault("copying", cls())

    def begin(self) -> object:
        copy = object()
        self._left.add(copy)
        return copy

    def end(self, copy: object) -> None:
        self._left.discard(copy)
        for left, follow in [*self._following]:
            left.discard(copy)
            if not left:
                self._following.remove((left, follow))
                follow()

    def then(self, follow: Callable[[], None]) -> None:
        if self._left:
            self._following.append((set(self._left), follow))
        else:
            follow()


def _copy_rows(tile: Shared, pointer: Pointer, mask: Any = True) -> None:
    array, index, meant = pointer.entries(mask)
    if list(index.shape) != tile.shape or array.dtype != tile.dtype:
        raise TypeError(f"{array.dtype}{list(index.shape)} does not fit a tile {tile.dtype}{tile.shape}")
    write, copying = tile.begin_writing(here.program.copied), _Copying.of_partition()
    mine = copying.begin()

    def done() -> None:
        write(np.where(meant, array[index], np.zeros((), array.dtype)))
        copying.end(mine)

    here.program.copies.append(done)


def _arrive_after_copies(barrier: Shared, increment_count: bool = True) -> None:
    if increment_count:
        raise NotImplementedError(f"increment_count is not implemented; add it to {__name__}")
    state, threads = barrier.barrier(), 32 * here.partition.warps
    _Copying.of_partition().then(lambda: state.arrive(threads))


def _async_atomic_add(desc: Descriptor, start: Sequence[Any], tile: Shared) -> None:
    desc.check(tile)
    start, read = [int(i) for i in start], tile.begin_reading("TMA is")
    here.partition.sums.append(lambda: desc.add(start, read()))


def _warpgroup_mma(a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    alike = a.dtype == b.dtype or a.dtype.itemsize == b.dtype.itemsize == 1  # the two kinds of float8 can be mixed
    if not alike or list(acc.shape) != [a.shape[0], b.shape[1]]:
        raise TypeError(f"{a.dtype}{list(a.shape)} times {b.dtype}{b.shape} does not fit {list(acc.shape)}")
    result = np.full(acc.shape, np.nan, np.float32).view(Tensor)
    left, right = (
        x.begin_reading("the matrix units are") if isinstance(x, Shared) else functools.partial(np.asarray, x)
        for x in (a, b)
    )

    def done() -> None:
        before = np.asarray(acc) if use_acc else np.float32(0)
        result.view(np.ndarray)[...] = before + left().astype(np.float32) @ right().astype(np.float32)

    here.partition.products.append(done)
    if not is_async:
        here.partition.finish(here.partition.products, 0)
    return result


def _warpgroup_mma_wait(left: int, results: Sequence[Any]) -> Any:
    here.partition.finish(here.partition.products, left)
    return results[0] if len(results) == 1 else tuple(results)


def _inline_asm(asm: str, constraints: str, operands: Sequence[Any], *rest: Any, **named: Any) -> Any:
    if asm not in _INSTRUCTIONS:
        raise NotImplementedError(f"{asm!r} is not implemented; add it to {__name__}")
    return _INSTRUCTIONS[asm](*operands)


_LANGUAGE = _Words(
    float32=np.dtype(np.float32),
    float16=np.dtype(np.float16),
    bfloat16=np.dtype(ml_dtypes.bfloat16),
    int64=np.dtype(np.int64),
    int32=np.dtype(np.int32),
    uint16=np.dtype(np.uint16),
    uint8=np.dtype(np.uint8),
    float8e4nv=np.dtype(ml_dtypes.float8_e4m3fn),
    float8e5=np.dtype(ml_dtypes.float8_e5m2),
    div_rn=lambda x, y: np.divide(np.float32(x) if isinstance(x, float) else x, y),
    pointer_type=lambda dtype: dtype,
    static_assert=lambda holds, *message: None,
    program_id=lambda axis: tensor(here.program.index),
    num_programs=lambda axis: tensor(1 if axis else here.program.count),
    num_warps=lambda: 4,
    static_range=range,
    cdiv=lambda x, y: (x + y - 1) // y,
    arange=lambda start, end, layout=None: tensor(np.arange(start, end), np.int32),
    zeros=lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
    zeros_like=np.zeros_like,
    full=lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    join=lambda x, y: tensor(np.stack([x, y], -1)),
    expand_dims=lambda x, axis: tensor(np.expand_dims(x, axis)),
    broadcast=lambda x, y: tuple(tensor(a) for a in np.broadcast_arrays(x, y)),
    where=_where,
    minimum=lambda x, y: tensor(np.fmin(x, y)),
    maximum=lambda x, y: tensor(np.fmax(x, y)),
    max=lambda x, axis: tensor(np.fmax.reduce(x, axis)),
    sum=lambda x, axis: tensor(np.add.reduce(x, axis, dtype=x.dtype)),
    exp=np.exp,
    exp2=np.exp2,
    log2=np.log2,
    sigmoid=lambda x: 1 / (1 + np.exp(-x)),
    erf=lambda x: _erf(x).view(Tensor),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    barrier=lambda: None,  # the threads of a partition run as one
    inline_asm_elementwise=_inline_asm,
    allocate_shared_memory=Shared.allocate,
    warp_specialize=lambda functions, warps, registers: here.program.run(functions, (4, *warps)),
)
_MEANINGS: dict[int, Any] = {
    id(gl): _LANGUAGE,
    id(tl): _LANGUAGE,
    id(hopper.mbarrier): _Words(
        MBarrierLayout=lambda: BARRIERS,
        init=lambda barrier, count: barrier.barrier().init(count),
        wait=_wait,
        expect=_expect,
        arrive=_arrive,
    ),
    id(hopper.tma): _Words(
        async_load=_async_load,
        async_atomic_add=_async_atomic_add,
        store_wait=lambda left: here.partition.finish(here.partition.sums, left),
    ),
    id(async_copy): _Words(async_load=_copy_rows, mbarrier_arrive=_arrive_after_copies),
    id(hopper.fence_async_shared): _fence,
    id(hopper.warpgroup_mma): _warpgroup_mma,
    id(hopper.warpgroup_mma_init): lambda acc: acc,
    id(hopper.warpgroup_mma_wait): _warpgroup_mma_wait,
}


def _meaning(value: Any) -> Any:
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, triton_jit.JITFunction | triton_jit.ConstexprFunction):

        @functools.wraps(value.fn)
        def call(*args: Any, **kwargs: Any) -> Any:  # converted lazily: a function may be recursive
            return _interpretable(value.fn)(*args, **kwargs)

        return call
    return _MEANINGS.get(id(value), value)


@functools.cache
def _interpretable(function: types.FunctionType) -> Any:
    """Returns the function with this module's versions of Gluon's functions."""
    names = itertools.chain(function.__globals__.items(), inspect.getclosurevars(function).nonlocals.items())
    scope = {name: _meaning(value) for name, value in names} | {KERNEL: True}
    return types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
