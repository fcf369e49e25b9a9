"""`python -m benchmarks.comparisons.rotary_angles`: the errors of rotary embedding with float32 angles and with exact ones.

Prints a table in Markdown: of 64 random positions up to each number, H 128 and base 5e5, the largest error of a cosine or
sine, and of scores (query . key) / sqrt(H) of random normal vectors, whose keys are up to 4,096 positions before the
queries. The truth is in float64, with angles reduced as fractions.
"""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from kernels import rotary_embedding
from kernels.ops.rotary_embedding import frequencies

H, BASE, TOKENS, DISTANCE = 128, 5e5, 64, 4096
_TURN = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")


def truth(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns x [T, H] rotated, float64."""
    w = [Fraction(float(f)) for f in frequencies(H, BASE, None)[0]]
    angle = np.array([[float(int(p) * f % _TURN) for f in w] for p in positions])
    turned = (x[:, : H // 2] + 1j * x[:, H // 2 :]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], 1)


def errors(last: int, exact_from: int | None) -> tuple[float, float]:
    """Returns the largest errors of a sine or cosine, and of a score, of positions up to `last`."""
    rng = np.random.default_rng(0)
    positions = np.append(rng.integers(last // 2, last, TOKENS - 1), last)
    before = positions - rng.integers(0, DISTANCE, TOKENS)
    query, key = rng.standard_normal((2, TOKENS, H)).astype(np.float32)
    one = np.concatenate([np.ones((TOKENS, H // 2)), np.zeros((TOKENS, H // 2))], 1).astype(np.float32)

    @jax.jit
    def turned(x: jax.Array, at: jax.Array) -> jax.Array:
        return rotary_embedding(x[None, :, None], at[None], base=BASE, exact_from=exact_from)[0, :, 0]

    def of(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return np.asarray(turned(jnp.asarray(x), jnp.asarray(at, jnp.int32)), np.float64)

    def scores(turn: object) -> np.ndarray:
        assert callable(turn)
        return np.sum(turn(query, positions) * turn(key, before), 1) / np.sqrt(H)

    of_angle = np.abs(of(one, positions) - truth(one, positions)).max()
    return float(of_angle), float(np.abs(scores(of) - scores(truth)).max())


def main() -> None:
    """Prints the table."""
    print("| positions up to | cos, sin: float32 | exact | score: float32 | exact |\n|---|---|---|---|---|")
    for last in (2**13, 2**17, 2**20, 2**22, 2**24, 2**28, 2**31 - 1):
        (angle, score), (exact_angle, exact_score) = errors(last, None), errors(last, 0)
        print(f"| {last:,} | {angle:.1e} | {exact_angle:.1e} | {score:.1e} | {exact_score:.1e} |")


if __name__ == "__main__":
    main()
