"""The selected branch of native sparse attention over keys of all ranks: each rank receives the blocks that its queries select,
and no more; their gradients go back and are added.

A block belongs to the rank that has its last token. In front of a rank's own tokens are those before them, so it has all of it.
Only one document of a row goes on into a rank's tokens, so all blocks that the rank receives are of this one, and end before
its first token: its queries see all of each. Which they are is known when they are selected. Shapes are static: a buffer has
room for as many blocks of every rank and key head, and what a batch needs beyond it comes in a further pass. Every device of
the mesh makes the same number of passes, or a transfer would wait forever.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.sequence import exchange
from ejdist.sequence.attention import differentiated_once
from ejdist.sequence.group_cast import Listed
from kernels.engines.attention.softmax import backward_inputs, merge
from kernels.framework.contract import Op
from kernels.framework.dispatch import reverse_only, vary_alike
from kernels.ops.native_sparse_attention import op, selected_op


@dataclass(frozen=True)
class Static:
    """What is static of a call, hashable.

    Attributes:
      axis: the mesh axes that split the sequence. block_size: tokens of a block. room: blocks of each rank in a pass.
    """

    axis: exchange.Axis
    block_size: int
    room: int
    softmax_scale: float | None
    platform: str | None
    cfg: Any

    @property
    def op(self) -> Op:
        """What errors name."""
        return op


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Which blocks go where, of one call: integers.

    Attributes:
      passes: how many there are, at least one, the same on every device.
      leaving: this rank's blocks that others need, of each row and key head, [B * K, ranks, blocks].
      rows: [B, blocks, block_size], where the tokens of each block that ends on this rank are among its keys.
      own: [B, T, K, n], the blocks of this rank's keys that queries select. starts: [B, block_size + T], documents there.
      turn, slot: [B, T, K, n], the pass in which a block comes, -1 for none, and its place in the buffer.
    """

    passes: jax.Array
    leaving: Listed
    rows: jax.Array
    own: jax.Array
    starts: jax.Array
    turn: jax.Array
    slot: jax.Array


