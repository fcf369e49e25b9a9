"""The parameters of a run with adapters (`ejdist.models.lora`): read with what the adapters add, like those of any run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ejdist.layout import replicated
from ejdist.models.decoder import DecoderConfig, declare
from ejdist.models.lora import BASE, LoRASection, base_of, declare_adapter, merged, targets_of
from ejdist.models.parameters import Param

Likes = dict[str, jax.ShapeDtypeStruct]


class Merged:
    """Computes the leaves of a run's model from those of its checkpoints: each matrix with what its adapter adds."""

    def __init__(self, c: DecoderConfig, section: LoRASection) -> None:
        self._declared, self._section = declare(c), section
        self._layers = self._declared["layers"]
        self.targets = targets_of(self._layers, section)
        self._stored = base_of(self._declared, section, c.compute_dtype).stored()

    def likes(self, leaf: str) -> Likes:
        """Returns name -> shape and dtype of what a leaf, "params.layers.query", is computed from; nothing for a buffer."""
        kind, _, path = leaf.partition(".")
        if kind != "params":
            return {}
        base_name, place = f"buffers.{BASE}.{path}", self._stored
        for name in path.split("."):
            place = place[name]
        leaves: dict[str, Param] = (
            {f"{base_name}.{k}": p for k, p in place.items()} if isinstance(place, dict) else {base_name: place}
        )
        if p := self._adapted(leaf):
            leaves |= {f"{leaf}.{name}": x for name, x in declare_adapter(p, self._section.rank).items()}
        return {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in leaves.items()}

    def placed(self, leaf: str, like: jax.ShapeDtypeStruct) -> Likes:
        """Returns `likes` with shardings: arrays of the leaf's shape are sharded as the leaf will be, others replicated."""
        sharding = like.sharding
        rest = replicated(sharding.mesh) if isinstance(sharding, NamedSharding) else sharding
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if x.shape == like.shape else rest)
            for name, x in self.likes(leaf).items()
        }

    def made(self, leaf: str, arrays: Mapping[str, Any], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns a leaf, with the shape, dtype and sharding of `like`, from the arrays of `likes`."""
        make = partial(self._make, leaf, dtype=like.dtype)
        return jax.jit(make, out_shardings=like.sharding)(dict(arrays))

    def rows(self, leaf: str, arrays: Mapping[str, Any]) -> MergedRows:
        """Returns a leaf, float32, computed a layer at a time. arrays: those of `likes`, each of which gives its rows."""
        stack = leaf.startswith("params.layers.")
        return MergedRows(jax.jit(partial(self._make, leaf, dtype="float32")), arrays, stack)

    def _adapted(self, leaf: str) -> Param | None:
        """Returns the matrix that a leaf is, if it has an adapter."""
        name = leaf.rpartition(".")[2]
        return self._layers[name] if leaf == f"params.layers.{name}" and name in self.targets else None

    def _make(self, leaf: str, arrays: dict[str, jax.Array], dtype: Any) -> jax.Array:
        base_name = f"buffers.{BASE}.{leaf.removeprefix('params.')}"
        x = arrays[base_name] if base_name in arrays else {k: arrays[f"{base_name}.{k}"] for k in ("values", "scale")}
        a, b = (arrays.get(f"{leaf}.{name}") for name in "ab")
        return merged(self._adapted(leaf), x, a, b, self._section.strength).astype(dtype)


class MergedRows:
    """A leaf that is computed as it is read: `leaf[3]` is that of layer 3 of its kind, `leaf[...]` the whole."""

    def __init__(self, make: Callable[[dict[str, Any]], jax.Array], arrays: Mapping[str, Any], stack: bool) -> None:
        self._make, self._arrays, self._stack = make, arrays, stack

    def __getitem__(self, index: Any) -> np.ndarray:
        one = self._stack and index is not ...
        rows = {name: np.asarray(x[index]) for name, x in self._arrays.items()}
        merged_rows = np.asarray(self._make({name: x[None] for name, x in rows.items()} if one else rows))
        return merged_rows[0] if one else merged_rows
