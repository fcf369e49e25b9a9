"""`python benchmarks/comparisons/state_space.py`: state spaces beside the functions of Hugging Face transformers, on a CPU.

Mamba's and Mamba-2's models there have a plain torch path, a loop over time and chunks. Outputs, last states and all
gradients, for the same float32 inputs. Needs torch and transformers, which the project does not install.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels

B, T, N, K, S, P, D, W = 2, 150, 4, 2, 16, 8, 12, 4


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def steps(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.exp(rng.uniform(np.log(1e-3), np.log(2), shape)).astype(np.float32)


def inputs(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "causal_conv1d":
        return {"x": normal(rng, B, T, D), "weight": normal(rng, D, W), "bias": normal(rng, D)}
    if name == "state_space_v1":
        own = {"x": (B, T, D), "B": (B, T, S), "C": (B, T, S), "D": (D,), "z": (B, T, D)}
        return {n: normal(rng, *s) for n, s in own.items()} | {"dt": steps(rng, B, T, D), "A": -steps(rng, D, S)}
    own = {"x": (B, T, N, P), "B": (B, T, K, S), "C": (B, T, K, S), "D": (N,), "state": (B, N, S, P)}
    own |= {"z": (B, T, N, P), "norm_weight": (N * P,)}
    return {n: normal(rng, *s) for n, s in own.items()} | {"dt": steps(rng, B, T, N), "A": -steps(rng, N)}


def ours(name: str, a: dict) -> tuple:
    options = {"causal_conv1d": {"activation": "silu"}, "state_space_v2": {"norm_groups": K}}.get(name, {})
    return getattr(kernels, name)(**a, **options, return_state=True)


def theirs(name: str, t: dict) -> tuple:
    from transformers.models.mamba import modeling_mamba as mamba
    from transformers.models.mamba2 import modeling_mamba2 as mamba2

    if name == "causal_conv1d":
        out = mamba2.causal_conv1d_fn(t["x"].swapaxes(1, 2), t["weight"], t["bias"], activation="silu")
        return out.swapaxes(1, 2), t["x"].swapaxes(1, 2)[:, :, 1 - W :]
    if name == "state_space_v1":
        turned = {n: t[n].swapaxes(1, 2) for n in ("x", "dt", "B", "C", "z")}
        out, state = mamba.mamba_selective_scan(
            turned["x"], turned["dt"], t["A"], turned["B"], turned["C"], t["D"], turned["z"], return_last_state=True
        )
        return out.swapaxes(1, 2), state
    arrays = [t[n] for n in ("x", "dt", "A", "B", "C")]
    options = {"D": t["D"], "initial_states": t["state"].swapaxes(2, 3), "return_final_states": True}
    out, state = mamba2.mamba2_chunk_scan(*arrays, 32, **options)
    norm = mamba2.MambaRMSNormGated(N * P, N * P // K, eps=1e-5)
    del norm.weight
    norm.weight = t["norm_weight"]
    out = norm(out.reshape(B, T, N * P), t["z"].reshape(B, T, N * P))
    return out.reshape(B, T, N, P), state.swapaxes(2, 3)


def differences(mine: Any, other: Any, a: dict, seed: int = 1) -> list[float]:
    """Returns the relative errors, in the 2-norm, of outputs and then of the gradients of each of the inputs."""
    import torch

    found, pull = jax.vjp(jax.jit(mine), jax.tree.map(jnp.asarray, a))
    rng = np.random.default_rng(seed)
    d = tuple(normal(rng, *y.shape) for y in found)
    (gradients,) = pull(tuple(map(jnp.asarray, d)))
    t = {n: torch.tensor(x, requires_grad=True) for n, x in a.items()}
    wanted = other(t)
    torch.autograd.backward(wanted, [torch.tensor(x) for x in d])
    pairs = [(x, y.detach().numpy()) for x, y in zip(found, wanted, strict=True)]
    pairs += [(gradients[n], t[n].grad.numpy()) for n in a]
    return [float(np.linalg.norm(np.asarray(x) - y) / np.linalg.norm(y)) for x, y in pairs]


def main() -> None:
    """Prints a row of the table in the README of the state spaces for each function."""
    import transformers

    print(f"transformers {transformers.__version__}, float32, {B} x {T} tokens")
    for name, reference in (
        ("state_space_v2", "Mamba-2: `mamba2_chunk_scan`, then gate and norm in groups"),
        ("state_space_v1", "Mamba: `mamba_selective_scan` with a gate, a loop"),
        ("causal_conv1d", "`causal_conv1d_fn`, torch's conv1d"),
    ):
        a = inputs(name)
        off = differences(lambda a, n=name: ours(n, a), lambda t, n=name: theirs(n, t), a)
        print(
            f"| `{name}` | {reference} | {off[0]:.1e} | {off[1]:.1e} | {max(off[2:]):.1e} ({[*a][int(np.argmax(off[2:]))]}) |"
        )


if __name__ == "__main__":
    main()
