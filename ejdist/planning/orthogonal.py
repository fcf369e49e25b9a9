"""What Muon's updates cost a device: products of Newton–Schulz, matrices that go round the mesh, and memory while they do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, Traffic
from ejdist.layout import PARAMETERS, sharding
from ejdist.planning.links import NETWORK, Links
from ejdist.training.muon import AT_ONCE, alike, dealt_over
from ejdist.training.optimizer import matrices_in


@dataclass(frozen=True)
class Group:
    """Matrices that are dealt together. each: how many a device makes orthogonal. size: numbers of one. piece: numbers that a
    device has of all of them. flops: of one, in one step of Newton–Schulz. over: (axes, whether devices along them have the
    same pieces)."""

    each: int
    size: int
    piece: int
    flops: int
    over: tuple[tuple[tuple[str, ...], bool], ...]


def groups(sections: Any, parameters: Sequence[Any], mesh: Any) -> Iterator[Group]:
    """Yields what is dealt together on a mesh, which may be abstract; nothing where the optimizer is not Muon.

    Args:
      parameters: `ejdist.planning.memory.Stored` of each that is trained.
    """
    table, sizes = sections.experts.table(PARAMETERS), mesh.shape
    of = []
    for p in parameters:
        m = matrices_in(sections.optimizer, p.path, p.param)
        if m is not None:
            of.append(m.on(sharding(mesh, p.param.dims.split(), table, shape=p.param.shape, what=p.path)))
    for which in alike(of):
        group = [of[i] for i in which]
        stack, short, long, *_ = group[0].kind
        count = sum(m.sizes[0] for m in group) // math.prod(sizes[a] for a in stack)
        over = dealt_over(group[0].kind, sizes)
        ranks = math.prod(sizes[a] for axes in over for a in axes)
        each = -(-count // ranks)
        *split, same = over
        piece = each * short * long * math.prod(sizes[a] for a in same)
        yield Group(
            each, short * long, piece, group[0].flops, tuple((axes, axes == same) for axes in (*split, same) if axes)
        )


def flops(sections: Any, parameters: Sequence[Any], mesh: Any) -> int:
    """Returns the FLOPs of a device's share of Newton–Schulz in a step."""
    return sections.optimizer.muon.steps * sum(g.each * g.flops for g in groups(sections, parameters, mesh))


def traffic(sections: Any, parameters: Sequence[Any], mesh: Any, links: Links) -> Traffic:
    """Returns what a device sends in a step: pieces there and back, and updates to those that have the same pieces."""
    sent, b = Traffic(), _itemsize(sections)
    for group in groups(sections, parameters, mesh):
        for axes, same in group.over:
            pieces = [piece for a in axes for piece in links.pieces(a, mesh.shape)]
            held = b * group.piece
            for axis, n in sorted(pieces, key=lambda piece: piece[0] == NETWORK):
                if same:
                    held //= n
                    sent.add(axis, ALL_GATHER, held * (n - 1))
                else:
                    sent.add(axis, ALL_TO_ALL, 2 * held * (n - 1) // n, 2)
    return sent


def memory(sections: Any, parameters: Sequence[Any], mesh: Any) -> int:
    """Returns the bytes that the group which needs most has at its height: its pieces, once more exchanged, its updates, and of
    the matrices that are multiplied at once themselves, both products and a sum."""
    b = _itemsize(sections)
    return max(
        (
            b * (3 * g.piece + 4 * min(g.each * g.size, max(AT_ONCE, g.size)))
            for g in groups(sections, parameters, mesh)
        ),
        default=0,
    )


def _itemsize(sections: Any) -> int:
    return jnp.dtype(sections.optimizer.muon.products).itemsize
