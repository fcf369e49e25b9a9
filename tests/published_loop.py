"""Decoders as their files describe them, in NumPy float64: a config.json and tensors by their published names, [out, in] as
of a linear layer of PyTorch. Knows nothing of the code that reads such files, nor of the decoder here."""

import math

import numpy as np
import published_state_spaces

V, D, N, K, H, F, E, L = 24, 12, 4, 2, 6, 10, 4, 3
SIZES = {"vocab_size": V, "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "num_hidden_layers": L,
         "intermediate_size": F, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
         "max_position_embeddings": 64}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
DEEPSEEK = {"num_key_value_heads": N, "n_routed_experts": E, "n_shared_experts": 2, "moe_intermediate_size": 3,
            "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # fmt: skip

NEXT = {"head_dim": 8, "partial_rotary_factor": 0.5, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "num_experts": E,
        "num_experts_per_tok": 2, "moe_intermediate_size": 4, "shared_expert_intermediate_size": 6}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
KIMI = {"num_key_value_heads": N, "num_experts": E, "num_shared_experts": 2, "moe_intermediate_size": 3,
        "num_experts_per_token": 2, "first_k_dense_replace": 1, "moe_renormalize": True, "routed_scaling_factor": 2.5,
        "moe_router_activation_func": "sigmoid", "mla_use_nope": True, "rope_theta": 10000.0}  # fmt: skip
KIMI |= LATENT | {"q_lora_rank": None}


def kimi(*linear):
    """The layers, from 1, that are recurrences, and what those have."""
    layers = {"kda_layers": [*linear], "full_attn_layers": [i for i in range(1, L + 1) if i not in linear]}
    return {"linear_attn_config": layers | {"num_heads": 3, "head_dim": 4, "short_conv_kernel_size": 3}}


def of(name, **keys):
    return {"architectures": [f"{name}ForCausalLM"]} | SIZES | keys


MODELS = {
    "llama": of("Llama", rope_theta=5e5, rope_scaling=LLAMA3, attention_bias=True, head_dim=H),
    "llama_tied": of("Llama", tie_word_embeddings=True, hidden_size=N * H,
                     rope_scaling=LLAMA3 | {"low_freq_factor": 0.5, "high_freq_factor": 2.0}),
    "mistral": of("Mistral", sliding_window=3, head_dim=H, rope_theta=1e6),
    "qwen2": of("Qwen2", hidden_size=N * H, use_sliding_window=True, sliding_window=3, max_window_layers=1,
                rope_theta=10.0, rope_scaling=YARN | {"original_max_position_embeddings": 64, "beta_fast": 4,
                                                      "beta_slow": 0.5, "truncate": False}),
    "qwen3": of("Qwen3", head_dim=H, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3_moe": of("Qwen3Moe", head_dim=H, num_experts=E, num_experts_per_tok=2, moe_intermediate_size=3,
                    norm_topk_prob=True, mlp_only_layers=[1]),
    "mixtral": of("Mixtral", head_dim=H, num_local_experts=E, num_experts_per_tok=2, sliding_window=None),
    "deepseek": of("DeepseekV3", rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, **LATENT | DEEPSEEK),
    "deepseek_no_rank": of("DeepseekV3", **LATENT | DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "gpt_oss": of("GptOss", head_dim=H, num_local_experts=E, num_experts_per_tok=2, sliding_window=3,
                  rope_scaling=YARN | {"truncate": False},
                  layer_types=["sliding_attention", "full_attention", "sliding_attention"], swiglu_limit=7.0),
    "qwen3_next": of("Qwen3Next", **NEXT, full_attention_interval=2, mlp_only_layers=[], norm_topk_prob=True,
                     layer_types=[LINEAR, FULL, LINEAR], rope_theta=1e7),
    "qwen3_next_dense": of("Qwen3Next", **NEXT | {"linear_num_value_heads": 4, "partial_rotary_factor": None},
                           mlp_only_layers=[1], norm_topk_prob=False, layer_types=[FULL, LINEAR, LINEAR],
                           rope_parameters=YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
    "kimi": of("KimiLinear", **KIMI | kimi(1, 2)),
    "kimi_dense": of("KimiLinear", **KIMI | kimi(2, 3) | {"first_k_dense_replace": 2, "moe_renormalize": False}),
    **published_state_spaces.MODELS,
}  # fmt: skip


def is_(c, *names):
    return c["architectures"][0].removesuffix("ForCausalLM") in names


def has_experts(c, i):
    if is_(c, "DeepseekV3", "KimiLinear"):
        return i >= c["first_k_dense_replace"]
    return is_(c, "Mixtral", "GptOss") or (is_(c, "Qwen3Moe", "Qwen3Next") and i not in c["mlp_only_layers"])


def is_linear(c, i):
    return is_(c, "Qwen3Next") and c["layer_types"][i] == LINEAR


def is_kda(c, i):
    return is_(c, "KimiLinear") and i + 1 in c["linear_attn_config"]["kda_layers"]


def shapes(c):
    """Returns name -> shape of every tensor of the files."""
    if published_state_spaces.is_one(c):
        return published_state_spaces.shapes(c)
    D, N, K, F = (c[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"))
    V = c["vocab_size"]
    H = c.get("head_dim", D // N)
    found = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (V, D)
    for i in range(L):
        own = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
        if is_kda(c, i):
            heads, width, taps = (
                c["linear_attn_config"][k] for k in ("num_heads", "head_dim", "short_conv_kernel_size")
            )
            wide = heads * width
            for name in "qkv":
                own[f"self_attn.{name}_proj.weight"] = (wide, D)
                own[f"self_attn.{name}_conv1d.weight"] = (wide, 1, taps)
            for name in "fg":
                own[f"self_attn.{name}_a_proj.weight"] = (width, D)
                own[f"self_attn.{name}_b_proj.weight"] = (wide, width)
            own |= {"self_attn.A_log": (1, 1, heads, 1), "self_attn.dt_bias": (wide,), "self_attn.b_proj.weight": (heads, D),
                    "self_attn.o_norm.weight": (width,), "self_attn.o_proj.weight": (D, wide)}  # fmt: skip
        elif is_(c, "DeepseekV3", "KimiLinear"):
            rank, kv, nope, rope, value = (c[k] for k in LATENT)
            query = {
                "q_a_proj.weight": (rank, D),
                "q_a_layernorm.weight": (rank,),
                "q_b_proj.weight": (N * (nope + rope), rank),
            }
            own |= {
                f"self_attn.{k}": s for k, s in (query if rank else {"q_proj.weight": (N * (nope + rope), D)}).items()
            }
            own |= {"self_attn.kv_a_proj_with_mqa.weight": (kv + rope, D),
                    "self_attn.kv_a_layernorm.weight": (kv,),
                    "self_attn.kv_b_proj.weight": (N * (nope + value), kv),
                    "self_attn.o_proj.weight": (D, N * value)}  # fmt: skip
        elif is_linear(c, i):
            keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
            values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
            heads = c["linear_num_value_heads"]
            own |= {"linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, D),
                    "linear_attn.in_proj_ba.weight": (2 * heads, D),
                    "linear_attn.conv1d.weight": (2 * keys + values, 1, c["linear_conv_kernel_dim"]),
                    "linear_attn.A_log": (heads,), "linear_attn.dt_bias": (heads,),
                    "linear_attn.norm.weight": (c["linear_value_head_dim"],),
                    "linear_attn.out_proj.weight": (D, values)}  # fmt: skip
        else:
            for name, size in (("q", (1 + is_(c, "Qwen3Next")) * N * H), ("k", K * H), ("v", K * H)):
                own[f"self_attn.{name}_proj.weight"] = (size, D)
                if c.get("attention_bias") or is_(c, "Qwen2", "GptOss"):
                    own[f"self_attn.{name}_proj.bias"] = (size,)
                if is_(c, "Qwen3", "Qwen3Moe", "Qwen3Next") and name != "v":
                    own[f"self_attn.{name}_norm.weight"] = (H,)
            own["self_attn.o_proj.weight"] = (D, N * H)
            if c.get("attention_bias") or is_(c, "GptOss"):
                own["self_attn.o_proj.bias"] = (D,)
        if is_(c, "GptOss"):
            own |= {"self_attn.sinks": (N,), "mlp.router.weight": (E, D), "mlp.router.bias": (E,),
                    "mlp.experts.gate_up_proj": (E, D, 2 * F), "mlp.experts.gate_up_proj_bias": (E, 2 * F),
                    "mlp.experts.down_proj": (E, F, D), "mlp.experts.down_proj_bias": (E, D)}  # fmt: skip
        elif has_experts(c, i):
            root, names = ("block_sparse_moe", ("w1", "w3", "w2")) if is_(c, "Mixtral", "KimiLinear") else (
                "mlp", ("gate_proj", "up_proj", "down_proj"))  # fmt: skip
            own[f"{root}.gate.weight"] = (E, D)
            M = c.get("moe_intermediate_size", F)
            for e in range(E):
                own |= {
                    f"{root}.experts.{e}.{n}.weight": s for n, s in zip(names, ((M, D), (M, D), (D, M)), strict=True)
                }
            if is_(c, "DeepseekV3", "KimiLinear"):
                S = M * c["num_shared_experts" if is_(c, "KimiLinear") else "n_shared_experts"]
                own[f"{root}.gate.e_score_correction_bias"] = (E,)
                for n, s in (("gate_proj", (S, D)), ("up_proj", (S, D)), ("down_proj", (D, S))):
                    own[f"{root}.shared_experts.{n}.weight"] = s
            if is_(c, "Qwen3Next"):
                S = c["shared_expert_intermediate_size"]
                own |= {
                    f"mlp.shared_expert.{n}.weight": s for n, s in zip(names, ((S, D), (S, D), (D, S)), strict=True)
                }
                own["mlp.shared_expert_gate.weight"] = (1, D)
        else:
            own |= {f"mlp.{n}_proj.weight": s for n, s in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))}
        found |= {f"model.layers.{i}.{k}": s for k, s in own.items()}
    return found


def tensors(c, seed=0):
    """Returns random float32 tensors, of which every part shows."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(c).items():
        scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        at_one = "norm" in name and (not is_(c, "Qwen3Next") or "linear_attn" in name)
        made[name] = (at_one + scale * rng.standard_normal(shape)).astype(np.float32)
    return made


def norm(x, w, c, eps=None):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + (eps or c["rms_norm_eps"])) * (w + is_(c, "Qwen3Next"))


def frequencies(width, c):
    """Returns (angle of each pair a position, factor of cos and sin)."""
    given = c.get("rope_parameters") or c.get("rope_scaling") or {}
    base = given.get("rope_theta") or c.get("rope_theta") or {"Mixtral": 1e6, "GptOss": 150000.0}.get(
        c["architectures"][0].removesuffix("ForCausalLM"), 1e4)  # fmt: skip
    plain = [base ** (-2 * i / width) for i in range(width // 2)]
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return np.array(plain), 1.0
    length, factor = given["original_max_position_embeddings"], given["factor"]
    if kind == "llama3":
        found = []
        for w in plain:
            turns = length * w / (2 * math.pi)
            least, most = given["low_freq_factor"], given["high_freq_factor"]
            smooth = min(max((turns - least) / (most - least), 0), 1)
            found.append((1 - smooth) * w / factor + smooth * w)
        return np.array(found), 1.0

    def pair(turns):
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(given.get("beta_fast", 32)), pair(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = [min(max((i - low) / max(high - low, 0.001), 0), 1) for i in range(width // 2)]
    up = 0.1 * math.log(factor) + 1
    if "mscale" in given:
        up = (0.1 * given["mscale"] * math.log(factor) + 1) / (0.1 * given["mscale_all_dim"] * math.log(factor) + 1)
    return np.array([w / factor * r + w * (1 - r) for w, r in zip(plain, ramp, strict=True)]), up


def turned(x, c, neighbours=False):
    """Rotary embedding of [B, T, heads, width]."""
    w, factor = frequencies(x.shape[-1], c)
    turn = factor * np.exp(1j * np.arange(x.shape[1])[:, None, None] * w)
    half = x.shape[-1] // 2
    one, two = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(half), slice(half, None))
    z, out = (x[..., one] + 1j * x[..., two]) * turn, np.empty_like(x)
    out[..., one], out[..., two] = z.real, z.imag
    return out


def turned_in_part(x, c):
    """Rotary embedding of the first entries of each head."""
    given = c.get("rope_parameters") or {}
    R = int(x.shape[-1] * (given.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1))
    return np.concatenate([turned(x[..., :R], c), x[..., R:]], -1)


def attended(q, k, v, scale, window, sinks):
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        m, first = n // (q.shape[2] // k.shape[2]), 0 if window is None else max(0, t - window + 1)
        weight = np.exp(scale * k[b, first : t + 1, m] @ q[b, t, n])
        out[b, t, n] = weight / (weight.sum() + (0 if sinks is None else np.exp(sinks[n]))) @ v[b, first : t + 1, m]
    return out


def window_of(c, i):
    if is_(c, "GptOss"):
        return c["sliding_window"] if c["layer_types"][i] == "sliding_attention" else None
    if is_(c, "Qwen2"):
        return c["sliding_window"] if c.get("use_sliding_window") and i >= c["max_window_layers"] else None
    return c.get("sliding_window")


def attention(x, w, c, i):
    B, T, D = x.shape
    N, K = c["num_attention_heads"], c["num_key_value_heads"]
    H = c.get("head_dim", D // N)

    def linear(name, heads):
        return (x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0)).reshape(
            B, T, heads, H
        )

    gate = 1.0
    if is_(c, "Qwen3Next"):  # a head's query, then its gate
        both = (x @ w["self_attn.q_proj.weight"].T).reshape(B, T, N, 2 * H)
        q, k, v, gate = both[..., :H], linear("k", K), linear("v", K), sigmoid(both[..., H:])
    else:
        q, k, v = linear("q", N), linear("k", K), linear("v", K)
    if "self_attn.q_norm.weight" in w:
        q, k = norm(q, w["self_attn.q_norm.weight"], c), norm(k, w["self_attn.k_norm.weight"], c)
    q, k = turned_in_part(q, c), turned_in_part(k, c)
    out = attended(q, k, v, H**-0.5, window_of(c, i), w.get("self_attn.sinks")) * gate
    return out.reshape(B, T, -1) @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)


def latent_attention(x, w, c):
    B, T, _ = x.shape
    w = {k.removeprefix("self_attn."): v for k, v in w.items()}
    N, nope, rope, value, rank = c["num_attention_heads"], *(c[k] for k in list(LATENT)[2:]), c["kv_lora_rank"]
    if c["q_lora_rank"]:
        q = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], c) @ w["q_b_proj.weight"].T
    else:
        q = x @ w["q_proj.weight"].T
    q = q.reshape(B, T, N, nope + rope)
    down = x @ w["kv_a_proj_with_mqa.weight"].T
    kimi = is_(c, "KimiLinear")  # whose norm here has an eps of its own, and where nothing turns
    up = norm(down[..., :rank], w["kv_a_layernorm.weight"], c, 1e-6 if kimi else None) @ w["kv_b_proj.weight"].T
    up = up.reshape(B, T, N, nope + value)
    shared = down[..., None, rank:] if kimi else turned(down[..., None, rank:], c, neighbours=True)
    shared = np.repeat(shared, N, axis=2)
    if not kimi:
        q = np.concatenate([q[..., :nope], turned(q[..., nope:], c, neighbours=True)], -1)
    k = np.concatenate([up[..., :nope], shared], -1)
    scale, given = (nope + rope) ** -0.5, c.get("rope_scaling") or {}
    if given.get("mscale_all_dim"):
        scale *= (0.1 * given["mscale_all_dim"] * math.log(given["factor"]) + 1) ** 2
    return attended(q, k, up[..., nope:], scale, None, None).reshape(B, T, -1) @ w["o_proj.weight"].T


def linear_attention(x, w, c):
    """Gated DeltaNet, a token and a head at a time."""
    B, T, _ = x.shape
    w = {k.removeprefix("linear_attn."): v for k, v in w.items()}
    K, N, Q, V = (c[f"linear_{k}"] for k in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    R = N // K
    of_key_heads = (x @ w["in_proj_qkvz.weight"].T).reshape(B, T, K, 2 * Q + 2 * R * V)
    *mixed, z = np.split(of_key_heads, [Q, 2 * Q, 2 * Q + R * V], -1)
    strength, step = np.split((x @ w["in_proj_ba.weight"].T).reshape(B, T, K, 2 * R), 2, -1)
    strength, step = sigmoid(strength.reshape(B, T, N)), step.reshape(B, T, N) + w["dt_bias"]
    decay = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(step)))
    flat, taps = np.concatenate([y.reshape(B, T, -1) for y in mixed], -1), w["conv1d.weight"][:, 0]
    padded = np.pad(flat, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
    flat = silu(sum(taps[:, j] * padded[:, j : j + T] for j in range(taps.shape[1])))
    q, k, v = (
        y.reshape(B, T, heads, -1) for y, heads in zip(np.split(flat, [K * Q, 2 * K * Q], -1), (K, K, N), strict=True)
    )
    q, k = (y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6) for y in (q, k))
    out = np.zeros((B, T, N, V))
    for b, n in np.ndindex(B, N):
        state = np.zeros((Q, V))
        for t in range(T):
            state = decay[b, t, n] * state
            key = k[b, t, n // R]
            state = state + strength[b, t, n] * np.outer(key, v[b, t, n] - key @ state)
            out[b, t, n] = q[b, t, n // R] @ state / np.sqrt(Q)
    out = out / np.sqrt(np.mean(out * out, -1, keepdims=True) + c["rms_norm_eps"]) * w["norm.weight"]
    return (out * silu(z.reshape(B, T, N, V))).reshape(B, T, -1) @ w["out_proj.weight"].T


def kimi_delta_attention(x, w, c):
    """Kimi Delta Attention, a token and a head at a time."""
    B, T, _ = x.shape
    w = {k.removeprefix("self_attn."): v for k, v in w.items()}
    N, H = (c["linear_attn_config"][k] for k in ("num_heads", "head_dim"))

    def convolved(name):
        y, taps = x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"][:, 0]
        padded = np.pad(y, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
        return silu(sum(taps[:, j] * padded[:, j : j + T] for j in range(taps.shape[1]))).reshape(B, T, N, H)

    q, k, v = (convolved(name) for name in "qkv")
    q, k = (y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6) for y in (q, k))
    step = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]
    decay = np.exp(-np.exp(w["A_log"].reshape(N, 1)) * np.log1p(np.exp(step)).reshape(B, T, N, H))
    strength, z = sigmoid(x @ w["b_proj.weight"].T), x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    out = np.zeros((B, T, N, H))
    for b, n in np.ndindex(B, N):
        state = np.zeros((H, H))
        for t in range(T):
            state = decay[b, t, n][:, None] * state
            state = state + strength[b, t, n] * np.outer(k[b, t, n], v[b, t, n] - k[b, t, n] @ state)
            out[b, t, n] = q[b, t, n] @ state / np.sqrt(H)
    out = norm(out, w["o_norm.weight"], c) * sigmoid(z).reshape(B, T, N, H)
    return out.reshape(B, T, -1) @ w["o_proj.weight"].T


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gated(x, w, gate, up, down):
    return (silu(x @ w[f"{gate}.weight"].T) * (x @ w[f"{up}.weight"].T)) @ w[f"{down}.weight"].T


def experts(x, w, c):
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape[:2]):
        out[at] = of_token(x[at], w, c)
    return out


def of_token(x, w, c):
    kimi = is_(c, "KimiLinear")
    top_k, out = c["num_experts_per_token" if kimi else "num_experts_per_tok"], 0.0
    if is_(c, "GptOss"):
        logits = w["mlp.router.weight"] @ x + w["mlp.router.bias"]
        best = np.argsort(-logits)[:top_k]
        for e, weight in zip(best, np.exp(logits[best]) / np.exp(logits[best]).sum(), strict=True):
            both = x @ w["mlp.experts.gate_up_proj"][e] + w["mlp.experts.gate_up_proj_bias"][e]
            gate, up = np.minimum(both[0::2], 7.0), np.clip(both[1::2], -7.0, 7.0)
            inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            out = out + weight * (inner @ w["mlp.experts.down_proj"][e] + w["mlp.experts.down_proj_bias"][e])
        return out
    root = "block_sparse_moe" if kimi or is_(c, "Mixtral") else "mlp"
    names = ("w1", "w3", "w2") if kimi or is_(c, "Mixtral") else ("gate_proj", "up_proj", "down_proj")
    logits = w[f"{root}.gate.weight"] @ x
    if kimi:
        score = sigmoid(logits)
        choice = score + w[f"{root}.gate.e_score_correction_bias"]
    elif is_(c, "DeepseekV3"):
        score = 1 / (1 + np.exp(-logits))
        choice = score + w["mlp.gate.e_score_correction_bias"]
        groups = choice.reshape(c["n_group"], -1)
        worth = np.sort(groups, -1)[:, -2:].sum(-1)
        kept = np.argsort(-worth)[: c["topk_group"]]
        choice = np.where(np.isin(np.arange(E) // groups.shape[1], kept), choice, -np.inf)
    else:
        choice = score = np.exp(logits) / np.exp(logits).sum()
    best = np.argsort(-choice)[:top_k]
    weights = score[best] / (score[best].sum() if c.get("moe_renormalize" if kimi else "norm_topk_prob", True) else 1)
    weights = weights * c.get("routed_scaling_factor", 1.0)
    for e, weight in zip(best, weights, strict=True):
        out = out + weight * gated(x, w, *(f"{root}.experts.{e}.{n}" for n in names))
    if f"{root}.shared_experts.up_proj.weight" in w:
        out = out + gated(x, w, *(f"{root}.shared_experts.{n}_proj" for n in ("gate", "up", "down")))
    if "mlp.shared_expert_gate.weight" in w:
        shared = gated(x, w, *(f"mlp.shared_expert.{n}" for n in names))
        out = out + sigmoid(w["mlp.shared_expert_gate.weight"] @ x) * shared
    return out


def logits(c, state, tokens):
    """Returns [B, T, V]."""
    state = {k: np.asarray(v, np.float64) for k, v in state.items()}
    if published_state_spaces.is_one(c):
        return published_state_spaces.logits(c, state, tokens)
    x = state["model.embed_tokens.weight"][tokens]
    for i in range(L):
        start = f"model.layers.{i}."
        w = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        h = norm(x, w["input_layernorm.weight"], c)
        if is_linear(c, i):
            x = x + linear_attention(h, w, c)
        elif is_kda(c, i):
            x = x + kimi_delta_attention(h, w, c)
        else:
            x = x + (latent_attention(h, w, c) if is_(c, "DeepseekV3", "KimiLinear") else attention(h, w, c, i))
        h = norm(x, w["post_attention_layernorm.weight"], c)
        mlp = (f"mlp.{n}_proj" for n in ("gate", "up", "down"))
        x = x + (experts(h, w, c) if has_experts(c, i) else gated(h, w, *mlp))
    head = state["model.embed_tokens.weight"] if c["tie_word_embeddings"] else state["lm_head.weight"]
    return norm(x, state["model.norm.weight"], c) @ head.T


def loss(c, state, batch):
    """Returns the mean cross entropy of rows of one document each."""
    z, keep = logits(c, state, batch["tokens"]), batch["targets"] >= 0
    at = np.take_along_axis(z, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    return np.mean((np.log(np.sum(np.exp(z), -1)) - at)[keep])
