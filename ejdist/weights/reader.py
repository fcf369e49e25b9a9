"""Tensors of files into arrays on devices: each device is given what it holds, and the host holds a part of one tensor.

A parameter begins as zeros in its sharding. Then each tensor that holds a part of it is opened, cut to what each device
holds, and put into its place there, in the dtype of the file; the device converts. So however many layers and experts are
stacked in a parameter, the host has one tensor of one layer at a time, and of it what its own devices need.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.models.decoder import DecoderConfig
from ejdist.weights.families import Family
from ejdist.weights.files import DTYPES, Stored, WeightsError, names_in
from ejdist.weights.tensors import Piece, Tensor, expand, view

# Tensors of a file that follow from config.json.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
# Tensors that predict tokens after the next: layers behind the last (DeepSeek-V3), or a module (Qwen3-Next).
_AHEAD = re.compile(r"model\.layers\.(\d+)\.|mtp\.")


def tensors_in(family: Family, c: DecoderConfig, stored: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors of a model as these files have them: a family may have several layouts."""
    layouts = [expand(rules, c) for rules in family.rules]
    return min(layouts, key=lambda tensors: sum(t.name not in stored for t in tensors))


def check_ahead(family: Family, c: DecoderConfig, stored: Mapping[str, Any], where: Path) -> None:
    """Raises WeightsError for a model with multi-token prediction where the files of a family hold none that is read."""
    if c.mtp.modules and not (family.rules[0].ahead and any(_is_ahead(name, c) for name in stored)):
        raise WeightsError(
            f"model.mtp.modules = {c.mtp.modules}, and {where} has no layer of multi-token prediction that is read: give "
            "model.mtp.modules=0, or files of DeepSeek-V3 with it"
        )


def _is_ahead(name: str, c: DecoderConfig) -> bool:
    match = _AHEAD.match(name)
    return match is not None and (match[1] is None or int(match[1]) >= c.num_layers)


def check(tensors: Sequence[Tensor], stored: Mapping[str, Stored], c: DecoderConfig, where: Path) -> list[str]:
    """Returns what is ignored in the files and why, a line each.

    Raises:
      WeightsError: a tensor is missing, unknown, or of another shape or dtype.
    """
    expected = {t.name: t for t in tensors}
    absent = expected.keys() - stored.keys()
    if absent:
        raise WeightsError(f"{where} lacks {names_in(absent)}, which its config.json requires; copy all of its files")
    notes, unknown = [], set(stored) - set(expected)
    derived = {n for n in unknown if _DERIVED.search(n)}
    ahead = {n for n in unknown if _is_ahead(n, c)}
    if derived:
        notes.append(f"ignored in {where}: {names_in(derived)}, which follow from its config.json")
    if ahead:
        notes.append(f"ignored in {where}: {names_in(ahead)}, which belong to multi-token prediction layers")
    unknown -= derived | ahead
    if c.tie_embeddings and "lm_head.weight" in unknown:
        _check_tied(tensors, stored, where)
        unknown.remove("lm_head.weight")
    if unknown:
        raise WeightsError(
            f"{where} has {names_in(unknown)}, for which this model has no parameter; it would be another without: check that "
            "config.json and the files are of one model"
        )
    for name, tensor in expected.items():
        entry = stored[name]
        if entry.dtype not in DTYPES:
            raise WeightsError(
                f"{entry.path}: tensor {name} is {entry.dtype}, and only {', '.join(DTYPES)} are read; save the model again as "
                "one of them"
            )
        if entry.shape != tensor.shape:
            raise WeightsError(
                f"{entry.path}: tensor {name} is {list(entry.shape)}, and by its config.json {list(tensor.shape)}; check that "
                "both are of one model"
            )
    return notes


def _check_tied(tensors: Sequence[Tensor], stored: Mapping[str, Stored], where: Path) -> None:
    """Raises WeightsError if the files have an output projection that is not the embedding, which the model takes."""
    name = next(t.name for t in tensors if t.pieces[0].leaf == "params.embedding")
    head, table = stored["lm_head.weight"], stored.get(name)
    alike = table is not None and (head.shape, head.dtype) == (table.shape, table.dtype) and head.dtype in DTYPES
    if not (alike and table is not None and _equal(head.open(), table.open())):
        raise WeightsError(
            f"{where} has a lm_head.weight that differs from the embedding, though its config.json ties them; set "
            "tie_word_embeddings to false in it"
        )


def _equal(a: np.ndarray, b: np.ndarray, rows: int = 4096) -> bool:
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


def load(
    stored: Mapping[str, Stored], tensors: Iterable[Tensor], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Returns leaf -> array, of the shape, dtype and sharding in `like`. Every process reads what its own devices hold."""
    of_leaf: dict[str, list[tuple[Tensor, Piece]]] = defaultdict(list)
    for tensor in tensors:
        for piece in tensor.pieces:
            of_leaf[piece.leaf].append((tensor, piece))
    return {leaf: _load_leaf(stored, of_leaf[leaf], leaf_like) for leaf, leaf_like in like.items()}


Spans = tuple[tuple[int, int], ...]  # start and stop in each dim of a leaf


def _load_leaf(stored: Mapping[str, Stored], held: list[tuple[Tensor, Piece]], like: jax.ShapeDtypeStruct) -> jax.Array:
    devices: dict[Spans, list[Any]] = defaultdict(list)
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        devices[tuple(s.indices(n)[:2] for s, n in zip(index or (), like.shape, strict=True))].append(device)
    shards = {
        device: jnp.zeros([stop - start for start, stop in spans], like.dtype, device=device)
        for spans, those in devices.items()
        for device in those
    }
    for name, pieces in groupby(held, key=lambda both: both[0].name):
        opened = stored[name].open()  # once: from a bucket each piece would read what is around it again
        for tensor, piece in pieces:
            array = view(opened, tensor, piece)
            for spans, those in devices.items():
                cut = _cut(array, piece, spans)
                if cut is not None:
                    shards |= {d: _put(shards[d], jax.device_put(cut[0], d), cut[1]) for d in those}
            # Otherwise the host would hold the cuts of all tensors until they are put.
            jax.block_until_ready(list(shards.values()))
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, list(shards.values()))


@partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, part: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, part.astype(whole.dtype), start)


def _cut(array: np.ndarray, piece: Piece, spans: Spans) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """Returns (the part of a piece, laid out as its leaf, that a shard holds; its start in the shard); None without overlap."""
    cut, shape, places = [], [], []
    for i, (start, stop) in zip(piece.at, spans, strict=True):
        first, last = (i, i + 1) if isinstance(i, int) else i or (start, stop)
        low, high = max(first, start), min(last, stop)
        if low >= high:
            return None
        if not isinstance(i, int):
            cut.append(slice(low, high) if i is None else slice(low - first, high - first))
        shape.append(high - low)
        places.append(low - start)
    return np.ascontiguousarray(array[tuple(cut)]).reshape(shape), tuple(places)
