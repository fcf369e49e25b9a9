"""Faults of how the optimizer keeps its moments and sums, and of what plans say of it."""

from faults import Fault

TESTS, PLANS, PLANNED = (
    f"tests/{name}.py" for name in ("test_memory_of_optimizer", "test_planned_savings", "test_planning")
)

FAULTS = (
    Fault(
        "rounding is biased upwards",
        "rounding:rounded",
        "$bits & jnp.uint32(0xFFFF)",
        "jnp.uint32(0xFFFF)",
        f"{TESTS} -k right_on_average",
    ),
    Fault(
        "rounding is to the nearest",
        "rounding:rounded",
        "$bits & jnp.uint32(0xFFFF)",
        "jnp.uint32(0x8000)",
        f"{TESTS} -k follow_those",
    ),
    Fault(
        "the random bits are the same at each step",
        "rounding:seed_of",
        "for $count in $counts: $$body",
        "",
        f"{TESTS} -k depend_on_the_name",
    ),
    Fault(
        "each row of a stack has the bits of the first",
        "rounding:random_bits",
        "$row.astype(jnp.uint32)",
        "jnp.uint32(0)",
        f"{TESTS} -k depend_on_the_name",
    ),
    Fault(
        "a moment that is NaN becomes a number",
        "rounding:rounded",
        "jnp.where(jnp.isfinite($x), $cut, $x.astype(jnp.bfloat16))",
        "$cut",
        f"{TESTS} -k can_say",
    ),
    Fault(
        "a layer is updated with the moments of the one before",
        "_by_rows.one",
        "_to_device(row_of($row, $m))",
        "_to_device(row_of(jnp.maximum($row - 1, 0), $m))",
        f"{TESTS} -k same_bits",
    ),
    Fault(
        "moments are written back to the wrong layer",
        "_by_rows.one",
        "write($row, $m, _to_host($new_m))",
        "write(jnp.int32(0), $m, _to_host($new_m))",
        f"{TESTS} -k same_bits",
    ),
    Fault(
        "a layer's gradient is clipped by its own norm",
        "make_train_step.train_step.updated",
        "apply(_mean($grads, $count), $opt_state, $params, norm=$norm, row=$row)",
        "apply(_mean($grads, $count), $opt_state, $params, norm=None, row=$row)",
        f"{TESTS} -k same_bits",
    ),
    Fault(
        "a sum in bfloat16 is rounded to the nearest",
        "step:_plus.one",
        "rounded($both, random_bits(seed_of($name, $step, $microbatch), $both.shape))",
        "$both.astype(jnp.bfloat16)",
        f"{TESTS} -k sum_of_many",
    ),
    Fault(
        "the moments stay on the device",
        "Offload.shardings",
        "self._moved(on_host, $opt_state)",
        "$opt_state",
        f"{TESTS} -k stay_on_the_host",
    ),
    Fault(
        "a plan forgets the bytes of the host",
        "search:Predictor._predicted",
        "self.target.host_bytes($needed.host) > self.target.room_of_host",
        "False",
        f"{PLANS} -k too_small",
    ),
    Fault(
        "moments on the host are counted on the device too",
        "memory:memory",
        "$host.get(MOMENTS, 0)",
        "0",
        f"{PLANNED} -k state_and_batch",
    ),
    Fault(
        "the moments come from the host and never go back",
        "step_time:step_time",
        "2 * $n / (TO_HOST * $chip.to_host)",
        "$n / (TO_HOST * $chip.to_host)",
        f"{PLANS} -k state_goes_to_the_host",
    ),
    Fault(
        "a fault of the compiler is taken for a lack of memory",
        "search:_search",
        "$too_large &= $error.memory",
        "$too_large &= True",
        f"{PLANS} -k come_in_order",
    ),
    Fault(
        "no plan keeps activations on the host unless nothing else fits",
        "search:search",
        "not POLICIES[$first.best.candidate.remat].asked",
        "False",
        f"{PLANS} -k would_run_twice",
    ),
    Fault(
        "attention's output is kept on the host with inputs alone",
        "Remat.kept_on_host",
        "self.asked * self.host",
        "self.host",
        f"{PLANS} -k millions_of_tokens",
    ),
    Fault(
        "the MLP of a long sequence is planned whole",
        "feedforward:MLP.memory",
        "$share.remat.products or $share.frozen",
        "True",
        f"{PLANS} -k millions_of_tokens",
    ),
    Fault(
        "gradients of the head are counted beside the work of any layer",
        "memory:memory",
        "$work > WORK_FIRST * ($head + $early)",
        "False",
        "tests/test_planning.py -k within_a_twentieth",
    ),
    Fault(
        "a ring is planned with zeros where it adds in place",
        "models/attention:_memory",
        "0 if $added else $held.gpu_zeros",
        "$held.gpu_zeros",
        "tests/test_declared_costs.py -k zeros_of_a_ring",
    ),
    Fault(
        "every ring is planned to add in place",
        "models/share:Share.adds_in_place",
        "self.tile is not None and $width <= self.tile and $run % self.tile == 0",
        "True",
        "tests/test_declared_costs.py -k zeros_of_a_ring",
    ),
)
