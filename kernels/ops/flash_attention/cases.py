"""Shapes and options of flash attention, for tests, benchmarks and tuning."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.dropout import expand_dropout_seed
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.ranges import EXAMPLES
from kernels.framework.backend import Case

SMALL = {"B": 2, "T": 37, "S": 37, "N": 4, "K": 2, "H": 16, "Hv": 16}
CROSS = {**SMALL, "T": 29, "S": 53}


def _mask(**options):
    return {"mask": lambda rng, dims: MaskInfo(**options)}


def _packed(rng, batch, length):
    """Returns segment ids of a few documents of random lengths, with padding at the end of some rows."""
    rows = []
    for row in range(batch):
        cuts = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
        ids = np.searchsorted(cuts, np.arange(length), side="right")
        rows.append(np.where(ids == 3, -1, ids) if row % 2 else ids)
    return jnp.asarray(np.stack(rows), jnp.int32)


def _segments(**options):
    def make(rng, dims):
        return MaskInfo.from_segments(_packed(rng, dims["B"], dims["T"]), **options)

    return {"mask": make}


def _permuted(**options):
    """Returns a mask with shuffled tokens: positions and segments are permuted together."""

    def make(rng, dims):
        order = rng.permutation(dims["T"])
        ids = _packed(rng, dims["B"], dims["T"])[:, order]
        positions = jnp.asarray(order, jnp.int32)[None]
        return MaskInfo(q_segment_ids=ids, kv_segment_ids=ids, q_positions=positions, kv_positions=positions, **options)

    return {"mask": make}


def _dense(rng, dims):
    shape = (dims["B"], 1, dims["T"], dims["S"])
    mask = rng.random(shape) < 0.6
    mask[:, :, 3] = False  # a query with no key
    return MaskInfo(attention_mask=jnp.asarray(mask), causal=True)


def _dense_per_head(rng, dims):
    return MaskInfo(attention_mask=jnp.asarray(rng.random((1, dims["N"], dims["T"], dims["S"])) < 0.5))


def _padding(rng, dims):
    real = np.arange(dims["S"]) < rng.integers(1, dims["S"], dims["B"])[:, None]
    return MaskInfo.from_attention_mask(real, causal=True)


def _cuts(**options):
    """Returns a packed axis whose sequences differ in query and key length; one has length zero."""

    def make(rng, dims):
        T, S = dims["T"], dims["S"]
        return MaskInfo.from_cu_seqlens([0, 5, 5, T // 2, T - 2], T, [0, 9, 11, S // 2, S - 3], S, **options)

    return {"mask": make}


def _prefix(rng, dims):
    return MaskInfo(prefix_lengths=jnp.asarray(rng.integers(1, dims["S"], dims["B"]), jnp.int32), causal=True)


def _documents(rng, dims):
    """Returns a packed axis of at least two documents, 4,096 tokens long on average."""
    cuts = np.sort(rng.choice(np.arange(1, dims["T"]), max(1, dims["T"] // 4096 - 1), replace=False))
    ids = np.searchsorted(cuts, np.arange(dims["T"]), side="right")[None]
    return MaskInfo.from_segments(jnp.asarray(ids, jnp.int32), causal=True)


def _seed(rng, dims):
    return expand_dropout_seed(int(rng.integers(2**31)), dims["B"], dims["N"])


def _heads(width, B, T=8192):
    """Returns a shape with heads of the given width and 2,048 entries per token."""
    return {"B": B, "T": T, "S": T, "N": 2048 // width, "K": 2048 // width, "H": width, "Hv": width}


LONG = {"B": 1, "T": 32768, "S": 32768, "N": 16, "K": 4, "H": 128, "Hv": 128}


def _bench(name, dims, *, causal=True, window=None, tags=frozenset({"bench"}), make=None, **rest):
    return Case(name, dims, make=make or _mask(causal=causal, window=window), tags=tags, **rest)


# Cases that also test `attention`, which returns its weights: every option and every kind of mask once.
WITH_WEIGHTS = (
    *EXAMPLES, "causal", "cross", "prefix", "segments", "permuted", "dense_mask", "value_width", "scale", "soft_cap",
    "bias", "several_sinks", "alibi_per_row", "dropout",
)  # fmt: skip
# Cases that differ from a neighbour in one number or one shape only run in the full grid.
SLOW = frozenset({"slow"})
# Cases that the quick tests run in the interpreter of Pallas: several blocks, sinks, prefixes, a dense mask, every option.
# Windows, documents and widths are there in tests/kernels/test_flash_attention_pallas.py. The full grid runs all.
KERNELS = frozenset({"kernels"})
CASES = (
    Case("causal", SMALL, make=_mask(causal=True), tags=frozenset({"smoke"})),
    Case("full", SMALL),
    Case("mha", {**SMALL, "K": 4}, make=_mask(causal=True), tags=SLOW),
    Case("mqa", {**SMALL, "K": 1}, make=_mask(causal=True), tags=SLOW),
    Case("long", {**SMALL, "B": 1, "T": 300, "S": 300}, make=_mask(causal=True), tags=KERNELS | {"smoke"}),
    Case("cross", CROSS),
    Case("cross_causal", CROSS, make=_mask(causal=True)),
    Case("more_queries_than_keys", {**CROSS, "T": 53, "S": 29}, make=_mask(causal=True), tags=SLOW),
    *(
        Case(name, SMALL, make=_mask(**rules), tags=KERNELS if "sink_tokens" in rules else frozenset())
        for name, rules in EXAMPLES.items()
    ),
    Case("window_two_sided", SMALL, make=_mask(window=(5, 3))),
    Case("window_open_left", SMALL, make=_mask(window=(None, 2)), tags=SLOW),
    Case("prefix", SMALL, make={"mask": _prefix}, tags=KERNELS),
    Case("segments", SMALL, make=_segments(causal=True), tags=frozenset({"smoke"})),
    Case("segments_window", SMALL, make=_segments(causal=True, window=(4, 0)), tags=SLOW),
    Case("segments_sink_window", SMALL, make=_segments(causal=True, window=(4, 0), sink_tokens=2), tags=SLOW),
    Case("segments_full", SMALL, make=_segments(), tags=SLOW),
    Case("segments_chunk", SMALL, make=_segments(causal=True, chunk_size=5)),
    Case("padding", SMALL, make={"mask": _padding}),
    Case("cum_seqlens", {**CROSS, "B": 1}, make=_cuts(causal=True)),
    Case("cum_seqlens_window_chunk", {**CROSS, "B": 1}, make=_cuts(window=(9, 2), chunk_size=6), tags=SLOW),
    Case("permuted", SMALL, make=_permuted(causal=True)),
    Case("permuted_window_chunk", SMALL, make=_permuted(causal=True, window=(9, 0), chunk_size=16), tags=SLOW),
    Case("dense_mask", SMALL, make={"mask": _dense}),
    Case("dense_mask_per_head", CROSS, make={"mask": _dense_per_head}, tags=SLOW),
    Case("one_query", {**CROSS, "T": 1}, arrays=("bias",), make=_mask(causal=True, window=(20, 0))),
    Case("value_width", {**SMALL, "H": 24, "Hv": 16}, make=_mask(causal=True)),
    Case("scale", SMALL, options={"softmax_scale": 0.7, "deterministic": True}, make=_mask(causal=True)),
    Case("soft_cap", SMALL, options={"logits_soft_cap": 1.5}, make=_mask(causal=True)),
    Case("bias", SMALL, arrays=("bias",), make=_mask(causal=True)),
    Case("bias_per_head", CROSS, arrays=("bias",), shapes={"bias": (1, 4, 29, 53)}),
    Case("bias_per_key", SMALL, arrays=("bias",), shapes={"bias": (2, 1, 1, 37)}, tags=SLOW),
    Case("sinks", {**SMALL, "sinks": 1}, arrays=("softmax_aux",), make=_mask(causal=True, window=(7, 0))),
    Case("several_sinks", {**SMALL, "sinks": 3}, arrays=("softmax_aux",), make={"mask": _dense}),
    Case("alibi", SMALL, arrays=("alibi_slopes",), shapes={"alibi_slopes": (1, 4)}, make=_mask(causal=True)),
    Case("alibi_per_row", CROSS, arrays=("alibi_slopes",), tags=SLOW),
    Case("dropout", SMALL, options={"dropout_prob": 0.3}, make={**_mask(causal=True), "dropout_seed": _seed}),
    Case(
        "together",
        {**SMALL, "sinks": 1},
        options={"logits_soft_cap": 2.0, "softmax_scale": 0.4, "dropout_prob": 0.2},
        arrays=("bias", "softmax_aux", "alibi_slopes"),
        make={**_permuted(causal=True, window=(11, 0)), "dropout_seed": _seed},
        tags=KERNELS | {"smoke", "code"},
    ),
    # Benchmark cases: head widths, lengths, masks and biases, at 16k tokens or more.
    _bench("causal_2k", _heads(128, B=8, T=2048)),
    _bench("causal_8k", _heads(128, B=2)),
    _bench("full_8k", _heads(128, B=2), causal=False),
    _bench("causal_32k_gqa", LONG, tags=frozenset({"bench", "code"})),
    _bench("narrow_causal_2k", _heads(64, B=8, T=2048)),
    _bench("narrow_causal_8k", _heads(64, B=2)),
    _bench("narrow_full_8k", _heads(64, B=2), causal=False),
    _bench("narrow_causal_32k", _heads(64, B=1, T=32768)),
    _bench("wide_causal_2k", _heads(256, B=8, T=2048)),
    _bench("wide_causal_8k", _heads(256, B=2), tags=frozenset({"bench", "code"})),
    _bench("wide_full_8k", _heads(256, B=2), causal=False),
    _bench("wide_causal_32k", _heads(256, B=1, T=32768)),
    _bench("latent_causal_8k", {**_heads(192, B=2), "Hv": 128}),
    _bench("packed_4k_of_32k", LONG, make={"mask": _documents}),
    _bench("soft_cap_32k", LONG, options={"logits_soft_cap": 30.0}),
    _bench("sinks_32k", {**LONG, "sinks": 1}, arrays=("softmax_aux",)),
    _bench(
        "packed_soft_cap_sinks_32k",
        {**LONG, "sinks": 1},
        options={"logits_soft_cap": 30.0},
        arrays=("softmax_aux",),
        make={"mask": _documents},
    ),
    _bench("window_4k_of_32k", LONG, window=(4095, 0)),
    _bench("window_1k_of_32k", LONG, window=(1023, 0)),
    _bench("window_4k_of_128k", {**LONG, "T": 131072, "S": 131072}, window=(4095, 0)),
)
