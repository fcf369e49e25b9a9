"""The work of a launch of the Triton kernels of attention, for costs."""

from __future__ import annotations

from typing import Any

import jax

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.triton_calls import Call
from kernels.framework.work import Work, nbytes


def work_of(query: Any, key: Any, value: Any, mask: MaskInfo, matmuls: tuple[int, int]) -> Work:
    """Returns the work of products over the widths of keys and of values: of all pairs, or of half of them."""
    (B, T, N, H), S, HV = query.shape, key.shape[1], value.shape[3]
    pairs = B * N * T * S // (2 if mask.key_range(T, S).high is not None else 1)
    return Work(2 * pairs * (matmuls[0] * H + matmuls[1] * HV), 2 * nbytes(query, key, value))


def work_of_call(call: Call, dtype: Any, matmuls: tuple[int, int]) -> Work:
    """Returns that of a call, of its heads alone."""
    o = call.options
    rows = (o["T"], o["PART"] or o["N"], o["H"]), (o["S"], o["K"], o["H"]), (o["S"], o["K"], o["HV"])
    query, key, value = (jax.ShapeDtypeStruct((o["B"], *row), dtype) for row in rows)
    return work_of(query, key, value, call.mask, matmuls)
