"""Calls of the kernels in `pallas_linear.py`: blocks of heads, where sequences begin, and what a backward computes again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.layout import chunks_of, layout
from kernels.engines.scan.pallas_linear import Plan, linear_bwd_kernel, linear_fwd_kernel
from kernels.engines.scan.pallas_linear_parts import FORGETS, LANES, LEAST_DECAY, tokens_last
from kernels.engines.scan.recurrence import resets
from kernels.framework.binding import Call
from kernels.framework.work import Work
from kernels.toolchains.pallas import pallas_launch

SUBLANES = 8
VMEM_BYTES = 48 * 2**20  # of 64 to 128 MiB
LONGEST = 256  # tokens of a chunk
MOST_TOGETHER = 32  # heads of a program
KEPT = ("states",)  # what a forward keeps for its backward


class Tokens(NamedTuple):
    """Arguments of `S_t = exp(a_t) S_{t-1} + w_t k_t v_tᵀ`, `out_t = scale · S_tᵀ q_t + skip · v_t`.

    Head n of N reads head n // (N / K) of an array with K heads.

    Attributes:
      q: [B, T, N or K, H]. k: [B, T, K, H]. v: [B, T, K or N, Hv].
      a: log decays, [B, T, N], or None. w: weights of the writes, [B, T, N], or None for 1. skip: [N], or None for 0.
      segment_ids: int [B, T], or None.
      entries: float32 [B, G, N, H, Hv], states that sequences start from, or None for 0.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    a: jax.Array | None
    w: jax.Array | None
    skip: jax.Array | None
    segment_ids: jax.Array | None
    entries: jax.Array | None


class Blocks(NamedTuple):
    """How heads are dealt to programs: those of one block of keys to `units` programs of `heads`."""

    heads: int
    units: int
    heads_k: int


