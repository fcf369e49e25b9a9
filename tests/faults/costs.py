"""Faults of declared costs: what schemes, orders, parts and policies say of themselves, and how they are asked."""

from faults import Fault

TESTS = "tests/test_declared_costs.py"

FAULTS = (
    Fault(
        "what declares no cost is costed as what it inherits from",
        "costs:declared",
        "declares($member) > $behaves",
        "declares($member) > $behaves + 1",
        f"{TESTS} -k without_costs",
    ),
    Fault(
        "gradients of keys do not go home in a plan",
        "Ring.cost",
        "$sent.add($$args, (self._wide($shape) * ($hops - 1) + 1) * $keys, $arrays * $hops)",
        "$sent.add($$args, self._wide($shape) * ($hops - 1) * $keys, $arrays * ($hops - 1))",
        f"{TESTS} -k scheme_sends",
    ),
    Fault(
        "keys that are gathered are there in the backward too",
        "sequence/schemes:AllGather.cost",
        "$shape.forwards + 1",
        "$shape.forwards",
        f"{TESTS} -k scheme_sends",
    ),
    Fault(
        "sums of gradients travel in the compute dtype",
        "sequence/schemes:AllGather.cost",
        "$shape.float32 * $keys",
        "$keys",
        f"{TESTS} -k scheme_sends",
    ),
    Fault(
        "rows of experts do not come back",
        "ByRank.traffic",
        "$sums + 2 * $d",
        "$sums",
        f"{TESTS} -k dispatch_sends",
    ),
    Fault(
        "sums of gathered tokens stay where they are",
        "experts/schemes:AllGather.cost",
        "$sent.add($$args, 2 * $other * $shape.row, 2)",
        "$sent.add($$args, $other, 1)",
        f"{TESTS} -k dispatch_sends",
    ),
    Fault(
        "two levels are planned for one axis",
        "TwoLevel.refusal",
        "'two axes' if len($sizes) < 2 else None",
        "None",
        f"{TESTS} -k does_not_fit_its_axes",
    ),
    Fault(
        "auto gathers the tokens of any number of ranks",
        "choice:_seconds",
        "GATHERED * $shape.rows",
        "GATHERED * $shape.rows * 64",
        "tests/test_experts_choice.py -k twice_the_buffer",
    ),
    Fault(
        "the busiest rank is the mean one",
        "documents:busiest",
        "$pairs.max(-1)",
        "$pairs.mean(-1)",
        f"{TESTS} -k busiest_rank",
    ),
    Fault(
        "an order that declares nothing joins whole parts",
        "Order.in_parts",
        "self.name not in JOINS_PARTS",
        "False",
        f"{TESTS} -k order_without_costs",
    ),
    Fault(
        "orders that do not divide the rows are searched",
        "orders_searched",
        "$length % $o.multiple == 0",
        "True",
        f"{TESTS} -k what_is_searched",
    ),
    Fault(
        "one scheme is searched",
        "ways",
        "$schemes if $split and SCHEME not in $given else (None,)",
        "$schemes[:1] if $split and SCHEME not in $given else (None,)",
        f"{TESTS} -k what_is_searched",
    ),
    Fault(
        "attention that runs again sends no keys",
        "Share.scheme_traffic",
        "1 + (not self.remat.asked)",
        "1",
        f"{TESTS} -k new_scheme",
    ),
    Fault(
        "what waits in the host's memory takes the device's",
        "Remat.kept",
        "0 if self.host else $part.offloaded",
        "$part.offloaded",
        f"{TESTS} -k every_part_declares",
    ),
    Fault(
        "products are kept with what parts ask to keep",
        "Remat.kept",
        "self.products * $part.products",
        "self.asked * $part.products",
        f"{TESTS} -k new_policy",
    ),
    Fault(
        "zeros that a loop starts from take no memory of a GPU",
        "_at_work",
        "max(($p.gpu_zeros for $p in $each))",
        "0",
        f"{TESTS} -k zeros",
    ),
    Fault(
        "a scheme need not say whether its transfers hide",
        "_waits",
        "$candidate.scheme is not None and (not hides(scheme_of($candidate.scheme)))",
        "False",
        f"{TESTS} -k declares_all_of_its_costs",
    ),
    Fault(
        "a part is known by its name in the planner",
        "step_time",
        "Costs($part).recomputed($share.remat)",
        "float($part.name == 'mlp')",
        "tests/test_registries.py -k step_time",
    ),
)
