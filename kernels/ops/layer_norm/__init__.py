"""Layer normalisation, alone, with the residual stream before it, and with the projection after it."""

from kernels.engines.rows.norms import NormConfig
from kernels.ops.layer_norm.contract import op
from kernels.ops.layer_norm.functions import layer_norm, layer_norm_linear

__all__ = ["NormConfig", "layer_norm", "layer_norm_linear", "op"]
