"""Which tensor of a file holds which of our parameters, and how: one table serves reading and writing.

A `Rule` names the dims of both sides, "(N H) D" and "query: D N H": dims in brackets are one dim of the file. `Blocks` are the
rows of a tensor whose parts have dims of their own. `view` shows an array of the file in the layout of ours, without a copy, so
that reading takes from it and writing puts into it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from ejdist.models import ahead
from ejdist.models.config import DecoderShape
from ejdist.models.decoder import declare
from ejdist.models.parameters import Param
from ejdist.models.stack import AHEAD, ahead_of, declare_buffers, layers_of


@dataclass(frozen=True)
class Rule:
    """A tensor of a file.

    name: without `Rules.layer` in front, for what a layer has; a dim in braces is counted through, "experts.{E}.w1.weight".
    theirs: its dims. ours: "parameter: dims", where a number is an index of ours, and so a part of the parameter.
    joined: the dim of theirs along which several of ours follow each other, each with its own size.
    given, without: a parameter; the tensor is left out unless the model has `given`, or if it has `without`.
    """

    name: str
    theirs: str
    ours: tuple[str, ...]
    joined: str = ""
    given: str = ""
    without: str = ""

    def parameters(self) -> list[tuple[str, list[str]]]:
        """Returns (name, dims) of each of ours."""
        return [(name, dims.split()) for name, _, dims in (text.partition(":") for text in self.ours)]

    def tensors(self, prefix: str, place: Place) -> Iterable[Tensor]:
        """Returns the tensors of the rule in one layer."""
        return _of_rule(self, prefix + self.name, place.names, place.leaves, place.row)


def rule(name: str, theirs: str, *ours: str, **more: str) -> Rule:
    return Rule(name, theirs, ours, **more)


@dataclass(frozen=True)
class Blocks:
    """A tensor of a file whose rows, in its first dim, are blocks that follow each other, each a part of one of ours.

    name: without `Rules.layer` in front. each: a dim that is counted through, all blocks for each of its indices; "" for none.
    blocks: (theirs, "parameter: dims"). In theirs the first dim is the rows of a block, and 1 a dim of one entry. In ours a
      number is an index, `each` the index that is counted, and "(K R)", with `each` in brackets, the run of R entries that it
      has; "+Q" are the next Q entries of a dim, after those of the blocks before.
    sizes: (a model) -> the size of every dim.
    before: dims whose entries other tensors hold, in front of what "+Q" takes here.
    """

    name: str
    blocks: tuple[tuple[str, str], ...]
    sizes: Callable[[DecoderShape], dict[str, int]]
    each: str = ""
    before: tuple[str, ...] = ()

    def tensors(self, prefix: str, place: Place) -> Iterable[Tensor]:
        """Returns the tensor in one layer; nothing if the model does not have all of its parameters."""
        parted = [(theirs, *ours.split(":")) for theirs, ours in self.blocks]
        if any(name not in place.names for _, name, _ in parted):
            return []
        sizes, row, pieces = self.sizes(place.config), 0, []
        taken: Counter[tuple[str, int]] = Counter()  # (parameter, its dim) -> entries of the blocks before
        rest = ()
        for i in range(sizes[self.each] if self.each else 1):
            for theirs, name, ours in parted:
                groups = [[d for d in group if d != "1"] for group in _groups(theirs)]
                split = tuple(tuple(sizes[d] for d in group) for group in groups)
                rows, rest = math.prod(split[0]), tuple(math.prod(group) for group in split[1:])
                at: list[At] = [*place.row]
                held: list[str] = []
                for dim, group in enumerate(_groups(ours)):
                    last = group[-1].removeprefix("+")
                    if group == [self.each] or last.isdigit():
                        at.append(i if group == [self.each] else int(last))
                        continue
                    start, size = None, sizes[last]
                    if len(group) > 1:
                        start = i * size
                    elif last != group[0]:
                        start = taken[name, dim] + sum(sizes[d] for d in self.before)
                        taken[name, dim] += size
                    at.append(None if start is None else (start, start + size))
                    held.append(last)
                flat = [d for group in groups for d in group]
                order = tuple(flat.index(d) for d in held)
                pieces.append(Piece(place.names[name], tuple(at), order, rows=(row, row + rows, split)))
                row += rows
        return [Tensor(prefix + self.name, ((row,), *((n,) for n in rest)), tuple(pieces))]


@dataclass(frozen=True)
class Rules:
    """The tensors of a family's files.

    parts: name of a part -> those of a layer that has it; "": those of no layer. layer: how names of a layer's begin.
    ahead: those of multi-token prediction beside its layer, which is behind the last; () where the family has none. copies: of
    parameters that it shares, which are written there once more and not read.
    """

    parts: Mapping[str, Sequence[Rule | Blocks]]
    layer: str = "model.layers.{layer}."
    ahead: Sequence[Rule] = ()
    copies: Sequence[Rule] = ()


@dataclass(frozen=True)
class Place:
    """Where a rule is used: in one layer, or in none.

    names: parameter -> its leaf. leaves: leaf -> what it is. row: of the stacks, that of this layer; () outside of layers.
    """

    config: DecoderShape
    names: Mapping[str, str]
    leaves: Mapping[str, Param]
    row: tuple[int, ...] = ()


At = int | tuple[int, int] | None


@dataclass(frozen=True)
class Piece:
    """What a tensor holds of a leaf of the state."""

    leaf: str  # "params.layers.query"
    at: tuple[At, ...]  # for each dim of the leaf the index in it, or the start and stop; None: all of it
    order: tuple[int, ...]  # the dim of the split tensor that is each dim of the leaf where no index is
    part: tuple[int, int, int] | None = None  # (dim of the split tensor, start, stop)
    # (start, stop, the sizes that their dims split into) of the tensor's rows; None for all, split as the tensor is
    rows: tuple[int, int, tuple[tuple[int, ...], ...]] | None = None

    @property
    def index(self) -> tuple[int | slice, ...]:
        """What of its leaf a piece is, as NumPy has it."""
        return tuple(slice(None) if i is None else slice(*i) if isinstance(i, tuple) else i for i in self.at)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, for a model of known sizes."""

    name: str
    split: tuple[tuple[int, ...], ...]  # for each dim the sizes of the dims of ours that it joins
    pieces: tuple[Piece, ...] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(sizes) for sizes in self.split)


