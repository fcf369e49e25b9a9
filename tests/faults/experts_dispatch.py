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
    Fault("overflowing rows are lost", ROWS, "state[0] < passes", "state[0] < 1", EP),
    Fault("a pass repeats the one before", ROWS, "p * job.chunks + i", "(p - p % 2) * job.chunks + i", EP),
    Fault("rows come back in the order of the experts", ROWS, "x[window.by.place]", "x[window.by.source]", EP),
    Fault("combine without weights", ROWS, "w.slot, weights)", "w.slot)", EP),
    Fault("gradient of a weight misses the rows", ROWS, "wide(by.y) * wide(d)", "wide(by.y) ** 2", EP),
    Fault("gradient of rows without weights", ROWS, "wide(d) * weight[:, None]", "wide(d)", EP),
    Fault("places without a pair send a token", ROWS, "jnp.where((pair >= 0).", "jnp.where((pair >= -1).", EP),
    Fault("a pair of another pass is combined", ROWS, "(slot[:, j] >= 0)[:, None]", "(slot[:, j] >= -1)[:, None]", EP),
    Fault(
        "a window has rows of the next rank",
        SCHEMES,
        "jnp.where(at < mine[:, None], plan.order[there], -1)",
        "plan.order[there]",
        f"{TESTS} -k one_device",
    ),
    Fault("sizes of another rank's experts", SCHEMES, "within(sizes[:, job.rank]", "within(sizes[:, 0]", EP),
    Fault(
        "two levels in the wrong order",
        SCHEMES,
        "x = lax.all_to_all(x, inner, 1, 1, tiled=True)",
        "x = lax.all_to_all(x.swapaxes(0, 1), inner, 1, 1, tiled=True)",
        f"{TESTS} -k 'any_route and two_level'",
    ),
    Fault(
        "ragged rows come home to where they were sent",
        SCHEMES,
        "away.T, sizes.T, home.T",
        "away.T, sizes.T, away.T",
        f"{TESTS} -k 'any_route and ragged'",
    ),
    Fault(
        "experts of gathered tokens are those of rank 0",
        SCHEMES,
        "plan.order.size, job.rank * job.own",
        "plan.order.size, 0 * job.rank * job.own",
        f"{TESTS} -k 'any_route and all_gather'",
    ),
    Fault(
        "dropped tokens are not counted",
        DISPATCH,
        "jnp.sum((experts < num_experts) & ~kept)",
        "vary_alike(jnp.int32(0), experts)",
        f"{TESTS} -k dropped",
    ),
    Fault(
        "every rank has the whole capacity",
        DISPATCH,
        "(limit - before + ",
        "(limit - 0 * before + ",
        f"{TESTS} -k dropped",
    ),
    Fault("dropped choices are no choices of an expert", DISPATCH, "dropped.astype(jnp.int32), counts)",
          "dropped.astype(jnp.int32), expert_counts(experts, num_experts))", f"{TESTS} -k dropped"),
    Fault("padding has the last expert", DISPATCH, "experts < num_experts), experts, num_experts)",
          "experts < num_experts), experts, num_experts - 1)", EP),
    Fault("gradients of tokens are a part on each device", DISPATCH, "lax.psum(d, parts) if parts else d", "d", TP),
    Fault("gathered pairs are those of the first rank", SCHEMES, "order[source] + source // pairs * pairs", "order[source]",
          f"{TESTS} -k 'any_route and all_gather'"),
    Fault("a chunk has what another one kept", ROWS, "lambda _, i=i: kept[i]", "lambda _: kept[0]", EP),
    Fault("all pullbacks have the first parameter", ROWS, "tuple((i, known[id(leaf)])", "tuple((i, 0)", EP),
    Fault("rows of an empty expert's place", ROWS, "jnp.sum(starts <= at", "jnp.sum(starts < at", EP),
    Fault("one pass is thought to be enough", DISPATCH, "all(size >= may", "all(size > 0", EP),
    Fault("an order is typed as that of all ranks", ROWS, "= order_of(experts)",
          "= jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)", EP),
    Fault("the order of a device's own experts is typed as that of all ranks", "ejdist/experts/local.py", "= order_of(own)",
          "= jnp.argsort(own, stable=True)", f"{TESTS} -k local"),
    Fault("one rank sends to itself", DISPATCH, "axis = axis if ranks > 1 else ()", "axis = axis", f"{COSTS} -k collective"),
    Fault("ranks of other tokens make fewer passes", DISPATCH, "lax.pmax(rows, tuple(sorted(axes, key=str)))",
          'lax.pmax(lax.pmin(rows, tuple(sorted(axes - {"sp"}))), "sp")', f"{TESTS} -k other_tokens"),
    Fault("no slack is no balance", SCHEMES, "pairs / job.ranks, pairs)", "pairs / job.ranks - 1, pairs)",
          f"{TESTS} -k balanced"),
    Fault("a TPU makes the rows of all choices, then adds them", ROWS, "after=lax.optimization_barrier", "after=lambda x: x",
          f"{COSTS} -m slow -k 'on_a_tpu and 8-0.25-all_gather'"),
    Fault("auto takes the slowest", CHOICE, "key=lambda name: seconds[name])", "key=lambda name: -seconds[name])",
          "tests/test_experts_choice.py"),
    Fault("an expert drops one token more than is said", "ejdist/experts/dispatch.py", "math.ceil(capacity",
          "math.floor(capacity", f"{TESTS} -k no_room_is_dropped"),
)  # fmt: skip
