"""Where the kernels of `triton_gpu` look for what `kernels.engines.matmul.formats` has."""

from kernels.engines.matmul.formats import NF4, RUN

__all__ = ["NF4", "RUN"]