def view(array: np.ndarray, tensor: Tensor, piece: Piece) -> np.ndarray:
    """Returns the array of a tensor in the layout of the piece of the leaf, without its indexed dims; no copy if contiguous."""
    split = tensor.split
    if piece.rows is not None:
        start, stop, split = piece.rows
        array = array[start:stop]
    split = array.reshape([size for sizes in split for size in sizes])
    if piece.part is not None:
        dim, start, stop = piece.part
        split = split[(slice(None),) * dim + (slice(start, stop),)]
    return split.transpose(piece.order)


def declared_leaves(c: DecoderShape) -> dict[str, Param]:
    """Returns the leaves of the state that make the model what it is, by name. Counts of the step before are not among them."""
    declared = declare(c)
    trees = {name: p for name, p in declared.items() if isinstance(p, dict)}
    leaves = {f"params.{name}": p for name, p in declared.items() if name not in trees}
    leaves |= {f"params.{tree}.{name}": p for tree, of in trees.items() for name, p in of.items()}
    buffers = declare_buffers(c) | ahead.buffers(c)
    return leaves | {f"buffers.{part}.bias": of_part["bias"] for part, of_part in buffers.items() if "bias" in of_part}


def expand(rules: Rules, c: DecoderShape, copies: bool = False) -> list[Tensor]:
    """Returns every tensor of a model's files, in the order of its layers.

    Args:
      copies: with `Rules.copies`, for writing.

    Raises:
      ValueError: a parameter of the model is in no rule.
    """
    leaves = declared_leaves(c)
    top = {n: f"params.{n}" for n in declare(c)}
    tensors = [t for r in rules.parts[""] for t in r.tensors("", Place(c, top, leaves))]
    rows: Counter[str] = Counter()

    def of_part(part: Any, layer: int, tree: str, buffers: str, row: int) -> None:
        names = {n: f"params.{tree}.{n}" for n in part.declare(c)}
        names |= {n: f"buffers.{buffers}{part.name}.{n}" for n in part.buffers(c)}
        for r in rules.parts.get(part.name, ()):
            tensors.extend(r.tensors(rules.layer.format(layer=layer), Place(c, names, leaves, (row,))))

    for layer, parts in enumerate(layers_of(c)):
        for part in parts:
            of_part(part, layer, "layers", "", rows[part.name])
            rows[part.name] += 1
    if (one := ahead_of(c)) is not None:
        for part in layers_of(one)[0]:
            of_part(part, c.num_layers, AHEAD, f"{AHEAD}_", 0)
        prefix, names = rules.layer.format(layer=c.num_layers), {n: f"params.{AHEAD}.{n}" for n in declare(c)[AHEAD]}
        for r in rules.ahead:
            tensors += r.tensors(prefix, Place(c, names, leaves))
        for r in rules.copies if copies else ():
            tensors += r.tensors(prefix, Place(c, top, leaves))
    absent = leaves.keys() - {piece.leaf for t in tensors for piece in t.pieces}
    if absent:
        raise ValueError(f"no tensor maps to the parameter {sorted(absent)[0]}; add its rule")
    return tensors


