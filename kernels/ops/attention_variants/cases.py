"""Shapes and options that test the attention variants."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.backend import Case

SMALL = {"B": 2, "T": 13, "S": 13, "N": 4, "K": 2, "H": 8, "Hv": 6}
SMOKE, BENCH = frozenset({"smoke"}), frozenset({"bench"})


def _causal(rng, dims):
    return MaskInfo(causal=True)


def _packed(rng, dims):
    ids = np.searchsorted([5, 6, 11], np.arange(dims["T"]), side="right")
    return MaskInfo.from_segments(jnp.asarray(np.where(ids == 3, -1, ids)[None], jnp.int32), causal=True)


def _some(rng, dims):
    """Right padding: one token in the first row, all tokens in the last."""
    lengths = rng.integers(1, dims["S"], dims["B"])
    lengths[0], lengths[-1] = dims["S"] - 1, 0
    return jnp.asarray(np.arange(dims["S"]) < lengths[:, None])


DIFFERENTIAL = (
    Case("small", SMALL, make={"mask": _causal}, tags=SMOKE),
    Case("packed", SMALL, {"softmax_scale": 0.6}, make={"mask": _packed}),
    Case(
        "causal_8k",
        {"B": 1, "T": 8192, "S": 8192, "N": 16, "K": 16, "H": 64, "Hv": 128},
        make={"mask": _causal},
        tags=BENCH,
    ),
)
LINFORMER = (
    Case("small", {**SMALL, "P": 5}, tags=SMOKE),
    Case("padding", {**SMALL, "T": 4, "P": 3}, {"softmax_scale": 0.6}, make={"key_mask": _some}),
    Case("bert_8k", {"B": 4, "T": 8192, "S": 8192, "N": 12, "K": 12, "H": 64, "Hv": 64, "P": 256}, tags=BENCH),
)
PERFORMER = (
    Case("small", {**SMALL, "P": 9}, {"causal": True}, tags=SMOKE),
    Case("several_chunks", {**SMALL, "T": 150, "S": 150, "P": 7}, {"causal": True}, make={"key_mask": _some}),
    Case("bidirectional", {**SMALL, "T": 5, "P": 9}, {"softmax_scale": 0.6}, make={"key_mask": _some}),
    Case(
        "causal_32k",
        {"B": 1, "T": 32768, "S": 32768, "N": 16, "K": 16, "H": 64, "Hv": 64, "P": 256},
        {"causal": True},
        tags=BENCH,
    ),
)
_MIXTURE = {"B": 2, "T": 9, "S": 9, "D": 10, "E": 5, "H": 8, "Hv": 6}
MIXTURE = (
    Case("small", _MIXTURE, {"top_k": 2}, make={"mask": _causal}, tags=SMOKE),
    Case("all", {**_MIXTURE, "S": 14, "E": 3}, {"top_k": 3, "softmax_scale": 0.6}),
    Case(
        "moa_4k",
        {"B": 4, "T": 4096, "S": 4096, "D": 1024, "E": 32, "H": 128, "Hv": 128},
        {"top_k": 16},
        make={"mask": _causal},
        tags=BENCH,
    ),
)
QUANTIZED = (
    Case("small", {**SMALL, "T": 21, "S": 21}, {"block_size": 8}, make={"mask": _causal}, tags=SMOKE),
    Case("several_blocks", {**SMALL, "T": 70, "S": 300}, {"softmax_scale": 0.6}, make={"mask": _causal}),
    Case(
        "causal_8k",
        {"B": 1, "T": 8192, "S": 8192, "N": 16, "K": 16, "H": 128, "Hv": 128},
        make={"mask": _causal},
        tags=BENCH,
    ),
)
