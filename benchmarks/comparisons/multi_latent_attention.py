"""`python benchmarks/comparisons/multi_latent_attention.py`: DeepSeek-V3's attention beside transformers'.

Theirs is `DeepseekV3Attention` with random weights, in float64. Ours, in float32, is made of this project's operations alone:
norms, rotation with YaRN, attention. Needs torch and transformers, which the project does not install. Two conventions matter:

- Rotary pairs are neighbours, (2i, 2i + 1). Theirs come out of the rotation one half after the other, and ours
  (`interleaved=True`) where they were; a logit does not see it, since queries and keys are alike.
- Their logits are scaled by mscale^2 / sqrt(H + Hr), where YaRN's mscale = 0.1 mscale_all_dim ln(factor) + 1; so it is an
  argument here, `softmax_scale`, and the factor of cosines and sines is 1 where mscale and mscale_all_dim are equal, as in V3.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from kernels.ops.rotary_embedding import RopeScaling

B, T, D, N, H, HR, HV, R, R_QUERY = 2, 45, 64, 4, 12, 8, 10, 16, 24
FACTOR, LENGTH, BASE = 40.0, 16, 10000.0
SCALE = (0.1 * math.log(FACTOR) + 1) ** 2 / math.sqrt(H + HR)
YARN = RopeScaling(kind="yarn", factor=FACTOR, original_length=LENGTH, attention_factor=1.0)
PROMPT, C = 30, 4  # tokens of a prompt; entries of a page


def layer() -> tuple[Any, Any]:
    """Returns (their attention, their rotation), in float64."""
    import torch
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as model

    rope = {"rope_type": "yarn", "rope_theta": BASE, "factor": FACTOR, "original_max_position_embeddings": LENGTH}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
    sizes = {"hidden_size": D, "num_attention_heads": N, "num_key_value_heads": N, "num_hidden_layers": 1}
    sizes |= {"qk_nope_head_dim": H, "qk_rope_head_dim": HR, "v_head_dim": HV, "kv_lora_rank": R}
    sizes |= {"q_lora_rank": R_QUERY, "max_position_embeddings": int(FACTOR) * LENGTH}
    config = DeepseekV3Config(**sizes, rope_parameters=rope, attn_implementation="eager")
    torch.manual_seed(0)
    attention = model.DeepseekV3Attention(config, 0).double()
    for p in attention.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0)
    return attention, model.DeepseekV3RotaryEmbedding(config)


def theirs(attention: Any, rotation: Any, x: Any, cache: Any = None) -> Any:
    """Returns the layer's output for the next tokens of a cache, or for all there are."""
    import torch

    before = cache.get_seq_length() if cache else 0
    positions = before + torch.arange(x.shape[1])[None]
    seen = torch.arange(before + x.shape[1])[None] <= positions[0][:, None]
    mask = torch.where(seen, 0.0, -torch.inf).double()[None, None]
    return attention(x, rotation(x, positions), mask, past_key_values=cache)[0]


