"""The contract of linear attention: the recurrence, one token at a time, and the cases that every backend is tested
with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.engines.scan import recurrence
from kernels.engines.scan.chunks import ChunkConfig
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.measured import bucket, power_of_two
from kernels.framework.work import Work, nbytes


def linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    g: Float[Array, "B T N"] | None = None,
    gk: Float[Array, "B T N H"] | None = None,
    gv: Float[Array, "B T N Hv"] | None = None,
    g_gamma: Float[Array, " N"] | None = None,
    bonus: Float[Array, "N H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G N H Hv"] | None = None,
    *,
    softmax_scale: float | None = None,
    num_states: int = 1,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B G N H Hv"]]:
    """Returns (out, final_state) of S_t = D_t * S_{t-1} + k_t v_tᵀ and o_t = scale · S_tᵀ q_t, with S [H, Hv] for each
    head.

    D_t = exp(a_t) exp(b_t)ᵀ has log decays a_t = g_gamma + g_t + gk_t of the key's channels and b_t = gv_t of the
    value's; those not given are 0. With `bonus` u (RWKV-6) the query reads the state before its own token, and that
    token with weight u: o_t = scale · (S_{t-1} + (u * k_t) v_tᵀ)ᵀ q_t.
    Head n reads key head n // (N / K). Everything is computed in float32; out has the dtype of query, the state is
    float32. For segment_ids, initial_state and num_states see kernels/engines/scan/recurrence.py; states start from 0.

    Args:
      softmax_scale: default 1 / sqrt(H).

    Raises:
      ValueError: N is not a multiple of K.
    """
    N, H, K = *query.shape[2:], key.shape[2]
    if N % K:
        raise ValueError(f"linear_attention: argument 'query' has N = {N} heads, not a multiple of the key's K = {K}")
    scale = H**-0.5 if softmax_scale is None else softmax_scale
    compute_dtype = jnp.promote_types(query.dtype, jnp.float32)
    q = query.astype(compute_dtype) * scale
    k, v = (jnp.repeat(x.astype(compute_dtype), N // K, axis=2) for x in (key, value))
    a, b = jnp.zeros_like(q), jnp.zeros((*q.shape[:3], v.shape[-1]), compute_dtype)
    for part in (g_gamma if g_gamma is None else g_gamma[:, None], g if g is None else g[..., None], gk):
        a = a if part is None else a + part.astype(compute_dtype)
    b = b if gv is None else gv.astype(compute_dtype)

    def step(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, a, b = now
        after = jnp.exp(a)[..., None] * jnp.exp(b)[..., None, :] * state + k[..., None] * v[..., None, :]
        seen = after if bonus is None else state + (bonus.astype(compute_dtype) * k)[..., None] * v[..., None, :]
        return after, jnp.einsum("bnh,bnhv->bnv", q, seen)

    start = jnp.zeros((q.shape[0], N, H, v.shape[-1]), compute_dtype)
    out, final = recurrence.loop(step, (q, k, v, a, b), start, segment_ids, initial_state, num_states)
    return out.astype(query.dtype), final


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions. Per token and head, the forward does two products of the size of a state:
    update and read. The backward recomputes the state, and q, k, v and the state's gradient take one each."""
    d = call.dims
    state = d["H"] * d["Hv"]
    product = 2 * d["B"] * d["T"] * d["N"] * state
    inputs = [x for x in call.traced().values() if x is not None]
    states = 4 * d["B"] * call.num_states * d["N"] * state  # float32
    out = d["B"] * d["T"] * d["N"] * d["Hv"] * np.dtype(call.query.dtype).itemsize
    read = nbytes(*inputs)
    return Work(2 * product, read + out + states), Work(5 * product, 2 * read + out + states)


def autotune_key(call: Call) -> str:
    """Returns the measurement key of a call: what decays, the width of a state, and the number of tokens."""
    channels = any(call.arguments[name] is not None for name in ("gk", "gv", "bonus"))
    kind, width = "channels" if channels else "heads", power_of_two(max(call.dims["H"], call.dims["Hv"]))
    return f"{call.dtype} {kind} width<={width} tokens{bucket(call.dims['T'], 2, 64, 4096, 32768)}"