def blocks_of(N: int, K: int) -> Blocks:
    """Returns the blocks of N heads that read K. A block has whole sublanes of heads, or all of them."""
    heads_k = SUBLANES if K % SUBLANES == 0 else K
    together, shared = heads_k * (N // K), N // K
    # Programs of one block share its keys if each has heads of one of them.
    return Blocks(SUBLANES, together // SUBLANES, heads_k) if shared % SUBLANES == 0 else Blocks(together, 1, heads_k)


class _Slots:
    """Tokens of packed sequences in chunks that each have tokens of one sequence."""

    def __init__(self, table: jax.Array, valid: jax.Array, T: int, C: int):
        slot = jnp.arange(C, dtype=jnp.int32)
        B, chunks = table.shape[:2]
        self.token = jnp.minimum(table[..., :1] + slot, T - 1).reshape(B, chunks * C)
        used = (slot < table[..., 1:2]).reshape(B, chunks * C)
        rows, index = jnp.arange(B)[:, None], jnp.arange(chunks * C, dtype=jnp.int32)
        slots = jnp.zeros((B, T), jnp.int32)
        self.slot = slots.at[rows, jnp.where(used, self.token, T)].set(index[None], mode="drop")
        self.valid = used & jnp.take_along_axis(valid, self.token, axis=1)
        self.state, self.flags = table[..., 2].reshape(-1), table[..., 3].reshape(-1)

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns an array [B, T, ...] in slots."""
        return jnp.take_along_axis(x, self.token.reshape(*self.token.shape, *(1,) * (x.ndim - 2)), axis=1)

    def collect(self, x: jax.Array) -> jax.Array:
        """Returns an array in slots as [B, T, ...]."""
        return jnp.take_along_axis(x, self.slot.reshape(*self.slot.shape, *(1,) * (x.ndim - 2)), axis=1)


class Launches:
    """The launches of one call."""

    def __init__(self, x: Tokens, N: int, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None):
        (B, T, _, H), K, Hv = x.q.shape, x.k.shape[2], x.v.shape[-1]
        C = _chunk(cfg.chunk, T)
        self.x, self.work, self.heads, self.T = x, work, (B, N), T
        self.layout = layout(B, T, C, x.segment_ids, num_states)
        self.slots = None
        if self.layout.table is not None and self.layout.valid is not None:
            self.slots = _Slots(self.layout.table, self.layout.valid, T, C)
        chunks, blocks = self.layout.chunks, blocks_of(N, K)
        self.plan = Plan(
            T=T if self.slots is None else chunks * C,
            C=C,
            chunks=chunks,
            heads=blocks.heads,
            rows=-(-blocks.heads // SUBLANES) * SUBLANES,
            units=blocks.units,
            heads_k=blocks.heads_k,
            of_keys=() if K == N else tuple(name for name in ("q", "k", "v") if getattr(x, name).shape[2] == K),
            last=(tokens_last(H), tokens_last(H), tokens_last(Hv)),
            scale=scale,
            dtype=x.q.dtype,
        )
        self.states = (B, num_states, N, *((Hv, H) if tokens_last(Hv) else (H, Hv)))  # as the kernels have them
        self.blocks = K // blocks.heads_k
        self.all_rows = self.blocks * blocks.units * self.plan.rows
        a = jnp.zeros((B, T, N), jnp.float32) if x.a is None else jnp.maximum(x.a.astype(jnp.float32), LEAST_DECAY)
        if num_states == 1 and x.segment_ids is not None:
            a = jnp.where(resets(x.segment_ids)[..., None], FORGETS, a)
        self.inputs = {"q": self.tokens(x.q), "k": self.tokens(x.k), "v": self.tokens(x.v), "a": self.per_token(a)}
        if x.w is not None:
            self.inputs["w"] = self.per_token(x.w)
        if self.layout.valid is not None:
            valid = self.layout.valid if self.slots is None else self.slots.valid
            self.inputs["valid"] = self._whole_chunks(valid[:, None].astype(jnp.float32))
        if x.skip is not None:
            self.inputs["skip"] = x.skip.astype(jnp.float32)

    # -- arrays as the kernels read them --------------------------------------------------------------------------------

    def tokens(self, x: jax.Array) -> jax.Array:
        """Returns an array [B, T, heads, D] as it lies, or as [B, T, D] with one head; in slots, if sequences are packed."""
        x = x if self.slots is None else self.slots.spread(x)
        if tokens_last(x.shape[3]):
            return jnp.transpose(x, (0, 2, 3, 1))
        return x[:, :, 0] if x.shape[2] == 1 else x

    def of_tokens(self, x: jax.Array, like: Any) -> jax.Array:
        """Returns an output of a kernel in the shape and dtype of `like` [B, T, heads, D]."""
        x = jnp.transpose(x, (0, 3, 1, 2)) if tokens_last(like.shape[3]) else x
        x = x if self.slots is None else self.slots.collect(x)
        x = x.reshape(like.shape)
        if self.slots is None or self.layout.valid is None:
            return x
        return jnp.where(self.layout.valid[..., None, None], x, 0)

    def per_token(self, x: jax.Array) -> jax.Array:
        """Returns an array [B, T, N] as float32 [B, rows, T] in whole chunks, with 0 for what is no valid token or no head."""
        x = x.astype(jnp.float32)
        x = x if self.layout.valid is None else jnp.where(self.layout.valid[..., None], x, 0)
        if self.slots is not None:
            x = jnp.where(self.slots.valid[..., None], self.slots.spread(x), 0)
        x = jnp.swapaxes(x, 1, 2)
        return self._whole_chunks(jnp.pad(x, ((0, 0), (0, self.all_rows - x.shape[1]), (0, 0))))

    def of_rows(self, x: jax.Array) -> jax.Array:
        """Returns an output of a kernel [B, rows, T] as [B, T, N], with 0 for padding."""
        x = jnp.swapaxes(x[:, : self.heads[1]], 1, 2)
        x = x[:, : self.T] if self.slots is None else self.slots.collect(x)
        return x if self.layout.valid is None else jnp.where(self.layout.valid[..., None], x, 0)

    def _whole_chunks(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.plan.chunks * self.plan.C - x.shape[2])))

    # -- launches -------------------------------------------------------------------------------------------------------

    def _spec(self, name: str, shape: tuple[int, ...], at: Callable[..., Any]) -> pl.BlockSpec:
        """Returns the block of an array, given grid indices and scalars -> (row, block of keys, chunk, unit, state)."""
        plan = self.plan
        if name == "skip":
            return pl.BlockSpec(memory_space=pltpu.SMEM)

        def spec(block: tuple[int, ...], index: Callable[..., tuple]) -> pl.BlockSpec:
            return pl.BlockSpec(block, lambda *grid: index(*at(*grid)))

        if name == "states":
            return spec((1, plan.heads, 1, *shape[3:]), lambda b, n, c, u, s: (b, n * plan.units + u, c, 0, 0))
        if len(shape) == 5:  # of all units, which then stay in VMEM
            return spec((1, 1, plan.heads * plan.units, *shape[3:]), lambda b, n, c, u, s: (b, s, n, 0, 0))
        if name == "valid":
            return spec((1, 1, plan.C), lambda b, n, c, u, s: (b, 0, c))
        if name in ("a", "w", "d_a", "d_w", "d_skip"):
            return spec((1, plan.rows, plan.C), lambda b, n, c, u, s: (b, n * plan.units + u, c))
        of_keys = name.removeprefix("d_") in plan.of_keys
        heads = plan.heads_k if of_keys else plan.heads

        def block_of(n: Any, u: Any) -> Any:
            return n if of_keys else n * plan.units + u

        width = self.x.v.shape[3] if name in ("v", "d_v", "out", "d_out") else self.x.q.shape[3]
        if tokens_last(width):
            return spec((1, heads, width, plan.C), lambda b, n, c, u, s: (b, block_of(n, u), 0, c))
        if len(shape) == 3:
            return spec((1, plan.C, shape[2]), lambda b, n, c, u, s: (b, c, 0))
        return spec((1, plan.C, heads, width), lambda b, n, c, u, s: (b, c, block_of(n, u), 0))

    def turned(self, x: jax.Array) -> jax.Array:
        """Returns states [..., H, Hv] as the kernels have them, or back."""
        return jnp.swapaxes(x, -1, -2) if self.plan.last[2] else x

    def launch(
        self,
        kernel: Callable[[dict[str, Any], Plan], None],
        inputs: Mapping[str, jax.Array],
        outputs: Mapping[str, jax.ShapeDtypeStruct],
        scratch: Mapping[str, tuple[int, ...]],
        reverse: bool = False,
        work: Work | None = None,
    ) -> dict[str, jax.Array]:
        """Returns the outputs of a kernel by name."""
        plan, chunks = self.plan, self.layout.chunks
        scalars = {} if self.slots is None else {"flags": self.slots.flags, "state_of": self.slots.state}

        def at(b: Any, n: Any, c: Any, u: Any, *scalars: Any) -> tuple[Any, ...]:
            c = chunks - 1 - c if reverse else c
            return b, n, c, u, scalars[1][b * chunks + c] if scalars else 0

        names = [*scalars, *inputs, *outputs, "state", *scratch]

        def run(*refs: Any) -> None:
            kernel(dict(zip(names, refs, strict=True)), plan)

        state = (plan.heads * plan.units, *self.states[3:])
        results = pallas_launch(
            run,
            *scalars.values(),
            *inputs.values(),
            out_shape=tuple(outputs.values()),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(self.heads[0], self.blocks, chunks, plan.units),
                in_specs=[self._spec(name, x.shape, at) for name, x in inputs.items()],
                out_specs=tuple(self._spec(name, x.shape, at) for name, x in outputs.items()),
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in (state, *scratch.values())],
            ),
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
            work=work,
            name=kernel.__name__,
        )
        return dict(zip(outputs, results, strict=True))

    def _some(self, *names: str) -> dict[str, jax.Array]:
        entries = {} if self.x.entries is None else {"entries": self.turned(self.x.entries)}
        return {name: x for name, x in {**self.inputs, **entries}.items() if name in names}

    def _before(self) -> jax.ShapeDtypeStruct:
        """Returns what states before each chunk are."""
        return jax.ShapeDtypeStruct((*self.heads, self.plan.chunks, *self.states[3:]), self.plan.dtype)

    def forward(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (out [B, T, N, Hv] of that dtype, final states [B, G, N, H, Hv])."""
        return self.keeping(dtype, False)[0]

    def keeping(self, dtype: Any, keep: bool = True) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
        """Returns (what `forward` does, what `backward` takes of it: "states" before each chunk)."""
        x, (B, N) = self.x, self.heads
        like = jax.ShapeDtypeStruct((B, self.T, N, x.v.shape[-1]), x.v.dtype)
        outputs = {"out": _struct(self, like), "exits": jax.ShapeDtypeStruct(self.states, jnp.float32)}
        outputs |= {"states": self._before()} if keep else {}
        inputs = self._some("q", "k", "v", "a", "w", "valid", "skip", "entries")
        results = self.launch(linear_fwd_kernel, inputs, outputs, {}, work=self.work)
        exits = self.layout.exits(self.turned(results["exits"]), x.entries)
        return (self.of_tokens(results["out"], like).astype(dtype), exits), {
            n: results[n] for n in KEPT if n in results
        }

    def backward(self, d_out: jax.Array, d_exits: jax.Array, saved: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Returns the gradients by the names of `Tokens`, None for what is None; of a, w, skip and entries in float32.

        Args:
          saved: what `keeping` kept. Without it the states are computed again.
        """
        x, plan, (B, _), d_exits = self.x, self.plan, self.heads, d_exits.astype(jnp.float32)
        states = saved.get("states")
        if states is None:
            inputs = self._some("k", "v", "a", "w", "valid", "entries")
            states = self.launch(linear_fwd_kernel, inputs, {"states": self._before()}, {})["states"]
        rows = jax.ShapeDtypeStruct((B, self.all_rows, plan.chunks * plan.C), jnp.float32)
        arrays = {"q": x.q, "k": x.k, "v": x.v}
        outputs = {f"d_{name}": _struct(self, y) for name, y in arrays.items()} | {"d_a": rows}
        outputs |= {f"d_{name}": rows for name in ("w", "skip") if getattr(x, name) is not None}
        if x.entries is not None:
            outputs["d_entries"] = jax.ShapeDtypeStruct(self.states, jnp.float32)
        sums = {}
        for name in plan.of_keys:
            D = arrays[name].shape[3]
            sums[f"sum_{name}"] = (plan.heads_k, *((D, plan.C) if tokens_last(D) else (plan.C, D)))
        inputs = self._some("q", "k", "v", "a", "w", "valid", "skip")
        inputs |= {"d_out": self.tokens(d_out), "states": states, "d_exits": self.turned(d_exits)}
        results = self.launch(linear_bwd_kernel, inputs, outputs, sums, reverse=True, work=self.work)
        d: dict[str, Any] = dict.fromkeys(Tokens._fields)
        d |= {name: self.of_tokens(results[f"d_{name}"], y) for name, y in arrays.items()}
        d |= {name: self.of_rows(results[f"d_{name}"]) for name in ("a", "w") if getattr(x, name) is not None}
        if x.skip is not None:
            d["skip"] = jnp.sum(self.of_rows(results["d_skip"]), axis=(0, 1))
        if x.entries is not None:
            d["entries"] = self.layout.exits(self.turned(results["d_entries"]), d_exits)
        return d


def _struct(run: Launches, like: Any) -> jax.ShapeDtypeStruct:
    """Returns what a kernel writes for an array [B, T, heads, D]."""
    (B, _, heads, D), T = like.shape, run.plan.T
    if tokens_last(D):
        return jax.ShapeDtypeStruct((B, heads, D, T), like.dtype)
    return jax.ShapeDtypeStruct((B, T, D) if heads == 1 else (B, T, heads, D), like.dtype)


def _chunk(chunk: int | None, T: int) -> int:
    """Returns the tokens of a chunk.

    Raises:
      ValueError: they are no whole lanes, or too many.
    """
    chunk = chunk or LANES
    if chunk % LANES or chunk > LONGEST:
        raise ValueError(f"cfg: chunk = {chunk}, but the chunks of the Pallas kernels have {LANES} or {LONGEST} tokens")
    return chunk if T > LANES else LANES


def kept(call: Call, cfg: ChunkConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what `Launches.keeping` keeps of a call: the states before each chunk, in the dtype of its tokens."""
    d = call.dims
    chunks = chunks_of(d["T"], _chunk(cfg.chunk, d["T"]), call.num_states)
    state = (d["Hv"], d["H"]) if tokens_last(d["Hv"]) else (d["H"], d["Hv"])
    return {"states": jax.ShapeDtypeStruct((d["B"], d["N"], chunks, *state), call.dtype)}


def heuristic(call: Call, platform: str) -> ChunkConfig:
    """Returns the default chunk: the longer one takes fewer bundles for each token, and half of the states that are kept."""
    return ChunkConfig(LONGEST if call.dtype == "bfloat16" and call.dims["T"] >= 2 * LONGEST else LANES)


def candidates(call: Call) -> list[ChunkConfig]:
    """Returns the configurations to tune over."""
    return [ChunkConfig(chunk) for chunk in (LANES, LONGEST)]


def _vmem(dims: Mapping[str, int], itemsize: int) -> int:
    """Returns the bytes of VMEM that a program of the backward may need: blocks twice, states, and sums."""
    blocks = blocks_of(dims["N"], dims["K"])
    wide = sum(-(-dims[d] // LANES) * LANES for d in ("H", "Hv"))
    tokens = 2 * 2 * (blocks.heads + blocks.heads_k) * LONGEST * itemsize * wide
    rows, columns = (dims["Hv"], dims["H"]) if tokens_last(dims["Hv"]) else (dims["H"], dims["Hv"])
    state = rows * -(-columns // LANES) * LANES * 4
    return tokens + (5 * blocks.heads * blocks.units + 2 * blocks.heads) * state + 4 * 2**20


def refused(dims: Mapping[str, int], *arrays: jax.Array) -> str | None:
    """Returns why the kernels cannot run a call of these sizes, or None."""
    dtypes, blocks = sorted({str(x.dtype) for x in arrays}), blocks_of(dims["N"], dims["K"])
    if len(dtypes) > 1:
        return f"the arrays have the dtypes {', '.join(dtypes)}; cast them to one"
    if dims["T"] == 1:
        return "T = 1 is one step of the recurrence, which needs no chunks"
    if blocks.heads > MOST_TOGETHER:
        return f"N = {dims['N']} heads make blocks of {blocks.heads}, but a block may have at most {MOST_TOGETHER}"
    if _vmem(dims, arrays[0].dtype.itemsize) > VMEM_BYTES:
        return (
            f"{blocks.heads * blocks.units} states of {dims['H']} x {dims['Hv']} and their tokens do not fit "
            f"{VMEM_BYTES >> 20} MiB of VMEM"
        )
    return None
