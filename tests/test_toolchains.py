"""The toolchains with no accelerator: Triton's and Pallas' interpreters, export for CUDA, the real TPU compiler."""

import doctest
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax_triton import triton_lib
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

import kernels.toolchains
from kernels.framework.interpret import interpret, interpreting
from kernels.framework.target import in_cuda_graphs
from kernels.ops.rms_norm import NormConfig, rms_norm
from kernels.ops.rms_norm import op as rms_norm_op
from kernels.toolchains.pallas import pallas_launch
from kernels.toolchains.simulate import ahead_of_time as checks
from kernels.toolchains.simulate.compile_for import compile_for, custom_call_target
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

CASES = {case.name: case for case in rms_norm_op.cases}


# -- kernels that use what a kernel may use ---------------------------------------------------------------------------


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _largest(x, axis: tl.constexpr):
    return tl.max(_square(x), axis=axis)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, scale, c_ptr, top_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr
):
    rows, inner, cols = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    b = tl.load(b_ptr + inner[:, None] * N + cols[None, :])
    c = tl.dot(a, b, input_precision="ieee") * scale
    if KIND == "exp":
        c = tl.exp(c)
    for _ in range(2):
        c += 1.0
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], c.to(c_ptr.dtype.element_ty))
    tl.store(top_ptr + rows, _largest(c, axis=1).to(tl.int32))


@triton.jit
def copy_kernel(x_ptr, o_ptr, FROM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    i = FROM + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def scribble_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.load(x_ptr + i))
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts_ptr + tl.load(x_ptr + i), 1)


@gluon.jit
def _load_partition(x_desc, tile, loaded):
    mbarrier.expect(loaded, x_desc.nbytes_per_cta)
    tma.async_load(x_desc, [0, 0], loaded, tile)


@gluon.jit
def _store_partition(tile, loaded, o_ptr, SIZE: gl.constexpr):
    mbarrier.wait(loaded, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = tile.load(layout)
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, layout))
    cols = gl.arange(0, SIZE, gl.SliceLayout(0, layout))
    gl.store(o_ptr + rows[:, None] * SIZE + cols[None, :], x)


@gluon.jit
def warp_specialized_copy_kernel(x_desc, o_ptr, SIZE: gl.constexpr, TILES: gl.constexpr):
    """A warp that loads, and four that store."""
    tile = gl.allocate_shared_memory(x_desc.dtype, [TILES, SIZE, SIZE], x_desc.layout).index(0)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    gl.warp_specialize(
        [(_store_partition, (tile, loaded, o_ptr, SIZE)), (_load_partition, (x_desc, tile, loaded))], [1], [24]
    )


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def copy(x, *, start=0, stop=None, size=None):
    size = x.size if size is None else size
    out = jax.ShapeDtypeStruct((size,), x.dtype)
    stop = x.size if stop is None else stop
    return triton_launch(copy_kernel, x, out_shape=out, grid=(triton.cdiv(stop, 16),), FROM=start, N=stop, BLOCK=16)


def normal(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape).astype(dtype))


# -- launches --------------------------------------------------------------------------------------------------------


