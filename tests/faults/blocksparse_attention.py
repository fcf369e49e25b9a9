"""Faults of blocksparse_attention."""

from faults import Fault

BLOCKS = "kernels/ops/blocksparse_attention/xla.py"
OF_BLOCKS = "tests/kernels/test_blocksparse_attention.py"
LOCAL = "ejdist/sequence/local.py"
LISTS = "kernels/ops/blocksparse_attention/triton_lists.py"
OF_LISTS = "tests/kernels/test_blocksparse_attention_tiles.py -k "
PARTS = "kernels/engines/attention/triton_parts.py"
PASSES = "kernels/engines/attention/gluon_pass_"
ON_TPUS = "tests/kernels/test_blocksparse_attention_pallas.py -k "
ON_HOPPER = "tests/kernels/test_blocksparse_attention_hopper.py -k "

FAULTS = (
    Fault(
        "the last set block is left out",
        "blocksparse_attention/xla:forward.step",
        "jnp.max($count)",
        "jnp.max($count) - 1",
        OF_BLOCKS + " -k may_be_traced",
    ),
    Fault(
        "a lane without blocks goes on beside others",
        "blocksparse_attention/xla:_logits",
        "$live & _seen($plan, $lane, $j)",
        "_seen($plan, $lane, $j)",
        OF_BLOCKS + " -k may_be_traced",
    ),
    Fault(
        "a head's blocks read another key head",
        "_entry",
        "$of % $heads * $tables // $heads",
        "$of % $heads % $tables",
        OF_BLOCKS + " -k against_a_loop",
    ),
    Fault(
        "block-sparse cap without its slope",
        "blocksparse_attention/xla:backward.pull",
        "$ds if $slope is None else $ds * $slope",
        "$ds",
        OF_BLOCKS + " -k against_a_loop",
    ),
    Fault(
        "a rank takes the blocks of another's keys",
        "Local._over",
        "$blocks.reshape(*$blocks.shape[:3], self.ranks, -1)[..., $holders, :]",
        "$blocks.reshape(*$blocks.shape[:3], self.ranks, -1)[..., self.ranks - 1 - $holders, :]",
        OF_BLOCKS + " -k on_a_mesh",
    ),
    Fault(
        "a rank takes the blocks of the first's queries",
        "blocksparse:_OnShard.__call__",
        "exchange.rank($axis) * $rows",
        "exchange.rank($axis) * 0",
        OF_BLOCKS + " -k on_a_mesh",
    ),
    Fault(
        "tiles that a mask is to be looked at for stand where the full ones do",
        LISTS,
        "next_full, next_masked = 0, full",
        "next_full, next_masked = 0, 0",
        OF_LISTS + "test_lists",
    ),
    Fault(
        "the tile with the shortest list comes first",
        LISTS,
        "others[None, :] > length[:, None]",
        "others[None, :] < length[:, None]",
        OF_LISTS + "test_lists",
    ),
    Fault(
        "a tile of which some pair attends is taken as full",
        "blocksparse_attention/tiles:kinds",
        "$whole & $every[:, None]",
        "$whole & some[:, None]",
        OF_LISTS + "test_kinds",
    ),
    Fault(
        "every head has the lists of the first",
        PARTS,
        "((b * O.LIST_BATCH + n * O.LIST_HEAD) * TILES + tile).to(tl.int64)",
        "((b * O.LIST_BATCH + n * 0) * TILES + tile).to(tl.int64)",
        ON_HOPPER + "causal-narrow",
    ),
    Fault(
        "no tile of a list has its mask looked at",
        PARTS,
        "0, 0, tl.load(ends), tl.load(ends + 1)",
        "0, 0, tl.load(ends + 1), tl.load(ends + 1)",
        ON_HOPPER + "causal-narrow",
    ),
    Fault(
        "the order of a group of heads is read as that of one",
        PARTS,
        "row = row // GROUP",
        "row = row + 0",
        ON_HOPPER + "causal-narrow",
    ),
    Fault(
        "places in a list are loaded in place of its tiles",
        "gluon_loads:load_keys",
        "nth($list_ptr, $end - 1 - $i)",
        "$end - 1 - $i",
        ON_HOPPER + "causal-narrow",
    ),
    Fault(
        "keys are multiplied before they are there",
        PASSES + "queries.py",
        "pred=j + 1 < last",
        "pred=False",
        ON_HOPPER + "causal-narrow",
    ),
    Fault(
        "queries are freed before their last product",
        PASSES + "keys.py",
        "dk = warpgroup_mma_wait(1, (dk,))",
        "dk = warpgroup_mma_wait(2, (dk,))",
        ON_HOPPER + "causal-narrow",
    ),
    Fault(
        "gradients of weights less lse, not delta",
        PASSES + "keys.py",
        "row_of(rows, 2 * stage + 1, SHAPE, PAIRS)",
        "row_of(rows, 2 * stage, SHAPE, PAIRS)",
        ON_HOPPER + "causal-narrow",
    ),
    Fault(
        "Pallas: every head goes over the list of the first",
        "pallas_visits:decoded",
        "$row * $visits.heads + $head",
        "$row * $visits.heads",
        ON_TPUS + "do_not_fit",
    ),
    Fault(
        "Pallas: the queries of a group are all those of its first head",
        "pallas_visits:decoded",
        "$n + lax.div($inner, $visits.per_head)",
        "$n",
        ON_TPUS + "lists_are",
    ),
    Fault(
        "Pallas: a tile that meets none is not written",
        "listed_visits",
        "$some | (~$some.any(-1, keepdims=True) & ($other == 0))",
        "$some",
        ON_TPUS + "lists_are",
    ),
    Fault(
        "Pallas: every launch has the lists of the first",
        "pallas_passes:launch.part",
        "$packed[$n]",
        "$packed[0]",
        ON_TPUS + "do_not_fit",
    ),
    Fault(
        "Pallas: block rows of a tile have the bits of its first",
        "_set.of_row",
        "lax.shift_right_logical($bits[$word + $m * $blocks.words], $shift)",
        "lax.shift_right_logical($bits[$word], $shift)",
        ON_TPUS + "do_not_fit",
    ),
    Fault(
        "Pallas: bits that go on in the next integer are lost",
        "pallas_kernels:_set",
        "$split = $plan.block_k % $blocks.size[1] > 0 or 32 % $blocks.inside[1] > 0",
        "$split = False",
        ON_TPUS + "across -m 'slow or not slow'",
    ),
    Fault(
        "Pallas: a tile is full if the mask hides none of it, whatever its blocks are",
        "blocksparse_attention/tiles:kinds",
        "$whole & $every[:, None]",
        "$every[:, None]",
        OF_LISTS + "test_kinds",
    ),
    Fault(
        "Pallas: a tile is hidden unless its first block is set",
        "_of_tiles",
        "[jnp.take($blocks, $at, axis=$dim) for $at in $inside.T]",
        "[jnp.take($blocks, $at, axis=$dim) for $at in $inside.T[:1]]",
        OF_LISTS + "test_kinds",
    ),
)
