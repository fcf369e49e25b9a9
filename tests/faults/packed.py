"""Faults of packed weights: what is packed and how it lies, what is multiplied, and what is told of it."""

from faults import Fault

TESTS = "tests/test_packed.py"
TEXTS = f"{TESTS} -k 'texts and int4'"
SLOW = f"{TESTS} -m slow -k 'texts and fsdp'"

FAULTS = (
    Fault(
        "every layer has the packed matrices of the first",
        "packed:packed_rows",
        "$function($stack, $i)",
        "$function($stack, 0)",
        f"{TESTS} -k freed",
    ),
    Fault(
        "a packed stack that is taken over stays",
        "packed:packed_rows",
        "if $donate: $stack.delete()",
        "",
        f"{TESTS} -k freed",
    ),
    Fault(
        "matrices are packed as they are stored, not as the model computes",
        "models/apart:layers_apart.matrices",
        "$dtype or $params[$name].dtype",
        "$params[$name].dtype",
        f"{TESTS} -k freed",
    ),
    Fault(
        "parts of a packed product are not added up",
        "packed:packed_product.on_shard",
        "jax.lax.psum($out, $split) if $split else $out",
        "jax.lax.pmax($out, $split) if $split else $out",
        TEXTS,
    ),
    Fault(
        "a bias of a packed projection is left out",
        "projection:project_all",
        "$product if $bias is None else $product + _of_bias($bias, $weight, $dims, $out, $mesh)",
        "$product if $bias is None or hasattr($weight, 'words') else $product + _of_bias($bias, $weight, $dims, $out, $mesh)",
        TEXTS,
    ),
    Fault(
        "a group crosses to another device",
        "packed:obstacle",
        "$sizes[0] % ($parts * $group)",
        "$sizes[0] % $group",
        f"{TESTS} -k whole_groups",
    ),
    Fault(
        "rates of recurrences are packed",
        "packed:obstacle",
        "min($sizes) < LEAST",
        "min($sizes) < 1",
        f"{TESTS} -k 'texts and hybrid'",
    ),
    Fault(
        "shared experts stay without a word",
        "models/feedforward:Experts.packs",
        "_SHARED if $c.experts.shared_dim else ()",
        "()",
        f"{TESTS} -k 'texts and mixture'",
    ),
    Fault(
        "a shared expert counts without its gate",
        "models/feedforward:Experts._always",
        "$out if $gate is None else gated($out, $h, $gate)",
        "$out",
        f"{TESTS} -k 'texts and mixture'",
    ),
    Fault(
        "what is packed goes through products in 8 bits",
        "models/stack:used",
        "$k in $weights and not isinstance($weights[$k], Packed)",
        "$k in $weights",
        f"{TESTS} -k quantised_again",
    ),
    Fault(
        "the backend that is asked for is left out",
        "packed:packed_product",
        "FORMATS[$weight.form] | {'platform': $platform}",
        "FORMATS[$weight.form]",
        f"{TESTS} -k refused",
    ),
    Fault(
        "a model of which nothing is packed generates",
        "models/packing:packing_of",
        "if not $packed: $$body",
        "",
        f"{TESTS} -k sentence",
    ),
    Fault(
        "shares are of the bytes after packing",
        "models/packing:Packing.lines",
        "sum($names.values()) / self.before",
        "sum($names.values()) / after",
        f"{TESTS} -k whole_groups",
    ),
    Fault(
        "weights of another packing are answers of the same settings",
        "launch/generate:generate",
        "{} if $args.weights is None else {'packed': $args.weights}",
        "{}",
        "tests/test_generate.py -m slow -k texts_of_a_run",
    ),
)
