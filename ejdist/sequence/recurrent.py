"""Recurrent cells and RWKV-4 with the sequence split.

RWKV-4's sums pass between ranks as those of every linear recurrence do. A cell is not linear: what it does to a state is known
only once the state is, so the ranks take turns, and each hands its final state to the next. In another order than contiguous
tokens are exchanged first: a rank with several runs of tokens would have as many turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.order import Order
from ejdist.sequence import exchange
from ejdist.sequence.runs import Runs
from ejdist.sequence.state_passing import StatePassing
from ejdist.sharded import sharded
from kernels.engines.scan.recurrence import last_valid_before
from kernels.framework.dispatch import vary_alike
from kernels.ops.recurrent import CELLS, EMPTY, FORGET, of_direction, op, rwkv4_op


@dataclass(frozen=True)
class TimeMix:
    """A map is (how much the exponent of the state falls, the sums of the tokens); two are joined by their largest exponent."""

    def start(self, arguments: dict[str, Any]) -> jax.Array:
        rows, _, width = arguments["k"].shape
        return jnp.zeros((rows, 3, width), jnp.float32).at[:, 2].set(EMPTY)

    def summary(self, arguments: dict[str, Any], valid: jax.Array) -> Any:
        count = jnp.sum(valid, axis=1, keepdims=True)
        sums = rwkv4_op(**arguments, segment_ids=jnp.where(valid, 0, -1))[1][:, 0]
        return -jnp.exp(arguments["w"].astype(jnp.float32)) * count, sums

    def combine(self, first: Any, then: Any) -> Any:
        return jnp.maximum(first[0] + then[0], FORGET), self.apply(then, first[1])

    def apply(self, over: Any, state: jax.Array) -> jax.Array:
        falls, part_state = over
        p = state[:, 2] + falls
        top = jnp.maximum(p, part_state[:, 2])
        before, after = jnp.exp(p - top)[:, None], jnp.exp(part_state[:, 2] - top)[:, None]
        return jnp.concatenate([before * state[:, :2] + after * part_state[:, :2], top[:, None]], axis=1)

    def constant(self, state: jax.Array, like: Any) -> Any:
        return jnp.full_like(like[0], FORGET), state


@dataclass(frozen=True)
class Turns:
    """What runs on a shard: as many rounds as there are ranks, in each of which every rank runs its tokens from the state that
    it has, and hands the final one on. What a rank computes in its own round counts."""

    def __call__(
        self,
        axes: dict[str, tuple[str, ...]],
        *,
        inputs: jax.Array,
        weights: Any,
        order: Order | None = None,
        platform: Any = None,
        cfg: Any = None,
        **more: Any,
    ) -> Any:
        axis = axes["T"]
        if not axis:
            return op(inputs=inputs, weights=weights, platform=platform, cfg=cfg, **more)
        if order is not None and (runs := Runs(order, inputs.shape[1], axis)).count > 1:
            more |= {n: runs.exchanged(more[n]) for n in ("segment_ids",) if more.get(n) is not None}
            inputs = runs.exchanged(inputs)
            out, final = self(axes, inputs=inputs, weights=weights, platform=platform, cfg=cfg, **more)
            return runs.home(out), final
        both = more.pop("bidirectional", False)
        ids, initial = more.pop("segment_ids", None), more.pop("initial_state", None)
        G, n = more.get("num_states", 1), CELLS[more.get("cell_type", "lstm")][1]
        if ids is None:
            ids = jnp.zeros(inputs.shape[:2], jnp.int32)
        if initial is None:
            shape = (inputs.shape[0], G, n * (2 if both else 1), weights["weight_hh"].shape[1])
            initial = jnp.zeros(shape, jnp.float32)
        inputs, weights, ids, initial, _ = vary_alike((inputs, weights, ids, initial, exchange.rank(axis)))
        more |= {"platform": platform, "cfg": cfg}
        outs, finals = [], []
        for i, end in enumerate(("", "_reverse") if both else ("",)):
            way = -1 if end else 1
            arguments = {
                "inputs": inputs[:, ::way],
                "weights": of_direction(weights, end),
                "segment_ids": ids[:, ::way],
            }
            out, final = _in_turn(arguments | more, initial[:, :, i * n : (i + 1) * n].astype(jnp.float32), way, axis)
            outs.append(out[:, ::way])
            finals.append(final)
        return jnp.concatenate(outs, axis=-1), jnp.concatenate(finals, axis=2)


def _in_turn(arguments: dict[str, Any], initial: jax.Array, way: int, axis: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (out, final state of the whole sequence) of one direction; way -1: the last rank begins."""
    ranks, ids = jax.lax.axis_size(axis), arguments["segment_ids"]
    turn = exchange.rank(axis) if way == 1 else ranks - 1 - exchange.rank(axis)
    goes_on = True if initial.shape[1] > 1 else _goes_on(ids, turn, way, axis)[:, None, None, None]

    def round_of(carry: Any, now: jax.Array) -> Any:
        state, out, final = carry
        new, after = op(**arguments, initial_state=state)
        mine = now == turn
        out, final = jnp.where(mine, new, out), jnp.where(mine, after, final)
        handed = jnp.where(goes_on, exchange.shift(after, axis, way), 0)
        return (jnp.where(now + 1 == turn, handed, state), out, final), None

    shapes = jax.eval_shape(lambda: op(**arguments, initial_state=initial))
    out, _ = vary_alike((jnp.zeros(shapes[0].shape, shapes[0].dtype), ids))
    first = (initial, out, initial)
    (_, out, final), _ = jax.lax.scan(round_of, first, jnp.arange(ranks))
    return out, jax.lax.psum(jnp.where(turn == ranks - 1, final, 0), axis)


def _goes_on(ids: jax.Array, turn: jax.Array, way: int, axis: Any) -> jax.Array:
    """Returns bool [B]: whether the state that is handed to this rank is that of its first segment, or passes it."""
    valid = ids >= 0

    def id_at(index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0]

    none = ~jnp.any(valid, axis=1)
    first = id_at(jnp.argmax(valid, axis=1))
    last = jnp.where(none, -1, id_at(ids.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)))
    every = jax.lax.all_gather(last, axis, axis=1)[:, ::way]  # in the order of their turns
    before = last_valid_before(every)[:, turn]
    return none | (before < 0) | (before == first)


recurrent = sharded(kernels.recurrent, local=Turns(), handles=("T",), follows="fixed")
rwkv4 = sharded(kernels.rwkv4, local=StatePassing(rwkv4_op, TimeMix()), handles=("T",), follows="fixed")
