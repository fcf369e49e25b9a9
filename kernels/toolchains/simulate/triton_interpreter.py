"""Runs Triton kernels on the CPU: Python over NumPy, the programs of the grid one after another.

It drives Triton's own interpreter, with three differences. It needs no torch: a buffer is an address and a type.
bfloat16 is computed as bfloat16 with rounding to nearest; Triton's interpreter stores it as uint16, truncates, and
multiplies the bits as integers. And a product of blocks that are too small for a GPU's tensor cores is refused, as the
compiler refuses it. The language is patched only while a kernel runs, so the same process can still compile.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import threading
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from triton import language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import min_dot_size
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime import jit as triton_jit

from kernels.toolchains.simulate.instructions import executed

__all__ = ["language_lock", "run_grid"]

_POINTER_TYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "i1",
    # Their bits: kernels take 8-bit floats as such, since not every GPU can convert them.
    "float8_e4m3fn": "u8",
    "float8_e5m2": "u8",
}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_EIGHT_BITS = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}

# How compilers of a GPU check products; `min_dot_size` of a target is the same for all of NVIDIA's.
_CODEGEN = {**interpreter.interpreter_builder.codegen_fns, "min_dot_size": min_dot_size(GPUTarget("cuda", 90, 32))}

# The interpreter patches Triton's own modules, so only one thread may interpret or compile at a time.
language_lock = threading.RLock()


class _Pointer:
    """Stands in for a tensor in the interpreter: an address and an element type."""

    def __init__(self, array: np.ndarray):
        self._array, self.dtype = array, _POINTER_TYPES[str(array.dtype)]

    def data_ptr(self) -> int:
        return self._array.ctypes.data


@functools.cache
def _interpretable(function: types.FunctionType) -> Any:
    """Returns the function in the form that the interpreter runs, with its own copy of the globals.

    The interpreter's rewriter adds names to the globals of what it rewrites; those of the kernel's module stay
    unchanged.
    """
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    functools.update_wrapper(copy, function).__dict__.pop("__wrapped__")
    return interpreter.FunctionRewriter(copy).rewrite_ast()


# A kernel in the interpreter makes a tensor and its type at each operation. Both are mostly the shape, which Triton checks and
# converts anew each time: a third of the time. Here each shape is made once.
_plain_block_type, _plain_tensor = tl.block_type.__init__, tl.tensor.__init__


@functools.lru_cache(maxsize=None, typed=True)  # 16.0 is an error where 16 is not
def _shape_of_type(*sizes: Any) -> tuple[Any, int, str]:
    """Returns the attributes shape and numel of a block's type, and what its name begins with.

    Raises what Triton raises for a wrong shape.
    """
    made = object.__new__(tl.block_type)
    _plain_block_type(made, tl.int32, list(sizes))
    return made.shape, made.numel, f"<{made.shape}, "


@functools.cache
def _shape_of_tensor(*sizes: int) -> tuple[Any, Any]:
    """Returns the attributes shape and numel of a tensor."""
    made = object.__new__(tl.tensor)
    _plain_tensor(made, None, tl.block_type(tl.int32, list(sizes)) if sizes else tl.int32)
    return made.shape, made.numel


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes: Any = shape.values if isinstance(shape, tl.tuple) else shape  # of another type, or of a tensor
    if not all(type(size) is int for size in sizes):
        sizes = tl.core._unwrap_shape(shape)
    self.shape, self.numel, name = _shape_of_type(*sizes)
    self.element_ty, self.name = element_ty, f"{name}{element_ty}>"


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of_tensor(*type.shape) if type.is_block() else _shape_of_tensor()


@functools.cache
def _shape_of_both(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that two broadcast to."""
    return np.broadcast_shapes(left, right)


def _broadcast(value: Any, sizes: tuple[int, ...]) -> Any:
    if value.type.is_block() and value.handle.data.shape == sizes:
        return value
    data = np.broadcast_to(value.handle.data, sizes)
    return tl.tensor(interpreter.TensorHandle(data, value.dtype), tl.block_type(value.dtype, list(sizes)))


