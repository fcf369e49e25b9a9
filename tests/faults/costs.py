"""Faults of declared costs: what schemes, orders, parts and policies say of themselves, and how they are asked."""

from faults import Fault

COSTS, SHARE, REMAT = "ejdist/costs.py", "ejdist/models/share.py", "ejdist/models/remat.py"
SCHEMES, DISPATCHES, ORDER = "ejdist/sequence/schemes.py", "ejdist/experts/schemes.py", "ejdist/order.py"
CANDIDATES, TIME = "ejdist/planning/candidates.py", "ejdist/planning/step_time.py"
TESTS = "tests/test_declared_costs.py"

FAULTS = (
    Fault(
        "what declares no cost is costed as what it inherits from",
        COSTS,
        "if declares(member) > behaves:",
        "if declares(member) > behaves + 1:",
        f"{TESTS} -k without_costs",
    ),
    Fault(
        "gradients of keys do not go home in a plan",
        SCHEMES,
        "shape.float32 * keys * (shape.hops + 1), 2 * (shape.hops + 1))",
        "shape.float32 * keys * shape.hops, 2 * shape.hops)",
        f"{TESTS} -k scheme_sends",
    ),
    Fault(
        "keys that are gathered are there in the backward too",
        SCHEMES,
        "sent, passes = Traffic(), shape.forwards + 1  # the backward gathers",
        "sent, passes = Traffic(), shape.forwards  # the backward gathers",
        f"{TESTS} -k scheme_sends",
    ),
    Fault(
        "sums of gradients travel in the compute dtype",
        SCHEMES,
        "REDUCE_SCATTER, shape.float32 * keys * others, 2)",
        "REDUCE_SCATTER, keys * others, 2)",
        f"{TESTS} -k scheme_sends",
    ),
    Fault(
        "rows of experts do not come back",
        DISPATCHES,
        "sent, times = Traffic(), 4 + shape.again",
        "sent, times = Traffic(), 2 + shape.again",
        f"{TESTS} -k dispatch_sends",
    ),
    Fault(
        "sums of gathered tokens stay where they are",
        DISPATCHES,
        "sent.add(axis, REDUCE_SCATTER, 2 * other, 2)",
        "sent.add(axis, REDUCE_SCATTER, other, 1)",
        f"{TESTS} -k dispatch_sends",
    ),
    Fault(
        "two levels are planned for one axis",
        DISPATCHES,
        'return "two axes" if len(sizes) < 2 else None',
        "return None",
        f"{TESTS} -k does_not_fit_its_axes",
    ),
    Fault(
        "auto gathers the tokens of any number of ranks",
        "ejdist/experts/choice.py",
        "arriving_of(scheme, shape) > GATHERED * shape.rows and name != pinned",
        "arriving_of(scheme, shape) > GATHERED * shape.rows * 64 and name != pinned",
        "tests/test_experts_choice.py -k twice_the_buffer",
    ),
    Fault(
        "the busiest rank is the mean one",
        "ejdist/sequence/schedule.py",
        "pairs.max() / pairs.mean()",
        "pairs.mean() / pairs.mean()",
        f"{TESTS} -k busiest_rank",
    ),
    Fault(
        "an order that declares nothing joins whole parts",
        ORDER,
        "        if self.name not in JOINS_PARTS:\n",
        "        if False:\n",
        f"{TESTS} -k order_without_costs",
    ),
    Fault(
        "orders whose tokens are compared one by one are searched",
        CANDIDATES,
        "if o.in_parts and length",
        "if length",
        f"{TESTS} -k what_is_searched",
    ),
    Fault(
        "one scheme is searched",
        CANDIDATES,
        "SCHEMES if split and SCHEME not in given",
        "[*SCHEMES][:1] if split and SCHEME not in given",
        f"{TESTS} -k what_is_searched",
    ),
    Fault(
        "attention that runs again sends no keys",
        SHARE,
        "forwards=1 + (not self.remat.asked)",
        "forwards=1",
        f"{TESTS} -k third_scheme",
    ),
    Fault(
        "what waits in the host's memory takes the device's",
        REMAT,
        "(0 if self.host else part.offloaded)",
        "part.offloaded",
        f"{TESTS} -k every_part_declares",
    ),
    Fault(
        "products are kept with what parts ask to keep",
        REMAT,
        "self.products * part.products",
        "self.asked * part.products",
        f"{TESTS} -k new_policy",
    ),
    Fault(
        "zeros that a loop starts from take no memory of a GPU",
        "ejdist/planning/memory.py",
        " + max(p.gpu_zeros for p in parts)",
        "",
        f"{TESTS} -k zeros",
    ),
    Fault(
        "a scheme need not say whether its transfers hide",
        "ejdist/planning/search.py",
        "return candidate.scheme is not None and not hides(scheme_of(candidate.scheme))",
        "return False",
        f"{TESTS} -k declares_all_of_its_costs",
    ),
    Fault(
        "a part is known by its name in the planner",
        TIME,
        "Costs(part).recomputed(share.remat)",
        'float(part.name == "mlp")',
        "tests/test_registries.py -k step_time",
    ),
)
