"""Random legal calls of an operation: shapes that nobody chose, for `python -m benchmarks.random_shapes`.

The distributions cover what models of 1B to 700B parameters have, and sizes beside them: lengths that no tile divides, odd
groups of heads, experts with few rows and with none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels import MaskInfo
from kernels.framework.backend import Case

Draw = Callable[[np.random.Generator], tuple[str, dict[str, Any]]]


def _log(rng: np.random.Generator, low: int, high: int, multiple: int = 1) -> int:
    """Returns a multiple, log-uniform in [low, high]."""
    size = np.exp(rng.uniform(np.log(low), np.log(high)))
    return max(multiple, round(float(size) / multiple) * multiple)


def _of(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def _attention(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    H = _of(rng, 64, 64, 128, 128, 128, 96, 80, 192, 256)
    group = _of(rng, 1, 1, 2, 4, 4, 5, 6, 7, 8, 8, 12, 16)
    K = _of(rng, *(k for k in (1, 2, 3, 4, 5, 8, 16, 32) if 4 <= k * group <= 64 and k * group * H <= 8192))
    T = _log(rng, 512, 32768, _of(rng, 1, 64, 128, 1024))
    B = max(1, min(8, 16384 // T))
    kind = _of(rng, "causal", "causal", "causal", "full", "window")
    window = (_log(rng, 128, max(129, T // 2)) - 1, 0) if kind == "window" else None
    mask = MaskInfo(causal=kind != "full", window=window)
    dims = {"B": B, "T": T, "S": T, "N": K * group, "K": K, "H": H, "Hv": H}
    name = f"{kind}{'' if window is None else window[0] + 1}_b{B}_t{T}_n{K * group}_k{K}_h{H}"
    return name, {"dims": dims, "make": {"mask": lambda rng, dims: mask}}


def _of_rows(share: np.ndarray) -> Callable:
    """Returns a maker of the sizes of groups: the rows of a case, dealt out by shares."""
    return lambda rng, dims: jnp.asarray(rng.multinomial(dims["M"], share / share.sum()), jnp.int32)


def _grouped(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    E = _of(rng, 4, 8, 8, 16, 32, 60, 64, 72, 128, 160, 256)
    widest = 14336 if E <= 8 else 4096 if E <= 64 else 2048  # many experts are narrow ones
    D, F = (_log(rng, 512, most, _of(rng, 64, 128, 128, 256, 8)) for most in (8192, widest))
    M = _log(rng, 8192, 131072, _of(rng, 1, 128))
    if rng.random() < 0.5:  # the product back
        D, F = F, D
    while 2 * M * D * F > 1.2e13:  # some hundredths of a second
        M //= 2
    how = _of(rng, "even", "skewed", "skewed", "holes")
    share = np.ones(E) if how == "even" else rng.gamma(2.0 if how == "skewed" else 0.5, size=E)
    if how == "holes":
        share[rng.random(E) < 0.25] = 0
    if not share.sum():
        share[0] = 1
    dims = {"M": M, "D": D, "E": E, "G": E, "F": F}
    return f"{how}_m{M}_d{D}_f{F}_e{E}", {
        "dims": dims,
        "make": {"rhs_transposed": lambda rng, dims: None, "group_sizes": _of_rows(share)},
    }


def _rows(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    D = _log(rng, 256, 16384, _of(rng, 8, 64, 256))
    rows = _log(rng, 1024, min(131072, 2**29 // D))
    return f"rows{rows}_d{D}", {"dims": {"lead": (rows,), "D": D}, "arrays": ("weight",)}


def _cross_entropy(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    D, V = _log(rng, 1024, 8192, 128), _log(rng, 32000, 200000, _of(rng, 1, 8, 128))
    rows = _log(rng, 2048, 16384)
    dims = {"lead": (rows,), "D": D, "V": V}
    return f"rows{rows}_d{D}_v{V}", {
        "dims": dims,
        "make": {"targets": lambda rng, dims: jnp.asarray(rng.integers(0, dims["V"], dims["lead"]), jnp.int32)},
    }


DRAWS: dict[str, Draw] = {
    "flash_attention": _attention,
    "grouped_matmul": _grouped,
    "rms_norm": _rows,
    "layer_norm": _rows,
    "cross_entropy": _cross_entropy,
}


def draw(operation: str, number: int, seed: int) -> list[Case]:
    """Returns `number` cases of an operation. The same seed gives the same, and a larger number gives those and more."""
    cases = []
    for i in range(number):
        name, case = DRAWS[operation](np.random.default_rng([seed, i]))
        cases.append(Case(name, tags=frozenset({"bench"}), **case))
    return cases
