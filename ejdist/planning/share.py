"""What a device has of a microbatch, from a recipe's sections and a mesh."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from ejdist.documents import ONE_DOCUMENT, Documents
from ejdist.experts.choice import choose
from ejdist.experts.cost import limit_of_ranks
from ejdist.experts.schemes import LOCAL, fitting
from ejdist.experts.schemes import scheme_of as dispatch_named
from ejdist.mesh import CP, TP, MeshSection
from ejdist.models.attention import EXPANDING
from ejdist.models.mixture import has_experts
from ejdist.models.remat import REMAT
from ejdist.models.share import Share
from ejdist.planning.candidates import rows_over
from ejdist.planning.links import NETWORK, Links
from ejdist.sequence.cost import NEVER
from ejdist.sequence.windows import ByWindow


def share_of(
    sections: Any,
    mesh: Any,
    links: Links | None = None,
    tile: int | None = None,
    documents: Documents = ONE_DOCUMENT,
) -> Share:
    """Returns what a device has of a microbatch on a mesh, which may be abstract.

    Args:
      links: of the devices. They say what experts are split over inside of a slice and over slices, and by them
        `experts.dispatch=auto` chooses. Without them auto is the first scheme that fits.
      tile, documents: see `Share`.
    """
    s = sections
    tokens = _tokens(s, mesh)
    pieces = [(a, mesh.shape[a]) for a in s.experts.axes]
    if links is not None:
        pieces = [piece for a in s.experts.axes for piece in links.pieces(a, mesh.shape)]
        pieces.sort(key=lambda piece: piece[0] != NETWORK)  # what comes over slices comes first
    return Share(
        tokens=tokens,
        itemsize=_itemsize(s),
        length=s.data.sequence_length,
        remat=REMAT[s.model.remat],
        scheme=_scheme(s),
        order=s.sequence.over(
            MeshSection.sequence_shards(mesh), s.data.sequence_length, None if links is None else links.chip.platform
        ),
        outer=mesh.shape[CP],
        dispatch=dispatch_named(dispatch_of(s, mesh, links)),
        features=mesh.shape[TP],
        experts=tuple(piece for piece in pieces if piece[1] > 1),
        buffer=s.experts.buffer,
        max_ranks=_limit(s, mesh),
        exchanged=s.experts.exchange,
        frozen=s.lora.rank > 0,
        tile=tile,
        documents=documents,
        torus=links is not None and links.chip.platform == "tpu",
        halved=s.experts.overlaps(mesh.shape, has_experts(s.model)),
    )


def _scheme(s: Any) -> ByWindow:
    """Returns the scheme of a recipe. Matrices with an adapter make keys and values where their tokens are."""
    made = s.sequence.made()
    adapted = s.lora.rank and {*EXPANDING} & {*(s.lora.targets or EXPANDING)}
    return replace(made, latents=NEVER) if adapted else made


def _tokens(s: Any, mesh: Any) -> int:
    rows = s.data.global_batch // s.accumulation // rows_over(mesh.shape)
    return rows * s.data.sequence_length // MeshSection.sequence_shards(mesh)


def _itemsize(s: Any) -> int:
    return 2 if s.model.compute_dtype == "bfloat16" else 4


def dispatch_of(sections: Any, mesh: Any, links: Links | None) -> str:
    """Returns the scheme by which tokens get to their experts: `experts.dispatch`, or what auto chooses over those links."""
    s, sizes = sections, tuple(mesh.shape[a] for a in sections.experts.axes)
    ranks = math.prod(sizes)
    if ranks == 1:
        return LOCAL
    if s.experts.dispatch != "auto":
        return s.experts.dispatch
    if links is None:
        return fitting(sizes, s.experts.exchange)[0]
    m, e = s.model.experts, s.experts
    how = {
        "tokens": _tokens(s, mesh), "top_k": m.top_k, "width": s.model.model_dim, "itemsize": _itemsize(s),
        "buffer": e.buffer, "num_experts": m.num, "max_ranks": _limit(s, mesh), "precision": e.exchange,
    }  # fmt: skip
    return _chosen(ranks, links.chip.kind, tuple(how.items()))


def _limit(s: Any, mesh: Any) -> int | None:
    m = s.model.experts
    ranks = math.prod(mesh.shape[a] for a in s.experts.axes)
    return limit_of_ranks(ranks, s.experts.max_ranks, m.num_groups, m.topk_groups)


@functools.lru_cache(maxsize=1024)
def _chosen(ranks: int, kind: str, how: tuple[tuple[str, Any], ...]) -> str:
    return choose(axis_sizes=(ranks,), hosts=1, device_kind=kind, **dict(how)).scheme
