"""Native sparse attention for NVIDIA GPUs: kernels for the selected branch and for the choice of its blocks, and flash attention for
the two other branches, over the block means and within the window."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.binding import Call
from kernels.framework.execute import Saved
from kernels.ops.flash_attention import flash_attention
from kernels.ops.native_sparse_attention import triton_choice, triton_lists, triton_selected
from kernels.ops.native_sparse_attention.blocks import block_rows, means, spread
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, check_sizes, op, work
from kernels.ops.native_sparse_attention.triton_sizes import power, sizes_of

# The widest heads of the kernels, those of flash attention among them.
WIDEST = 256
# Rows of a tile of the selected branch.
ROWS = 64
GATES = {"selected": "g_slc", "compressed": "g_cmp", "sliding": "g_swa"}


class _Call:
    """A call, its blocks and its branches."""

    def __init__(
        self, query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks,
        window, softmax_scale, cfg, chosen=None,
    ):  # fmt: skip
        (_, T, N, _), (S, K) = query.shape, key.shape[1:3]
        check_sizes(N, K, T, S, block_size, num_blocks, window)
        self.query, self.key, self.value, self.cfg = query, key, value, cfg
        self.gates = {"selected": g_slc, "compressed": g_cmp, "sliding": g_swa}
        self.starts = None if starts is None else starts.astype(jnp.int32)
        self.shifted = q_start is not None
        self.q_start = jnp.asarray(S - T if q_start is None else q_start, jnp.int32)
        self.window, self.scale, self.block_size = window, softmax_scale, block_size
        self.branches = [n for n in GATES if n == "selected" or (window > 0 if n == "sliding" else g_cmp is not None)]
        named = _named(block_indices, num_blocks, block_size, S)
        self.sizes = sizes_of(query, key, value, named, block_size, softmax_scale, cfg.block_rows)
        every = jnp.zeros((query.shape[0], S), jnp.int32) if starts is None else self.starts
        self.rows, self.ends, self.of_slot = block_rows(every, block_size)
        self.every_start = every
        self.chosen = block_indices
        if block_indices is None and chosen is not None:
            self.chosen = chosen
        elif block_indices is None:
            of_keys = means(key, self.rows)
            self.chosen = triton_choice.chosen_blocks(query, of_keys, self.starts, self.q_start, self.sizes)
        assert self.chosen is not None
        self.counts = block_counts
        call = op.bind(
            query, key, value, g_cmp, g_slc, g_swa, block_indices, block_size=block_size, num_blocks=num_blocks, window=window
        )  # fmt: skip
        self.costs = work(call)

    def lists(self) -> triton_lists.Lists:
        counts = None if self.counts is None else self.counts.astype(jnp.int32)
        indices = self.chosen.astype(jnp.int32)
        return triton_lists.lists_of(indices, counts, self.starts, self.q_start, self.sizes)

    def flash(self, branch: str) -> Call:
        """Returns the bound call of flash attention of a branch."""
        B, T = self.query.shape[:2]
        S = self.key.shape[1]
        index = (self.q_start + jnp.arange(T, dtype=jnp.int32))[None]
        of_query = None if self.starts is None else jnp.take(self.starts, index[0], axis=1, mode="clip")
        if branch == "compressed":
            # A block's place is that of its last token.
            keys = [means(x, self.rows).swapaxes(1, 2).astype(x.dtype) for x in (self.key, self.value)]
            ends, of_slot = (self.ends, self.of_slot) if self.starts is not None else (self.ends[:1], None)
            mask = MaskInfo(of_query, of_slot, jnp.broadcast_to(index, (ends.shape[0], T)), ends, causal=True)
        else:
            keys = [self.key, self.value]
            places = (index, jnp.arange(S, dtype=jnp.int32)[None]) if self.shifted else (None, None)
            mask = MaskInfo(of_query, self.starts, *places, causal=True, window=(self.window - 1, 0))
        options = {"mask_info": mask, "softmax_scale": self.scale, "return_lse": True}
        return flash_attention.prepare(self.query, *keys, **options).call

    def forward(self) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns (output, log-sum-exp) of each branch."""
        return {
            n: triton_selected.forward(
                self.query, self.key, self.value, self.lists(), self.q_start, self.sizes, self.cfg, self.costs[0]
            )
            if n == "selected"
            else flash_attention.op.run(self.flash(n), platform="triton")
            for n in self.branches
        }  # fmt: skip

    def summed(self, branches: dict[str, tuple[jax.Array, jax.Array]]) -> jax.Array:
        """Returns the branches times their gates, added."""
        total = 0.0
        for name, (out, _) in branches.items():
            gate, out = self.gates[name], out.astype(jnp.float32)
            total = total + (out if gate is None else gate.astype(jnp.float32)[..., None] * out)
        return total.astype(self.query.dtype)  # pyrefly: ignore[missing-attribute]

    def backward(self, d_out: jax.Array, branches: dict[str, tuple[jax.Array, jax.Array]]) -> dict[str, jax.Array]:
        gradients: dict[str, jax.Array] = {}
        dq, dk, dv = [], [], []
        for name, (out, lse) in branches.items():
            gate, d = self.gates[name], d_out.astype(jnp.float32)
            along = jnp.sum(d * out.astype(jnp.float32), axis=-1)  # the gradient of the gate
            if gate is not None:
                gradients[GATES[name]] = along
                d, along = d * gate.astype(jnp.float32)[..., None], along * gate.astype(jnp.float32)
            of = getattr(self, f"_{name}_gradients")(d.astype(self.query.dtype), lse, along)
            for total, part in zip((dq, dk, dv), of, strict=True):
                total.append(part.astype(jnp.float32))
        return gradients | {"query": sum(dq), "key": sum(dk), "value": sum(dv)}  # pyrefly: ignore[bad-return]

    def _selected_gradients(self, d_out, lse, delta):
        lists = self.lists()
        aligned = self.starts is None
        pairs = triton_lists.pairs_of(lists.first, self.sizes, aligned)
        arrays = d_out, lse, delta, self.query, self.key, self.value
        return triton_selected.backward(
            *arrays, lists, pairs, self.q_start, self.sizes, self.cfg, self.costs[1], aligned
        )

    def _flash_gradients(self, name, d_out, lse, delta):
        saved = {"d_out": d_out, "lse": lse, "delta": delta}
        d = flash_attention.op.backward(saved, **self.flash(name).arguments, platform="triton")
        return d["query"], d["key"], d["value"]

    def _sliding_gradients(self, *arrays):
        return self._flash_gradients("sliding", *arrays)

    def _compressed_gradients(self, *arrays):
        dq, *d_means = self._flash_gradients("compressed", *arrays)
        where = self.every_start, self.ends, self.of_slot, self.block_size
        return dq, *[spread(d.astype(jnp.float32).swapaxes(1, 2), *where) for d in d_means]


