"""Launches Pallas kernels on TPUs (Mosaic): compiled, or interpreted on the CPU, by the same call.

The interpreter is Pallas' TPU interpreter, not its generic one: it simulates VMEM and HBM, DMAs and semaphores, fills
uninitialised memory with NaN, raises on reads out of bounds, and visits parallel dims in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.framework.interpret import interpreting
from kernels.framework.work import Work

__all__ = ["launch_on_rows", "pallas_launch"]


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
    check_bounds: bool = True,
) -> Any:
    """Returns the outputs of a Pallas TPU kernel, as the pytree `out_shape`.

    Args:
      dimension_semantics: "parallel" or "arbitrary" for each dim of the grid. A parallel dim may run in any order and
        on several cores, so nothing may be carried along it.
      grid, in_specs, out_specs, scratch_shapes: as in `pallas_call`; or one `grid_spec` (scalar prefetch) instead.
      work: cost of the launch, for XLA's scheduler.
      vmem_limit_bytes: VMEM that the kernel may use; None is the compiler's default, 16 MiB or more depending on the
        chip.
      check_bounds: whether the compiled kernel checks the bounds of every access, which costs scalar instructions; the
        interpreter always does.
    """
    if grid_spec is None:
        grid_spec = pl.GridSpec(grid=grid or (), in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch_shapes)
    elif grid is not None or in_specs is not None or out_specs is not None or scratch_shapes:
        raise ValueError(
            "pallas_launch: pass either 'grid_spec' or 'grid', 'in_specs', 'out_specs' and 'scratch_shapes'"
        )
    if len(dimension_semantics) != len(grid_spec.grid):
        raise ValueError(
            f"pallas_launch: argument 'dimension_semantics' has {len(dimension_semantics)} entries for a grid of "
            f"{len(grid_spec.grid)} dims; pass one for each"
        )
    # Kernels and index maps use 32 bits, even if the caller enabled 64.
    with jax.enable_x64(False):
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
                dimension_semantics=tuple(dimension_semantics),
                vmem_limit_bytes=vmem_limit_bytes,
                disable_bounds_checks=not check_bounds,
            ),
            interpret=pltpu.InterpretParams() if interpreting() else False,
            name=name,
        )(*args)


def launch_on_rows(
    kernel: Callable,
    block_rows: int,
    rows: Mapping[str, jax.Array | None],
    features: Mapping[str, jax.Array | None],
    out_rows: Mapping[str, jax.ShapeDtypeStruct],
    out_features: Sequence[str] = (),
    work: Work | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Runs `kernel(refs, out_refs, **options)` over blocks of rows and returns its outputs by name. The kernel receives
    dicts of references by name; arrays that are None are left out.

    Args:
      rows, out_rows: arrays [M, width], in blocks of `block_rows` rows; the last may extend past M.
      features: arrays [D], which every block receives as [1, D].
      out_features: float32 sums over all rows, [D]: each block writes its partial sum as [1, 1, D], and they are summed
        here.
    """
    tall_given = {name: x for name, x in rows.items() if x is not None}
    flat_given = {name: x.reshape(1, -1) for name, x in features.items() if x is not None}
    M, D = next(iter(tall_given.values())).shape
    height = M if M <= block_rows else block_rows  # a full-height block need not be a multiple of the tile
    num_blocks = pl.cdiv(M, height)

    def tall(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((height, x.shape[1]), lambda i: (i, 0))

    # With a middle dim, the block of a partial sum equals the array in the last two dims, as TPUs require.
    partial = jax.ShapeDtypeStruct((num_blocks, 1, D), jnp.float32)
    names, outputs = [*tall_given, *flat_given], {**out_rows, **dict.fromkeys(out_features, partial)}

    def run(*refs: Any) -> None:
        kernel(dict(zip(names, refs)), dict(zip(outputs, refs[len(names) :], strict=True)), **options)

    out = pallas_launch(
        run,
        *tall_given.values(),
        *flat_given.values(),
        out_shape=tuple(outputs.values()),
        grid=(num_blocks,),
        in_specs=[*map(tall, tall_given.values()), *(pl.BlockSpec((1, D), lambda i: (0, 0)) for _ in flat_given)],
        out_specs=(
            *map(tall, out_rows.values()),
            *(pl.BlockSpec((1, 1, D), lambda i: (i, 0, 0)) for _ in out_features),
        ),
        dimension_semantics=("parallel",),
        work=work,
        name=kernel.__name__,
    )
    results = dict(zip(outputs, out, strict=True))
    return {name: jnp.sum(x, axis=(0, 1)) if name in out_features else x for name, x in results.items()}
