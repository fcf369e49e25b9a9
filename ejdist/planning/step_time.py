"""Seconds of a training step, predicted: a roofline whose terms are matmuls, attention, passes over memory, and collectives.

Shares of the peaks are what steps of this project reached on H200s (benchmarks/results/steps). That other devices reach them
too is an assumption, and so is that half of the time of collectives is hidden under work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejdist.experts.choice import choose
from ejdist.mesh import BATCH_AXES, SP, TP
from ejdist.models.part import Part
from ejdist.planning.activations import Share, bytes_of, counted_parts
from ejdist.planning.links import NETWORK, Links, Traffic
from ejdist.planning.memory import Held, Stored, share_of

# Of the data sheet's FLOP/s: products, products of rows grouped by expert, attention; of its bytes/s.
MATMUL, GROUPED, ATTENTION, BANDWIDTH = 0.78, 0.5, 0.38, 0.85
EXPOSED = 0.5  # of the time of collectives
# Passes over what a part holds at the height of its backward, in a layer's forward and backward.
PASSES = 4
STATE_BYTES = 36  # a parameter: read and written with its moments, its gradient, its copy in the compute dtype
LOGIT_BYTES = 18  # a logit: float32 written and read twice, its gradient written and read twice


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by term, bytes that a device sends along each axis (over slices: `NETWORK`), and FLOPs of the step on
    all devices, by the convention `causal` of `ejdist.training.flops`."""

    seconds: dict[str, float]
    sent: dict[str, int]
    flops: float
    devices: int
    peak: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        """The share of the peak that FLOPs take which nothing computes twice."""
        return self.flops / self.total / self.devices / self.peak


