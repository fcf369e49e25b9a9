"""Hopper's kernel of the walks of linear attention with one decay a head: interpreted, against the reference and the kernels in
Triton."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from grid import error, value_and_gradients
from hopper import interpreted
from test_delta_triton import spoiled
from test_delta_walks_hopper import documents_of

from kernels.engines.scan import gluon_delta_calls, gluon_scalar_calls, triton_sums
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.triton_scalar_calls import Tokens
from kernels.framework.interpret import interpret
from kernels.ops.linear_attention import op
from kernels.toolchains.simulate.ahead_of_time import export_cuda
from kernels.toolchains.triton import SHARED_MEMORY, triton_launch

OUTPUTS = ("out", "final_state")
TILES = ChunkConfig(64, None, 128, 8, 3, 1, 1, 8)
FLOATS = ("query", "key", "value")


def drawn(T, N, dtype, ids, decay, states):
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal((1, T, N, 128)) for name in FLOATS}
    g = -np.exp(rng.standard_normal((1, T, N)) - 3)
    arrays = {name: jnp.asarray(x.astype(np.float32)).astype(dtype) for name, x in arrays.items()}
    if decay is not None:
        arrays["g"] = jnp.asarray(np.where(rng.random(g.shape) < 0.1, decay, g).astype(np.float32))
    if states:
        arrays["initial_state"] = jnp.asarray(rng.standard_normal((1, 1, N, 128, 128)).astype(np.float32))
    return arrays | ({} if ids is None else {"segment_ids": jnp.asarray(ids)})


def values_and_gradients(arguments, d, **how):
    outputs, gradients, d = value_and_gradients(functools.partial(op, **how), arguments, d)
    return dict(zip(OUTPUTS, outputs, strict=True)) | gradients, d


@pytest.mark.parametrize(
    ("dtype", "documents", "decay", "states", "splits"),
    [
        ("bfloat16", True, -np.inf, True, 2),
        pytest.param("float16", False, None, False, 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, -20.0, True, 4, marks=pytest.mark.slow),
        pytest.param("float16", True, -100.0, False, 3, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, 0.0, True, 1, marks=pytest.mark.slow),
    ],
)
def test_walks(monkeypatch, dtype, documents, decay, states, splits):
    """Rows that are whole, or of parts, the last of them shorter: more chunks than a ring has tiles, decays of every size or
    none, states in and out, and NaN in padding at both ends and inside. Operands are rounded as in Triton."""
    T = 320
    ids = documents_of(T) if documents else None
    clean = drawn(T, 2, dtype, ids, decay, states)
    wide = {n: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in clean.items()}
    wanted, d = values_and_gradients(wide, None, platform="xla")
    arguments = clean if ids is None else spoiled(clean, ids, *FLOATS)
    if documents:
        d = (jnp.where(jnp.asarray(ids < 0)[..., None, None], jnp.nan, d[0]), *d[1:])
    tiles = replace(TILES, splits=splits)
    with interpreted(monkeypatch, op, gluon_delta_calls):
        one = values_and_gradients(arguments, d, platform="triton", cfg=replace(tiles, hopper_walks=True))[0]
        other = values_and_gradients(arguments, d, platform="triton", cfg=tiles)[0]
    for name in wanted:
        assert error(one[name], wanted[name]) <= min(1.2e-2, 1.05 * error(other[name], wanted[name])), name
        assert error(one[name], other[name]) <= 2e-3, name


@pytest.mark.parametrize(
    ("changed", "there"),
    [
        ({}, True),
        ({"T": 96}, False),
        ({"states": 2}, False),
        ({"capability": 80}, False),
        ({"values": 1}, False),
        ({"channels": (128,)}, False),
        ({"w": True}, False),
    ],
    ids=str,
)
def test_which_calls_it_has(changed, there):
    how = {"T": 128, "states": 1, "capability": 90, "values": 2, "channels": (), "w": False} | changed
    q, v = (jnp.zeros((1, how["T"], heads, 128), "bfloat16") for heads in (2, how["values"]))
    a = jnp.zeros((1, how["T"], 2, *how["channels"]))
    with interpret(how["capability"]):
        tokens = Tokens(q, q, v, a, a if how["w"] else None, None, None, None)
        assert gluon_scalar_calls.fits(tokens, 2, 64, how["states"]) == there


@pytest.mark.parametrize(
    ("sizes", "there", "splits"),
    [
        ((1, 16384, 16, 16), True, 8),
        ((1, 1024, 16, 16), True, 4),
        ((16, 2048, 16, 16), True, 1),
        ((1, 16384, 16, 2), None, 17),
        ((1, 16380, 16, 16), None, 17),
    ],
)
def test_which_calls_it_has_by_default(sizes, there, splits):
    """With at most a program for each multiprocessor, as was timed."""
    B, T, N, K = sizes
    shapes = {n: jax.ShapeDtypeStruct((B, T, h, 128), "bfloat16") for n, h in zip(FLOATS, (N, K, K), strict=True)}
    cfg = op.backends["triton_gpu"].heuristic(op.bind(**shapes, g=jax.ShapeDtypeStruct((B, T, N), "float32")), "cuda")
    assert (cfg.hopper_walks, cfg.splits) == (there, splits)
    first, *others = op.backends["triton_gpu"].candidates(
        op.bind(**shapes, g=jax.ShapeDtypeStruct((B, T, N), "float32"))
    )
    assert first == cfg and others
    assert all(other.hopper_walks is False for other in others), "None would be filled in by the default"


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_walks_fit_a_multiprocessor(documents):
    """No spills but of one register, no product that waits for the one before."""
    case = next(c for c in op.cases if c.name == "head_16k")
    arguments = op.case_inputs(case, dtype="bfloat16", shapes_only=True)
    arguments = {n: x for n, x in arguments.items() if hasattr(x, "dtype")}
    if documents:
        arguments["segment_ids"] = jax.ShapeDtypeStruct(arguments["query"].shape[:2], "int32")

    def step(x):
        out, pull = jax.vjp(lambda x: op(**x, platform="triton"), x)
        return pull(out)

    report = export_cuda(step, arguments).kernels
    assert "scalar_walk_kernel" not in {kernel.name for kernel in report}
    walks = {kernel.ptx: kernel for kernel in report if kernel.name == "scalar_walk_hopper_kernel"}
    assert len(walks) == 5  # maps and outputs, maps and states, both from the end with other wants
    for kernel in walks.values():
        spilled = [kernel.resources[n] for n in ("spill_stores", "spill_loads")]
        assert max(spilled) <= 4 * documents and not kernel.resources["serialized"], kernel.resources
        assert kernel.shared_memory_bytes <= SHARED_MEMORY[90]


def test_sums_of_decays():
    """Differences have the digits of what lies between, however much has decayed before; none crosses a document."""
    rng = np.random.default_rng(0)
    a = np.where(rng.random(64) < 0.2, rng.choice([-1e30, -100.0, -20.0], 64), -np.exp(rng.standard_normal(64) - 6))
    run = np.cumsum(rng.random(64) < 0.1).astype(np.int32)

    @triton.jit
    def kernel(a_ptr, run_ptr, out_ptr):
        t = tl.arange(0, 64)
        tl.store(out_ptr + t, triton_sums.sums_of(tl.load(a_ptr + t), tl.load(run_ptr + t), 0, 64))

    with interpret():
        shape = jax.ShapeDtypeStruct((64,), jnp.int32)
        (sums,) = triton_launch(kernel, a.astype(np.float32), run, out_shape=(shape,), grid=(1,), num_warps=1)
    sums = np.asarray(sums).astype(np.int64)
    apart = (sums[:, None] - sums[None, :]) / 65536
    assert np.abs(apart).max() < 2**15  # their differences are int32, too
    later = np.tril(np.ones((64, 64)), -1)
    between = np.array([[a[s + 1 : t + 1].sum() for s in range(64)] for t in range(64)])
    near = (later > 0) & (run[:, None] == run[None, :]) & (between > -80)
    assert near.sum() > 100 and np.abs(apart - between)[near].max() <= 2e-5
    gone = (later > 0) & ~near
    assert gone.sum() > 100 and (apart[gone] < -79).all() and (apart[(run[:, None] != run) & (later > 0)] <= -119).all()
