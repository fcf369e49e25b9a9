"""What the backends with kernels share: the branches of a call, their sum by gates, and its gradients.

Two branches are flash attention, over the block means and within the window. A backend has the selected branch, and the choice
of its blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.binding import Call
from kernels.framework.execute import Saved
from kernels.framework.work import Work
from kernels.ops.flash_attention import flash_attention
from kernels.ops.native_sparse_attention.blocks import block_rows, means, spread
from kernels.ops.native_sparse_attention.contract import NativeSparseConfig, check_sizes, op, work

GATES = {"selected": "g_slc", "compressed": "g_cmp", "sliding": "g_swa"}
Branches = dict[str, tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Run:
    """A call: the contract's arguments, and what its branches are computed from. `chosen` are its blocks, if they are known.

    A backend's class has `toolchain`, that of flash attention, and the methods that raise here.
    """

    toolchain: ClassVar[str]

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
        return branches_of(self.g_cmp, self.window)

    @property
    def named(self) -> int:
        return named_blocks(self.block_indices, self.num_blocks, self.block_size, self.key.shape[1])

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
        return self.choose(means(self.key, self.slots[0]))

    def choose(self, of_keys: jax.Array) -> jax.Array:
        """Returns int32 [B, T, K, named], the chosen blocks, for the means of keys, float32 [B, K, slots, H]."""
        raise NotImplementedError

    def attend(self) -> tuple[jax.Array, jax.Array]:
        """Returns (output, log-sum-exp) of the selected branch."""
        raise NotImplementedError

    def gradients_of_selected(self, d_out: jax.Array, lse: jax.Array, delta: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the gradients of query, key and value by the selected branch."""
        raise NotImplementedError

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
        branches = {"selected": self.attend()}
        for name in self.branches[1:]:
            branches[name] = flash_attention.op.run(self.flash(name), platform=self.toolchain)
        return branches

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
            of = self.gradients_of_selected(*arrays) if name == "selected" else self._of_flash(name, *arrays)
            for to, part in zip(("query", "key", "value"), of, strict=True):
                totals[to] = totals[to] + part.astype(jnp.float32) if to in totals else part.astype(jnp.float32)
        return gradients | totals

    def _of_flash(self, branch, d_out, lse, delta):
        saved = {"d_out": d_out, "lse": lse, "delta": delta}
        d = flash_attention.op.backward(saved, **self.flash(branch).arguments, platform=self.toolchain)
        keys = [d["key"], d["value"]]
        if branch == "compressed":
            where = self.every_start, *self.slots[1:], self.block_size
            keys = [spread(x.astype(jnp.float32).swapaxes(1, 2), *where) for x in keys]
        return d["query"], *keys


def named_blocks(block_indices: Any, num_blocks: int, block_size: int, length: int) -> int:
    """Returns how many blocks a query names at most."""
    return min(num_blocks, -(-length // block_size)) if block_indices is None else block_indices.shape[-1]


def too_wide(call: Call, widest: int) -> str | None:
    """Returns why heads are refused that are wider than that."""
    for name in ("H", "Hv"):
        if call.dims.get(name, 0) > widest:
            return f"{name} = {call.dims[name]} exceeds the maximum of {widest}"
    return None


def branches_of(g_cmp: Any, window: int) -> list[str]:
    return ["selected", *(["compressed"] if g_cmp is not None else []), *(["sliding"] if window > 0 else [])]


def keeps(call: Call, cfg: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what is kept: the chosen blocks, and of each branch the output and the log-sum-exp."""
    (B, T, N, _), (S, K), HV = call.query.shape, call.key.shape[1:3], call.value.shape[3]
    kept = {}
    if call.block_indices is None:
        named = named_blocks(None, call.num_blocks, call.block_size, S)
        kept["chosen"] = jax.ShapeDtypeStruct((B, T, K, named), jnp.int32)
    for name in branches_of(call.g_cmp, call.window):
        kept[f"out_{name}"] = jax.ShapeDtypeStruct((B, T, N, HV), call.query.dtype)
        kept[f"lse_{name}"] = jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    return kept


def functions_of(run_of: type[Run]) -> tuple[Callable, Callable, Callable]:
    """Returns (forward, forward_with_residuals, backward) of a backend, whose parameters are the fields of a `Run`."""

    def forward(**call):
        run = run_of(**call)
        return run.summed(run.forward())

    def forward_with_residuals(**call):
        run = run_of(**call)
        branches = run.forward()
        kept = {"chosen": run.selected_blocks} if run.block_indices is None else {}
        for name, (out, lse) in branches.items():
            kept |= {f"out_{name}": out, f"lse_{name}": lse}
        return run.summed(branches), kept

    def backward(saved: Saved, **call):
        run = run_of(**call, chosen=saved.get("chosen"))
        kept = "out_selected" in saved
        branches = {n: (saved[f"out_{n}"], saved[f"lse_{n}"]) for n in run.branches} if kept else run.forward()
        return run.gradients(saved.d_out, branches)

    # A backend supports what its functions name.
    names = [f.name for f in fields(Run) if f.name != "chosen"]
    for function, first in ((forward, ()), (forward_with_residuals, ()), (backward, ("saved",))):
        kinds = [(n, Parameter.POSITIONAL_ONLY) for n in first] + [(n, Parameter.KEYWORD_ONLY) for n in names]
        vars(function)["__signature__"] = Signature([Parameter(*each) for each in kinds])
    return forward, forward_with_residuals, backward
