"""The recurrent mixers of a decoder in NumPy float64, a token, a head and a state at a time; without JAX and without the loops
that operations are held against. What they are: Qwen3-Next's Gated DeltaNet, Kimi Linear's Kimi Delta Attention, Mamba-2,
MiniMax-01's lightning attention, gated linear attention and RWKV-7 as flash-linear-attention has them."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def norm(x, w, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def documents(ids):
    """Yields (row, its tokens of one document), a run of equal ids that are not negative."""
    for b, row in enumerate(ids):
        begin = 0
        for t in range(1, len(row) + 1):
            if t == len(row) or row[t] != row[begin]:
                if row[begin] >= 0:
                    yield b, slice(begin, t)
                begin = t


def convolved(x, taps, bias=0.0):
    """Returns SiLU of the causal convolution of x [T, channels...], of one document, with taps [channels..., W]."""
    W, out = taps.shape[-1], np.zeros_like(x)
    for t in range(len(x)):
        for j in range(W):
            if t - j >= 0:
                out[t] += taps[..., W - 1 - j] * x[t - j]
    return silu(out + bias)


def gated_delta(x, w, batch, c, layer=0):
    m, out = c.gated_delta, np.array(x)
    per = m.num_value_heads // m.num_key_heads
    for b, at in documents(batch["segment_ids"]):
        h = norm(x[b, at], w["gated_delta_norm"] + c.zero_centered_norms, c.norm_eps)
        mixed = convolved(np.einsum("td,dkh->tkh", h, w["gated_delta_in"]), w["gated_delta_taps"])
        rates = np.einsum("td,dnr->tnr", h, w["gated_delta_rates"])
        z = np.einsum("td,dnh->tnh", h, w["gated_delta_gate"])
        result = np.zeros_like(z)
        for n in range(m.num_value_heads):
            S = np.zeros((m.key_dim, m.value_dim))
            for t, row in enumerate(mixed[:, n // per]):
                q, k = row[: m.key_dim], row[m.key_dim : 2 * m.key_dim]
                v = row[2 * m.key_dim :].reshape(per, m.value_dim)[n % per]
                q, k = (y / np.sqrt(y @ y + 1e-6) for y in (q, k))
                S = S * np.exp(
                    -np.exp(w["gated_delta_a_log"][n]) * softplus(rates[t, n, 1] + w["gated_delta_dt_bias"][n])
                )
                S = S + sigmoid(rates[t, n, 0]) * np.outer(k, v - k @ S)
                result[t, n] = q @ S / np.sqrt(m.key_dim)
        result = norm(result, w["gated_delta_out_norm"], c.norm_eps) * silu(z)
        out[b, at] += np.einsum("tnh,nhd->td", result, w["gated_delta_output"])
    return out


def kda(x, w, batch, c, layer=0):
    m, out = c.kda, np.array(x)
    for b, at in documents(batch["segment_ids"]):
        h = norm(x[b, at], w["kda_norm"] + c.zero_centered_norms, c.norm_eps)
        mixed = convolved(np.einsum("td,dnh->tnh", h, w["kda_in"]), w["kda_taps"])
        down = h @ w["kda_down"]
        f = np.einsum("tr,rnh->tnh", down[:, : m.rank], w["kda_decay"])
        z = np.einsum("tr,rnh->tnh", down[:, m.rank :], w["kda_gate"]) + w.get("kda_gate_bias", 0.0)
        beta = sigmoid(h @ w["kda_beta"])
        result = np.zeros_like(z)
        for n in range(m.num_heads):
            S = np.zeros((m.key_dim, m.value_dim))
            for t, row in enumerate(mixed[:, n]):
                q, k, v = row[: m.key_dim], row[m.key_dim : 2 * m.key_dim], row[2 * m.key_dim :]
                q, k = (y / np.sqrt(y @ y + 1e-6) for y in (q, k))
                for i in range(m.key_dim):  # each channel of a key forgets at a rate of its own
                    S[i] *= np.exp(-np.exp(w["kda_a_log"][n]) * softplus(f[t, n, i] + w["kda_dt_bias"][n, i]))
                S = S + beta[t, n] * np.outer(k, v - k @ S)
                result[t, n] = q @ S / np.sqrt(m.key_dim)
        result = norm(result, w["kda_out_norm"], c.norm_eps) * sigmoid(z)
        out[b, at] += np.einsum("tnh,nhd->td", result, w["kda_output"])
    return out


def mamba2(x, w, batch, c, layer=0):
    m, out = c.mamba2, np.array(x)
    per = m.num_heads // m.num_groups
    for b, at in documents(batch["segment_ids"]):
        h = norm(x[b, at], w["mamba2_norm"] + c.zero_centered_norms, c.norm_eps)
        wide = per * m.head_dim  # of a group's channels x, before its B and C
        taps, bias = w["mamba2_taps"], w["mamba2_taps_bias"]
        values = np.einsum("td,dnp->tnp", h, w["mamba2_in"]).reshape(len(h), m.num_groups, wide)
        values = convolved(values, taps[:, :wide], bias[:, :wide]).reshape(len(h), m.num_heads, m.head_dim)
        bc = convolved(np.einsum("td,dks->tks", h, w["mamba2_bc"]), taps[:, wide:], bias[:, wide:])
        dt = softplus(h @ w["mamba2_dt"] + w["mamba2_dt_bias"])
        z = np.einsum("td,dnp->tnp", h, w["mamba2_gate"])
        y = np.zeros_like(z)
        for n in range(m.num_heads):
            S = np.zeros((m.head_dim, m.state_dim))
            for t in range(len(h)):
                B, C = bc[t, n // per, : m.state_dim], bc[t, n // per, m.state_dim :]
                S = np.exp(-dt[t, n] * np.exp(w["mamba2_a_log"][n])) * S + dt[t, n] * np.outer(values[t, n], B)
                y[t, n] = S @ C + w["mamba2_skip"][n] * values[t, n]
        y = (y * silu(z)).reshape(len(h), m.num_groups, -1)
        y = norm(y, 1.0, c.norm_eps).reshape(z.shape) * w["mamba2_out_norm"]
        out[b, at] += np.einsum("tnp,npd->td", y, w["mamba2_output"])
    return out


def lightning(x, w, batch, c, layer=0):
    N, H, out = c.lightning.num_heads, c.lightning.head_dim, np.array(x)
    for b, at in documents(batch["segment_ids"]):
        h = norm(x[b, at], w["lightning_norm"] + c.zero_centered_norms, c.norm_eps)
        mixed = silu(np.einsum("td,dnh->tnh", h, w["lightning_in"]))
        z = np.einsum("td,dnh->tnh", h, w["lightning_gate"])
        result = np.zeros_like(z)
        for n in range(N):
            slope = (2 ** (-8 / N)) ** (n + 1) * (1 - layer / (c.num_layers - 1 + 1e-5) + 1e-5)
            S = np.zeros((H, H))
            for t in range(len(h)):
                q, k, v = mixed[t, n].reshape(3, H)
                S = np.exp(-slope) * S + np.outer(k, v)
                result[t, n] = q @ S
        flat = norm(result.reshape(len(h), -1), w["lightning_out_norm"].reshape(-1), c.norm_eps)
        out[b, at] += np.einsum("tnh,nhd->td", flat.reshape(z.shape) * sigmoid(z), w["lightning_output"])
    return out


def gla(x, w, batch, c, layer=0):
    m, out = c.gla, np.array(x)
    H = m.key_dim
    for b, at in documents(batch["segment_ids"]):
        h = norm(x[b, at], w["gla_norm"] + c.zero_centered_norms, c.norm_eps)
        mixed = np.einsum("td,dnh->tnh", h, w["gla_in"])
        f = np.einsum("tr,rnh->tnh", h @ w["gla_down"], w["gla_decay"]) + w["gla_decay_bias"]
        z = np.einsum("td,dnh->tnh", h, w["gla_gate"])
        result = np.zeros_like(z)
        for n in range(m.num_heads):
            S = np.zeros((H, m.value_dim))
            for t, row in enumerate(mixed[:, n]):
                q, k, v = row[:H], row[H : 2 * H], row[2 * H :]
                for i in range(H):
                    S[i] = S[i] * sigmoid(f[t, n, i]) ** (1 / m.normalizer) + k[i] * v
                result[t, n] = q @ S / np.sqrt(H)
        result = norm(result, w["gla_out_norm"], c.norm_eps) * silu(z)
        out[b, at] += np.einsum("tnh,nhd->td", result, w["gla_output"])
    return out


def rwkv7(x, w, batch, c, layer=0):
    """By the paper's equations, its state values by keys: the transpose of what the operation has."""
    N, H, out = c.rwkv7.num_heads, c.rwkv7.head_dim, np.array(x)
    for b, at in documents(batch["segment_ids"]):
        h = norm(x[b, at], w["rwkv7_norm"] + c.zero_centered_norms, c.norm_eps)
        S, before = np.zeros((N, H, H)), np.zeros(c.model_dim)
        for t, now in enumerate(h):
            x_r, x_w, x_k, x_v, x_a, x_z = now + (before - now) * w["rwkv7_mix"]
            r = np.einsum("d,dnh->nh", x_r, w["rwkv7_receptance"])
            k = np.einsum("d,dnh->nh", x_k, w["rwkv7_key"])
            v = np.einsum("d,dnh->nh", x_v, w["rwkv7_value"])
            lift = {n: w[f"rwkv7_{n}_up"] for n in ("decay", "rate", "gate")}
            d = w["rwkv7_decay_bias"] + np.einsum("r,rnh->nh", np.tanh(x_w @ w["rwkv7_decay_down"]), lift["decay"])
            decay = np.exp(-np.exp(-0.5) * sigmoid(d))
            rate = sigmoid(w["rwkv7_rate_bias"] + np.einsum("r,rnh->nh", x_a @ w["rwkv7_rate_down"], lift["rate"]))
            gate = np.einsum("r,rnh->nh", sigmoid(x_z @ w["rwkv7_gate_down"]), lift["gate"])
            unit = k * w["rwkv7_key_scale"]
            unit = unit / np.sqrt(np.sum(unit * unit, -1, keepdims=True) + 1e-6)
            k = k * (1 - w["rwkv7_key_rate"] + rate * w["rwkv7_key_rate"])
            result = np.zeros((N, H))
            for n in range(N):
                moves = np.diag(decay[n]) - np.outer(unit[n], rate[n] * unit[n])
                S[n] = S[n] @ moves + np.outer(v[n], k[n])
                y = S[n] @ r[n]
                y = (y - y.mean()) / np.sqrt(y.var() + H * c.norm_eps) * w["rwkv7_out_norm"][n] + w["rwkv7_out_bias"][n]
                result[n] = (y + np.sum(r[n] * w["rwkv7_bonus"][n] * k[n]) * v[n]) * gate[n]
            out[b, at.start + t] += np.einsum("nh,nhd->d", result, w["rwkv7_output"])
            before = now
    return out


LAYERS = {
    "gated_delta": gated_delta, "kda": kda, "mamba2": mamba2, "lightning": lightning, "gla": gla, "rwkv7": rwkv7,
}  # fmt: skip
