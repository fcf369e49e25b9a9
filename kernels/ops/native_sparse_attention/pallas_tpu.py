"""Native sparse attention for TPUs: kernels for the selected branch and for the choice of its blocks.

The two other branches are flash attention, over the block means and within the window.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pallas_calls import LANES, SMEM_BYTES
from kernels.engines.attention.pallas_passes import VMEM_BYTES
from kernels.framework.binding import Call
from kernels.framework.execute import Saved
from kernels.ops.flash_attention import flash_attention
from kernels.ops.native_sparse_attention import pallas_choice, pallas_lists, pallas_selected
from kernels.ops.native_sparse_attention.branches import Run, branches_of, functions_of, keeps, named_blocks, too_wide
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, op
from kernels.ops.native_sparse_attention.pallas_lists import HEADER, PART, Selected, Sizes, sizes_of
from kernels.ops.native_sparse_attention.parts import choice_op, selected_op, selected_work

# The widest heads of the kernels.
WIDEST = 512


@dataclass(frozen=True)
class _Run(Run):
    toolchain = "pallas"

    @functools.cached_property
    def sizes(self) -> Sizes:
        (B, T, N, H), (S, K), HV = self.query.shape, self.key.shape[1:3], self.value.shape[3]
        lengths, aligned = (B, T, S, N, K, H, HV), self.starts is None
        return sizes_of(lengths, self.named, self.block_size, self.softmax_scale, aligned, self.cfg)

    @functools.cached_property
    def what(self) -> Selected:
        arrays = self.selected_blocks, self.block_counts, self.every_start, self.first_query
        return pallas_lists.selected(*arrays, self.sizes)

    @functools.cached_property
    def lists(self) -> jax.Array:
        return pallas_lists.by_queries(self.what, self.sizes)

    def choose(self, of_keys: jax.Array) -> jax.Array:
        position, start = pallas_lists.places(self.every_start, self.first_query, self.sizes)
        return pallas_choice.chosen_blocks(self.query, of_keys, start, position, self.sizes)

    def attend(self) -> tuple[jax.Array, jax.Array]:
        arrays = self.query, self.key, self.value, self.what, self.lists
        return pallas_selected.forward(*arrays, self.sizes, self.cfg, self.costs[0])

    def gradients_of_selected(self, d_out: jax.Array, lse: jax.Array, delta: jax.Array) -> tuple[jax.Array, ...]:
        arrays = d_out, lse, delta, self.query, self.key, self.value, self.what, self.lists
        return pallas_selected.backward(*arrays, self.sizes, self.cfg, self.costs[1])


forward, forward_with_residuals, backward = functions_of(_Run)


# -- configurations -----------------------------------------------------------------------------------------------------


def _config(rows: int, keys: int) -> NativeSparseConfig:
    # A tile is read for few queries: copies of several are in flight, to hide what each takes to begin.
    return NativeSparseConfig(
        block_rows=rows, block_keys=keys, backward_rows=2 * rows, num_stages=6, backward_num_stages=6
    )


def _heuristic(call: Call, platform: str) -> NativeSparseConfig:
    return _config(LANES, min(256, 4 * pallas_lists.keys_of(call.block_size)))


def _candidates(call: Call) -> list[NativeSparseConfig]:
    block = pallas_lists.keys_of(call.block_size)
    tried = [_config(rows, keys) for rows in (128, 256, 512) for keys in (block, 4 * block)]
    return list(dict.fromkeys([_heuristic(call, "tpu"), *tried]))


def _flash_refusal(call: Call, branch: str) -> str | None:
    """Returns why flash attention cannot be a branch, from shapes alone."""
    B, T, S, K, H, HV = (call.dims[n] for n in ("B", "T", "S", "K", "H", "Hv"))
    length, window = (-(-S // call.block_size), None) if branch == "compressed" else (S, (call.window - 1, 0))
    rows = B if branch == "compressed" or call.starts is not None else 1
    places: Any = jax.ShapeDtypeStruct((rows, T), jnp.int32), jax.ShapeDtypeStruct((rows, length), jnp.int32)
    documents = places if call.starts is not None else (None, None)
    positions = places if branch == "compressed" or call.q_start is not None else (None, None)
    mask = MaskInfo(*documents, *positions, causal=True, window=window)
    key, value = (jax.ShapeDtypeStruct((B, length, K, width), call.query.dtype) for width in (H, HV))
    bound = flash_attention.op.bind(call.query, key, value, mask=mask)
    reason = flash_attention.op.backends["pallas_tpu"].refuses(flash_attention.op, bound, True)
    return reason and f"the {branch} branch, flash attention: {reason}"


def _rejects(call: Call) -> str | None:
    if 0 in call.query.shape or 0 in call.key.shape:
        return "query or key has no elements"
    if reason := too_wide(call, WIDEST):
        return reason
    chosen = call.block_indices is None
    named = named_blocks(call.block_indices, call.num_blocks if chosen else 0, call.block_size, call.dims["S"])
    lengths = tuple(call.dims[n] for n in ("B", "T", "S", "N", "K", "H", "Hv"))
    sizes = sizes_of(lengths, named, call.block_size, 1.0, call.starts is None, _heuristic(call, "tpu"))
    # Two lists, each with the next one on its way, and the tiles of keys of all parts.
    parts = sizes.B * sizes.K * sizes.parts
    scalars = 16 * (HEADER + max(sizes.listed + sizes.PIECES, PART)) + 4 * parts
    if scalars > SMEM_BYTES:
        return (
            f"lists of {sizes.listed:,} tiles in {parts:,} parts take {scalars >> 10:,} KiB of scalar memory, of which there "
            f"are {SMEM_BYTES >> 10}; split the sequence or the heads over devices"
        )
    if chosen and (reason := _no_room(sizes, call)):
        return reason
    branches = branches_of(call.g_cmp, call.window)[1:] if call.op_name == op.name else []
    return next(filter(None, (_flash_refusal(call, name) for name in branches)), None)


def _no_room(sizes: Sizes, call: Call) -> str | None:
    room = pallas_choice.vmem_bytes(sizes, call.query.dtype.itemsize)
    if sizes.NAMED <= pallas_choice.ALWAYS or room <= VMEM_BYTES:
        return None
    return f"the choice of blocks takes {room >> 20:,} MiB of VMEM, of which there are {VMEM_BYTES >> 20}"


# The choice and the selected branch as operations of their own, for keys that are split over devices.


def _sizes_of_choice(query: Any, means: Any, starts: Any, block_size: int, num_blocks: int, scale: Any) -> Sizes:
    (B, T, N, H), K, S = query.shape, means.shape[1], starts.shape[1]
    named = named_blocks(None, num_blocks, block_size, S)
    return sizes_of((B, T, S, N, K, H, H), named, block_size, scale, False, _config(LANES, LANES))


def _rejects_choice(call: Call) -> str | None:
    sizes = _sizes_of_choice(call.query, call.means, call.starts, call.block_size, call.num_blocks, 1.0)
    return too_wide(call, WIDEST) or _no_room(sizes, call)


def choice(query, means, starts, q_start, block_size, num_blocks, softmax_scale):
    sizes = _sizes_of_choice(query, means, starts, block_size, num_blocks, softmax_scale)
    position, start = pallas_lists.places(starts, q_start, sizes)
    return pallas_choice.chosen_blocks(query, means, start, position, sizes)


def _selected(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg):
    """Returns (what queries read, the lists of their tiles, sizes), and the work of both directions."""
    (B, T, N, H), (S, K), HV = query.shape, key.shape[1:3], value.shape[3]
    lengths, named = (B, T, S, N, K, H, HV), block_indices.shape[-1]
    sizes = sizes_of(lengths, named, block_size, softmax_scale, starts is None, cfg)
    first = jnp.asarray(S - T if q_start is None else q_start, jnp.int32)
    every = jnp.zeros((B, S), jnp.int32) if starts is None else starts
    what = pallas_lists.selected(block_indices, None, every, first, sizes)
    call = selected_op.bind(query, key, value, block_indices, block_size=block_size)
    return (what, pallas_lists.by_queries(what, sizes), sizes), selected_work(call)


def selected_forward(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg):
    lists, costs = _selected(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg)
    return pallas_selected.forward(query, key, value, *lists, cfg, costs[0])


def selected_backward(
    saved: Saved, query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg
):  # fmt: skip
    lists, costs = _selected(query, key, value, block_indices, starts, q_start, block_size, softmax_scale, cfg)
    arrays = saved.d_out, saved.lse, saved.delta, query, key, value, *lists
    return dict(zip(("query", "key", "value"), pallas_selected.backward(*arrays, cfg, costs[1]), strict=True))


_WHERE: dict[str, Any] = {"platforms": {"tpu"}, "dtypes": {"float32", "bfloat16"}}
_TUNED: dict[str, Any] = {"heuristic": _heuristic, "candidates": _candidates}
op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    rejects=_rejects,
    keeps=keeps,
    name="pallas_tpu",
    **_TUNED,
    **_WHERE,
)
choice_op.register(choice, rejects=_rejects_choice, **_WHERE)
selected_op.register(selected_forward, selected_backward, rejects=_rejects, **_TUNED, **_WHERE)