def lowered(run, *args):
    with compile_for(90):
        return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_launches_in_cuda_graphs_are_kernels_of_xlas_own():
    """With the pointers of a foreign call: operands, what is written afresh, what Triton adds, and then what is written over an
    operand, which no kernel reads. Outside, and with a scalar, a launch is a foreign call."""
    x, state = normal(16), normal(16)

    def run(x, state):
        how = {"out_shape": (like(x),) * 2, "grid": (3, 2), "num_warps": 2, "input_output_aliases": {1: 1}}
        return triton_launch(two_outputs_kernel, x, state, **how, N=16)

    assert "xla.gpu.ptx" not in lowered(run, x, state)
    with in_cuda_graphs():
        text = lowered(run, x, state)
    (call,) = re.findall(r"custom_call @__gpu\$xla.gpu.ptx\((.*?)\) \{(.*)\} :", text)
    assert call[0].split(", ") == ["%arg0", "%arg1", "%arg0", "%arg0"] and "triton_kernel_call" not in text
    assert (
        "output_indices = [2 : i32, 5 : i32]" in call[1] and "output_tuple_indices = [1], operand_index = 1" in call[1]
    )
    for name, size in {"grid_x": 3, "grid_y": 2, "grid_z": 1, "block_x": 64, "block_y": 1, "block_z": 1}.items():
        assert f"{name} = {size} : i32" in call[1]
    assert 'kernel_type = "ptx"' in call[1] and 'name = "two_outputs_kernel"' in call[1]

    def other(x):
        return copy(x)

    def in_thread(run, *args):  # a context is that of a thread
        with in_cuda_graphs():
            return re.findall(r'name = "(\w+)"', lowered(run, *args))

    with ThreadPoolExecutor(2) as pool:  # threads that lower at once take no kernel of each other
        names = [pool.submit(in_thread, *call) for call in [(run, x, state), (other, x)] * 4]
        assert [name.result() for name in names] == [["two_outputs_kernel"], ["copy_kernel"]] * 4

    def scaled(a, b):
        out = (jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((16,), "int32"))
        return triton_launch(matmul_kernel, a, b, 0.25, out_shape=out, grid=(1,), M=16, K=32, N=16, KIND="exp")

    with in_cuda_graphs():
        assert "xla.gpu.ptx" not in lowered(scaled, normal(16, 32), normal(32, 16))


# -- Triton's interpreter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_kernel_with_helpers_dots_loops_and_scalars_is_interpreted(dtype):
    a, b = normal(16, 32, dtype=dtype), normal(32, 16, dtype=dtype)
    out = (jax.ShapeDtypeStruct((16, 16), dtype), jax.ShapeDtypeStruct((16,), "int32"))

    def run(a, b):
        return triton_launch(matmul_kernel, a, b, 0.25, out_shape=out, grid=(1,), M=16, K=32, N=16, KIND="exp")

    with interpret():
        c, top = jax.jit(run)(a, b)
    wanted = jnp.exp(jnp.matmul(a.astype("float32"), b.astype("float32"), precision="highest") * 0.25) + 2
    np.testing.assert_allclose(
        c.astype("float32"), wanted, rtol={"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}[dtype]
    )
    np.testing.assert_allclose(top, jnp.max(wanted**2, axis=1), atol=1.001)


@pytest.mark.parametrize(("dtype", "K"), [("bfloat16", 8), ("float32", 4), ("int8", 16)])
def test_a_product_too_small_for_a_gpu_is_refused(dtype, K):
    @triton.jit
    def kernel(a_ptr, out_ptr, K: tl.constexpr):
        a = tl.load(a_ptr + tl.arange(0, 16)[:, None] * K + tl.arange(0, K)[None, :])
        tl.store(out_ptr + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], tl.dot(a, tl.trans(a)))

    out = jax.ShapeDtypeStruct((16, 16), "int32" if dtype == "int8" else "float32")

    def run(K):
        with interpret():
            return triton_launch(kernel, jnp.ones((16, K), dtype), out_shape=out, grid=(1,), K=K)

    with pytest.raises(Exception, match=f"K >= {2 * K}"):
        jax.block_until_ready(run(K))
    np.testing.assert_array_equal(run(2 * K), 2 * K)


