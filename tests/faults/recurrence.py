"""Faults of what all recurrences share, on one device and on many."""

from faults import Fault

RUNS = "tests/test_recurrence.py -k"

FAULTS = (
    Fault(
        "chunks: a packed sequence begins from the state of the one before",
        "_group.body",
        "$state = $state if $own is None else _where($own.begins, $begun, $state)",
        "",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "chunks: every chunk of a packed sequence has the gradient of its end",
        "backward.body",
        "_where($at[1].ends, _owned($chunks, $d_final, $at[1]), jnp.zeros_like($after))",
        "_owned($chunks, $d_final, $at[1])",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "state passing: a document that begins on a rank hears of the one before",
        "_Edges.of",
        "$goes_on & last_run($ids)[1]",
        "$goes_on | last_run($ids)[1]",
        "tests/test_recurrence.py -k states_pass",
    ),
    Fault(
        "state passing: one hop less",
        "map_scan:_steps",
        "max($ranks - 2, 0)",
        "max($ranks // 2 - 1, 0)",
        "tests/test_recurrence.py -k states_pass",
    ),
    Fault(
        "state passing: the later runs of a zigzag go up too",
        "map_scan:entering",
        "exclusive_scans($passing, $mine, [$way for $way, $_ in $ways], $runs.axis, $hops)",
        "exclusive_scans($passing, $mine, [1 for $way, $_ in $ways], $runs.axis, $hops)",
        f"{RUNS} 'runs_of_ranks and zigzag'",
    ),
    Fault(
        "state passing: a hop less than the ranks that a document spans",
        "needed_hops",
        "$longest >= np.array(_steps($n))",
        "$longest > np.array(_steps($n))",
        "tests/test_recurrence.py -k document_spans",
    ),
    Fault(
        "state passing: every row but the longest decides how many hops",
        "needed_hops",
        "jnp.max($index - jax.lax.cummax($$args, axis=0))",
        "jnp.max(jnp.min($index - jax.lax.cummax($$args, axis=0), axis=2))",
        "tests/test_recurrence.py -k document_spans",
    ),
    Fault(
        "state passing: every place begins from the initial state",
        "entering.place_after",
        "$s = $passing.apply($of_place, $s)",
        "pass",
        f"{RUNS} runs_of_ranks",
    ),
    Fault(
        "state passing: the last rank is left out of a place's map",
        "map_scan:entering",
        "$passing.combine($b, $m)",
        "$b",
        f"{RUNS} runs_of_ranks",
    ),
    Fault(
        "state passing: a sequence ends a run too early",
        "_ends",
        "$here == $runs.parts.size - 1",
        "$here == $runs.parts.size - 2",
        f"{RUNS} 'runs_of_ranks and stripes'",
    ),
    Fault(
        "runs: documents go on in the order of the ranks",
        "Runs.last_id_before",
        "np.argsort($self.parts.ravel())",
        "np.arange($self.parts.size)",
        f"{RUNS} runs_of_ranks",
    ),
    Fault(
        "runs: an exchange sends home what it took there",
        "Runs._one_by_one",
        "[($there, $here) for $here, $there in $pairs]",
        "$pairs",
        "tests/test_runs.py -k exchanged",
    ),
    Fault(
        "runs: parts of all ranks one rank after another",
        "Runs._all_at_once",
        "$x.reshape($x.shape[0], $n, $m // $n, *$x.shape[2:]).swapaxes(1, 2)",
        "$x.reshape($x.shape[0], $m // $n, $n, *$x.shape[2:])",
        "tests/test_runs.py -k exchanged",
    ),
    Fault(
        "runs: a zigzag of two ranks is exchanged as stripes are",
        "Runs._moved",
        "all($way > 0 for $way in $self.ways)",
        "True",
        "tests/test_runs.py -k exchanged",
    ),
    Fault(
        "runs: what sends more is chosen",
        "states_sent",
        "min($both, **$$how)",
        "max($both, **$$how)",
        "tests/test_runs.py -k less",
    ),
    Fault(
        "runs: a recurrence takes an order that each row brings",
        "order_of_call",
        "not ($carried and $follows == 'fixed')",
        "True",
        "tests/test_orders.py -k needs_its_index",
    ),
)
