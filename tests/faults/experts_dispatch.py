"""Faults of the dispatch of tokens to experts and back (ejdist/experts)."""

from faults import Fault

ROWS = "ejdist/experts/rows.py"
SCHEMES = "ejdist/experts/schemes.py"
DISPATCH = "ejdist/experts/dispatch.py"
CHOICE = "ejdist/experts/choice.py"
TESTS = "tests/test_experts_dispatch.py"
EP = f"{TESTS} -k 'any_route and ep-all_to_all'"
TP = f"{TESTS} -k 'any_route and tp'"

FAULTS = (
    Fault("overflowing rows are lost", ROWS, "state[0] < passes", "state[0] < 1", EP),
    Fault("a pass repeats the one before", ROWS, "p * job.chunks + i", "(p - p % 2) * job.chunks + i", EP),
    Fault("rows come back in the order of the experts", ROWS, "y[by.inverse]", "y[by.perm]", EP),
    Fault("combine without weights", ROWS, "w.slot, weights)", "w.slot)", EP),
    Fault("gradient of a weight misses the rows", ROWS, "wide(y) * wide(d)", "wide(y) * wide(y)", EP),
    Fault("gradient of rows without weights", ROWS, "wide(d) * weight[:, None]", "wide(d)", EP),
    Fault("places without a pair send a token", ROWS, "jnp.where((pair >= 0).", "jnp.where((pair >= -1).", EP),
    Fault("a pair of another pass is combined", ROWS, "(slot[:, j] >= 0)[:, None]", "(slot[:, j] >= -1)[:, None]", EP),
    Fault(
        "a window has rows of the next rank",
        SCHEMES,
        "jnp.where(at < mine[:, None], plan.order[there], -1)",
        "plan.order[there]",
        EP,
    ),
    Fault("sizes of another rank's experts", SCHEMES, "sizes[:, job.rank], axis=1", "sizes[:, 0], axis=1", EP),
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
        "part = self._gather(job, part) - job.rank * job.own",
        "part = self._gather(job, part)",
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
          "dropped.astype(jnp.int32), count(experts, num_experts))", f"{TESTS} -k dropped"),
    Fault("padding has the last expert", DISPATCH, "experts < num_experts), experts, num_experts)",
          "experts < num_experts), experts, num_experts - 1)", EP),
    Fault("gradients of tokens are a part on each device", DISPATCH, "lax.psum(d, parts) if parts else d", "d", TP),
    Fault("no slack is no balance", SCHEMES, "pairs / job.ranks, pairs)", "pairs / job.ranks - 1, pairs)",
          f"{TESTS} -k balanced"),
    Fault("auto takes the slowest", CHOICE, "key=lambda name: seconds[name])", "key=lambda name: -seconds[name])",
          f"{TESTS} -k auto"),
)  # fmt: skip
