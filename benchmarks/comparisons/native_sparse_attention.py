"""`python -m benchmarks.comparisons.native_sparse_attention`: beside the reference of flash-linear-attention, on a CPU.

Its `naive_nsa` is plain torch, a loop over queries. Outputs and all gradients, for the same float32 inputs. Needs torch and
`pip install --no-deps fla-core einops`, which the project does not install. Two functions that naive_nsa calls run on GPUs
alone and stand here in plain torch: the mean of a block, and attention in a window (flash-attn), which is torch's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

import kernels
from benchmarks.comparisons.state_space import differences, normal

# naive_nsa asks for at least 16 query heads to a key head, and for values as wide as it likes.
B, T, N, K, H, HV, SIZE, WINDOW = 2, 75, 32, 2, 16, 8, 8, 11
CUTS = (0, 20, 29, 75)


def inputs(rows: int, *gates: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {"query": (rows, T, N, H), "key": (rows, T, K, H), "value": (rows, T, K, HV)}
    return {n: normal(rng, *s) for n, s in (arrays | dict.fromkeys(gates, (rows, T, N))).items()}


def indices() -> np.ndarray:
    """Returns three blocks for each query, its own among them, each named once: naive_nsa counts what is named twice twice."""
    rng = np.random.default_rng(2)
    own = np.arange(T) // SIZE
    found = np.full((B, T, K, 3), -1)
    for b, t, k in np.ndindex(B, T, K):
        others = rng.permutation(own[t])[:2]
        found[b, t, k, : 1 + others.size] = [own[t], *others]
    return found


def counts() -> np.ndarray:
    """From 3: among the own, the first and the one before its own, naive_nsa leaves open which come first."""
    return np.random.default_rng(3).integers(3, 7, (B, T, K))


def references() -> Any:
    """Returns the module of naive_nsa, with what it has for GPUs alone in plain torch."""
    import torch
    from fla.ops.nsa import naive

    def mean_pooling(x: Any, size: int, cuts: Any) -> Any:
        edges = [0, x.shape[1]] if cuts is None else cuts.tolist()
        found = [x[:, i : min(i + size, e)].mean(1) for b, e in itertools.pairwise(edges) for i in range(b, e, size)]
        return torch.stack(found, 1)

    def windowed(q: Any, k: Any, v: Any, *, causal: bool, window_size: tuple, cuts: Any = None) -> Any:
        at = torch.arange(q.shape[1])
        near = (at[:, None] >= at) & (at[:, None] - at <= window_size[0])
        if cuts is not None:
            of = torch.searchsorted(cuts, at, right=True)
            near &= of[:, None] == of
        attend = torch.nn.functional.scaled_dot_product_attention
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        return attend(*turned, attn_mask=near, enable_gqa=True).transpose(1, 2)

    def packed(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, causal: bool, window_size: tuple, **rest: Any) -> Any:
        rows = windowed(q[None], k[None], v[None], causal=causal, window_size=window_size, cuts=cu_seqlens_q)
        return rows[0]

    naive.mean_pooling, naive.flash_attn_func, naive.flash_attn_varlen_func = mean_pooling, windowed, packed
    return naive


def calls() -> dict[str, tuple[dict, dict, dict]]:
    """Returns name -> (arrays, our options, their options)."""
    all_gates = inputs(B, "g_cmp", "g_slc", "g_swa")
    own = inputs(B, "g_slc")
    one = inputs(1, "g_cmp", "g_slc", "g_swa")
    both = {"block_size": SIZE}
    each = both | {"block_counts": counts()}
    window = {"sliding_window": WINDOW}, {"window_size": WINDOW}
    return {
        "top-k of 4, three gates": (
            all_gates,
            both | {"block_counts": 4} | window[0],
            both | {"block_counts": 4} | window[1],
        ),
        "top-k, counts of each query": (inputs(B, "g_cmp", "g_slc"), each, each),
        "blocks given": (own, both | {"block_indices": indices()}, both | {"block_indices": indices()}),
        "blocks given, three gates": (
            all_gates,
            both | {"block_indices": indices()} | window[0],
            both | {"block_indices": indices()} | window[1],
        ),
        "packed documents, top-k of 3, three gates": (
            one,
            both | {"block_counts": 3, "cu_seqlens": np.array(CUTS)} | window[0],
            both | {"block_counts": 3, "cu_seqlens": np.array(CUTS)} | window[1],
        ),
    }


def main() -> None:
    """Prints the rows of the table in the README."""
    import torch

    naive = references()
    short = {"query": "q", "key": "k", "value": "v"}
    print(
        f"fla-core {version('fla-core')}, torch {version('torch')}, float32, {T} tokens, {N} and {K} heads, blocks of {SIZE}"
    )

    def tensors(options: dict) -> dict:
        return {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}

    def run(options: dict) -> Callable:
        return lambda t: (naive.naive_nsa(**{short.get(n, n): x for n, x in t.items()}, **tensors(options)),)

    for name, (a, mine, other) in calls().items():
        off = differences(lambda a, o=mine: (kernels.native_sparse_attention(**a, **o),), run(other), a)
        worst = [*a][int(np.argmax(off[1:]))]
        print(f"| {name} | {off[0]:.1e} | {max(off[1:]):.1e} ({worst}) |", flush=True)


if __name__ == "__main__":
    main()
