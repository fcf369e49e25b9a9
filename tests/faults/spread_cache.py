"""Faults of caches that are spread over devices: what is merged, and which pages and entries a device has."""

from faults import Fault

TESTS = "tests/test_spread_cache.py"
MERGE, TEXTS = f"{TESTS} -k 'spread_pages and not nothing'", f"{TESTS} -k 'texts and attention-2'"

PAGED = "tests/kernels/test_paged_attention_triton.py -k lse"

FAULTS = (
    Fault(
        "paged triton: the lse of tiles of one piece is not written",
        "triton_paged:paged_kernel",
        "store($$before, $out, $log, $part, $lse, O)",
        "store($$before, $out, None, $part, $lse, O)",
        PAGED,
    ),
    Fault(
        "paged triton: the lse of pieces is in units of log 2",
        "paged_merge_kernel",
        "tl.store($log + $row, $lse * LN2, mask=$real & (tl.program_id(1) == 0))",
        "tl.store($log + $row, $lse, mask=$real & (tl.program_id(1) == 0))",
        PAGED,
    ),
    Fault(
        "sinks count once for each device",
        "ejdist/paged_attention:merged",
        "$total + jnp.sum(jnp.exp($sinks - $m[..., None]), axis=-1)",
        "$total + 2 * jnp.sum(jnp.exp($sinks - $m[..., None]), axis=-1)",
        MERGE,
    ),
    Fault(
        "sinks are dropped",
        "ejdist/paged_attention:_OnRank.__call__",
        "merged($out, $lse, $over, $sinks)",
        "merged($out, $lse, $over, None)",
        MERGE,
    ),
    Fault(
        "parts are weighted alike",
        "ejdist/paged_attention:merged",
        "$out.astype(jnp.float32) * $weight[..., None]",
        "$out.astype(jnp.float32)",
        MERGE,
    ),
    Fault(
        "every device has the first keys",
        "ejdist/paged_attention:_OnRank.__call__",
        "$more['kv_lens'] - $rank * $columns * $slots",
        "$more['kv_lens']",
        MERGE,
    ),
    Fault(
        "pages are those of the first device",
        "ejdist/paged_attention:_OnRank.__call__",
        "jax.lax.dynamic_slice_in_dim($$x) - $rank * $pages",
        "jax.lax.dynamic_slice_in_dim($$x)",
        MERGE,
    ),
    Fault(
        "the lse is without its largest logit",
        "ejdist/paged_attention:merged",
        "$largest + jnp.log($total)",
        "jnp.log($total)",
        MERGE,
    ),
    Fault(
        "every device writes in its own pages",
        "ejdist/paged_attention:_append",
        "$slots - jax.lax.axis_index($axes['pages']) * $pages * $entries",
        "$slots % ($pages * $entries)",
        TEXTS,
    ),
    Fault(
        "layers of a later device write into the first one's",
        "generation/served:_of_layer",
        "$n // $each * ($layers - 1) + $row",
        "$row",
        TEXTS,
    ),
    Fault(
        "pages of a request are all on the first device",
        "generation/pages:Pages.take",
        "$free, $kept = self._free[$i // self._run], self._kept[$i // self._run]",
        "$free, $kept = self._free[0], self._kept[0]",
        f"{TESTS} -k come_back",
    ),
    Fault(
        "pages come back to the first device",
        "generation/pages:Pages.release",
        "$rank = $page // self._each",
        "$rank = 0",
        f"{TESTS} -k come_back",
    ),
    Fault(
        "room past a run that is not full",
        "generation/pages:Pages.room",
        "if $there < self._run: break",
        "",
        f"{TESTS} -k come_back",
    ),
)
