"""`python -m benchmarks.comparisons.torch_functions`: layer_norm, rms_norm and fused_kl_divergence in float32 beside PyTorch's
own functions in float64, in value and in every gradient. Needs `pip install torch`.

Prints, for each call, the largest relative error in the 2-norm of an output and of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import kernels

LEAD, D, DT, F, V = (5, 31), 101, 67, 24, 203


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for shape in shapes]


def calls() -> dict[str, tuple[Callable, Callable, list[np.ndarray], int]]:
    """Returns name -> (ours, theirs, arrays, how many of them have gradients)."""
    import torch
    from torch.nn import functional

    norm, rms = functional.layer_norm, functional.rms_norm

    def added(x: Any, r: Any, *rest: Any) -> tuple:
        return norm(x + r, (D,), *rest), x + r

    def kl(reverse: bool) -> Callable:
        def divergence(h: Any, w: Any, ht: Any, wt: Any) -> Any:
            s, t = (torch.log_softmax(a @ b / 2, -1) for a, b in ((h, w), (ht.detach(), wt.detach())))
            p, q = (s, t) if reverse else (t, s)
            return functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)

        return divergence

    heads = ((*LEAD, D), (D, V), (*LEAD, DT), (DT, V))
    how = {"temperature": 2.0, "reduction": "none"}
    found = {
        "layer_norm(x, weight, bias)": (
            kernels.layer_norm,
            lambda x, w, b: norm(x, (D,), w, b),
            arrays((*LEAD, D), (D,), (D,)),
            3,
        ),
        "layer_norm(x, weight, bias, residual=)": (
            lambda x, r, w, b: kernels.layer_norm(x, w, b, residual=r),
            added,
            arrays((*LEAD, D), (*LEAD, D), (D,), (D,)),
            4,
        ),
        "layer_norm_linear": (
            kernels.layer_norm_linear,
            lambda x, w, b, p: norm(x, (D,), w, b) @ p,
            arrays((*LEAD, D), (D,), (D,), (D, F)),
            4,
        ),
        "rms_norm(x, weight, residual=)": (
            lambda x, r, w: kernels.rms_norm(x, w, residual=r, eps=1e-5),
            lambda x, r, w: (rms(x + r, (D,), w, 1e-5), x + r),
            arrays((*LEAD, D), (*LEAD, D), (D,)),
            3,
        ),
        "rms_norm_linear": (
            kernels.rms_norm_linear,
            lambda x, w, p: rms(x, (D,), w, 1e-6) @ p,
            arrays((*LEAD, D), (D,), (D, F)),
            3,
        ),
    }
    for direction in ("forward", "reverse"):
        found[f"fused_kl_divergence, {direction}, temperature 2"] = (
            lambda *a, direction=direction: kernels.fused_kl_divergence(*a, direction=direction, **how),
            kl(direction == "reverse"),
            arrays(*heads),
            2,
        )
    return found


def error(got: Any, want: Any) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def main() -> None:
    """Prints the table."""
    import torch

    print("| call | output | gradient |\n|---|---|---|")
    for name, (ours, theirs, given, differentiated) in calls().items():
        leaves = [torch.tensor(x, requires_grad=i < differentiated) for i, x in enumerate(given)]
        wanted = theirs(*leaves)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        cotangents = arrays(*(tuple(y.shape) for y in wanted))
        torch.autograd.backward(wanted, [torch.tensor(d) for d in cotangents])
        narrow = [np.float32(x) for x in given]

        def run(*first: Any, ours: Callable = ours, rest: list = narrow[differentiated:]) -> tuple:
            out = ours(*first, *rest)
            return out if isinstance(out, tuple) else (out,)

        outputs, pull = jax.vjp(run, *narrow[:differentiated])
        gradients = pull(tuple(np.float32(d) for d in cotangents))
        off = max(error(y, w.detach().numpy()) for y, w in zip(outputs, wanted, strict=True))
        d_off = max(error(g, x.grad.numpy()) for g, x in zip(gradients, leaves))
        print(f"| `{name}` | {off:.1e} | {d_off:.1e} |")


if __name__ == "__main__":
    main()
