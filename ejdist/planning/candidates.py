"""What a plan may choose: the mesh, what the backward computes again, microbatches, and the rows of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejdist.mesh import AXES, BATCH_AXES


@dataclass(frozen=True)
class Candidate:
    """A point of the search. mesh: devices along each axis of `AXES`. scheme, order: of the sequence. dispatch: of tokens to
    experts. None: as the recipe has it, where the mesh leaves nothing to choose."""

    mesh: tuple[int, ...]
    remat: str
    accumulation: int
    global_batch: int
    scheme: str | None = None
    order: str | None = None
    dispatch: str | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it."""
        return dict(zip(AXES, self.mesh, strict=True))

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    def abstract_mesh(self) -> jax.sharding.AbstractMesh:
        """Returns a mesh of those sizes with no devices, on which arrays can be placed but not made."""
        return jax.sharding.AbstractMesh(self.mesh, AXES)

    def applied(self, sections: Any) -> Any:
        """Returns a copy of a recipe's sections with this choice."""
        s = sections
        return replace(
            s,
            mesh=replace(s.mesh, **self.sizes),
            model=replace(s.model, remat=self.remat),
            data=replace(s.data, global_batch=self.global_batch),
            sequence=replace(s.sequence, scheme=self.scheme or s.sequence.scheme, order=self.order or s.sequence.order),
            experts=replace(s.experts, dispatch=self.dispatch or s.experts.dispatch),
            accumulation=self.accumulation,
        )

    def overrides(self) -> dict[str, str]:
        """Returns key -> value, as a command line has them."""
        found = {f"mesh.{axis}": str(size) for axis, size in self.sizes.items()}
        found |= {"model.remat": self.remat, "accumulation": str(self.accumulation)}
        found["data.global_batch"] = str(self.global_batch)
        chosen = {"sequence.scheme": self.scheme, "sequence.order": self.order, "experts.dispatch": self.dispatch}
        return found | {key: value for key, value in chosen.items() if value is not None}


def candidate_of(sections: Any, sizes: Mapping[str, int]) -> Candidate:
    """Returns what a recipe says already, on a mesh of those sizes."""
    mesh = tuple(sizes[axis] for axis in AXES)
    return Candidate(mesh, sections.model.remat, sections.accumulation, sections.data.global_batch)


def rows_over(sizes: Mapping[str, int]) -> int:
    """Returns over how many devices the rows of a microbatch are split."""
    return math.prod(sizes[a] for a in BATCH_AXES)
