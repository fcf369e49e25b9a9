"""What a plan may choose: the mesh, what the backward computes again, microbatches, and the rows of a step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejdist.documents import ONE_DOCUMENT, Documents
from ejdist.experts.schemes import fitting
from ejdist.mesh import AXES, BATCH_AXES, CP, EP, SEQUENCE_AXES, SP, TP
from ejdist.models.attention import LatentAttention
from ejdist.models.mixture import has_experts
from ejdist.models.model import CAUSAL
from ejdist.models.remat import REMAT as POLICIES
from ejdist.models.stack import counted_parts, takes_order
from ejdist.order import AUTO, order_for
from ejdist.order import NAMES as ORDERS
from ejdist.sequence.cost import ALWAYS, NEVER
from ejdist.sequence.group_cast import BUFFER as CHUNKS_AHEAD
from ejdist.sequence.schedule import imbalance
from ejdist.sequence.schemes import SCHEMES, options_of
from ejdist.sequence.way import BY_BATCH
from ejdist.training.attending import by_scheme, chosen_among
from ejdist.training.optimizer import fixed

# The keys that are searched.
REMAT, ACCUMULATION, BATCH = "model.remat", "accumulation", "data.global_batch"
SCHEME, ORDER, DISPATCH = "sequence.scheme", "sequence.order", "experts.dispatch"
MOMENTS, OFFLOAD, SUMS = SAVED = "optimizer.moments", "optimizer.offload", "optimizer.accumulate"
LATENTS, GROUPS, HOPS, OUTER = "sequence.latents", "sequence.head_groups", "sequence.hops", "sequence.outer"
LEVELS, BUFFER = "sequence.levels", "sequence.buffer"
SEARCHED = (
    *(f"mesh.{axis}" for axis in AXES), REMAT, ACCUMULATION, BATCH, SCHEME, ORDER, DISPATCH, MOMENTS, OFFLOAD, SUMS, LATENTS,
    GROUPS, HOPS, OUTER, LEVELS, BUFFER,
)  # fmt: skip
# `sequence.directions` is not: auto is what costs least of every call (tests/test_both_ways.py).
HEAD_GROUPS = (2, 4, 8)  # that are tried beside one
BUFFERS = (0.25, 0.125)  # smaller than a recipe's by default
# Where the batch is not given: rows of a device and microbatch, microbatches, and tokens of a step, which are those of Llama 3
# 405B's largest batch; a step has one row at least.
ROWS, MICROBATCHES, MOST_TOKENS = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), 2**24
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
    sequence: other keys of that section, and their values.
    """

    mesh: tuple[int, ...]
    remat: str
    accumulation: int
    global_batch: int
    scheme: str | None = None
    order: str | None = None
    dispatch: str | None = None
    savings: Savings = ()
    sequence: tuple[tuple[str, str | float], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it."""
        return dict(zip(AXES, self.mesh, strict=True))

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    @property
    def ranks(self) -> int:
        """Devices that the sequence is split over."""
        return math.prod(self.sizes[axis] for axis in SEQUENCE_AXES)

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
            sequence=replace(
                s.sequence,
                scheme=self.scheme or s.sequence.scheme,
                order=self.order or s.sequence.order,
                **{key.partition(".")[2]: value for key, value in self.sequence},
            ),
            experts=replace(s.experts, dispatch=self.dispatch or s.experts.dispatch),
            accumulation=self.accumulation,
            optimizer=replace(s.optimizer, **{key.partition(".")[2]: value for key, value in self.savings}),
        )

    def overrides(self) -> dict[str, str]:
        """Returns key -> value, as a command line has them."""
        values = {f"mesh.{axis}": str(size) for axis, size in self.sizes.items()}
        values |= {REMAT: self.remat, ACCUMULATION: str(self.accumulation), BATCH: str(self.global_batch)}
        chosen = {SCHEME: self.scheme, ORDER: self.order, DISPATCH: self.dispatch}
        values |= {key: value for key, value in chosen.items() if value is not None} | dict(self.savings)
        return values | {key: str(value) for key, value in self.sequence}


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
    """Returns the orders that are searched for a recipe's rows over those (axis, devices), those that divide them: the most
    even first; where no layer attends in the order of the sequence, that of the text, as a run has it.

    Args:
      documents: of the rows. scheme: by which tokens attend; default: the recipe's. platform: of the devices.
    """
    length, ranks = s.data.sequence_length, math.prod(n for _, n in axes)
    of = SCHEMES[scheme or s.sequence.named]()
    orders = [order_for(name, ranks, length, s.sequence.stripe, platform) for name in ORDERS]
    fit = [o for o in orders if length % o.multiple == 0 and takes_order(s.model, o)]
    if by_scheme(s.model):
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
    """Yields a choice again with its sequence over two axes, with each scheme that has another one over the outer axis, or two
    levels; nothing where either axis is given, or where no layer attends by a scheme."""
    if {f"mesh.{CP}", f"mesh.{SP}"} & {*given} or not by_scheme(s.model):
        return
    sizes, schemes = of.sizes, (s.sequence.named,) if SCHEME in given else chosen_among(s.model)
    ranks, heads = sizes[CP] * sizes[SP], s.model.num_heads // sizes[TP]
    for inner in (n for n in range(2, ranks) if ranks % n == 0):
        mesh, axes = {**sizes, CP: ranks // inner, SP: inner}, ((CP, ranks // inner), (SP, inner))
        for name in schemes:
            options, keys = options_of(SCHEMES[name]), ()
            if "levels" in options and LEVELS not in given and s.sequence.levels == 1:
                keys = ((LEVELS, 2),)
            made = replace(s.sequence, **{key.partition(".")[2]: value for key, value in keys})
            if ("outer" in options or keys) and _takes(made, name, heads, axes):
                scheme = None if SCHEME in given else name
                yield replace(of, mesh=tuple(mesh[a] for a in AXES), scheme=scheme, sequence=keys)


def details(
    s: Any, of: Candidate, given: Collection[str], documents: Documents = ONE_DOCUMENT, tight: bool = False
) -> Iterator[Candidate]:
    """Yields a choice again with other keys of the section `sequence` that its scheme reads: whether latents travel, the hops
    that documents need in whatever order, another scheme outside; where memory is `tight`, groups of heads that are exchanged
    one after another, and smaller buffers."""
    sizes, section = of.sizes, of.applied(s).sequence
    axes = tuple((a, sizes[a]) for a in SEQUENCE_AXES if sizes[a] > 1)
    if not axes or not by_scheme(s.model):
        return
    pinned = {*given, *(key for key, _ in of.sequence)}
    options, heads = options_of(SCHEMES[section.named]), s.model.num_heads // sizes[TP]
    latents = any(isinstance(part, LatentAttention) for part in counted_parts(s.model))
    tried: dict[str, tuple[str | float, ...]] = {
        LATENTS: (ALWAYS, NEVER) if latents and section.latents == AUTO else (),
        GROUPS: HEAD_GROUPS if tight and "head_groups" in options else (),
        HOPS: (BY_BATCH,) if "hops" in options and documents.lengths and section.hops == AUTO else (),
        BUFFER: BUFFERS if tight and "buffer" in options and section.buffer == CHUNKS_AHEAD else (),
        LEVELS: (2,) if "levels" in options and axes[1:] and section.levels == 1 else (),
        OUTER: tuple(n for n in SCHEMES if "hops" in options_of(SCHEMES[n])) if "outer" in options and axes[1:] else (),
    }
    choices = [((), *(((key, value),) for value in values)) for key, values in tried.items() if key not in pinned]
    for chosen in itertools.islice(itertools.product(*choices), 1, None):
        keys = (*of.sequence, *itertools.chain(*chosen))
        made = replace(section, **{key.partition(".")[2]: value for key, value in keys})
        if _takes(made, section.named, heads, axes):
            yield replace(of, sequence=keys)


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
    open_keys = {key for key, value in ((SCHEME, s.sequence.scheme), (ORDER, s.sequence.order)) if value == AUTO}
    given = {*given} - open_keys
    schemes = [name for name in chosen_among(s.model) if split and _takes(s.sequence, name, heads, axes)]
    over = tuple(sizes.get(a, 1) for a in s.experts.axes)
    mixed = has_experts(s.model) and math.prod(over) > 1
    if not by_scheme(s.model):  # all are alike
        schemes = [s.sequence.named if s.sequence.scheme == AUTO else None]
    for scheme in schemes if split and SCHEME not in given else (None,):
        orders = orders_searched(s, axes, documents, scheme, platform) if split and ORDER not in given else (None,)
        dispatches = fitting(over, s.experts.exchange) if mixed and DISPATCH not in given else (None,)
        yield from itertools.product((scheme,), orders, dispatches)


# -- candidates -------------------------------------------------------------------------------------------------------


def meshes(count: int, given: dict[str, int], has_experts: bool) -> Iterator[tuple[int, ...]]:
    """Yields the axis sizes of every mesh of `count` devices. Sizes given by the user are kept; cp defaults to 1.

    Raises:
      ValueError: the given sizes do not divide the devices.
    """
    fixed = math.prod(given.values())
    if count % fixed:
        written = " x ".join(f"mesh.{a}={n}" for a, n in given.items())
        raise ValueError(f"{written}: {count} devices are not divisible by {fixed}; change one of the sizes")
    free = [a for a in AXES if a not in given and a != CP and (a != EP or has_experts)]
    if not free and fixed != count:
        raise ValueError(
            f"the mesh {given} has {fixed} devices, and there are {count}; leave the size of one axis open"
        )
    for sizes in _factors(count // fixed, len(free)):
        of = {**given, **dict(zip(free, sizes, strict=True))}
        yield tuple(of.get(a, 1) for a in AXES)


@functools.cache
def _factors(n: int, parts: int) -> list[tuple[int, ...]]:
    """Returns the ways to write n as an ordered product of that many numbers."""
    if parts == 0:
        return [()] if n == 1 else []
    return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in _factors(n // d, parts - 1)]


def candidates(
    sections: Any,
    count: int,
    given: Collection[str],
    savings: Savings = (),
    documents: Documents = ONE_DOCUMENT,
    platform: str | None = None,
) -> Iterator[Candidate]:
    """Yields the choices for that many devices; keys on the command line stay as they are."""
    s = sections
    written = {a: getattr(s.mesh, a) for a in AXES if f"mesh.{a}" in given}
    if written.get(CP) == -1:
        raise ValueError(
            "mesh.cp = -1: a plan itself divides the devices of the sequence between cp and sp; give those along cp, or none"
        )
    sizes = {a: n for a, n in written.items() if n != -1}
    policies = (s.model.remat,) if REMAT in given else policies_searched(savings)
    other_savings = tuple((key, value) for key, value in savings if key != REMAT)
    for mesh in meshes(count, sizes, has_experts(s.model)):
        over = rows_over(dict(zip(AXES, mesh, strict=True)))
        first = next(ways(s, mesh, given, documents, platform))
        for rows, parts in _batches(s, over, given):
            yield from (Candidate(mesh, policy, parts, rows, *first, other_savings) for policy in policies)


def _batches(s: Any, over: int, fixed_keys: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yields (global batch, microbatches) that split evenly over that many devices."""
    some = (s.accumulation,) if ACCUMULATION in fixed_keys else MICROBATCHES
    if BATCH in fixed_keys:
        rows = s.data.global_batch
        yield from ((rows, parts) for parts in some if rows % parts == 0 and rows // parts % over == 0)
        return
    for each in ROWS:
        for parts in some:
            rows = over * each * parts
            if rows == 1 or rows * s.data.sequence_length <= MOST_TOKENS:
                yield rows, parts