def _named(block_indices: Any, num_blocks: int, block_size: int, S: int) -> int:
    return min(num_blocks, -(-S // block_size)) if block_indices is None else block_indices.shape[-1]


def keeps(call: Call, cfg: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Keeps the chosen blocks, and of each branch the output and the log-sum-exp."""
    (B, T, N, _), (S, K, HV) = call.query.shape, (*call.key.shape[1:3], call.value.shape[3])
    kept = {}
    if call.block_indices is None:
        named = _named(None, call.num_blocks, call.block_size, S)
        kept["chosen"] = jax.ShapeDtypeStruct((B, T, K, named), jnp.int32)
    for name, there in (("selected", True), ("compressed", call.g_cmp is not None), ("sliding", call.window > 0)):
        if there:
            kept[f"out_{name}"] = jax.ShapeDtypeStruct((B, T, N, HV), call.query.dtype)
            kept[f"lse_{name}"] = jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    return kept


def forward(
    query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
    softmax_scale, cfg,
):  # fmt: skip
    call = _Call(
        query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
        softmax_scale, cfg,
    )  # fmt: skip
    return call.summed(call.forward())


def forward_with_residuals(
    query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
    softmax_scale, cfg,
):  # fmt: skip
    call = _Call(
        query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
        softmax_scale, cfg,
    )  # fmt: skip
    branches = call.forward()
    kept = {} if block_indices is not None else {"chosen": call.chosen}
    for name, (out, lse) in branches.items():
        kept |= {f"out_{name}": out, f"lse_{name}": lse}
    return call.summed(branches), kept


def backward(
    saved: Saved, query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks,
    window, softmax_scale, cfg,
):  # fmt: skip
    call = _Call(
        query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts, starts, q_start, block_size, num_blocks, window,
        softmax_scale, cfg, saved.get("chosen"),
    )  # fmt: skip
    if "out_selected" in saved:
        branches = {n: (saved[f"out_{n}"], saved[f"lse_{n}"]) for n in call.branches}
    else:
        branches = call.forward()
    return call.backward(saved.d_out, branches)


def _heuristic(call: Call, platform: str) -> NativeSparseConfig:
    wide = power(max(call.dims["H"], call.dims["Hv"])) * call.query.dtype.itemsize
    tall = power(call.dims["N"] // call.dims["K"]) > ROWS
    num_warps = 8 if tall or wide > 256 else 4
    stages = 2 if wide <= 256 else 1
    return NativeSparseConfig(None, ROWS, num_warps, stages, 8, stages)


def _candidates(call: Call) -> list[NativeSparseConfig]:
    first = _heuristic(call, "cuda")
    return [
        first,
        *(
            NativeSparseConfig(None, rows, num_warps, stages, 8, backward)
            for rows in (16, 32, 64)
            for num_warps in (4, 8)
            for stages, backward in ((2, 1), (3, 2))
        ),
    ]


def _rejects(call: Call) -> str | None:
    if 0 in call.query.shape or 0 in call.key.shape:
        return "query or key has no elements"
    for name in ("H", "Hv"):
        if call.dims[name] > WIDEST:
            return f"{name} = {call.dims[name]} exceeds the maximum of {WIDEST}"
    return None


op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=_rejects,
    heuristic=_heuristic,
    candidates=_candidates,
    keeps=keeps,
)
