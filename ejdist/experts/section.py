"""The `experts` section of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ejdist.experts.halves import NONE, OVERLAPS
from ejdist.experts.narrow import BF16, PRECISIONS, check_precision
from ejdist.experts.rows import MOST_CHUNKS
from ejdist.experts.schemes import SCHEMES, fitting
from ejdist.layout import Axes
from ejdist.mesh import BATCH_AXES, EP, SEQUENCE_AXES
from ejdist.sections import operational


@dataclass
class ExpertsSection:
    """The `experts` section of a recipe: how experts are sharded and tokens dispatched to them; see `ejdist.moe`."""

    # Mesh axes that experts are sharded over: ep, or axes that also shard the sequence or parameters.
    axes: tuple[str, ...] = operational((EP,))
    # How tokens get to their experts: all_gather, all_to_all, ragged_all_to_all, two_level (of two axes), local (of one
    # device); auto logs its choice and why.
    dispatch: str = operational("auto")
    buffer: float = operational(1.25)  # rows that a pass can hold, as a multiple of the balanced load
    # Parts of a pass; one is sent while another is multiplied. null: by the expected time; the log says why.
    chunks: int | None = operational(1)
    # What runs beside an exchange: none, or halves, where two halves of the batch go through the layers side by side, and one
    # is sent while the other attends and multiplies.
    overlap: str = operational(NONE)
    # Most devices along these axes that the experts of a token are on; on another mesh the router chooses others. null: any.
    max_ranks: int | None = None
    # What travels in 8 bits: bf16, nothing, all in its own dtype; fp8, tokens and the experts' results in the forward;
    # fp8_tokens, tokens alone; fp8_both, tokens, results and gradients.
    exchange: str = BF16
    capacity: float | None = None  # most tokens per expert, as a multiple of the balanced load; null: none is dropped
    # Steps between rows of tables.jsonl, which hold the tokens of each expert; 0: never.
    load_every: int = operational(10)

    def __post_init__(self) -> None:
        self.axes = tuple(self.axes)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        unknown = [a for a in self.axes if a not in (*BATCH_AXES, *SEQUENCE_AXES)]
        if unknown or not self.axes or len(set(self.axes)) < len(self.axes):
            known = ", ".join((*BATCH_AXES, *SEQUENCE_AXES))
            raise ValueError(f"experts.axes = {list(self.axes)} must be different axes that shard the tokens: {known}")
        if self.dispatch != "auto" and self.dispatch not in SCHEMES:
            raise ValueError(f"experts.dispatch = {self.dispatch!r} is unknown; use auto, {', '.join(SCHEMES)}")
        for key, value in (("buffer", self.buffer), ("capacity", self.capacity)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"experts.{key} must be a number above 0, got {value}")
        check_precision("experts.exchange", self.exchange)
        if self.overlap not in OVERLAPS:
            raise ValueError(f"experts.overlap = {self.overlap!r} is unknown; use one of {', '.join(OVERLAPS)}")
        if self.overlap != NONE and self.capacity is not None:
            raise ValueError(
                f"experts.overlap = {self.overlap!r} sends one half of a batch before the other has chosen its experts, and "
                f"experts.capacity = {self.capacity} is of the choices of both: leave out one of the two"
            )
        if self.max_ranks is not None and self.max_ranks < 1:
            raise ValueError(f"experts.max_ranks must be at least 1, or null for any, got {self.max_ranks}")
        if self.chunks is not None and not 1 <= self.chunks <= MOST_CHUNKS:
            raise ValueError(
                f"experts.chunks must be at least 1 and at most {MOST_CHUNKS} (each is compiled on its own), got {self.chunks}"
            )
        if self.load_every < 0:
            raise ValueError(f"experts.load_every must be 0 or positive, got {self.load_every}")

    def overlaps(self, sizes: Mapping[str, int], mixed: bool) -> bool:
        """Returns whether two halves go through the layers side by side on a mesh of these sizes: where the model has experts
        (`mixed`) and they are over several devices, as else nothing is exchanged."""
        return self.overlap != NONE and mixed and any(sizes.get(axis, 1) > 1 for axis in self.axes)

    def check_rows(self, rows: int, sizes: Mapping[str, int], mixed: bool, where: str) -> None:
        """Raises ValueError where a device's rows of a microbatch are too few for `overlap`, on a mesh of these sizes; mixed:
        whether the model has experts; where: the keys that the rows follow from, and their values."""
        if self.overlaps(sizes, mixed) and rows < 2:
            raise ValueError(
                f"experts.overlap = {self.overlap!r} halves the rows of a device, which has {rows} of a microbatch ({where}): "
                f"give at least two, or experts.overlap={NONE}"
            )

    def refusal(self, sizes: Sequence[int]) -> str | None:
        """Returns why tokens cannot get by `dispatch` to experts over axes of these sizes; None where they can."""
        ranks = math.prod(sizes)
        if self.dispatch not in SCHEMES or ranks == 1:
            return None
        if (needs := SCHEMES[self.dispatch]().refusal(tuple(sizes))) is None:
            return self.precision_refusal()
        return (
            f"experts.dispatch = {self.dispatch!r} is for experts on {needs}, and experts.axes = {list(self.axes)} has {ranks} "
            "devices; leave it out, or use auto"
        )

    def precision_refusal(self) -> str | None:
        """Returns why rows of `exchange` cannot travel by `dispatch` over any devices; None where they can."""
        scheme = SCHEMES[self.dispatch]() if self.dispatch in SCHEMES else None
        does = None if scheme is None else scheme.precision_refusal(self.exchange)
        if scheme is None or does is None:
            return None
        rows = [name for name in PRECISIONS if scheme.precision_refusal(name) is None]
        ways = fitting((2,) * len(self.axes), self.exchange)
        return (
            f"experts.exchange = {self.exchange!r} sends sums in 8 bits, but experts.dispatch = {self.dispatch!r} {does}; use "
            f"experts.exchange={' or '.join(rows)}, or experts.dispatch={' or '.join(ways)}"
        )

    def check_dispatch(self, sizes: Mapping[str, int], mixed: bool) -> None:
        """Raises ValueError where tokens cannot get to experts on a mesh of these sizes; mixed: whether the model has any."""
        if mixed and (why := self.refusal([sizes.get(axis, 1) for axis in self.axes])) is not None:
            raise ValueError(why)

    def table(self, table: Axes) -> Axes:
        """Returns the table of dims to axes, with the experts on this section's axes."""
        return {**table, "E": self.axes}
