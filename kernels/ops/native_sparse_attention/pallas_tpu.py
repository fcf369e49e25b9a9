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
from kernels.ops.flash_attention import flash_attention
from kernels.ops.native_sparse_attention import pallas_choice, pallas_lists, pallas_selected
from kernels.ops.native_sparse_attention.branches import Run, branches_of, functions_of, keeps, named_blocks
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, op
from kernels.ops.native_sparse_attention.pallas_lists import HEADER, PART, Selected, Sizes, sizes_of

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
        position = self.first_query + jnp.arange(self.query.shape[1], dtype=jnp.int32)
        start = jnp.take(self.every_start, position, axis=1, mode="clip").astype(jnp.int32)
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
    for name in ("H", "Hv"):
        if call.dims[name] > WIDEST:
            return f"{name} = {call.dims[name]} exceeds the maximum of {WIDEST}"
    named = named_blocks(call.block_indices, call.num_blocks, call.block_size, call.dims["S"])
    lengths = tuple(call.dims[n] for n in ("B", "T", "S", "N", "K", "H", "Hv"))
    sizes = sizes_of(lengths, named, call.block_size, 1.0, call.starts is None, _heuristic(call, "tpu"))
    # Two lists, each with the next one on its way, and the tiles of keys of all parts.
    scalars = 16 * (HEADER + max(sizes.listed + sizes.PIECES, PART)) + 4 * sizes.B * sizes.K * sizes.parts
    if scalars > SMEM_BYTES:
        return (
            f"lists of {sizes.listed:,} tiles in {sizes.B * sizes.K * sizes.parts:,} parts take {scalars >> 10:,} KiB of "
            f"scalar memory, of which there are {SMEM_BYTES >> 10}; split the sequence or the heads over devices"
        )
    room = pallas_choice.vmem_bytes(sizes, call.query.dtype.itemsize)
    if call.block_indices is None and named > pallas_choice.ALWAYS and room > VMEM_BYTES:
        return f"the choice of blocks takes {room >> 20:,} MiB of VMEM, of which there are {VMEM_BYTES >> 20}"
    return next(filter(None, (_flash_refusal(call, n) for n in branches_of(call.g_cmp, call.window)[1:])), None)


op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=_rejects,
    heuristic=_heuristic,
    candidates=_candidates,
    keeps=keeps,
    name="pallas_tpu",
)
