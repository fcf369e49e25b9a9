"""Tensors of files into arrays on devices: each device is given what it holds, and the host holds a part of one tensor.

A parameter is made as zeros where it is to lie. Then each tensor that holds a part of it is opened, cut to what a device
holds, and put into its place there, in the dtype of the file; the device converts. So however many layers and experts are
stacked in a parameter, the host has one tensor of one layer at a time, and of it what one device needs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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


def tensors_in(family: Family, c: DecoderConfig, stored: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors of a model as these files have them: a family may have several ways to."""
    found = [expand(rules, c) for rules in family.rules]
    return min(found, key=lambda tensors: sum(t.name not in stored for t in tensors))


def check(tensors: Sequence[Tensor], stored: Mapping[str, Stored], c: DecoderConfig, where: Path) -> list[str]:
    """Returns what is left out of the files and why, a line each.

    Raises:
      WeightsError: a tensor is missing, unknown, or of another shape or dtype.
    """
    wanted = {t.name: t for t in tensors}
    absent = wanted.keys() - stored.keys()
    if absent:
        raise WeightsError(
            f"{where} lacks {names_in(absent)}, which its config.json says that the model has; copy all of its files"
        )
    notes, unknown = [], set(stored) - set(wanted)
    derived = {n for n in unknown if _DERIVED.search(n)}
    ahead = {n for n in unknown if (m := re.match(r"model\.layers\.(\d+)\.", n)) and int(m[1]) >= c.num_layers}
    if derived:
        notes.append(f"left out of {where}: {names_in(derived)}, which follow from its config.json")
    if ahead:
        notes.append(
            f"left out of {where}: {names_in(ahead)}, of layers after the last, which predict more tokens ahead"
        )
    unknown -= derived | ahead
    if c.tie_embeddings and "lm_head.weight" in unknown:
        _check_tied(stored, where)
        unknown.remove("lm_head.weight")
    if unknown:
        raise WeightsError(
            f"{where} has {names_in(unknown)}, for which this model has no parameter; it would be another without: check that "
            "config.json and the files are of one model"
        )
    for name, tensor in wanted.items():
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


def _check_tied(stored: Mapping[str, Stored], where: Path) -> None:
    """Raises WeightsError if the files have an output projection that is not the embedding, which the model takes."""
    head, table = stored["lm_head.weight"], stored.get("model.embed_tokens.weight")
    alike = table is not None and (head.shape, head.dtype) == (table.shape, table.dtype) and head.dtype in DTYPES
    if not (alike and table is not None and _equal(head.open(), table.open())):
        raise WeightsError(
            f"{where} has a lm_head.weight that is not the embedding, though its config.json ties them; set "
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
    return {leaf: _load_leaf(stored, of_leaf[leaf], wanted) for leaf, wanted in like.items()}


def _load_leaf(
    stored: Mapping[str, Stored], held: list[tuple[Tensor, Piece]], wanted: jax.ShapeDtypeStruct
) -> jax.Array:
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = defaultdict(list)
    for device, index in wanted.sharding.addressable_devices_indices_map(wanted.shape).items():
        spans = tuple(s.indices(n)[:2] for s, n in zip(index or (), wanted.shape, strict=True))
        devices[spans].append(device)
    shards = {}
    for spans, those in devices.items():
        shape = tuple(stop - start for start, stop in spans)
        here = [jnp.zeros(shape, wanted.dtype, device=device) for device in those]
        for tensor, piece in held:
            found = _cut(tensor, piece, spans, lambda tensor=tensor: stored[tensor.name].open())
            if found is not None:
                part, at = found
                here = [_put(whole, jax.device_put(part, d), at) for whole, d in zip(here, those, strict=True)]
                # Else the host would hold the parts of all tensors that wait to be put.
                jax.block_until_ready(here)
        shards |= dict(zip(those, here, strict=True))
    return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, list(shards.values()))


@partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, part: jax.Array, at: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, part.astype(whole.dtype), at)


def _cut(
    tensor: Tensor, piece: Piece, spans: tuple[tuple[int, int], ...], opened: Callable[[], np.ndarray]
) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """Returns (what a piece holds of a shard, where in the shard it lies); None if that is nothing."""
    if any(i is not None and not start <= i < stop for i, (start, stop) in zip(piece.at, spans, strict=True)):
        return None
    slices = tuple(slice(*span) for i, span in zip(piece.at, spans, strict=True) if i is None)
    shape = [1 if i is not None else stop - start for i, (start, stop) in zip(piece.at, spans, strict=True)]
    part = np.ascontiguousarray(view(opened(), tensor, piece)[slices]).reshape(shape)
    return part, tuple(0 if i is None else i - start for i, (start, _) in zip(piece.at, spans, strict=True))
