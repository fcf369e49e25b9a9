"""Faults of the Pallas kernels of recurrences with one decay per head."""

from faults import Fault

SCAN = "tests/kernels/test_scan_pallas.py"
DECAYS, PADDING, SHARED = (f"{SCAN} -k '{words}'" for words in ("every_size and inf", "what_padding", "16-2-128-4"))
GRID = "tests/test_ops.py -k 'linear_attention-packed-float32-pallas'"
SPACES = "tests/test_ops.py -k 'state_space_v2-documents-float32-pallas'"

FAULTS = (
    Fault(
        "pallas scan: sums of log decays in one part",
        "pallas_linear_parts:fades",
        "jnp.concatenate([$coarse, $a - $coarse], axis=0)",
        "jnp.concatenate([$coarse, $coarse * 0], axis=0)",
        DECAYS,
    ),
    Fault(
        "pallas scan: a token is not in its own output",
        "pallas_linear_parts:between",
        "$reader >= $writer",
        "$reader > $writer",
        DECAYS,
    ),
    Fault(
        "pallas scan: the second head of a pair is the first",
        "pallas_linear_parts:_loaded",
        "$bits << (16 - 16 * $second)",
        "$bits << 16",
        SHARED,
    ),
    Fault(
        "pallas scan: two heads are stored in each other's place",
        "pallas_linear_parts:store_heads",
        "lax.shift_right_logical($low, 16) | $high",
        "lax.shift_right_logical($high, 16) | $low",
        SHARED,
    ),
    Fault(
        "pallas scan: padding is read",
        "pallas_linear_parts:load_head",
        "jnp.where($valid[$last], $x.astype(jnp.float32), 0.0)",
        "$x.astype(jnp.float32)",
        PADDING,
    ),
    Fault(
        "pallas scan: a document does not end what is before it",
        "pallas_linear_calls:Launches.__init__",
        "jnp.where(resets($x.segment_ids)[..., None], FORGETS, $a)",
        "$a",
        PADDING,
    ),
    Fault(
        "pallas scan: what lies beyond a row is read",
        "pallas_linear:_where",
        "$plan.T % $plan.C",
        "False",
        DECAYS,
    ),
    Fault(
        "pallas scan: a sequence goes on from the one before it",
        "pallas_linear:_where",
        "$flags & 1 == 1, $flags & 2 == 2",
        "$flags & 4 == 4, $flags & 2 == 2",
        GRID,
    ),
    Fault(
        "pallas scan: a packed sequence ends in another's state",
        "pallas_linear_calls:Launches.launch",
        "$scalars[1][$b * $chunks + $c]",
        "$scalars[1][$b * $chunks]",
        GRID,
    ),
    Fault(
        "pallas scan: every program of a group reads its first key",
        "pallas_linear:Heads.index",
        "divided(pl.program_id(3), $plan.shared // $plan.heads)[0]",
        "0",
        SHARED,
    ),
    Fault(
        "pallas scan: gradients of a shared key are those of the last program",
        "linear_bwd_kernel",
        "pl.program_id(3) == 0",
        "pl.program_id(3) >= 0",
        f"{SCAN} -m 'slow or not slow' -k 'are_summed and 16-1'",
    ),
    Fault(
        "pallas scan: the gradient of a decay lacks what a state brings through the chunk",
        "linear_bwd_kernel",
        "jnp.where($sums.sublane == $i, $whole * $through, $passed)",
        "$passed",
        "tests/test_ops.py -k 'linear_attention-small-float32-pallas'",
    ),
    Fault(
        "pallas scan: the gradient of a decay lacks pairs of its own token",
        "linear_bwd_kernel",
        "triangle($plan.C, strict=True)",
        "triangle($plan.C)",
        DECAYS,
    ),
    Fault(
        "pallas scan: the state's gradient does not fade",
        "linear_bwd_kernel",
        "$whole * $after + product($q, $last_q, $faded, $last, $last)",
        "$after + product($q, $last_q, $faded, $last, $last)",
        DECAYS,
    ),
    Fault(
        "pallas scan: the gradient of a weight lacks what enters the state",
        "linear_bwd_kernel",
        "$refs['d_w'][0] = $written + $writes",
        "$refs['d_w'][0] = $written",
        SPACES,
    ),
    Fault(
        "pallas scan: the skip is that of another head",
        "pallas_linear:_skip",
        "(pl.program_id(1) * $plan.units + pl.program_id(3)) * $plan.heads + $i",
        "(pl.program_id(1) * $plan.units + pl.program_id(3)) * $plan.heads",
        SPACES,
    ),
    Fault(
        "pallas scan: a backward walks again for states that were kept",
        "pallas_linear_calls:Launches.backward",
        "$saved.get('states')",
        "None",
        "tests/test_kept_arrays.py -k 'walk_once and linear'",
    ),
    Fault(
        "pallas scan: states that are kept are 0",
        "pallas_linear:linear_fwd_kernel",
        "$before.astype($refs['states'].dtype)",
        "(0 * $before).astype($refs['states'].dtype)",
        "tests/kernels/test_scan_pallas.py -k every_size",
    ),
    Fault(
        "pallas scan: states of packed sequences are declared as those of one",
        "pallas_linear_calls:kept",
        "$call.num_states",
        "1",
        "tests/test_ops.py -k 'linear_attention-packed-float32-pallas'",
    ),
    Fault(
        "plans: chunks of a state that is kept are of 128 tokens",
        "recurrent_size:Size.memory",
        "(self.chunk, self.lasting)",
        "(self.chunk, LANES)",
        "tests/test_recurrent_costs.py -k 'count_what and bfloat16'",
    ),
)
