"""State spaces, Mamba's and Mamba-2's, and the causal convolution before them."""

from kernels.ops.state_space.contract import conv_op, v1_op, v2_op
from kernels.ops.state_space.functions import causal_conv1d, state_space_v1, state_space_v2

__all__ = ["causal_conv1d", "conv_op", "state_space_v1", "state_space_v2", "v1_op", "v2_op"]
