"""`python tests/mutations.py [WORDS ...]`: seeds one fault at a time into a copy of the project, and the tests must go red.

Each fault is a line of code replaced in a private copy of the sources, and the tests that should notice are run there. The
command fails if a fault goes unnoticed, or if its line is not there any more. WORDS choose faults by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MASKS, XLA = "kernels/_core/masks.py", "kernels/ops/flash_attention/xla.py"
RING, LOCAL, SCHEMES = (f"ejdist/sequence/{name}.py" for name in ("attention", "local", "schemes"))
SCHEDULE, EXCHANGE = "ejdist/sequence/schedule.py", "ejdist/sequence/exchange.py"
FLASH = "tests/test_masks.py tests/kernels/test_flash_attention.py"
SEQUENCE = "tests/test_sequence.py"
SHARDED, PLACEMENT = "ejdist/sharded.py", "ejdist/placement.py"
DISPATCH, EDGES = "kernels/_core/dispatch.py", "tests/test_edges.py"
COLLECTIVE = "ejdist/collective_matmul.py"
GROUPED, QUANTIZED = "tests/kernels/test_grouped_matmul.py", "tests/kernels/test_quantized_matmul.py"
LOOP, TRAIN = "ejdist/training/loop.py", "tests/test_train.py"
DELTA, DELTA_SHARDED = "tests/kernels/test_delta_rule.py", "tests/kernels/test_delta_rule_sharded.py"

PAGED, PAGED_TESTS = "kernels/ops/paged_attention/xla.py", "tests/kernels/test_paged_attention.py"
STATE_SPACE, STATE_SPACES = "kernels/ops/state_space/xla.py", "tests/kernels/test_state_space.py"
CELLS = "tests/kernels/test_recurrent.py"
BLOCKS, SELECTED = (f"kernels/ops/{name}_attention/xla.py" for name in ("blocksparse", "native_sparse"))
OF_BLOCKS, OF_SELECTED = (f"tests/kernels/test_{name}_attention.py" for name in ("blocksparse", "native_sparse"))


@dataclass(frozen=True)
class Fault:
    """A fault: in `file`, `old` becomes `new`; `tests` are those that must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault("mask off by one", MASKS, "        below = j <= i\n", "        below = j < i\n", FLASH),
    Fault("window one key wider", MASKS, "seen &= j >= i - left", "seen &= j >= i - left - 1", FLASH),
    Fault("integer window is W + 1", MASKS, "(int(sliding_window) - 1, 0)", "(int(sliding_window), 0)", FLASH),
    Fault("padding attends", MASKS, "seen &= (a == b) & (a >= 0)", "seen &= a == b", FLASH),
    Fault("a block too many skipped", MASKS, "below = k_low <= q_high", "below = k_low < q_high", FLASH),
    Fault("combining drops a window", MASKS, "window=_both(self.window, other.window)", "window=self.window", FLASH),
    Fault("output not rescaled", XLA, "out * rescale[..., None] + pv", "out + pv", FLASH),
    Fault("denominator not rescaled", XLA, "total = total * rescale + ", "total = total + ", FLASH),
    Fault("sink counted twice", XLA, "        l0 = 1.0", "        l0 = 2.0", FLASH),
    Fault("delta with the wrong sign", XLA, "- delta)", "+ delta)", FLASH),
    Fault(
        "slope of the soft cap dropped",
        XLA,
        "raw = ds if s.cap_slope is None else ds * s.cap_slope",
        "raw = ds",
        "tests/test_ops.py -k soft_cap",
    ),
    Fault(
        "dropout missing in the backward",
        XLA,
        "(dp if keep is None else dp * keep)",
        "dp",
        "tests/test_ops.py -k dropout",
    ),
    Fault("wrong hop", SCHEMES, "- hop) %", "+ hop) %", SEQUENCE),
    Fault("merge without rescale", LOCAL, "return out * a[..., None] + ", "return out + ", SEQUENCE),
    Fault(
        "ring counts the sink twice",
        RING,
        "jnp.zeros_like(out), joint)",
        "jnp.zeros_like(out), joint + 0.6931)",
        f"{SEQUENCE} -k sinks",
    ),
    Fault("stale lse", RING, '{"out": out, "lse": lse}', '{"out": out, "lse": lse - 0.1}', SEQUENCE),
    Fault(
        "segments do not travel",
        LOCAL,
        '("kv_segment_ids", "kv_positions")',
        '("kv_positions",)',
        f"{SEQUENCE} -k packed",
    ),
    Fault("gradients of keys do not come home", SCHEMES, "local.ranks - hops[-1])", "0)", SEQUENCE),
    Fault("gradients of keys come home a rank late", SCHEMES, "local.ranks - hops[-1])", "1 - hops[-1])", SEQUENCE),
    Fault("gradients of keys do not travel", SCHEMES, "exchange.shift(travel, axis, before)", "travel", SEQUENCE),
    Fault(
        "positions not permuted",
        LOCAL,
        "order.positions(exchange.rank(self.axis), length)[None]",
        "(jnp.arange(self.query.shape[1]) + exchange.rank(self.axis) * self.query.shape[1])[None]",
        SEQUENCE,
    ),
    Fault("keys sent the other way", EXCHANGE, "(i + by) % n", "(i - by) % n", SEQUENCE),
    Fault(
        "gathered keys have the gradient of one rank",
        EXCHANGE,
        "jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)",
        "jax.lax.dynamic_slice_in_dim(x, rank(axis) * (k := x.shape[1] // jax.lax.axis_size(axis)), k, 1)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "gathered keys taken for those of other ranks",
        SCHEMES,
        "local.attend(keys, jnp.arange(local.ranks))",
        "local.attend(keys, (jnp.arange(local.ranks) + 1) % local.ranks)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "ranks of two axes counted from the minor one",
        EXCHANGE,
        "return jax.lax.axis_index(axis)",
        "return jax.lax.axis_index(axis if isinstance(axis, str) else axis[::-1])",
        f"{SEQUENCE} -k two_axes",
    ),
    Fault(
        "a ring takes the axes as the mesh lists them",
        EXCHANGE,
        "there.transpose([listed.index(a) for a in axis]).ravel()",
        "there.ravel()",
        f"{SEQUENCE} -k two_axes",
    ),
    Fault(
        "constants are not typed as varying",
        DISPATCH,
        'to="varying") if missing else x',
        'to="varying") if missing and False else x',
        f"{SEQUENCE} -k constant",
    ),
    Fault(
        "a second derivative goes through",
        RING,
        "once = jax.custom_jvp(function, nondiff_argnums=(0,))",
        "return function\n    once: Any = None",
        f"{SEQUENCE} -k second_derivative",
    ),
    Fault(
        "a needed hop left out", SCHEDULE, "return tuple(found) or (0,)", "return tuple(found[:-1]) or (0,)", SEQUENCE
    ),
    Fault(
        "sharded: sums over split widths dropped",
        SHARDED,
        "sums = tuple(a for d in sorted(op.sum_dims & split.keys()) for a in axes.get(d, ()))",
        "sums = ()",
        f"{EDGES} -k explicit",
    ),
    Fault(
        "sharded: out_specs are not checked",
        SHARDED,
        "        check_out_specs(out_specs, wanted, mesh)\n",
        "        pass\n",
        f"{EDGES} -k out_specs",
    ),
    Fault(
        "sharded: an axis on two dims goes through",
        SHARDED,
        "    axes = apart(",
        "    apart(",
        f"{EDGES} -k heads_before",
    ),
    Fault(
        "sharded: specs with an axis on two dims go through",
        SHARDED,
        "said=in_specs is not None or is_explicit(mesh)",
        "said=False",
        f"{EDGES} -k two_dims",
    ),
    Fault(
        "sharded: stray targets of a split vocabulary are no NaN",
        "kernels/ops/cross_entropy/functions.py",
        'vocabulary=call.dims["V"],',
        "vocabulary=1 << 30,",
        f"{EDGES} -k strays",
    ),
    Fault(
        "sharded: a mesh that the layout does not know",
        PLACEMENT,
        "    layout.check(mesh, also=",
        "    dict(mesh=mesh, also=",
        f"{EDGES} -k ones_own",
    ),
    Fault(
        "sharded: heads and the keys that serve them split apart",
        PLACEMENT,
        "    for first, second in op.tied_dims:\n",
        "    for first, second in ():\n",
        "tests/test_sharded.py -k names_what_to_change",
    ),
    Fault(
        "sharded: whole weights are not typed as varying",
        DISPATCH,
        'to="varying") if missing else x',
        'to="varying") if missing and False else x',
        f"{EDGES} -k inside",
    ),
    Fault(
        "sharded: every eager call compiles",
        SHARDED,
        "    program = _Program(key,",
        "    program = _Program((*key, object()),",
        f"{EDGES} -k compiles_nothing",
    ),
    Fault(
        "sharded: stored weights are gathered outside",
        SHARDED,
        "gathered = stored_specs(op, call, axes, mesh, specs) if stored else {}",
        "gathered = {}",
        f"{EDGES} -k scattered",
    ),
    Fault(
        "a layout is of every thread",
        "ejdist/layout.py",
        "        _layout.set(self._before)\n",
        "        pass\n",
        f"{EDGES} -k one_thread",
    ),
    Fault(
        "sharded: the logits of another vocabulary part are counted",
        "ejdist/vocabulary_parallel.py",
        "targets = targets - jax.lax.axis_index(vocabulary) * size",
        "targets = targets % size",
        "tests/test_sharded.py -k fused_cross_entropy-dp2_tp2",
    ),
    Fault(
        "a configuration tuned for another device",
        "kernels/_core/select.py",
        '            "device": self.device_kind,\n',
        "",
        "tests/test_core.py -k one_kind_of_device",
    ),
    Fault(
        "no cotangent of rstd",
        "kernels/ops/rms_norm/triton_gpu.py",
        "(tl.sum(products, axis=1) + d_rstd)",
        "tl.sum(products, axis=1)",
        "tests/kernels/test_rms_norm.py",
    ),
    Fault(
        "gradients of parameters stay whole",
        "ejdist/layout.py",
        "(constrain(gradient, dims, mesh, layout.parameters),)",
        "(gradient,)",
        "tests/test_mesh_layout.py",
    ),
    Fault(
        "targets cross documents",
        "ejdist/training/data/packing.py",
        "(0 if whole else 1)",
        "1",
        "tests/test_data.py",
    ),
    Fault(
        "data from the start after a stop",
        LOOP,
        "data.iterator(start, end, rows)",
        "data.iterator(0, end - start, rows)",
        f"{TRAIN} -k bit_for_bit",
    ),
    Fault(
        "the loop counts FLOPs as if a row were one document",
        LOOP,
        'step_flops(program.config, batch["segment_ids"])',
        'step_flops(program.config, batch["segment_ids"] * 0)',
        f"{TRAIN} -k flops",
    ),
    Fault(
        "a loss that is no number goes on",
        "ejdist/training/stop.py",
        "if not (math.isfinite(loss) and",
        "if (loss is None and",
        f"{TRAIN} -k no_number",
    ),
    Fault(
        "a digest without places",
        "ejdist/training/checkpoint.py",
        "hashed = bits.astype(jnp.uint32) + place * jnp.uint32(0x9E3779B1)",
        "hashed = bits.astype(jnp.uint32)",
        f"{TRAIN} -k digest",
    ),
    Fault(
        "the schedule ends a step late",
        "ejdist/training/optimizer.py",
        "after = steps - 1 - warmup",
        "after = steps - warmup",
        "tests/test_step.py",
    ),
    Fault(
        "accumulation forgets a microbatch's tokens",
        "ejdist/training/step.py",
        'count = jnp.maximum(sums["tokens"], 1)',
        'count = jnp.maximum(sums["tokens"] / accumulation, 1)',
        "tests/test_step.py",
    ),
    Fault(
        "visible pairs miss the interval's end",
        "kernels/_core/pairs.py",
        'place(ids, high), side="right"',
        'place(ids, high), side="left"',
        "tests/test_work.py",
    ),
    Fault(
        "a wrong backend is timed all the same",
        "benchmarks/measure.py",
        'if contestant.ours and status == "wrong":',
        "if False:",
        "tests/test_benchmarks.py -k wrong_backend",
    ),
    Fault(
        "gradients of peers are not checked",
        "benchmarks/check.py",
        "        outputs, gradients = programs.outputs_and_gradients(",
        "        outputs, gradients = programs.outputs(inputs), {}\n        programs.outputs_and_gradients(",
        "tests/test_benchmarks.py",
    ),
    Fault(
        "layer_norm: the mean has no gradient",
        "kernels/ops/layer_norm/xla.py",
        "return g * rstd - through_mean - normal * through_rstd, features",
        "return g * rstd - normal * through_rstd, features",
        "tests/test_ops.py -k layer_norm-small-float32",
    ),
    Fault(
        "layer_norm: no cotangent of mean",
        "kernels/ops/layer_norm/xla.py",
        "* rstd - d_mean[..., None]) / D",
        "* rstd) / D",
        "tests/test_ops.py -k layer_norm-small-float32",
    ),
    Fault(
        "layer_norm: the variance cancels",
        "kernels/ops/layer_norm/xla.py",
        "jnp.mean(jnp.square(apart), axis=-1)",
        "jnp.mean(jnp.square(wide), axis=-1) - jnp.square(mean)",
        "tests/kernels/test_layer_norm.py -k cancel",
    ),
    Fault(
        "layer_norm: the gradient of the stream is dropped",
        "kernels/ops/layer_norm/xla.py",
        "d = dx + saved.d_stream.astype(jnp.float32)",
        "d = dx",
        "tests/test_ops.py -k fused_add_layer_norm",
    ),
    Fault(
        "rms_norm: what is normalised is not the stream that goes on",
        "kernels/ops/rms_norm/xla.py",
        "out, rstd = forward(stream.astype(jnp.float32), weight",
        "out, rstd = forward(x.astype(jnp.float32) + residual.astype(jnp.float32), weight",
        "tests/kernels/test_rms_norm_fused.py -k rounded",
    ),
    Fault(
        "rotary_embedding: the backward divides where XPos multiplies",
        "kernels/ops/rotary_embedding/xla.py",
        "else xpos.reversed()",
        "else xpos",
        "tests/test_ops.py -k rotary_embedding-xpos-float32",
    ),
    Fault(
        "rotary_embedding: zeta of XPos is over the whole head",
        "kernels/ops/rotary_embedding/contract.py",
        "np.arange(0, width, 2, dtype=np.float64) / width + self.gamma",
        "np.arange(0, width, 2, dtype=np.float64) / (width + 2) + self.gamma",
        "tests/kernels/test_rotary_embedding.py -k xpos",
    ),
    Fault(
        "kl_divergence: the reverse gap forgets its own probabilities",
        "kernels/ops/kl_divergence/xla.py",
        "own * (1 + (student - teacher) - gap)",
        "own * (student - teacher)",
        "tests/kernels/test_kl_divergence.py -k float64",
    ),
    Fault(
        "kl_divergence: the temperature is not in the gradient",
        "kernels/ops/kl_divergence/xla.py",
        "return logits / temperature, 1 / temperature",
        "return logits / temperature, 1.0",
        "tests/kernels/test_kl_divergence.py -k float64",
    ),
    Fault(
        "kl_divergence: a masked entry is not a number",
        "kernels/ops/kl_divergence/xla.py",
        "jnp.sum(jnp.where(share > 0, share * (p - q), 0), axis=-1)",
        "jnp.sum(share * (p - q), axis=-1)",
        "tests/kernels/test_kl_divergence.py -k masked",
    ),
    Fault(
        "kl_divergence: ignored tokens count",
        "kernels/ops/kl_divergence/functions.py",
        "counts = ((marks != ignore_index)",
        "counts = ((marks != ignore_index + 7)",
        "tests/kernels/test_kl_divergence.py -k ignored",
    ),
    Fault(
        "kl_divergence: parts of the vocabulary weigh alike",
        "ejdist/vocabulary_parallel.py",
        "jnp.exp(parts[p] - whole[p]) * gap",
        "gap / 2",
        "tests/kernels/test_kl_divergence.py -k devices",
    ),
    Fault(
        "the scale of latent attention forgets the rotary part",
        "kernels/ops/multi_latent_attention/contract.py",
        "(0 if query_rope is None else query_rope.shape[-1])",
        "0",
        "tests/kernels/test_multi_latent_attention.py -k cuts_under",
    ),
    Fault(
        "the gradient of the latent forgets the values",
        "kernels/ops/multi_latent_attention/xla.py",
        ' + dot("bskv,rkv->bsr", dv, w_vc),',
        ",",
        "tests/test_ops.py -k flash_mla-small",
    ),
    Fault(
        "a page of another request",
        "kernels/ops/multi_latent_attention/xla.py",
        "slots = jnp.minimum(j[:, None] * pages_of_block + page, table_width - 1)",
        "slots = jnp.minimum(n * pages_of_block + page[None], table_width - 1) + 0 * j[:, None]",
        "tests/test_ops.py -k multi_latent_ragged_page_attention-ragged",
    ),
    Fault(
        "a tile sees one entry less",
        "kernels/ops/multi_latent_attention/xla.py",
        "(at[:, None] <= position[..., None])",
        "(at[:, None] < position[..., None])",
        "tests/kernels/test_multi_latent_attention.py -k pages_against",
    ),
    Fault(
        "unwritten entries reach a sum",
        "kernels/ops/multi_latent_attention/xla.py",
        "entries = jnp.where((at < length)[..., None], kv_cache[ids].reshape(-1, block_k, width), 0)",
        "entries = kv_cache[ids].reshape(-1, block_k, width)",
        "tests/kernels/test_multi_latent_attention.py -k pages_against",
    ),
    Fault(
        "the last block of a cache of latents counts some entries twice",
        "kernels/ops/multi_latent_attention/decode.py",
        "(at >= j * self.block) & ",
        "",
        "tests/test_ops.py -k mla_decode-several",
    ),
    Fault(
        "decoding's gradient forgets the sum of the weights",
        "kernels/ops/multi_latent_attention/decode.py",
        " - delta)",
        ")",
        "tests/test_ops.py -k mla_decode-several",
    ),
    Fault(
        "the window of decoding begins a block late",
        "kernels/ops/multi_latent_attention/decode.py",
        "self.first = jnp.minimum(seen_first // self.block, self.last)",
        "self.first = jnp.minimum(seen_first // self.block + 1, self.last)",
        "tests/kernels/test_multi_latent_attention.py -k in_sight",
    ),
    Fault(
        "a page that is not there is not noticed",
        "kernels/_core/requests.py",
        "(table >= pages)",
        "(table > pages)",
        "tests/kernels/test_paged_attention_functions.py -k wrong_call",
    ),
    Fault(
        "a split cache counts from its own start",
        "ejdist/latent_attention.py",
        "kv_lens - jax.lax.axis_index(over) * own",
        "kv_lens",
        "tests/kernels/test_multi_latent_attention.py -k cache_that_is_split",
    ),
    Fault(
        "the map of a rank of a delta rule forgets the options",
        "ejdist/sequence/state_passing.py",
        "{**arguments, **said}",
        "arguments",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "ranks of a delta rule hand on their own state alone",
        "ejdist/sequence/delta_rule.py",
        "jnp.pad(jnp.eye(H),",
        "jnp.pad(0 * jnp.eye(H),",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "an old segment is seen in its chunk",
        STATE_SPACE,
        "sees = sees & (run[:, :, None] == run[:, None])",
        "sees = sees & (run[:, :, None] >= run[:, None])",
        f"{STATE_SPACES} -k numpy[v2-documents]",
    ),
    Fault(
        "decays by a difference of running sums",
        STATE_SPACE,
        'between = jnp.einsum("tu,bkrus->bkrts", until, after, precision=jax.lax.Precision.HIGHEST)',
        "between = (total := jnp.cumsum(a, axis=-1))[..., :, None] - total[..., None, :]",
        f"{STATE_SPACES} -k near_1",
    ),
    Fault(
        "a decay too few from a token to the state",
        STATE_SPACE,
        "wide * leaving[..., None]",
        "wide",
        f"{STATE_SPACES} -k numpy[v2-documents]",
    ),
    Fault(
        "doubling forgets the decay",
        STATE_SPACE,
        "states += decay * jnp.pad(",
        "states += jnp.pad(",
        f"{STATE_SPACES} -k numpy[v1-documents]",
    ),
    Fault(
        "a window holds another segment",
        STATE_SPACE,
        "before = jnp.where(same[..., None], before, 0)",
        "pass",
        f"{STATE_SPACES} -k numpy[conv-documents]",
    ),
    Fault(
        "a window's map keeps the old inputs",
        "ejdist/sequence/state_space.py",
        "return jnp.full_like(like[0], state.shape[2]), state",
        "return like[0], state",
        f"{STATE_SPACES} -k mesh[conv-documents-sp8]",
    ),
    Fault(
        "cells hand their state on across documents",
        "ejdist/sequence/recurrent.py",
        "return none | (before < 0) | (before == first)",
        "return none | (before == before)",
        f"{CELLS} -k mesh[lstm2-documents-sp2]",
    ),
    Fault(
        "the reset gate before the matmul's bias",
        "kernels/ops/recurrent/contract.py",
        "z, n = sigmoid(xz + hz), act(xn + sigmoid(xr + hr) * hn)",
        "z, n = sigmoid(xz + hz), act(sigmoid(xr + hr) * (xn + hn))",
        f"{CELLS} -k numpy[gru2-packed]",
    ),
    Fault(
        "padding's state has a gradient of its own",
        "kernels/ops/recurrent/xla.py",
        "d_old = _where(now.valid, d_old, d_state)",
        "d_old = d_old",
        f"{CELLS} -k numpy[lstm2-documents]",
    ),
    Fault(
        "sums joined without their exponents",
        "kernels/ops/recurrent/xla.py",
        "    p = p + decay\n    top = jnp.maximum(p, q)",
        "    p = p + decay\n    top = q",
        f"{CELLS} -k no_float",
    ),
    Fault(
        "linear attention: a padded token fades the state",
        "kernels/ops/linear_attention/xla.py",
        "constant = jnp.where(tokens.valid[:, None, :, None], constant, 0)",
        "pass",
        "tests/test_ops.py -k linear_attention-every_decay-float32",
    ),
    Fault(
        "linear attention: a query does not see that a document began",
        "kernels/ops/linear_attention/xla.py",
        "passing * reads_after + new",
        "passing * reads_after",
        "tests/test_ops.py -k linear_attention-rwkv6-float32",
    ),
    Fault(
        "linear attention: rwkv6 reads after its decay",
        "kernels/ops/linear_attention/xla.py",
        "reads_after=bonus is None",
        "reads_after=True",
        "tests/test_ops.py -k linear_attention-rwkv6-float32",
    ),
    Fault(
        "linear attention: differences of sums",
        "kernels/ops/linear_attention/xla.py",
        'return _sums("sj,...jh->...sh", jnp.triu(jnp.ones((C, C)), 1), self.passing)',
        "return self.whole()[..., None, :] - jnp.cumsum(self.passing, axis=-2)",
        "tests/kernels/test_linear_attention.py -k decays_of_every_size",
    ),
    Fault(
        "chunks: a packed sequence begins from the state of the one before",
        "kernels/_core/chunks.py",
        "state = _where(own.begins, initial[rows, jnp.minimum(own.of, chunks.num_states - 1)], state)",
        "",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "chunks: gradients of one packed sequence reach the next",
        "kernels/_core/chunks.py",
        "d_state = _where(own.ends, d_final[rows, jnp.minimum(own.of, G - 1)], d_state)",
        "pass",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "state passing: a document that begins on a rank hears of the one before",
        "ejdist/sequence/state_passing.py",
        "over = _select(whole & goes_on, over,",
        "over = _select(whole | goes_on, over,",
        "tests/test_recurrence.py -k states_pass",
    ),
    Fault(
        "state passing: one hop less",
        "ejdist/sequence/state_passing.py",
        "while by < n - 1:",
        "while by < n // 2:",
        "tests/test_recurrence.py -k states_pass",
    ),
    Fault(
        "a token of a delta rule reads itself",
        "kernels/ops/delta_rule/chunk.py",
        "strictly, until, enters, leaves, passes = t[:, None] > t, t[:, None] >= t, True, True, True",
        "strictly, until, enters, leaves, passes = t[:, None] > t, t[:, None] > t, True, True, True",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a delta rule does not decay what other sub-chunks wrote",
        "kernels/ops/delta_rule/chunk.py",
        "jnp.exp(to_end[..., None, :, :, :] + over[..., :, :, None, :])",
        "jnp.exp(0 * to_end[..., None, :, :, :] + over[..., :, :, None, :])",
        f"{DELTA} -k decays_of_zero_and_one",
    ),
    Fault(
        "RWKV-7 reads after the decay",
        "kernels/ops/delta_rule/chunk.py",
        "a * decay.since_start(before)",
        "a * decay.since_start()",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a state enters a segment that begins inside a chunk",
        "kernels/ops/delta_rule/chunk.py",
        "        same = (run[:, :, None] == run[:, None, :])[:, None]",
        "        run, same = run * 0, (run[:, :, None] == run[:, None, :])[:, None]",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a request without tokens writes its slot",
        "kernels/ops/delta_rule/ragged.py",
        "used & (jnp.diff(cuts) > 0)",
        "used",
        f"{DELTA} -k pool_of_states",
    ),
    Fault(
        "a page of another position",
        PAGED,
        "page = jnp.clip(j // C, 0",
        "page = jnp.clip(j // C - 1, 0",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "unwritten slots reach the output",
        PAGED,
        "jnp.where(there[..., None, None], dequantised(x, scale, dtype), 0)",
        "dequantised(x, scale, dtype)",
        f"{PAGED_TESTS} -k no_output",
    ),
    Fault(
        "parts of a split request not rescaled",
        PAGED,
        "jnp.exp(m - _finite(largest)[local])",
        "jnp.ones_like(m)",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "every block of the table is computed",
        PAGED,
        "        end = jnp.minimum(end, high + 1)\n",
        "        end = jnp.full_like(end, 64)\n",
        f"{PAGED_TESTS} -k in_the_list",
    ),
    Fault(
        "a token without a slot is written to the last one",
        "kernels/ops/paged_attention/cache.py",
        "slots = jnp.where(slots < 0, pages * C, slots)",
        "slots = slots",
        f"{PAGED_TESTS} -k bit_for_bit",
    ),
    Fault(
        "queries at the beginning of the keys",
        PAGED,
        "i = (kv_len - count)[:, None] + row",
        "i = row",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "differential attention adds",
        "kernels/ops/attention_variants/xla.py",
        "wide = first.astype(jnp.float32) - lambda_",
        "wide = first.astype(jnp.float32) + lambda_",
        "tests/test_ops.py -k differential_attention-small-float32",
    ),
    Fault(
        "the second attention has the first one's cotangent",
        "kernels/ops/attention_variants/xla.py",
        "saved.d_out_2.astype(jnp.float32) - weight * d",
        "saved.d_out_2.astype(jnp.float32) + d",
        "tests/test_ops.py -k differential_attention-small-float32",
    ),
    Fault(
        "a performer forgets to rescale its state",
        "kernels/ops/attention_variants/xla.py",
        "weights, old[..., None] * sums)",
        "weights, sums)",
        "tests/test_ops.py -k performer_attention-several_chunks-float32",
    ),
    Fault(
        "slots are not put back",
        "kernels/ops/attention_variants/xla.py",
        "weights, sizes, **options)[back]",
        "weights, sizes, **options)",
        "tests/test_ops.py -k mixture_of_attention_heads-small-float32",
    ),
    Fault(
        "the mean of the keys stays",
        "kernels/ops/attention_variants/contract.py",
        "return wide - jnp.mean(wide, axis=1, keepdims=True)",
        "return wide",
        "tests/kernels/test_attention_variants.py -k test_quantized_attention",
    ),
    Fault(
        "a draft token sees its siblings",
        "kernels/_core/trees.py",
        "reach = above | jnp.eye(T, dtype=bool)",
        "reach = above | (parents[:, :, None] == parents[:, None])",
        "tests/test_trees.py",
    ),
    Fault(
        "a compressed block has the scale of another",
        "ejdist/compression.py",
        "jnp.max(jnp.abs(wide), axis=-1, keepdims=True)",
        "jnp.max(jnp.abs(wide), axis=-2, keepdims=True).swapaxes(-1, -2)[..., : wide.shape[-2], :]",
        "tests/test_compression.py -k error",
    ),
    Fault(
        "grouped matmul: rows of the next group in the gradient of a matrix",
        "kernels/ops/grouped_matmul/xla.py",
        "x, d = _rows(padded, first, size, end), _rows(d_padded, first, size, end)",
        "x, d = _rows(padded, first, size), _rows(d_padded, first, size)",
        GROUPED,
    ),
    Fault(
        "grouped matmul: rows past the last group are not zero",
        "kernels/ops/grouped_matmul/xla.py",
        "return _inside(groups, out, rows)",
        "return out[:rows]",
        GROUPED,
    ),
    Fault(
        "grouped matmul: the last rows of a group left out",
        "kernels/ops/grouped_matmul/xla.py",
        "(size - 1 if size == TILES[-1] else 0)",
        "0",
        GROUPED,
    ),
    Fault(
        "grouped matmul: rows of a device take the sizes of all",
        "ejdist/grouped_matmul.py",
        "jnp.pad(jnp.cumsum(group_sizes), (1, 0)) - first",
        "jnp.pad(jnp.cumsum(group_sizes), (1, 0)) - 0 * first",
        f"{GROUPED} -k mesh",
    ),
    Fault(
        "grouped matmul: every device adds the bias",
        "ejdist/grouped_matmul.py",
        "jnp.where(jax.lax.axis_index(features) == 0, bias, 0)",
        "bias",
        f"{GROUPED} -k mesh",
    ),
    Fault(
        "collective matmul: blocks are put where the rank before them belongs",
        COLLECTIVE,
        "(me - by * hop) % n * block",
        "(me - by * hop - 1) % n * block",
        "tests/test_collective_matmul.py -k numbers",
    ),
    Fault(
        "collective matmul: a sum comes home a rank late",
        COLLECTIVE,
        "(me - by * (hop + 1)) % n * block",
        "(me - by * hop) % n * block",
        "tests/test_collective_matmul.py -k numbers",
    ),
    Fault(
        "collective matmul: all rows are gathered first",
        COLLECTIVE,
        "    n, me, block = lax.axis_size(axis), lax.axis_index(axis), x.shape[-2]\n",
        "    if True:\n        return use(lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True), 0, carry)\n",
        "tests/test_collective_matmul.py -k travel",
    ),
    Fault(
        "quantized matmul: the end of a code in the next word is lost",
        "kernels/ops/quantized_matmul/formats.py",
        "codes = jnp.where(crosses, codes | rest, codes)",
        "pass",
        QUANTIZED,
    ),
    Fault(
        "quantized matmul: ties are rounded up",
        "kernels/ops/quantized_matmul/formats.py",
        "tuple(code % 2 == 1 for code in range(7))",
        "(True,) * 7",
        f"{QUANTIZED} -k ties",
    ),
    Fault(
        "quantized matmul: the codes are chosen for another scale than is kept",
        "kernels/ops/quantized_matmul/formats.py",
        "power = jnp.frexp(largest)[1] - 1 -",
        "power = jnp.frexp(largest)[1] -",
        QUANTIZED,
    ),
    Fault(
        "quantized matmul: all of the weights in one tile",
        "kernels/ops/quantized_matmul/xla.py",
        "TILE = 1 << 20",
        "TILE = 1 << 30",
        QUANTIZED,
    ),
    Fault(
        "docs: links to headings are not followed",
        "docs/__main__.py",
        '"myst_heading_anchors": 4,',
        '"myst_heading_anchors": 0,',
        "tests/test_docs.py -k nowhere",
    ),
    Fault(
        "docs: the functions of a page are forgotten",
        "docs/pages.py",
        "*map(function_section, functions), ",
        "",
        "tests/test_docs.py -k on_a_page",
    ),
    Fault(
        "docs: a sum over a split dim is not said",
        "docs/pages.py",
        "    if op.sum_dims:\n",
        "    if op.sum_dims and not op.weights:\n",
        "tests/test_docs.py -k facts",
    ),
    Fault(
        "the last set block is left out",
        BLOCKS,
        "jax.lax.fori_loop(0, jnp.max(count), nth, (largest",
        "jax.lax.fori_loop(0, jnp.max(count) - 1, nth, (largest",
        OF_BLOCKS + " -k may_be_traced",
    ),
    Fault(
        "a lane without blocks goes on beside others",
        BLOCKS,
        "jnp.where(live & _seen(plan, lane, j)",
        "jnp.where(_seen(plan, lane, j)",
        OF_BLOCKS + " -k may_be_traced",
    ),
    Fault(
        "a head's blocks read another key head",
        BLOCKS,
        "of % heads * tables // heads",
        "of % heads % tables",
        OF_BLOCKS + " -k against_a_loop",
    ),
    Fault(
        "block-sparse cap without its slope",
        BLOCKS,
        "(ds if slope is None else ds * slope)",
        "ds",
        OF_BLOCKS + " -k against_a_loop",
    ),
    Fault(
        "a rank takes the blocks of another's keys",
        LOCAL,
        "[..., holders, :]",
        "[..., self.ranks - 1 - holders, :]",
        OF_BLOCKS + " -k on_a_mesh",
    ),
    Fault(
        "a rank takes the blocks of the first's queries",
        "ejdist/sequence/blocksparse.py",
        "exchange.rank(axis) * rows",
        "exchange.rank(axis) * 0",
        OF_BLOCKS + " -k on_a_mesh",
    ),
    Fault(
        "the mean of a block before its end",
        SELECTED,
        "(keys.ends[:, None] <= at[:, None])",
        "(keys.ends[:, None] <= at[:, None] + 1)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "the means of another document",
        SELECTED,
        "(keys.of_slot[:, None] == start[..., None])",
        "(keys.of_slot[:, None] >= 0)",
        OF_SELECTED + " -k packed",
    ),
    Fault(
        "the query's own block is not always selected",
        "kernels/ops/native_sparse_attention/contract.py",
        "jnp.where(block == own, 4.0,",
        "jnp.where(block == own + 1, 4.0,",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "a block that is named twice counts twice",
        SELECTED,
        "again = found[..., 1:] == found[..., :-1]",
        "again = found[..., 1:] < found[..., :-1]",
        OF_SELECTED + " -k documented",
    ),
    Fault(
        "the sliding branch sees a token more",
        SELECTED,
        "(j > at[:, None] - static.window)",
        "(j >= at[:, None] - static.window)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "the gradient of a mean is not shared out",
        SELECTED,
        "_scattered(of_means, rows, keys.ends < S, S) / block_size",
        "_scattered(of_means, rows, keys.ends < S, S)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "a rank's queries are the first's",
        "ejdist/sequence/native_sparse.py",
        "q_start = first + jax.lax.axis_index(ranks_of) * own",
        "q_start = first + jax.lax.axis_index(ranks_of) * 0",
        OF_SELECTED + " -k on_a_mesh",
    ),
    Fault(
        "a state of zeros is a constant of the program",
        "kernels/_core/chunks.py",
        "jax.lax.optimization_barrier(carry)",
        "carry",
        "tests/kernels/test_linear_attention.py -k one_chunk",
    ),
)


def run(fault: Fault) -> tuple[str, str]:
    """Returns ("red" | "GREEN" | "STALE" | "BROKEN", the first test that failed)."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "outputs", "*.egg-info"))
        source = (copy / fault.file).read_text()
        if fault.old not in source:
            return "STALE", f"{fault.old!r} is not in {fault.file}"
        (copy / fault.file).write_text(source.replace(fault.old, fault.new, 1))
        command = [
            sys.executable,
            "-B",
            "-m",
            "pytest",
            "-n",
            "0",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *fault.tests.split(),
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=environment)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        state = {0: "GREEN", 1: "red"}.get(done.returncode, "BROKEN")
        return state, (failed or done.stdout.splitlines()[-1:] or [""])[0][:110]


def main() -> int:
    words = sys.argv[1:]
    chosen = [f for f in FAULTS if not words or any(w in f.name for w in words)]
    bad = 0
    for fault in chosen:
        start = time.monotonic()
        state, what = run(fault)
        bad += state != "red"
        print(f"{state:6} {fault.name:36} {time.monotonic() - start:4.0f} s  {what}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults turned the tests red")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
