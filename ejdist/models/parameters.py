"""A parameter is one line: shape, dtype, logical dims, initial values."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Param:
    """One declared parameter.

    Attributes:
      dims: a logical name for each entry of `shape`, separated by spaces: letters as everywhere in the project, and
        "layers" for the stacked dim. What is done with a name on a mesh is not the model's business.
      init: "ones", "zeros", or the standard deviation of a normal.
    """

    shape: tuple[int, ...]
    dims: str
    init: str | float
    dtype: str = "float32"

    def __post_init__(self) -> None:
        assert len(self.dims.split()) == len(self.shape), (self.dims, self.shape)

    @property
    def size(self) -> int:
        """The number of entries."""
        count = 1
        for n in self.shape:
            count *= n
        return count


def initialise(declared: Any, key: jax.Array) -> Any:
    """Returns the arrays of a tree of `Param`.

    The key of each comes from its path in the tree, so a parameter's values depend on the seed, its name and its shape
    alone: not on the other parameters, and not on the mesh it is created on.
    """
    return jax.tree.map_with_path(lambda path, p: _values(p, _key(key, path)), declared)


def _key(key: jax.Array, path: tuple) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def _values(p: Param, key: jax.Array) -> jax.Array:
    if p.init == "ones":
        return jnp.ones(p.shape, p.dtype)
    if p.init == "zeros":
        return jnp.zeros(p.shape, p.dtype)
    assert isinstance(p.init, float), p
    return p.init * jax.random.normal(key, p.shape, p.dtype)
