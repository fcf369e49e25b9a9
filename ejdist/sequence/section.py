"""The section of a recipe that says how a split sequence attends."""

from __future__ import annotations

from dataclasses import dataclass

from ejdist.sections import operational
from ejdist.sequence.schemes import SCHEMES, Scheme, by_window, scheme_of


@dataclass
class SequenceSection:
    """The `sequence` section of a recipe."""

    # How a split sequence attends: ring, all_gather, ulysses (heads over sp, another scheme over cp), halo
    # (for windows, else a ring).
    scheme: str = operational("ring")
    # How layers with a window or chunks attend; null: halo where that sends less than sequence.scheme.
    window_scheme: str | None = operational(None)
    outer: str | None = operational(None)  # the scheme over cp, around ulysses over sp; null: ring
    # Groups of heads that ulysses exchanges one after another, each beside the attention of the one before, for less memory.
    head_groups: int = operational(1)
    order: str = operational("zigzag")  # order of tokens over cp and sp: contiguous, zigzag, striped

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; `Order` validates the order."""
        for key, name in (("scheme", self.scheme), ("outer", self.outer), ("window_scheme", self.window_scheme)):
            if name is not None and name not in SCHEMES:
                raise ValueError(f"sequence.{key} = {name!r} is unknown; use one of {', '.join(SCHEMES)}")
        self.made()

    def made(self) -> Scheme:
        """Returns the scheme with its options. Raises ValueError for one that it does not have."""
        groups = None if self.head_groups == 1 else self.head_groups
        return by_window(scheme_of(self.scheme, outer=self.outer, head_groups=groups), self.window_scheme)
