"""The causal convolution for TPUs in Pallas: visits of blocks of tokens, the rows before and after them, and launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.scan import pallas_visits
from kernels.engines.scan.pallas_linear_parts import LANES
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.work import Work
from kernels.ops.state_space.contract import ConvConfig, conv_op, work_conv
from kernels.ops.state_space.conv_rows import (
    NOTHING,
    Rows,
    by_channels,
    by_rows,
    final_state,
    picked,
    rows_of,
)
from kernels.ops.state_space.conv_rows import refused as rows_refused
from kernels.ops.state_space.pallas_conv import BEGINS, FIELDS, MOVED, Plan, conv_bwd_kernel, conv_fwd_kernel
from kernels.toolchains.pallas import pallas_launch

SUBLANES = 8
LEAST = 16  # tokens of a block: a tile of bfloat16
SPANS = (512, 1024, 256)  # tokens of a block, the default first
CHANNELS = 512  # of a block
VMEM_BYTES = 48 * 2**20


class Visits(NamedTuple):
    """The visits of each row; sources as in `conv_rows.Rows`.

    Attributes:
      table: int32 [B, visits, FIELDS + W - 1], see `pallas_conv`.
      before, after: [B, visits, W - 1], sources of the rows before and after the tokens of a visit.
      marks: float32 [B, visits, 2, rows], or None. Of a row of scratch, how many rows of its document precede it; and of a
        token of the block, its number in the visit. -1 for none.
      begun: bool [B, G]: which sequences have tokens, if there is an initial state.
    """

    table: jax.Array
    before: jax.Array
    after: jax.Array
    marks: jax.Array | None
    begun: jax.Array


def tokens_alone(B: int, T: int, C: int, taps: int, has_state: bool) -> Visits:
    """Returns the visits of rows that are one sequence each."""
    first = jnp.arange(0, T, C, dtype=jnp.int32)
    entry = jnp.arange(taps, dtype=jnp.int32)
    before, after = first[:, None] - taps + entry, first[:, None] + C + entry
    leaves = T - taps + entry - first[:, None]
    leaves = jnp.where((leaves >= 0) & (leaves < C), leaves, -1)
    flags = jnp.where(first == 0, BEGINS if has_state else 0, 0) + pallas_visits.FRESH
    zero = jnp.zeros_like(first)
    fields = jnp.stack([first // C, zero, jnp.minimum(T - first, C), zero, flags], axis=-1)
    of_state = -1 - (before + taps) if has_state else NOTHING
    found = (
        jnp.concatenate([fields, leaves], axis=-1),
        jnp.where(before < 0, of_state, before),
        jnp.where(after < T, after, NOTHING),
    )
    table, before, after = (jnp.broadcast_to(x, (B, *x.shape)).astype(jnp.int32) for x in found)
    return Visits(table, before, after, None, jnp.ones((B, 1), bool))


def of_rows(found: Rows, segment_ids: jax.Array | None, num_states: int, C: int, taps: int, wide: int) -> Visits:
    """Returns the visits of rows of documents, or of sequences with a state each.

    Tokens of a visit stay in their places of the block, unless there is padding between two of one document. Then they are
    moved together, so that in either case adjacent rows are those that a window has.

    Args:
      wide: rows of `marks`.
    """
    (B, T), R, G = found.of_token.shape, found.source.shape[1], num_states
    table, _ = pallas_visits.visits(B, T, segment_ids, G, C)
    table = table.reshape(B, -1, pallas_visits.FIELDS)
    block, low, high, state, flags = (table[..., i] for i in range(pallas_visits.FIELDS))
    in_blocks = jnp.pad(found.of_token, ((0, 0), (0, -T % C)), constant_values=-1).reshape(B, -1, C)
    row = jnp.take_along_axis(in_blocks, block[..., None], axis=1)  # [B, visits, C]
    place = jnp.arange(C, dtype=jnp.int32)
    inside = (place >= low[..., None]) & (place < high[..., None]) & (row >= 0)
    count, any_inside = jnp.sum(inside, axis=2, dtype=jnp.int32), jnp.any(inside, axis=2)
    first, last = jnp.argmax(inside, axis=2), C - 1 - jnp.argmax(inside[..., ::-1], axis=2)
    first_row = jnp.where(any_inside, jnp.min(jnp.where(inside, row, R), axis=2), 0)

    def per_row(x: jax.Array, index: jax.Array, otherwise: int) -> jax.Array:
        there = (index >= 0) & (index < R)
        values = jnp.take_along_axis(x, index.clip(0, R - 1).reshape(B, -1), axis=1).reshape(index.shape)
        return jnp.where(there, values, otherwise)

    follows = inside & (per_row(found.seen, row, -1) >= 1) & (place > first[..., None])
    before_it = jnp.pad(inside, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    moved = jnp.any(follows & ~before_it, axis=2)
    start = jnp.where(any_inside & ~moved, first, 0).astype(jnp.int32)
    stop = jnp.where(any_inside, jnp.where(moved, count, last + 1), 0).astype(jnp.int32)
    at = jnp.arange(wide, dtype=jnp.int32)
    behind = at - stop[..., None]
    stay = jnp.pad(jnp.where(inside, row, -1), ((0, 0), (0, 0), (0, wide - C)), constant_values=-1)
    rows_at = jnp.where(behind >= 0, (first_row + count)[..., None] + behind, stay)
    rows_at = jnp.where(moved[..., None], first_row[..., None] + at, rows_at)
    rows_at = jnp.where(any_inside[..., None] & (behind < taps), rows_at, -1)
    seen = jnp.minimum(per_row(found.seen, rows_at, -1), taps)
    ranks = jnp.where(inside, row - first_row[..., None], -1)
    ranks = jnp.pad(ranks, ((0, 0), (0, 0), (0, wide - C)), constant_values=-1)

    entry = jnp.arange(taps, dtype=jnp.int32)
    before = per_row(found.source, first_row[..., None] - taps + entry, NOTHING)
    index = (first_row + count)[..., None] + entry
    after = jnp.where(per_row(found.seen, index, -1) >= 0, per_row(found.source, index, NOTHING), NOTHING)
    begins = any_inside & (per_row(found.source, first_row - 1, 0) < 0)
    last_tokens = jnp.take_along_axis(found.final.reshape(B, G, taps), state[..., None], axis=1)
    here = last_tokens - block[..., None] * C
    there = (last_tokens >= 0) & (here >= low[..., None]) & (here < high[..., None])
    rank = jnp.take_along_axis(ranks, here.clip(0, C - 1), axis=2)
    leaves = jnp.where(there, jnp.where(moved[..., None], rank, here), -1)
    flags = flags + jnp.where(begins, BEGINS, 0) + jnp.where(moved, MOVED, 0)
    fields = jnp.concatenate([jnp.stack([block, start, stop, state, flags], axis=-1), leaves], axis=-1)
    begun = jnp.any(begins[..., None] & (state[..., None] == jnp.arange(G)), axis=1)
    marks = jnp.stack([seen, ranks], axis=2).astype(jnp.float32)
    used = any_inside[..., None]
    before, after = jnp.where(used, before, NOTHING), jnp.where(used, after, NOTHING)
    return Visits(fields.astype(jnp.int32), before, after, marks, begun)


class Launch:
    """A launch of one call."""

    def __init__(
        self, x: Any, weight: Any, bias: Any, segment_ids: Any, initial_state: Any, activation: Any, num_states: int,
        span: int, channels: int,
    ) -> None:  # fmt: skip
        (B, self.T, self.F), taps, self.G = x.shape, weight.shape[1] - 1, num_states
        C = min(span, max(LEAST, power_of_two(self.T)))
        lead, self.channels = -(-taps // SUBLANES) * SUBLANES, min(channels, -(-self.F // LANES) * LANES)
        self.x, self.B, self.found = self.padded(x, C), B, rows_of(x, segment_ids, initial_state, num_states, taps)
        self.state = None if initial_state is None else self.padded(by_rows(initial_state))
        rows = C + 2 * lead
        wide = -(-(rows - lead) // LANES) * LANES
        has_state = initial_state is not None
        if self.found is None:
            self.visits = tokens_alone(B, self.T, C, taps, has_state)
        else:
            self.visits = of_rows(self.found, segment_ids, num_states, C, taps, wide)
        self.plan = Plan(
            C=C,
            taps=taps,
            lead=lead,
            columns=self.channels // LANES,
            visits=self.visits.table.shape[1],
            silu=activation == "silu",
            marked=self.found is not None,
            tail=self.T % C > 0,
        )
        features = {"weight": weight.T, "bias": None if bias is None else bias[None]}
        self.inputs = {"x": self.x}
        self.inputs |= {n: self.padded(y.astype(jnp.float32)) for n, y in features.items() if y is not None}
        self.inputs |= {} if self.visits.marks is None else {"marks": self.visits.marks}

    def padded(self, x: Any, tokens: int = 0) -> Any:
        """Returns an array with at least one block of channels, and of tokens."""
        pad = [(0, 0)] * x.ndim
        pad[-1] = (0, max(0, LANES - x.shape[-1]))
        pad[1] = (0, max(0, tokens - x.shape[1])) if tokens else (0, 0)
        return jnp.pad(x, pad) if any(after for _, after in pad) else x

    def halo(self, x: jax.Array, state: jax.Array | None, *sources: jax.Array) -> jax.Array:
        """Returns the rows around visits, float32 [B, visits, rows, F]."""
        source = jnp.concatenate(sources, axis=-1)
        return picked(x, state, source.reshape(self.B, -1)).reshape(*source.shape, -1)

    def run(
        self, kernel: Callable[..., None], inputs: Any, outputs: dict[str, Any], work: Work
    ) -> dict[str, jax.Array]:
        """Returns the outputs by name, given their shapes and dtypes."""
        p, width = self.plan, FIELDS + self.plan.taps

        def spec(name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
            def at(f: Any, b: Any, i: Any, table: Any) -> tuple[Any, ...]:
                field = (b * p.visits + i) * width
                if name in ("x", "out", "d_out", "dx"):
                    return b, table[field + pallas_visits.BLOCK], f
                if name in ("weight", "bias", "d_weight", "d_bias"):
                    return 0, f
                if name == "marks":
                    return b, i, 0, 0
                return b, table[field + pallas_visits.STATE] if name in ("d_exits", "d_entries") else i, 0, f

            if name in ("x", "out", "d_out", "dx"):
                return pl.BlockSpec((1, p.C, self.channels), at)
            if name == "marks":
                return pl.BlockSpec((1, 1, *shape[2:]), at)
            return pl.BlockSpec((*(1,) * (len(shape) - 2), shape[-2], self.channels), at)

        rows = (p.columns, p.rows, LANES)
        scratch = {"x_rows": rows} | ({"g_rows": rows} if "dx" in outputs else {})
        scratch |= {"seen": (p.rows, LANES)} if p.marked else {}
        names = [*inputs, *outputs, *scratch]

        def body(table: Any, *refs: Any) -> None:
            kernel(table, dict(zip(names, refs, strict=True)), p)

        results = pallas_launch(
            body,
            self.visits.table.reshape(-1),
            *inputs.values(),
            out_shape=tuple(outputs.values()),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(pl.cdiv(self.x.shape[2], self.channels), self.B, p.visits),
                in_specs=[spec(name, y.shape) for name, y in inputs.items()],
                out_specs=tuple(spec(name, y.shape) for name, y in outputs.items()),
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
            ),
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
            work=work,
            name=kernel.__name__,
        )
        return dict(zip(outputs, results, strict=True))


def forward(x, weight, bias, segment_ids, initial_state, activation, num_states, cfg):
    """Returns (out, final state) of the contract."""
    work = work_conv(conv_op.bind(x, weight, bias, num_states=num_states, activation=activation))[0]
    launch = Launch(
        x, weight, bias, segment_ids, initial_state, activation, num_states, *_tile(cfg.span, cfg.block_f)
    )  # fmt: skip
    inputs = launch.inputs | {"halo": launch.halo(launch.x, launch.state, launch.visits.before)}
    out = {"out": jax.ShapeDtypeStruct(launch.x.shape, x.dtype)}
    out = launch.run(conv_fwd_kernel, inputs, out, work)["out"][:, : launch.T, : launch.F]
    state = final_state(x, by_rows(initial_state), launch.found, num_states, launch.plan.taps)
    return out, by_channels(state, num_states)


def backward(saved, x, weight, bias, segment_ids, initial_state, activation, num_states, cfg):
    """Returns the gradients of the contract's arrays by name."""
    work = work_conv(conv_op.bind(x, weight, bias, num_states=num_states, activation=activation))[1]
    tile = _tile(cfg.backward_span, cfg.backward_block_f)
    launch = Launch(x, weight, bias, segment_ids, initial_state, activation, num_states, *tile)
    visits, plan, F = launch.visits, launch.plan, launch.x.shape[2]
    d_out, d_exits = launch.padded(saved.d_out, plan.C), launch.padded(by_rows(saved.d_final_state))
    of_tokens = jnp.where(visits.after < 0, NOTHING, visits.after)  # an entry of a state has no output
    inputs = launch.inputs | {
        "halo": launch.halo(launch.x, launch.state, visits.before, visits.after),
        "d_out": d_out,
        "d_halo": launch.halo(d_out, None, of_tokens),
        "d_exits": d_exits.reshape(x.shape[0], num_states, plan.taps, F),
    }
    shapes = {"dx": (launch.x.shape, x.dtype), "d_weight": ((plan.taps + 1, F), jnp.float32)}
    shapes |= {} if bias is None else {"d_bias": ((1, F), jnp.float32)}
    shapes |= {} if initial_state is None else {"d_entries": ((x.shape[0], num_states, plan.taps, F), jnp.float32)}
    outputs = {name: jax.ShapeDtypeStruct(*y) for name, y in shapes.items()}
    d = launch.run(conv_bwd_kernel, inputs, outputs, work)
    F = launch.F
    gradients = {"x": d["dx"][:, : launch.T, :F], "weight": d["d_weight"][:, :F].T}
    gradients |= {} if bias is None else {"bias": d["d_bias"][0, :F]}
    if initial_state is None:
        return gradients

    def passed(state: jax.Array) -> jax.Array:
        """Returns what of the final state are entries of the initial one, of sequences shorter than a window."""
        return final_state(x, state, launch.found, num_states, plan.taps)

    state = by_rows(initial_state)
    (left,) = jax.vjp(passed, state)[1](by_rows(saved.d_final_state))
    entries = jnp.where(visits.begun[..., None, None], d["d_entries"][..., :F], 0).reshape(left.shape)
    return gradients | {"initial_state": by_channels(entries + left, num_states)}


