"""Launches Pallas kernels on TPUs (Mosaic): compiled, or interpreted on the CPU, by the same call.

Interpreted means Pallas' TPU interpreter, not its generic one: it simulates VMEM and HBM, DMAs and semaphores, fills
memory that nobody wrote with NaN, raises on reads out of bounds, and visits dims declared parallel in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels._core.interpret import interpreting
from kernels._core.work import Work

__all__ = ["pallas_launch"]


def pallas_launch(
    kernel: Callable,
    *args: jax.Array,
    out_shape: Any,
    dimension_semantics: Sequence[Literal["parallel", "arbitrary"]],
    grid: tuple[int, ...] | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    scratch_shapes: Any = (),
    grid_spec: Any = None,
    vmem_limit_bytes: int | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    work: Work | None = None,
    name: str | None = None,
) -> Any:
    """Returns the outputs of a Pallas TPU kernel, as the pytree `out_shape`.

    Args:
      dimension_semantics: "parallel" or "arbitrary" for each dim of the grid. A parallel dim may run in any order and
        on several cores, so nothing may be carried along it.
      grid, in_specs, out_specs, scratch_shapes: as `pallas_call`; or one `grid_spec` (scalar prefetch) instead.
      work: what the launch costs, for XLA's scheduler.
      vmem_limit_bytes: how much VMEM the kernel may take; None is the compiler's default, 16 MiB or more by chip.
    """
    if grid_spec is None:
        grid_spec = pl.GridSpec(grid=grid or (), in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch_shapes)
    elif grid is not None or in_specs is not None or out_specs is not None or scratch_shapes:
        raise ValueError("pallas_launch: give 'grid_spec', or 'grid', 'in_specs', 'out_specs' and 'scratch_shapes'")
    if len(dimension_semantics) != len(grid_spec.grid):
        raise ValueError(
            f"pallas_launch: argument 'dimension_semantics' has {len(dimension_semantics)} entries for a grid of "
            f"{len(grid_spec.grid)} dims; say one for each"
        )
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=grid_spec,
        input_output_aliases=dict(input_output_aliases or {}),
        cost_estimate=(
            None
            if work is None
            else pl.CostEstimate(flops=int(work.flops), transcendentals=0, bytes_accessed=int(work.bytes))
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple(dimension_semantics), vmem_limit_bytes=vmem_limit_bytes
        ),
        interpret=pltpu.InterpretParams() if interpreting() else False,
        name=name,
    )(*args)
