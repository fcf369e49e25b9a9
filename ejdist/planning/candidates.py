"""What a plan may choose: the mesh, what the backward computes again, microbatches, and the rows of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejdist.documents import ONE_DOCUMENT, Documents
from ejdist.experts.schemes import fitting
from ejdist.mesh import AXES, BATCH_AXES, CP, SEQUENCE_AXES, SP, TP
from ejdist.models.model import CAUSAL
from ejdist.models.remat import REMAT as POLICIES
from ejdist.models.stack import takes_order
from ejdist.order import AUTO, order_for
from ejdist.order import NAMES as ORDERS
from ejdist.planning.activations import has_experts
from ejdist.sequence.schedule import imbalance
from ejdist.sequence.schemes import SCHEMES, options_of
from ejdist.training.optimizer import fixed

# The keys that are searched.
REMAT, ACCUMULATION, BATCH = "model.remat", "accumulation", "data.global_batch"
SCHEME, ORDER, DISPATCH = "sequence.scheme", "sequence.order", "experts.dispatch"
MOMENTS, OFFLOAD, SUMS = "optimizer.moments", "optimizer.offload", "optimizer.accumulate"
SEARCHED = (
    *(f"mesh.{axis}" for axis in AXES), REMAT, ACCUMULATION, BATCH, SCHEME, ORDER, DISPATCH, MOMENTS, OFFLOAD, SUMS
)  # fmt: skip
# Savings of memory, each tried where nothing fits with those before: first what changes no loss.
Savings = tuple[tuple[str, str], ...]
_ON_HOST, _SUMS, _MOMENTS = (OFFLOAD, "host"), (SUMS, "bfloat16"), (MOMENTS, "bfloat16")
_REMAT_ON_HOST = REMAT, "host"  # policies that keep activations there are searched too
SAVINGS: tuple[Savings, ...] = (
    (),
    (_REMAT_ON_HOST,),
    (_ON_HOST, _REMAT_ON_HOST),
    (_ON_HOST, _REMAT_ON_HOST, _SUMS),
    (_MOMENTS, _SUMS),
    (_ON_HOST, _REMAT_ON_HOST, _MOMENTS, _SUMS),
)


@dataclass(frozen=True)
class Candidate:
    """A point of the search. mesh: devices along each axis of `AXES`. scheme, order: of the sequence. dispatch: of tokens to
    experts. None: as the recipe has it, where the mesh leaves nothing to choose. savings: keys of the optimizer, of `SAVINGS`.
    """

    mesh: tuple[int, ...]
    remat: str
    accumulation: int
    global_batch: int
    scheme: str | None = None
    order: str | None = None
    dispatch: str | None = None
    savings: Savings = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it."""
        return dict(zip(AXES, self.mesh, strict=True))

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    def abstract_mesh(self) -> jax.sharding.AbstractMesh:
        """Returns a mesh of those sizes without devices: arrays have shardings on it, but no data."""
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
            optimizer=replace(s.optimizer, **{key.partition(".")[2]: value for key, value in self.savings}),
        )

    def overrides(self) -> dict[str, str]:
        """Returns key -> value, as a command line has them."""
        values = {f"mesh.{axis}": str(size) for axis, size in self.sizes.items()}
        values |= {REMAT: self.remat, ACCUMULATION: str(self.accumulation), BATCH: str(self.global_batch)}
        chosen = {SCHEME: self.scheme, ORDER: self.order, DISPATCH: self.dispatch}
        return values | {key: value for key, value in chosen.items() if value is not None} | dict(self.savings)


def candidate_of(
    sections: Any, sizes: Mapping[str, int], documents: Documents = ONE_DOCUMENT, platform: str | None = None
) -> Candidate:
    """Returns the recipe's own choices, on a mesh of those sizes; `AUTO` is the most even order for those documents."""
    s, mesh = sections, tuple(sizes[axis] for axis in AXES)
    over = tuple((a, sizes[a]) for a in SEQUENCE_AXES if sizes[a] > 1)
    order = orders_searched(s, over, documents, platform=platform)[0] if over and s.sequence.order == AUTO else None
    return Candidate(mesh, s.model.remat, s.accumulation, s.data.global_batch, order=order)


def rows_over(sizes: Mapping[str, int]) -> int:
    """Returns over how many devices the rows of a microbatch are split."""
    return math.prod(sizes[a] for a in BATCH_AXES)


