"""The gated MLP of each expert, as grouped products."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kernels
from ejdist.packed import Packed, packed_experts
from kernels.framework.keeping import keeping
from kernels.ops.grouped_matmul import gathered_op

CLAMPED = "clamped_swiglu"


@dataclass(frozen=True)  # compiled dispatches are cached by it
class GatedExperts:
    """Applies each expert's gated MLP: (params, rows, rows per expert) -> rows; see `apart.Apart`."""

    activation: str
    alpha: float = 1.702
    limit: float = 7.0
    platform: str | None = None

    def __call__(self, params: Any, x: jax.Array, sizes: jax.Array, **gathering: jax.Array) -> jax.Array:
        """`gathering`: `rows` and `slots` of `kernels.grouped_matmul`, if x are tokens."""
        return self.last(params, self.hidden(params, x, {"sizes": sizes, **gathering}), sizes)

    def is_product(self, params: Any) -> bool:
        return "down_bias" not in params and not isinstance(params["down"], Packed)

    def last(self, params: Any, hidden: jax.Array, sizes: jax.Array) -> jax.Array:
        return self._product(params, "down", hidden, sizes)

    def turned_last(self, matrices: jax.Array, d: jax.Array, places: dict[str, jax.Array]) -> jax.Array:
        sizes, gathering = _apart(places)
        return kernels.grouped_matmul(d, matrices, sizes, transpose_rhs=True, platform=self.platform, **gathering)

    def hidden(self, params: Any, x: jax.Array, places: dict[str, jax.Array]) -> jax.Array:
        sizes, gathering = _apart(places)
        first = functools.partial(self._product, params, x=x, sizes=sizes, **gathering)
        if self.activation == CLAMPED:
            if "up" in params:
                return self._clamped(first("gate"), first("up"))
            return self._clamped(*_halves(first("gate", flat=True)))
        if "up" in params:
            return first("gate", activation=self.activation) * first("up")
        return first("gate", activation=self.activation)

    def gated(self, params: Any) -> str | None:
        plain = "up" not in params and self.activation != CLAMPED and not isinstance(params["gate"], Packed)
        return self.activation if plain else None

    def turned_gate(self, params: Any, d: jax.Array, sizes: jax.Array) -> jax.Array:
        gate = params["gate"]
        flat = gate.reshape(*gate.shape[:2], -1)
        return kernels.grouped_matmul(d, flat, sizes, transpose_rhs=True, platform=self.platform)

    def hidden_keeping(self, params: Any, x: jax.Array, places: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        arguments = _gated_call(params["gate"], params.get("gate_bias"), x, places)
        return keeping(gathered_op, **arguments, activation=self.activation, platform=self.platform)

    def hidden_backward(
        self, params: Any, x: jax.Array, places: dict[str, jax.Array], d: jax.Array, kept: Any = None
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        gate, bias = params["gate"], params.get("gate_bias")
        of_products = kept is None
        saved = {"d_out": d} if of_products else {"d_out": d, **kept}
        if of_products:
            gate, bias = gate.reshape(*gate.shape[:2], -1), bias if bias is None else bias.reshape(len(bias), -1)
        arguments = _gated_call(gate, bias, x, places)
        activation = None if of_products else self.activation
        d_of = gathered_op.backward(saved, **arguments, activation=activation, platform=self.platform)
        gradients = {"gate": d_of["rhs"].reshape(params["gate"].shape)}
        if bias is not None:
            gradients["gate_bias"] = d_of["rhs_bias"].reshape(params["gate_bias"].shape)
        return gradients, d_of["lhs"]

    def _clamped(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
        g, u = jnp.minimum(g, self.limit), jnp.clip(u, -self.limit, self.limit)
        return ((u + 1) * g * jax.nn.sigmoid(self.alpha * g)).astype(gate.dtype)

    def _product(
        self,
        params: Any,
        name: str,
        x: jax.Array,
        sizes: jax.Array,
        activation: str | None = None,
        flat: bool = False,
        **gathering: jax.Array,
    ) -> jax.Array:
        w, b = params[name], params.get(f"{name}_bias")
        if isinstance(w, Packed):
            out = packed_experts(x, w, b, sizes, platform=self.platform, **gathering)
            if activation is None:
                return out
            return kernels.gated_activation(*_halves(out), activation=activation, platform=self.platform)
        if flat:
            w, b = w.reshape(*w.shape[:2], -1), b if b is None else b.reshape(b.shape[0], -1)
        options = {"rhs_bias": b, "activation": activation, "platform": self.platform}
        return kernels.grouped_matmul(x, w, sizes, **options, **gathering)


def _apart(places: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    return places["sizes"], {name: a for name, a in places.items() if name != "sizes"}


def _gated_call(gate: jax.Array, bias: Any, x: jax.Array, places: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the arguments of `gathered_op`."""
    sizes, gathering = _apart(places)
    return {"lhs": x, "rhs": gate, "rhs_transposed": None, "group_sizes": sizes, "rhs_bias": bias, **gathering}


def _halves(both: jax.Array) -> list[jax.Array]:
    return jnp.split(both, 2, axis=-1)