def step_time(sections: Any, of: Held, mesh: Any, links: Links, *, pairs: float | None = None) -> StepTime:
    """Returns the time of a recipe's step on a mesh, which may be abstract.

    Args:
      links: of the devices.
      pairs: (query, key) pairs of a layer without a window, over the batch; default: those of one document a row.
    """
    s, c, chip = sections, sections.model, links.chip
    share, length, rows = share_of(s, mesh), s.data.sequence_length, s.data.global_batch
    devices, tokens = math.prod(mesh.shape.values()), rows * length
    again = c.remat in ("attention", "full", "offload")
    matmuls = computed = attention = visible = (
        0.0  # FLOPs a token; a token, as if at the rate of plain products; all; all
    )
    for part, layers in counted_parts(c).items():
        flops = part.flops(c)
        token, seen = layers * flops.token, layers * flops.pair * _pairs(rows, length, flops.window, pairs)
        matmuls += token
        recomputed = {"mlp": 2 / 3 * again, "experts": float(c.remat != "none")}.get(part.name, float(again))
        computed += token * (3 + recomputed) * (MATMUL / GROUPED if part.name == "experts" else 1)
        visible += seen
        uneven = imbalance(s.sequence.order, share.sequence, flops.window, length)
        attention += seen * uneven * (3.5 + (c.remat == "full"))  # a backward has five products to the forward's two
    head = 2 * c.vocab_size * c.model_dim
    matmuls, computed = matmuls + head, computed + head * (4 if share.features > 1 else 3)
    each = bytes_of(c, share)
    work = sum(n * each[part].work for part, n in counted_parts(c).items())
    passed = s.accumulation * (PASSES * work + LOGIT_BYTES * share.tokens * c.vocab_size // share.features)
    state = STATE_BYTES * sum(p.local for p in of.parameters)
    sent = traffic(s, of.parameters, share, mesh, links)
    busy = {
        "matmuls": computed * tokens / devices / (MATMUL * chip.flops),
        "attention": attention / devices / (ATTENTION * chip.flops),
        "passes over memory": (passed + state) / (BANDWIDTH * chip.bandwidth),
    }
    moving = links.seconds(sent, mesh.shape)
    exposed = max(EXPOSED * moving, moving - sum(busy.values()))
    flops = 3 * (matmuls * tokens + visible)
    return StepTime(busy | {"collectives, exposed": exposed}, sent.along(), flops, devices, chip.flops)


def _pairs(rows: int, length: int, window: int | None, given: float | None) -> float:
    whole = rows * length * (length + 1) / 2
    if window is not None and window < length:
        own = rows * (window * (window + 1) / 2 + (length - window) * window)
        return own if given is None else min(own, given)
    return whole if given is None else given


def traffic(sections: Any, parameters: list[Stored], share: Share, mesh: Any, links: Links) -> Traffic:
    """Returns what a device sends in a step."""
    micro, sent = Traffic(), Traffic()
    for p in parameters:
        _weights(micro, sections, p, share, mesh.shape, links)
    for part, layers in counted_parts(sections.model).items():
        micro.add_all(_of_layer(sections, part, share, mesh.shape, links), layers)
    sent.add_all(micro, sections.accumulation)
    return sent


def _weights(sent: Traffic, s: Any, p: Stored, share: Share, sizes: Mapping[str, int], links: Links) -> None:
    """Adds the gathers of a parameter, forward and backward, and the sum of its gradient."""
    b = share.itemsize if p.param.cast and p.path != "embedding" else 4
    layers = p.path.startswith("layers.")
    calls = p.param.shape[0] if layers else 1  # a layer is gathered by itself
    # A layer's weights are gathered again in its backward; its gradient goes back once.
    gathers = 2 if layers else 1
    held = p.used
    # What is gathered last is the most of it; what comes over slices comes first, and each device brings a part.
    pieces = [piece for axis in p.over for piece in links.pieces(axis, sizes)]
    for axis, size in sorted(pieces, key=lambda piece: piece[0] == NETWORK):
        held //= size
        sent.add(axis, "all_gather", gathers * b * held * (size - 1), gathers * calls)
        sent.add(axis, "reduce_scatter", b * held * (size - 1), calls)
    stays = [a for a in (*BATCH_AXES, SP) if a not in p.over and a not in _experts_of(s, p)]
    for axis in stays:
        part = p.local
        for name, size in links.pieces(axis, sizes):  # between slices goes what is summed inside of each
            sent.add(name, "all_reduce", 2 * b * part * (size - 1) // size, calls)
            part //= size


def _experts_of(s: Any, p: Stored) -> tuple[str, ...]:
    return tuple(s.experts.axes) if "E" in p.param.dims.split() else ()


def _of_layer(s: Any, part: Part, share: Share, sizes: Mapping[str, int], links: Links) -> Traffic:
    """Returns what one part of one layer sends in a microbatch, beside its weights."""
    sent = Traffic()
    c, b = s.model, share.itemsize
    x = share.tokens * c.model_dim * b
    again = c.remat in ("attention", "full", "offload")
    if (n := share.features) > 1:  # a sum of the result, and one of the gradient of the input
        sums = 2 + (again and part.name.endswith("attention"))
        sent.add(TP, "all_reduce", int(sums * 2 * x * (n - 1) / n), sums)
    if part.name.endswith("attention") and share.sequence > 1:
        _keys(sent, s, part, share)
    if part.name == "experts" and share.experts > 1:
        _experts(sent, s, share, sizes, links)
    return sent


def _keys(sent: Traffic, s: Any, part: Part, share: Share) -> None:
    """Adds keys and values over sp, forward and backward, and their gradients in float32."""
    c, b, n = s.model, share.itemsize, share.sequence
    heads = (c.num_heads, (c.latent.nope_dim + c.latent.rope_dim + c.latent.value_dim) / 2)
    heads = heads if part.name == "latent_attention" else (c.num_kv_heads, c.head_dim)
    keys = 2 * share.tokens * b * int(math.prod(heads)) // share.features
    forward = 2 if c.remat == "full" else 1
    hops = ring_hops(s.sequence.order, n, s.data.sequence_length // n, part.flops(c).window)
    if share.gathers and hops:
        sent.add(SP, "all_gather", (forward + 1) * keys * (n - 1), 2 * (forward + 1))
        sent.add(SP, "reduce_scatter", 4 // b * keys * (n - 1), 2)
    elif hops:
        sent.add(SP, "permute", (forward + 1) * keys * hops, 2 * (forward + 1) * hops)
        sent.add(SP, "permute", 4 // b * keys * (hops + 1), 2 * (hops + 1))


def ring_hops(order: str, ranks: int, own: int, window: int | None) -> int:
    """Returns how often keys are passed on: to every rank, or to those whose queries a window lets see them."""
    if window is None or order == "striped":
        return ranks - 1
    if order == "contiguous":
        return min(ranks - 1, -(-(window - 1) // own))
    # A rank's two parts follow parts of both neighbours, so a window is met on either side.
    return min(ranks - 1, 2 * -(-(window - 1) // (own // 2)))


def imbalance(order: str, ranks: int, window: int | None, length: int) -> float:
    """Returns the time of causal attention over that of an even split: of contiguous parts the last rank sees all others, and a
    ring waits for it."""
    if order != "contiguous" or ranks == 1 or (window is not None and window < length):
        return 1.0
    return (2 * ranks - 1) / ranks


def _experts(sent: Traffic, s: Any, share: Share, sizes: Mapping[str, int], links: Links) -> None:
    """Adds the tokens that go to their experts and back, forward and backward; there a second time under remat."""
    e, row = s.model.experts, s.model.model_dim * share.itemsize
    again = int(s.model.remat != "none")
    scheme = dispatch_of(s, share, links)
    pieces = [piece for a in s.experts.axes for piece in links.pieces(a, sizes)]
    gathered = share.tokens
    # What comes over slices comes first, and each device brings its own.
    for axis, size in sorted(pieces, key=lambda piece: piece[0] != NETWORK):
        if scheme == "all_gather":
            bytes_, gathered = gathered * row * (size - 1), gathered * size
            sent.add(axis, "all_gather", (2 + again) * bytes_, 2 + again)
            sent.add(axis, "reduce_scatter", 2 * bytes_, 2)
            continue
        rows = share.tokens * e.top_k * (share.buffer if scheme != "ragged_all_to_all" else 1)
        collective = "ragged_all_to_all" if scheme == "ragged_all_to_all" else "all_to_all"
        # Of the rows that are spread over all ranks, those that go to another place along this axis.
        sent.add(axis, collective, (4 + again) * rows * row * (size - 1) / size, 4 + again)


def dispatch_of(s: Any, share: Share, links: Links) -> str:
    """Returns the scheme by which tokens get to their experts: `experts.dispatch`, or what auto chooses."""
    if s.experts.dispatch != "auto":
        return s.experts.dispatch
    return _chosen(share.experts, share, s.model.experts.top_k, s.model.model_dim, links.chip.kind)


@functools.lru_cache(maxsize=1024)
def _chosen(ranks: int, share: Share, top_k: int, width: int, kind: str) -> str:
    return choose(
        axis_sizes=(ranks,), tokens=share.tokens, top_k=top_k, width=width, itemsize=share.itemsize, buffer=share.buffer,
        hosts=1, device_kind=kind,
    ).scheme  # fmt: skip
