"""Seconds of a training step, predicted: a roofline whose terms are matmuls, attention, passes over memory, and collectives.

Shares of the peaks are what steps of this project reached on H200s (benchmarks/results/steps). That other devices reach them
too is an assumption, and so is that half of the time of collectives is hidden under work.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejdist.experts.choice import choose
from ejdist.mesh import AXES, BATCH_AXES, SP, TP
from ejdist.models.part import Part
from ejdist.planning.activations import Share, bytes_of, counted_parts
from ejdist.planning.chips import Chip
from ejdist.planning.memory import Held, Stored, share_of

# Of the data sheet's FLOP/s: products, products of rows grouped by expert, attention; of its bytes/s; of a link's rate.
MATMUL, GROUPED, ATTENTION, BANDWIDTH, LINK = 0.78, 0.5, 0.38, 0.85, 0.45
EXPOSED = 0.5  # of the time of collectives
# Passes over what a part holds at the height of its backward, in a layer's forward and backward.
PASSES = 4
STATE_BYTES = 36  # a parameter: read and written with its moments, its gradient, its copy in the compute dtype
LOGIT_BYTES = 18  # a logit: float32 written and read twice, its gradient written and read twice


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by term, bytes that a device sends along each axis, and FLOPs of the step on all devices, by the
    convention `causal` of `ejdist.training.flops`."""

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


