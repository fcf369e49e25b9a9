"""Faults of multi_latent_attention."""

from faults import Fault

HOPPER = "tests/kernels/test_multi_latent_attention_hopper.py"
FAULTS = (
    Fault(
        "Hopper: rotary keys of another head, of which there is one",
        "gluon_loads:load_tile",
        "tma.async_load($rope, [$batch, $row, 0, 0], $$rest)",
        "tma.async_load($rope, [$batch, $row, 1, 0], $$rest)",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "Hopper: rotary queries of the first head",
        "gluon_kernels:_load",
        "tma.async_load($rope, [$b, $rows, $n, 0], $$rest)",
        "tma.async_load($rope, [$b, $rows, 0, 0], $$rest)",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "Hopper: rotary queries in place of the middle columns",
        "gluon_kernels:_load",
        "$i % $tiles == $tiles - 1",
        "$i % $tiles == $tiles - 2",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "Hopper: heads without a rotary part, taken by the kernel with two",
        "splits",
        "$Hr > 0",
        "True",
        f"{HOPPER} -k refused",
    ),
    Fault(
        "Hopper: rotary rows that TMA does not take",
        "splits",
        "$Hr % 8 == 0",
        "True",
        f"{HOPPER} -k refused",
    ),
    Fault(
        "Hopper: a dense mask dropped by the kernel with separate parts",
        "multi_latent_attention/triton_gpu:_rejects",
        "$call.mask is not None and $call.mask.attention_mask is not None",
        "False",
        f"{HOPPER} -k refused",
    ),
    Fault(
        "the scale of latent attention forgets the rotary part",
        "multi_latent_attention/contract:scale_of",
        "0 if $query_rope is None else $query_rope.shape[-1]",
        "0",
        "tests/kernels/test_multi_latent_attention.py -k cuts_under",
    ),
    Fault(
        "the gradient of the latent forgets the values",
        "mla.backward",
        "dot('bskh,rkh->bsr', $dk_up, $w_kc) + dot('bskv,rkv->bsr', $dv, $w_vc)",
        "dot('bskh,rkh->bsr', $dk_up, $w_kc)",
        "tests/test_ops.py -k flash_mla-small",
    ),
    Fault(
        "a page of another request",
        "paged_forward.group.block",
        "$j = $tile['first'] + $n\n$slots = jnp.minimum($j[:, None] * $pages_of_block + $page, $table_width - 1)",
        "$j = $tile['first'] + $n\n"
        "$slots = jnp.minimum($n * $pages_of_block + $page[None], $table_width - 1) + 0 * $j[:, None]",
        "tests/test_ops.py -k multi_latent_ragged_page_attention-ragged",
    ),
    Fault(
        "a tile sees one entry less",
        "paged_forward.group.block",
        "$at[:, None] <= $position[..., None]",
        "$at[:, None] < $position[..., None]",
        "tests/kernels/test_multi_latent_attention.py -k pages_against",
    ),
    Fault(
        "unwritten entries reach a sum",
        "paged_forward.group.block",
        "jnp.where(($at < $length)[..., None], $kv_cache[$ids].reshape(-1, $block_k, $width), 0)",
        "$kv_cache[$ids].reshape(-1, $block_k, $width)",
        "tests/kernels/test_multi_latent_attention.py -k pages_against",
    ),
    Fault(
        "a split cache counts from its own start",
        "latent_attention:_joined",
        "$kv_lens - jax.lax.axis_index($over) * $own",
        "$kv_lens",
        "tests/kernels/test_multi_latent_attention.py -k cache_that_is_split",
    ),
    Fault(
        "the last block of a cache of latents counts some entries twice",
        "_Rows.pairs",
        "($at >= $j * self.block) & ($at < self.length[:, None])",
        "$at < self.length[:, None]",
        "tests/test_ops.py -k mla_decode-several",
    ),
    Fault(
        "decoding's gradient forgets the sum of the weights",
        "backward.block",
        "dot('bqr,bkr->bqk', $d_out, $entries[..., :$R]) - $delta",
        "dot('bqr,bkr->bqk', $d_out, $entries[..., :$R])",
        "tests/test_ops.py -k mla_decode-several",
    ),
    Fault(
        "the window of decoding begins a block late",
        "_Rows.__init__",
        "$seen_first // self.block",
        "$seen_first // self.block + 1",
        "tests/kernels/test_multi_latent_attention.py -k in_sight",
    ),
    Fault(
        "the backward of latent attention is left on XLA",
        "mla.backward",
        "flash_attention.op.backward($$args, **$$args2, platform=$platform)",
        "flash_attention.op.backward($$args, **$$args2, platform='xla')",
        "tests/kernels/test_composed_attention.py -k holds_the_kernels_of_attention_both_ways",
    ),
)
