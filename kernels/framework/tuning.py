"""The autotuner: times a backend's candidates on the call's arrays and returns the fastest with correct numbers."""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.binding import floats_apart, merged
from kernels.framework.select import Request

# A candidate may round differently from the heuristic's configuration, but must not be wrong. Compilers have miscompiled
# some tile shapes, so each candidate's numbers are compared before it can win.
_ALLOWED_RELATIVE_ERROR = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


def _step(request: Request, cfg: Any) -> Any:
    """Returns the jitted function arrays -> (outputs, gradients) with one configuration, on this backend alone."""
    op, call = request.op, request.call
    static = call.static()

    def run(floats: dict[str, Any], others: dict[str, Any]) -> Any:
        def forward(floats: dict[str, Any]) -> Any:
            return op(**static, **merged(floats, others), platform=request.backend.name, cfg=cfg)

        if request.backend.backward is None or not jax.tree.leaves(floats):
            return forward(floats)
        outputs, vjp = jax.vjp(forward, floats)
        return outputs, vjp(jax.tree.map(jnp.ones_like, outputs))

    return jax.jit(run)


def seconds(function: Any, *args: Any, rounds: int = 5, target: float = 0.02) -> float:
    """Returns the median time of one call, in seconds. Each round makes enough calls to take about `target` seconds."""
    jax.block_until_ready(function(*args))
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    calls = max(1, min(1000, int(target / max(time.perf_counter() - start, 1e-6))))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def _relative_error(actual: Any, expected: Any) -> float:
    worst = 0.0
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, w = np.asarray(a, np.float64), np.asarray(w, np.float64)
        if not np.array_equal(np.isfinite(a), np.isfinite(w)):
            return float("inf")
        a, w = a[np.isfinite(w)], w[np.isfinite(w)]
        worst = max(worst, float(np.linalg.norm(a - w) / max(np.linalg.norm(w), 1e-30)))
    return worst


def tune(request: Request) -> Any:
    """Returns the fastest candidate, forward and backward together, whose numbers agree with the heuristic's.

    Raises:
      RuntimeError: no candidate ran; the message has the reason for each.
    """
    floats, others = floats_apart(request.call.traced(), request.op.no_gradient)
    assert request.backend.candidates is not None
    first = request.heuristic()
    candidates = list(dict.fromkeys([first, *request.backend.candidates(request.call)]))
    expected, best, reasons = None, None, []
    for cfg in candidates:
        function = _step(request, cfg)
        try:
            actual = jax.block_until_ready(function(floats, others))
        except Exception as error:  # the error type of one that does not fit depends on the compiler
            reasons.append(f"{cfg}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            continue
        if expected is None:
            expected = actual
        error = _relative_error(actual, expected)
        if not error <= _ALLOWED_RELATIVE_ERROR.get(request.call.dtype, 1e-2):
            reasons.append(f"{cfg}: wrong numbers (relative error {error:.1e})")
            warnings.warn(f"{request.op.name} on {request.backend.name}: {reasons[-1]}", stacklevel=2)
            continue
        time_taken = seconds(function, floats, others)
        if best is None or time_taken < best[0]:
            best = (time_taken, cfg)
    if best is None:
        raise RuntimeError(
            f"{request.op.name} on {request.backend.name}: no candidate of {len(candidates)} ran: " + "; ".join(reasons)
        )
    return best[1]
