"""Faults of Hopper's one kernel of all gradients of a delta rule's chunks."""

from faults import Fault

DELTA = "tests/kernels/test_delta_hopper.py -k three_kernels"
FITS = "tests/kernels/test_delta_hopper.py -k which_calls"

FAULTS = (
    Fault(
        "delta on Hopper: pairs of keys have the diagonal",
        "gluon_delta:_differentiate",
        "_decays($a_ptr, $at, $runs, $t, $u, $later, $count, $ragged, $which == 1)",
        "_decays($a_ptr, $at, $runs, $t, $u, $later, $count, $ragged, False)",
        DELTA,
    ),
    Fault(
        "delta on Hopper: decays rounded to bfloat16",
        "gluon_delta:_decays",
        "gl.static_range(3)",
        "gl.static_range(1)",
        DELTA,
    ),
    Fault(
        "delta on Hopper: pairs of two documents",
        "gluon_delta:_decays",
        "$seen & (_run($$s)[:, None] == _run($$t)[None, :])",
        "$seen",
        DELTA,
    ),
    Fault(
        "delta on Hopper: what padding holds is read",
        "gluon_delta:_differentiate",
        "gl.max(gl.where(load_tokens($runs, $t, $count, -1, $ragged) < 0, 1, 0), axis=0) > 0",
        "False",
        DELTA,
    ),
    Fault(
        "delta on Hopper: squares are read before a fence",
        "gluon_delta:_differentiate",
        "fence_async_shared()\nmbarrier.arrive($ready)",
        "mbarrier.arrive($ready)",
        DELTA,
    ),
    Fault(
        "delta on Hopper: squares are written while the other warpgroup reads the last",
        "gluon_delta:_differentiate",
        "mbarrier.wait($read, $phase ^ 1)",
        "",
        DELTA,
    ),
    Fault(
        "delta on Hopper: keys are loaded while they are read",
        "gluon_delta:_load",
        "mbarrier.wait($free.index($slot), ($turn // 2 & 1) ^ 1)",
        "",
        DELTA,
    ),
    Fault(
        "delta on Hopper: the gradient of a decay lacks what passes through the state",
        "gluon_delta:_differentiate",
        "store_tokens($da + $which * ($B * $N * $T) + $at, $u, $sums + $through, $count, $ragged)",
        "store_tokens($da + $which * ($B * $N * $T) + $at, $u, $sums, $count, $ragged)",
        DELTA,
    ),
    Fault(
        "delta on Hopper: the gradient of a decay lacks what is written before it",
        "gluon_delta:_differentiate",
        "gl.where($t[:, None] >= $u[None, :], $ends, $writing[:, None])",
        "gl.where($t[:, None] >= $u[None, :], $ends, 0.0)",
        DELTA,
    ),
    Fault(
        "delta on Hopper: keys lack one side of the pairs of keys",
        "gluon_delta:_differentiate",
        "$dk = product_of($second.permute((1, 0)), $k, $dk, True)\n$dq, $dk = warpgroup_mma_wait(0, ($dq, $dk))",
        "$dq, $dk = warpgroup_mma_wait(0, ($dq, $dk))",
        DELTA,
    ),
    Fault(
        "delta on Hopper: the gradient of a rate lacks what the state has for its key",
        "gluon_delta:_differentiate",
        "-$old * $enters",
        "0.0 * $enters",
        DELTA,
    ),
    Fault(
        "delta of channels on Hopper: tiles are loaded while they are read",
        "gluon_channel:_load",
        "mbarrier.wait($free.index($stage), $phase ^ 1)",
        "",
        DELTA,
    ),
    Fault(
        "delta of channels on Hopper: what padding holds is read",
        "gluon_channel:_multiply",
        "gl.max(gl.where(gl.load($$run) < 0, 1, 0), axis=0) > 0",
        "False",
        DELTA,
    ),
    Fault(
        "delta of channels on Hopper: channels pass the state by the sums of others",
        "gluon_channel:_multiply",
        "gl.store($$where, $passed[$i])",
        "gl.store($$where, $passed[0])",
        DELTA,
    ),
    Fault(
        "delta of channels on Hopper: half of the values have no gradient of their own",
        "gluon_tiles:of_values",
        "$row + again($$rows)",
        "again($$rows)",
        DELTA,
    ),
    Fault(
        "delta on Hopper: the default is three kernels",
        "delta_rule/triton_gpu:_tiles",
        "replace($cfg, keeps=True, at_once=$few, in_one=$whole)",
        "replace($cfg, keeps=True, at_once=$few, in_one=False)",
        "tests/kernels/test_delta_triton.py -k what_a_backward",
    ),
    Fault(
        "delta on Hopper: a part of a chunk is taken for a whole one",
        "gluon_delta_calls:fits",
        "$x.q.shape[1] % CHUNK == 0",
        "True",
        FITS,
    ),
    Fault(
        "delta on Hopper: tokens past a chunk are its own",
        "gluon_tiles:clear",
        "load_tokens($runs, $rows, $count, -1, $ragged) >= 0",
        "gl.load($runs + $rows) >= 0",
        "tests/kernels/test_delta_hopper.py -k fewer_tokens",
    ),
    Fault(
        "delta on Hopper: a chunk stores what tokens past it have",
        "gluon_tiles:_store_rows",
        "($rows < $count)[:, None] & ($columns >= 0)[None, :]",
        "($rows >= 0)[:, None] & ($columns >= 0)[None, :]",
        "tests/kernels/test_delta_hopper.py -k fewer_tokens",
    ),
)
