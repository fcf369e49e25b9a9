"""blocksparse_attention's kernels for Hopper, interpreted: their numbers, over the masks and options that they take, and lists
that rows and heads share or have of their own. Programs are three, so that tiles come from the queue."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from hopper import interpreted
from hopper_attention import arrays, at, calls, outcome

from kernels import MaskInfo
from kernels.ops.blocksparse_attention import op, triton_gpu

B, T, N, K = 2, 330, 4, 2
CALLS = calls(B, T, N)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    with interpreted(monkeypatch, op, triton_gpu):
        yield


def blocks(lead, lengths, block_size, density, seed=0):
    """Returns random blocks, of which the second row and the first column are hidden."""
    shape = (*lead, *(-(-n // size) for n, size in zip(lengths, block_size)))
    drawn = np.random.default_rng(seed).random(shape) < density
    drawn[:, :, 1] = drawn[..., 0] = False
    return jnp.asarray(drawn)


def hold(lengths, widths, block_size, lead, mask, options, density=0.6, dtype="bfloat16"):
    floats, options = arrays(B, lengths, (N, K), widths, dtype), dict(options)
    if "softmax_aux" in options:
        floats["softmax_aux"] = jnp.asarray(options.pop("softmax_aux"), jnp.float32)
    options |= {"block_mask": blocks(lead, lengths, block_size, density), "block_size": block_size, "mask": mask}
    cfg = op.backends["triton_gpu"].heuristic(op.bind(**floats, **options), "cuda")
    assert {cfg.fwd_params.num_warps, cfg.bwd_params.num_warps} == {triton_gpu.WARP_SPECIALIZED}
    rng, shape = np.random.default_rng(1), (*floats["query"].shape[:3], widths[1])
    d_out = jnp.asarray(rng.standard_normal(shape).astype(dtype))
    d_lse = jnp.asarray(rng.standard_normal(shape[:3]).astype(np.float32))
    contract = functools.partial(op.function, **options)

    @jax.jit
    def wanted(floats):
        wide = {name: x.astype(jnp.float32) for name, x in floats.items()}
        return outcome(contract, wide, d_out.astype(jnp.float32), d_lse), outcome(contract, floats, d_out, d_lse)

    exact, near = wanted(floats)
    ours = functools.partial(op, platform="triton", **options)
    got = jax.jit(lambda x: outcome(ours, x, d_out, d_lse))(floats)
    for name, want in exact.items():
        assert error(got[name], want) <= 2 * error(near[name], want) + FLOOR[dtype], name


# Lists of each head and of each row; blocks of one warpgroup, of two, and of one on either side.
KINDS = {
    "shared": ((128, 128), (1, 1), (128, 128)),
    "narrow blocks": ((64, 64), (1, N), (64, 64)),
    "tall blocks": ((128, 64), (B, 1), (128, 64)),
    "wide blocks": ((64, 256), (B, N), (64, 64)),
}
QUICK = {
    ("packed", "tall blocks"), ("together", "wide blocks"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        pytest.param(call, kind, marks=() if (call, kind) in QUICK else pytest.mark.slow)
        for call in CALLS
        for kind in KINDS
    ],
)
def test_numbers(call, kind):
    block_size, lead, widths = KINDS[kind]
    hold((T, T), widths, block_size, lead, *CALLS[call])


@pytest.mark.parametrize(
    ("lengths", "widths", "density"),
    [((70, 300), (96, 64), 0.5), pytest.param((300, 130), (128, 128), 0.0, marks=pytest.mark.slow)],
    ids=str,
)
def test_lengths_and_empty_lists(lengths, widths, density):
    hold(lengths, widths, (64, 64), (1, 1), MaskInfo(), {}, density, "float16")


def test_what_is_hidden_is_not_read():
    """NaN in the keys and values of a block that nobody sees reaches nothing."""
    floats = arrays(B, (T, T), (N, K), (64, 64), "bfloat16")
    floats = {n: x if n == "query" else x.at[:, :64].set(jnp.nan) for n, x in floats.items()}
    block_mask = blocks((1, 1), (T, T), (64, 64), 0.5)

    def run(x):
        out, lse = op(**x, block_mask=block_mask, block_size=(64, 64), platform="triton")
        return out.astype("float32").sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

    for name, x in jax.grad(run)(floats).items():
        assert jnp.isfinite(x).all() and (name == "query" or not x[:, :64].any()), name


@pytest.mark.slow  # tests/kernels/test_flash_attention_hopper_numbers.py has the same of its kernels
def test_a_backward_with_lse_and_delta_of_more_keys():
    """What a ring needs: two parts of the keys, each with the whole's lse and delta, add up to the whole's gradients."""
    half, width = 192, 64
    floats = arrays(B, (T, T), (N, K), (width, width), "bfloat16")
    whole, block_mask = at(np.arange(T)[None], causal=True), blocks((1, N), (T, T), (64, 64), 0.6)
    how = {"block_size": (64, 64), "platform": "triton"}
    d_out = jnp.cos(jnp.arange(floats["query"].size)).reshape(floats["query"].shape).astype("bfloat16")
    out, lse = op(**floats, mask=whole, block_mask=block_mask, **how)
    saved = {"d_out": d_out, "lse": lse, "delta": jnp.sum(d_out.astype("float32") * out.astype("float32"), -1)}
    want, parts = op.backward(saved, **floats, mask=whole, block_mask=block_mask, **how), []
    for keys, columns in ((slice(0, half), slice(0, half // 64)), (slice(half, None), slice(half // 64, None))):
        x = {name: v if name == "query" else v[:, keys] for name, v in floats.items()}
        mask = whole.replace(kv_positions=whole.kv_positions[:, keys])
        parts.append(op.backward(saved, **x, mask=mask, block_mask=block_mask[..., columns], **how))
    joined = {name: jnp.concatenate([p[name] for p in parts], 1) for name in ("key", "value")}
    joined["query"] = sum(p["query"].astype("float32") for p in parts)
    for name, x in joined.items():
        assert error(x, want[name].astype("float32")) <= 2 * FLOOR["bfloat16"], name
