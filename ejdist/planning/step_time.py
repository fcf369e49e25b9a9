"""Seconds of a training step, predicted: a roofline whose terms are matmuls, attention, passes over memory, and collectives.

Shares of the peaks are what steps of this project reached on H200s (benchmarks/results/steps). That other devices reach them
too is an assumption, and so is that half of the time of collectives is hidden under work; of those of a split sequence see
`ejdist/training/attending.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ejdist.costs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Traffic
from ejdist.documents import ONE_DOCUMENT, Documents
from ejdist.experts.halves import waits_alone
from ejdist.mesh import BATCH_AXES, SEQUENCE_AXES
from ejdist.models.part import Costs
from ejdist.models.share import Share
from ejdist.models.stack import counted_parts, narrow_matrices
from ejdist.planning import orthogonal
from ejdist.planning.activations import bytes_of
from ejdist.planning.links import NETWORK, Links
from ejdist.planning.memory import ACTIVATIONS, MOMENTS, Held, Stored, moment_bytes, on_host
from ejdist.planning.share import share_of
from ejdist.precision import PRECISIONS
from ejdist.sequence.schedule import pairs_of_row
from ejdist.training.attending import exchanged, put_together, waited
from ejdist.training.flops import attention_share
from kernels.engines.attention.masks import MaskInfo

# Of the data sheet's FLOP/s: products, products of rows grouped by expert; of its bytes/s.
MATMUL, GROUPED, BANDWIDTH = 0.78, 0.62, 0.85
EXPOSED = 0.5  # of the time of collectives
# Passes over what a part holds at the height of its backward, in a layer's forward and backward.
PASSES = 4
# Of matrices that two halves use: read twice more, a gradient written, and two of them read and their sum written.
AGAIN = 6
# A parameter: read and written with its moments in float32, its gradient, its copy in the compute dtype; less for each byte by
# which the moments are smaller.
STATE_BYTES = 36
# Of the rate of the link to the host, what copies of large arrays reach; an assumption.
TO_HOST = 0.8
KEYS = "keys of other devices, exposed"
TOGETHER = "keys of other devices, put together"
EXCHANGE = "tokens to experts and back, exposed"
NARROW = "making 8-bit operands"
LOGIT_BYTES = 18  # a logit: float32 written and read twice, its gradient written and read twice
# With products in 8 bits: 16 bits written and read twice, its gradient the same, and two operands of it written and read; the
# operand of the matrix's gradient is moved to where it waits.
NARROW_LOGIT_BYTES = 16


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by term, bytes that a device sends along each axis (over slices: `NETWORK`), and FLOPs of the step on
    all devices, by the convention `causal` of `ejdist.training.flops`. uneven: attention of the busiest rank of a sequence over
    the mean. exchange: of tokens to experts and back, (bytes that a device sends, seconds with nothing beside it). experts:
    seconds of gathers of the experts' weights and of their gradients' sums, with nothing beside them. waited: the share of
    these that is exposed."""

    seconds: dict[str, float]
    sent: dict[str, int]
    flops: float
    devices: int
    peak: float
    uneven: float = 1.0
    exchange: tuple[float, float] = (0.0, 0.0)
    experts: float = 0.0
    waited: float = 1.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def waits_exchange(self) -> float:
        """Seconds in which tokens on their way to experts and back are waited for."""
        return self.seconds.get(EXCHANGE, 0.0)

    @property
    def waits_experts(self) -> float:
        """Seconds in which the experts' weights, or sums of their gradients, are waited for."""
        return self.waited * self.experts

    @property
    def attending(self) -> float:
        """Seconds of attention, with those in which it waits for keys."""
        return sum(self.seconds.get(name, 0.0) for name in ("attention", KEYS, TOGETHER))

    @property
    def mfu(self) -> float:
        """The share of the peak that FLOPs take which nothing computes twice."""
        return self.flops / self.total / self.devices / self.peak


