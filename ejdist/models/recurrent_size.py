"""What a recurrent mixer costs, which follows from how many numbers it has: FLOPs, bytes, and what ranks send."""

from __future__ import annotations

from dataclasses import dataclass

from ejdist.costs import Traffic
from ejdist.models.config import DecoderShape
from ejdist.models.model import Flops
from ejdist.models.remat import PartBytes
from ejdist.models.share import Share
from ejdist.sequence.cost import states_sent
from kernels.engines.scan.chunks import BYTES_TOGETHER

LANES = 128  # of TPUs; tokens of a chunk there
WIDEST_VALUE = 512  # channels of a value that kernels take; of a key as many as lanes
LEAST = 16  # tokens of a chunk of those of GPUs in float32
LONGER = 256  # the same of a recurrence with one decay a head and no delta rule, in a narrow dtype


def in_lanes(width: int) -> int:
    """Returns a width as kernels of delta rules and of decays of channels have it on TPUs."""
    return -(-width // LANES) * LANES


@dataclass(frozen=True)
class Size:
    """How many numbers a layer has, of all heads.

    Attributes:
      projected: results a token of the input's projections. out: of the recurrence.
      reads: what the recurrence reads a token. convolved, taps: channels of the convolution before it, and tokens of each.
      state: of the states. map: of what a run of tokens does to them. products: with a state's entry, a token.
      wide, held: a token's numbers in an array of chunks that XLA computes at once, and how many such arrays a backward has,
        as counted in programs for GPUs. repeated: those in float32, of key heads for each value head.
      beside, exact: a token's numbers that a backward by kernels has beside what the recurrence reads and returns, and their
        gradients: in the compute dtype, and in float32. turned: those of kernels for GPUs alone, in the compute dtype.
      chunk: tokens between the states that kernels for GPUs store.
      key, value: widths of a head; kernels take those up to LANES and WIDEST_VALUE.
      decays: numbers a token that the recurrence reads in float32, beside `reads`.
      stored, inverses: what kernels of TPUs keep for their backward: numbers of the states at the ends of chunks, as they lie
        there, and a token's of the inverses of a delta rule. lasting: tokens of such a chunk in a narrow dtype.
      pairs: heads of which kernels for GPUs keep weights of pairs, inverses and what decays leave. squares: the first two.
      narrow: results a token of projections that every device has whole. raised: what products of them make. lifted: numbers
        that those products multiply with.
    """

    projected: int
    out: int
    reads: int
    state: int
    map: int
    products: int
    wide: int
    held: int
    convolved: int = 0
    taps: int = 1
    repeated: int = 0
    beside: int = 0
    exact: int = 0
    turned: int = 0
    chunk: int = 64
    key: int = 0
    value: int = 0
    decays: int = 0
    stored: int = 0
    inverses: int = 0
    pairs: int = 0
    squares: int = 0
    lasting: int = LANES
    narrow: int = 0
    raised: int = 0
    lifted: int = 0

    def flops(self, c: DecoderShape) -> Flops:
        """Returns the FLOPs of the projections, of the convolution, and of the states, as if they were made token by token."""
        matmuls = c.model_dim * (self.projected + self.narrow + self.out) + self.lifted
        return Flops(2 * (matmuls + self.taps * self.convolved + self.products * self.state))

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """Returns the bytes: the result is kept where attention's is, so that no recurrence runs twice."""
        x, part = share.tokens * c.model_dim * share.itemsize, share.tokens / share.features
        made = self.projected + self.raised + share.features * self.narrow
        projected, out, reads, beside = (
            int(part * share.itemsize * n) for n in (made, self.out, self.reads, self.beside)
        )
        decays, exact = (int(4 * part * n) for n in (self.decays, self.exact))
        # What is projected, what is read of it and its gradient; four as wide as the result: it, what it becomes, its gate and
        # its gradient; decays of channels, and their sums.
        work = 3 * reads + 4 * out + x + 2 * decays + beside + exact
        # XLA has chunks in float32, and of the convolution all tokens.
        chunks = self.held * min(int(4 * part * self.wide), BYTES_TOGETHER)
        by_xla = chunks + int(4 * part * 2 * (self.convolved + self.repeated))
        tokens = (LEAST, LANES) if share.itemsize == 4 else (self.chunk, self.lasting)
        ends = int(part * share.itemsize * (2 * self.state / tokens[0] + self.turned))  # and the gradients there
        kept = int(part * share.itemsize * (self.stored / tokens[1] + self.inverses))
        square = 2 * tokens[0] * share.itemsize
        pairs = int(part * (self.pairs * (square + 4 * (2 + 1 / tokens[0])) + self.squares * square))
        # Kernels pass over what they read and make several times: as much in all as XLA's chunks, by measured steps.
        moved = max(0, 2 * (projected + reads + decays) + 3 * (out + x) + by_xla - work)
        by_kernels = self.key <= LANES and self.value <= WIDEST_VALUE
        return PartBytes(
            0,
            out,
            products=projected + x,
            rest=reads + decays + out + x,
            work=work,
            moved=moved,
            tpu_rest=kept,
            gpu_rest=pairs if by_kernels else 0,
            gpu_work=ends if by_kernels else by_xla,
            gpu_beside=4 * x,  # the residual stream, its gradient, what the part's norm reads, and zeros of sums
            tpu_work=0 if by_kernels else by_xla,
        )

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        """Returns sums over heads, as attention has them, and of the gradient of what every device has whole; and states with
        what multiplies them, or tokens, between ranks: forward, once more where nothing is kept, and backward."""
        sent = share.sums_over_features(c.model_dim, 3 - share.remat.products)
        if self.narrow:
            sent.add_all(share.sums_over_features(self.narrow, 1))
        if not share.order.carried:  # with one the layer is refused when it runs
            rows, own = max(1, share.tokens * share.sequence // share.length), share.length // share.sequence

            def passed(state: int, token: int, exact: int = 0) -> Traffic:
                """Returns the traffic of maps of `state` float32 numbers, or of tokens of `token` numbers and `exact` float32
                ones."""
                numbers = share.tokens * (token * share.itemsize + 4 * exact)
                return states_sent(share.order, own, 4 * rows * state // share.features, numbers // share.features)

            passes = 3 - share.remat.rest
            sent.add_all(passed(self.map, self.reads + self.out, self.decays), passes)
            if self.convolved:
                window = (self.taps - 1) * self.convolved
                sent.add_all(passed(window, 2 * self.convolved), passes)
        return sent
