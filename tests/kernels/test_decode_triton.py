"""One token of a recurrence in Triton, of rows and of requests with states in a pool: against XLA, and what stays untouched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from test_channel_triton import gla, kda
from test_delta_triton import arguments_of
from test_scan_triton import OPS, against_xla, linear_attention_of

import kernels
from kernels.engines.scan import triton_decode
from kernels.engines.scan.chunks import ChunkConfig
from kernels.framework.interpret import interpret
from kernels.ops.delta_rule import pool_op
from kernels.toolchains.simulate import ahead_of_time as checks

B, N, H, Hv = 3, 2, 10, 20  # odd widths: tiles of 16, of which the last has 4 columns
PADDED = np.array([[0], [-1], [5]], np.int32)


def state(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def delta(rng, channels, **more):
    return (kda if channels else arguments_of)(rng, B, 1, 1, N, H, Hv, **more)


def normalised(made):
    """Returns arguments whose queries and keys are not of norm 1, but are made so by the operation."""
    return made | {"query": 3 * made["query"], "key": made["key"] / 2, "use_qk_l2norm": True}


def mamba(rng, **more):
    x = {"x": rng.standard_normal((B, 1, N, Hv)), "dt": rng.uniform(0.1, 1, (B, 1, N)), "A": -rng.uniform(0.1, 2, N)}
    x |= {n: rng.standard_normal((B, 1, 1, H)) for n in "BC"} | {"D": rng.standard_normal(N)}
    return {n: jnp.asarray(y, jnp.float32) for n, y in x.items()} | more


def rwkv6(rng, **more):
    return gla(rng, B, 1, N, 1, H, Hv, **more) | {"bonus": state(rng, N, H), "g_gamma": -jnp.ones(N)}


def rwkv7(rng, **more):
    x = {n: rng.standard_normal((B, 1, N, H)) / np.sqrt(H) for n in ("r", "k", "a", "b")}
    x |= {"v": rng.standard_normal((B, 1, N, Hv)), "w": -rng.uniform(0.1, 2, (B, 1, N, H))}
    return {n: jnp.asarray(y, jnp.float32) for n, y in x.items()} | more


MADE = {
    "delta_rule": lambda rng, **more: delta(rng, False, **more),
    "delta_rule of channels": lambda rng, **more: normalised(delta(rng, True, decay=-np.inf, **more)),
    "linear_attention": lambda rng, **more: (
        linear_attention_of(rng, B, 1, N, 1, H, Hv, -np.inf, **more) | {"softmax_scale": 0.7}
    ),
    "linear_attention with a bonus": rwkv6,
    "state_space_v2": mamba,
    "rwkv7": rwkv7,
}


def compared(name, made, **cfg):
    """Asserts that the outputs through the interpreter are those of the XLA backend."""
    op = OPS[name.split()[0]]
    wanted = op(**made, platform="xla")
    with interpret():
        got = op(**made, platform="triton", cfg=ChunkConfig(**cfg))
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) <= 3e-6


@pytest.mark.parametrize("name", MADE)
def test_the_first_token(name):
    compared(name, MADE[name](np.random.default_rng(1)))


@pytest.mark.parametrize("name", MADE)
def test_a_token_after_a_state_with_padding(name):
    """Padding hands its state on."""
    rng = np.random.default_rng(0)
    made = MADE[name](rng, initial_state=state(rng, B, 1, N, H, Hv), segment_ids=jnp.asarray(PADDED))
    compared(name, made, block_v=16, num_warps=2)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "delta_rule" else pytest.mark.slow) for n in MADE])
def test_gradients_of_a_token(name):
    """They are those of a chunk, whatever the tiles of the forward."""
    rng = np.random.default_rng(11)
    made = MADE[name](rng, initial_state=state(rng, B, 1, N, H, Hv), segment_ids=jnp.asarray(PADDED))
    against_xla(name.split()[0], made, block_v=8, num_warps=1)


@pytest.mark.parametrize(("channels", "programs"), [(True, 3), pytest.param(False, 4, marks=pytest.mark.slow)])
def test_one_token_is_one_kernel_that_spills_nothing(channels, programs):
    made = (kda if channels else arguments_of)(np.random.default_rng(2), 2, 1, 1, 2, 128, 128)
    run = functools.partial(OPS["delta_rule"], platform="triton")
    [kernel] = checks.export_cuda(lambda a: run(**a), made).kernels
    assert kernel.name == "decode_kernel" and kernel.resources["spill_stores"] == 0
    # Several programs share a multiprocessor, so that many states are on their way: with channels of twice as many columns.
    assert kernel.resources["registers"] * 128 * programs <= 2**16


@pytest.mark.slow
def test_one_token_of_several_states_is_a_chunk():
    rng = np.random.default_rng(10)
    ids, states = jnp.array([[1], [-1], [0]]), state(rng, B, 2, N, H, Hv)
    made = linear_attention_of(rng, B, 1, N, 1, H, Hv, initial_state=states, segment_ids=ids)
    compared("linear_attention", made | {"num_states": 2})


def test_padding_may_hold_anything():
    rng = np.random.default_rng(3)
    before = state(rng, B, 1, N, H, Hv)
    made = delta(rng, False, initial_state=before, segment_ids=jnp.asarray(PADDED))
    for name in ("query", "key", "value", "beta", "g"):
        made[name] = made[name].at[1].set(jnp.nan)
    with interpret():
        out, after = OPS["delta_rule"](**made, platform="triton")
    assert not np.asarray(out[1]).any() and after[1].tobytes() == before[1].tobytes()
    assert np.isfinite(np.asarray(out)).all() and np.isfinite(np.asarray(after)).all()


# -- a pool ------------------------------------------------------------------------------------------------------------

SLOTS = np.array([4, -1, 0, 6, 2, 7], np.int32)  # of a pool of 6: 6 and 7 are past it, which ends after 5
BEGUN = np.array([True, True, False, True, True, True])


def pooled(rng, dtype=jnp.float32, channels=False):
    x = (kda if channels else arguments_of)(rng, 1, len(SLOTS), 1, N, H, Hv)
    x = {n: y[0] for n, y in x.items()}
    pool = state(rng, 6, N, H, Hv, dtype=dtype)
    return x | {"state_pool": pool, "state_indices": jnp.asarray(SLOTS), "has_initial_state": jnp.asarray(BEGUN)}


@pytest.mark.parametrize(
    ("dtype", "channels"), [pytest.param(jnp.float32, False, marks=pytest.mark.slow), (jnp.bfloat16, True)]
)
def test_a_pool_against_xla(dtype, channels):
    """Slots that no token has are returned bit for bit, whatever they hold; what a token that begins finds is not read."""
    rng = np.random.default_rng(4)
    given = pooled(rng, dtype, channels)
    given["state_pool"] = given["state_pool"].at[jnp.array([0, 3])].set(jnp.nan)
    run = functools.partial(pool_op, use_qk_l2norm=True, softmax_scale=0.3)
    wanted_out, wanted = run(**given, platform="xla")
    with interpret():
        out, pool = run(**given, platform="triton", cfg=ChunkConfig(block_v=16, num_warps=1))
    assert pool.dtype == dtype
    assert error(out, wanted_out) <= 3e-6
    used = np.array([4, 0, 2])
    assert np.isfinite(np.asarray(pool[used], np.float32)).all()
    assert error(pool[used], wanted[used]) <= (3e-6 if dtype == jnp.float32 else 2e-3)
    for slot in {*range(6)} - {*used}:
        assert pool[slot].tobytes() == given["state_pool"][slot].tobytes()
    assert not np.asarray(out)[(SLOTS < 0) | (SLOTS >= 6)].any()


def test_gradients_of_a_pool():
    rng = np.random.default_rng(5)
    given = pooled(rng)
    wanted, gradients, d = value_and_gradients(functools.partial(pool_op, platform="xla"), given)
    with interpret():
        got, found, _ = value_and_gradients(functools.partial(pool_op, platform="triton"), given, d)
    for what, a, b in [*zip(pool_op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert error(a, b) <= 3e-6, what


def test_requests_of_one_token_in_a_pool():
    """The public function: requests without tokens, tokens past the last request, and padding, in the pool's own memory."""
    rng = np.random.default_rng(6)
    x = {n: y[0] for n, y in arguments_of(rng, 1, 7, 1, N, H, Hv).items()}
    pool = state(rng, 6, N, H, Hv)
    cuts, slots = jnp.array([0, 1, 1, 2, 3, 4]), jnp.array([5, 2, -1, 0, 9])
    begun = jnp.array([True, True, True, False, True])
    arrays = (x["query"], x["key"], x["value"], x["beta"], x["g"][..., 0], pool)

    def run(*arrays, **options):
        return kernels.ragged_gated_delta_rule(*arrays, cuts, slots, begun, **options)

    wanted_out, wanted = run(*arrays, platform="xla")
    with interpret():
        out, after = run(*arrays, max_query_len=1, platform="triton")
    assert error(out, wanted_out) <= 3e-6 and error(after, wanted) <= 3e-6
    assert not np.asarray(out)[[1, 3, 4, 5, 6]].any()
    for slot in (1, 2, 3, 4):
        assert after[slot].tobytes() == pool[slot].tobytes()
    report = checks.export_cuda(functools.partial(run, max_query_len=1, platform="triton"), *arrays)
    assert [k.name for k in report.kernels] == ["decode_kernel"]
    program = str(report.exported.mlir_module())
    assert "output_tuple_indices = [1]" in program and "output_tuple_indices = [0]" not in program
    # No state is gathered or scattered: the pool has one user, the kernel.
    assert f"{N}x{H}x{Hv}xf32>) -> tensor<5x" not in program


