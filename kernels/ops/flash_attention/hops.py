"""Attention of the same queries over one set of keys after another, each added to what there is, in its place: the hops of a
ring, for which a kernel need not leave its results to be merged by passes over memory.

Two masks describe a hop. One is compared pair by pair. The other hides all that is to be hidden, and decides which tiles
meet. So tokens that alternate between ranks in runs of whole tiles need no positions in a kernel: of two tiles of different
ranks all pairs are in causal order, or none. Where the keys of a rank are among those of others, positions are compared, and of
a tile those of its first tokens are read.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.softmax import merge
from kernels.framework.binding import Call
from kernels.framework.dispatch import apply
from kernels.framework.interpret import interpreting
from kernels.framework.platforms import PLATFORMS
from kernels.ops.flash_attention.contract import op

# Backends with kernels that add in place: their platform, and the file that has the kernels.
_FILES = {"triton_gpu": ("cuda", "triton_hops")}
_OPTIONS = ("softmax_scale", "logits_soft_cap")
Heads = tuple[int, int]  # the first, and how many
TILE = 128  # queries and keys: the largest tile of either direction of these kernels, and their widest heads


@dataclass(frozen=True)
class Hops:
    """The hops of one call. Where the program is lowered for another platform than that of the kernels, hops are calls of
    `flash_attention` that are merged.

    tile: runs of tokens are multiples of it where tiles decide what is hidden, or positions are compared.
    """

    kernels: ModuleType
    platform: str
    asked: bool  # whether a backend was asked for by name
    cfg: Any
    options: tuple[tuple[str, Any], ...]

    @property
    def tile(self) -> int:
        return TILE

    def _apply(self, kernel: Callable, merged: Callable, result: Any, operands: tuple) -> Any:
        kernel = partial(kernel, options=dict(self.options), cfg=self.cfg)
        others: Any = merged
        if self.asked:
            refusal = f"{op.name}: what argument 'platform' names runs on {self.platform} devices; leave it out here"
            others = kernel if interpreting() else refusal
        return apply(op.name, {p: kernel if p == self.platform else others for p in PLATFORMS}, result, *operands)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        mask: MaskInfo,
        of_tiles: MaskInfo,
        sofar: tuple[jax.Array, jax.Array] | None,
        dtype: Any,
        heads: Heads | None = None,
        table: jax.Array | None = None,
        into: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (out [B, T, N, Hv], lse [B, T, N] float32) over these keys and those of `sofar`, which is overwritten if its
        out has the dtype of the result's.

        Args:
          query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv]; padding of keys and values is zero. Without a value:
            values beside keys, [B, S, K, H + Hv], see `joins`.
          dtype: of out: float32 where more is to be merged, or that of the queries.
          heads: the heads of the queries that see these keys; None: all.
          table: int32 [B|1, S / tile]: where each tile of keys lies. The masks are of the keys in its order.
          into: (out, lse) that are overwritten with those of `heads`, and of other heads are the result; None: there it may be
            anything.
        """

        assert sofar is None or heads is None, "only all heads are merged"
        shape = *query.shape[:3], key.shape[3] - query.shape[3] if value is None else value.shape[3]
        result = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:3], jnp.float32)

        def merged(
            query: Any, key: Any, value: Any, mask: Any, of_tiles: Any, sofar: Any, into: Any, table: Any
        ) -> Any:
            key, value = _apart(query, key, value)
            key, value = (x if table is None else _laid(x, table, self.tile) for x in (key, value))
            out, lse = op(_of_heads(query, heads), key, value, mask=of_tiles, **dict(self.options))
            if sofar is not None:
                out, lse = merge(sofar[0].astype(jnp.float32), sofar[1], out, lse)
            into = [jnp.zeros(x.shape, x.dtype) for x in result] if into is None else into
            out, lse = (_with_heads(x, new, heads) for x, new in zip(into, (out, lse), strict=True))
            return out.astype(dtype), lse

        kernel = partial(self.kernels.attend, dtype=dtype, heads=heads)
        return self._apply(kernel, merged, result, (query, key, value, mask, of_tiles, sofar, into, table))

    def pull(
        self,
        saved: dict[str, jax.Array],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        mask: MaskInfo,
        of_tiles: MaskInfo,
        sums: jax.Array,
        heads: Heads | None = None,
        of_keys: Heads | None = None,
    ) -> tuple[jax.Array, ...]:
        """Returns (`sums` with the gradient of the queries added, see `of_query`; the gradients of the keys and of the values,
        in one array where these are).

        Args:
          saved: d_out, lse and delta, of the softmax over all keys. Padding is zero in it, and in the other arguments.
          sums: float32 [B, T, N, H], zeros at first; it is overwritten.
          heads: as of `attend`.
          of_keys: the heads of the keys that those see; None: all.
        """

        def merged(saved: Any, query: Any, key: Any, value: Any, mask: Any, of_tiles: Any, sums: Any) -> Any:
            keys = [_of_heads(x, of_keys) for x in _apart(query, key, value)]
            mine = {n: _of_heads(x, heads) for n, x in saved.items()}
            grads = op.backward(mine, _of_heads(query, heads), *keys, mask=of_tiles, **dict(self.options))
            total = _of_heads(sums, heads) + grads["query"] / self._scale(query)
            of_keys = grads["key"], grads["value"]
            of_keys = (jnp.concatenate(of_keys, -1),) if value is None else of_keys
            return _with_heads(sums, total, heads), *of_keys

        count = key.shape[2] if of_keys is None else of_keys[1]
        shapes = [(*x.shape[:2], count, x.shape[3]) for x in (key, value) if x is not None]
        result = jax.ShapeDtypeStruct(sums.shape, sums.dtype), *(jax.ShapeDtypeStruct(s, key.dtype) for s in shapes)
        kernel = partial(self.kernels.pull, heads=heads, of_keys=of_keys)
        return self._apply(kernel, merged, result, (saved, query, key, value, mask, of_tiles, sums))

    def of_query(self, sums: jax.Array) -> jax.Array:
        """Returns the gradient of the queries from the sums over all keys."""
        return sums * self._scale(sums)

    def _scale(self, query: jax.Array) -> float:
        scale = dict(self.options)["softmax_scale"]
        return 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def joins(width: int, value_width: int) -> bool:
    """Returns whether keys and values of these widths may lie side by side in one array: a kernel reads whole tiles of columns,
    and nothing cuts off what is after those of the keys."""
    return {width, value_width} <= {TILE // 2, TILE}


def _apart(query: jax.Array, key: jax.Array, value: jax.Array | None) -> Any:
    """Returns (keys, values)."""
    return jnp.split(key, [query.shape[3]], 3) if value is None else (key, value)


def _of_heads(x: jax.Array, heads: Heads | None) -> jax.Array:
    """Returns an array [B, T, N, ...] of some heads."""
    return x if heads is None else jax.lax.slice_in_dim(x, heads[0], sum(heads), axis=2)


def _with_heads(x: jax.Array, new: jax.Array, heads: Heads | None) -> jax.Array:
    """Returns an array [B, T, N, ...] with other numbers of some heads."""
    return new if heads is None else jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), heads[0], 2)


