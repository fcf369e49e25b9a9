"""Native sparse attention for NVIDIA GPUs: kernels for the selected branch and for the choice of its blocks.

The two other branches are flash attention, over the block means and within the window.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.framework.binding import Call
from kernels.framework.execute import Saved
from kernels.ops.native_sparse_attention import triton_choice, triton_lists, triton_selected
from kernels.ops.native_sparse_attention.blocks import overlapped, power
from kernels.ops.native_sparse_attention.branches import Run, functions_of, keeps, named_blocks, too_wide
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, op
from kernels.ops.native_sparse_attention.parts import choice_op, selected_op, selected_work
from kernels.ops.native_sparse_attention.triton_sizes import Sizes, sizes_of

# The widest heads of the kernels, those of flash attention among them.
WIDEST = 256
# Rows of a tile of the selected branch, by the bytes of a number.
ROWS = {2: 64, 4: 32}


@dataclass(frozen=True)
class _Run(Run):
    toolchain = "triton"

    @functools.cached_property
    def sizes(self) -> Sizes:
        assert self.cfg.block_rows
        arrays = self.query, self.key, self.value
        return sizes_of(*arrays, self.named, self.block_size, self.softmax_scale, self.cfg.block_rows)

    @functools.cached_property
    def lists(self) -> triton_lists.Lists:
        arrays = self.selected_blocks, self.block_counts, self.starts, self.first_query
        return triton_lists.lists_of(*arrays, self.sizes)

    def choose(self, of_keys: jax.Array) -> jax.Array:
        return triton_choice.chosen_blocks(self.query, of_keys, self.starts, self.first_query, self.sizes)

    def attend(self) -> tuple[jax.Array, jax.Array]:
        arrays = self.query, self.key, self.value, self.lists, self.first_query
        return triton_selected.forward(*arrays, self.sizes, self.cfg, self.costs[0])

    def gradients_of_selected(self, d_out: jax.Array, lse: jax.Array, delta: jax.Array) -> tuple[jax.Array, ...]:
        aligned = self.starts is None
        pairs = triton_lists.pairs_of(self.lists.first, self.sizes, aligned)
        arrays = d_out, lse, delta, self.query, self.key, self.value, self.lists, pairs, self.first_query
        return triton_selected.backward(*arrays, self.sizes, self.cfg, self.costs[1], aligned)


forward, forward_with_residuals, backward = functions_of(_Run)


def _heuristic(call: Call, platform: str) -> NativeSparseConfig:
    itemsize = call.query.dtype.itemsize
    rows, wide = ROWS[itemsize], power(max(call.dims["H"], call.dims["Hv"])) * itemsize
    tall = power(call.dims["N"] // call.dims["K"]) > rows
    num_warps = 8 if tall or wide > 256 else 4
    # On an H200, 64 rows of 128 numbers: a third stage saves a tenth of the forward and costs a third of the gradient of the
    # queries; of tiles of keys, 4 warps without stages take half as long as 8 with two.
    stages, dq_stages = (3, 2) if num_warps == 4 else (1, 1) if wide > 256 else (2, 2)
    return NativeSparseConfig(None, rows, num_warps, stages, dq_stages, 8 if wide > 256 else 4, 1)


def _candidates(call: Call) -> list[NativeSparseConfig]:
    tiles = [(rows, num_warps) for rows in (16, 32, 64) for num_warps in (4, 8)]
    return [
        _heuristic(call, "cuda"),
        *(
            NativeSparseConfig(None, *t, stages, 2, warps, stages - 1)
            for t in tiles
            for stages, warps in ((2, 4), (3, 8))
        ),
    ]


def _rejects(call: Call) -> str | None:
    if 0 in call.query.shape or 0 in call.key.shape:
        return "query or key has no elements"
    if reason := too_wide(call, WIDEST):
        return reason
    B, T, K, S = (call.dims[n] for n in "BTKS")
    named = call.num_blocks if call.block_indices is None else 0
    named = named_blocks(call.block_indices, named, call.block_size, S)
    sizes = sizes_of(call.query, call.key, call.value, named, call.block_size, 1.0, ROWS[2])
    pairs = B * T * K * named * overlapped(call.block_size, sizes.BLOCK_K, call.starts is None)
    return None if pairs < 2**31 else f"{pairs:,} pairs of queries and blocks are more than int32 counts"


# The choice and the selected branch as operations of their own, for keys that are split over devices.


def choice(query, means, starts, q_start, block_size, num_blocks, softmax_scale):
    K, H = means.shape[1], means.shape[3]
    keys = jax.ShapeDtypeStruct((query.shape[0], starts.shape[1], K, H), query.dtype)
    named = named_blocks(None, num_blocks, block_size, starts.shape[1])
    sizes = sizes_of(query, keys, keys, named, block_size, softmax_scale, ROWS[query.dtype.itemsize])
    return triton_choice.chosen_blocks(query, means, starts, q_start, sizes)


def _selected(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg):
    """Returns (lists, place of the first query, sizes, work of both directions)."""
    sizes = sizes_of(query, key, value, block_indices.shape[-1], block_size, softmax_scale, cfg.block_rows)
    first = jnp.asarray(key.shape[1] - query.shape[1] if q_start is None else q_start, jnp.int32)
    call = selected_op.bind(query, key, value, block_indices, block_size=block_size)
    return triton_lists.lists_of(block_indices, None, starts, first, sizes), first, sizes, selected_work(call)


def selected_forward(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg):
    lists, first, sizes, costs = _selected(
        query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg
    )
    return triton_selected.forward(query, key, value, lists, first, sizes, cfg, costs[0])


def selected_backward(
    saved: Saved, query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg
):  # fmt: skip
    lists, first, sizes, costs = _selected(
        query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg
    )
    aligned = starts is None
    arrays = saved.d_out, saved.lse, saved.delta, query, key, value, lists
    pairs = triton_lists.pairs_of(lists.first, sizes, aligned)
    d = triton_selected.backward(*arrays, pairs, first, sizes, cfg, costs[1], aligned)
    return dict(zip(("query", "key", "value"), d, strict=True))


_WHERE: dict[str, Any] = {"platforms": {"cuda"}, "dtypes": {"float32", "bfloat16", "float16"}}
_TUNED: dict[str, Any] = {"heuristic": _heuristic, "candidates": _candidates}
op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    rejects=_rejects,
    keeps=keeps,
    name="triton_gpu",
    **_TUNED,
    **_WHERE,
)
choice_op.register(choice, rejects=functools.partial(too_wide, widest=WIDEST), **_WHERE)
selected_op.register(selected_forward, selected_backward, rejects=_rejects, **_TUNED, **_WHERE)
