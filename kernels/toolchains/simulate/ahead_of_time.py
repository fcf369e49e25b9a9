"""Checks accelerator code of any operation on a machine without accelerators.

    export_cuda(*call_of(op, case), compute_capability=90)    compiles its Triton kernels to PTX
    compile_tpu(*call_of(op, case), topology="v5p:2x2x1")     compiles it with the real TPU compiler
    with interpret(): op(..., platform="triton")              runs its kernels on the CPU
    with interpret(90): op(..., platform="triton")            runs those for Hopper, if the call has any

Each takes any function and arguments (arrays, or only their shapes and dtypes), so a whole train step can be checked
too. Importing this imports no toolchain; a function whose toolchain is not installed says what to install.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.binding import floats_apart, is_float_array, is_traced_argument, merged
from kernels.framework.interpret import interpret, interpreting
from kernels.toolchains.simulate.compile_for import compile_for, custom_call_target

if TYPE_CHECKING:
    from kernels.framework.backend import Case
    from kernels.framework.contract import Op

__all__ = [
    "CUDA_TARGETS",
    "TPU_TOPOLOGIES",
    "CudaKernel",
    "CudaReport",
    "call_of",
    "compile_tpu",
    "export_cuda",
    "interpret",
    "interpreting",
    "mosaic_calls",
    "tpu_topology",
]

# Compute capabilities: A100; H100 and H200.
CUDA_TARGETS = (80, 90)
# The smallest slice of each generation whose host has every chip.
TPU_TOPOLOGIES = ("v5e:2x4", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


# -- what to check ----------------------------------------------------------------------------------------------------


def call_of(
    op: Op,
    case: Case,
    *,
    dtype: Any = "bfloat16",
    platform: str | None = None,
    cfg: Any = None,
    backward: bool = True,
) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """Returns (function, its argument): the operation on a case, with its gradients, ready to compile.

    The function takes the arrays of the case by name, and returns all outputs and, with `backward`, the gradient of
    every float array for cotangents of ones. The argument holds shapes and dtypes only.
    """
    arguments = op.case_inputs(case, dtype=dtype, shapes_only=True)
    traced = {k: v for k, v in arguments.items() if is_traced_argument(v)}
    static = {k: v for k, v in arguments.items() if k not in traced}

    def run(traced: dict[str, Any]) -> Any:
        floats, others = floats_apart(traced, op.no_gradient)

        def forward(floats: dict[str, Any]) -> Any:
            return op(**static, **merged(floats, others), platform=platform, cfg=cfg)

        if not backward:
            return forward(floats)
        outputs, pull = jax.vjp(forward, floats)
        return outputs, pull(jax.tree.map(_ones, outputs))[0]

    return run, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced)


def _ones(output: jax.Array) -> Any:
    return jnp.ones_like(output) if is_float_array(output) else np.zeros(output.shape, jax.dtypes.float0)


def _shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    if not hasattr(x, "dtype"):
        x = jnp.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


# -- CUDA -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaKernel:
    """A compiled Triton kernel in a module."""

    name: str
    num_warps: int
    shared_memory_bytes: int
    ptx: str

    @functools.cached_property
    def resources(self) -> dict[str, int]:
        """Registers per thread, bytes of spill_stores and spill_loads, and `serialized`: 1 if wgmma products that
        should overlap are serialised. As reported by the assembler that Triton ships."""
        from triton.backends.nvidia.compiler import get_ptxas

        target = re.search(r"^\.target (sm_(\d+)\w*)", self.ptx, re.M)
        assert target, self.ptx[:200]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(self.ptx)
            command = [get_ptxas(int(target[2])).path, "-v", f"--gpu-name={target[1]}", str(source), "-o", "/dev/null"]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{self.name}: ptxas rejects the code: {run.stderr.strip()}")
        numbers = {}
        for key, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("spill_stores", r"(\d+) bytes spill stores"),
            ("spill_loads", r"(\d+) bytes spill loads"),
        ):
            match = re.search(pattern, run.stderr)
            assert match, run.stderr
            numbers[key] = int(match[1])
        return numbers | {"serialized": int("wgmma.mma_async instructions are serialized" in run.stderr)}


@dataclass(frozen=True)
class CudaReport:
    """The result of an export for CUDA.

    Attributes:
      exported: the `jax.export.Exported`; its `mlir_module()` is the program.
      kernels: its Triton kernels in program order. Empty if XLA does everything.
    """

    exported: Any
    kernels: tuple[CudaKernel, ...]


def export_cuda(fn: Callable, *args: Any, compute_capability: int = 90) -> CudaReport:
    """Returns the function exported for CUDA, with its Triton kernels compiled to PTX. Needs no GPU.

    Raises:
      RuntimeError: the CUDA plugin, Triton or jax-triton is not installed.
    """
    shapes = jax.tree.map(_shape, args)
    with compile_for(compute_capability) as checks:
        exported = jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(*shapes)
    return CudaReport(exported, tuple(_triton_kernels(exported)))


def _triton_kernels(exported: Any) -> Iterator[CudaKernel]:
    """Yields the kernels of a module. Each call stores its kernel in the attribute `opaque`: a compressed (zlib)
    protobuf (jaxlib/gpu/triton.proto). Field 1 of the call is the kernel: 1 name, 2 warps, 3 shared memory, 4 PTX."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    modules: list[bytes] = []
    target = custom_call_target()

    def visit(operation: Any) -> Any:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and target in str(attributes["call_target_name"]):
            modules.append(ir.StringAttr(ir.DictAttr(attributes["mhlo.backend_config"])["opaque"]).value_bytes)
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        ir.Module.parse(exported.mlir_module()).operation.walk(visit)
    for opaque in modules:
        call = _message(zlib.decompress(opaque))
        kernel = _message(_first_message_with(call, b".version"))
        yield CudaKernel(
            name=kernel[1].decode(),
            num_warps=kernel.get(2, 0),
            shared_memory_bytes=kernel.get(3, 0),
            ptx=kernel[4].decode(),
        )


