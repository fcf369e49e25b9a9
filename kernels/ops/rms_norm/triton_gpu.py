"""rms_norm on GPUs, alone and with the residual."""

from kernels.engines.rows import norms_triton
from kernels.ops.rms_norm.adapters import register

register("triton_gpu", norms_triton)
