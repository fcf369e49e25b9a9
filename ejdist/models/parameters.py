"""Parameters: one line declares shape, logical dims and initialisation; everything else is derived from it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.frozen import Frozen
from ejdist.layout import check_dims
from ejdist.packed import Packed


def _normal(p: Param, key: jax.Array) -> jax.Array:
    return p.std * jax.random.truncated_normal(key, -3, 3, p.shape, p.dtype)


def _log(p: Param, key: jax.Array) -> jax.Array:
    return jnp.log(jax.random.uniform(key, p.shape, p.dtype, *p.between))


def _inverse_softplus(p: Param, key: jax.Array) -> jax.Array:
    low, high = map(math.log, p.between)
    x = jnp.exp(jax.random.uniform(key, p.shape, p.dtype, low, high))
    return x + jnp.log(-jnp.expm1(-x))


def _ramp(p: Param, key: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.linspace(*p.between, p.shape[-1], dtype=p.dtype), p.shape)


# How a parameter starts: a normal distribution without what is beyond three deviations; a constant; the logarithm of what is
# uniform (a rate, of which the exponential is taken); what softplus makes log-uniform (a step size); and what goes evenly from
# one number to another along the last dim.
INITS: dict[str, Callable[[Param, jax.Array], jax.Array]] = {
    "normal": _normal,
    "zeros": lambda p, key: jnp.zeros(p.shape, p.dtype),
    "ones": lambda p, key: jnp.ones(p.shape, p.dtype),
    "log": _log,
    "inverse_softplus": _inverse_softplus,
    "ramp": _ramp,
}


@dataclass(frozen=True)
class Param:
    """A parameter: `dims` names each dim ("L D F"; "_": never split), `init` is one of `INITS`, `std` is the standard deviation
    of "normal", and `between` the bounds of "log" and "inverse_softplus" and the ends of "ramp".

    `decay`: whether weight decay applies, which it does not for norms and biases. `cast`: whether the model casts it to the
    compute dtype before use. `inputs`: the dims that a product with this matrix sums over, "N H"; "" for anything but a matrix
    of a layer. `adapts`: whether `ops.project` alone multiplies with it, so that it may have an adapter. `added`: what is added
    to the weight of a norm before use.
    """

    shape: tuple[int, ...]
    dims: str
    init: str = "normal"
    std: float = 0.02
    between: tuple[float, float] = (0.0, 1.0)
    decay: bool = True
    dtype: str = "float32"
    cast: bool = True
    inputs: str = ""
    adapts: bool = False
    added: float = 0.0

    def __post_init__(self) -> None:
        if len(self.dims.split()) != len(self.shape):
            raise ValueError(f"Param: dims {self.dims!r} must name each dim of the shape {self.shape}; '_' for no name")
        absent = [dim for dim in self.inputs.split() if dim not in self.dims.split()]
        if absent or (self.adapts and not self.inputs):
            raise ValueError(
                f"Param: inputs {self.inputs!r} must name dims of {self.dims!r}, those that a product sums over"
                + (", where the parameter adapts" if self.adapts else "")
            )
        if self.init not in INITS:
            raise ValueError(f"Param: init {self.init!r} is unknown; use one of {', '.join(INITS)}")

    def stacked(self, layers: int) -> Param:
        """Returns the parameter stacked over layers, a row per layer."""
        return replace(self, shape=(layers, *self.shape), dims=f"L {self.dims}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize


def map_declared(function: Callable[[str, Param], Any], declared: Any) -> Any:
    """Returns the tree with `function(path, Param)` in place of each parameter; path is "layers.gate"."""

    def visit(path: Any, param: Param) -> Any:
        return function(".".join(str(k.key) for k in path), param)

    return jax.tree_util.tree_map_with_path(visit, declared, is_leaf=lambda x: isinstance(x, Param))


def check_declared(kind: str, declared: Any) -> None:
    """Raises ValueError, naming the parameter, for a dim that is not in the vocabulary. `kind`: what the tree holds."""
    map_declared(lambda path, p: check_dims(f"{kind} {path}", p.dims), declared)


def initialise(declared: Any, key: jax.Array) -> Any:
    """Returns the parameters. Each draws from its own key, folded from its path, so that adding one does not change the others,
    and the values do not depend on the mesh."""

    def make(path: str, p: Param) -> jax.Array:
        return INITS[p.init](p, jax.random.fold_in(key, zlib.crc32(path.encode())))

    return map_declared(make, declared)


def shapes(declared: Any) -> Any:
    """Returns the tree of `jax.ShapeDtypeStruct`."""
    return map_declared(lambda _, p: jax.ShapeDtypeStruct(p.shape, p.dtype), declared)


def num_parameters(declared: Any) -> int:
    """Returns how many numbers the parameters hold."""
    return sum(p.size for p in jax.tree.leaves(declared, is_leaf=lambda x: isinstance(x, Param)))


def cast(weight: Any, dtype: Any) -> Any:
    """Returns a stack of matrices in the compute dtype. Of a frozen one a row is cast, where a layer uses it; a packed one was
    rounded before it was packed."""
    if isinstance(weight, Packed):
        return weight
    return weight.adapter_in(dtype) if isinstance(weight, Frozen) else weight.astype(dtype)