def _message(data: bytes) -> dict[int, Any]:
    """Returns field number -> last value of a protobuf message: an integer or bytes."""
    fields: dict[int, Any] = {}
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = data[offset]
            offset += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while offset < len(data):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            fields[number] = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            fields[number] = data[offset : offset + size]
            offset += size
    return fields


def _first_message_with(fields: dict[int, Any], text: bytes) -> bytes:
    """Returns the innermost message whose own field 4 is the PTX."""
    for value in fields.values():
        if isinstance(value, bytes) and text in value:
            inner = _message(value)
            direct = inner.get(4)
            return (
                value
                if isinstance(direct, bytes) and direct.lstrip().startswith(b"//")
                else _first_message_with(inner, text)
            )
    raise AssertionError("a Triton call without a kernel")


# -- TPU --------------------------------------------------------------------------------------------------------------

_topology_lock = threading.Lock()

# Environment variables that libtpu reads when it is loaded. Away from a TPU it would otherwise query a metadata server
# and wait, print warnings, write logs to /tmp, and lock the machine's TPU, so that a second process (a parallel test)
# fails.
_LIBTPU_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@contextlib.contextmanager
def _libtpu_settings() -> Iterator[None]:
    added = [name for name in _LIBTPU_SETTINGS if name not in os.environ]
    os.environ.update({name: _LIBTPU_SETTINGS[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@functools.cache
def tpu_topology(name: str, slices: int = 1) -> Any:
    """Returns a topology ("v5e:2x4", "v5p:4x4x4") to compile for; build a mesh of its `devices`.

    Args:
      slices: number of such slices, connected by the data-centre network; `slice_index` of a device tells its slice.

    Raises:
      RuntimeError: libtpu is not installed. ValueError: the topology does not exist.
    """
    from jax.experimental import topologies

    several: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name.startswith("v4:"):  # JAX exposes each of its chips as one device
        several["chip_config_name"] = "megacore"
    with _topology_lock, _libtpu_settings():
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=name, **several)
        except Exception as error:
            if not _has_libtpu():
                raise RuntimeError("compiling for TPU needs libtpu: pip install 'ejdist[tpu]'") from None
            raise ValueError(
                f"argument 'topology' = {name!r} is not available ({str(error).splitlines()[0]}); "
                f"use for example {', '.join(TPU_TOPOLOGIES)}"
            ) from error


def _has_libtpu() -> bool:
    import importlib.util

    return importlib.util.find_spec("libtpu") is not None


def compile_tpu(fn: Callable, *args: Any, topology: str = "v5e:2x4", **jit_options: Any) -> Any:
    """Returns the function compiled by the TPU compiler for a topology, as `jax.stages.Compiled`. Needs no TPU.

    Args:
      args: arrays, or `jax.ShapeDtypeStruct`s. Those with a sharding over the topology's devices
        (`tpu_topology(topology).devices`) keep it; if none has one, all are placed on its first device.
      jit_options: passed to `jax.jit` (`out_shardings`, `donate_argnums`).
    """
    devices = tpu_topology(topology).devices
    leaves, tree = jax.tree.flatten(args)
    shardings = [x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None for x in leaves]
    alone = None if any(shardings) else jax.sharding.SingleDeviceSharding(devices[0])
    shapes = jax.tree.unflatten(tree, [_shape(x, s or alone) for x, s in zip(leaves, shardings, strict=True)])
    return jax.jit(lambda *a: fn(*a), **jit_options).trace(*shapes).lower().compile()


def mosaic_calls(compiled: Any) -> int:
    """Returns the number of calls to Pallas kernels in a program compiled for a TPU."""
    return len(re.findall(r'custom_call_target="tpu_custom_call"', compiled.as_text()))
