"""Native sparse attention for NVIDIA GPUs: kernels for the selected branch and for the choice of its blocks.

The two other branches are flash attention, over the block means and within the window.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.binding import Call
from kernels.framework.execute import Saved
from kernels.framework.work import Work
from kernels.ops.flash_attention import flash_attention
from kernels.ops.native_sparse_attention import triton_choice, triton_lists, triton_selected
from kernels.ops.native_sparse_attention.blocks import block_rows, means, spread
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, check_sizes, op, work
from kernels.ops.native_sparse_attention.parts import choice_op, selected_op, selected_work
from kernels.ops.native_sparse_attention.triton_sizes import Sizes, power, sizes_of

# The widest heads of the kernels, those of flash attention among them.
WIDEST = 256
# Rows of a tile of the selected branch, by the bytes of a number.
ROWS = {2: 64, 4: 32}
GATES = {"selected": "g_slc", "compressed": "g_cmp", "sliding": "g_swa"}
Branches = dict[str, tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class _Run:
    """A call: the contract's arguments, and what its branches are computed from. `chosen` are its blocks, if they are known."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    g_cmp: jax.Array | None
    g_slc: jax.Array | None
    g_swa: jax.Array | None
    block_indices: jax.Array | None
    block_counts: jax.Array | None
    starts: jax.Array | None
    q_start: jax.Array | None
    block_size: int
    num_blocks: int
    window: int
    softmax_scale: float | None
    cfg: NativeSparseConfig
    chosen: jax.Array | None = None

    def __post_init__(self) -> None:
        (T, N), (S, K) = self.query.shape[1:3], self.key.shape[1:3]
        check_sizes(N, K, T, S, self.block_size, self.num_blocks, self.window)

    @property
    def branches(self) -> list[str]:
        return _branches(self.g_cmp, self.window)

    @functools.cached_property
    def sizes(self) -> Sizes:
        named = _named(self.block_indices, self.num_blocks, self.block_size, self.key.shape[1])
        assert self.cfg.block_rows
        arrays = self.query, self.key, self.value
        return sizes_of(*arrays, named, self.block_size, self.softmax_scale, self.cfg.block_rows)

    @functools.cached_property
    def costs(self) -> tuple[Work, Work]:
        arrays = self.query, self.key, self.value, self.g_cmp, self.g_slc, self.g_swa, self.block_indices
        options = {"block_size": self.block_size, "num_blocks": self.num_blocks, "window": self.window}
        return work(op.bind(*arrays, **options))

    @functools.cached_property
    def first_query(self) -> jax.Array:
        """The place of the first query among the keys."""
        T, S = self.query.shape[1], self.key.shape[1]
        return jnp.asarray(S - T if self.q_start is None else self.q_start, jnp.int32)

    @functools.cached_property
    def every_start(self) -> jax.Array:
        return jnp.zeros((self.query.shape[0], self.key.shape[1]), jnp.int32) if self.starts is None else self.starts

    @functools.cached_property
    def slots(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return block_rows(self.every_start, self.block_size)

    @functools.cached_property
    def selected_blocks(self) -> jax.Array:
        if self.block_indices is not None or self.chosen is not None:
            return self.block_indices if self.chosen is None else self.chosen  # pyrefly: ignore[bad-return]
        of_keys = means(self.key, self.slots[0])
        return triton_choice.chosen_blocks(self.query, of_keys, self.starts, self.first_query, self.sizes)

    @functools.cached_property
    def lists(self) -> triton_lists.Lists:
        arrays = self.selected_blocks, self.block_counts, self.starts, self.first_query
        return triton_lists.lists_of(*arrays, self.sizes)

    def flash(self, branch: str) -> Call:
        """Returns the bound call of flash attention of a branch."""
        T, S = self.query.shape[1], self.key.shape[1]
        index = (self.first_query + jnp.arange(T, dtype=jnp.int32))[None]
        of_query = None if self.starts is None else jnp.take(self.starts, index[0], axis=1, mode="clip")
        if branch == "compressed":
            rows, ends, of_slot = self.slots
            keys = [means(x, rows).swapaxes(1, 2).astype(x.dtype) for x in (self.key, self.value)]
            documents = (of_query, None if self.starts is None else of_slot)
            # A block is where its last token is.
            mask = MaskInfo(*documents, jnp.broadcast_to(index, (ends.shape[0], T)), ends, causal=True)
        else:
            keys = [self.key, self.value]
            places = (None, None) if self.q_start is None else (index, jnp.arange(S, dtype=jnp.int32)[None])
            mask = MaskInfo(of_query, self.starts, *places, causal=True, window=(self.window - 1, 0))
        options = {"mask_info": mask, "softmax_scale": self.softmax_scale, "return_lse": True}
        return flash_attention.prepare(self.query, *keys, **options).call

    def forward(self) -> Branches:
        """Returns (output, log-sum-exp) of each branch."""
        arrays = self.query, self.key, self.value, self.lists, self.first_query
        selected = triton_selected.forward(*arrays, self.sizes, self.cfg, self.costs[0])
        others = self.branches[1:]
        return {"selected": selected} | {n: flash_attention.op.run(self.flash(n), platform="triton") for n in others}  # pyrefly: ignore[bad-return]

    def summed(self, branches: Branches) -> jax.Array:
        """Returns the branches times their gates, added."""
        total = jnp.float32(0)
        for name, (out, _) in branches.items():
            gate, out = getattr(self, GATES[name]), out.astype(jnp.float32)
            total = total + (out if gate is None else gate.astype(jnp.float32)[..., None] * out)
        return total.astype(self.query.dtype)

    def gradients(self, d_out: jax.Array, branches: Branches) -> dict[str, jax.Array]:
        """Returns the gradients of all floats, given the branches of the forward."""
        gradients, totals = {}, {}
        for name, (out, lse) in branches.items():
            gate, d = getattr(self, GATES[name]), d_out.astype(jnp.float32)
            delta = jnp.sum(d * out.astype(jnp.float32), axis=-1)
            if gate is not None:
                gradients[GATES[name]] = delta
                d, delta = d * gate.astype(jnp.float32)[..., None], delta * gate.astype(jnp.float32)
            arrays = d.astype(self.query.dtype), lse, delta
            of = self._of_selected(*arrays) if name == "selected" else self._of_flash(name, *arrays)
            for to, part in zip(("query", "key", "value"), of, strict=True):
                totals[to] = totals[to] + part.astype(jnp.float32) if to in totals else part.astype(jnp.float32)
        return gradients | totals

    def _of_selected(self, d_out, lse, delta):
        aligned = self.starts is None
        pairs = triton_lists.pairs_of(self.lists.first, self.sizes, aligned)
        arrays = d_out, lse, delta, self.query, self.key, self.value, self.lists, pairs, self.first_query
        return triton_selected.backward(*arrays, self.sizes, self.cfg, self.costs[1], aligned)

    def _of_flash(self, branch, d_out, lse, delta):
        saved = {"d_out": d_out, "lse": lse, "delta": delta}
        d = flash_attention.op.backward(saved, **self.flash(branch).arguments, platform="triton")
        keys = [d["key"], d["value"]]
        if branch == "compressed":
            where = self.every_start, *self.slots[1:], self.block_size
            keys = [spread(x.astype(jnp.float32).swapaxes(1, 2), *where) for x in keys]
        return d["query"], *keys


def _named(block_indices: Any, num_blocks: int, block_size: int, length: int) -> int:
    """Returns how many blocks a query names at most."""
    return min(num_blocks, -(-length // block_size)) if block_indices is None else block_indices.shape[-1]


def _branches(g_cmp: Any, window: int) -> list[str]:
    return ["selected", *(["compressed"] if g_cmp is not None else []), *(["sliding"] if window > 0 else [])]


def keeps(call: Call, cfg: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what is kept: the chosen blocks, and of each branch the output and the log-sum-exp."""
    (B, T, N, _), (S, K), HV = call.query.shape, call.key.shape[1:3], call.value.shape[3]
    kept = {}
    if call.block_indices is None:
        named = _named(None, call.num_blocks, call.block_size, S)
        kept["chosen"] = jax.ShapeDtypeStruct((B, T, K, named), jnp.int32)
    for name in _branches(call.g_cmp, call.window):
        kept[f"out_{name}"] = jax.ShapeDtypeStruct((B, T, N, HV), call.query.dtype)
        kept[f"lse_{name}"] = jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    return kept


def forward(
    query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
    softmax_scale, cfg,
):  # fmt: skip
    run = _Run(
        query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
        softmax_scale, cfg,
    )  # fmt: skip
    return run.summed(run.forward())


def forward_with_residuals(
    query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
    softmax_scale, cfg,
):  # fmt: skip
    run = _Run(
        query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
        softmax_scale, cfg,
    )  # fmt: skip
    branches = run.forward()
    kept = {"chosen": run.selected_blocks} if block_indices is None else {}
    for name, (out, lse) in branches.items():
        kept |= {f"out_{name}": out, f"lse_{name}": lse}
    return run.summed(branches), kept


def backward(
    saved: Saved, query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks,
    window, softmax_scale, cfg,
):  # fmt: skip
    run = _Run(
        query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
        softmax_scale, cfg, saved.get("chosen"),
    )  # fmt: skip
    kept = "out_selected" in saved
    branches = {n: (saved[f"out_{n}"], saved[f"lse_{n}"]) for n in run.branches} if kept else run.forward()
    return run.gradients(saved.d_out, branches)


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


def _too_wide(call: Call) -> str | None:
    for name in ("H", "Hv"):
        if call.dims.get(name, 0) > WIDEST:
            return f"{name} = {call.dims[name]} exceeds the maximum of {WIDEST}"
    return None


def _rejects(call: Call) -> str | None:
    if 0 in call.query.shape or 0 in call.key.shape:
        return "query or key has no elements"
    if too_wide := _too_wide(call):
        return too_wide
    B, T, K, S = (call.dims[n] for n in "BTKS")
    named = call.num_blocks if call.block_indices is None else 0
    named = _named(call.block_indices, named, call.block_size, S)
    sizes = sizes_of(call.query, call.key, call.value, named, call.block_size, 1.0, ROWS[2])
    pairs = B * T * K * named * triton_lists.overlapped(sizes, call.starts is None)
    return None if pairs < 2**31 else f"{pairs:,} pairs of queries and blocks are more than int32 counts"


# The choice and the selected branch by themselves, for keys that lie on several devices.


def choice(query, means, starts, q_start, block_size, num_blocks, softmax_scale):
    K, H = means.shape[1], means.shape[3]
    keys = jax.ShapeDtypeStruct((query.shape[0], starts.shape[1], K, H), query.dtype)
    named = _named(None, num_blocks, block_size, starts.shape[1])
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
    **_TUNED,
    **_WHERE,
)
choice_op.register(choice, rejects=_too_wide, **_WHERE)
selected_op.register(selected_forward, selected_backward, rejects=_rejects, **_TUNED, **_WHERE)
