"""Nemotron-H and Mamba-2 as their files describe them, in NumPy float64: see published_loop.py, which this is a part of."""

import numpy as np

V, D = 24, 12
COMMON = {"vocab_size": V, "hidden_size": D, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "n_groups": 2,
          "conv_kernel": 3, "use_bias": False, "use_conv_bias": True, "chunk_size": 4, "time_step_limit": [0.0, float("inf")],
          "residual_in_fp32": False}  # fmt: skip
NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2,
            "attention_head_dim": 6, "intermediate_size": 10, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
            "mamba_num_heads": 4, "mamba_head_dim": 3, "ssm_state_size": 5}  # fmt: skip
MAMBA2 = {"architectures": ["Mamba2ForCausalLM"], "num_heads": 8, "head_dim": 3, "state_size": 5, "hidden_act": "silu",
          "expand": 2, "num_hidden_layers": 2, "tie_word_embeddings": True}  # fmt: skip
MODELS = {
    "nemotron_h": COMMON | NEMOTRON | {"hybrid_override_pattern": "M-*M-", "num_hidden_layers": 5},
    # As transformers 5 writes it, without a layer of Mamba-2.
    "nemotron_h_names": COMMON
    | NEMOTRON
    | {"layers_block_type": ["mlp", "full_attention", "mlp"], "mlp_hidden_act": "silu"},
    "mamba2": COMMON | MAMBA2,
}
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}


def is_one(c):
    return c["architectures"][0] in ("NemotronHForCausalLM", "Mamba2ForCausalLM")


def letters_of(c):
    if "layers_block_type" in c:
        return "".join(LETTERS[t] for t in c["layers_block_type"])
    return c.get("hybrid_override_pattern") or "M" * c["num_hidden_layers"]


def mamba_sizes(c):
    """Returns (heads, width of one, groups, width of B and of C)."""
    own = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    N, P, S = (c[k] for k in (own if "mamba_num_heads" in c else ("num_heads", "head_dim", "state_size")))
    return N, P, c["n_groups"], S


def shapes(c):
    """Returns name -> shape of every tensor of the files."""
    found = {"backbone.embeddings.weight": (V, D), "backbone.norm_f.weight": (D,)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (V, D)
    N, P, G, S = mamba_sizes(c)
    channels = N * P + 2 * G * S
    mamba = {"in_proj.weight": (N * P + channels + N, D), "conv1d.weight": (channels, 1, c["conv_kernel"]),
             "conv1d.bias": (channels,), "A_log": (N,), "D": (N,), "dt_bias": (N,), "norm.weight": (N * P,),
             "out_proj.weight": (D, N * P)}  # fmt: skip
    for i, letter in enumerate(letters_of(c)):
        own = mamba
        if letter == "-":
            own = {"up_proj.weight": (c["intermediate_size"], D), "down_proj.weight": (D, c["intermediate_size"])}
        if letter == "*":
            N, K, H = c["num_attention_heads"], c["num_key_value_heads"], c["attention_head_dim"]
            own = {
                f"{n}_proj.weight": s
                for n, s in (("q", (N * H, D)), ("k", (K * H, D)), ("v", (K * H, D)), ("o", (D, N * H)))
            }
        found |= {f"backbone.layers.{i}.mixer.{k}": s for k, s in own.items()} | {
            f"backbone.layers.{i}.norm.weight": (D,)
        }
    return found


def norm(x, w, c):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + c["layer_norm_epsilon"]) * w


def silu(x):
    return x / (1 + np.exp(-x))


def mamba(h, w, c):
    """Mamba-2, a token and a head at a time."""
    B, T, _ = h.shape
    N, P, G, S = mamba_sizes(c)
    z, mixed, step = np.split(h @ w["in_proj.weight"].T, [N * P, 2 * N * P + 2 * G * S], -1)
    taps = w["conv1d.weight"][:, 0]
    padded = np.pad(mixed, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
    mixed = silu(sum(taps[:, j] * padded[:, j : j + T] for j in range(taps.shape[1])) + w["conv1d.bias"])
    x, b, o = np.split(mixed, [N * P, N * P + G * S], -1)
    x, b, o = x.reshape(B, T, N, P), b.reshape(B, T, G, S), o.reshape(B, T, G, S)
    dt, y = np.log1p(np.exp(step + w["dt_bias"])), np.zeros((B, T, N, P))
    for r, n in np.ndindex(B, N):
        state, g = np.zeros((P, S)), n // (N // G)
        for t in range(T):
            state = np.exp(-np.exp(w["A_log"][n]) * dt[r, t, n]) * state + dt[r, t, n] * np.outer(
                x[r, t, n], b[r, t, g]
            )
            y[r, t, n] = state @ o[r, t, g] + w["D"][n] * x[r, t, n]
    y = (y.reshape(B, T, N * P) * silu(z)).reshape(B, T, G, -1)  # the gate, then a norm of each group
    return (norm(y, 1.0, c).reshape(B, T, N * P) * w["norm.weight"]) @ w["out_proj.weight"].T


def attention(h, w, c):
    """Causal, and nothing turns."""
    B, T, _ = h.shape
    N, K, H = c["num_attention_heads"], c["num_key_value_heads"], c["attention_head_dim"]
    q, k, v = ((h @ w[f"{n}_proj.weight"].T).reshape(B, T, heads, H) for n, heads in (("q", N), ("k", K), ("v", K)))
    out = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        weight = np.exp(k[b, : t + 1, n // (N // K)] @ q[b, t, n] / np.sqrt(H))
        out[b, t, n] = weight / weight.sum() @ v[b, : t + 1, n // (N // K)]
    return out.reshape(B, T, -1) @ w["o_proj.weight"].T


def mlp(h, w, c):
    wide = h @ w["up_proj.weight"].T
    wide = np.maximum(wide, 0) ** 2 if c["mlp_hidden_act"] == "relu2" else silu(wide)
    return wide @ w["down_proj.weight"].T


def logits(c, state, tokens):
    """Returns [B, T, V] of float64 tensors."""
    x = state["backbone.embeddings.weight"][tokens]
    for i, letter in enumerate(letters_of(c)):
        start = f"backbone.layers.{i}."
        w = {k.removeprefix(f"{start}mixer."): v for k, v in state.items() if k.startswith(f"{start}mixer.")}
        x = x + {"M": mamba, "*": attention, "-": mlp}[letter](norm(x, state[f"{start}norm.weight"], c), w, c)
    head = state["backbone.embeddings.weight"] if c["tie_word_embeddings"] else state["lm_head.weight"]
    return norm(x, state["backbone.norm_f.weight"], c) @ head.T
