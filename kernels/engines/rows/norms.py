"""What rms_norm and layer_norm have in common beside their kernels: their tunables."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.framework.config import Tunables


@dataclass(frozen=True)
class NormConfig(Tunables):
    """Tunables of the kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_rows, num_warps: rows that a program of the forward handles at once, and its warps (Triton).
      backward_block_rows, backward_num_warps: the same for the backward.
      backward_programs: programs of the Triton backward, each with one partial sum of the gradient of each weight.
      backward_num_stages: tiles of rows that such a program has on their way at one time, in shared memory; 1: none ahead.
    """

    block_rows: int | None = None
    num_warps: int | None = None
    backward_block_rows: int | None = None
    backward_num_warps: int | None = None
    backward_programs: int | None = None
    backward_num_stages: int | None = None
