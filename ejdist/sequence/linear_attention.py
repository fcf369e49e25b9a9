"""Linear attention with the sequence split over devices: each passes what its tokens do to the state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.sequence.state_passing import Linear, StatePassing
from ejdist.sharded import sharded
from kernels.ops.linear_attention import op


@dataclass(frozen=True)
class _Fading(Linear):
    """S_out = A * S_in + b: A is the decay of all tokens of the rank, b the state that they leave behind from 0."""

    def start(self, arguments: dict[str, Any]) -> jax.Array:
        B, _, N, H = arguments["query"].shape
        return jnp.zeros((B, N, H, arguments["value"].shape[-1]), jnp.float32)

    def summary(self, arguments: dict[str, Any], valid: jax.Array) -> Any:
        N = arguments["query"].shape[2]
        precision = jax.lax.Precision.HIGHEST if arguments["query"].dtype == jnp.float32 else None

        def masked(x: jax.Array) -> jax.Array:  # [B, T, N, ...], 0 for what is not in the summary
            return jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x.astype(jnp.float32), 0)

        def faded(x: jax.Array, decay: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
            """Returns (x as far as it is left after the last token, the decay of all tokens [B, N, h])."""
            if decay is None:
                return x, None
            # Summed from the end: what is far back has faded, and its digits with it.
            up_to_the_end = jax.lax.cumsum(decay, axis=1, reverse=True)
            behind = jnp.pad(up_to_the_end[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
            return x * jnp.exp(behind), jnp.exp(up_to_the_end[:, 0])

        k, v = (jnp.repeat(masked(arguments[n]), N // arguments[n].shape[2], axis=2) for n in ("key", "value"))
        parts = [masked(arguments[n]) for n in ("gk",) if n in arguments]
        parts += [masked(arguments[n])[..., None] for n in ("g",) if n in arguments]
        if "g_gamma" in arguments:
            parts.append(masked(jnp.broadcast_to(arguments["g_gamma"][:, None], (*k.shape[:3], 1))))
        k, by_key = faded(k, sum(parts[1:], parts[0]) if parts else None)
        v, by_value = faded(v, masked(arguments["gv"]) if "gv" in arguments else None)
        left = jnp.einsum("btnh,btnv->bnhv", k, v, precision=precision, preferred_element_type=jnp.float32)
        decay = jnp.ones((k.shape[0], 1, 1, 1))
        decay = decay if by_key is None else decay * by_key[..., None]
        return decay if by_value is None else decay * by_value[..., None, :], left


_where: Any = {"local": StatePassing(op, _Fading()), "handles": ("T",), "follows": "fixed"}

gla_attention = sharded(kernels.gla_attention, **_where)
lightning_attention = sharded(kernels.lightning_attention, **_where)
recurrent_attention = sharded(kernels.recurrent_attention, **_where)
retention = sharded(kernels.retention, **_where)
rwkv6 = sharded(kernels.rwkv6, **_where)
