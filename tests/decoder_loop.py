"""A decoder with mixtures of experts and latent attention in NumPy float64, without JAX: layers one after the other, attention
query by query, experts token by token. The oracle of a training step's numbers."""

import functools
import math

import experts_loop
import numpy as np
import recurrent_layers_loop
from numpy_native_sparse import loop as native_sparse

from ejdist.models import parts


def norm(x, w, c, eps=None):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + (eps or c.norm_eps)) * (w + c.zero_centered_norms)


def frequencies(width, c):
    """Returns (frequency of each pair, factor of cos and sin), with the ramp of YaRN or of Llama 3."""
    plain = [c.rope_base ** (-2 * i / width) for i in range(width // 2)]
    if c.rope_scaling is None:
        return np.array(plain), 1.0
    if c.rope_scaling == "llama3":  # between one turn and four over the original context, where nothing else is said
        low, high = c.rope_low or 1, c.rope_high or 4
        kept = [min(max((c.rope_original_length * w / (2 * math.pi) - low) / (high - low), 0), 1) for w in plain]
        return np.array([k * w + (1 - k) * w / c.rope_factor for w, k in zip(plain, kept, strict=True)]), 1.0

    def pair_that_turns(times):
        return width / 2 * math.log(c.rope_original_length / (2 * math.pi * times), c.rope_base)

    first, last = pair_that_turns(c.rope_high or 32), pair_that_turns(c.rope_low or 1)
    if c.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    far = [min(max((i - first) / (last - first), 0), 1) for i in range(width // 2)]
    factor = c.rope_attention_factor or 0.1 * math.log(c.rope_factor) + 1
    return np.array([w * (1 - f) + w / c.rope_factor * f for w, f in zip(plain, far, strict=True)]), factor


def turned(x, positions, c, neighbours=False):
    w, factor = frequencies(x.shape[-1], c)
    turn = factor * np.exp(1j * positions[..., None, None] * w)
    half = x.shape[-1] // 2
    one, two = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(half), slice(half, None))
    z, out = (x[..., one] + 1j * x[..., two]) * turn, np.empty_like(x)
    out[..., one], out[..., two] = z.real, z.imag
    return out


def attended(q, k, v, ids, scale, window=None, sinks=None):
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        m = n // (q.shape[2] // k.shape[2])
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t] >= 0 and (window is None or t - s < window)]
        if seen:
            weight = np.exp(scale * k[b, seen, m] @ q[b, t, n])
            total = weight.sum() + (0 if sinks is None else np.exp(sinks[n, 0]))
            out[b, t, n] = weight / total @ v[b, seen, m]
    return out


def attention(x, w, batch, c, windowed=False, sparse=False):
    w = {n.removeprefix("sparse_"): p for n, p in w.items()}
    h = norm(x, w["attention_norm"], c)
    q, k, v = (np.einsum("btd,dnh->btnh", h, w[n]) + w.get(f"{n}_bias", 0) for n in ("query", "key", "value"))
    if c.qk_norm:
        q, k = norm(q, w["query_norm"], c), norm(k, w["key_norm"], c)
    R = (c.rotary_dim or c.head_dim) if c.attention_rope else 0
    q, k = (np.concatenate([turned(y[..., :R], batch["positions"], c), y[..., R:]], -1) for y in (q, k))
    window, scale = c.sliding_window if windowed else None, c.attention_scale or c.head_dim**-0.5
    if sparse:
        gates = np.moveaxis(1 / (1 + np.exp(-np.einsum("btd,dnh->btnh", h, w["gates"]))), -1, 0)
        options = {"block_size": c.sparse.block_size, "block_counts": c.sparse.num_blocks, "softmax_scale": scale}
        out = native_sparse(
            q, k, v, *gates, **options, sliding_window=c.sparse.window, segment_ids=batch["segment_ids"]
        )
    else:
        out = attended(q, k, v, batch["segment_ids"], scale, window, w.get("sinks"))
    if c.attention_gate:
        out = out / (1 + np.exp(-np.einsum("btd,dnh->btnh", h, w["query_gate"])))
    return x + np.einsum("btnh,nhd->btd", out, w["output"]) + w.get("output_bias", 0)


def latent_attention(x, w, batch, c):
    m, at = c.latent, batch["positions"]
    h = norm(x, w["latent_attention_norm"], c)
    narrow = norm(h @ w["query_down"], w["query_latent_norm"], c, m.norm_eps) if m.query_rank else h
    q = np.einsum("btr,rnh->btnh", narrow, w["latent_query"])
    if m.rope:
        q[..., m.nope_dim :] = turned(q[..., m.nope_dim :], at, c, neighbours=True)
    down = h @ w["latent_down"]
    latent, shared = norm(down[..., : m.kv_rank], w["latent_norm"], c, m.norm_eps), down[..., None, m.kv_rank :]
    shared = np.repeat(turned(shared, at, c, neighbours=True) if m.rope else shared, c.num_heads, axis=2)
    k = np.concatenate([np.einsum("btr,rnh->btnh", latent, w["key_up"]), shared], -1)
    scale = c.attention_scale or (m.nope_dim + m.rope_dim) ** -0.5
    out = attended(q, k, np.einsum("btr,rnh->btnh", latent, w["value_up"]), batch["segment_ids"], scale)
    return x + np.einsum("btnh,nhd->btd", out, w["latent_output"])


def mlp(x, w, batch, c):
    h = norm(x, w["mlp_norm"], c)
    g = h @ w["gate"]
    return x + (g / (1 + np.exp(-g)) * (h @ w["up"])) @ w["down"]


def ungated_mlp(x, w, batch, c):
    up = norm(x, w["ungated_mlp_norm"], c) @ w["ungated_up"]
    return x + (np.maximum(up, 0) ** 2 if c.activation == "relu2" else up / (1 + np.exp(-up))) @ w["ungated_down"]


def experts(x, w, batch, c, buffers):
    """Returns (x, the statistics of the layer)."""
    m = c.experts
    others = {"gate": w["experts_gate_up"], "down": w["experts_down"], "gate_bias": w.get("experts_gate_up_bias")}
    others |= {"down_bias": w.get("experts_down_bias")} | {n: w.get(n) for n in experts_loop.SHARED}
    out, stats = experts_loop.moe(
        norm(x, w["experts_norm"], c), w["router"], **others, activation=m.activation or c.activation, top_k=m.top_k,
        score=m.score, normalize=m.normalize, bias=buffers.get("bias", 0.0), router_bias=w.get("router_bias", 0.0),
        num_groups=m.num_groups, topk_groups=m.topk_groups, group_top=m.group_top,
        routed_scaling_factor=m.scaling_factor, segment_ids=batch["segment_ids"], balance=m.balance, load=buffers.get("load"),
    )  # fmt: skip
    return x + out, stats


PARTS = {
    "attention": attention,
    "window_attention": functools.partial(attention, windowed=True),
    "latent_attention": latent_attention,
    "sparse_attention": functools.partial(attention, sparse=True),
    "mlp": mlp,
    "ungated_mlp": ungated_mlp,
    "gated_delta": recurrent_layers_loop.gated_delta,
    "kda": recurrent_layers_loop.kda,
    "mamba2": recurrent_layers_loop.mamba2,
    "gla": recurrent_layers_loop.gla,
    "rwkv7": recurrent_layers_loop.rwkv7,
}


def hidden(params, buffers, batch, c):
    """Returns (what the output projection takes, the statistics of each layer of experts)."""
    x, row, found = params["embedding"][batch["tokens"]], dict.fromkeys(params["layers"], 0), []
    for layer in c.layers():
        for name in layer:
            mine = {n: w[row[n]] for n, w in params["layers"].items() if n in parts.PARTS[name].declare(c)}
            row |= {n: row[n] + 1 for n in mine}  # each layer has the row that counts up to it
            if name == "experts":
                x, stats = experts(x, mine, batch, c, {n: b[len(found)] for n, b in buffers.get("experts", {}).items()})
                found.append(stats)
            else:
                x = PARTS[name](x, mine, batch, c)
    return norm(x, params["final_norm"], c), found


def cross_entropy(params, x, targets, c):
    z = x @ (params["embedding"].T if c.tie_embeddings else params["lm_head"])
    at = np.take_along_axis(z, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.sum((np.log(np.sum(np.exp(z), -1)) - at)[targets >= 0])


def forward(params, buffers, batch, c):
    """Returns (the cross entropy, summed over counted tokens; the statistics of each layer of experts)."""
    x, found = hidden(params, buffers, batch, c)
    return cross_entropy(params, x, batch["targets"], c), found


def ahead(params, buffers, batch, c):
    """Returns the cross entropy of the token after the next, summed over the tokens that have one in their document, by the
    module behind the model (DeepSeek-V3, section 2.2)."""
    main, w = hidden(params, buffers, batch, c)[0], params["mtp"]
    tokens, targets = np.zeros_like(batch["tokens"]), np.full_like(batch["targets"], -1)
    for b, t in np.ndindex(tokens.shape[0], tokens.shape[1] - 1):
        if batch["segment_ids"][b, t] == batch["segment_ids"][b, t + 1] >= 0:
            tokens[b, t], targets[b, t] = batch["tokens"][b, t + 1], batch["targets"][b, t + 1]
    both = norm(params["embedding"][tokens], w["embedding_norm"], c), norm(main, w["hidden_norm"], c)
    x = np.concatenate(both, -1) @ np.concatenate([w["of_embedding"], w["of_hidden"]])
    of_layer = {name: rows[0] for name, rows in w.items() if rows.ndim > 1}
    for name in c.layers()[-1]:
        if name == "experts":
            x, _ = experts(x, of_layer, batch, c, {n: b[0] for n, b in buffers.get("mtp_experts", {}).items()})
        else:
            x = PARTS[name](x, of_layer, batch, c)
    return cross_entropy(params, norm(x, w["final_norm"], c), targets, c)


def step(params, buffers, batch, c, accumulation=1):
    """Returns the numbers of a step: losses over counted tokens, and the counts of each layer's experts."""
    count = np.sum(batch["targets"] >= 0)
    found = {"loss": 0.0, "balance_loss": 0.0, "z_loss": 0.0, "entropy": 0.0, "counts": 0}
    for first in range(accumulation):
        rows = {k: v[first::accumulation] for k, v in batch.items()}
        value, layers = forward(params, buffers, rows, c)
        found["loss"] += value / count
        # A mean over what is no padding, which weighs as much as the tokens that the microbatch counts.
        share = np.sum(rows["targets"] >= 0) / np.sum(rows["segment_ids"] >= 0) / count
        for name in ("balance_loss", "z_loss", "entropy"):
            found[name] += share * np.array([getattr(stats, name) for stats in layers])
        found["counts"] += np.array([stats.counts for stats in layers])
    m = c.experts
    found["auxiliary_loss"] = np.sum(m.balance_loss * found["balance_loss"] + m.z_loss * found["z_loss"])
    return found
