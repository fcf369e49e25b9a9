"""Faults of multi_latent_attention."""

from faults import Fault

FAULTS = (
    Fault(
        "the scale of latent attention forgets the rotary part",
        "kernels/ops/multi_latent_attention/contract.py",
        "(0 if query_rope is None else query_rope.shape[-1])",
        "0",
        "tests/kernels/test_multi_latent_attention.py -k cuts_under",
    ),
    Fault(
        "the gradient of the latent forgets the values",
        "kernels/ops/multi_latent_attention/composed.py",
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
        "a split cache counts from its own start",
        "ejdist/latent_attention.py",
        "kv_lens - jax.lax.axis_index(over) * own",
        "kv_lens",
        "tests/kernels/test_multi_latent_attention.py -k cache_that_is_split",
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
        "the backward of latent attention is left on XLA",
        "kernels/ops/multi_latent_attention/composed.py",
        "flash_attention.op.backward(residuals, **call.arguments, platform=platform)",
        'flash_attention.op.backward(residuals, **call.arguments, platform="xla")',
        "tests/kernels/test_composed_attention.py -k holds_the_kernels_of_attention_both_ways",
    ),
)
