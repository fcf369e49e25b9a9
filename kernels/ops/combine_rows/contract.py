"""The contract of combine: weighted sums of rows that lie anywhere, and the cases that every backend is tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.measured import bucket
from kernels.framework.work import Work, nbytes


@dataclass(frozen=True)
class CombineRowsConfig(Tunables):
    """Tunables of the kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_d: columns that a program computes at a time. num_warps: its warps (Triton).
      backward_block_d, backward_num_warps: the same for the backward, whose program has a token's whole row.
    """

    block_d: int | None = None
    num_warps: int | None = None
    backward_block_d: int | None = None
    backward_num_warps: int | None = None


def combine_rows(
    rows: Float[Array, "M D"],
    slots: Int[Array, "tokens C"],
    pairs: Int[Array, " M"],
    weights: Float[Array, "tokens C"] | None = None,
    total: Float[Array, "tokens D"] | None = None,
) -> Float[Array, "tokens D"]:
    """Returns out[t] = sum over j of weights[t, j] * rows[slots[t, j]], in the dtype of rows, added in float32.

    Args:
      slots: the rows of each token, each of them once; -1 for none, whatever its weight.
      pairs: the inverse: pairs[slots[t, j]] = t * C + j, and -1 for a row that no token has, whose gradient is 0. The backward
        reads it.
      weights: None for a plain sum.
      total: what is added to, first.
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((slots.shape[0], rows.shape[1]), wide) if total is None else total.astype(wide)
    for j in range(slots.shape[1]):
        row = rows[jnp.maximum(slots[:, j], 0)].astype(wide)
        row = row if weights is None else row * weights[:, j, None].astype(wide)
        total += jnp.where((slots[:, j] >= 0)[:, None], row, 0)
    return total.astype(rows.dtype)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions, if tokens have all rows: each is read once, and its gradient written once."""
    indices, out = nbytes(call.slots, call.weights), nbytes(call.rows) // call.dims["M"] * call.dims["tokens"]
    terms = call.slots.size * call.dims["D"]
    forward = Work(2 * terms, nbytes(call.rows, call.total) + indices + out)
    weighted = call.weights is not None
    # Without weights a row's gradient is its token's, and no row is read.
    moved = nbytes(call.rows) * (1 + weighted) + indices + nbytes(call.pairs) + out + nbytes(call.weights)
    return forward, Work(3 * terms if weighted else 0, moved)


def autotune_key(call: Call) -> str:
    """Returns the measurement key of a call: whether there are weights, and a total, and how wide and how many rows are."""
    D, C = call.dims["D"], call.dims["C"]
    weighted = ("weighted" if call.weights is not None else "plain") + ("" if call.total is None else " added")
    return f"{call.dtype} {weighted} k{C} width{bucket(D, 1024, 4096)}"


def _permutation(dims: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns (slots, pairs) of a case; every seventh choice has no row."""
    M, tokens, C = (dims[n] for n in ("M", "tokens", "C"))
    places = np.random.default_rng([M, tokens, C]).permutation(M)[: tokens * C]
    slots = np.full(tokens * C, -1)
    slots[: len(places)] = places
    slots[3::7] = -1
    pairs = np.full(M, -1)
    pairs[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
    return slots.reshape(tokens, C), pairs


def _slots(rng: np.random.Generator, dims: Any) -> jax.Array:
    return jnp.asarray(_permutation(dims)[0], jnp.int32)


def _pairs(rng: np.random.Generator, dims: Any) -> jax.Array:
    return jnp.asarray(_permutation(dims)[1], jnp.int32)


def _shaped(make: Callable, *names: str) -> Callable:
    make.shaped = lambda dims: jax.ShapeDtypeStruct([dims[n] for n in names], jnp.int32)  # pyrefly: ignore[missing-attribute]
    return make


_MAKE = {"slots": _shaped(_slots, "tokens", "C"), "pairs": _shaped(_pairs, "M")}


def _case(name: str, *tags: str, arrays: tuple[str, ...] = ("weights",), **dims: int) -> Case:
    return Case(name, dims, arrays=arrays, make=_MAKE, tags=frozenset(tags), wide=("weights",))


op = Op(
    combine_rows,
    local_dims={"D"},
    autotune_key=autotune_key,
    config=CombineRowsConfig,
    cases=(
        _case("small", "smoke", "code", M=22, D=16, tokens=9, C=2),
        _case("plain", "code", arrays=(), M=24, D=40, tokens=8, C=3),
        _case("few_rows", M=13, D=520, tokens=7, C=4),
        _case("added", "code", arrays=("weights", "total"), M=11, D=48, tokens=6, C=3),
        _case("qwen3_30b", "bench", "code", M=262144, D=2048, tokens=32768, C=8),
        _case("qwen3_30b_plain", "bench", arrays=(), M=262144, D=2048, tokens=32768, C=8),
        _case("deepseek_v3", "bench", M=131072, D=7168, tokens=16384, C=8),
    ),
    work=work,
    same_dtype=("rows", "total"),
)
