"""The layers of a decoder: the parts of each, their stacked parameters, remat, and metrics."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.frozen import Frozen
from ejdist.models.ahead_shape import AheadShape
from ejdist.models.config import ALIASES, MIXERS, NONE, DecoderShape, parts_of_kind
from ejdist.models.in_turn import apart, in_turn
from ejdist.models.kept import Kept
from ejdist.models.model import Metrics
from ejdist.models.parameters import Param, cast
from ejdist.models.part import LayerContext, Part
from ejdist.models.parts import PARTS, nearest_kind
from ejdist.models.remat import REMAT, Remat
from ejdist.order import Order
from ejdist.packed import Packed
from ejdist.precision import BF16, LEAST, Narrow

_LAYER_INPUT = "decoder.layer_input"
Contexts = list[Callable[..., LayerContext]]
AHEAD = "mtp"  # the parameters of multi-token prediction, and how the names of its layer's buffers begin


def _of_kinds(kinds: Iterable[str]) -> list[list[Part]]:
    """Returns the parts of a layer of each kind."""
    layers = {kind: [PARTS[part] for part in parts_of_kind(kind)] for kind in kinds}
    for kind, parts in layers.items():
        if len({part.name for part in parts}) < len(parts):
            raise ValueError(
                f"a layer of kind {kind!r} has two parts with the same name, and so the same parameters; rename one"
            )
    return [layers[kind] for kind in kinds]


def check_kinds(c: DecoderShape) -> None:
    """Raises ValueError, naming the key, for a kind of layer that is not MIXER+FEED_FORWARD with known parts."""
    short = {part: name for name, part in MIXERS.items()}
    of_role: dict[str, list[str]] = {"mixer": [], "feed_forward": []}
    for name, part in PARTS.items():
        role = getattr(part, "role", None)
        if role not in of_role:
            raise TypeError(
                f"{type(part).__name__}: give the part {name!r} a role, 'mixer' or 'feed_forward', got {role!r}"
            )
        of_role[role].append(name)
    mixers, feed_forwards = of_role["mixer"], of_role["feed_forward"]
    for key in ("first_layers", "layer_pattern", "last_layers"):
        for kind in getattr(c, key):
            mixer, plus, feed_forward = ALIASES.get(kind, kind).partition("+")
            known = MIXERS.get(mixer, mixer) in (*mixers, NONE) and feed_forward in (*feed_forwards, NONE)
            if plus and known and (mixer, feed_forward) != (NONE, NONE):
                continue
            named = [short.get(name, name) for name in mixers]
            near = nearest_kind(kind, [*named, NONE], [*feed_forwards, NONE])
            raise ValueError(
                f"model.{key} = {list(getattr(c, key))}: {kind!r} is not MIXER+FEED_FORWARD"
                f"{f'; did you mean {near!r}?' if near else '.'} Mixers: {', '.join(named)}; feed-forwards: "
                f"{', '.join(feed_forwards)}; none in the place of one of them for a layer without it. {', '.join(ALIASES)} "
                f"stand for {', '.join(ALIASES.values())}. A part of your own is known with plugins=[MODULE]: see "
                "examples/own_layer.py"
            )


def layers_of(c: DecoderShape) -> list[list[Part]]:
    """Returns the parts of each layer. Raises ValueError, naming the key, for an unknown kind."""
    check_kinds(c)
    return _of_kinds(c.kinds())


def ahead_of(c: DecoderShape) -> DecoderShape | None:
    """Returns the configuration of the layer that multi-token prediction adds, one of the kind of the last; None without it."""
    if not c.mtp.modules:
        return None
    return replace(c, num_layers=1, first_layers=(), layer_pattern=(c.kinds()[-1],), last_layers=(), mtp=AheadShape())


@lru_cache(maxsize=64)
def counted_parts(c: DecoderShape) -> Counter[Part]:
    """Returns part -> how many layers have it, with that of multi-token prediction."""
    one = ahead_of(c)
    return Counter(part for parts in (*layers_of(c), *(layers_of(one) if one else ())) for part in parts)


def _counts(layers: Iterable[list[Part]]) -> Counter[str]:
    """Returns name of a part -> how many of the layers have it."""
    return Counter(part.name for parts in layers for part in parts)


def parts_of(c: DecoderShape) -> dict[str, Part]:
    """Returns name -> a part of that name; parts with the same name have the same parameters."""
    return {part.name: part for parts in layers_of(c) for part in parts}


def takes_order(c: Any, order: Order) -> bool:
    """Returns whether every part of a model has a form for an order of tokens; a model that is no decoder is not asked."""
    if not order.carried or not isinstance(c, DecoderShape):
        return True
    return not any(part.fixed_order for part in parts_of(c).values())


def declare_layers(c: DecoderShape) -> dict[str, Param]:
    """Returns the parameters of the layers, stacked: a row per layer that has the part. Layers of different kinds need no
    padding, and a part that all layers have is one stack however else they differ."""
    counts, layers = _counts(layers_of(c)), {}
    for name, part in parts_of(c).items():
        for key, p in part.declare(c).items():
            if key in layers:
                raise ValueError(f"two parts of model.layer_pattern declare the parameter {key!r}; rename {name}'s")
            layers[key] = p.stacked(counts[name])
    return layers


def why_stay(c: DecoderShape) -> dict[str, str | None]:
    """Returns `Part.grouped` of all parts."""
    return {name: why for part in parts_of(c).values() for name, why in part.grouped(c).items()}


@lru_cache(maxsize=64)
def narrow_matrices(c: DecoderShape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the matrices of the layers whose products are in 8 bits, and of the others that stay as they are:
    those of `precision_keep`, those of few inputs or outputs, and those of products that have no form in 8 bits.

    Raises:
      ValueError: a pattern of `model.precision_keep` names no such matrix, or some of a part's that are narrow together.
    """
    if c.precision == BF16:
        return (), ()
    declared = {name: p for part in parts_of(c).values() for name, p in part.declare(c).items()}
    others = why_stay(c)
    matrices = {name: p for name, p in declared.items() if p.adapts or name in others}
    for pattern in c.precision_keep:
        if not fnmatch.filter(matrices, pattern):
            raise ValueError(
                f"model.precision_keep has {pattern!r}, which no matrix of a layer matches; there are {', '.join(matrices)}"
            )
    narrow = []
    for name, p in matrices.items():
        if name in others:
            stay = others[name] is not None
        else:
            inputs = math.prod(n for d, n in zip(p.dims.split(), p.shape) if d in p.inputs.split())
            stay = min(inputs, math.prod(p.shape) // inputs) < LEAST
        if not stay and not any(fnmatch.fnmatch(name, pattern) for pattern in c.precision_keep):
            narrow.append(name)
    if not narrow:
        raise ValueError(
            f"model.precision = {c.precision}: no matrix of the layers is left for 8 bits, beside those of "
            f"model.precision_keep and those of fewer than {LEAST} inputs or outputs; use model.precision={BF16}"
        )
    for part in parts_of(c).values():
        together = [name for name, why in part.grouped(c).items() if why is None]
        if 0 < len(kept := [name for name in together if name not in narrow]) < len(together):
            raise ValueError(
                f"model.precision_keep keeps {', '.join(kept)}, and of {', '.join(together)} all are in 8 bits or none: name "
                "all of them, or none"
            )
    return tuple(narrow), tuple(name for name in matrices if name not in narrow)


def declare_buffers(c: DecoderShape) -> dict[str, dict[str, Param]]:
    """Returns the buffers of the layers, by part, stacked like the parameters."""
    counts = _counts(layers_of(c))
    declared = {name: (part.buffers(c), counts[name]) for name, part in parts_of(c).items()}
    return {name: {k: p.stacked(n) for k, p in buffers.items()} for name, (buffers, n) in declared.items() if buffers}


def declare_kept(c: DecoderShape) -> dict[str, tuple[int, dict[str, Kept]]]:
    """Returns what layers keep between the steps of a generation: part -> (how many layers have it, what each keeps).

    Raises:
      ValueError: a part does not say what it keeps; names the kind of layer.
    """
    counts, declared = _counts(layers_of(c)), {}
    for name, part in parts_of(c).items():
        kept = part.keeps(c)
        if kept is None:
            raise ValueError(
                f"model.layer_pattern has layers with {name}, which cannot generate: {type(part).__name__} does not declare "
                "what it keeps of a request (Part.keeps); use python -m launch.evaluate, which needs no cache"
            )
        if kept:
            declared[name] = counts[name], kept
    return declared


def update_buffers(c: DecoderShape, buffers: Any, seen: dict[str, jax.Array]) -> Any:
    """Returns the buffers after a step, from the "update" metrics of all layers."""
    parts = parts_of(c)

    def of(name: str) -> dict[str, jax.Array]:
        mine = f"{name}."
        return {key.removeprefix(mine): value for key, value in seen.items() if key.startswith(mine)}

    def part(name: str) -> Part:
        return parts[name.removeprefix(f"{AHEAD}_")]

    return {name: jax.vmap(partial(part(name).update, c))(old, of(name)) for name, old in buffers.items()}


def report(c: DecoderShape, numbers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the metrics that parts derive from those of a step."""
    return {name: value for part in parts_of(c).values() for name, value in part.report(c, numbers).items()}


def rematerialised(layer: Callable, remat: Remat, parts: list[Part], *, in_scan: bool) -> Callable:
    """Returns the layer wrapped in `jax.checkpoint` with the remat policy."""
    saves = [name for part in parts for name in part.saves]
    offloads = [name for part in parts for name in part.offloads]
    keep = remat.policy(saves, offloads, _LAYER_INPUT)
    if keep is None:
        return layer
    # A scan's forward and backward are separate loops. Elsewhere CSE would merge the recomputation with the forward.
    return jax.checkpoint(layer, policy=keep, prevent_cse=not in_scan)


def used(part: Part, weights: dict[str, Any], c: DecoderShape, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of one layer as its part takes them: of those that are frozen, what `project` alone multiplies
    with stays as it is stored, and the others become arrays; what is multiplied in 8 bits says so."""
    narrow, _ = narrow_matrices(c)
    narrow = [k for k in narrow if k in weights and not isinstance(weights[k], Packed)]
    weights = weights | {k: Narrow(weights[k], c.precision) for k in narrow}
    if not any(isinstance(w, Frozen) for w in weights.values()):
        return weights
    projected = {name for name, p in part.declare(c).items() if p.adapts}
    return {k: w.whole(dtype) if isinstance(w, Frozen) and k not in projected else w for k, w in weights.items()}


def _layer(
    xs: list[jax.Array], weights: list[Any], buffers: Any, layer: Any, parts: list[Part], contexts: Contexts
) -> tuple[list[jax.Array], Metrics]:
    """Returns (xs, metrics) after one layer; weights and buffers are by part. The weights are of each x, or one for all."""
    xs = [checkpoint_name(x, _LAYER_INPUT) for x in xs]
    weights = weights if len(weights) == len(xs) else weights * len(xs)
    metrics: Metrics = {}
    for part in parts:
        with jax.named_scope(part.name):
            ctxs = [context(layer=layer, buffers=buffers[part.name]) for context in contexts]
            params = [used(part, of[part.name], ctxs[0].config, xs[0].dtype) for of in weights]
            xs, part_metrics = part.apply_each(xs, params, ctxs)
        for name, m in part_metrics.items():
            # Without a gradient, so that the backward saves nothing for them.
            m = m if m.how == "loss" else replace(m, value=jax.lax.stop_gradient(m.value))
            name = f"{part.name}.{name}" if m.how == "update" else name
            if name in metrics:
                raise ValueError(f"two parts of a layer return the metric {name!r}; rename {part.name}'s")
            metrics[name] = m
    return xs, metrics


def _stacked(layers: list[Metrics]) -> Metrics:
    """Returns the metrics of several layers, stacked by name in the order of the layers that return them."""
    names = {name: m for metrics in layers for name, m in metrics.items()}
    for metrics in layers:
        odd = [name for name, m in metrics.items() if (m.how, m.each) != (names[name].how, names[name].each)]
        if odd:
            raise ValueError(f"the metric {odd[0]!r} is reduced differently by different layers")
    return {n: replace(one, value=jnp.stack([m[n].value for m in layers if n in m])) for n, one in names.items()}


def _concatenated(runs: list[Metrics]) -> Metrics:
    """Returns the metrics of several runs of layers, each stacked already."""
    joined: Metrics = {}
    for metrics in runs:
        for name, m in metrics.items():
            before = [joined[name].value] if name in joined else []
            joined[name] = replace(m, value=jnp.concatenate([*before, m.value]))
    return joined


def rows_of(c: DecoderShape, which: range) -> dict[str, slice]:
    """Returns name of a part -> the rows of its stacks, of parameters and of buffers, that a range of layers has."""
    layers = layers_of(c)
    before, counts = _counts(layers[: which.start]), _counts(layers[which.start : which.stop])
    return {name: slice(before[name], before[name] + counts[name]) for name in parts_of(c)}


def check_rows(c: DecoderShape, which: range, params: dict, buffers: Mapping[str, Any]) -> None:
    if which.step != 1 or not 0 <= which.start < which.stop <= c.num_layers:
        raise ValueError(f"layers: {which} must be a contiguous range of the {c.num_layers} layers")
    parts = parts_of(c)
    for name, rows in rows_of(c, which).items():
        needed = rows.stop - rows.start
        stacks = {key: params[key] for key in parts[name].declare(c) if key in params or needed} | buffers.get(name, {})
        for key, stack in stacks.items():
            if (rows_here := jax.tree.leaves(stack)[0].shape[0]) != needed:
                raise ValueError(
                    f"layers: {key} has {rows_here} rows, but layers {which.start} to {which.stop - 1} need {needed}, "
                    f"one per layer with the part {name!r}: pass only the rows of these layers, see `rows_of`"
                )


def run_layers(
    xs: list[jax.Array],
    params: dict,
    buffers: Mapping[str, Any],
    c: DecoderShape,
    contexts: Contexts,
    which: range,
) -> tuple[list[jax.Array], Metrics]:
    """Returns (xs, metrics) after a range of layers. Its complete rounds of the pattern run as one scan; the layers before and
    after them are unrolled, and all are with `scan_layers=False`.

    Args:
      xs: the batch, or parts of it that go through the layers side by side; none reads another.
      params, buffers: as declared by `declare_layers` and `declare_buffers`, reduced to the rows of these layers (`rows_of`).
        Matrices are cast to the dtype of x before the scan.
      contexts: of each x, `LayerContext` without the fields that differ between layers.

    Raises:
      ValueError: a stack has the wrong number of rows.
    """
    check_rows(c, which, params, buffers)
    layers, pattern = layers_of(c), _of_kinds(c.layer_pattern)
    # The first layer in the range that begins a round of the pattern.
    begin = len(c.first_layers)
    begin += -(-max(which.start - begin, 0) // len(pattern)) * len(pattern)
    rounds = max(min(which.stop, c.num_layers - len(c.last_layers)) - begin, 0) // len(pattern) if c.scan_layers else 0
    if rounds == 0:
        begin = which.stop
    end = begin + rounds * len(pattern)
    head, tail = layers[which.start : begin], layers[end : which.stop]
    each, first = _counts(pattern), _counts(head)
    stacks: dict[str, Any] = {}
    for name in _counts(layers[which.start : which.stop]):
        part = parts_of(c)[name]
        weights = {k: cast(params[k], xs[0].dtype) if p.cast else params[k] for k, p in part.declare(c).items()}
        stacks[name] = (weights, buffers.get(name, {}))
        if not c.scan_layers:
            stacks[name] = apart(stacks[name])

    def rows(name: str, start: int, stop: int, step: int) -> Any:
        return jax.tree.map(lambda w: w[start:stop:step], stacks[name])

    def row(name: str, i: int) -> Any:
        return jax.tree.map(lambda w: w[i], stacks[name]) if c.scan_layers else stacks[name][i]

    def of_layers(layers: list[list[Part]], of: Callable[[str, int], Any]) -> list[dict[str, Any]]:
        """Returns each layer's own parameters and buffers, by part: `of(part, which of these layers that have it)`."""
        before, by_layer = Counter(), []
        for parts in layers:
            by_layer.append({p.name: of(p.name, before[p.name]) for p in parts})
            before += _counts([parts])
        return by_layer

    def run(
        xs: list[jax.Array], arrays: list[dict[str, Any]], first: Any, layers: list[list[Part]], in_scan: bool
    ) -> tuple[list[jax.Array], Metrics]:
        metrics = []
        for i, (parts, mine) in enumerate(zip(layers, arrays, strict=True)):
            layer = partial(_layer, parts=parts, contexts=contexts)
            w, b = ({name: pair[k] for name, pair in mine.items()} for k in (0, 1))
            with jax.named_scope("layer"):
                weights = [w]
                if i:  # the backward of the first is the last
                    # Each x with weights of its own: the backward of one part does not wait for that of another.
                    turns = [in_turn(x, w) for x in xs]
                    xs, weights = [x for x, _ in turns], [w for _, w in turns]
                remembering = rematerialised(layer, REMAT[c.remat], parts, in_scan=in_scan)
                xs, layer_metrics = remembering(xs, weights, b, first + i)
            metrics.append(layer_metrics)
        return xs, _stacked(metrics)

    def one_round(xs: list[jax.Array], of_round: Any) -> tuple[list[jax.Array], Metrics]:
        arrays, at_layer = of_round
        return run(xs, arrays, at_layer, pattern, in_scan=rounds > 1)

    def every_round(name: str, i: int) -> Any:
        n, start = each[name], first[name]
        return rows(name, start + i, start + rounds * n, n)

    runs = []
    if head:
        xs, metrics = run(xs, of_layers(head, row), jnp.int32(which.start), head, in_scan=False)
        runs.append(metrics)
    if rounds:
        firsts = begin + len(pattern) * jnp.arange(rounds, dtype=jnp.int32)
        # Scan over exactly the arrays that a layer takes: the backward then reads the same stacks, and the forward does not
        # write a second copy of every weight for it.
        xs, metrics = jax.lax.scan(one_round, xs, (of_layers(pattern, every_round), firsts))
        runs.append(jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), metrics))
    if tail:
        rest = of_layers(tail, lambda name, i: row(name, first[name] + rounds * each[name] + i))
        xs, metrics = run(xs, rest, jnp.int32(end), tail, in_scan=False)
        runs.append(metrics)
    return xs, {name: m.over_layers() for name, m in _concatenated(runs).items()}
