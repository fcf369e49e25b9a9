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
    """A point of the search. mesh: devices along each axis of `AXES`."""

    mesh: tuple[int, ...]
    remat: str
    accumulation: int
    global_batch: int

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
        return replace(
            sections,
            mesh=replace(sections.mesh, **self.sizes),
            model=replace(sections.model, remat=self.remat),
            data=replace(sections.data, global_batch=self.global_batch),
            accumulation=self.accumulation,
        )

    def overrides(self) -> dict[str, str]:
        """Returns key -> value, as a command line has them."""
        found = {f"mesh.{axis}": str(size) for axis, size in self.sizes.items()}
        found |= {"model.remat": self.remat, "accumulation": str(self.accumulation)}
        return found | {"data.global_batch": str(self.global_batch)}


def candidate_of(sections: Any, sizes: Mapping[str, int]) -> Candidate:
    """Returns what a recipe says already, on a mesh of those sizes."""
    mesh = tuple(sizes[axis] for axis in AXES)
    return Candidate(mesh, sections.model.remat, sections.accumulation, sections.data.global_batch)


def rows_over(sizes: Mapping[str, int]) -> int:
    """Returns over how many devices the rows of a microbatch are split."""
    return math.prod(sizes[a] for a in BATCH_AXES)