def policies_searched(savings: Savings = ()) -> tuple[str, ...]:
    """Returns the remat policies that are searched: those that keep activations on the host only as a saving."""
    return tuple(name for name, remat in POLICIES.items() if _REMAT_ON_HOST in savings or not remat.host)


def savings_searched(s: Any, given: Collection[str]) -> list[Savings]:
    """Returns the savings that are searched, in this order: what the recipe has not yet, and nothing that is given."""
    given = {*given, *(f"optimizer.{key}" for key in fixed(s.optimizer))}
    searched: list[Savings] = []
    for savings in SAVINGS:
        new = tuple(
            (key, value) for key, value in savings if key not in given and (key == REMAT or _of(s, key) != value)
        )
        if new not in searched:
            searched.append(new)
    return searched


def _of(s: Any, key: str) -> str:
    return getattr(s.optimizer, key.partition(".")[2])


def orders_searched(
    s: Any,
    axes: tuple[tuple[str, int], ...],
    documents: Documents = ONE_DOCUMENT,
    scheme: str | None = None,
    platform: str | None = None,
) -> list[str]:
    """Returns the orders that are searched for a recipe's rows over those (axis, devices), the most even first: those that
    divide them.

    Args:
      documents: of the rows. scheme: by which tokens attend; default: the recipe's. platform: of the devices.
    """
    length, ranks = s.data.sequence_length, math.prod(n for _, n in axes)
    of = SCHEMES[scheme or s.sequence.scheme]()
    orders = [order_for(name, ranks, length, s.sequence.stripe, platform) for name in ORDERS]
    fit = [o for o in orders if length % o.multiple == 0 and takes_order(s.model, o)]
    # Differences below a hundredth decide nothing: the order that comes first compares less.
    fit.sort(key=lambda o: round(imbalance(of.uneven(o, axes), length, CAUSAL, documents), 2))
    return [o.name for o in fit] or [*ORDERS[:1]]  # where none fits, the first is refused with its reason


def _takes(sequence: Any, scheme: str, heads: int, axes: Any) -> bool:
    """Returns whether a scheme has the options that the recipe gives, and takes that many heads over those axes."""
    try:
        made = replace(sequence, scheme=scheme).made()
    except ValueError:
        return False
    return made.rejects(heads, axes) is None


def products(s: Any, of: Candidate, given: Collection[str]) -> Iterator[Candidate]:
    """Yields a choice again with its sequence over two axes, with each scheme that has another one over the outer axis; nothing
    where either axis is given."""
    if {f"mesh.{CP}", f"mesh.{SP}"} & {*given}:
        return
    sizes, schemes = of.sizes, (s.sequence.scheme,) if SCHEME in given else SCHEMES
    ranks, heads = sizes[CP] * sizes[SP], s.model.num_heads // sizes[TP]
    for inner in (n for n in range(2, ranks) if ranks % n == 0):
        mesh, axes = {**sizes, CP: ranks // inner, SP: inner}, ((CP, ranks // inner), (SP, inner))
        for name in schemes:
            if "outer" in options_of(SCHEMES[name]) and _takes(s.sequence, name, heads, axes):
                scheme = None if SCHEME in given else name
                yield replace(of, mesh=tuple(mesh[a] for a in AXES), scheme=scheme)


def ways(
    s: Any,
    mesh: tuple[int, ...],
    given: Collection[str],
    documents: Documents = ONE_DOCUMENT,
    platform: str | None = None,
) -> Iterator[tuple[str | None, str | None, str | None]]:
    """Yields (scheme, order, dispatch) of what a mesh leaves to choose; None as the recipe has it."""
    sizes = dict(zip(AXES, mesh, strict=True))
    axes = tuple((a, sizes[a]) for a in SEQUENCE_AXES if sizes[a] > 1)
    split, heads = bool(axes), s.model.num_heads // sizes[TP]
    given = {*given} - ({ORDER} if s.sequence.order == AUTO else set())
    schemes = [name for name in SCHEMES if split and _takes(s.sequence, name, heads, axes)]
    over = tuple(sizes.get(a, 1) for a in s.experts.axes)
    mixed = has_experts(s.model) and math.prod(over) > 1
    for scheme in schemes if split and SCHEME not in given else (None,):
        orders = orders_searched(s, axes, documents, scheme, platform) if split and ORDER not in given else (None,)
        yield from itertools.product((scheme,), orders, fitting(over) if mixed and DISPATCH not in given else (None,))
