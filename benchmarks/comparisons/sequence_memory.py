"""Temporaries of attention over a split sequence, as the TPU compiler makes them: 131,072 tokens over eight chips of v5p, 32
heads of 128 and 8 of keys, packed documents.

    python -m benchmarks.comparisons.sequence_memory [schemes=ring,ulysses,group_cast] [order=zigzag]

It prints MiB of a chip for the forward and for both passes of each scheme, beside what is asked for, and needs no TPU. Both
passes are given the cotangent of the output and return the gradients alone: one that returns the output too needs more.
"""

from __future__ import annotations

import sys
from typing import Any

from ejdist.sequence import SCHEMES, GroupCast, Ring, Ulysses

TOKENS, HEADS, KV_HEADS, WIDTH, TOPOLOGY = 131072, 32, 8, 128, "v5p:2x2x2"
# (scheme, passes) -> MiB that are asked for.
LIMITS: dict[tuple[Any, int], int] = {(Ring, 1): 750, (Ring, 2): 1200, (Ulysses, 2): 650}
MEASURED = [name for name, scheme in SCHEMES.items() if scheme in (Ring, Ulysses, GroupCast)]
PASSES = {1: "forward", 2: "both"}


def compiled(scheme: str, passes: int, order: str = "zigzag") -> Any:
    """Returns the program of a forward (1), or of a forward and a backward (2)."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from ejdist import make_mesh, ring_attention
    from ejdist.planning.targets import target_of
    from ejdist.sequence import compiler_options

    target = target_of(TOPOLOGY, None, None, None)
    mesh = make_mesh(sp=target.count, devices=target.devices())
    along = NamedSharding(mesh, P(None, "sp"))
    q, k = (jax.ShapeDtypeStruct((1, TOKENS, n, WIDTH), jnp.bfloat16, sharding=along) for n in (HEADS, KV_HEADS))
    ids = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32, sharding=along)

    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        how = {"mesh": mesh, "order": order, "scheme": scheme, "causal": True}
        return ring_attention(q, k, v, q_segment_ids=ids, kv_segment_ids=ids, **how)

    def both(q: Any, k: Any, v: Any, ids: Any, d_out: Any) -> Any:
        return jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)[1](d_out)

    with target.lowering():
        jitted = jax.jit(attend if passes == 1 else both, compiler_options=compiler_options(mesh))
        lowered = jitted.lower(q, k, k, ids) if passes == 1 else jitted.lower(q, k, k, ids, q)
    return lowered.compile()


def main(arguments: list[str]) -> None:
    options = {"schemes": ",".join(MEASURED), "order": "zigzag"} | dict(word.split("=", 1) for word in arguments)
    print("| scheme | passes | temporaries, MiB | asked |\n|---|---|---|---|")
    for scheme in options["schemes"].split(","):
        for passes, name in PASSES.items():
            held = compiled(scheme, passes, options["order"]).memory_analysis().temp_size_in_bytes / 2**20
            print(f"| {scheme} | {name} | {held:,.0f} | {LIMITS.get((SCHEMES[scheme], passes), '')} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
