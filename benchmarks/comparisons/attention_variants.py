"""`python -m benchmarks.comparisons.attention_variants`: three variants beside modules that others wrote, on a CPU.

Differential attention beside the layer of DiffLlama in transformers, performer beside performer-pytorch, linformer beside the
module of the package of that name; float32, the same inputs and weights, outputs and all gradients. Needs torch, transformers
and, installed with `--no-deps`, performer-pytorch, linformer, einops, local-attention, axial-positional-embedding and
hyper-connections, which the project does not install.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from benchmarks.comparisons.state_space import differences, normal

B, T, N, K, H, P, D = 2, 60, 8, 4, 16, 24, 64
HIGHEST = jax.lax.Precision.HIGHEST


def heads(x: Any, w: Any, count: int) -> jax.Array:
    """Returns [B, T, count, H] of x [B, T, D] and a weight [count H, D], as torch has it."""
    return jnp.matmul(x, w.T, precision=HIGHEST).reshape(B, T, count, H)


def differential() -> tuple[Any, Any, dict]:
    """A layer of DiffLlama: projections, differential attention, the norm of each head, and its projection."""
    import torch
    from transformers.models.diffllama import modeling_diffllama as diffllama
    from transformers.models.diffllama.configuration_diffllama import DiffLlamaConfig

    sizes = {
        "hidden_size": D,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "attention_dropout": 0.0,
    }
    config = DiffLlamaConfig(**sizes)
    config._attn_implementation = "eager"
    layer = diffllama.DiffLlamaAttention(config, layer_idx=3)
    rng = np.random.default_rng(0)
    names = {n: tuple(p.shape) for n, p in layer.named_parameters()}
    a = {"x": normal(rng, B, T, D)} | {n: normal(rng, *s) * (0.1 if len(s) == 1 else D**-0.5) for n, s in names.items()}
    a = {n.replace(".", "_"): x.astype(np.float32) for n, x in a.items()}
    eps = config.rms_norm_eps

    def mine(a: dict) -> tuple:
        q, k, v = (heads(a["x"], a[f"{w}_proj_weight"], n) for w, n in (("q", N), ("k", K), ("v", K)))
        lam = jnp.exp(a["lambda_q1"] @ a["lambda_k1"]) - jnp.exp(a["lambda_q2"] @ a["lambda_k2"]) + layer.lambda_init
        half, of_keys = N // 2, K // 2
        value = jnp.concatenate([v[:, :, :of_keys], v[:, :, of_keys:]], axis=-1)
        pairs = q[:, :, :half], k[:, :, :of_keys], q[:, :, half:], k[:, :, of_keys:]
        out = kernels.differential_attention(*pairs, value, lam, causal=True)
        out = (1 - layer.lambda_init) * kernels.rms_norm(out, jnp.ones(2 * H), eps=eps)
        return (jnp.matmul(out.reshape(B, T, N * H), a["o_proj_weight"].T, precision=HIGHEST),)

    def other(t: dict) -> tuple:
        weights = {n: t[n.replace(".", "_")] for n in names}
        still = torch.ones(B, T, H), torch.zeros(B, T, H)  # no rotation: it is not of the operation
        hidden = torch.full((T, T), -torch.inf).triu(1)[None, None]
        given = {"hidden_states": t["x"], "position_embeddings": still, "attention_mask": hidden}
        return (torch.func.functional_call(layer, weights, kwargs=given)[0],)

    return mine, other, a


def performer() -> tuple[Any, Any, dict]:
    if (
        importlib.util.find_spec("distutils") is None
    ):  # performer-pytorch asks it for torch's version; Python 3.12 has none
        version_module: Any = types.ModuleType("distutils.version")
        version_module.LooseVersion = lambda text: tuple(map(int, text.split("+")[0].split(".")))
        sys.modules.update({"distutils": types.ModuleType("distutils"), "distutils.version": version_module})
    from performer_pytorch import performer_pytorch as library

    rng = np.random.default_rng(0)
    shapes = {"query": (B, T, N, H), "key": (B, T, N, H), "value": (B, T, N, H), "features": (P, H)}
    a = {n: normal(rng, *s) for n, s in shapes.items()}

    def other(t: dict) -> tuple:
        q, k, v = (t[n].transpose(1, 2) for n in ("query", "key", "value"))
        # Its eps keeps weights from 0, and is no part of the estimate.
        how = {"projection_matrix": t["features"], "eps": 0.0}
        q, k = library.softmax_kernel(q, is_query=True, **how), library.softmax_kernel(k, is_query=False, **how)
        return (library.linear_attention(q, k, v).transpose(1, 2),)

    return lambda a: (kernels.performer_attention(**a),), other, a


def linformer() -> tuple[Any, Any, dict]:
    import torch
    from linformer.linformer import LinformerSelfAttention

    layer = LinformerSelfAttention(D, T, k=P, heads=N, dim_head=H)
    rng = np.random.default_rng(0)
    names = {n: tuple(p.shape) for n, p in layer.named_parameters()}
    a = {"x": normal(rng, B, T, D)} | {n.replace(".", "_"): normal(rng, *s) * s[0] ** -0.5 for n, s in names.items()}
    a = {n: x.astype(np.float32) for n, x in a.items()}

    def mine(a: dict) -> tuple:
        q, k, v = (heads(a["x"], a[f"to_{w}_weight"], N) for w in "qkv")
        out = kernels.linformer_attention(q, k, v, a["proj_k"].T, a["proj_v"].T)
        return (jnp.matmul(out.reshape(B, T, -1), a["to_out_weight"].T, precision=HIGHEST) + a["to_out_bias"],)

    def other(t: dict) -> tuple:
        return (torch.func.functional_call(layer, {n: t[n.replace(".", "_")] for n in names}, (t["x"],)),)

    return mine, other, a


def main() -> None:
    """Prints the rows of the table in the README."""
    packages = ", ".join(f"{n} {version(n)}" for n in ("torch", "transformers", "performer-pytorch", "linformer"))
    print(f"{packages}, float32, {T} tokens")
    for name, reference, make in (
        ("differential_attention", "the layer of DiffLlama, transformers", differential),
        ("performer_attention", "`softmax_kernel` and `linear_attention` of performer-pytorch", performer),
        ("linformer_attention", "`LinformerSelfAttention` of linformer", linformer),
    ):
        mine, other, a = make()
        off = differences(mine, other, a)
        worst = [*a][int(np.argmax(off[1:]))]
        print(f"| `{name}` | {reference} | {off[0]:.1e} | {max(off[1:]):.1e} ({worst}) |", flush=True)


if __name__ == "__main__":
    main()
