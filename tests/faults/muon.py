"""Faults of Muon: its matrices, its iteration, its step, how it is dealt over a mesh, and what plans say of it."""

from faults import Fault

TESTS = "tests/test_muon.py"
STEPS, DEALT, PLANS, REFUSED = (f"{TESTS} -k '{k}'" for k in ("of_numpy", "are_dealt", "plans_know", "refused_in"))
MATRICES, SCHULZ, SCALE = "muon:matrices_of", "newton_schulz", "scale_by_muon.update"

FAULTS = (
    Fault("experts are one matrix", "muon:_STACKED", "('L', 'E')", "('L',)", STEPS),
    Fault("layers are one matrix", "muon:_STACKED", "('L', 'E')", "('E',)", STEPS),
    Fault(
        "gate and up are one matrix",
        MATRICES,
        "any($names[$i] != '_' for $i in $columns)",
        "False",
        STEPS,
    ),
    Fault(
        "of several inputs the first has the rows",
        MATRICES,
        "$names[$i] in $param.inputs.split()",
        "$names[$i] == $param.inputs.split()[0]",
        STEPS,
    ),
    Fault("a vector is taken", MATRICES, "not $rows or not $columns", "False", REFUSED),
    Fault("a coefficient is another", "COEFFICIENTS", "2.0315", "2.315", STEPS),
    Fault("one step less", SCHULZ, "range($steps)", "range($steps - 1)", STEPS),
    Fault(
        "the products are of the longer side",
        SCHULZ,
        "$x.shape[-2] > $x.shape[-1]",
        "$x.shape[-2] < $x.shape[-1]",
        f"{TESTS} -k are_dealt",
    ),
    Fault(
        "the norm is of the whole stack",
        SCHULZ,
        "jnp.sum(jnp.square($x.astype(jnp.float32)), axis=(-2, -1), keepdims=True)",
        "jnp.sum(jnp.square($x.astype(jnp.float32)), keepdims=True)",
        STEPS,
    ),
    Fault("a small gradient stays small", SCHULZ, "$norm > 0", "$norm > 1e-8", STEPS),
    Fault("a matrix of zeros becomes NaN", SCHULZ, "jnp.where($norm > 0, $norm, 1.0)", "$norm", STEPS),
    Fault(
        "updates are as large as the shorter side says",
        "muon:orthogonal",
        "math.sqrt(max($rows, $columns))",
        "math.sqrt(min($rows, $columns))",
        STEPS,
    ),
    Fault("the size of updates is fixed", "muon:orthogonal", "$section.rms", "0.2", STEPS),
    Fault("nesterov is always on", SCALE, "$section.nesterov", "True", STEPS),
    Fault("nesterov is never on", SCALE, "$section.nesterov", "False", STEPS),
    Fault(
        "the momentum is not decayed",
        SCALE,
        "$mu[$i] = $section.momentum * $mu[$i] + $leaves[$i]",
        "$mu[$i] = $mu[$i] + $leaves[$i]",
        STEPS,
    ),
    Fault("the moment of AdamW's part is not kept", SCALE, "$small.mu[$k]", "0 * $small.mu[$k]", STEPS),
    Fault(
        "no weight of Muon decays",
        "make_optimizer",
        "optax.add_decayed_weights($s.weight_decay, $$more)",
        "optax.add_decayed_weights(0.0 if $s.name == MUON else $s.weight_decay, $$more)",
        STEPS,
    ),
    Fault("columns change places when they come back", "Matrices.unstacked", "$order.index($i)", "$i", STEPS),
    Fault(
        "both orders of rows and columns are dealt apart",
        "Matrices.turned",
        "($rows, $a) > ($columns, $b)",
        "False",
        DEALT,
    ),
    Fault(
        "pieces come back along the other side",
        "_dealt",
        "(($long, 2), ($short, 1))",
        "(($short, 1), ($long, 2))",
        DEALT,
    ),
    Fault("every replica multiplies the first share", "_dealt", "jax.lax.axis_index($same) * $share", "0", DEALT),
    Fault("replicas multiply all", "dealt_over", "$n > 1 and $$more", "False", DEALT),
    Fault(
        "stacks of a group come back in another order",
        "_dealt",
        "jnp.concatenate($stacks)",
        "jnp.concatenate($stacks[::-1])",
        DEALT,
    ),
    Fault(
        "the second moment of a matrix is kept",
        "scale_by_muon.init",
        "() if $i in $ours else $x.shape",
        "$x.shape",
        f"{TESTS} -k lies_as",
    ),
    Fault("plans count two moments of a matrix", "memory:moment_bytes", "$each // 2 * $taken", "0", PLANS),
    Fault(
        "plans count one step of Newton–Schulz",
        "orthogonal:flops",
        "$s.optimizer.muon.steps * sum($$of)",
        "sum($$of)",
        DEALT,
    ),
    Fault(
        "plans send pieces one way", "orthogonal:traffic", "2 * $held * ($n - 1) // $n", "$held * ($n - 1) // $n", PLANS
    ),
    Fault(
        "plans forget the bytes of Muon", "step_time:traffic", "$sent.add_all(orthogonal.traffic($$of))", "pass", PLANS
    ),
    Fault(
        "Muon's moments go to the host",
        "optimizer:fixed",
        "{'offload': 'none'} if $s.name == MUON else {}",
        "{}",
        REFUSED,
    ),
    Fault(
        "a name that the model has not is dropped",
        "all_matrices",
        "[$name for $name in section.also if $name not in $names]",
        "[]",
        REFUSED,
    ),
    Fault("adapters are AdamW's in silence", "all_matrices", "if not any($$of): $$body", "", REFUSED),
)
