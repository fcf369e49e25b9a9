"""layer_norm on GPUs, alone and with the residual."""

from kernels.engines.rows import norms_triton
from kernels.ops.layer_norm.adapters import register

register("triton_gpu", norms_triton)
