"""`python -m benchmarks.comparisons.blocksparse_attention`: beside torch's own attention under the same blocks, on a CPU.

Values from flex_attention, whose mask is a function of a pair, and values and all gradients from scaled_dot_product_attention
under the dense mask (flex_attention has no backward on a CPU); float32, the same inputs. Needs torch, which the project does
not install.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

import kernels
from benchmarks.comparisons.state_space import differences, normal

B, T, N, K, H, SIZE = 2, 120, 4, 2, 16, 8


def blocks(density: float, *lead: int) -> np.ndarray:
    """Random blocks with all diagonal ones: torch gives NaN for a query without a key, or 0, from version to version."""
    found = np.random.default_rng(1).random((*lead, T // SIZE, T // SIZE)) < density
    return found | np.eye(T // SIZE, dtype=bool)


def calls() -> dict[str, dict[str, Any]]:
    """Returns name -> options."""
    ids = np.sort(np.random.default_rng(2).integers(0, 3, (B, T)), 1)
    from kernels.ops.blocksparse_attention import bigbird_blocks

    return {
        "a tenth, shared": {"block_mask": blocks(0.1)},
        "a third, each row and head, causal": {"block_mask": blocks(0.3, B, N), "causal": True},
        "BigBird, segments": {"block_mask": bigbird_blocks(T // SIZE), "q_segment_ids": ids, "kv_segment_ids": ids},
    }


def seen_of(options: dict[str, Any]) -> np.ndarray:
    """Returns bool [B, N, T, T] of the options."""
    found = np.broadcast_to(options["block_mask"], (B, N, T // SIZE, T // SIZE)).repeat(SIZE, 2).repeat(SIZE, 3)
    if options.get("causal"):
        found = found & np.tril(np.ones((T, T), bool))
    ids = options.get("q_segment_ids")
    return found if ids is None else found & (ids[:, :, None] == ids[:, None])[:, None]


def main() -> None:
    """Prints the rows of the table in the README."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    rng = np.random.default_rng(0)
    a = {n: normal(rng, B, T, heads, H) for n, heads in (("query", N), ("key", K), ("value", K))}
    print(f"torch {version('torch')}, float32, {T} tokens, {N} and {K} heads of {H}, blocks of {SIZE}")

    def flex(t: dict, seen: Any) -> Any:
        return flex_attention(
            *(x.detach().transpose(1, 2) for x in t.values()),
            score_mod=lambda score, b, n, i, j: torch.where(seen[b, n, i, j], score, -torch.inf),
            enable_gqa=True,
        ).transpose(1, 2)

    def dense(t: dict, seen: Any) -> tuple:
        attend = torch.nn.functional.scaled_dot_product_attention
        turned = (x.transpose(1, 2) for x in t.values())
        return (attend(*turned, attn_mask=seen, enable_gqa=True).transpose(1, 2),)

    for name, options in calls().items():
        seen = torch.tensor(seen_of(options))

        def mine(a: dict, options: dict = options) -> tuple:
            return (kernels.blocksparse_attention(**a, **options, block_size=SIZE),)

        off = differences(mine, functools.partial(dense, seen=seen), a)
        wanted = flex({n: torch.tensor(x) for n, x in a.items()}, seen).numpy()
        got = np.asarray(jax.jit(mine)(a)[0])
        of_flex = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        print(
            f"| {name} | {of_flex:.1e} | {off[0]:.1e} | {max(off[1:]):.1e} ({[*a][int(np.argmax(off[1:]))]}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
