"""The `sequence` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ejdist.order import AUTO, NAMES, STRIPES, Order, order_for
from ejdist.sections import operational
from ejdist.sequence import exchange
from ejdist.sequence.cost import ALWAYS, NEVER
from ejdist.sequence.group_cast import BUFFER
from ejdist.sequence.schemes import SCHEMES, options_of, scheme_of
from ejdist.sequence.way import check_hops
from ejdist.sequence.windows import ByWindow, by_window

FLOAT32 = "float32"
FIRST_BATCH = "first_batch"  # what `sequence.verify` compares


@dataclass
class SequenceSection:
    """The `sequence` section of a recipe."""

    # How a split sequence attends: ring, all_gather, ulysses (heads over sp, another scheme over cp), halo
    # (for windows, else a ring), group_cast (each device gets the keys that its documents need, and of layers with sparse
    # attention, which gather all with any other, the blocks that are selected); auto: what is expected to be fastest, and logs
    # why.
    scheme: str = operational("ring")
    # How layers with a window or chunks attend; null: halo where that sends less than sequence.scheme.
    window_scheme: str | None = operational(None)
    outer: str | None = operational(None)  # the scheme over cp, around ulysses over sp; null: ring
    # In how many groups ulysses and all_gather exchange heads, each group while the one before attends; more need less memory.
    # null: one with ulysses, and with all_gather as many as keep a GPU busy.
    head_groups: int | None = operational(None)
    # Dtype of the sums of keys' gradients on their way around a ring: float32; bfloat16 for half the bytes, rounded each hop.
    gradients: str = FLOAT32
    # Hops of a ring: mask, all that the mask's rules leave; batch, of these the ones that a batch's documents need; auto: batch
    # where a device has one run of the text (sequence.order=contiguous).
    hops: str = operational(AUTO)
    # Of a ring over cp and sp: 2, one ring over sp, inside of a host, and one over cp beside it; 1: one over all.
    levels: int = operational(1)
    # Directions of a ring: 2, half of the heads each way round; 1; auto: 2 where links have two, on TPUs, and each device needs
    # the keys of all others.
    directions: str = operational(AUTO)
    # Tokens of others that a device has room for with group_cast, over its own; what a batch needs beyond it takes further
    # passes.
    buffer: float = operational(BUFFER)
    # Whether latent attention sends its latents, of which each device makes keys and values again, or keys and values: always,
    # never; auto: where latents are cheaper.
    latents: str = operational(AUTO)
    # What is compared with one device before the first step: first_batch, a row of it by a narrow copy of the model, and the
    # run ends where a token's loss, result or gradient differs; null: nothing.
    verify: str | None = operational(None)
    # Order of tokens over cp and sp: contiguous, zigzag, striped, balanced; auto: what is expected to be fastest with the
    # scheme for the data, or the most even one where no rates of the devices are known, and logs why.
    order: str = operational(AUTO)
    # Tokens of a stripe or chunk, which must divide those of a device; null: a tile of kernels, 128 on GPUs, 1024 on TPUs.
    stripe: int | None = operational(None)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        if self.gradients not in (known := (FLOAT32, "bfloat16")):
            raise ValueError(f"sequence.gradients = {self.gradients!r} is unknown; use one of {', '.join(known)}")
        check_hops("sequence.hops", self.hops)
        if self.directions not in (known := ("1", "2", AUTO)):
            raise ValueError(f"sequence.directions = {self.directions!r} is unknown; use one of {', '.join(known)}")
        options = [name for name, value in self._options().items() if value is not None]
        if self.scheme == AUTO and options:
            raise ValueError(
                f"sequence.scheme = {AUTO!r} with sequence.{options[0]}, which is an option of some schemes: name one of "
                "these, or leave the option out"
            )
        for key, name in (("scheme", self.named), ("outer", self.outer), ("window_scheme", self.window_scheme)):
            if name is not None and name not in SCHEMES:
                known = (AUTO, *SCHEMES) if key == "scheme" else SCHEMES
                raise ValueError(f"sequence.{key} = {name!r} is unknown; use one of {', '.join(known)}")
        if self.verify not in (None, FIRST_BATCH):
            raise ValueError(f"sequence.verify = {self.verify!r} is unknown; use {FIRST_BATCH}, or null for nothing")
        if self.latents not in (known := (AUTO, ALWAYS, NEVER)):
            raise ValueError(f"sequence.latents = {self.latents!r} is unknown; use one of {', '.join(known)}")
        if self.order not in (AUTO, *NAMES):
            raise ValueError(f"sequence.order = {self.order!r} is unknown; use one of {', '.join((AUTO, *NAMES))}")
        if self.stripe is not None and self.stripe < 1:
            raise ValueError(f"sequence.stripe must be at least 1 token, or null, got {self.stripe}")
        if self.stripe is not None and self.order not in (AUTO, *STRIPES):
            raise ValueError(
                f"sequence.stripe = {self.stripe} is for sequence.order {', '.join(STRIPES)} or {AUTO}, and {self.order!r} has "
                "no stripes: leave it out"
            )
        self.made()

    @property
    def named(self) -> str:
        """The scheme; where it is chosen for a run's data and devices, the one that stands for it until then."""
        return next(iter(SCHEMES)) if self.scheme == AUTO else self.scheme

    def made(self) -> ByWindow:
        """Returns the scheme with its options. Raises ValueError for one that it does not have."""
        options = self._options()
        window = None if self.window_scheme is None else SCHEMES[self.window_scheme]
        both = ("gradients", "hops", "levels", "directions", "buffer")
        alike = {} if window is None else {n: options[n] for n in both if n in options_of(window)}
        of_window = None if self.window_scheme is None else scheme_of(self.window_scheme, **alike)
        return by_window(scheme_of(self.named, **options), of_window, self.latents)

    def _options(self) -> dict[str, Any]:
        """Returns what is given of the options that not every scheme has; None for what is not."""
        return {
            "outer": self.outer,
            "head_groups": self.head_groups,
            "gradients": None if self.gradients == FLOAT32 else self.gradients,
            "hops": None if self.hops == AUTO else self.hops,
            "levels": None if self.levels == 1 else self.levels,
            "directions": None if self.directions == AUTO else int(self.directions),
            "buffer": None if self.buffer == BUFFER else self.buffer,
        }

    def compiler_options(self, mesh: jax.sharding.Mesh, order: Order) -> dict[str, Any] | None:
        """Returns what a step is compiled with; None where the sequence is not split."""
        return exchange.compiler_options(mesh) if order.shards > 1 else None

    def over(self, shards: int, length: int, platform: str | None = None) -> Order:
        """Returns the order of rows of that length over that many devices, of that platform."""
        return order_for(self.order, shards, length, self.stripe, platform)