@triton.jit
def numbers_kernel(x_ptr, i_ptr, zeros_ptr, halves_ptr, sums_ptr, table_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, i = tl.load(x_ptr + at), tl.load(i_ptr + at)
    tl.store(zeros_ptr + at, x * -0.0)
    tl.store(zeros_ptr + N + at, x * 0.0)
    tl.store(halves_ptr + at, i + 0.5)  # a float beside integers makes a float
    tl.store(halves_ptr + N + at, 1 - x)
    tl.store(sums_ptr + at, i - 1)
    tl.store(sums_ptr + N + at, 2147483647 + i)  # wraps around, as integers of 32 bits do
    tl.store(table_ptr + at[:, None] * N + at[None, :], x[:, None] - x[None, :] * i[None, :])


def test_numbers_beside_tensors_have_the_types_and_signs_that_triton_says():
    x, i = jnp.asarray([0.5, -2, 3, 4], "float32"), jnp.asarray([1, 2, 3, 4], "int32")
    shapes = [((2, 4), "float32"), ((2, 4), "float32"), ((2, 4), "int32"), ((4, 4), "float32")]
    outputs = [jax.ShapeDtypeStruct(*how) for how in shapes]
    with interpret():
        zeros, halves, sums, table = triton_launch(numbers_kernel, x, i, out_shape=outputs, grid=(1,), N=4)
    np.testing.assert_array_equal(np.signbit(zeros), [x > 0, x < 0])
    np.testing.assert_array_equal(halves, [i + 0.5, 1 - x])
    np.testing.assert_array_equal(sums, [i - 1, i + np.int32(-(2**31)) - 1])
    np.testing.assert_array_equal(table, x[:, None] - (x * i)[None, :])


def test_interpreted_kernels_live_inside_scan_and_vmap():
    def step(carry, x):
        return carry + copy(x).sum(), copy(x)

    x = normal(3, 20)
    with interpret():
        total, rows = jax.jit(lambda x: jax.lax.scan(step, 0.0, x))(x)
        mapped = jax.jit(jax.vmap(copy))(x)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-5)
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_array_equal(mapped, x)


