"""Root mean square normalisation, alone, with the residual stream before it, and with the projection after it."""

from kernels.engines.rows.norms import NormConfig
from kernels.ops.rms_norm.contract import cotangents_op, op
from kernels.ops.rms_norm.functions import rms_norm, rms_norm_cotangents, rms_norm_linear

__all__ = ["NormConfig", "cotangents_op", "op", "rms_norm", "rms_norm_cotangents", "rms_norm_linear"]
