"""Flash attention on TPUs: the engine's kernels over lists of tile pairs per batch row, and a separate pass for the gradient of
a bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pallas_calls import LANES, SMEM_BYTES, Call, Input, Output, most_visits, prepare
from kernels.engines.attention.pallas_kernels import bwd_dbias_kernel
from kernels.engines.attention.pallas_passes import attend, gradients, launch, of_saved
from kernels.engines.attention.pallas_visits import Visits, united, visits_of
from kernels.engines.attention.softmax import sink_gradient
from kernels.engines.attention.tiles import spans
from kernels.framework.binding import Call as BoundCall
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.config import KernelConfig as FlashAttentionConfig
from kernels.framework.execute import Saved
from kernels.ops.flash_attention.contract import op
from kernels.ops.flash_attention.xla import FEATURES


def _tile(params: FwdParams, T: int, S: int) -> tuple[int, int]:
    """Returns the block sizes: they divide each length evenly, and are at most the requested ones, in multiples of LANES."""
    sizes = []
    for length, block in ((T, params.q_blocksize), (S, params.kv_blocksize)):
        if block is None or block % LANES:
            raise ValueError(f"block sizes of queries and keys must be multiples of {LANES} on a TPU, got {params}")
        even = -(-length // -(-length // block))
        sizes.append(-(-even // LANES) * LANES)
    return sizes[0], sizes[1]


class _Spans:
    """The visits of a call, from the spans of its mask."""

    def __init__(self, call: Call):
        plan = call.plan
        tile = plan.block_q, plan.block_k
        self._spans = spans(call.mask, plan.T, plan.S, *tile)
        self._tiles = -(-plan.S // tile[1]), -(-plan.T // tile[0])
        self._most = most_visits(call.mask, plan.T, plan.S, *tile)

    def visits(self, by_keys: bool) -> Visits:
        return visits_of(self._spans[by_keys], self._tiles[by_keys], self._most[by_keys], by_keys)

    def united(self, by_keys: bool) -> Visits:
        """Returns the visits of the pairs that are active in any row."""
        return visits_of(united(self._spans[by_keys]), self._tiles[by_keys], self._most[by_keys], by_keys)


def _call(query, key, value, mask, options, params) -> Call:
    bias, softmax_aux, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob = options
    return prepare(
        "flash_attention",
        query,
        key,
        value,
        mask,
        softmax_aux,
        softmax_scale,
        logits_soft_cap,
        _tile(params, query.shape[1], key.shape[1]),
        bias,
        alibi_slopes,
        dropout_seed,
        dropout_prob,
    )


def forward(
    query,
    key,
    value,
    mask,
    bias,
    softmax_aux,
    alibi_slopes,
    dropout_seed,
    softmax_scale,
    logits_soft_cap,
    dropout_prob,
    deterministic,  # as it always is: nothing is added in any order
    cfg,
):
    options = (bias, softmax_aux, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob)
    call = _call(query, key, value, mask, options, cfg.fwd_params)
    return attend(call, _Spans(call).visits(False), query.dtype)


def backward(
    saved: Saved,
    query,
    key,
    value,
    mask,
    bias,
    softmax_aux,
    alibi_slopes,
    dropout_seed,
    softmax_scale,
    logits_soft_cap,
    dropout_prob,
    deterministic,  # as it always is: nothing is added in any order
    cfg,
):
    options = (bias, softmax_aux, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob)
    call = _call(query, key, value, mask, options, cfg.bwd_params)
    pairs, extra = _Spans(call), of_saved(call, saved, query.dtype)
    grads = gradients(call, extra, pairs.visits(False), pairs.visits(True))
    if bias is not None:
        grads["bias"] = _bias_gradient(call, pairs, extra, bias)
    if alibi_slopes is not None:
        slopes = grads.pop("slopes")
        grads["alibi_slopes"] = slopes if alibi_slopes.shape[0] == call.B else slopes.sum(0, keepdims=True)
    if softmax_aux is not None:
        grads["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
    return grads


def _bias_gradient(call: Call, pairs: _Spans, extra: tuple[Input, ...], bias: jax.Array) -> jax.Array:
    """Returns ds, summed in the kernel over the dims that the bias is broadcast over: T, S, rows and heads."""
    bias_input = next(x for x in call.inputs if x.name == "bias")
    rows, heads, k, q = bias_input.array.shape
    shared_rows, shared_heads = call.B // rows, call.plan.N // heads
    (d_bias,) = launch(
        bwd_dbias_kernel,
        call,
        pairs.united(q == 1 and k > 1),
        (rows, heads, shared_rows * shared_heads),
        lambda b, n, r: (b + lax.div(r, shared_heads), n + lax.rem(r, shared_heads)),
        [Output("d_bias", bias_input.array.shape, jnp.float32, bias_input.block, bias_input.index_map)],
        {"bias_sum": (bias_input.block[2] or 1, bias_input.block[3] or 1)},
        extra,
        start=(jnp.zeros(bias_input.array.shape, jnp.float32),),
    )
    return d_bias[:, :, : bias.shape[3], : bias.shape[2]].swapaxes(2, 3)


# -- configurations ---------------------------------------------------------------------------------------------------


def _config(forward: tuple[int, int], backward: tuple[int, int]) -> FlashAttentionConfig:
    (q, k), (bwd_q, bwd_k) = forward, backward
    return FlashAttentionConfig(
        FwdParams(q_blocksize=q, kv_blocksize=k), BwdParams(q_blocksize=bwd_q, kv_blocksize=bwd_k)
    )


def heuristic(call: BoundCall, platform: str) -> FlashAttentionConfig:
    # Large blocks take fewer cycles per pair in the compiler's schedules for every generation (README), and keep the list of a
    # long sequence in scalar memory. The hidden pairs that they compute at a mask's edge are few for a long causal mask, but
    # many for a window or documents. In float32, heads of 256 with all options would come near the limit of VMEM.
    mask = MaskInfo() if call.mask is None else call.mask
    wide = not set(mask.used) - {"causal"}
    pairs = call.dims["T"] * call.dims["S"]
    if pairs > 2**36 or (wide and pairs >= 2**26 and call.dtype == "bfloat16"):
        return _config((1024, 1024), (1024, 1024))
    return _config((512, 1024), (512, 512))


def candidates(call: BoundCall) -> list[FlashAttentionConfig]:
    sizes = [(256, 512), (512, 512), (512, 1024), (1024, 512), (1024, 1024), (512, 2048)]
    configs = [_config(size, other) for size, other in zip(sizes, [(256, 512), *sizes[1:5], (1024, 512)], strict=True)]
    return list(dict.fromkeys([heuristic(call, "tpu"), *configs]))


def rejects(call: BoundCall) -> str | None:
    cfg, dims = heuristic(call, "tpu"), call.dims
    mask = MaskInfo() if call.mask is None else call.mask
    rows = max([1, *(getattr(mask, name).shape[0] for name in mask.data_fields if name != "attention_mask")])
    for params in (cfg.fwd_params, cfg.bwd_params):
        bq, bk = _tile(params, dims["T"], dims["S"])
        most = max(most_visits(mask, dims["T"], dims["S"], bq, bk))
        if 4 * most * rows > SMEM_BYTES:
            return (
                f"the {most:,} pairs of blocks of {rows} rows take {4 * most * rows / 2**10:,.0f} KiB of scalar memory, of "
                f"which there are {SMEM_BYTES >> 10}; split the sequence over devices (ring_attention), or the batch"
            )
    return None


op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    features=FEATURES,
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
