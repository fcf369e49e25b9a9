"""Faults of adapters: their products, what is frozen, and what is written for others."""

from faults import Fault

TESTS = "tests/test_lora.py"
PRODUCT, GRADIENTS, START = (f"{TESTS} -k {word}" for word in ("a_product_is", "chain_rule", "before_the_first"))
MERGED, READ = f"{TESTS} -k as_peft_adds", f"{TESTS} -k dtype_that_it_is_kept"

FAULTS = (
    Fault("alpha / rank is forgotten", "LoRASection.strength", "self.alpha / self.rank", "1.0", GRADIENTS),
    Fault(
        "alpha is not divided by the rank", "LoRASection.strength", "self.alpha / self.rank", "self.alpha", GRADIENTS
    ),
    Fault("a product has no strength", "_adapter", "constrain($$a) * $w.strength", "constrain($$a)", PRODUCT),
    Fault("b is drawn", "declare_adapter", "'zeros'", "'normal'", START),
    Fault(
        "a begins at zero, and nothing would ever move",
        "declare_adapter",
        "Param(($layers, *$taken, $rank), ' '.join(['L', *$d]), std=$std)",
        "Param(($layers, *$taken, $rank), ' '.join(['L', *$d]), 'zeros')",
        START,
    ),
    Fault(
        "an adapter is added to another layer's matrix",
        "merged",
        "$whole + $strength * $added",
        "$whole + $strength * jnp.roll($added, 1, 0)",
        MERGED,
    ),
    Fault("a merged model has no adapters", "merged", "$whole + $strength * $added", "$whole", MERGED),
    Fault("adapters merge without their strength", "merged", "$whole + $strength * $added", "$whole + $added", MERGED),
    Fault(
        "adapters of a run are left out where its parameters are read",
        "Merged._adapted",
        "$leaf == f'params.layers.{$name}' and $name in self.targets",
        "False",
        MERGED,
    ),
    Fault(
        "the base is trained", "_frozen", "jax.lax.stop_gradient($w.values)", "$w.values", f"{TESTS} -k whoever_asks"
    ),
    Fault(
        "the base of a run stays as it was drawn",
        "make_program.take_state",
        "$new | $given['buffers'].get($part, {})",
        "$new",
        READ,
    ),
    Fault(
        "a router's bias moves beside a frozen base",
        "adapted.update",
        "{**$moved[$p], **$kept[$p]}",
        "$moved[$p]",
        f"{TESTS} -k counts_move",
    ),
    Fault("int8 has no scale", "_frozen", "$weight.scale is None", "True", PRODUCT),
    Fault(
        "a scale of int8 is that of the whole matrix",
        "quantised",
        "jnp.max(jnp.abs($x), axis=$axes, keepdims=True)",
        "jnp.max(jnp.abs($x), axis=None, keepdims=True)",
        f"{TESTS} -k own_scale",
    ),
    Fault(
        "int8 is gathered as floats",
        "_frozen",
        "constrain($values, ' '.join($d), $mesh).astype($x.dtype)",
        "constrain($values.astype($x.dtype), ' '.join($d), $mesh)",
        f"{TESTS} -k gathered_as_int8",
    ),
    Fault("experts have adapters that nothing uses", "targets_of", "$p.adapts", "$p.inputs", GRADIENTS),
    Fault("a row of another layer is written for PEFT", "_pair", "$piece.at[0]", "0", MERGED),
    Fault(
        "alpha is written without the rank of a joined tensor",
        "peft:_config",
        "$section.strength * $rank",
        "$section.alpha",
        MERGED,
    ),
    Fault(
        "a module of experts is adapted by PEFT",
        "peft:_names",
        "$module not in $modules and ($name := $module.rpartition('.')[2]) in $last",
        "False",
        f"{TESTS} -k cannot_name",
    ),
    Fault(
        "adapters of random numbers are trained",
        "check_base",
        "$section.rank and $init_from is None",
        "False",
        f"{TESTS} -k nothing_reads",
    ),
    Fault(
        "the backward of a frozen matmul is counted twice", "step_flops", "$p.frozen", "0", f"{TESTS} -k counted_once"
    ),
    Fault(
        "plans count a frozen base in float32",
        "Stored.itemsize",
        "jnp.dtype(self.param.dtype).itemsize",
        "4",
        "tests/test_planning.py -k are_exact",
    ),
)
