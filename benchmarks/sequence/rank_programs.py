"""The programs of one rank of several on one device: its whole work by a scheme, and each hop of a ring."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.sequence.alone import Work, of_rank, one_rank
from benchmarks.sequence.calls import Arrays, Attention, Programs
from ejdist.mesh import SP
from ejdist.order import Order
from ejdist.sequence import Ring, Scheme, in_place
from ejdist.sequence import hops as ring_hops
from ejdist.sequence.attention import OnShard, local_of, shard_call
from ejdist.sequence.halo import reach_of
from ejdist.sequence.local import KEY_FIELDS, Local
from ejdist.sequence.schedule import hops as hops_of
from kernels.engines.attention.masks import MaskInfo
from kernels.ops.flash_attention import op as flash

ARRIVE = ("key", "value")


def _mask(call: Attention, data: Any, ranks: int) -> MaskInfo:
    fields = {n: of_rank(data["whole"][n], data["rank"], ranks) for n in KEY_FIELDS if n in data["whole"]}
    return call.rules.replace(**fields, **{n.replace("kv_", "q_"): x for n, x in fields.items()})


@functools.cache
def programs(call: Attention, order: Order, scheme: Scheme, compared: bool = False) -> Programs:
    """Returns the programs of a rank's whole work: all that a scheme computes there, and what is around it.

    They take (the rank's floats, {"rank": int32, "whole": of all ranks, in their order, the segment ids and, where it is timed,
    keys that have arrived, see `with_arrived`}).

    Args:
      compared: whether keys that arrive are copies of the rank's own, which takes time, and gradients of keys and values those
        of all ranks one upon another, since nothing goes home.
    """
    missing = missing_of(call, order, scheme)

    def attention(floats: Arrays, data: Any, lse: bool) -> Any:
        reach = reach_of(call.rules, floats["query"].shape[1] * order.shards)
        run = OnShard(SP, Work(scheme, sums=compared, copies=compared), lse, reach)
        mask = _mask(call, data, order.shards)
        if call.sinks:  # the contract has them as [N, n]
            floats = floats | {"softmax_aux": floats["softmax_aux"][:, None]}
        results = run(order=order, mask=mask, platform=call.platform, cfg=None, **floats)
        return results if lse else results[0]

    return Programs(attention, lambda data: one_rank(data["rank"], order.shards, data["whole"], missing))


@functools.cache
def missing_of(call: Attention, order: Order, scheme: Scheme) -> dict[str, Any]:
    """Returns what the programs of a rank gather of keys and are not given, by name, once they are traced."""
    return {}


def with_arrived(call: Attention, order: Order, scheme: Scheme, arrays: Arrays, data: dict[str, Any]) -> dict[str, Any]:
    """Returns the data of a rank with the keys that its programs gather: any, which are there before they begin."""
    floats = {name: x for name, x in arrays.items() if name != "d_out"}
    jax.eval_shape(programs(call, order, scheme).both, floats, arrays["d_out"], data)
    shapes = missing_of(call, order, scheme)
    keys = jax.jit(
        lambda: {n: jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype) for n, x in shapes.items()}
    )()
    return {**data, "whole": data["whole"] | keys}


@functools.cache
def hop_programs(call: Attention, order: Order) -> dict[str, Callable]:
    """Returns direction -> the jitted program of one hop: (number, data, floats, state, own=False) -> the state with the hop's
    part added; and "of_query", (data, floats, what the last state has for the queries) -> their gradient.

    state: forward (out, lse), float32; backward (gradients of what is own, of the keys that are there), float32. own: whether
    the keys are the rank's own, which a ring knows when it is compiled. Keys and values are those of `data["whole"]` of the
    rank that holds them, or any.
    """

    def local(data: Any, floats: Arrays) -> Local:
        how = {"axis": SP, "scheme": Ring(), "order": order, "platform": call.platform, "cfg": None, "lse": False}
        inputs = {n: floats[n] for n in ("query", "key", "value")}
        return local_of(*shard_call(inputs, _mask(call, data, order.shards), **how))

    def keys_at(here: Local, hop: Any, data: Any) -> Arrays:
        arrived = {n: of_rank(x, here.holder(hop), order.shards) for n, x in data["whole"].items()}
        return here.keys | arrived

    @functools.partial(jax.jit, static_argnames="own")
    def forward(hop: Any, data: Any, floats: Arrays, state: Any, own: bool = False) -> Any:
        with one_rank(data["rank"], order.shards, data["whole"], {}):
            here, hop = local(data, floats), 0 if own else hop
            kernels, sofar = in_place.kernels_of(here), None if own else state
            if kernels is not None:
                return in_place.attended(here, kernels, hop, keys_at(here, hop, data), sofar)
            return ring_hops.attended(here, hop, keys_at(here, hop, data), sofar)

    @functools.partial(jax.jit, static_argnames="own")
    def backward(hop: Any, data: Any, floats: Arrays, state: Any, own: bool = False) -> Any:
        with one_rank(data["rank"], order.shards, data["whole"], {}):
            here, hop = local(data, floats), 0 if own else hop
            begun = (None, None) if own else state
            kernels, keys = in_place.kernels_of(here), keys_at(here, hop, data)
            if kernels is None:
                return ring_hops.pulled(here, data["saved"], hop, keys, *begun)
            return in_place.pulled(here, kernels, data["saved"], hop, keys, *begun)

    @jax.jit
    def of_query(data: Any, floats: Arrays, sums: jax.Array) -> jax.Array:
        with one_rank(data["rank"], order.shards, data["whole"], {}):
            kernels = in_place.kernels_of(local(data, floats))
        return sums if kernels is None else kernels.of_query(sums)

    return {"forward": forward, "backward": backward, "of_query": of_query}


def hops_made(call: Attention, order: Order, length: int) -> tuple[int, ...]:
    """Returns the hops of the ring for that mask; documents are known at run time only, and rule out none."""
    return hops_of(order, length, call.rules)


def begun(direction: str, floats: Arrays) -> Any:
    """Returns the state before the first hop."""
    q, v = floats["query"].shape, floats["value"].shape
    if direction == "forward":
        return jax.device_put((np.zeros((*q[:3], v[3]), np.float32), np.full(q[:3], -np.inf, np.float32)))
    return jax.device_put(
        ({"query": np.zeros(q, np.float32)}, {n: np.zeros(floats[n].shape, np.float32) for n in ARRIVE})
    )


@functools.partial(jax.jit, static_argnums=0)
def saved_of(call: Attention, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> Arrays:
    """Returns what a hop's backward is given of the whole softmax."""
    assert flash.backward_inputs is not None
    return flash.backward_inputs({"out": out.astype(call.dtype), "lse": lse}, {"d_out": d_out})