def plan_of(static: Static, indices: jax.Array, starts: jax.Array, rows: jax.Array) -> Plan:
    """Returns the plan of a call.

    Args:
      indices: int32 [B, T, K, n], the blocks that this rank's queries select. starts: [B, S], of the documents of all ranks.
      rows: [B, blocks, block_size], the places of the tokens of the blocks that end on this rank, in its keys.
    """
    size, n, room = static.block_size, exchange.size(static.axis), static.room
    B, T, K, _ = indices.shape
    blocks, first = T // size, exchange.rank(static.axis) * T
    start = jax.lax.dynamic_slice_in_dim(starts, first, T, 1)
    # How many blocks of the query's document end before this rank's tokens, and how much of the next one is before them.
    goes_on = (start >= 0) & (start < first)
    before = jnp.where(goes_on, (first - start) // size, 0)[:, :, None, None]
    here = jnp.where(goes_on, size - (first - start) % size, jnp.where(start >= 0, start - first + size, -1))
    received = (indices >= 0) & (indices < before)
    number = jnp.where(received, indices + (start[:, :, None, None] + size - 1) // size, n * blocks)  # its slot of all
    row, head = jnp.arange(B)[:, None, None, None], jnp.arange(K)[:, None]
    needed = jnp.zeros((B, K, n * blocks), bool).at[row, head, number].set(True, mode="drop")
    needed = needed.reshape(B, K, n, blocks)
    listed = (jnp.cumsum(needed, -1, dtype=jnp.int32) - 1).reshape(B, K, -1)
    listed = listed[row, head, jnp.minimum(number, n * blocks - 1)]
    passes = exchange.greatest(jnp.maximum(1, -(-needed.sum(-1, dtype=jnp.int32).max() // room)))
    asked = exchange.all_to_all(needed.reshape(B * K, n, blocks).astype(jnp.int8), static.axis, split=1, join=1)
    return Plan(
        passes,
        Listed.of(asked > 0, jnp.arange(n), room),
        rows,
        jnp.where(indices >= before, indices - before, -1),
        jnp.pad(here, ((0, 0), (size, 0)), constant_values=-1),
        jnp.where(received, listed // room, -1),
        number // blocks * room + listed % room,
    )


@dataclass(frozen=True)
class _Call:
    """A call on a rank, forward or backward. Arrays of keys and values together are [B, K, tokens, H + Hv]."""

    static: Static
    plan: Plan
    query: jax.Array
    key: jax.Array  # [B, block_size + T, K, H], the rank's own after those before them
    value: jax.Array

    @functools.cached_property
    def together(self) -> jax.Array:
        return _joined(self.key, self.value)

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        options = {"block_size": self.static.block_size, "softmax_scale": self.static.softmax_scale}
        return options | {"platform": self.static.platform, "cfg": self.static.cfg}

    @property
    def of_own(self) -> dict[str, Any]:
        """The arguments of the operation over this rank's keys."""
        where = {"starts": self.plan.starts, "q_start": jnp.int32(self.static.block_size)}
        return {"query": self.query, "key": self.key, "value": self.value, "block_indices": self.plan.own} | where

    def of_pass(self, came: jax.Array, turn: Any) -> dict[str, Any]:
        """Returns the arguments of the operation over what came in a pass, all of which is before the queries."""
        wide, keys = self.key.shape[-1], came.swapaxes(1, 2)
        indices = jnp.where(self.plan.turn == turn, self.plan.slot, -1)
        arrays = {"query": self.query, "key": keys[..., :wide], "value": keys[..., wide:], "block_indices": indices}
        return arrays | {"q_start": jnp.int32(keys.shape[1])}

    def _leaving(self, turn: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (int32 [B, K, slots, block_size], bool [B, K, slots]): which tokens leave in a pass, and whether there are
        any."""
        B, K = self.together.shape[:2]
        _, listed, there = (x.reshape(B, K, -1) for x in self.plan.leaving.slots(self.static.room, turn))
        rows = jax.vmap(lambda rows, listed: jnp.take(rows, listed, axis=0, mode="clip"))(self.plan.rows, listed)
        return rows, there

    def coming(self, turn: Any) -> jax.Array:
        """Returns [B, K, tokens, H + Hv], what comes in a pass."""
        rows, there = self._leaving(turn)
        one = jax.vmap(jax.vmap(lambda x, rows: jnp.take(x, rows, axis=0, mode="clip")))
        sent = jnp.where(there[..., None, None], one(self.together, rows), 0)
        return self._moved(sent).reshape(*sent.shape[:2], -1, sent.shape[-1])

    def _moved(self, x: jax.Array) -> jax.Array:
        """Returns what every rank has for this one, [B * K, ranks, tokens of a pass, ...], of what this one has for each."""
        x = x.reshape(-1, exchange.size(self.static.axis), self.static.room * self.static.block_size, x.shape[-1])
        return exchange.all_to_all(x, self.static.axis, split=1, join=1)

    def added(self, sums: jax.Array, grads: dict[str, jax.Array], turn: Any) -> jax.Array:
        """Returns the sums, float32, with the gradients of this rank's blocks that others received in a pass: of one rank after
        another, so that the result does not depend on which is there first."""
        (rows, there), (B, K, tokens, wide) = self._leaving(turn), sums.shape
        back = self._moved(_joined(grads["key"], grads["value"]).astype(self.key.dtype))
        rows = jnp.where(there[..., None], rows, tokens)  # nowhere
        by_rank = [x.reshape(B, K, back.shape[1], -1, *x.shape[4:]) for x in (rows, back.reshape(*rows.shape, wide))]
        row, head = jnp.arange(B)[:, None, None], jnp.arange(K)[:, None]

        def add(sums: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return sums.at[row, head, one[0]].add(one[1].astype(sums.dtype), mode="drop"), None

        where, new = (jnp.moveaxis(x, 2, 0) for x in by_rank)
        return jax.lax.scan(add, sums, (where, new))[0]

    def over_passes(self, own: Any, visit: Any) -> Any:
        """Returns the state after `own()` and then `state = visit(came, turn, state)` at every pass; the next one comes beside
        each, and the first beside this rank's own keys."""

        def step(turn: Any, came: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            # Behind a barrier, or what comes later, which needs no attention, is sent beside an earlier pass.
            coming, state = jax.lax.optimization_barrier((self.coming(turn + 1), visit(came, turn, state)))
            return vary_alike((coming, state), self.query)

        came, state = jax.lax.optimization_barrier((self.coming(0), own()))
        last, state = self.plan.passes - 1, vary_alike((came, state), self.query)
        came, state = jax.lax.fori_loop(0, last, lambda turn, state: step(turn, *state), state)
        return visit(came, last, state)


def _joined(key: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.concatenate([key, value], axis=-1).swapaxes(1, 2)


def _forward(static: Static, arrays: tuple[jax.Array, ...], plan: Plan) -> tuple[jax.Array, jax.Array]:
    call = _Call(static, plan, *arrays)

    def own() -> tuple[jax.Array, jax.Array]:
        out, lse = selected_op(**call.of_own, **call.options)
        return out.astype(jnp.float32), lse

    def visit(came: jax.Array, turn: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        return merge(*state, *selected_op(**call.of_pass(came, turn), **call.options))

    out, lse = call.over_passes(own, visit)
    return out.astype(call.query.dtype), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _selected(static: Static, arrays: tuple[jax.Array, ...], plan: Plan) -> jax.Array:
    return _forward(static, arrays, plan)[0]


_forward_of_a_gradient = differentiated_once(_forward)


def _selected_fwd(static, arrays, plan):
    out, lse = _forward_of_a_gradient(static, arrays, plan)
    return out, (arrays, plan, out, lse)


@differentiated_once
def _backward(
    static: Static, arrays: tuple[jax.Array, ...], plan: Plan, saved: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    call = _Call(static, plan, *arrays)

    def pulled(arguments: dict[str, Any]) -> dict[str, jax.Array]:
        d = selected_op.backward(saved, **arguments, **call.options)
        return {n: d[n].astype(jnp.float32) for n in ("query", "key", "value")}

    def own() -> tuple[jax.Array, jax.Array]:
        d = pulled(call.of_own)
        return d["query"], _joined(d["key"], d["value"])

    def visit(came: jax.Array, turn: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        d = pulled(call.of_pass(came, turn))
        return state[0] + d["query"], call.added(state[1], d, turn)

    d_query, sums = call.over_passes(own, visit)
    sums, wide = sums.swapaxes(1, 2), call.key.shape[-1]
    grads = d_query, sums[..., :wide], sums[..., wide:]
    return tuple(d.astype(x.dtype) for d, x in zip(grads, arrays, strict=True))


def _selected_bwd(static, residuals, d_out):
    arrays, plan, out, lse = residuals
    # Behind a barrier, or a compiler keeps what came in the first pass of the forward until now.
    arrays, d_out = jax.lax.optimization_barrier((arrays, d_out))
    return _backward(static, arrays, plan, backward_inputs({"out": out, "lse": lse}, {"d_out": d_out})), None


_selected.defvjp(_selected_fwd, _selected_bwd)


def selected(static: Static, query: jax.Array, key: jax.Array, value: jax.Array, plan: Plan) -> jax.Array:
    """Returns the selected branch [B, T, N, Hv] of this rank's queries.

    Args:
      key, value: [B, block_size + T, K, ...]: those of this rank's tokens, after as many as a block has before them.
    """
    arrays = reverse_only("native_sparse_attention", (query, key, value))
    return _selected(static, arrays, vary_alike(plan, query))