def projected(x: jax.Array, w: dict[str, jax.Array], positions: jax.Array) -> dict[str, jax.Array]:
    """Returns what attention is called with, of tokens [B, T, D] at positions [1, T]; weights by their names in the model."""

    def dense(a: jax.Array, name: str) -> jax.Array:
        return jnp.einsum("btd,ed->bte", a, w[f"{name}.weight"], precision="highest")

    def turned(a: jax.Array) -> jax.Array:
        return kernels.rotary_embedding(a, positions, base=BASE, scaling=YARN, interleaved=True)

    def normed(a: jax.Array, name: str) -> jax.Array:
        return kernels.rms_norm(a, w[f"{name}.weight"], eps=1e-6)

    query = dense(normed(dense(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj").reshape(*x.shape[:2], N, H + HR)
    latent, key = jnp.split(dense(x, "kv_a_proj_with_mqa"), [R], axis=-1)
    up = w["kv_b_proj.weight"].reshape(N, H + HV, R).transpose(2, 0, 1)
    return {
        "query": query[..., :H],
        "query_rope": turned(query[..., H:]),
        "key_value": normed(latent, "kv_a_layernorm"),
        "key_rope": turned(key[:, :, None])[:, :, 0],
        "w_kc": up[..., :H],
        "w_vc": up[..., H:],
    }


def out(heads: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    flat = heads.reshape(*heads.shape[:-2], N * HV)
    return jnp.einsum("...e,de->...d", flat, w["o_proj.weight"], precision="highest")


def whole(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    a = projected(x, w, jnp.arange(x.shape[1])[None])
    return out(kernels.flash_mla(**a, causal=True, softmax_scale=SCALE), w)


def decoded(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Returns the outputs of `mla_decode`: a prompt, and then a token at a time over the cache of latents."""
    a = projected(x, w, jnp.arange(T)[None])
    cache = jnp.concatenate([a["key_value"], a["key_rope"]], -1)
    step = jax.jit(lambda *x: kernels.mla_decode(*x, softmax_scale=SCALE))
    found = []
    for begin, end in ((0, PROMPT), *((t, t + 1) for t in range(PROMPT, T))):
        rows = (a["query"][:, begin:end], a["query_rope"][:, begin:end])
        there = jnp.where(jnp.arange(T)[:, None] < end, cache, 0.0)  # what is not written yet
        found.append(step(*rows, there, jnp.full(B, end), a["w_kc"], a["w_vc"]))
    return out(jnp.concatenate(found, axis=1), w)


def in_pages(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Returns the outputs of `multi_latent_ragged_page_attention`: the first request is a prompt while the second decodes its
    own, a token at a time; pages lie in any order."""
    a = projected(x, w, jnp.arange(T)[None])
    entries = np.asarray(jnp.concatenate([a["key_value"], a["key_rope"]], -1))
    each = -(-T // C)
    tables = np.random.default_rng(0).permutation(B * each).reshape(B, each)
    pages = np.full((B * each, C, R + HR), np.nan, np.float32)
    for r, j in np.ndindex(B, T):
        pages[tables[r, j // C], j % C] = entries[r, j]
    call = jax.jit(lambda *x: kernels.multi_latent_ragged_page_attention(*x, softmax_scale=SCALE))
    found = np.zeros((B, T, N, HV), np.float32)
    done = [0, 0]
    while min(done) < T:
        new = [min(PROMPT if r == 0 and n == 0 else 1, T - n) for r, n in enumerate(done)]
        ends = [n + m for n, m in zip(done, new, strict=True)]
        rows = [jnp.concatenate([a[name][r, done[r] : ends[r]] for r in range(B)]) for name in ("query", "query_rope")]
        lens, cuts = jnp.asarray(ends), jnp.asarray([0, new[0], sum(new)])
        got = np.asarray(call(*rows, jnp.asarray(pages), lens, jnp.asarray(tables), cuts, a["w_kc"], a["w_vc"]))
        found[0, done[0] : ends[0]], found[1, done[1] : ends[1]] = got[: new[0]], got[new[0] :]
        done = ends
    return out(jnp.asarray(found), w)


def off(got: Any, want: Any) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def main() -> None:
    """Prints the rows of the table in the README of latent attention."""
    import torch
    import transformers
    from transformers import DynamicCache

    attention, rotation = layer()
    assert math.isclose(attention.scaling, SCALE)
    rng = np.random.default_rng(0)
    x, d = rng.standard_normal((2, B, T, D))
    t = torch.tensor(x, requires_grad=True)
    want = theirs(attention, rotation, t)
    want.backward(torch.tensor(d))
    their = {n: p.grad.numpy() for n, p in attention.named_parameters()} | {"x": t.grad.numpy()}
    cache = DynamicCache()
    with torch.no_grad():
        parts = [theirs(attention, rotation, torch.tensor(x[:, :PROMPT]), cache)]
        parts += [theirs(attention, rotation, torch.tensor(x[:, n : n + 1]), cache) for n in range(PROMPT, T)]
    steps = torch.cat(parts, 1).numpy()

    w = {n: jnp.asarray(p.detach().numpy(), jnp.float32) for n, p in attention.named_parameters()}
    got, pull = jax.vjp(whole, jnp.asarray(x, jnp.float32), w)
    dx, dw = pull(jnp.asarray(d, jnp.float32))
    errors = {n: off(g, their[n]) for n, g in {**dw, "x": dx}.items()}
    worst = max(errors, key=errors.__getitem__)
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, {B} x {T} tokens, {len(errors)} gradients"
    )
    print("| ours | theirs | outputs | gradients, the worst |\n|---|---|---|---|")
    print(
        f"| `flash_mla` | all tokens at once | {off(got, want.detach().numpy()):.1e} | {errors[worst]:.1e} ({worst}) |"
    )
    one = jnp.asarray(x, jnp.float32)
    print(
        f"| `mla_decode` | a prompt of {PROMPT}, then single tokens, `DynamicCache` | {off(decoded(one, w), steps):.1e} | |"
    )
    print(f"| `multi_latent_ragged_page_attention` | the same | {off(in_pages(one, w), steps):.1e} | |")


if __name__ == "__main__":
    main()
