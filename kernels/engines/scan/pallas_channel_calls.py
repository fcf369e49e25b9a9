"""Calls of the kernels in `pallas_channel.py`: decays of channels, with or without a delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import pallas_channel as kernels
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.delta_tokens import Tokens
from kernels.engines.scan.pallas_delta_calls import Launches, group_of, too_large, widened
from kernels.engines.scan.pallas_delta_parts import CHUNK, LANES
from kernels.framework.work import Work


def _repeated(x: jax.Array, N: int) -> jax.Array:
    """Returns heads of an array [B, T, K, D] for each of the N heads that read it."""
    return x if x.shape[2] == N else jnp.repeat(x, N // x.shape[2], axis=2)


def with_begins(valid: jax.Array, begins: jax.Array | None) -> jax.Array:
    """Returns marks [B, T] of tokens: which count, and of those which begin a document."""
    return valid if begins is None else jnp.where(begins, kernels.RESET * valid, valid)


class ChannelLaunches(Launches):
    """The launches of one call. Decays x.a are [B, T, N, H]; without x.beta what is written is v.

    Heads that share queries, keys or values read copies of them, and their gradients are summed, by XLA.
    """

    def __init__(
        self,
        x: Tokens,
        num_states: int,
        scale: float,
        cfg: ChunkConfig,
        work: Work | None,
        bonus: jax.Array | None = None,
    ) -> None:
        assert x.a is not None, "without decays of channels there are kernels of heads"
        self.given, self.bonus, self.a = x, bonus, x.a
        q, k, v = (_repeated(y, x.a.shape[2]) for y in (x.q, x.k, x.v))
        super().__init__(x._replace(q=q, k=k, v=v), num_states, scale, cfg, work)

    def group(self, K: int, N: int) -> tuple[int, int, int]:
        keys, values, _ = group_of(K, N)
        return keys, values, 1

    def gates_of(self, x: Tokens) -> dict[str, jax.Array]:
        gates = {"a": self.channels(self.a)}
        gates |= {} if x.beta is None else {"beta": self.by_block(x.beta.astype(jnp.float32))}
        return gates if self.bonus is None else gates | {"bonus": widened(self.bonus.astype(jnp.float32))}

    def marked(self, valid: jax.Array) -> jax.Array:
        return with_begins(valid, self.begins)

    def buffers(self, names: dict[str, str]) -> dict[str, Any]:
        """Returns scratch of heads by name, and the products of a delta rule."""
        scratch = self.scratch(names)
        for name in ("a", "da"):
            if name in scratch:
                scratch[name] = (scratch[name][0], jnp.float32)
        return scratch

    def walk(self, wanted: tuple[str, ...]) -> dict[str, jax.Array]:
        """Returns what is `wanted` of a walk: "out", "exits", "states" and "solve", see `channel_walk_kernel`."""
        p, reads, dtype = self.plan, "out" in wanted, self.x.k.dtype
        heads = {"k": "keys", "a": "keys", "v": "values"} | ({"q": "keys", "out": "values"} if reads else {})
        scratch, square = self.buffers(heads), (p.keys, CHUNK, CHUNK)
        if "beta" in self.gates:
            scratch |= {"pairs": (square, jnp.float32), "solve": (square, dtype)}
            scratch |= {"weights": (square, dtype)} if reads else {}
        inputs = self.inputs(q=self.x.q if reads else None, entries=self.widened_entries())
        shapes = self.shapes()
        return self.launch(kernels.channel_walk_kernel, inputs, {name: shapes[name] for name in wanted}, scratch, False)

    def reverse(self, found: dict[str, Any], d_out: jax.Array, d_exits: jax.Array) -> dict[str, jax.Array]:
        """Returns the gradients, as the kernels have them, given "states" and "solve" of `walk`."""
        (B, N, H, Hv), x, gates = self.shape, self.x, self.gates
        inputs = self.inputs(q=x.q, d_out=d_out, d_exits=widened(d_exits, (-2, -1)), **found)
        arrays = {"dq": x.q, "dk": x.k, "dv": x.v, "da": gates["a"]}
        outputs = {name: (y.shape, y.dtype) for name, y in arrays.items()}
        outputs |= {"beta": (gates["beta"].shape, jnp.float32)} if "beta" in gates else {}
        outputs |= {"d_bonus": ((B, N, H), jnp.float32)} if "bonus" in gates else {}
        outputs["d_entries"] = ((B, self.G, N, H, Hv), jnp.float32)
        names = dict.fromkeys(("q", "k", "a", "dq", "dk", "da"), "keys") | dict.fromkeys(("v", "d_out", "dv"), "values")
        return self.launch(kernels.channel_reverse_kernel, inputs, outputs, self.buffers(names), True)

    def gradients(self, d: dict[str, jax.Array]) -> dict[str, Any]:
        H, Hv = self.widths

        def of(name: str, width: int) -> jax.Array:
            x, heads = self.tokens(d[f"d{name}"], width), getattr(self.given, name).shape[2]
            if x.shape[2] == heads:
                return x
            return jnp.sum(x.reshape(*x.shape[:2], heads, -1, width), axis=3, dtype=jnp.float32)

        found: dict[str, Any] = {n: of(n, w) for n, w in (("q", H), ("k", H), ("v", Hv), ("a", H))}
        found |= {"beta": self.of_blocks(d["beta"])} if "beta" in d else {}
        return found | ({"bonus": jnp.sum(d["d_bonus"], axis=0)[:, :H]} if "d_bonus" in d else {})


def refused(dims: Mapping[str, int], num_states: int, dtype: str, delta: bool) -> str | None:
    """Returns why the kernels cannot run a call of these sizes."""
    heads, _, _ = group_of(dims["N"], dims["N"])
    H, Hv = (-(-dims[name] // LANES) * LANES for name in ("H", "Hv"))
    size = 4 if dtype == "float32" or dims["N"] % 2 else 2
    # Of the backward: blocks of tokens twice, and decays in float32; heads of both; states, their gradients, and inverses.
    of_tokens = CHUNK * heads * (H * (4 * 3 * size + 4 * 6) + Hv * 3 * 3 * size)
    of_states = heads * (H * Hv * (2 * size + 5 * 4) + delta * CHUNK * CHUNK * 2 * size)
    return too_large(dims, num_states, heads, of_tokens + of_states)