def step_time(
    sections: Any,
    of: Held,
    mesh: Any,
    links: Links,
    *,
    pairs: float | None = None,
    documents: Documents = ONE_DOCUMENT,
) -> StepTime:
    """Returns the time of a recipe's step on a mesh, which may be abstract.

    Args:
      links: of the devices.
      pairs: (query, key) pairs of a layer without a window, over the batch; default: those of the documents.
      documents: of the rows: how many pairs they have, and how even the order of tokens makes them.
    """
    s, c, chip = sections, sections.model, links.chip
    share = share_of(s, mesh, links, links.chip.tile, documents)
    length, rows = s.data.sequence_length, s.data.global_batch
    devices, tokens = math.prod(mesh.shape.values()), rows * length
    backward = 1 if of.frozen else 2  # products of a backward with a matrix: its gradient, and its input's
    # FLOPs a token; a token, as if at the rate of plain products; all; all; all, of the busiest rank times ranks
    matmuls = computed = even = visible = attention = quantised = 0.0
    narrow = PRECISIONS.get(c.precision)
    for part, layers in counted_parts(c).items():
        flops = part.flops(c)
        token = layers * flops.token
        matmuls += token
        times = backward + 1 + Costs(part).recomputed(share.remat)
        computed += token * times * (MATMUL / GROUPED if flops.grouped else 1) + layers * part.repeated(c, share)
        if narrow is not None:
            products, numbers = _narrow(part, c)
            computed -= layers * products * times * (1 - 1 / narrow.speed)
            quantised += layers * numbers
        # A backward has five products to the forward's two; that runs again where its output is not kept.
        times = 3.5 + (not share.remat.asked)
        for pair, mask in flops.attends:
            seen = layers * pair * _pairs(rows, length, mask, pairs, documents)
            visible += seen
            even += seen * times
            attention += seen * share.imbalance(mask, documents, flops.of_text) * times
    head = 2 * c.vocab_size * c.model_dim
    head += c.mtp.modules * (head + 4 * c.model_dim**2)
    times = backward + (2 if share.features > 1 else 1)
    matmuls, computed, logit_bytes = matmuls + head, computed + head * times, LOGIT_BYTES
    if narrow is not None and c.precision_head:
        logit_bytes = NARROW_LOGIT_BYTES
        computed -= 2 * (1 + c.mtp.modules) * c.vocab_size * c.model_dim * times * (1 - 1 / narrow.speed)
        quantised += (1 + c.mtp.modules) * c.model_dim
    frozen, adapters = 0, 0
    if of.frozen:
        frozen, adapters = matmuls, 2 * sum(p.whole for p in of.parameters)
        computed += adapters * (3 + (not share.remat.products))
    each = bytes_of(c, share)
    work = sum(n * (each[part].work + each[part].moved) for part, n in counted_parts(c).items())
    passes = PASSES * work + logit_bytes * share.tokens * c.vocab_size // share.features
    if share.halved:  # the other half reads the matrices again, forward and backward, and adds gradients of its own
        passes += AGAIN * share.itemsize * sum(p.used for p in of.parameters if p.path.startswith("layers."))
    # Moments are read and written.
    state = (STATE_BYTES - 2 * 8) * sum(p.local for p in of.parameters) + 2 * moment_bytes(s, of.parameters)
    sent = traffic(s, of, share, mesh, links)
    busy = {
        "matmuls": computed * tokens / devices / (MATMUL * chip.flops),
        "attention": attention / devices / (attention_share(c.head_dim) * chip.flops),
        "passes over memory": (s.accumulation * passes + state) / (BANDWIDTH * chip.bandwidth),
    }
    if quantised:
        assert narrow is not None
        made = 2 if backward == 2 else 1  # of the inputs and outputs of each product, how often an operand is made
        busy[NARROW] = made * quantised * tokens / devices * narrow.passes / (BANDWIDTH * chip.bandwidth)
    if more := orthogonal.flops(s, of.parameters, mesh):
        busy["orthogonal updates"] = more / (MATMUL * chip.flops)
    away = {name: 2 * n / (TO_HOST * chip.to_host) for name, n in on_host(s, of, share).items()}  # there and back
    if MOMENTS in away:
        busy["moments from and to the host"] = away[MOMENTS]  # after the backward, with no work to hide under
    # Of attention's exchange its scheme says how much is waited for.
    between = exchanged(c, share)
    alone = functools.partial(links.alone, sizes=mesh.shape)
    waits = waited(c, share, busy["attention"], alone, s.accumulation) if share.sequence > 1 else 0.0
    moving = links.seconds(sent.without(between, s.accumulation), mesh.shape)
    if ACTIVATIONS in away:
        hidden = s.accumulation * away[ACTIVATIONS]  # under the work of other layers, like collectives
        busy["activations from and to the host, exposed"] = max(EXPOSED * hidden, hidden - sum(busy.values()))
    routed, weights = _exchange(c, share), Traffic()
    exchange = s.accumulation * links.seconds(routed, mesh.shape)
    of_exchange = EXPOSED
    if share.halved:  # no more than without halves
        of_exchange = min(EXPOSED, waits_alone(chip.platform, c.scan_layers, c.experts.shared_dim > 0))
    least = EXPOSED * (moving - exchange) + of_exchange * exchange
    exposed = max(least, moving - sum(busy.values()))
    for p in (p for p in of.parameters if "E" in p.param.dims.split()):
        _weights(weights, s, p, share, mesh.shape, links)
    times = exposed / least if least else 1.0
    flops = (3 * (matmuls + adapters) - frozen) * tokens + 3 * visible
    uneven = attention / even if even else 1.0
    seconds = busy | ({KEYS: waits} if waits else {})
    if exchange:
        seconds[EXCHANGE] = times * of_exchange * exchange
    seconds["collectives, exposed"] = exposed - seconds.get(EXCHANGE, 0.0)
    if joined := put_together(c, share, chip.bandwidth, s.accumulation):
        seconds[TOGETHER] = joined
    routing = s.accumulation * sum(routed.bytes.values()), exchange
    of_experts = s.accumulation * links.seconds(weights, mesh.shape)
    return StepTime(seconds, sent.along(), flops, devices, chip.flops, uneven, routing, of_experts, times * EXPOSED)


