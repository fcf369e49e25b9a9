"""Attention over a sequence that is split over all devices, beside its work alone, its transfers alone, and one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import ejdist
import kernels
from benchmarks.sequence import calls
from benchmarks.sequence.alone import Transfers, Work
from benchmarks.sequence.calls import IDS, Arrays, Attention, Programs
from benchmarks.sequence.pairs import busiest, order_named
from benchmarks.sequence.rows import Rows, median
from ejdist.layout import ACTIVATIONS, spec
from ejdist.mapped import map_shards
from ejdist.mesh import SEQUENCE_AXES, SP
from ejdist.order import Order
from ejdist.sequence import Scheme, compiler_options
from ejdist.sequence.attention import local_of, shard_call
from ejdist.sequence.schemes import SCHEMES, options_of, scheme_of
from kernels.ops.flash_attention import op as flash


@functools.cache
def whole(call: Attention) -> Programs:
    """Returns the programs of one device."""
    return Programs(lambda floats, data, lse: kernels.flash_attention(**floats, **data, **call.options, return_lse=lse))


@functools.cache
def split(call: Attention, mesh: Any, scheme: Scheme, order: Order) -> Programs:
    """Returns the programs over all devices, of arrays that lie in that order."""
    how = {"mesh": mesh, "scheme": scheme, "order": order}
    return Programs(
        lambda floats, data, lse: ejdist.ring_attention(**floats, **data, **call.options, **how, return_lse=lse),
        options=compiler_options(mesh),
    )


def _over(mesh: Any) -> tuple[tuple[str, int], ...]:
    """Returns (axis, devices along it) of the axes that the sequence is split over."""
    return tuple((a, mesh.shape[a]) for a in SEQUENCE_AXES if mesh.shape[a] > 1) or ((SP, 1),)


def _axis(mesh: Any) -> Any:
    names = tuple(a for a, _ in _over(mesh))
    return names[0] if len(names) == 1 else names


def scheme_with(name: str, o: dict[str, Any]) -> Scheme:
    """Returns a scheme with those of the options that it has."""
    ways = o["ring_directions"]
    asked = {
        "outer": o["outer"],
        "head_groups": o["head_groups"] or None,
        "directions": int(ways) if ways.isdigit() else ways,
    }
    asked["buffer"] = o["buffer"]
    return scheme_of(name, **{n: value for n, value in asked.items() if n in options_of(SCHEMES[name])})


@functools.cache
def travelling(call: Attention, mesh: Any, scheme: Scheme, order: Order, direction: str) -> Callable:
    """Returns the jitted (`to_send` of the arrays, data) -> next to nothing, that sends what the scheme sends in a direction
    and attends to nothing."""

    def body(arrays: Arrays, data: Arrays) -> Any:
        inputs = {n: arrays[n] for n in ("query", "key", "value")}
        mask = call.rules.replace(**data)
        how = {"axis": _axis(mesh), "scheme": Transfers(scheme), "order": order, "platform": call.platform, "cfg": None}
        static, made, seen = shard_call(inputs, mask, **how, lse=False)
        local, found = local_of(static, made, seen), {}
        if direction != "backward":
            out, lse = static.scheme.forward(local)
            found |= {"out": out[:, :1], "lse": lse[:, :1]}
        if direction != "forward":
            out = arrays["out"]
            residuals = {"out": out, "lse": out[..., 0].astype(np.float32)}
            assert flash.backward_inputs is not None
            grads = static.scheme.backward(local, flash.backward_inputs(residuals, {"d_out": arrays["d_out"]}))
            found |= {n: x[:, :1] for n, x in grads.items()}
        return found

    floats = {n: spec([*dims], ACTIVATIONS) for n, dims in calls.DIMS.items()}
    names = (*(IDS if call.packed else ()), *(calls.PLACES if order.carried else ()))
    ids = dict.fromkeys(names, spec(["B", "T"], ACTIVATIONS))
    mapped = map_shards(body, mesh, (floats | {"out": floats["d_out"]}, ids), spec(["B", "T", "N"], ACTIVATIONS))
    return jax.jit(mapped, compiler_options=compiler_options(mesh))


def to_send(arrays: Arrays) -> Arrays:
    """Returns what `travelling` takes of the arrays of a call: out is an argument of its own, so that it is sent too."""
    return {n: arrays[n] for n in calls.DIMS} | {"out": arrays["d_out"]}


def checked(call: Attention, mesh: Any, scheme: Scheme, order: Order, direction: str, ids: np.ndarray) -> float:
    """Returns the largest error of a way against one device in float32, on a row of these segment ids."""
    length, index = len(ids), calls.index_of(call, ids, order)
    arrays = jax.tree.map(functools.partial(_permuted, order, index), calls.draw(call, length, mesh))
    data = calls.data_of(call, order.permute(ids[None], index=index)[0], mesh, index)
    found = split(call, mesh, scheme, order).results(direction, arrays, data)
    wanted = {n: x for n, x in wanted_of(call, ids.tobytes()).items() if n in found}
    lies = {n: order.permute(x, index=index) if x.ndim == 4 else x for n, x in wanted.items()}
    worst = calls.worst_error(found, lies)
    if jax.process_count() > 1:  # whether a way is timed must be the same for all
        from jax.experimental.multihost_utils import process_allgather

        worst = float(np.max(process_allgather(np.float32(worst))))
    return worst


@functools.lru_cache(maxsize=4)
def wanted_of(call: Attention, ids: bytes) -> dict[str, np.ndarray]:
    """Returns what one device computes in float32 of a row with these segment ids: "out", and gradients by argument."""
    row = np.frombuffer(ids, np.int32)
    drawn = {n: np.asarray(x, np.float32) for n, x in calls.draw(call, len(row)).items()}
    keys = {n: drawn.pop(n) for n in ("key", "value")}
    return {n: np.asarray(x) for n, x in calls.reference(call)(drawn, keys, calls.data_of(call, row)).items()}


def _permuted(order: Order, index: np.ndarray | None, x: jax.Array) -> jax.Array:
    permute = jax.jit(functools.partial(order.permute, index=index), out_shardings=x.sharding)
    return permute(x) if x.ndim == 4 else x


def measure(mesh: Any, o: dict[str, Any], call: Attention, tokens: int, rows: Rows) -> None:
    """Adds and times all programs for a number of tokens per device."""
    ranks, length = mesh.size, tokens * mesh.size
    ids = calls.segment_ids(o["documents"], length, o["seed"])
    seen = call.keys_seen(ids)
    total = int(seen.sum())
    alone = calls.same_work(seen, total / ranks)
    share = total / ranks / int(call.keys_seen(ids[:alone]).sum())  # of the work of a device over that of one call
    few = calls.thinned(ids, min(o["check"], tokens) * ranks)
    arrays, one = calls.draw(call, length, mesh), calls.draw(call, alone)
    small, here = call.checked(min(o["check"], tokens)), words(o, call, tokens)
    backends = o["backends"].split(",")
    same = {
        "tokens": tokens,
        "documents": o["documents"],
        "window": call.window,
        "sinks": call.sinks,
        "width": call.width,
    }

    def one_device(direction: str, backend: str) -> str:
        label, about = f"{here}, {direction}, one device, {backend}", {"kind": "one device", **same}
        about |= {"direction": direction, "backend": backend, "length": alone, "share": share}

        def prepare() -> tuple[Callable, tuple, dict[str, Any]]:
            run, arguments = whole(of(call, backend)).timed(direction, one, calls.data_of(call, ids[:alone]))
            return run, arguments, about

        rows.add(label, "whole", prepare)
        return label

    for direction in o["directions"].split(","):
        for backend in dict.fromkeys(["auto", *backends]):
            one_device(direction, backend)
        for scheme in o["schemes"].split(","):
            made = scheme_with(scheme, o)
            reason = made.rejects(call.heads, _over(mesh))
            about = {**same, "direction": direction, "scheme": scheme}
            about |= {"cp": o["cp"]}
            about |= {name: o[name] for name in ("outer", "head_groups", "buffer") if hasattr(made, name)}
            if reason is not None:
                rows.rows[f"{here}, {direction}, {scheme}"] = {"kind": "split", **about, "refused": reason}
                continue
            for name in o["orders"].split(","):
                order = order_named(name, ranks, length, o["stripe"])
                ways(
                    mesh, o, call, small, Split(rows, f"{here}, {direction}, {scheme}", about, order, ids, few, arrays)
                )
    rows.time(o["rounds"], seed=tokens)
    for label, row in rows.rows.items():
        if row.get("kind") in ("one device", "split") and label.startswith(f"{here}, ") and "whole_ms" in row:
            part = row.get("share", 1.0)
            row["tflops"] = call.flops(row["direction"], total / ranks / part) / row["whole_ms"][1] / 1e9
    for label, row in rows.rows.items():
        if row.get("kind") == "split" and label.startswith(f"{here}, ") and "tflops" in row:
            compare(rows.rows, f"{here}, {row['direction']}", row)
            order = order_named(row["order"], ranks, length, o["stripe"])
            row["imbalance"] = busiest(seen, scheme_with(row["scheme"], o).uneven(order, _over(mesh)))[1]


class Split:
    """What is measured of one scheme in one order."""

    def __init__(
        self, rows: Rows, here: str, about: dict, order: Order, ids: np.ndarray, few: np.ndarray, arrays: Arrays
    ):
        self.rows, self.here, self.about, self.order = rows, here, about, order
        self.ids, self.few, self.arrays = ids, few, arrays


def ways(mesh: Any, o: dict[str, Any], call: Attention, small: Attention, of_order: Split) -> None:
    """Adds the transfers of a scheme in an order, and by each backend the whole and its work."""
    rows, order, direction = of_order.rows, of_order.order, of_order.about["direction"]
    scheme = scheme_with(of_order.about["scheme"], o)
    index = calls.index_of(call, of_order.ids, order)
    data = calls.data_of(call, order.permute(of_order.ids[None], index=index)[0], mesh, index)

    def transfers() -> tuple[Callable, tuple, dict[str, Any]]:
        run = travelling(call, mesh, scheme, order, direction)
        return run, (to_send(of_order.arrays), data), {"kind": "exchange", **of_order.about, "order": order.name}

    rows.add(f"{of_order.here}, {order.name}, exchange", "whole", transfers)
    for backend in o["backends"].split(","):

        def prepare(way: Scheme, backend: str = backend) -> tuple[Callable, tuple, dict[str, Any]]:
            about: dict[str, Any] = {}
            if not isinstance(way, Work):
                error = checked(of(small, backend), mesh, way, order, direction, of_order.few)
                if not error <= calls.limit_of(call.dtype):
                    raise ValueError(f"wrong by {error:.2g}")
                about = {"kind": "split", **of_order.about, "order": order.name, "backend": backend, "error": error}
            run, arguments = split(of(call, backend), mesh, way, order).timed(direction, of_order.arrays, data)
            return run, arguments, about

        label = f"{of_order.here}, {order.name}, {backend}"
        if rows.add(label, "whole", functools.partial(prepare, scheme)):
            rows.add(label, "work", functools.partial(prepare, Work(scheme)))


def compare(rows: dict[str, dict[str, Any]], here: str, row: dict[str, Any]) -> None:
    """Adds to a way how it compares with one device, and how much of its transfers does not hide."""
    for name, backend in (("efficiency", "auto"), ("of_its_backend", row["backend"])):
        base = rows[f"{here}, one device, {backend}"]
        if "tflops" in base:
            row[name] = row["tflops"] / base["tflops"]
    work, exchange = median(row, "work_ms"), rows.get(f"{here}, {row['scheme']}, {row['order']}, exchange", {})
    if work is not None:
        row["exposed_ms"] = row["whole_ms"][1] - work
        if alone := median(exchange, "whole_ms"):
            row["exposed_share"] = row["exposed_ms"] / alone


def of(call: Attention, backend: str) -> Attention:
    return replace(call, platform=None if backend == "auto" else backend)


def words(o: dict[str, Any], call: Attention, tokens: int) -> str:
    """Returns what a row is of, in words."""
    documents = {calls.ONE: "one document", calls.NO_IDS: "no segment ids"}.get(o["documents"])
    if documents is None:
        name = o["documents"].rsplit("/", 1)[-1]
        documents = f"documents of {name}" if name.isdigit() else f"documents of {name.partition('.')[0]}"
    parts = [f"{tokens} tokens", documents, f"{call.heads}/{call.kv_heads} x {call.width}"]
    parts += [f"window {call.window}"] if call.window else []
    return ", ".join(parts + (["sinks"] if call.sinks else []))