def test_gradients_of_a_token_are_float32_throughout():
    """That of a decay is a difference of products with the state: in bfloat16 it would be noise."""
    op, made = OPS["delta_rule"], delta(np.random.default_rng(10), False)
    arguments = op.bind(**{n: x.astype(jnp.bfloat16) for n, x in made.items() if hasattr(x, "dtype")}).arguments
    static = {n: arguments.pop(n) for n in ("softmax_scale", "use_qk_l2norm", "num_states")}
    saved = {"d_out": jnp.ones_like(arguments["value"]), "d_final_state": None}
    program = str(jax.make_jaxpr(lambda: triton_decode.gradients(op, saved, arguments, **static))())
    products = [p.split(" = ")[0] for p in program.split("dot_general[")[1:]]
    assert products and all("preferred_element_type=float32" in p and "HIGHEST" in p for p in products), products


def test_tiles_of_one_token_are_its_own():
    call = OPS["delta_rule"].bind(**delta(np.random.default_rng(7), False))
    backend = OPS["delta_rule"].backends["triton_gpu"]
    found = backend.candidates(call)
    assert found[0] == backend.heuristic(call, "cuda") and len(set(found)) == len(found) == len(triton_decode.TILES)
    channels = OPS["delta_rule"].bind(**delta(np.random.default_rng(7), True))
    sizes = [backend.heuristic(x, "cuda").block_v for x in (call, channels)]
    assert sizes == [triton_decode.COLUMNS, triton_decode.OF_CHANNELS]
    made = [arguments_of(np.random.default_rng(8), 1, T, 1, 1, 8, 4) for T in (1, 2)]
    keys = [OPS["delta_rule"].autotune_key(OPS["delta_rule"].bind(**x)) for x in made]
    assert keys[0].endswith("tokens<2") and keys[1].endswith("tokens<64")


@pytest.mark.parametrize("block_v", [8, 64])
def test_columns_of_a_tile(block_v):
    rng = np.random.default_rng(9)
    compared("linear_attention", gla(rng, 1, 1, 1, 1, 8, 40, initial_state=state(rng, 1, 1, 1, 8, 40)), block_v=block_v)
