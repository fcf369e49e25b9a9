"""`python benchmarks/comparisons/delta_rule.py`: the delta rules beside the functions of Hugging Face transformers, on a CPU.

Qwen3-Next's and Kimi Linear's models have their recurrences in plain torch, as a loop over time and in chunks. Outputs, last
states and all gradients, for the same float32 inputs. Needs torch and transformers, which the project does not install.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels

B, T, K, N, H, Hv = 2, 150, 2, 4, 32, 24


def inputs(channels: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads = N if channels else K  # Kimi's has as many heads of keys as of values
    a = {name: rng.standard_normal((B, T, heads, H)) for name in ("query", "key")}
    a |= {"value": rng.standard_normal((B, T, N, Hv)), "beta": rng.random((B, T, N))}
    a["g"] = -np.exp(rng.uniform(np.log(1e-3), np.log(5), (B, T, N, H) if channels else (B, T, N)))
    a["state"] = rng.standard_normal((B, N, H, Hv))
    return {name: x.astype(np.float32) for name, x in a.items()}


def ours(function: Any, a: dict, d: tuple) -> list[np.ndarray]:
    """Returns out, state and the gradients of the inputs."""

    def outputs(a: dict) -> tuple:
        a = dict(a)
        state = a.pop("state")
        return function(**a, initial_state=state, return_state=True, use_qk_l2norm=True)

    @jax.jit
    def run(a: dict) -> tuple:
        found, pull = jax.vjp(outputs, a)
        return found, pull(tuple(map(jnp.asarray, d)))[0]

    found, gradients = run(a)
    return [*map(np.asarray, found), *(np.asarray(gradients[n]) for n in a)]


def theirs(function: Any, a: dict, d: tuple) -> list[np.ndarray]:
    import torch

    t = {n: torch.tensor(x, requires_grad=True) for n, x in a.items()}
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = function(t["query"], t["key"], t["value"], t["g"], t["beta"], initial_state=t["state"], **options)
    torch.autograd.backward(found, [torch.tensor(x) for x in d])
    return [x.detach().numpy() for x in found] + [t[n].grad.numpy() for n in a]


def main() -> None:
    """Prints a row of the table in the README of the delta rules for each function of transformers."""
    import transformers
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    print(f"transformers {transformers.__version__}, float32, {B} x {T} tokens, {N} heads of {H} by {Hv}")
    for function, name, reference in (
        (kernels.gated_delta_rule, "Qwen3-Next, loop", qwen.torch_recurrent_gated_delta_rule),
        (kernels.gated_delta_rule, "Qwen3-Next, chunks", qwen.torch_chunk_gated_delta_rule),
        (kernels.kernel_delta_attention, "Kimi Linear, loop", kimi.recurrent_kimi_delta_attention),
        (kernels.kernel_delta_attention, "Kimi Linear, chunks", kimi.chunk_kimi_delta_attention),
    ):
        a = inputs(function is kernels.kernel_delta_attention)
        rng = np.random.default_rng(1)
        d = tuple(rng.standard_normal(s).astype(np.float32) for s in ((B, T, N, Hv), (B, N, H, Hv)))
        off = [
            np.linalg.norm(x - y) / np.linalg.norm(y)
            for x, y in zip(ours(function, a, d), theirs(reference, a, d), strict=True)
        ]
        worst = ("out", "state", *(f"d{n}" for n in a))[2 + int(np.argmax(off[2:]))]
        print(f"| {name} | {off[0]:.1e} | {off[1]:.1e} | {max(off[2:]):.1e} ({worst}) |", flush=True)


if __name__ == "__main__":
    main()
