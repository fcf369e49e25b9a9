"""Programs for CUDA whose Triton kernels have a name, and no code: four fifths of the compiler's time come after the layout of
their blocks. Which kernels there are, and when XLA starts what is around them, does not depend on it. What the code is like is
held in test_code.py, and beside the operations whose kernels it is of."""

import contextlib
import re

import pytest
from jax_triton import triton_lib
from triton.backends.nvidia.compiler import CUDABackend

from kernels.toolchains.simulate.ahead_of_time import export_cuda


@contextlib.contextmanager
def without_code():
    """Triton kernels that are compiled inside have a name, and nothing that runs. None of them is used again outside."""
    caches = {}

    def no_llir(self, ttgir, metadata, *rest):
        metadata |= {"shared": 0, "tmem_size": 0, "name": re.search(r"tt\.func public @(\w+)", str(ttgir))[1]}
        return ""

    def no_ptx(self, llir, metadata, options, capability):
        # XLA has what it is given assembled.
        entry = f".visible .entry {metadata['name']}()\n.reqntid {32 * options.num_warps}\n{{\nret;\n}}\n"
        return f"//\n.version 8.0\n.target sm_{capability}\n.address_size 64\n{entry}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_llir", no_llir)
        patch.setattr(CUDABackend, "make_ptx", no_ptx)
        own = property(lambda self: caches.setdefault(self.fn, {}))
        patch.setattr(triton_lib.TritonFunction, "_kernel_cache", own)
        yield


def names_of_kernels(function, *arguments, compute_capability=90):
    """Returns the names of the Triton kernels in a function's program for CUDA, in their order."""
    with without_code():
        return [
            kernel.name for kernel in export_cuda(function, *arguments, compute_capability=compute_capability).kernels
        ]