def _log_decay(*dims: str):
    """Returns a maker of log decays: most are mild, some near 0, some erase nearly everything."""

    def make(rng, sizes):
        x = -np.exp(rng.standard_normal([sizes[d] for d in dims]) * 2 - 2)
        return jnp.asarray(x.astype(np.float32))

    return make


def _documents(rng, dims):
    """Rows of consecutive documents, with padding between and after them."""
    ids = np.sort(rng.integers(0, 4, (dims["B"], dims["T"])), axis=1)
    ids[rng.random(ids.shape) < 0.1] = -1
    ids[:, -3:] = -1
    return jnp.asarray(ids, jnp.int32)


def _packed(rng, dims):
    """Sequences that each start from a state; one is empty, and the end is padding."""
    G, T = dims["G"], dims["T"]
    rows = []
    for _ in range(dims["B"]):
        cuts = np.sort(rng.integers(0, T - 1, G - 1))
        cuts[0] = cuts[1] if G > 2 else cuts[0]
        ids = np.searchsorted(cuts, np.arange(T), side="right")
        ids[-2:] = -1
        rows.append(ids)
    return jnp.asarray(np.stack(rows), jnp.int32)


_MAKE = {
    "g": _log_decay("B", "T", "N"),
    "gk": _log_decay("B", "T", "N", "H"),
    "gv": _log_decay("B", "T", "N", "Hv"),
    "g_gamma": _log_decay("N"),
}


def _case(name: str, arrays: str, *tags: str, ids=None, options=None, **dims: int) -> Case:
    names = tuple(arrays.split())
    make = {n: _MAKE[n] for n in names if n in _MAKE} | ({} if ids is None else {"segment_ids": ids})
    dims = {"G": 1, **dims}
    options = dict(options or {}) | ({"num_states": dims["G"]} if dims["G"] > 1 else {})
    wide = ("initial_state",) if "bench" in tags else ()
    return Case(name, dims, options, names, make, wide=wide, tags=frozenset(tags))


op = Op(
    linear_attention,
    outputs=("out", "final_state"),
    local_dims={"B", "N", "K"},
    tied_dims=(("N", "K"),),
    see_also={"T": "gla_attention"},
    ordered=True,
    weights=("bonus",),

    autotune_key=autotune_key,
    config=ChunkConfig,
    cases=(
        _case("small", "g initial_state", "smoke", "kernels", B=2, T=10, N=2, K=1, H=4, Hv=3),
        _case("documents", "gk initial_state", ids=_documents, B=2, T=67, N=2, K=2, H=5, Hv=3),
        _case("every_decay", "g gk gv g_gamma", ids=_documents, options={"softmax_scale": 0.7}, B=1, T=7, N=2, K=1, H=4, Hv=5),
        _case("rwkv6", "gk bonus initial_state", ids=_documents, B=1, T=13, N=2, K=2, H=4, Hv=4),
        _case("packed", "g_gamma initial_state", "code", "kernels", ids=_packed, B=1, T=140, N=2, K=2, H=3, Hv=4, G=4),
        _case("packed_rwkv6", "gk gv bonus", "slow", ids=_packed, B=2, T=77, N=2, K=1, H=4, Hv=3, G=3),
        _case("no_decay", "initial_state", "slow", B=2, T=130, N=2, K=2, H=8, Hv=8),
        _case("one_token", "gk initial_state", "slow", B=2, T=1, N=4, K=2, H=8, Hv=8),
        _case("gla_8k", "gk", "bench", B=4, T=8192, N=16, K=16, H=128, Hv=128),
        _case("head_16k", "g", "bench", B=1, T=16384, N=16, K=16, H=128, Hv=128),
        _case("lightning_64k", "g_gamma", "bench", "code", B=1, T=65536, N=32, K=32, H=128, Hv=128),
        _case("rwkv6_8k", "gk bonus", "bench", B=4, T=8192, N=32, K=32, H=64, Hv=64),
        _case("decode", "gk initial_state", "bench", "code", B=64, T=1, N=32, K=32, H=128, Hv=128),
        _case("decode_heads", "g_gamma initial_state", "bench", B=64, T=1, N=32, K=32, H=128, Hv=128),
    ),
    work=work,
)  # fmt: skip
