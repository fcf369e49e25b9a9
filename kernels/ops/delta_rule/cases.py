"""Test cases of the delta rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.backend import Case


def _drawn(shape_of, draw):
    """Returns a generator of float32 arrays `draw(rng, shape)`, of which nothing is drawn where only shapes are needed."""

    def make(rng, dims):
        return jnp.asarray(np.asarray(draw(rng, shape_of(dims)), np.float32))

    make.shaped = lambda dims: jax.ShapeDtypeStruct(shape_of(dims), jnp.float32)  # pyrefly: ignore[missing-attribute]
    return make


def _unit(heads: str):
    """Returns a generator of unit vectors, which models use as keys: longer keys make the recurrence diverge."""

    def draw(rng, shape):
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return _drawn(lambda dims: (dims["B"], dims["T"], dims[heads], dims["H"]), draw)


def _up_to(most: float):
    return _drawn(lambda dims: (dims["B"], dims["T"], dims["N"]), lambda rng, shape: most * rng.random(shape))


def _decays(channels: bool):
    """Returns a generator of random log decays; the decays range from e^-20 to 0.9999."""
    return _drawn(
        lambda dims: (dims["B"], dims["T"], dims["N"], dims["H"] if channels else 1),
        lambda rng, shape: -np.exp(rng.uniform(np.log(1e-4), np.log(20), shape)),
    )


def _decays_of_kimi(rng, dims):
    """Returns log decays of channels as Kimi Linear trains them: -5 sigmoid(x), with most near 0."""
    shape = (dims["B"], dims["T"], dims["N"], dims["H"])
    return jnp.asarray(-5 / (1 + np.exp(3 - 2 * rng.standard_normal(shape))), jnp.float32)


def _documents(rng, dims):
    """Segments of many lengths including 1, one that recurs, and padding at the start, in the middle and at the end."""
    ids = np.sort(rng.integers(0, 5, (dims["B"], dims["T"])), axis=1)
    ids[:, rng.random(dims["T"]) < 0.1] = -1
    ids[-1, :3], ids[-1, -3:] = -1, 0
    return jnp.asarray(ids, jnp.int32)


def _packed(num_states: int):
    """Returns a generator of packed sequences, the next-to-last empty, with padding at the end."""

    def make(rng, dims):
        nonempty = [i for i in range(num_states) if i != num_states - 2]
        ids = np.sort(rng.choice(nonempty, (dims["B"], dims["T"])), axis=1)
        ids[:, -4:] = -1
        return jnp.asarray(ids, jnp.int32)

    return make


def _equal(num_states: int):
    """Returns a generator of packed sequences of one length."""
    return lambda rng, dims: jnp.asarray(np.repeat(np.arange(num_states), dims["T"] // num_states)[None], jnp.int32)


def _states(num_states: int):
    return _drawn(
        lambda dims: (dims["B"], num_states, dims["N"], dims["H"], dims["Hv"]),
        lambda rng, shape: rng.standard_normal(shape),
    )


def _delta(name, *tags, g=None, make=(), options=(), beta=1.0, **dims):
    """A case of `delta_rule`; g is None, "head" or "channel"."""
    generators = {"query": _unit("K"), "key": _unit("K"), "beta": _up_to(beta), **dict(make)}
    if g:
        generators.setdefault("g", _decays(g == "channel"))
    optional = tuple(n for n in generators if n in ("g", "segment_ids", "initial_state"))
    wide = ("initial_state",) if "bench" in tags else ()
    return Case(name, dims, dict(options), arrays=optional, make=generators, wide=wide, tags=frozenset(tags))


DELTA = (
    _delta(
        "small",
        "smoke",
        "code",
        "kernels",
        g="head",
        make={"initial_state": _states(1), "segment_ids": _documents},
        B=2, T=13, K=1, N=2, H=8, Hv=4,
    ),
    _delta("plain", beta=2.0, options={"softmax_scale": 1.0}, B=1, T=37, K=2, N=2, H=8, Hv=5),
    _delta("channels", g="channel", options={"use_qk_l2norm": True}, B=1, T=150, K=1, N=2, H=6, Hv=8),
    _delta(
        "packed",
        g="channel",
        make={"segment_ids": _packed(4), "initial_state": _states(4)},
        options={"num_states": 4},
        B=1, T=45, K=2, N=2, H=4, Hv=3,
    ),
    _delta("one_token", "slow", g="channel", make={"initial_state": _states(1)}, B=2, T=1, K=2, N=2, H=8, Hv=4),
    _delta(
        "documents",
        "slow",
        g="channel",
        make={"segment_ids": _documents, "initial_state": _states(1)},
        B=2, T=200, K=1, N=3, H=16, Hv=8,
    ),
    _delta("qwen3_next", "bench", "code", g="head", B=1, T=8192, K=16, N=32, H=128, Hv=128),
    _delta("many_heads_8k", "bench", g="head", B=1, T=8192, K=16, N=64, H=128, Hv=128),
    _delta("few_heads_32k", "bench", g="head", B=1, T=32768, K=2, N=8, H=128, Hv=128),
    _delta(
        "packed_4_of_8k",
        "bench",
        g="head",
        make={"segment_ids": _equal(4), "initial_state": _states(4)},
        options={"num_states": 4},
        B=1, T=32768, K=16, N=32, H=128, Hv=128,
    ),
    _delta("kimi_linear", "bench", "code", g="channel", B=1, T=8192, K=32, N=32, H=128, Hv=128),
    _delta(
        "kimi_linear_as_trained", "bench", g="channel", make={"g": _decays_of_kimi}, B=1, T=8192, K=32, N=32, H=128, Hv=128
    ),
    _delta(
        "decode",
        "bench",
        "code",
        g="head",
        make={"initial_state": _states(1)},
        B=64, T=1, K=16, N=32, H=128, Hv=128,
    ),
    _delta(
        "decode_channels",
        "bench",
        g="channel",
        make={"initial_state": _states(1)},
        B=64, T=1, K=32, N=32, H=128, Hv=128,
    ),
)  # fmt: skip


def _slots(rng, dims):
    """Returns a slot for each token, each slot once; those beyond the pool are padding, as are two negative ones."""
    slots = rng.permutation(max(dims["M"], dims["slots"]))[: dims["M"]].astype(np.int32)
    if dims["M"] < 16:
        slots[1], slots[-1] = -1, dims["slots"] + 5
    return jnp.asarray(slots)


def _begun(rng, dims):
    return jnp.asarray(np.arange(dims["M"]) % 3 != 0)


def _of_token(make):
    """Returns the generator of arrays [B, T, ...] as one of [M, ...]."""
    return lambda rng, dims: make(rng, {**dims, "B": 1, "T": dims["M"]})[0]


def _pool(name, *tags, g=None, make=(), options=(), **dims):
    """A case of `ragged_delta_rule`; g is None, "head" or "channel"."""
    generators = {"query": _unit("K"), "key": _unit("K"), "beta": _up_to(1.0)}
    generators |= {"g": _decays(g == "channel")} if g else {}
    generators = {n: _of_token(f) for n, f in generators.items()} | {"state_indices": _slots, **dict(make)}
    optional = tuple(n for n in generators if n in ("g", "has_initial_state"))
    wide = ("state_pool",) if "bench" in tags else ()
    return Case(name, dims, dict(options), arrays=optional, make=generators, wide=wide, tags=frozenset(tags))


POOL = (
    _pool(
        "small",
        "smoke",
        "code",
        g="head",
        make={"has_initial_state": _begun},
        M=7, K=1, N=2, H=8, Hv=4, slots=9,
    ),
    _pool("channels", g="channel", options={"use_qk_l2norm": True}, M=4, K=2, N=2, H=6, Hv=40, slots=5),
    _pool("plain", "slow", options={"softmax_scale": 1.0}, M=3, K=2, N=2, H=8, Hv=5, slots=4),
    _pool("decode", "bench", "code", g="head", M=64, K=16, N=32, H=128, Hv=128, slots=128),
)  # fmt: skip


def _reads(rng, dims):
    return -_unit("N")(rng, dims)


def _writes(rng, dims):
    # The model sets a = -kk and b = kk * (a rate in (0, 1) per channel); these cases use independent vectors.
    return _unit("N")(rng, dims) * jnp.asarray(rng.random((dims["B"], dims["T"], dims["N"], dims["H"])), jnp.float32)


def _decays_as_trained(rng, dims):
    """Returns log decays as the model has them: -exp(-0.5) sigmoid(x), never below -0.61."""
    shape = (dims["B"], dims["T"], dims["N"], dims["H"])
    return jnp.asarray(-np.exp(-0.5) / (1 + np.exp(-2 * rng.standard_normal(shape))), jnp.float32)


def _rwkv7(name, *tags, make=(), options=(), **dims):
    generators = {"w": _decays(True), "a": _reads, "b": _writes, **dict(make)}
    optional = tuple(n for n in generators if n in ("segment_ids", "initial_state"))
    return Case(name, dims, dict(options), arrays=optional, make=generators, tags=frozenset(tags))


RWKV7 = (
    _rwkv7(
        "small",
        "smoke",
        "code",
        "kernels",
        make={"initial_state": _states(1), "segment_ids": _documents},
        B=2, T=13, N=2, H=8, Hv=4,
    ),
    _rwkv7("odd", options={"softmax_scale": 1.0}, B=1, T=70, N=2, H=6, Hv=8),
    _rwkv7(
        "packed",
        "slow",
        make={"segment_ids": _packed(4), "initial_state": _states(4)},
        options={"num_states": 4},
        B=1, T=45, N=2, H=4, Hv=3,
    ),
    _rwkv7("rwkv7_3b", "bench", "code", B=1, T=8192, N=40, H=64, Hv=64),
    _rwkv7("rwkv7_3b_as_trained", "bench", make={"w": _decays_as_trained}, B=1, T=8192, N=40, H=64, Hv=64),
)  # fmt: skip
