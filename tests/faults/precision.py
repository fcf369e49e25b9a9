"""Faults of products in 8 bits."""

from faults import Fault

TESTS = "tests/test_precision.py"

FAULTS = (
    Fault(
        "8 bits: the cotangent of a matrix's gradient has the scales of an activation",
        "_operands_of",
        '{"x": ($how.a, $how.a), "d": ($how.a, $how.b), "w": ($how.b, $how.b)}',
        '{"x": ($how.a, $how.a), "d": ($how.a, $how.a), "w": ($how.b, $how.b)}',
        f"{TESTS} -k own_sum",
    ),
    Fault(
        "8 bits: a matrix has the scales of an activation",
        "_operands_of",
        '{"x": ($how.a, $how.a), "d": ($how.a, $how.b), "w": ($how.b, $how.b)}',
        '{"x": ($how.a, $how.a), "d": ($how.a, $how.b), "w": ($how.a, $how.a)}',
        f"{TESTS} -k own_sum",
    ),
    Fault(
        "8 bits: cotangents have the dtype of activations",
        "_operands_of",
        'PRECISIONS[$precision].gradients if $role == "d" else _FINE',
        "_FINE",
        f"{TESTS} -k own_sum",
    ),
    Fault(
        "8 bits: the gradient of x is of the last of several matrices",
        "precision:_backward",
        "$part if $dx is None else $dx + $part",
        "$part",
        f"{TESTS} -k share",
    ),
    Fault(
        "8 bits: products of one x quantise it for each",
        "project_all",
        "{$narrow[0]: $narrow} if len({_summed($subscripts[$i]) for $i in $narrow}) == 1 else {$i: [$i] for $i in $narrow}",
        "{$i: [$i] for $i in $narrow}",
        f"{TESTS} -k share",
    ),
    Fault(
        "8 bits: what gradients of matrices are products of is quantised again in the backward",
        "precision:_forward",
        "checkpoint_name($y, OPERAND)",
        "$y",
        f"{TESTS} -k policy",
    ),
    Fault(
        "8 bits: parts of a sum that is split are not added up",
        "projection:_narrow",
        "jax.lax.psum($products, $split) if $split else $products",
        "$products",
        f"{TESTS} -k mesh",
    ),
    Fault(
        "8 bits: the gradient of a matrix is of one device's tokens",
        "precision:narrow_products",
        "$x, $matrices = vary_alike(($x, $matrices))",
        "",
        f"{TESTS} -k mesh",
    ),
    Fault(
        "8 bits: an MLP's operation multiplies in bfloat16",
        "MLP.apply",
        "isinstance($matrix, Frozen | Narrow)",
        "isinstance($matrix, Frozen)",
        f"{TESTS} -k same_loss",
    ),
    Fault(
        "8 bits: a policy that keeps products computes them again",
        "precision:narrow_products",
        "checkpoint_name($out, PRODUCT)",
        "$out",
        f"{TESTS} -k policy",
    ),
    Fault(
        "8 bits: named matrices do not stay",
        "narrow_matrices",
        "fnmatch.fnmatch($name, $pattern)",
        "False",
        f"{TESTS} -k stay",
    ),
    Fault(
        "8 bits: matrices of few outputs do not stay",
        "narrow_matrices",
        "min($inputs, math.prod($p.shape) // $inputs) < LEAST",
        "$inputs < LEAST",
        f"{TESTS} -k stay",
    ),
    Fault(
        "8 bits: a pattern of no matrix is passed over",
        "narrow_matrices",
        "not fnmatch.filter($matrices, $pattern)",
        "False",
        f"{TESTS} -k refused",
    ),
    Fault(
        "8 bits: any device has every precision",
        "check_device",
        'if $capability == "9.0" and PRECISIONS[$precision].on_gpus:\n    return',
        "return",
        f"{TESTS} -k device",
    ),
    Fault(
        "8 bits: a run with adapters computes in bfloat16 without a word",
        "lora:build",
        'if $section.rank and ($precision := getattr($model, "precision", BF16)) != BF16:\n    $$body',
        "",
        f"{TESTS} -k frozen",
    ),
)