def _laid(x: jax.Array, table: jax.Array, tile: int) -> jax.Array:
    """Returns keys [B, S, ...] with their tiles in the order of a table."""
    tiles = x.reshape(x.shape[0], -1, tile, *x.shape[2:])
    table = jnp.broadcast_to(table, (x.shape[0], table.shape[1]))
    return jnp.take_along_axis(tiles, table[(..., *(None,) * (tiles.ndim - 2))], 1).reshape(x.shape)


def hops_of(call: Call, platform: str | None, cfg: Any) -> Hops | None:
    """Returns the hops of a ring whose hops are calls like this one; None where no backend that may run there has kernels that
    add in place. One that has is taken before those that were faster alone: these would be merged by passes over memory.

    Args:
      call: bound; of one hop. platform, cfg: as for `flash_attention`.
    """
    wanted = getattr(cfg, "platform", "auto") if platform is None else platform
    for name, (where, file) in _FILES.items():
        backend = op.backends.get(name)
        if backend is None or wanted not in ("auto", name, backend.toolchain):
            continue
        if backend.refuses(op, call, differentiated=True):
            continue
        kernels = importlib.import_module(f"{op.package}.{file}")
        asked = None if cfg is None else cfg.fwd_params.q_blocksize
        if asked not in (None, TILE):  # the tiles that the caller asks for are not those of a hop
            continue
        choices = op.plan(call, name, cfg, differentiated=True).choices
        fits = kernels.fitting(call, next(c.cfg for c in choices if c.platform == where))
        if fits is not None:
            options = tuple((n, call.arguments[n]) for n in _OPTIONS)
            return Hops(kernels, where, platform is not None, fits, options)
    return None
