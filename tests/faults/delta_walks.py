"""Faults of Hopper's kernels of the walks of a delta rule, and of decays of channels with pairs."""

from faults import Fault

WALKS = "tests/kernels/test_delta_walks_hopper.py -k test_walks"
WHICH = "tests/kernels/test_delta_walks_hopper.py -k which_walks"
CHUNKS = "tests/kernels/test_delta_walks_hopper.py -k test_decays_with_pairs"

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
        "gl.where((gl.load($runs + $token + $t) >= 0)[None, :], $x, gl.zeros_like($x))",
        "$x",
        WALKS,
    ),
    Fault(
        "walks on Hopper: keys of padding are read",
        "gluon_walk:_padding",
        "gl.max(gl.where(gl.load($runs + $token + $t) < 0, 1, 0), axis=0) > 0",
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
        "mbarrier.arrive($free)\n$state *= $whole[None, :]",
        "mbarrier.arrive($free)",
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
        "$back = $du * -$beta[None, :]",
        "$back = -$du",
        WALKS,
    ),
    Fault(
        "walks on Hopper: gradients go from the beginning",
        "gluon_walk_parts:store_results",
        "CHUNKS - 1 - $step if REVERSE else $step",
        "$step",
        WALKS,
    ),
    Fault(
        "walks on Hopper: taken for rows that are split",
        "gluon_walk_calls:fits",
        "$states == 1 and $splits == 1 and $x.q.shape[1] % CHUNK == 0",
        "$states == 1 and $x.q.shape[1] % CHUNK == 0",
        WHICH,
    ),
    Fault(
        "delta rule: kept states are those after chunks",
        "triton_delta:delta_walk_kernel",
        "store_state($states_ptr, $head.to(tl.int64) * CHUNKS + $c, $h, $v, $state, True, H, Hv)",
        "store_state($states_ptr, $head.to(tl.int64) * CHUNKS + CHUNKS - 1 - $c, $h, $v, $state, True, H, Hv)",
        "tests/kernels/test_delta_triton.py -k both_ways_at_once",
    ),
    Fault(
        "decays with pairs: log decays in one part of three",
        "gluon_channel_chunks:_sums",
        "gl.static_range($count)",
        "gl.static_range(1)",
        CHUNKS,
    ),
    Fault(
        "decays with pairs: a write fades by its own decay",
        "gluon_channel_chunks:channel_chunks_hopper_kernel",
        "gl.where(again($row)[:, None] < $u[None, :], 1.0, 0.0)",
        "gl.where(again($row)[:, None] <= $u[None, :], 1.0, 0.0)",
        CHUNKS,
    ),
    Fault(
        "decays with pairs: a level's read lacks its own decay",
        "gluon_channel_chunks:_factors",
        "$t[:, None] >= $u[None, :]",
        "$t[:, None] > $u[None, :]",
        CHUNKS,
    ),
    Fault(
        "decays with pairs: log decays of padding are read",
        "gluon_channel_chunks:_kept",
        "gl.where((gl.load($runs + $t) >= 0)[:, None], $a, 0.0)",
        "$a",
        CHUNKS,
    ),
    Fault(
        "decays with pairs: an old document leaves its chunk",
        "gluon_channel_chunks:channel_chunks_hopper_kernel",
        "$leaving = gl.where(($run == $last)[:, None], $leaving, 0.0)\n$whole = gl.where($before == $last, $whole, 0.0)",
        "$whole = gl.where($before == $last, $whole, 0.0)",
        CHUNKS,
    ),
)
