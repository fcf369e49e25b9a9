"""`python -m benchmarks.blocksparse_density [LENGTH]`: CPU seconds of block-sparse attention, forward and backward, by density.

Beside them flash attention over all pairs, on the same arrays. Before that the numbers are compared with those of flash
attention under the same mask, dense, at a shorter length and in the same process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels import blocksparse_attention, flash_attention
from kernels.ops.blocksparse_attention import random_blocks

BLOCK, HEADS, WIDTH = 128, 4, 64


def arrays(length: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, length, HEADS, WIDTH)), jnp.float32) for _ in range(3)]


def gradients(attend: Callable) -> Callable:
    return jax.jit(jax.value_and_grad(lambda x, *rest: jnp.sum(jnp.sin(attend(*x, *rest)))))


def seconds(run: Callable, *given: object) -> float:
    """Returns CPU seconds of a compiled program, of all threads: on a machine that others use too, the clock says less."""
    compiled = run.lower(*given).compile()
    start = time.process_time()
    jax.block_until_ready(compiled(*given))
    return time.process_time() - start


def sparse() -> Callable:
    return lambda q, k, v, blocks: blocksparse_attention(q, k, v, blocks, BLOCK)


def check(length: int) -> None:
    """Raises AssertionError where block-sparse attention differs from flash attention with the same mask, dense."""
    x, blocks = arrays(length), random_blocks(length // BLOCK, count=length // BLOCK // 4)
    dense = jnp.asarray(blocks.repeat(BLOCK, 0).repeat(BLOCK, 1))[None]
    got = gradients(sparse())(x, jnp.asarray(blocks))
    want = gradients(lambda q, k, v, mask: flash_attention(q, k, v, attention_mask=mask))(x, dense)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-3, atol=2e-4)


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
    check(min(length, 1024))
    x, n = arrays(length), length // BLOCK
    dense = seconds(gradients(flash_attention), x)
    print(f"{jax.devices()[0].device_kind}, T = S = {length}, N = K = {HEADS}, H = {WIDTH}, blocks of {BLOCK}, float32")
    print("| | CPU seconds | of flash attention |\n|---|---|---|")
    print(f"| flash attention, all pairs | {dense:.2f} | 1 |")
    run = gradients(sparse())  # one program: the blocks are data
    for density in (1.0, 0.25, 0.1, 0.05):
        blocks = jnp.asarray(random_blocks(n, count=round(density * n)))
        took = seconds(run, x, blocks)
        print(f"| {density:.0%} of the blocks | {took:.2f} | {took / dense:.3f} |", flush=True)


if __name__ == "__main__":
    main()
