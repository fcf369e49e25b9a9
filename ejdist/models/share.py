"""What a device has of a microbatch, and how: what the parts of a layer are asked for their costs with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ejdist.costs import ALL_REDUCE, Traffic, declared
from ejdist.documents import ONE_DOCUMENT, Documents
from ejdist.experts.cost import Costed, ExchangeShape
from ejdist.experts.narrow import BF16
from ejdist.mesh import CP, SP, TP
from ejdist.models.remat import Remat
from ejdist.order import Order
from ejdist.sequence.cost import AttentionShape, SchemeBytes, chunks_of_documents, hops_of_documents, needed_hops
from ejdist.sequence.halo import reach_of, sent
from ejdist.sequence.latents import sends_latents
from ejdist.sequence.schedule import imbalance
from ejdist.sequence.scheme import Scheme
from ejdist.sequence.way import few_hops
from kernels.engines.attention.masks import MaskInfo
from kernels.ops.flash_attention import joins

_ATTENDING = ("forward", "backward")


@dataclass(frozen=True)
class Share:
    """What a device has of a microbatch, on a mesh.

    Attributes:
      tokens: rows times the part of the sequence.
      itemsize: bytes of a number in the compute dtype.
      length: tokens of the whole sequence.
      remat: what the backward finds kept.
      scheme: how keys and values travel. order: how tokens lie on the ranks of the sequence, and how many these are.
      outer: how many groups of the sequence's ranks there are along cp; each has its ranks along sp.
      dispatch: how tokens get to their experts.
      features: devices that heads and features are split over.
      experts: (axis, devices along it) that experts are split over, the outermost first; none for one device.
      buffer: `experts.buffer` of a recipe. max_ranks: most ranks that a token's experts are on; None: any.
      exchanged: `experts.exchange`, the precision of the rows that travel.
      frozen: whether the model's matrices are frozen beside adapters.
      tile: tokens of a tile of kernels that add a hop's results in place; None where the device has no such kernels.
      documents: of the rows.
      met: of a batch that is known, how often the keys of a rank are sent on so that all its hops are made, and
        `AttentionShape.chunks`; layers with a window may need less. None: what is expected of `documents`.
      torus: see `AttentionShape`.
      halved: whether two halves of the tokens go through the layers side by side, see `ejdist.experts.halves`.
    """

    tokens: int
    itemsize: int
    length: int
    remat: Remat
    scheme: Scheme
    order: Order
    dispatch: Costed
    outer: int = 1
    features: int = 1
    experts: tuple[tuple[str, int], ...] = ()
    buffer: float = 1.25
    max_ranks: int | None = None
    exchanged: str = BF16
    frozen: bool = False
    tile: int | None = None
    documents: Documents = ONE_DOCUMENT
    met: tuple[int, tuple[int, int]] | None = None
    torus: bool = False
    halved: bool = False

    @property
    def half(self) -> int:
        """Tokens of the larger half of the rows."""
        own = self.length // self.sequence
        return self.tokens - self.tokens // own // 2 * own

    @property
    def sequence(self) -> int:
        """Devices that the sequence is split over."""
        return self.order.shards

    @property
    def over(self) -> tuple[tuple[str, int], ...]:
        """(axis, devices along it) that the sequence is split over, the outermost first; never none."""
        over = tuple((a, n) for a, n in ((CP, self.outer), (SP, self.sequence // self.outer)) if n > 1)
        return over or ((SP, 1),)

    def imbalance(self, mask: MaskInfo, documents: Documents, of_text: bool = False) -> float:
        """Returns the pairs of the busiest rank over the mean, by the rules of a mask inside such documents; `of_text`: of
        ranks that each attend for a run of the text."""
        order = Order("contiguous", self.sequence) if of_text else self.scheme.uneven(self.order, self.over)
        return imbalance(order, self.length, mask, documents)

    def adds_in_place(self, width: int) -> bool:
        """Returns whether a ring of plain attention adds in place, with heads of that width."""
        run = self.length // self.order.multiple if self.order.in_parts else self.order.stripe
        return self.tile is not None and width <= self.tile and run % self.tile == 0

    def scheme_bytes(self, shape: AttentionShape) -> SchemeBytes:
        """Returns what the scheme holds on a rank of at least two. Raises `Undeclared` where it does not say."""
        what = "the ejdist.sequence.cost.SchemeBytes of an AttentionShape"
        return declared(self.scheme, "memory", _ATTENDING, what)(shape)

    def scheme_traffic(self, shape: AttentionShape, mask: MaskInfo) -> Traffic:
        """Returns what the scheme sends for a layer, forward and backward.

        Args:
          mask: the rules by which pairs attend inside a document, without arrays.

        Raises:
          Undeclared: the scheme declares no cost.
        """
        hops = needed_hops(self.order, self.length, mask)
        halo = sent(self.order, self.length, reach_of(mask, self.length))
        if self.met is None:
            by_batch = hops_of_documents(self.order, self.length, mask, self.documents)
            chunks = chunks_of_documents(self.order, self.length, mask, self.documents)
        else:
            by_batch, chunks = min(self.met[0], hops), self.met[1]
        shape = replace(
            shape,
            hops=hops,
            by_batch=by_batch,
            few_hops=few_hops(self.order, self.length // self.order.shards),
            halo=halo,
            torus=self.torus,
            chunks=chunks,
        )
        shape = replace(shape, forwards=1 + (not self.remat.asked), tiles=self._tiles(shape, mask))
        cost = declared(self.scheme, "cost", _ATTENDING, "the ejdist.costs.Traffic of an AttentionShape")(shape)
        return cost.hidden(self.scheme.waited(shape), self.scheme.passes(shape))

    def _tiles(self, shape: AttentionShape, mask: MaskInfo) -> int:
        """Returns `AttentionShape.tiles`: those of a call that `ejdist.sequence.gathered` takes."""
        widths = (shape.query // shape.heads, shape.value // shape.kv_heads)
        widths = tuple(n // (self.tokens * self.itemsize) for n in widths)
        plain = not set(mask.used) - {"causal"} and not shape.latents and self.itemsize == 2
        if self.tile is None or not plain or not joins(*widths) or not self.adds_in_place(max(widths)):
            return 0
        return self.tokens // self.tile

    def attention(self, query: int, key: int, value: int, heads: int, kv_heads: int) -> AttentionShape:
        """Returns the attention of a layer as a scheme costs it.

        Args:
          query, key, value: bytes of a head of one token. heads, kv_heads: of the whole layer.
        """
        heads, kv_heads = heads // self.features, max(1, kv_heads // self.features)
        queries, keys = heads * self.tokens, kv_heads * self.tokens
        return AttentionShape(
            self.over, self.sequence - 1, query * queries, key * keys, value * keys, value * queries, 4 * queries,
            heads, kv_heads, self.itemsize,
        )  # fmt: skip

    def with_latents(self, shape: AttentionShape, latents: int, flops: int) -> AttentionShape:
        """Returns the attention of a layer with latents that travel, where they do.

        Args:
          latents: bytes of the latents of one token. flops: of making a head's key and value of one of them.
        """
        made = replace(shape, latents=latents * self.tokens, expansion=flops * shape.kv_heads * self.tokens)
        return made if self.sequence > 1 and sends_latents(self.scheme, made) else shape

    def exchange(self, top_k: int, width: int, hidden: int, num_experts: int) -> ExchangeShape:
        """Returns the exchange of a layer as a dispatch costs it: choices of a token, numbers of its features, and numbers of a
        row between the products of an expert on this device."""
        again = int(not self.remat.rest)
        return ExchangeShape(
            self.experts, self.tokens, top_k, width, hidden, self.itemsize, self.buffer, again, num_experts, self.max_ranks,
            self.exchanged,
        )  # fmt: skip

    def sums_over_features(self, model_dim: int, sums: int) -> Traffic:
        """Returns the traffic of that many sums of [tokens, model_dim] over the devices that features are split over."""
        sent, n = Traffic(), self.features
        if n > 1:
            x = self.tokens * model_dim * self.itemsize
            sent.add(TP, ALL_REDUCE, int(sums * 2 * x * (n - 1) / n), sums)
        return sent


def hides(scheme: Scheme) -> bool:
    """Returns `Scheme.hides`. Raises `Undeclared`, naming the scheme, where it does not say."""
    return declared(scheme, "hides", _ATTENDING, "whether transfers run beside work")
