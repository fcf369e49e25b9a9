"""Converts the leaves of a state to arrays on disk and back. A PRNG key is stored as its data, a number as a 0-d array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The dtypes that TensorStore writes and `digest` reads; sub-byte types are not supported.
_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64 complex64 complex128 "
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
)

# NumPy picks the dtype of a Python number by its value; the restored type must not depend on that.
_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


def name_of(path: Any) -> str:
    """Returns the name of a leaf: its path in the tree, with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, or its ShapeDtypeStruct, is a typed PRNG key or an array of them."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def kind_of(leaf: Any) -> str:
    """Returns the dtype and shape of a leaf as text, float32[3, 4]. For a key the dtype names its implementation."""
    dtype, shape = (leaf.dtype, leaf.shape) if hasattr(leaf, "dtype") else (_number_dtype(leaf), ())
    return f"{dtype.name}{list(shape)}"


def to_arrays(state: Any) -> Any:
    """Returns the tree of arrays to write for a state.

    Raises:
      ValueError: a leaf cannot be saved; names it, and the remedy.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _to_array(name_of(path), leaf), state)


def like_arrays(like: Any) -> Any:
    """Returns the description of the arrays on disk, for a tree that describes a state. The values of numbers do not matter."""

    def one(leaf: Any) -> Any:
        if is_key(leaf):
            data = jax.eval_shape(jax.random.key_data, leaf)
            return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
        if isinstance(leaf, np.generic | bool | int | float | complex):
            return np.zeros((), leaf.dtype if isinstance(leaf, np.generic) else _number_dtype(leaf))
        return leaf

    return jax.tree.map(one, like)


def from_arrays(arrays: Any, like: Any) -> Any:
    """Returns the state from its arrays; every leaf gets the type that it has in `like`."""

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
    """Returns an array whose every bit JAX can read: 64-bit NumPy arrays, which JAX would truncate to 32 bits, become two
    uint32 per element."""
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
                f"the state cannot be saved: {name} is {leaf}, which does not fit in 64 bits; use a smaller number, or several"
            ) from None
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise ValueError(
            f"the state cannot be saved: {name} is {type(leaf).__name__}, not an array, a number or a PRNG key; convert "
            "it, or keep it out of the state"
        )
    if leaf.dtype.name not in _DTYPES or not leaf.dtype.isnative:
        raise ValueError(
            f"the state cannot be saved: {name} has dtype {leaf.dtype}, which checkpoints do not support; convert it, or keep "
            "it out of the state"
        )
    if leaf.size == 0:
        raise ValueError(
            f"the state cannot be saved: {name} has no elements (shape {leaf.shape}), which checkpoints do not support; keep "
            "it out of the state"
        )
    return leaf