def test_bfloat16_is_rounded_to_nearest_even():
    x = jnp.asarray([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7 - 2**-12, 1e-40, jnp.inf, -3.4e38, 2**-7 * 1.99, 0.3] * 2)
    with interpret():
        y = triton_launch(
            copy_kernel, x, out_shape=jax.ShapeDtypeStruct((16,), "bfloat16"), grid=(1,), FROM=0, N=16, BLOCK=16
        )
    np.testing.assert_array_equal(y, x.astype("bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_a_kernel_leaves_unwritten_is_nan(dtype):
    x = normal(40, dtype=dtype)
    with interpret():
        y = copy(x, stop=37)
    np.testing.assert_array_equal(jnp.isnan(y), np.arange(40) >= 37)


def test_what_a_kernel_reads_beyond_its_input_is_nan():
    with interpret():
        y = copy(normal(30), stop=40, size=40)
    np.testing.assert_array_equal(jnp.isnan(y), np.arange(40) >= 30)


@pytest.mark.parametrize("start", [-3, 5])
def test_a_write_outside_a_buffer_is_an_error(start):
    with interpret(), pytest.raises(Exception, match="copy_kernel wrote outside the buffer 'o_ptr'"):
        jax.block_until_ready(copy(normal(16), start=start, stop=40))


def test_a_write_to_an_input_is_an_error():
    x = normal(16)
    with interpret(), pytest.raises(Exception, match="scribble_kernel wrote to its input 'x_ptr'"):
        jax.block_until_ready(triton_launch(scribble_kernel, x, out_shape=like(x), grid=(1,), N=16))


def test_an_aliased_output_starts_with_the_values_of_its_input():
    x, counts = jnp.array([1, 1, 3, 0, 1, 2, 3, 3]), jnp.array([10, 0, 0, 0])

    def run(x, counts):
        return triton_launch(
            histogram_kernel, x, counts, out_shape=like(counts), grid=(2,), input_output_aliases={1: 0}, BLOCK=4
        )

    with interpret():
        y = jax.jit(run)(x, counts)
    np.testing.assert_array_equal(y, [11, 3, 1, 3])
    np.testing.assert_array_equal(counts, [10, 0, 0, 0])
    [kernel] = checks.export_cuda(run, x, counts).kernels
    assert "atom" in kernel.ptx or "red" in kernel.ptx


@triton.jit
def two_outputs_kernel(x_ptr, state_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(state_ptr + i))
    tl.store(state_ptr + i, tl.load(x_ptr + i))


@triton.jit
def output_first_kernel(out_ptr, x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


def test_outputs_that_would_take_each_others_buffers_on_a_gpu_are_refused():
    """The interpreter passes buffers by name, and is right either way; jax-triton passes them in order."""
    x, state = normal(16), normal(16)

    def run(alias):
        return triton_launch(
            two_outputs_kernel, x, state, out_shape=(like(x),) * 2, grid=(1,), input_output_aliases={1: alias}, N=16
        )

    with interpret():
        out, after = run(1)
        np.testing.assert_array_equal(out, x + state)
        np.testing.assert_array_equal(after, x)
        with pytest.raises(
            ValueError, match=r"two_outputs_kernel: .* aliases output 0, and output 1 after it has no alias"
        ):
            run(0)
        with pytest.raises(ValueError, match="the array 'x_ptr' is after the output 'out_ptr' among the parameters"):
            triton_launch(output_first_kernel, x_ptr=x, out_shape=like(x), grid=(1,), N=16)


def test_the_interpreter_leaves_the_language_as_it_was():
    def settings():
        owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.condition, triton.JITFunction)
        return {(id(o), k): v for o in owners for k, v in vars(o).items()}

    def ptx():
        return checks.export_cuda(lambda x: copy(x), normal(33)).kernels[0].ptx

    def numbers():
        with interpret():
            np.testing.assert_array_equal(copy(normal(33)), normal(33))

    names = set(globals())
    before = settings()
    numbers()
    assert {k for k, v in settings().items() if before.get(k) is not v} == set()
    first = ptx()
    numbers()
    matmul_kernel._jT_kernel_cache = copy_kernel._jT_kernel_cache = {}  # so that it is compiled again
    assert ptx() == first
    numbers()
    assert set(globals()) == names, "the interpreter's rewriter added names to the kernel's module"


def test_interpretation_ends_with_its_context():
    assert not interpreting()
    with pytest.raises(ZeroDivisionError), interpret():
        assert interpreting()
        _ = 1 / 0
    assert not interpreting()


def test_an_empty_grid_is_refused():
    with pytest.raises(ValueError, match="'grid'"):
        triton_launch(copy_kernel, normal(1), out_shape=like(normal(1)), grid=(0,), FROM=0, N=1, BLOCK=16)


# -- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [pytest.param(t, marks=[pytest.mark.slow] * (t != 90)) for t in checks.CUDA_TARGETS])
def test_each_export_has_code_for_its_own_target(target):
    """One jitted function, exported for one target after the other: no cache hands out the first one's code."""
    function, arguments = checks.call_of(rms_norm_op, CASES["odd"])
    for each in (*checks.CUDA_TARGETS, target):
        report = checks.export_cuda(function, arguments, compute_capability=each)
        assert [k.name for k in report.kernels] == ["norm_fwd_kernel", "norm_bwd_kernel"]
        assert custom_call_target() in report.exported.mlir_module()
        for kernel in report.kernels:
            assert f".target sm_{each}" in kernel.ptx


@pytest.mark.parametrize("kernel", ["launched", "descriptor"])
def test_a_machine_without_a_gpu_is_to_be_told_of_one(kernel, monkeypatch):
    def none_here(device):
        raise RuntimeError("no CUDA device")

    monkeypatch.setattr(triton_lib.triton_kernel_call_lib, "get_compute_capability", none_here)
    run = copy if kernel == "launched" else lambda x: tensor_descriptor(x, (16, 16), (16, 16)) or x
    with pytest.raises(RuntimeError, match=r"no GPU here: .* `with kernels\.compile_for\(90\):`"):
        jax.export.export(jax.jit(run), platforms=["cuda"])(normal(16, 16))
    with kernels.compile_for(80):  # where there are no descriptors
        assert tensor_descriptor(normal(16, 16), (16, 16), (16, 16)) is None


@pytest.mark.parametrize("wrong", [9.0, "sm_90", True, 9, None])
def test_what_is_no_compute_capability_is_refused(wrong):
    with pytest.raises(ValueError, match=f"'compute_capability' = {wrong!r}"), kernels.compile_for(wrong):
        pass


def test_the_example_of_compile_for_runs():
    example = doctest.DocTestParser().get_doctest(kernels.compile_for.__doc__, {}, "compile_for", None, None)
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def test_resources_come_from_the_assembler():
    [kernel] = checks.export_cuda(lambda x: copy(x), normal(64)).kernels
    assert kernel.num_warps == 4 and kernel.shared_memory_bytes == 0
    assert 0 < kernel.resources["registers"] <= 255
    assert kernel.resources["spill_stores"] == kernel.resources["spill_loads"] == 0


def warp_specialized_copy(x, tiles=1):
    block = tuple(x.shape)
    desc = tensor_descriptor(x, block, block, gl.NVMMASharedLayout(128, 16, 2))
    return triton_launch(
        warp_specialized_copy_kernel, desc, out_shape=like(x), grid=(1,), num_warps=4, SIZE=64, TILES=tiles
    )


def test_a_gluon_kernel_is_launched_with_the_warps_of_all_its_partitions():
    (kernel,) = checks.export_cuda(warp_specialized_copy, jax.ShapeDtypeStruct((64, 64), "bfloat16")).kernels
    assert ".reqntid 256" in kernel.ptx, "four warps store, and one, padded to a group of four, loads"
    assert kernel.num_warps == 8
    assert "setmaxnreg" in kernel.ptx and kernel.resources["spill_stores"] == 0


def test_a_block_that_does_not_fit_shared_memory_is_refused():
    with pytest.raises(
        ValueError, match=r"warp_specialized_copy_kernel: needs .* bytes of shared memory, .* have 232,448"
    ):
        checks.export_cuda(lambda x: warp_specialized_copy(x, 29), jax.ShapeDtypeStruct((64, 64), "bfloat16"))


def test_a_gluon_kernel_is_interpreted():
    """Mistakes and all: tests/test_gluon_interpreter.py."""
    x = normal(64, 64, dtype="bfloat16")
    with interpret(90):
        np.testing.assert_array_equal(warp_specialized_copy(x), x)


@pytest.mark.parametrize("target", checks.CUDA_TARGETS)
def test_what_traces_a_kernel_is_told_the_target(target):
    found = []
    checks.export_cuda(lambda x: found.append(compute_capability()) or x, jnp.zeros(1), compute_capability=target)
    assert found == [target]


def test_a_missing_toolchain_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.delitem(sys.modules, "kernels.toolchains.triton")
    monkeypatch.delattr(kernels.toolchains, "triton")
    with pytest.raises(RuntimeError, match=r"jax_triton: pip install 'ejdist\[test\]'"):
        checks.export_cuda(jnp.sin, normal(4))


# -- Pallas and the TPU compiler --------------------------------------------------------------------------------------


def _double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def _forget(x_ref, o_ref):
    @pl.when(pl.program_id(0) < 0)
    def _():
        o_ref[...] = x_ref[...]


def blocks(x, kernel=_double, rows=8, **options):
    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    given = {"dimension_semantics": ("parallel",), "in_specs": [spec], "out_specs": spec, "out_shape": like(x)}
    return pallas_launch(kernel, x, grid=(pl.cdiv(x.shape[0], rows),), **{**given, **options})


def test_a_pallas_kernel_is_interpreted_and_compiled():
    x = normal(20, 128)
    with interpret():
        np.testing.assert_array_equal(jax.jit(blocks)(x), 2 * x)
    for topology in checks.TPU_TOPOLOGIES:
        assert checks.mosaic_calls(checks.compile_tpu(blocks, x, topology=topology)) == 1


def test_what_a_pallas_kernel_leaves_unwritten_is_nan():
    with interpret():
        y = blocks(normal(16, 128), _forget)
    np.testing.assert_array_equal(jnp.isnan(y), True)


def _read_past_the_end(x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(pl.program_id(0) + 4, 8), :]


def test_a_pallas_read_out_of_bounds_is_an_error():
    """The generic interpreter would move the read back inside and say nothing."""
    try:
        with interpret(), pytest.raises(Exception, match=r"(?i)out-of-bounds"):
            jax.block_until_ready(blocks(normal(8, 128), _read_past_the_end))
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_pallas_launch_wants_the_semantics_of_every_dim():
    with pytest.raises(ValueError, match="dimension_semantics"):
        blocks(normal(8, 128), dimension_semantics=())


@pytest.mark.slow  # the TPU compiler, 7 s
def test_a_block_that_does_not_fit_vmem_is_refused_by_the_compiler():
    x = jax.ShapeDtypeStruct((16384, 8192), jnp.bfloat16)

    def run(x, rows):
        return rms_norm(x, platform="pallas", cfg=NormConfig(block_rows=rows))

    assert checks.mosaic_calls(checks.compile_tpu(lambda x: run(x, 32), x)) == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)vmem"):
        checks.compile_tpu(lambda x: run(x, 8192), x)


def test_compile_tpu_shards_over_a_topology():
    devices = np.array(checks.tpu_topology("v5e:2x4").devices)
    mesh = jax.sharding.Mesh(devices, ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    compiled = checks.compile_tpu(jnp.sum, jax.ShapeDtypeStruct((64, 128), "float32", sharding=rows))
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 128 * 4 // 8


def test_an_unknown_topology_is_named(monkeypatch):
    with pytest.raises(ValueError, match="'topology' = 'v5x:9x9'"):
        checks.tpu_topology("v5x:9x9")
    monkeypatch.setattr(checks, "_has_libtpu", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs libtpu: pip install 'ejdist\[tpu\]'"):  # plans are predicted then
        checks.tpu_topology("v5x:8x8")


SIDE_BY_SIDE = """
import os, sys
import jax, jax.numpy as jnp
before = dict(os.environ)
from kernels.toolchains.simulate import ahead_of_time as checks
assert not {"triton", "jax_triton"} & set(sys.modules), "importing the checks imported a toolchain"
compiled = checks.compile_tpu(jnp.sin, jax.ShapeDtypeStruct((8, 128), "float32"), topology="v5p:2x2x1")
assert dict(os.environ) == before, set(os.environ) ^ set(before)
print("compiled", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow  # two processes, 4 s
def test_two_processes_use_the_tpu_compiler_at_the_same_time():
    """Each holds libtpu until told to end. Nothing is left in the environment and nothing is said on stderr."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TPU_")}
    command = [sys.executable, "-c", SIDE_BY_SIDE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
    said = [p.stdout.readline() for p in processes]
    rest = [p.communicate("\n") for p in processes]
    assert said == ["compiled\n"] * 2, rest
    assert [err for _, err in rest] == ["", ""]


# -- all of it at once ------------------------------------------------------------------------------------------------


def test_one_jit_runs_on_the_cpu_and_compiles_for_cuda_and_for_tpu():
    @jax.jit
    def step(x, weight):
        def loss(x, weight):
            return jnp.sum(rms_norm(jnp.sin(x), weight).astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(x, weight)

    x, weight = normal(6, 128, dtype="bfloat16"), normal(128, dtype="bfloat16")
    wanted = jax.grad(lambda x, w: jnp.sum(rms_norm_op.reference(jnp.sin(x), w)[0] ** 2), argnums=(0, 1))(x, weight)
    for actual, exact in zip(step(x, weight), wanted, strict=True):
        np.testing.assert_allclose(actual.astype("float32"), exact.astype("float32"), rtol=0.05, atol=0.05)
    for target in checks.CUDA_TARGETS:
        kernels = checks.export_cuda(step, x, weight, compute_capability=target).kernels
        assert [k.name for k in kernels] == ["norm_fwd_kernel", "norm_bwd_kernel"]
    for topology in checks.TPU_TOPOLOGIES:
        assert checks.mosaic_calls(checks.compile_tpu(step, x, weight, topology=topology)) == 2
    np.testing.assert_array_equal(step(x, weight)[0], step(x, weight)[0])
