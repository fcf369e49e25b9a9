"""`python -m benchmarks.calls [out=FILE]`: how many calls of functions of this project a call of an operation makes.

Counted are calls of Python functions whose code is in `kernels` or `ejdist`, for `rms_norm` on one device and for
`ring_attention` with packed documents over four: an eager call that was made before (warm), and the lowering of a jitted one.
The time of the warm eager call is beside them, the least of many; it is of this machine. The time of a ring
includes moving its arrays from one device to four, except in the case "placed", where they are sharded as in a training step.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(f"{ROOT / package}/" for package in ("kernels", "ejdist"))


def counted(function: Callable[[], Any]) -> Counter[str]:
    """Returns the calls of this project's functions that calling the function makes, by "file:function"."""
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            calls[f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_code.co_name}"] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def least_ms(function: Callable[[], Any], repeats: int = 50) -> float:
    """Returns the least time of a call that waits for its result, in milliseconds."""
    import jax

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def rows() -> dict[str, dict[str, Any]]:
    """Returns case -> {"eager": calls, "lower": calls, "eager_ms": time, "top": the functions called most in a warm call}."""
    import jax
    import jax.numpy as jnp

    import ejdist
    import kernels

    mesh = ejdist.make_mesh(sp=4, devices=jax.devices()[:4])
    x, weight = jnp.ones((2, 64, 32)), jnp.ones(32)
    q = jnp.ones((1, 256, 4, 16))
    ids = jnp.zeros((1, 256), jnp.int32)

    placed = jax.sharding.NamedSharding(mesh, jax.P(None, "sp"))

    def ring(q: jax.Array, ids: jax.Array = ids) -> jax.Array:
        segments = {"q_segment_ids": ids, "kv_segment_ids": ids}
        return ejdist.ring_attention(q, q, q, causal=True, mesh=mesh, order="zigzag", **segments)

    cases = {
        "rms_norm": (lambda x: kernels.rms_norm(x, weight), x),
        "ring_attention": (ring, q),
        "ring_attention, placed": (partial(ring, ids=jax.device_put(ids, placed)), jax.device_put(q, placed)),
        "gradient of rms_norm": (jax.grad(lambda x: kernels.rms_norm(x, weight).sum()), x),
        "gradient of ring_attention": (jax.grad(lambda q: ring(q).sum()), q),
    }
    return {name: _row(function, argument) for name, (function, argument) in cases.items()}


def _row(function: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    import jax

    first = counted(lambda: jax.jit(function).lower(argument))
    for _ in range(2):
        jax.block_until_ready(function(argument))
    eager = counted(lambda: function(argument))
    # A new function, so that JAX traces it again; the operations in it were called before.
    lower = counted(lambda: jax.jit(lambda x: function(x)).lower(argument))
    return {
        "eager": eager.total(),
        "lower": lower.total(),
        "first_lower": first.total(),
        "eager_ms": round(least_ms(lambda: function(argument)), 3),
        "top": dict(eager.most_common(8)),
    }


def main(arguments: list[str]) -> int:
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    measured = rows()
    for name, row in measured.items():
        print(f"{name:28} eager {row['eager']:6} calls, {row['eager_ms']:7.3f} ms; lowering {row['lower']:6} calls")
    out = next((a.removeprefix("out=") for a in arguments if a.startswith("out=")), None)
    if out:
        Path(out).write_text(json.dumps({"jax": jax.__version__, "rows": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