@functools.lru_cache(maxsize=256)
def _narrow(part: Any, c: Any) -> tuple[float, float]:
    """Returns of a layer's part and a token (FLOPs of a forward whose operands are in 8 bits, numbers of a token that go into
    and come out of these products)."""
    names, grouped, products, numbers = narrow_matrices(c)[0], part.grouped(c), 0.0, 0.0
    for name, p in part.declare(c).items():
        if name in names:
            inputs = math.prod(n for d, n in zip(p.dims.split(), p.shape, strict=True) if d in p.inputs.split())
            size = p.size * (part.chosen(c) if name in grouped else 1)
            # Of a grouped matrix two products of three are in 8 bits.
            products += 2 * size * (2 / 3 if name in grouped else 1)
            numbers += inputs + size / inputs
    return products, numbers


def _exchange(c: Any, share: Share) -> Traffic:
    """Returns what takes the tokens of a microbatch to their experts and back, in all layers."""
    sent = Traffic()
    if share.experts:
        for part, layers in counted_parts(c).items():
            alone = Costs(part).traffic(c, replace(share, experts=()))
            sent.add_all(Costs(part).traffic(c, share).without(alone), layers)
    return sent


def _pairs(rows: int, length: int, mask: MaskInfo, limit: float | None, documents: Documents) -> float:
    pairs = rows * pairs_of_row(length, mask, documents)
    return pairs if limit is None else min(pairs, limit)


def traffic(sections: Any, of: Held, share: Share, mesh: Any, links: Links) -> Traffic:
    """Returns what a device sends in a step."""
    micro, sent = Traffic(), Traffic()
    for p in of.parameters:
        _weights(micro, sections, p, share, mesh.shape, links)
    for p in of.frozen:
        _weights(micro, sections, p, share, mesh.shape, links, trained=False)
    for part, layers in counted_parts(sections.model).items():
        micro.add_all(Costs(part).traffic(sections.model, share), layers)
    sent.add_all(micro, sections.accumulation)
    sent.add_all(orthogonal.traffic(sections, of.parameters, mesh, links))
    return sent


def _weights(
    sent: Traffic, s: Any, p: Stored, share: Share, sizes: Mapping[str, int], links: Links, trained: bool = True
) -> None:
    """Adds the gathers of a parameter, forward and backward, and the sum of its gradient, if it is trained."""
    b = share.itemsize if p.param.cast and p.path != "embedding" else 4
    b = b if trained else min(b, p.itemsize)
    layers = p.path.startswith("layers.")
    calls = p.param.shape[0] if layers else 1  # a layer is gathered by itself
    # A layer's weights are gathered again in its backward; its gradient goes back once.
    gathers = 2 if layers else 1
    held = p.used
    # What is gathered last is the most of it; what comes over slices comes first, and each device brings a part.
    pieces = [piece for axis in p.over for piece in links.pieces(axis, sizes)]
    for axis, size in sorted(pieces, key=lambda piece: piece[0] == NETWORK):
        held //= size
        sent.add(axis, ALL_GATHER, gathers * b * held * (size - 1), gathers * calls)
        if trained:
            sent.add(axis, REDUCE_SCATTER, b * held * (size - 1), calls)
    if not trained:
        return
    stays = [a for a in (*BATCH_AXES, *SEQUENCE_AXES) if a not in p.over and a not in _experts_of(s, p)]
    for axis in stays:
        part = p.local
        for name, size in links.pieces(axis, sizes):  # between slices goes what is summed inside of each
            sent.add(name, ALL_REDUCE, 2 * b * part * (size - 1) // size, calls)
            part //= size


def _experts_of(s: Any, p: Stored) -> tuple[str, ...]:
    return tuple(s.experts.axes) if "E" in p.param.dims.split() else ()
