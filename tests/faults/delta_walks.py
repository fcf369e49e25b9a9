"""Faults of Hopper's kernels of the walks of a delta rule."""

from faults import Fault

WALKS = "tests/kernels/test_delta_walks_hopper.py -k test_walks"
WHICH = "tests/kernels/test_delta_walks_hopper.py -k which_walks"

FAULTS = (
    Fault(
        "walks on Hopper: tiles are loaded while they are read",
        "gluon_walk_parts:_load_keys",
        "mbarrier.wait($free.index($slot), $phase ^ 1)",
        "",
        WALKS,
    ),
    Fault(
        "walks on Hopper: a tile that is stored is not given back",
        "gluon_walk_parts:_store_rows",
        "mbarrier.arrive($free.index($which))",
        "",
        WALKS,
    ),
    Fault(
        "walks on Hopper: values of padding are read",
        "gluon_walk:_valid",
        "gl.where((gl.convert_layout($runs, $layout) >= 0)[None, :], $x, gl.zeros_like($x))",
        "$x",
        WALKS,
    ),
    Fault(
        "walks on Hopper: keys of padding are read",
        "gluon_walk:_padding",
        "gl.max(gl.where($runs < 0, 1, 0), axis=0) > 0",
        "False",
        f"{WALKS} -k head",
    ),
    Fault(
        "walks on Hopper: keys are read before a fence",
        "gluon_walk:_clean",
        "fence_async_shared()",
        "",
        f"{WALKS} -k head",
    ),
    Fault(
        "walks on Hopper: the state fades after the chunk's writes",
        "gluon_walk:_walk",
        "$state *= $fading",
        "",
        f"{WALKS} -k channel",
    ),
    Fault(
        "walks on Hopper: outputs lack what their chunk writes",
        "gluon_walk:_walk",
        "$out = product_of(gl.convert_layout($near, LEFT), $weights.permute((1, 0)), $out, True)",
        "$out = product_of(gl.convert_layout($near, LEFT), $weights.permute((1, 0)), $out, False)",
        WALKS,
    ),
    Fault(
        "walks on Hopper: the gradient of a state passes no rate",
        "gluon_walk:_reverse",
        "gl.convert_layout(-$beta * $enters if not $channels else -$beta, BY_TOKEN)",
        "gl.convert_layout(-$enters if not $channels else $beta * 0.0 - 1.0, BY_TOKEN)",
        WALKS,
    ),
    Fault(
        "walks on Hopper: gradients go from the beginning",
        "gluon_walk_parts:store_results",
        "$count - 1 - $step if REVERSE else $step",
        "$step",
        WALKS,
    ),
    Fault(
        "walks on Hopper: taken for chunks that are not whole",
        "gluon_walk_calls:fits",
        "$states == 1 and $x.q.shape[1] % CHUNK == 0",
        "$states == 1",
        WHICH,
    ),
    Fault(
        "walks on Hopper: every part starts from the row's state, too",
        "gluon_walk:_first_state",
        "gl.where($part == $end, 2 * WIDTH, 0)",
        "2 * WIDTH",
        WALKS,
    ),
    Fault(
        "walks on Hopper: the last part of a row is as long as the others",
        "gluon_walk_parts:place",
        "gl.minimum(PER, CHUNKS - $part * PER)",
        "PER",
        WALKS,
    ),
    Fault(
        "walks on Hopper: the last state of a row is that of its first part",
        "gluon_walk:_walk",
        "if $part == SPLITS - 1:\n    gl.store(_state_at($exits, $head, $column, $h), $state)",
        "if $part == 0:\n    gl.store(_state_at($exits, $head, $column, $h), $state)",
        WALKS,
    ),
    Fault(
        "delta rule: kept states are those after chunks",
        "triton_delta:delta_walk_kernel",
        "store_state($states_ptr, $head.to(tl.int64) * CHUNKS + $c, $h, $v, $state, True, H, Hv)",
        "store_state($states_ptr, $head.to(tl.int64) * CHUNKS + CHUNKS - 1 - $c, $h, $v, $state, True, H, Hv)",
        "tests/kernels/test_delta_triton.py -k both_ways_at_once",
    ),
)
