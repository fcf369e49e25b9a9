"""Faults of the dispatch of tokens to experts and back (ejdist/experts)."""

from faults import Fault

ROWS = "ejdist/experts/rows.py"
SCHEMES = "ejdist/experts/schemes.py"
DISPATCH = "ejdist/experts/dispatch.py"
CHOICE = "ejdist/experts/choice.py"
TESTS = "tests/test_experts_dispatch.py"
COSTS = "tests/test_experts_costs.py"
EP = f"{TESTS} -k 'any_route and ep-all_to_all'"
TP = f"{TESTS} -k 'any_route and tp'"

FAULTS = (
    Fault("overflowing rows are lost", "summed.loop", "$state[0] < $passes", "$state[0] < 1", EP),
    Fault(
        "a pass repeats the one before",
        "Rows._over_chunks",
        "$p * $job.chunks",
        "($p - $p % 2) * $job.chunks",
        EP,
    ),
    Fault("rows come back in the order of the experts", "Rows._home", "$window.by.place", "$window.by.source", EP),
    Fault("combine without weights", "Rows.forward.visit", "combined($$args, $weights)", "combined($$args)", EP),
    Fault(
        "gradient of a weight misses the rows",
        "Rows.backward.visit",
        "wide($by.y) * wide($d)",
        "wide($by.y) ** 2",
        EP,
    ),
    Fault("gradient of rows without weights", "Rows.backward.visit", "wide($d) * $weight[:, None]", "wide($d)", EP),
    Fault("places without a pair send a token", "taken", "$pair >= 0", "$pair >= -1", EP),
    Fault("a pair of another pass is combined", "combined.total", "$slot[:, $j] >= 0", "$slot[:, $j] >= -1", EP),
    Fault(
        "a window has rows of the next rank",
        "AllToAll.window",
        "jnp.where($at < $mine[:, None], $plan.order[$there], -1)",
        "$plan.order[$there]",
        f"{TESTS} -k one_device",
    ),
    Fault("sizes of another rank's experts", "AllToAll.window", "$sizes[:, $job.rank]", "$sizes[:, 0]", EP),
    Fault(
        "two levels in the wrong order",
        "TwoLevel.there",
        "lax.all_to_all($x, $inner, 1, 1, tiled=True)",
        "lax.all_to_all($x.swapaxes(0, 1), $inner, 1, 1, tiled=True)",
        f"{TESTS} -k 'any_route and two_level'",
    ),
    Fault(
        "ragged rows come home to where they were sent",
        "RaggedAllToAll.back",
        "_ragged($x, $window.pair.size, $away.T, $sizes.T, $home.T, $job)",
        "_ragged($x, $window.pair.size, $away.T, $sizes.T, $away.T, $job)",
        f"{TESTS} -k 'any_route and ragged'",
    ),
    Fault(
        "experts of gathered tokens are those of rank 0",
        "AllGather._own",
        "$job.rank",
        "0 * $job.rank",
        f"{TESTS} -k 'any_route and all_gather'",
    ),
    Fault(
        "dropped tokens are not counted",
        "exchange",
        "jnp.sum(($experts < $num_experts) & ~$kept)",
        "vary_alike(jnp.int32(0), $experts)",
        f"{TESTS} -k dropped",
    ),
    Fault(
        "every rank has the whole capacity",
        "_within",
        "$limit - $before + jnp.zeros_like($counts)",
        "$limit - 0 * $before + jnp.zeros_like($counts)",
        f"{TESTS} -k dropped",
    ),
    Fault(
        "dropped choices are no choices of an expert",
        "exchange",
        "Stats($$args, $counts)",
        "Stats($$args, expert_counts(experts, num_experts))",
        f"{TESTS} -k dropped",
    ),
    Fault(
        "padding has the last expert",
        "exchange",
        "$experts = jnp.where($$args, $num_experts)",
        "$experts = jnp.where($$args, $num_experts - 1)",
        EP,
    ),
    Fault(
        "gradients of tokens are a part on each device",
        "_settled",
        "lax.psum($d, $parts) if $parts else $d",
        "$d",
        TP,
    ),
    Fault(
        "gathered pairs are those of the first rank",
        "AllGather._own",
        "$order[$source] + $source // $pairs * $pairs",
        "$order[$source]",
        f"{TESTS} -k 'any_route and all_gather'",
    ),
    Fault(
        "a chunk has what another one kept",
        "Rows.backward",
        "lambda _, $i=$i: $kept[$i]",
        "lambda _: $kept[0]",
        EP,
    ),
    Fault("all pullbacks have the first parameter", "_Made.of", "$known[id($leaf)]", "0", EP),
    Fault("rows of an empty expert's place", "block_of", "$starts <= $at[:, None]", "$starts < $at[:, None]", EP),
    Fault("one pass is thought to be enough", "exchange", "$size >= $may", "$size > 0", EP),
    Fault(
        "an order is typed as that of all ranks",
        "rows:plan_of",
        "order_of($experts)",
        "jnp.argsort($experts.reshape(-1), stable=True).astype(jnp.int32)",
        EP,
    ),
    Fault(
        "the order of a device's own experts is typed as that of all ranks",
        "local:local",
        "order_of($own)",
        "jnp.argsort($own, stable=True)",
        f"{TESTS} -k local",
    ),
    Fault("one rank sends to itself", "exchange", "$axis if $ranks > 1 else ()", "$axis", f"{COSTS} -k collective"),
    Fault(
        "ranks of other tokens make fewer passes",
        "_agreed",
        "lax.pmax($rows, tuple(sorted($axes, key=str)))",
        "lax.pmax(lax.pmin($rows, tuple(sorted($axes - {'sp'}))), 'sp')",
        f"{TESTS} -k other_tokens",
    ),
    Fault(
        "no slack is no balance",
        "AllToAll._room",
        "$pairs / $job.ranks",
        "$pairs / $job.ranks - 1",
        f"{TESTS} -k balanced",
    ),
    Fault(
        "a TPU makes the rows of all choices, then adds them",
        "combined",
        "functools.partial($$args, after=lax.optimization_barrier)",
        "functools.partial($$args, after=lambda x: x)",
        f"{COSTS} -m slow -k 'on_a_tpu and 8-0.25-all_gather'",
    ),
    Fault(
        "auto takes the slowest",
        "choose",
        "lambda $name: $seconds[$name]",
        "lambda $name: -$seconds[$name]",
        "tests/test_experts_choice.py",
    ),
    Fault(
        "an expert drops one token more than is said",
        "ejdist/experts/dispatch.py",
        "math.ceil(capacity",
        "math.floor(capacity",
        f"{TESTS} -k no_room_is_dropped",
    ),
)
