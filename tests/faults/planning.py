"""Faults of plans: what is predicted, what is searched, and what is told."""

from faults import Fault

MEMORY, ACTIVATIONS = "ejdist/planning/memory.py", "ejdist/planning/activations.py"
TIME, SEARCH, PLAN = "ejdist/planning/step_time.py", "ejdist/planning/search.py", "launch/plan.py"
TARGETS, BENCHMARK = "ejdist/planning/targets.py", "benchmarks/plan.py"
TESTS, COMMAND = "tests/test_planning.py", "tests/test_plan.py"

FAULTS = (
    Fault(
        "one moment of the optimizer is counted",
        MEMORY,
        '"optimizer moments": 8 * sum(',
        '"optimizer moments": 4 * sum(',
        f"{TESTS} -k state_and_batch",
    ),
    Fault(
        "a parameter is counted whole on every device",
        MEMORY,
        "local = param.size // math.prod(mesh.shape[a] for a in axes)",
        "local = param.size",
        f"{TESTS} -k state_and_batch",
    ),
    Fault(
        "the sums of microbatches are forgotten",
        MEMORY,
        "if s.accumulation > 1 else 0",
        "if s.accumulation > 2 else 0",
        f"{TESTS} -k microbatches",
    ),
    Fault(
        "attention's output is not kept",
        ACTIVATIONS,
        "lean = out + lse",
        "lean = lse",
        f"{TESTS} -k less_with_more_of_remat",
    ),
    Fault(
        "hosts are joined as fast as the devices of one",
        TIME,
        "if inner * sizes[axis] <= per_host:",
        "if sizes[axis] <= per_host:",
        f"{TESTS} -k slower_between_hosts",
    ),
    Fault(
        "attention's backward takes no time",
        TIME,
        "seen * (3.5 + ",
        "seen * (1.0 + ",
        f"{TESTS} -k measured_steps",
    ),
    Fault(
        "weights are gathered once a step",
        TIME,
        "times = 3 if layers else 2",
        "times = 1",
        f"{TESTS} -k travels_along",
    ),
    Fault(
        "a given remat policy is searched",
        SEARCH,
        "policies = (s.model.remat,) if REMAT in given else POLICIES",
        "policies = POLICIES",
        f"{TESTS} -k never_changed",
    ),
    Fault(
        "a given axis is searched",
        SEARCH,
        "free = [a for a in AXES if a not in given and (a != EP or has_experts)]",
        "free = [a for a in AXES if a != EP or has_experts]",
        f"{TESTS} -k every_mesh",
    ),
    Fault(
        "a plan that does not fit once compiled is taken",
        SEARCH,
        "if made is None or made.peak <= target.chip.memory:",
        "if True:",
        f"{TESTS} -k first_that_compiles",
    ),
    Fault(
        "the slowest plan is first",
        SEARCH,
        "sorted(found, key=lambda p: -p.rate)",
        "sorted(found, key=lambda p: p.rate)",
        f"{TESTS} -k fastest_is_first",
    ),
    Fault(
        "what cannot fit is compiled",
        SEARCH,
        "room = target.chip.memory / (1 + MARGIN)",
        "room = target.chip.memory * 100",
        f"{TESTS} -k nothing_is_expected_to_fit",
    ),
    Fault(
        "what is too large is said to fit",
        PLAN,
        "if not refused and expected <= target.chip.memory else None",
        "if not refused else None",
        f"{COMMAND} -k does_not_fit_says_so",
    ),
    Fault(
        "an estimate is not called one",
        PLAN,
        'self.notes.append(f"nothing was compiled',
        'str(f"nothing was compiled',
        f"{COMMAND} -k are_estimated",
    ),
    Fault(
        "a slice and GPUs are taken together",
        TARGETS,
        "if topology and (devices or device or per_host):",
        "if False:",
        f"{TESTS} -k targets_that_are_refused",
    ),
)
