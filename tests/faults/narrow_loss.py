"""Faults of losses whose output projection is in 8 bits."""

from faults import Fault

TESTS = "tests/test_narrow_loss.py"

FAULTS = (
    Fault(
        "head in 8 bits: cotangents that wait are written over each other",
        "narrow_loss:_walked.block",
        "$i * $n.shape[1]",
        "0 * $i",
        f"{TESTS} -k many_blocks",
    ),
    Fault(
        "head in 8 bits: the matrix learns from the last tokens that wait together",
        "narrow_loss:_walked.some",
        "$total + times($x.turned, $x.turned_scale, $values, $scale, $like, ($D, $V))",
        "0 * $total + times($x.turned, $x.turned_scale, $values, $scale, $like, ($D, $V))",
        f"{TESTS} -k many_blocks",
    ),
    Fault(
        "head in 8 bits: rows of the gradient have scales of several blocks",
        "narrow_loss:sizes",
        "SCALINGS[PRECISIONS[$precision].scaling].a[1] is None",
        "False",
        f"{TESTS} -k many_blocks",
    ),
    Fault(
        "head in 8 bits: what is added to the tokens is a token",
        "narrow_loss:_in_parts",
        "-1 if jnp.issubdtype($x.dtype, jnp.integer) else 0",
        "0",
        f"{TESTS} -k own_sums",
    ),
    Fault(
        "head in 8 bits: cotangents of logits have the scales of an activation both ways",
        "narrow_loss:_walked.block",
        'operands_of($d, $precision, "d")',
        'operands_of($d, $precision, "x")',
        f"{TESTS} -k own_sums",
    ),
    Fault(
        "head in 8 bits: the gradient of the cross entropy alone is that of the total",
        "narrow_loss:_sums_backward",
        "$d_loss is None and $d_z is None",
        "True",
        f"{TESTS} -k each_term",
    ),
    Fault(
        "head in 8 bits: a sum computes its logits again in the backward",
        "narrow_loss:_sums_backward",
        "$d_loss is None and $d_z is None",
        "False",
        f"{TESTS} -k logits_once",
    ),
    Fault(
        "head in 8 bits: the gradient of the total is not scaled",
        "narrow_loss:_sums_backward",
        "(_added($d_total) * $d.astype(jnp.float32)).astype($d.dtype)",
        "$d",
        f"{TESTS} -k without_a_z_loss",
    ),
    Fault(
        "head in 8 bits: losses are of one device's tokens",
        "narrow_loss:_on_mesh.on_shard",
        "jax.lax.psum($out, $tokens) if $summed and $tokens else $out",
        "jax.lax.pmean($out, $tokens) if $summed and $tokens else $out",
        f"{TESTS} -k on_a_mesh",
    ),
    Fault(
        "head in 8 bits: gradients are of one device's tokens",
        "narrow_loss:_on_mesh.run",
        "$x, $matrix, $blocks = vary_alike(($x, $matrix, $blocks), $targets)",
        "",
        f"{TESTS} -k on_a_mesh",
    ),
    Fault(
        "head in 8 bits: the matrix is gathered in its own dtype",
        "narrow_loss:_on_mesh",
        "gathered_blocks($head, $of, $over, $mesh)",
        "None",
        f"{TESTS} -k over_fsdp",
    ),
    Fault(
        "head in 8 bits: the soft cap of logits is dropped",
        "narrow_loss:_of_logits",
        '{"logits_soft_cap": float($how.logits_soft_cap)}',
        "{}",
        f"{TESTS} -k own_sums",
    ),
    Fault(
        "head in 8 bits: the key is dropped",
        "projection_of_losses",
        "Narrow($head, $c.precision) if $c.precision_head else $head",
        "$head",
        f"{TESTS} -k by_choice",
    ),
    Fault(
        "head in 8 bits: a loss of a plugin takes the key and multiplies in 16 bits",
        "Trained.__init__",
        'getattr($sections.model, "precision_head", False)',
        "False",
        f"{TESTS} -k loss_of_your_own",
    ),
    Fault(
        "head in 8 bits: a plan counts its products as those in 16 bits",
        "step_time",
        "$narrow is not None and $c.precision_head",
        "False",
        "tests/test_plan_others.py -k 8_bits",
    ),
    Fault(
        "head in 8 bits: a plan holds logits in 32 bits",
        "memory:memory",
        "$c.precision_head and $trains",
        "False",
        f"{TESTS} -k a_plan",
    ),
)
