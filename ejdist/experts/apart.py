"""Gradients of experts whose last product is apart from what it multiplies.

Rows of experts are weighed and added up after that product. On GPUs its gradients need neither its rows nor their cotangents:
products read those of a token's sum by index, and weights and their gradients are applied to what is between the products,
which is narrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

import kernels
from ejdist.experts.rows import added_to, combined, taken, wide
from kernels.engines.matmul.weighing import weigh
from kernels.framework.dispatch import vary_alike

LAST = "down"  # the matrices of the last product


@runtime_checkable
class Apart(Protocol):
    """An `apply` that has its last product apart: by itself it is `last` of `hidden`. `places`: `sizes`, `rows` and `slots` of
    `kernels.grouped_matmul`, by name."""

    def __call__(self, params: Any, x: jax.Array, sizes: jax.Array, **gathering: jax.Array) -> jax.Array: ...

    def is_product(self, params: Any) -> bool:
        """Returns whether `last` is the grouped product with params[LAST] [E, F, D'], and nothing else."""
        ...

    def hidden(self, params: Any, x: jax.Array, places: dict[str, jax.Array]) -> jax.Array:
        """Returns what the last product multiplies, [R, F]."""
        ...

    def last(self, params: Any, hidden: jax.Array, sizes: jax.Array) -> jax.Array:
        """Returns the rows [R, D']. If it is a product, params may be {LAST: its matrices} alone."""
        ...

    def turned_last(self, matrices: jax.Array, d: jax.Array, places: dict[str, jax.Array]) -> jax.Array:
        """Returns the product with the transposed matrices of the last one, [R, F]; d are rows of tokens."""
        ...

    def gated(self, params: Any) -> str | None:
        """Returns the activation, if `hidden` is the gated product with one of the params, and nothing else."""
        ...

    def turned_gate(self, params: Any, d: jax.Array, sizes: jax.Array) -> jax.Array:
        """Returns the cotangents of the rows of a gated product, [R, D], for those of its products [R, 2 F]."""
        ...

    def hidden_keeping(self, params: Any, x: jax.Array, places: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        """Returns (hidden, what its backward takes) of a gated product."""
        ...

    def hidden_backward(
        self, params: Any, x: jax.Array, places: dict[str, jax.Array], d: jax.Array, kept: Any = None
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Returns the gradients of params by name, and of x, of a gated product: for cotangents d of the hidden rows [R, F]
        and what was kept; without it for those of the products [R, 2 F]."""
        ...


def cotangents(rows: jax.Array, d: jax.Array, pairs: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of `combined(rows, pairs.slot, weights)`: of rows, in their dtype, and of weights [M, k]."""

    def by_kernel(rows: jax.Array, d: jax.Array, pairs: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return kernels.combine_rows(rows, pairs.slot, pairs.pair, weights)

        d_rows, d_weights = jax.vjp(total, rows, weights)[1](d.astype(rows.dtype))
        return d_rows, wide(d_weights)

    # Rows may be parts of sums over other axes. Then gradients of weights are, too, and whoever asked adds them up.
    rows, d, weights = vary_alike((rows, d, weights))
    return lax.platform_dependent(rows, d, pairs, weights, cuda=by_kernel, default=_cotangents)


def _cotangents(rows: jax.Array, d: jax.Array, pairs: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the same by XLA's gathers."""
    weight = jnp.where(pairs.pair >= 0, weights.reshape(-1)[jnp.maximum(pairs.pair, 0)], 0)
    d = taken(d, pairs.pair, weights.shape[1])
    d_weights = jnp.sum(wide(rows) * wide(d), axis=1)
    d_weights = jnp.where(pairs.slot >= 0, d_weights[jnp.maximum(pairs.slot, 0)], 0)
    return (wide(d) * weight[:, None]).astype(rows.dtype), d_weights


def apart_gradients(
    apply: Any, made: Any, params: Any, d: jax.Array, pairs: Any, weights: jax.Array, total: Any
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns the gradients of the floats of params, of the tokens, added to `total`, and of weights [M, k], where the last
    product is apart."""
    arrays = vary_alike((made, params.own, d, weights, total))

    def branch(function: Callable) -> Callable:
        def run(made: Any, own: list[jax.Array], d: jax.Array, weights: jax.Array, total: Any, pairs: Any) -> Any:
            return function(apply, made, params.whole(own), d, pairs, weights, total)

        return run

    found = lax.platform_dependent(*arrays, pairs, cuda=branch(by_index), default=branch(in_order))
    d_hidden, d_last, d_weights, d_gate, d_x = found
    if d_gate is None:
        d_own, d_x = made.pull(params, d_hidden)
        d_x = added_to(total, d_x)
    else:
        d_own = [jnp.zeros_like(a) for a in params.own]
        for name, gradient in d_gate.items():
            d_own[params.place(name)] = gradient
    d_own[params.place(LAST)] = d_last
    return d_own, d_x, d_weights


def in_order(
    apply: Apart, made: Any, params: Any, d: jax.Array, pairs: Any, weights: jax.Array, total: Any
) -> tuple[Any, jax.Array, jax.Array, Any, Any]:
    """Returns the cotangents of what the last product multiplies, of its matrices, and of weights. In place of the first, if
    that is a gated product, the gradients of its params by name, and of the tokens, added to `total`."""
    d_y, d_weights = _cotangents(made.y, d, pairs, weights)
    _, pull = jax.vjp(lambda last, hidden: apply.last({LAST: last}, hidden, pairs.sizes), params[LAST], made.hidden)
    d_last, d_hidden = pull(d_y)
    if made.x is None:
        return d_hidden, d_last, d_weights, None, None
    d_gate, d_x = apply.hidden_backward(params, made.x, pairs.places, d_hidden, made.kept)
    return None, d_last, d_weights, d_gate, added_to(total, d_x)


def by_index(
    apply: Apart, made: Any, params: Any, d: jax.Array, pairs: Any, weights: jax.Array, total: Any
) -> tuple[Any, jax.Array, jax.Array, Any, Any]:
    """Returns the same where products read rows by index, so that neither y nor its cotangents are read or written.

    With w the weight of a row, A its matrix, h what it multiplies, and d the cotangent of its token: the cotangent of h is
    w (d A^T), that of A the sum of (w h)^T d, and that of w is <d, h A> = <d A^T, h>.
    """

    def product(last: jax.Array) -> jax.Array:
        return apply.turned_last(last, d.astype(made.hidden.dtype), pairs.places)

    d_hidden, pull = jax.vjp(product, params[LAST])
    products = None if made.x is None else made.kept.get("products")
    of = apply.gated(params) if products is not None else None
    weighed = weigh(d_hidden, made.hidden if products is None else products, pairs.pair, weights, activation=of)
    d_weights = jnp.where(pairs.slot >= 0, weighed.d_weight[jnp.maximum(pairs.slot, 0)], 0)
    d_last = pull(weighed.rows)[0]
    if made.x is None:
        return weighed.d, d_last, d_weights, None, None
    kept = made.kept if products is None else None
    d_gate, d_x = apply.hidden_backward(params, made.x, pairs.places, weighed.d, kept)
    if products is None or total is None:
        return None, d_last, d_weights, d_gate, added_to(total, d_x)
    # What is not used is not computed: here sums of rows that are not added to others.
    d_x = combined(apply.turned_gate(params, weighed.d, pairs.sizes), pairs.slot, None, total)
    return None, d_last, d_weights, d_gate, d_x
