"""Faults of the sharded forms, layouts and placement."""

from faults import Fault

EDGES = "tests/test_edges.py"

FAULTS = (
    Fault(
        "sharded: what was decided for one layout holds for another",
        "execution:run",
        "($order, $follows, $checked, current_layout())",
        "($order, $follows, $checked)",
        "tests/test_execution.py",
    ),
    Fault(
        "sharded: what was decided for one order holds for another",
        "execution:run",
        "($order, $follows, $checked, current_layout())",
        "($follows, $checked, current_layout())",
        "tests/test_execution.py",
    ),
    Fault(
        "sharded: what was decided for arrays of one type holds for others",
        "execution:run",
        "($op, $name, $call.program_key(), $types, $mesh, $argument is None)",
        "($op, $name, $call.program_key(), $mesh, $argument is None)",
        "tests/test_execution.py",
    ),
    Fault(
        "sharded: sums over split widths dropped",
        "_decide",
        "tuple(($a for $d in sorted($summed & $split.keys()) for $a in $axes.get($d, ())))",
        "()",
        f"{EDGES} -k explicit",
    ),
    Fault(
        "a token of no device's vocabulary is a row of zeros",
        "_mapped.body",
        "jnp.where($known, 0, jnp.nan)[..., None]",
        "0",
        "tests/test_embedding.py -k outside",
    ),
    Fault(
        "a negative token is that from the end",
        "embedding:_rows",
        "$table.at[$tokens].get(**$$args, wrap_negative_indices=False)",
        "$table.at[$tokens].get(**$$args, wrap_negative_indices=True)",
        "tests/test_embedding.py -k outside",
    ),
    Fault(
        "sharded: out_specs are not checked",
        "_decide",
        "check_out_specs($out_specs, $wanted, $mesh)",
        "pass",
        f"{EDGES} -k out_specs",
    ),
    Fault(
        "sharded: an axis on two dims goes through",
        "_decide",
        "$axes = apart($op, $call, $axes, $mesh, $handles, said=$in_specs is not None or is_explicit($mesh))",
        "apart($op, $call, $axes, $mesh, $handles, said=$in_specs is not None or is_explicit($mesh))",
        f"{EDGES} -k heads_before",
    ),
    Fault(
        "sharded: specs with an axis on two dims go through",
        "_decide",
        "$in_specs is not None or is_explicit($mesh)",
        "False",
        f"{EDGES} -k two_dims",
    ),
    Fault(
        "sharded: stray targets of a split vocabulary are no NaN",
        "fused_token_losses.finish",
        "$call.dims['V']",
        "1 << 30",
        f"{EDGES} -k strays",
    ),
    Fault(
        "sharded: a mesh that the layout does not know",
        "resolve_axes",
        "$layout.check($mesh, also=[$a for $axes in ($table or {}).values() for $a in $axes])",
        "dict(mesh=$mesh, also=[$a for $axes in ($table or {}).values() for $a in $axes])",
        f"{EDGES} -k ones_own",
    ),
    Fault(
        "sharded: heads and the keys that serve them split apart",
        "check_local",
        "$op.tied_dims",
        "()",
        "tests/test_sharded.py -k names_what_to_change",
    ),
    Fault(
        "sharded: whole weights are not typed as varying",
        "vary_alike.cast",
        "jax.lax.pcast($x, tuple(sorted($missing, key=str)), to='varying') if $missing else $x",
        "jax.lax.pcast($x, tuple(sorted($missing, key=str)), to='varying') if $missing and False else $x",
        f"{EDGES} -k inside",
    ),
    Fault(
        "sharded: every eager call compiles",
        "execution:run",
        "_decided[$kind] = $program",
        "pass",
        f"{EDGES} -k compiles_nothing",
    ),
    Fault(
        "sharded: stored weights are gathered outside",
        "_decide",
        "stored_specs($op, $call, $axes, $mesh, $specs) if $stored else {}",
        "{}",
        f"{EDGES} -k scattered",
    ),
    Fault(
        "a layout is of every thread",
        "set_layout.__exit__",
        "_layout.set(self._before)",
        "pass",
        f"{EDGES} -k one_thread",
    ),
    Fault(
        "sharded: the logits of another vocabulary part are counted",
        "of_this_part",
        "$targets - jax.lax.axis_index($vocabulary) * $size",
        "$targets % $size",
        "tests/test_sharded.py -k fused_cross_entropy-dp2_tp2",
    ),
    Fault(
        "gradients of parameters stay whole",
        "layout:gather",
        "constrain($gradient, $dims, $mesh, $layout.parameters)",
        "$gradient",
        "tests/test_mesh_layout.py",
    ),
)
