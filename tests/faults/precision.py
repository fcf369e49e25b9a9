"""Faults of products in 8 bits."""

from faults import Fault

TESTS = "tests/test_precision.py"

FAULTS = (
    Fault(
        "8 bits: the gradient of x is of the matrix as it was quantised for the product",
        "precision:_backward",
        "_times($d, $w, ($how.a, $how.b), ($gradients, _FINE), $how.exponents)",
        "_times($d, $w, ($how.a, (128, 128)), ($gradients, _FINE), $how.exponents)",
        f"{TESTS} -k own_sum",
    ),
    Fault(
        "8 bits: the cotangent of a matrix's gradient has the scales of an activation",
        "precision:_backward",
        "_times($x.T, $d.T, ($how.a, $how.b), (_FINE, $gradients), $how.exponents)",
        "_times($x.T, $d.T, ($how.a, $how.a), (_FINE, $gradients), $how.exponents)",
        f"{TESTS} -k own_sum",
    ),
    Fault(
        "8 bits: cotangents have the dtype of activations",
        "precision:_backward",
        "_times($d, $w, ($how.a, $how.b), ($gradients, _FINE), $how.exponents)",
        "_times($d, $w, ($how.a, $how.b), (_FINE, _FINE), $how.exponents)",
        f"{TESTS} -k own_sum",
    ),
    Fault(
        "8 bits: parts of a sum that is split are not added up",
        "projection:_narrow",
        "jax.lax.psum($product, $split) if $split else $product",
        "$product",
        f"{TESTS} -k mesh",
    ),
    Fault(
        "8 bits: the gradient of a matrix is of one device's tokens",
        "precision:narrow_product",
        "$x, $w = vary_alike(($x, $w))",
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
        "precision:narrow_product",
        "checkpoint_name(_product($rows.reshape(-1, $inputs), $columns.reshape($inputs, -1), $precision), PRODUCT)",
        "_product($rows.reshape(-1, $inputs), $columns.reshape($inputs, -1), $precision)",
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