def _of_rule(
    r: Rule, name: str, leaf_names: Mapping[str, str], leaves: Mapping[str, Param], row: tuple[int, ...]
) -> Iterable[Tensor]:
    """Returns the tensors of a rule in one layer: several if the name counts through a dim, none if the model does not use
    it."""
    has_all = all(parameter in leaf_names for parameter, _ in r.parameters())
    if not has_all or (r.given and r.given not in leaf_names) or r.without in leaf_names:
        return []
    sizes: dict[str, list[int]] = {}
    for parameter, dims in r.parameters():
        shape = leaves[leaf_names[parameter]].shape[len(row) :]
        for dim, size in zip(dims, shape, strict=True):
            sizes.setdefault(dim, []).append(size)
    groups = _groups(r.theirs)
    flat = [dim for group in groups for dim in group]
    split = tuple(tuple(sum(sizes[d]) if d == r.joined else sizes[d][0] for d in group) for group in groups)
    counted = re.findall(r"{(\w+)}", r.name)
    tensors = []
    for index in product(*(range(sizes[d][0]) for d in counted)):
        number, start, pieces = dict(zip(counted, index, strict=True)), 0, []
        for i, (parameter, dims) in enumerate(r.parameters()):
            indices = [int(d) if d.isdigit() else number.get(d) for d in dims]
            order = [flat.index(d) for d, fixed in zip(dims, indices, strict=True) if fixed is None]
            part = None
            if r.joined:
                part = (flat.index(r.joined), start, start + sizes[r.joined][i])
                start = part[2]
            pieces.append(Piece(leaf_names[parameter], (*row, *indices), tuple(order), part))
        tensors.append(Tensor(name.format(**number), split, tuple(pieces)))
    return tensors


def _groups(dims: str) -> list[list[str]]:
    """Returns the dims of each dim: "(N H) D" is [N, H] and [D]."""
    return [(bracketed or plain).split() for bracketed, plain in re.findall(r"\(([^)]*)\)|(\S+)", dims)]


def as_ours(arrays: Mapping[str, np.ndarray], tensors: Iterable[Tensor], leaves: Mapping[str, Param]) -> dict[str, Any]:
    """Returns leaf -> array, put together in memory from the arrays of a file; `load` does it on devices."""
    filled = {name: np.full(p.shape, np.nan, np.float32) for name, p in leaves.items()}
    for tensor in tensors:
        for piece in tensor.pieces:
            filled[piece.leaf][piece.index] = view(arrays[tensor.name], tensor, piece)
    return filled
