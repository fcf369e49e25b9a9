"""What the leaves of a state are on disk: arrays. A PRNG key is written as its data, a number as an array of no dims."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Those that TensorStore writes and `digest` reads. A number of less than a byte is none of them.
_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64 complex64 complex128 "
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
)

# NumPy would choose the type of a Python number by its value; what is restored must not depend on it.
_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


def name_of(path: Any) -> str:
    """Returns the name of a leaf: its path in the tree, with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, or what describes one, is a typed PRNG key or an array of them."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def kind_of(leaf: Any) -> str:
    """Returns the dtype and shape of a leaf in words, float32[3, 4]. That of a key names its implementation."""
    dtype, shape = (leaf.dtype, leaf.shape) if hasattr(leaf, "dtype") else (_number_dtype(leaf), ())
    return f"{dtype.name}{list(shape)}"


def to_arrays(state: Any) -> Any:
    """Returns the tree of arrays that is written for a state.

    Raises:
      ValueError: a leaf cannot be saved; names it, and the remedy.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _to_array(name_of(path), leaf), state)


def like_arrays(like: Any) -> Any:
    """Returns what describes the arrays on disk, for a tree that describes a state. Numbers in it may be of any value."""

    def one(leaf: Any) -> Any:
        if is_key(leaf):
            data = jax.eval_shape(jax.random.key_data, leaf)
            return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
        if isinstance(leaf, np.generic | bool | int | float | complex):
            return np.zeros((), leaf.dtype if isinstance(leaf, np.generic) else _number_dtype(leaf))
        return leaf

    return jax.tree.map(one, like)


def from_arrays(arrays: Any, like: Any) -> Any:
    """Returns the state whose arrays are these; every leaf is of the type that it has in `like`."""

    def one(leaf: Any, array: Any) -> Any:
        if is_key(leaf):
            return jax.random.wrap_key_data(array, dtype=leaf.dtype)
        if isinstance(leaf, np.generic):
            return np.asarray(array)[()]
        if isinstance(leaf, bool | int | float | complex):
            return type(leaf)(np.asarray(array).item())
        return array

    return jax.tree.map(one, like, arrays)


def bits_of(array: Any) -> Any:
    """Returns an array in which JAX reads every bit: it would round a 64-bit one of NumPy to 32 bits, so this has two
    uint32 for each element."""
    if isinstance(array, np.ndarray) and array.dtype.itemsize >= 8:
        return np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint32)
    return array


def _number_dtype(number: Any) -> np.dtype:
    return np.dtype(next(dtype for kind, dtype in _NUMBERS.items() if isinstance(number, kind)))


def _to_array(name: str, leaf: Any) -> Any:
    if is_key(leaf) and isinstance(leaf, jax.Array):
        leaf = jax.random.key_data(leaf)
    elif isinstance(leaf, np.generic):
        leaf = np.asarray(leaf)
    elif isinstance(leaf, bool | int | float | complex):
        try:
            leaf = np.asarray(leaf, _number_dtype(leaf))
        except OverflowError:
            raise ValueError(
                f"the state cannot be saved: {name} is {leaf}, which 64 bits do not hold; keep it smaller, or as several"
            ) from None
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise ValueError(
            f"the state cannot be saved: {name} is {type(leaf).__name__}, not an array, a number or a PRNG key; make it one, "
            "or keep it out of the state"
        )
    if leaf.dtype.name not in _DTYPES or not leaf.dtype.isnative:
        raise ValueError(
            f"the state cannot be saved: {name} has dtype {leaf.dtype}, which no checkpoint holds; convert it, or keep it out "
            "of the state"
        )
    if leaf.size == 0:
        raise ValueError(
            f"the state cannot be saved: {name} has no elements (shape {leaf.shape}), and such an array is not written; keep "
            "it out of the state"
        )
    return leaf
