"""The Triton kernels of Mamba-1's scan and of RWKV-4's time mix: rows of many chunks, documents, packed states, hazards."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from grid import error, value_and_gradients

import ejdist
import kernels
from ejdist import make_mesh
from kernels.engines.scan import triton_diagonal, triton_diagonal_calls
from kernels.engines.scan.chunks import DiagonalConfig
from kernels.framework.interpret import interpret
from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.recurrent import rwkv4_op
from kernels.ops.state_space import v1_op
from kernels.toolchains.triton import triton_launch

OPS = {op.name: op for op in (v1_op, rwkv4_op)}
# Several chunks, whose tokens end within a load; several blocks of channels, of which the last is not full.
SMALL = DiagonalConfig(
    chunk=8, block_v=4, num_warps=1, splits=3, tokens=2, backward_block_v=4, backward_tokens=4, backward_num_warps=1
)
F, H = 5, 2


def arguments_of(name, B, T, states=1, **more):
    """Returns arguments; `states` is the number of initial states, 0 for none."""
    rng = np.random.default_rng(0)
    if name == "rwkv4":
        x = {"w": rng.standard_normal(F) - 1, "u": rng.standard_normal(F)}
        x |= {n: rng.standard_normal((B, T, F)) for n in "kv"}
        state = [
            rng.standard_normal((B, states, F)),
            rng.uniform(0.5, 2, (B, states, F)),
            rng.standard_normal((B, states, F)),
        ]
        state = np.stack(state, axis=2)
    else:
        x = {"x": rng.standard_normal((B, T, F)), "dt": np.exp(rng.uniform(-4, 0, (B, T, F)))}
        x |= {"A": -rng.uniform(0.05, 1.5, (F, H)), "D": rng.standard_normal(F)}
        x |= {n: rng.standard_normal((B, T, H)) for n in "BC"}
        state = rng.standard_normal((B, states, F, H))
    x |= {"initial_state": state} if states else {}
    return {n: jnp.asarray(np.asarray(y, np.float32)) for n, y in x.items()} | more


def against_the_contract(name, arguments, cfg=SMALL, clean=None, allowed=2e-6):
    """Asserts that outputs and gradients through the interpreter are those of the contract given `clean` arguments."""
    op = OPS[name]
    wanted, gradients, d = value_and_gradients(op.function, clean or arguments)
    with interpret():
        got, found, _ = value_and_gradients(functools.partial(op, platform="triton", cfg=cfg), arguments, d)
    for what, a, b in [*zip(op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert np.isfinite(np.asarray(b)).all(), what
        assert error(a, b) <= allowed, f"{what}: off by {error(a, b):.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("states", [1, 0])
def test_documents_whose_padding_holds_anything(name, states):
    rng = np.random.default_rng(2)
    ids = np.cumsum(rng.random((2, 19)) < 0.2, axis=1).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[0, :3] = ids[0, -4:] = -1
    ids[1, 2:] = np.where(ids[1, 2:] < 0, -1, 7)  # one document over all chunks but the first tokens
    clean = arguments_of(name, 2, 19, states, segment_ids=jnp.asarray(ids))
    dirty = {
        n: jnp.where(jnp.asarray(ids)[..., None] < 0, jnp.nan, clean[n]) for n in ("x", "dt", "k", "v") if n in clean
    }
    against_the_contract(name, clean | dirty, clean=clean)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("T", "cfg"),
    [
        (23, SMALL),
        (16, replace(SMALL, splits=1, chunk=16, tokens=4, backward_tokens=2)),  # a row is one chunk
        (1, SMALL),
        (19, replace(SMALL, splits=20, chunk=2, backward_tokens=2)),  # more chunks than are joined at once
    ],
)
def test_rows(name, T, cfg):
    against_the_contract(name, arguments_of(name, 2, T), cfg)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "state_space_v1")) for n in OPS])
@pytest.mark.parametrize("states", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_packed_sequences(name, states):
    ids = np.asarray([[-1, -1, *[0] * 9, -1, 1, -1, *[3] * 3], [*[3] * 6, 1, *[0] * 7, -1, -1, -1]])  # 2 is empty
    more = {"segment_ids": jnp.asarray(ids, jnp.int32), "num_states": 4}
    against_the_contract(name, arguments_of(name, 2, 17, states, **more))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_several_states_without_ids(name):
    """All tokens continue the first; the others leave as they entered."""
    against_the_contract(name, arguments_of(name, 1, 6, 3, num_states=3))


@pytest.mark.slow
def test_decays_of_every_size():
    """0, which keeps a state, to -inf, which leaves nothing of it; a token that has no step keeps a state whatever A is."""
    arguments = arguments_of("state_space_v1", 1, 13)
    A = jnp.asarray([[-0.0, -20.0], [-100.0, -1e30], [-1e-6, -1.0], [-50.0, -700.0], [-3.0, -1e-3]])
    arguments |= {"A": A, "dt": arguments["dt"].at[0, 3:6].set(0.0).at[0, 7].set(100.0)}
    never = jnp.where(A == -1e30, -jnp.inf, A)
    against_the_contract("state_space_v1", arguments | {"A": never}, clean=arguments)


def test_time_mix_with_exponents_and_decays_of_every_size():
    """Decays of 0 to -1e30 a token; keys that equal what fades, where the gradient of a maximum is halved; and large ones."""
    arguments = arguments_of("rwkv4", 2, 13)
    k = arguments["k"].at[0].set(0.5).at[1].multiply(40.0)
    w = jnp.asarray([-jnp.inf, jnp.log(20.0), jnp.log(100.0), jnp.log(1e30), -14.0])
    clean = arguments | {"k": k, "w": jnp.maximum(w, -100.0)}  # whose own gradient is 0 too
    against_the_contract("rwkv4", clean | {"w": w}, clean=clean, allowed=2e-5)


@pytest.mark.slow  # 400 tokens, interpreted one by one
def test_slow_decays_do_not_drift():
    """In one chunk of 400 tokens: an exponent that is added up token by token is off by 3e-6 at its end."""
    rng, T = np.random.default_rng(2), 400
    arguments = arguments_of("rwkv4", 1, T) | {
        "w": jnp.full(F, -6.0),
        "k": jnp.asarray(rng.normal(0, 2, (1, T, F)), jnp.float32),
    }
    one = replace(SMALL, chunk=512, splits=1, tokens=16, backward_tokens=16, block_v=8, backward_block_v=8)
    wanted, gradients, d = value_and_gradients(functools.partial(rwkv4_op, platform="xla"), arguments)
    with interpret():
        got, found, _ = value_and_gradients(functools.partial(rwkv4_op, platform="triton", cfg=one), arguments, d)
    for what, a, b in [*zip(rwkv4_op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert error(a, b) <= 1.5e-6, f"{what}: off by {error(a, b):.2e}"


def test_a_result_depends_on_a_token_many_chunks_before():
    """Of decays near 1 nothing is dropped: the last output is mostly what one strong token wrote 30 chunks before."""
    T, back = 250, 240
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((1, T, 1)), jnp.float32)
    one = jnp.ones((1, T, 1))
    dt = jnp.full((1, T, 1), 1e-6).at[0, T - 1 - back].set(1.0)
    with interpret():
        out = v1_op(x, dt, -jnp.ones((1, 1)), one, one, platform="triton", cfg=replace(SMALL, splits=30))[0]
    d, y = np.asarray(dt, np.float64)[0, :, 0], np.asarray(x, np.float64)[0, :, 0]
    after = np.cumsum(d[::-1])[::-1] - d
    wanted = np.sum(np.exp(-after) * d * y)
    assert abs(float(out[0, -1, 0]) - wanted) < 1e-5 * abs(wanted)
    assert abs(wanted - y[T - 1 - back]) < 1e-2 * abs(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("documents", [False, True])
def test_with_the_sequence_split(name, documents):
    arguments = arguments_of(name, 1, 16)
    arguments["state"] = arguments.pop("initial_state")[:, 0]
    where = {"segment_ids": np.repeat([[0, 1, 2]], [7, 1, 8], axis=1)} if documents else {}

    def run(module, **more):
        def loss(arguments):
            out, final = getattr(module, name)(**arguments, return_state=True, **where, **more)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)) + jnp.sum(final**2), (out, final)

        return jax.jit(jax.grad(loss, has_aux=True))(arguments)

    with interpret():
        got = run(ejdist, mesh=make_mesh(sp=2, devices=jax.devices()[:2]), platform="triton")
    for a, b in zip(*map(jax.tree.leaves, (got, run(kernels))), strict=True):
        assert error(a, b) < 3e-6


@triton.jit
def _offsets_kernel(o_ptr, F: tl.constexpr, PART: tl.constexpr):
    last = triton_diagonal.offset(tl.program_id(0) + 2**21, F)
    tl.store(o_ptr, (last // PART).to(tl.int32))


def test_offsets_of_long_rows_do_not_overflow():
    channels, part = 8192, 4096
    with interpret():
        out_shape = (jax.ShapeDtypeStruct((1,), jnp.int32),)
        (got,) = triton_launch(_offsets_kernel, out_shape=out_shape, grid=(1,), F=channels, PART=part)
    assert got.tolist() == [2**21 * channels // part]


def test_what_the_kernels_cannot_do_is_refused_by_name():
    arguments = arguments_of("state_space_v1", 1, 3, 0)
    arguments |= {n: jnp.ones((1, 3, 33)) for n in "BC"} | {"A": -jnp.ones((F, 33))}
    with interpret(), pytest.raises(kernels.Unsupported, match="H = 33 exceeds 32"):
        v1_op(**arguments, platform="triton")
    with pytest.raises(ValueError, match=r"DiagonalConfig\.backward_tokens = 6 is not a power of 2"):
        replace(SMALL, backward_tokens=6)


def call_of(op, case):
    """Returns the call of a case, of shapes alone."""
    d = case.dims
    shapes = {"x": "BTF", "dt": "BTF", "A": "FH", "B": "BTH", "C": "BTH", "w": "F", "u": "F", "k": "BTF", "v": "BTF"}
    arrays = {
        n: jax.ShapeDtypeStruct([d[i] for i in shapes[n]], "bfloat16")
        for n in op.parameters
        if n in shapes and n != "D"
    }
    return op.bind(**arrays, **case.options)


def test_candidates_are_tiles_that_a_call_can_have():
    """The default is the first, and has programs for every multiprocessor if the row is long enough; states fit registers."""
    for op in OPS.values():
        for case in op.cases:
            call, backend = call_of(op, case), op.backends["triton_gpu"]
            tried = list(backend.candidates(call))
            assert tried[0] == backend.heuristic(call, "cuda") and len(set(tried)) == len(tried) >= 1
            B, T, F, G = *(call.dims[d] for d in "BTF"), call.num_states
            for cfg in tried:
                tiles = triton_diagonal_calls.forward_tile(cfg, T, G), triton_diagonal_calls.backward_tile(cfg, T, G)
                assert all(tile.size % tile.tokens == 0 and tile.block_f >= 32 for tile in tiles)
                assert all(-(-tile.block_f // 32) * call.dims.get("H", 1) <= 32 for tile in tiles)
            if "bench" in case.tags:
                tile = triton_diagonal_calls.forward_tile(tried[0], T, G)
                programs = B * -(-T // tile.size) * -(-F // tile.block_f)
                assert programs >= 4 * MULTIPROCESSORS and len(tried) >= 6


@pytest.mark.parametrize("name", OPS)
def test_a_short_row_is_one_chunk(name):
    """Whatever it is split into: a chunk has 64 tokens at least."""
    op = OPS[name]
    call = op.bind(**arguments_of(name, 1, 33, 0))
    cfg = op.backends["triton_gpu"].heuristic(call, "cuda")
    assert triton_diagonal_calls.forward_tile(cfg, 33, 1).size == 64
