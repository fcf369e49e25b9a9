"""Writes rows into slots of pages on TPUs, in place: the caches are operands of the kernel, which copies rows within main
memory and touches no other slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.framework.work import Work, nbytes
from kernels.toolchains.pallas import pallas_launch

__all__ = ["append"]

# Rows copied at once.
ROWS = 64


def _append_kernel(
    rows: int, slots: Any, key: Any, value: Any, _key: Any, _value: Any, key_cache: Any, value_cache: Any, sem: Any
) -> None:
    """Starts the copies of ROWS rows, and waits for all of them."""
    pages, C = key_cache.shape[:2]
    first = pl.program_id(0) * ROWS

    def each(act: Callable[[Any], None]) -> None:
        def of_row(m: Any, _: Any) -> Any:
            slot = slots[m]

            @pl.when((slot >= 0) & (slot < pages * C))
            def _() -> None:
                for x, cache in ((key, key_cache), (value, value_cache)):
                    act(pltpu.make_async_copy(x.at[m], cache.at[lax.div(slot, C), lax.rem(slot, C)], sem))

            return 0

        lax.fori_loop(first, jnp.minimum(first + ROWS, rows), of_row, 0)

    each(lambda copy: copy.start())
    each(lambda copy: copy.wait())


def append(
    key: jax.Array, value: jax.Array, slots: jax.Array, key_cache: jax.Array, value_cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the caches [pages, C, K, width] with row m of keys and values [M, K, width], of their dtype, in slot slots[m],
    int32 [M]. Rows with a negative slot, or one past the end, are not written; slots must be distinct."""
    M = key.shape[0]
    hbm = pl.BlockSpec(memory_space=pl.ANY)

    def body(*refs: Any) -> None:
        _append_kernel(M, *refs)

    return pallas_launch(
        body,
        slots,
        key,
        value,
        key_cache,
        value_cache,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key_cache, value_cache)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(M, ROWS),),
            in_specs=[hbm] * 4,
            out_specs=(hbm, hbm),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        dimension_semantics=("arbitrary",),
        input_output_aliases={3: 0, 4: 1},
        work=Work(0, 2 * nbytes(key, value)),
        name="append_to_cache_kernel",
    )
