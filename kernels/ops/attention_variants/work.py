"""The minimum that each variant must compute and move."""

from __future__ import annotations

from typing import Any

from kernels.engines.attention.pairs import visible_pairs
from kernels.framework.binding import Call
from kernels.framework.work import Work, nbytes


def _of_pairs(call: Call, pairs: int, width: int, values: int) -> tuple[Work, Work]:
    """Returns the work of softmax attention: 2 matmuls forward, 5 backward; every array once."""
    inputs = nbytes(*(x for x in call.traced().values() if hasattr(x, "shape")))
    out = nbytes(call.query) // call.dims["H"] * call.dims["Hv"]
    return Work(2 * pairs * (width + values), inputs + out), Work(pairs * (6 * width + 4 * values), 2 * inputs + out)


def _sizes(call: Call, names: str) -> tuple[Any, ...]:
    return tuple(call.dims[n] for n in names.split())


def quantized(call: Call) -> tuple[Work, Work]:
    """Returns the work of attention."""
    B, T, S, N, H, Hv = _sizes(call, "B T S N H Hv")
    return _of_pairs(call, visible_pairs(call.mask, B, N, T, S), H, Hv)


def differential(call: Call) -> tuple[Work, Work]:
    """Returns the work of two attentions over the same values."""
    B, T, S, N, H, Hv = _sizes(call, "B T S N H Hv")
    return _of_pairs(call, 2 * visible_pairs(call.mask, B, N, T, S), H, Hv)


def linformer(call: Call) -> tuple[Work, Work]:
    """Returns the work of the projections, and of attention over P keys."""
    B, T, S, N, K, H, Hv, P = _sizes(call, "B T S N K H Hv P")
    forward, backward = _of_pairs(call, B * N * T * P, H, Hv)
    projections = Work(2 * B * S * K * P * (H + Hv), 0)
    return forward + projections, backward + projections + projections


def performer(call: Call) -> tuple[Work, Work]:
    """Returns the work of the features and of their products with values, in the linear form."""
    B, T, S, N, K, H, Hv, P = _sizes(call, "B T S N K H Hv P")
    flops = 2 * B * P * ((T * N + S * K) * H + (T * N + S * K) * Hv)
    forward, backward = _of_pairs(call, 0, H, Hv)
    return forward + Work(flops, 0), backward + Work(3 * flops, 0)


def mixture(call: Call) -> tuple[Work, Work]:
    """Returns the work of the chosen experts' projections, and of their attention."""
    B, T, S, D, H, Hv = _sizes(call, "B T S D H Hv")
    slots = B * T * call.top_k
    pairs = visible_pairs(call.mask, B, call.top_k, T, S)
    inputs = nbytes(call.x, call.key, call.value, call.router_logits, call.w_query, call.w_out)
    forward = Work(2 * slots * D * (H + Hv) + 2 * pairs * (H + Hv), inputs + nbytes(call.x))
    return forward, Work(6 * slots * D * (H + Hv) + pairs * (6 * H + 4 * Hv), 2 * inputs + nbytes(call.x))