def _broadcast_both(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """`broadcast_impl_value` of Triton's semantics, without the copies that it makes of scalars and of shapes."""
    if not lhs.type.is_block() and not rhs.type.is_block():
        return lhs, rhs
    left, right = (x.handle.data.shape if x.type.is_block() else () for x in (lhs, rhs))
    if left == right:
        return lhs, rhs
    try:
        sizes = _shape_of_both(left, right)
    except ValueError:
        return _plain_broadcast_both(self, lhs, rhs)  # says what is wrong
    return _broadcast(lhs, sizes), _broadcast(rhs, sizes)


@functools.lru_cache(maxsize=4096)
def _constant(value: float, kind: type, sign: float, dtype: Any, sizes: tuple[int, ...] | None) -> Any:
    """Returns a number of Python as it is beside a tensor of a dtype and shape (None: a scalar); None where it makes the dtype
    another one. `kind` and `sign` tell 1 from 1.0 and True, and 0.0 from -0.0."""
    semantic = interpreter.interpreter_semantic
    number = semantic.to_tensor_type(value)
    if semantic.computation_type_impl(dtype, False, number, True, False) is not dtype:
        return None
    scalar = semantic._cast_to_computation_type(value, dtype)
    return scalar if sizes is None else _broadcast(scalar, sizes)


def _beside(value: Any, tensor: Any) -> Any:
    sizes = tensor.handle.data.shape if tensor.type.is_block() else None
    return _constant(value, type(value), math.copysign(1, value), tensor.dtype, sizes)


def _operands(self: Any, lhs: Any, rhs: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
    """`binary_op_type_checking_impl` of Triton's semantics. What most sums and products are of is told apart first: tensors of
    one dtype, which stay as they are; a tensor and a number, which is made once; a pointer and its offsets."""
    if not rest[2:] and not options:
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if left and right:
            if lhs.dtype is rhs.dtype and type(lhs.dtype) is tl.dtype:
                return _broadcast_both(self, lhs, rhs)
            if rest[:1] == (True,) and lhs.dtype.is_ptr() and rhs.dtype.is_int():
                return _broadcast_both(self, lhs, rhs)
        elif left and type(rhs) in (int, float) and type(lhs.dtype) is tl.dtype:
            rhs_or_none = _beside(rhs, lhs)
            if rhs_or_none is not None:
                return lhs, rhs_or_none
        elif right and type(lhs) in (int, float) and type(rhs.dtype) is tl.dtype:
            lhs_or_none = _beside(lhs, rhs)
            if lhs_or_none is not None:
                return lhs_or_none, rhs
    return _plain_operands(self, lhs, rhs, *rest, **options)


_plain_broadcast_both, _plain_operands = (
    TritonSemantic.broadcast_impl_value,
    TritonSemantic.binary_op_type_checking_impl,
)


def _operator(name: str, swapped: bool) -> Any:
    """Returns the operator of tensors that is Triton's `name` of two of them."""
    method = getattr(TritonSemantic, name)

    def apply(self: Any, other: Any) -> Any:
        other = other.value if isinstance(other, tl.constexpr) else other
        return method(interpreter.interpreter_semantic, *((other, self) if swapped else (self, other)), True)

    return apply


# Written between tensors they go through two wrappers each.
_OPERATORS = {f"__{r}{name}__": _operator(name, bool(r)) for name in ("add", "sub", "mul") for r in ("", "r")}


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Inside, `triton.language` works on NumPy, and `@triton.jit` functions can be called. Everything is undone
    afterwards."""

    def call_jit(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _interpretable(self.fn)(*args, **kwargs)

    def call_constexpr(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        bare = tl.core._unwrap_if_constexpr
        return self.fn(*map(bare, args), **{k: bare(v) for k, v in kwargs.items()})

    def numpy_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = _BFLOAT16 if scalar == tl.bfloat16 else plain_dtype(scalar)
        return dtypes[scalar.name]

    def cast(self: Any, value: Any, dtype: Any) -> Any:
        return interpreter.TensorHandle(value.data.astype(numpy_dtype(dtype)), dtype.scalar)

    def convert(self: Any, value: Any, dtype: Any, rounding: Any) -> Any:
        kinds = {value.dtype.scalar, dtype.scalar}
        if dtype.scalar in _EIGHT_BITS and rounding != ir.ROUNDING_MODE.RTZ:
            # To nearest even, and to the largest number past it, as GPUs do; the interpreter's own rounds ties up.
            kind = _EIGHT_BITS[dtype.scalar]
            most = float(ml_dtypes.finfo(kind).max)
            bits = np.clip(value.data.astype(np.float32), -most, most).astype(kind).view(np.uint8)
            return interpreter.TensorHandle(bits, dtype.scalar)
        has_8_bit = any(kind.primitive_bitwidth == 8 for kind in kinds)
        if tl.bfloat16 not in kinds or has_8_bit or rounding == ir.ROUNDING_MODE.RTZ:
            return plain_convert(self, value, dtype, rounding)
        return cast(self, value, dtype)

    def load(self: Any, pointers: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any) -> Any:
        if pointers.get_element_ty() != tl.bfloat16:
            return plain_load(self, pointers, mask, other, cache_policy, is_volatile)
        rest = np.zeros(pointers.data.shape, _BFLOAT16) if other is None else other.data
        bits = interpreter._interpreter.load(pointers.data, mask.data, rest.view(np.uint16), np.dtype(np.uint16))
        return interpreter.TensorHandle(bits.view(_BFLOAT16), tl.bfloat16)

    def store(self: Any, pointers: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        data = value.data.view(np.uint16) if value.data.dtype == _BFLOAT16 else value.data
        return interpreter._interpreter.store(pointers.data, data, mask.data)

    def inline_asm(self: Any, asm: str, constraints: str, arguments: Any, kinds: Any, is_pure: bool, pack: int) -> Any:
        # As many numbers as are packed share registers; they lie side by side.
        words = [np.ascontiguousarray(x.data).reshape(-1, pack).view(np.uint32) for x in arguments]
        registers = [column for of_operand in words for column in of_operand.T]
        written = np.stack(executed(asm, constraints, registers), axis=1)
        (kind,) = kinds
        data = np.ascontiguousarray(written).view(numpy_dtype(kind)).reshape(arguments[0].data.shape)
        return types.SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(data, kind.scalar))

    def splat(self: Any, shape: Any, value: Any) -> Any:
        if value.data.dtype == np.bool_ and value.dtype.scalar != tl.int1:
            # A comparison has the type of what it compared; a block of it would be of integers, and no mask.
            value = interpreter.TensorHandle(value.data, tl.int1)
        return plain_splat(self, shape, value)

    builder, plain_dtype, dtypes = interpreter.InterpreterBuilder, interpreter._get_np_dtype, {}
    plain_load, plain_convert, plain_splat = builder.create_masked_load, builder.create_fp_to_fp, builder.create_splat
    replacements = [
        (triton_jit.JITFunction, "__call__", call_jit),
        (triton_jit.ConstexprFunction, "__call__", call_constexpr),
        (tl.block_type, "__init__", _block_type),
        (tl.tensor, "__init__", _tensor),
        (interpreter, "_get_np_dtype", numpy_dtype),
        (builder, "cast_impl", cast),
        (builder, "create_fp_to_fp", convert),
        (builder, "create_masked_load", load),
        (builder, "create_splat", splat),
        (builder, "create_inline_asm", inline_asm),
        (builder, "create_masked_store", store),
        (TritonSemantic, "broadcast_impl_value", _broadcast_both),
        (TritonSemantic, "binary_op_type_checking_impl", _operands),
        # Whether integers overflow is computed at each sum of two and, outside of Triton's debugging, not looked at.
        (interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)),
        # Triton's interpreter multiplies blocks of any size; a GPU's tensor cores do not.
        (interpreter.interpreter_builder, "codegen_fns", _CODEGEN),
        *((tl.tensor, name, operator) for name, operator in _OPERATORS.items()),
    ]
    modules = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with language_lock:
        patches = interpreter._patch_lang(modules)
        try:
            for owner, name, replacement in replacements:
                patches.set_attr(owner, name, replacement)
            # GPUs do not report the NaN and infinities that masked-off lanes produce.
            with np.errstate(all="ignore"):
                yield
        finally:
            patches.restore()


def run_grid(kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
    """Runs every program of a kernel; array arguments are changed in place."""
    arguments = {name: _Pointer(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    function, builder = _interpretable(kernel.fn), interpreter.interpreter_builder
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    sizes = (*grid, *(1,) * (3 - len(grid)))
    with _interpreted_language():
        values = {k: v if k in constexprs else interpreter._implicit_cvt(v) for k, v in arguments.items()}
        builder.set_grid_dim(*sizes)
        for index in itertools.product(*map(range, sizes)):
            builder.set_grid_idx(*index)
            function(**values)
