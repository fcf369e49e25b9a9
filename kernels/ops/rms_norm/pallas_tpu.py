"""rms_norm on TPUs, alone and with the residual."""

from kernels.engines.rows import norms_pallas
from kernels.ops.rms_norm.adapters import register

register("pallas_tpu", norms_pallas)
