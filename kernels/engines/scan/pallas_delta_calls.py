"""Calls of the kernels in `pallas_delta.py`: visits of blocks of tokens, groups of heads, what a backward computes again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.scan import pallas_delta as kernels
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.delta_tokens import Tokens
from kernels.engines.scan.pallas_delta import Plan
from kernels.engines.scan.pallas_delta_parts import CHUNK, FORGETS, LANES, in_words
from kernels.engines.scan.pallas_visits import BLOCK, FIELDS, SMEM_BYTES, STATE, most_visits, visits
from kernels.engines.scan.recurrence import resets
from kernels.framework.binding import Call
from kernels.framework.work import Work
from kernels.toolchains.pallas import pallas_launch

GROUP = 8  # heads of queries and keys of a program, where there are more: the rows of a tile in memory
# Heads of values whose products fill the time of one another, by bytes of a number: with 8, a head takes 1.1 to 1.2 times the
# bundles, but float32 has room in VMEM for no more.
AT_ONCE = {2: 16, 4: 8}
VMEM_BYTES = 48 * 2**20


def group_of(K: int, N: int, itemsize: int = 2) -> tuple[int, int, int]:
    """Returns (heads of keys of a program, of values, heads of keys of an iteration)."""
    keys = GROUP if K > GROUP and K % GROUP == 0 else K
    shared = N // K
    unit = max([u for u in range(1, keys + 1) if keys % u == 0 and u * shared <= AT_ONCE[itemsize]], default=1)
    return keys, keys * shared, unit


def widened(x: jax.Array, axes: tuple[int, ...] = (-1,)) -> jax.Array:
    """Returns an array with whole lanes: 0 for the channels that are added."""
    pad = [(0, 0)] * x.ndim
    for axis in axes:
        pad[axis] = (0, -x.shape[axis] % LANES)
    return jnp.pad(x, pad) if any(after for _, after in pad) else x


class Launches:
    """The launches of one call.

    Attributes:
      tokens_last: whether the kernels read tokens as [B, heads, D, T].
    """

    tokens_last = False

    def __init__(self, x: Tokens, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None) -> None:
        if (cfg.chunk or CHUNK) != CHUNK:
            raise ValueError(f"cfg: chunk = {cfg.chunk}, but the chunks of the Pallas kernels have {CHUNK} tokens")
        self.work, self.widths, self.entries = work, (x.q.shape[-1], x.v.shape[-1]), x.entries
        q, k, v = (self.channels(y) for y in (x.q, x.k, x.v))
        self.x = x._replace(q=q, k=k, v=v)
        self.T, (B, _, K, H), (N, Hv) = x.q.shape[1], q.shape, v.shape[2:]
        self.G = num_states
        table, self.layout = visits(B, self.T, x.segment_ids, num_states, CHUNK)
        self.table, self.blocks, self.count = table, self.layout.chunks, most_visits(self.T, num_states, CHUNK)
        keys, values, unit = self.group(K, N)
        self.shape, self.groups = (B, N, H, Hv), K // keys
        masked = self.layout.valid is not None or self.T % CHUNK > 0
        self.plan = Plan(keys, values, unit, keys // unit, self.count, scale, masked, num_states > 1)
        self.begins = None  # where a document does, if decays are to end what is before it
        if x.segment_ids is not None and num_states == 1:
            self.begins = resets(x.segment_ids)
        self.gates = self.gates_of(x)

    def group(self, K: int, N: int) -> tuple[int, int, int]:
        """Returns what `group_of` does."""
        return group_of(K, N, self.x.k.dtype.itemsize)

    def gates_of(self, x: Tokens) -> dict[str, jax.Array]:
        """Returns the decays "a" and rates "beta" as the kernels read them."""
        a = jnp.zeros(x.beta.shape, jnp.float32) if x.a is None else x.a.astype(jnp.float32)
        a = a if self.begins is None else jnp.where(self.begins[..., None], FORGETS, a)
        return {"a": self.by_block(a), "beta": self.by_block(x.beta.astype(jnp.float32))}

    def channels(self, x: jax.Array) -> jax.Array:
        """Returns tokens [B, T, heads, D] as the kernels read them: whole lanes, whole words, at least one block."""
        x = widened(x)
        x = x if in_words(x.dtype, x.shape[2]) else x.astype(jnp.float32)
        return jnp.pad(x, ((0, 0), (0, max(0, CHUNK - x.shape[1])), (0, 0), (0, 0)))

    def by_block(self, x: jax.Array) -> jax.Array:
        """Returns [B, T, N] as [B, blocks, groups, iterations, heads, C], 0 where no token counts."""
        if self.layout.valid is not None:
            x = jnp.where(self.layout.valid[..., None], x, 0)
        x = jnp.pad(x, ((0, 0), (0, self.blocks * CHUNK - self.T), (0, 0)))
        x = jnp.swapaxes(x.reshape(x.shape[0], self.blocks, CHUNK, -1), 2, 3)
        return x.reshape(*x.shape[:2], self.groups, self.plan.iterations, self.plan.width, CHUNK)

    def of_blocks(self, x: jax.Array) -> jax.Array:
        """Returns what `by_block` was given, 0 where no token counts."""
        x = jnp.swapaxes(x.reshape(*x.shape[:2], -1, CHUNK), 2, 3)
        x = x.reshape(x.shape[0], self.blocks * CHUNK, -1)[:, : self.T]
        return x if self.layout.valid is None else jnp.where(self.layout.valid[..., None], x, 0)

    def launch(
        self, kernel: Callable, inputs: dict[str, Any], outputs: dict[str, Any], scratch: dict[str, Any], back: bool
    ) -> dict[str, jax.Array]:
        """Returns the outputs by name, of a kernel that walks all rows.

        Args:
          inputs: arrays, by a name that says where their blocks are. outputs: (shape, dtype).
          scratch: (shape, dtype) of what lies in VMEM.
          back: from the end.
        """
        p = self.plan

        def field(table: Any, b: Any, i: Any, name: int) -> Any:
            return table[(b * p.visits + (p.visits - 1 - i if back else i)) * FIELDS + name]

        def spec(name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
            def at(b: Any, g: Any, i: Any, table: Any) -> tuple[Any, ...]:
                if name in ("entries", "exits", "d_entries", "d_exits"):
                    return b, field(table, b, i, STATE), g, 0, 0
                if name in ("bonus", "d_bonus"):
                    return (b, g, 0)[3 - len(shape) :]
                if name in ("states", "solve"):
                    return b, p.visits - 1 - i if back else i, g, 0, 0
                block = field(table, b, i, BLOCK)
                if self.tokens_last and name != "valid":
                    return b, g, 0, block
                return (b, block, 0, 0) if name == "valid" else (b, block, g, *(0 for _ in shape[3:]))

            if len(shape) == 6:  # gates of heads, see `by_block`
                return pl.BlockSpec((1, 1, 1, *shape[3:]), at)
            if name == "valid":
                return pl.BlockSpec((1, 1, 1, CHUNK), at)
            if name in ("bonus", "d_bonus"):
                return pl.BlockSpec((*(1,) * (len(shape) - 2), p.values, shape[-1]), at)
            if len(shape) == 5:
                return pl.BlockSpec((1, 1, p.values, *shape[3:]), at)
            if self.tokens_last:
                return pl.BlockSpec((1, p.keys, shape[2], CHUNK), at)
            return pl.BlockSpec((1, CHUNK, p.keys if name in ("q", "k", "dq", "dk") else p.values, shape[3]), at)

        def run(table: Any, *refs: Any) -> None:
            ends = len(inputs), len(inputs) + len(outputs)
            parts = refs[: ends[0]], refs[ends[0] : ends[1]], refs[ends[1] :]
            names = inputs, outputs, scratch
            named = (dict(zip(each, part, strict=True)) for each, part in zip(names, parts, strict=True))
            kernel(table, *named, p=p)

        results = pallas_launch(
            run,
            self.table,
            *inputs.values(),
            out_shape=tuple(jax.ShapeDtypeStruct(*y) for y in outputs.values()),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(self.shape[0], self.groups, p.visits),
                in_specs=[spec(name, y.shape) for name, y in inputs.items()],
                out_specs=tuple(spec(name, shape) for name, (shape, _) in outputs.items()),
                scratch_shapes=[pltpu.VMEM(*y) for y in scratch.values()],
            ),
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
            work=self.work,
            name=kernel.__name__,
        )
        return dict(zip(outputs, results, strict=True))

    def scratch(self, names: dict[str, str]) -> dict[str, Any]:
        """Returns scratch of heads of keys and of values, by name, the words that they pass through, and that of states."""
        p, (_, _, H, Hv) = self.plan, self.shape
        kinds = {"keys": (p.keys, CHUNK, H), "values": (p.values, CHUNK, Hv)}
        heads = {name: (kinds[kind], self.x.k.dtype) for name, kind in names.items()}
        rows = {kind: max(8, n * CHUNK // 2) for kind, n in (("keys", p.keys), ("values", p.values))}
        words = {
            f"{kind}_words": ((width // LANES, rows[f"{kind}s"], LANES), jnp.int32)
            for kind, width in (("key", H), ("value", Hv))
        }
        return heads | words | {"state": ((p.values, H, Hv), jnp.float32)}

    def inputs(self, **more: Any) -> dict[str, Any]:
        """Returns what all kernels read."""
        x = {"k": self.x.k, "v": self.x.v} | self.gates
        if self.plan.masked:
            valid = jnp.ones((self.shape[0], self.T), bool) if self.layout.valid is None else self.layout.valid
            valid = self.marked(valid.astype(jnp.float32))
            valid = jnp.pad(valid, ((0, 0), (0, self.blocks * CHUNK - self.T)))
            x["valid"] = valid.reshape(-1, self.blocks, 1, CHUNK)
        return x | {name: y for name, y in more.items() if y is not None}

    def marked(self, valid: jax.Array) -> jax.Array:
        """Returns which tokens count [B, T], with more that kernels are to know of them; not above 0 for what does not."""
        return valid

    def widened_entries(self) -> jax.Array | None:
        """Returns the states that sequences start from, as the kernels read them."""
        return None if self.entries is None else widened(self.entries, (-2, -1))

    def shapes(self) -> dict[str, Any]:
        """Returns the shape and dtype of what walks write."""
        (B, N, H, Hv), dtype = self.shape, self.x.k.dtype
        return {
            "out": (self.x.v.shape, self.x.v.dtype),
            "exits": ((B, self.G, N, H, Hv), jnp.float32),
            "states": ((B, self.count, N, H, Hv), dtype),
            "solve": ((B, self.count, N, CHUNK, CHUNK), dtype),
        }

    def walk(self, wanted: tuple[str, ...]) -> dict[str, jax.Array]:
        """Returns what is `wanted` of a walk: "out", "exits", "states" and "solve", see `delta_walk_kernel`."""
        reads, shapes = "out" in wanted, self.shapes()
        heads = {"k": "keys", "v": "values"} | ({"q": "keys", "out": "values"} if reads else {})
        inputs = self.inputs(q=self.x.q if reads else None, entries=self.widened_entries())
        outputs = {name: shapes[name] for name in wanted}
        return self.launch(kernels.delta_walk_kernel, inputs, outputs, self.scratch(heads), False)

    def reverse(self, found: dict[str, Any], d_out: jax.Array, d_exits: jax.Array) -> dict[str, jax.Array]:
        """Returns the gradients, as the kernels have them.

        Args:
          found: "states" and "solve" of `walk`.
        """
        B, N, H, Hv = self.shape
        inputs = self.inputs(q=self.x.q, d_out=d_out, d_exits=widened(d_exits, (-2, -1)), **found)
        outputs = {
            "dq": (self.x.q.shape, self.x.q.dtype),
            "dk": (self.x.k.shape, self.x.k.dtype),
            "dv": (self.x.v.shape, self.x.v.dtype),
            "beta": (self.gates["beta"].shape, jnp.float32),
            "a": (self.gates["a"].shape, jnp.float32),
            "d_entries": ((B, self.G, N, H, Hv), jnp.float32),
        }
        keys, values = dict.fromkeys(("q", "k", "dq", "dk"), "keys"), dict.fromkeys(("v", "d_out", "dv"), "values")
        return self.launch(kernels.delta_reverse_kernel, inputs, outputs, self.scratch(keys | values), True)

    def tokens(self, x: jax.Array, width: int) -> jax.Array:
        """Returns [B, T, heads, D] as it was before `channels`."""
        return x[:, : self.T, :, :width]

    def states(self, x: jax.Array, entries: jax.Array | None) -> jax.Array:
        """Returns the states in which sequences end, those without a token in that of `entries`."""
        H, Hv = self.widths
        return self.layout.exits(x[..., :H, :Hv], entries)

    def _kept(self) -> tuple[str, ...]:
        return ("states", "solve") if "beta" in self.gates else ("states",)

    def forward(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (out [B, T, N, Hv] of that dtype, final states [B, G, N, H, Hv])."""
        return self.keeping(dtype, ())[0]

    def keeping(
        self, dtype: Any, names: tuple[str, ...] | None = None
    ) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
        """Returns (what `forward` does, what `backward` takes of it, by name: see `kept_of`)."""
        names = self._kept() if names is None else names
        found = self.walk(("out", "exits", *names))
        out = self.tokens(found["out"], self.widths[1]).astype(dtype)
        return (out, self.states(found["exits"], self.entries)), {name: found[name] for name in names}

    def backward(self, d_out: jax.Array, d_exits: jax.Array, saved: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Returns the gradients by the names of `Tokens`; of beta, a and entries in float32.

        Args:
          saved: what `keeping` kept. Without it the states and inverses are computed again.
        """
        d_exits, names = d_exits.astype(jnp.float32), self._kept()
        kept = {name: saved[name] for name in names} if names[0] in saved else self.walk(names)
        d = self.reverse(kept, self.channels(d_out.astype(self.x.v.dtype)), d_exits)
        return self.gradients(d) | {"entries": self.states(d["d_entries"], d_exits)}

    def gradients(self, d: dict[str, jax.Array]) -> dict[str, Any]:
        """Returns the gradients of tokens, given those of `reverse`."""
        H, Hv = self.widths
        found: dict[str, Any] = {n: self.tokens(d[f"d{n}"], w) for n, w in (("q", H), ("k", H), ("v", Hv))}
        return found | {name: self.of_blocks(d[name]) for name in ("beta", "a")}


def kept_of(dims: Mapping[str, int], heads: int, num_states: int, dtype: str, delta: bool) -> dict[str, Any]:
    """Returns what `Launches.keeping` keeps of a call: the state before each visit of a row, and of a delta rule the inverses,
    in the dtype in which the kernels read its tokens.

    Args:
      heads: of keys, as the kernels read them.
    """
    dtype = dtype if in_words(dtype, heads) else "float32"
    H, Hv = (-(-dims[name] // LANES) * LANES for name in ("H", "Hv"))
    of = dims["B"], most_visits(dims["T"], num_states, CHUNK), dims["N"]
    states = {"states": jax.ShapeDtypeStruct((*of, H, Hv), dtype)}
    return states | ({"solve": jax.ShapeDtypeStruct((*of, CHUNK, CHUNK), dtype)} if delta else {})


def refused(call: Call) -> str | None:
    """Returns why the kernels cannot run a call of these sizes."""
    d = call.dims
    H, Hv = (-(-d[name] // LANES) * LANES for name in ("H", "Hv"))
    keys, values, _ = group_of(d["K"], d["N"])
    if values > keys * AT_ONCE[2]:
        return f"{values // keys} heads of values share one of keys; the kernels take {AT_ONCE[2]} at once"
    size = 4 if call.dtype == "float32" or d["K"] % 2 or d["N"] % 2 else 2
    # Of the backward, which has more: blocks, twice each; heads and words of them; states and inverses of a visit.
    of_tokens = CHUNK * size * (keys * H * (4 * 2 + 4) + values * Hv * (3 * 2 + 3)) + CHUNK * 2 * (
        keys * H + values * Hv
    )
    of_states = values * (H * Hv * (2 * size + 5 * 4) + CHUNK * CHUNK * 2 * size)
    return too_large(d, call.num_states, values, of_tokens + of_states)


def too_large(d: Mapping[str, int], num_states: int, heads: int, needed: int) -> str | None:
    """Returns why a program of `heads` heads that needs so many bytes of VMEM does not fit, or None."""
    table = 4 * FIELDS * d["B"] * most_visits(d["T"], num_states, CHUNK)
    if table > SMEM_BYTES:
        return f"the visits of {d['B']} rows take {table >> 10} KiB of scalar memory, of {SMEM_BYTES >> 10}"
    if needed > VMEM_BYTES:
        return f"{heads} heads of {d['H']} by {d['Hv']} take {needed >> 20} MiB of VMEM, of {VMEM_BYTES >> 20}"
    return None


def heuristic(call: Call, platform: str) -> ChunkConfig:
    """Returns the tiles of a call: chunks fill the lanes."""
    return ChunkConfig(CHUNK)


def candidates(call: Call) -> list[ChunkConfig]:
    """Returns the configurations to tune over."""
    return [heuristic(call, "tpu")]
