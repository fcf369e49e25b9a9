"""Faults of Hopper's kernel of the walks of linear attention with one decay a head."""

from faults import Fault

FILE = "tests/kernels/test_scalar_hopper.py"
WALKS = f"{FILE} -k test_walks"

FAULTS = (
    Fault(
        "linear attention on Hopper: tiles are loaded while they are read",
        "gluon_scalar:_load",
        "if $r is not None:\n    mbarrier.wait($of[2].index($slot), $phase ^ 1)\n    $$load",
        "if $r is not None:\n    $$load",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: weights of pairs are read before a fence",
        "gluon_scalar:_serve",
        "fence_async_shared()",
        "",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: weights are computed into a tile that is read",
        "gluon_scalar:_serve",
        "mbarrier.wait($free.index($now), $round ^ 1)",
        "",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: tokens read what is written after them",
        "gluon_scalar:_weights",
        "$rows[:, None] >= $columns[None, :]",
        "$rows[:, None] >= 0 * $columns[None, :]",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: gradients read what is written before them",
        "gluon_scalar:_weights",
        "$rows[:, None] <= $columns[None, :]",
        "$rows[:, None] * 0 <= $columns[None, :]",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: values of padding are read",
        "kernels/engines/scan/gluon_scalar.py",
        "_clean(values, runs, ROWS_OF_TWO)",
        "pass",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: keys of padding are read",
        "gluon_scalar:_clean",
        "gl.max(gl.where($runs < 0, 1, 0), axis=0) > 0",
        "False",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: the state does not fade",
        "kernels/engines/scan/gluon_scalar.py",
        "state *= whole",
        "pass",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: a part's map does not fade",
        "kernels/engines/scan/gluon_scalar.py",
        "passing *= whole",
        "pass",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: outputs lack what their chunk writes",
        "gluon_scalar:_walk",
        "product_of($x, $tiles.index($now).permute((1, 0)), $out, True)",
        "product_of($x, $tiles.index($now).permute((1, 0)), $out, False)",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: every part starts from the row's state, too",
        "kernels/engines/scan/gluon_scalar.py",
        "part == opening",
        "part >= 0",
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: states of float32 are not turned back",
        "gluon_scalar_calls:walk",
        'jnp.swapaxes($found["exits"], -1, -2)',
        '$found["exits"]',
        WALKS,
    ),
    Fault(
        "linear attention on Hopper: taken for chunks that are not whole",
        "gluon_scalar_calls:fits",
        "$x.q.shape[1] % CHUNK == 0",
        "True",
        f"{FILE} -k which_calls",
    ),
    Fault(
        "linear attention on Hopper: taken where tokens have weights",
        "gluon_scalar_calls:fits",
        "$x.w is $x.skip is $x.bonus is None",
        "$x.skip is $x.bonus is None",
        f"{FILE} -k which_calls",
    ),
    Fault(
        "linear attention on Hopper: more programs than multiprocessors by default",
        "triton_scalar_calls:on_hopper",
        'MULTIPROCESSORS // ($d["B"] * $d["N"])',
        '2 * MULTIPROCESSORS // ($d["B"] * $d["N"])',
        f"{FILE} -k by_default",
    ),
    Fault(
        "sums of decays: rounded as one number",
        "triton_sums:sums_of",
        "tl.floor($a * 64.0 + 0.5)",
        "tl.floor($a + 0.5)",
        f"{FILE} -k sums_of_decays",
    ),
    Fault(
        "sums of decays: documents are joined",
        "triton_sums:sums_of",
        "tl.cumsum($coarse.to(tl.int32), 0) - 7680 * ($run - $before)",
        "tl.cumsum($coarse.to(tl.int32), 0)",
        f"{FILE} -k sums_of_decays",
    ),
)
