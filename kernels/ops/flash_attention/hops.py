"""Attention of the same queries over one set of keys after another, each added to what there is, in its place: the hops of a
ring, for which a kernel need not leave its results to be merged by passes over memory.

Two masks describe a hop. One is compared pair by pair. The other hides all that is to be hidden, and decides which tiles
meet. So tokens that alternate between ranks in runs of whole tiles need no positions in a kernel: of two tiles of different
ranks all pairs are in causal order, or none.
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
TILE = 128  # queries and keys: the largest tile of either direction of these kernels, and their widest heads


@dataclass(frozen=True)
class Hops:
    """The hops of one call. Where the program is lowered for another platform than that of the kernels, hops are calls of
    `flash_attention` that are merged.

    tile: runs of tokens are multiples of it where tiles decide what is hidden.
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
        value: jax.Array,
        mask: MaskInfo,
        of_tiles: MaskInfo,
        sofar: tuple[jax.Array, jax.Array] | None,
        dtype: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (out [B, T, N, Hv], lse [B, T, N] float32) over these keys and those of `sofar`, which is overwritten if its
        out is float32 and the result's is too.

        Args:
          query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv]; padding of keys and values is zero.
          dtype: of out: float32 where more is to be merged, or that of the queries.
        """

        def merged(query: Any, key: Any, value: Any, mask: Any, of_tiles: Any, sofar: Any) -> Any:
            out, lse = op(query, key, value, mask=of_tiles, **dict(self.options))
            if sofar is not None:
                out, lse = merge(sofar[0].astype(jnp.float32), sofar[1], out, lse)
            return out.astype(dtype), lse

        shape = *query.shape[:3], value.shape[3]
        result = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:3], jnp.float32)
        kernel = partial(self.kernels.attend, dtype=dtype)
        return self._apply(kernel, merged, result, (query, key, value, mask, of_tiles, sofar))

    def pull(
        self,
        saved: dict[str, jax.Array],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: MaskInfo,
        of_tiles: MaskInfo,
        sums: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (`sums` with the gradient of the queries added, see `of_query`; the gradients of the keys and of the values).

        Args:
          saved: d_out, lse and delta, of the softmax over all keys. Padding is zero in it, and in the other arguments.
          sums: float32 [B, T, N, H], zeros at first; it is overwritten.
        """

        def merged(saved: Any, query: Any, key: Any, value: Any, mask: Any, of_tiles: Any, sums: Any) -> Any:
            grads = op.backward(saved, query, key, value, mask=of_tiles, **dict(self.options))
            return sums + grads["query"] / self._scale(query), grads["key"], grads["value"]

        shapes = ((x.shape, x.dtype) for x in (sums, key, value))
        result = tuple(jax.ShapeDtypeStruct(*s) for s in shapes)
        return self._apply(self.kernels.pull, merged, result, (saved, query, key, value, mask, of_tiles, sums))

    def of_query(self, sums: jax.Array) -> jax.Array:
        """Returns the gradient of the queries from the sums over all keys."""
        return sums * self._scale(sums)

    def _scale(self, query: jax.Array) -> float:
        scale = dict(self.options)["softmax_scale"]
        return 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


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