def step_time(sections: Any, of: Held, mesh: Any, chip: Chip, *, per_host: int, pairs: float | None = None) -> StepTime:
    """Returns the time of a recipe's step on a mesh, which may be abstract.

    Args:
      per_host: devices of a host.
      pairs: (query, key) pairs of a layer without a window, over the batch; default: those of one document a row.
    """
    s, c = sections, sections.model
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
        attention += seen * (3.5 + (c.remat == "full"))  # a backward has five products to the forward's two
    head = 2 * c.vocab_size * c.model_dim
    matmuls, computed = matmuls + head, computed + head * (4 if share.features > 1 else 3)
    each = bytes_of(c, share)
    work = sum(n * each[part].work for part, n in counted_parts(c).items())
    passed = s.accumulation * (PASSES * work + LOGIT_BYTES * share.tokens * c.vocab_size // share.features)
    state = STATE_BYTES * sum(p.local for p in of.parameters)
    sent = traffic(s, of.parameters, share, mesh, chip)
    busy = {
        "matmuls": computed * tokens / devices / (MATMUL * chip.flops),
        "attention": attention / devices / (ATTENTION * chip.flops),
        "passes over memory": (passed + state) / (BANDWIDTH * chip.bandwidth),
    }
    moving = sum(n / LINK / rate_of(axis, mesh.shape, chip, per_host) for axis, n in sent.items())
    exposed = max(EXPOSED * moving, moving - sum(busy.values()))
    flops = 3 * (matmuls * tokens + visible)
    return StepTime(busy | {"collectives, exposed": exposed}, sent, flops, devices, chip.flops)


def _pairs(rows: int, length: int, window: int | None, given: float | None) -> float:
    whole = rows * length * (length + 1) / 2
    if window is not None and window < length:
        own = rows * (window * (window + 1) / 2 + (length - window) * window)
        return own if given is None else min(own, given)
    return whole if given is None else given


def rate_of(axis: str, sizes: Mapping[str, int], chip: Chip, per_host: int) -> float:
    """Returns bytes/s of a device along an axis. Devices of a host are neighbours along the last axes; between hosts every
    device of a group has its own way out."""
    if chip.network is None:
        return chip.link
    inner = math.prod(sizes[a] for a in AXES[AXES.index(axis) + 1 :])
    if inner * sizes[axis] <= per_host:
        return chip.link
    return min(chip.link, chip.network * max(1, per_host // inner))


def traffic(sections: Any, parameters: list[Stored], share: Share, mesh: Any, chip: Chip) -> dict[str, int]:
    """Returns axis -> bytes that a device sends along it in a step."""
    sent: Counter[str] = Counter()
    for p in parameters:
        _weights(sent, sections, p, share, mesh.shape)
    for part, layers in counted_parts(sections.model).items():
        for axis, n in _of_layer(sections, part, share, mesh.shape, chip).items():
            sent[axis] += layers * n
    return {axis: int(sent[axis] * sections.accumulation) for axis in AXES if sent[axis]}


def _weights(sent: Counter[str], s: Any, p: Stored, share: Share, sizes: Mapping[str, int]) -> None:
    """Adds the gathers of a parameter, forward and backward, and the sum of its gradient."""
    b = share.itemsize if p.param.cast and p.path != "embedding" else 4
    layers = p.path.startswith("layers.")
    times = 3 if layers else 2  # a layer's weights are gathered again in its backward; its gradient goes back once
    held = p.used
    for axis in p.over:  # the first axis has the least of it left to bring
        held //= sizes[axis]
        sent[axis] += times * b * held * (sizes[axis] - 1)
    stays = [a for a in (*BATCH_AXES, SP) if sizes[a] > 1 and a not in p.over and a not in _experts_of(s, p)]
    for axis in stays:
        sent[axis] += 2 * b * p.local * (sizes[axis] - 1) // sizes[axis]


def _experts_of(s: Any, p: Stored) -> tuple[str, ...]:
    return tuple(s.experts.axes) if "E" in p.param.dims.split() else ()


def _of_layer(s: Any, part: Part, share: Share, sizes: Mapping[str, int], chip: Chip) -> Counter[str]:
    """Returns what one part of one layer sends along each axis in a microbatch, beside its weights."""
    sent: Counter[str] = Counter()
    c, b = s.model, share.itemsize
    x = share.tokens * c.model_dim * b
    again = c.remat in ("attention", "full", "offload")
    if (n := share.features) > 1:  # a sum of the result, and one of the gradient of the input
        sums = 2 + (again and part.name.endswith("attention"))
        sent[TP] += int(sums * 2 * x * (n - 1) / n)
    if part.name.endswith("attention") and (n := share.sequence) > 1:
        heads = (c.num_heads, (c.latent.nope_dim + c.latent.rope_dim + c.latent.value_dim) / 2)
        heads = heads if part.name == "latent_attention" else (c.num_kv_heads, c.head_dim)
        keys = 2 * share.tokens * b * int(math.prod(heads)) // share.features
        window = part.flops(c).window
        own = s.data.sequence_length // n
        hops = n - 1 if window is None or share.gathers else min(n - 1, -(-window // own))
        forward = 2 if c.remat == "full" else 1
        sent[SP] += (forward + 1) * keys * hops + 4 // b * keys * (hops if share.gathers else hops + 1)
    if part.name == "experts" and (n := share.experts) > 1:
        for axis, size in _by_axis(s.experts.axes, sizes):
            sent[axis] += int(_experts(s, share, chip, n) * (size - 1) / (n - 1))
    return sent


def _by_axis(axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(a, sizes[a]) for a in axes if sizes[a] > 1]


def _experts(s: Any, share: Share, chip: Chip, ranks: int) -> float:
    """Returns the bytes of tokens that go to their experts and back, forward and backward; there a second time under remat."""
    e, row = s.model.experts, s.model.model_dim * share.itemsize
    times = 4 + (s.model.remat != "none")
    scheme = s.experts.dispatch
    scheme = _chosen(ranks, share, e.top_k, s.model.model_dim, chip.kind) if scheme == "auto" else scheme
    if scheme == "all_gather":
        return times * share.tokens * row * (ranks - 1)
    rows = share.tokens * e.top_k * (share.buffer if scheme != "ragged_all_to_all" else 1)
    crowded = max(ranks, 4) / 4 if chip.network is None else 1  # on a ring of devices most rows pass several links
    return times * rows * row * (ranks - 1) / ranks * crowded


@functools.lru_cache(maxsize=1024)
def _chosen(ranks: int, share: Share, top_k: int, width: int, kind: str) -> str:
    return choose(
        axis_sizes=(ranks,), tokens=share.tokens, top_k=top_k, width=width, itemsize=share.itemsize, buffer=share.buffer,
        hosts=1, device_kind=kind,
    ).scheme  # fmt: skip
