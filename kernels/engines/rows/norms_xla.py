"""Norms of whole rows as plain XLA: the compiler fuses each direction into one or two loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot
from kernels.engines.rows import norms
from kernels.engines.rows.norms import Norm


def forward(x: Any, residual: Any, weight: Any, bias: Any, norm: Norm, cfg: Any = None) -> Any:
    """Returns the outputs of the contracts, computed in float32."""
    return norms.outputs(x, residual, weight, bias, norm, jnp.float32)


def backward(
    saved: Any, x: Any, residual: Any, weight: Any, bias: Any, norm: Norm, cfg: Any = None
) -> dict[str, jax.Array]:
    """Returns the gradients by name."""
    if residual is None:
        return _gradients(saved, x, weight, bias, norm)
    # Needs only the stream, so x and residual are not saved.
    gradients = _gradients(saved, saved.stream, weight, bias, norm)
    d = gradients["x"] + saved.d_stream.astype(jnp.float32)
    return {**gradients, "x": d, "residual": d}


def _gradients(saved: Any, x: Any, weight: Any, bias: Any, norm: Norm) -> dict[str, jax.Array]:
    """Returns the gradients of the normalised input, and of weight and bias if given, in float32."""
    statistics = {name: saved[name][..., None] for s in norm.statistics for name in (s, f"d_{s}")}
    x, normalised = norms.normal(x.astype(jnp.float32), statistics)
    d_out, lead = saved["d_out"].astype(jnp.float32), tuple(range(x.ndim - 1))
    gradients = {"x": norms.pull(x, normalised, d_out, statistics, weight, norm)}
    if weight is not None:
        gradients["weight"] = jnp.sum(d_out * normalised, axis=lead)
    if bias is not None:
        gradients["bias"] = jnp.sum(d_out, axis=lead)
    return gradients


def forward_linear(x: Any, weight: Any, bias: Any, projection: Any, norm: Norm) -> jax.Array:
    """Returns the norm times projection."""
    return dot("...d,df->...f", forward(x, None, weight, bias, norm)[0], projection).astype(x.dtype)


def backward_linear(saved: Any, x: Any, weight: Any, bias: Any, projection: Any, norm: Norm) -> dict[str, jax.Array]:
    """Returns the gradients by name. The norm is recomputed with a pass over x, instead of saving an array
    of the size of x."""
    normalised, *statistics = forward(x, None, weight, bias, norm)
    of_norm = dict(zip(norm.statistics, statistics, strict=True))
    of_norm |= {f"d_{name}": jnp.zeros_like(y) for name, y in of_norm.items()}
    of_norm["d_out"] = dot("...f,df->...d", saved.d_out, projection)
    d_projection = dot("...d,...f->df", normalised, saved.d_out)
    return {**_gradients(of_norm, x, weight, bias, norm), "projection": d_projection}


FACTS: Any = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"lead"},
}