def _tile(span: int | None, block_f: int | None) -> tuple[int, int]:
    """Returns (tokens, channels) of a block.

    Raises:
      ValueError: they are no whole tiles of memory.
    """
    span, block_f = span or SPANS[0], block_f or CHANNELS
    if span < LEAST or block_f % LANES:
        raise ValueError(
            f"argument 'cfg': a program of span = {span} tokens and block_f = {block_f} channels; the Pallas kernels take "
            f"at least {LEAST} tokens, and multiples of {LANES} channels"
        )
    return span, block_f


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    d = call.dims
    visits = pallas_visits.most_visits(d["T"], call.num_states, SPANS[0])
    table = 4 * (FIELDS + d["W"] - 1) * d["B"] * visits
    if table > pallas_visits.SMEM_BYTES:
        return (
            f"the visits of {d['B']} rows take {table >> 10} KiB of scalar memory, of {pallas_visits.SMEM_BYTES >> 10}"
        )
    return rows_refused(call)


def heuristic(call: Call, platform: str) -> ConvConfig:
    """Returns the default tiles of a call."""
    return candidates(call)[0]


def candidates(call: Call) -> list[ConvConfig]:
    """Returns the configurations to tune over."""
    return [ConvConfig(block_f=CHANNELS, span=span, backward_block_f=CHANNELS, backward_span=span) for span in SPANS]
