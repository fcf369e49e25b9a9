"""Faults of the sharded forms, layouts and placement."""

from faults import Fault

SHARDED = "ejdist/sharded.py"
EXECUTION = "ejdist/execution.py"
EDGES = "tests/test_edges.py"
PLACEMENT = "ejdist/placement.py"
DISPATCH = "kernels/framework/dispatch.py"

FAULTS = (
    Fault(
        "sharded: what was decided for one layout holds for another",
        EXECUTION,
        "checked, current_layout())",
        "checked)",
        "tests/test_execution.py",
    ),
    Fault(
        "sharded: what was decided for one order holds for another",
        EXECUTION,
        "tokens = (order, follows",
        "tokens = (follows",
        "tests/test_execution.py",
    ),
    Fault(
        "sharded: what was decided for arrays of one type holds for others",
        EXECUTION,
        "program_key(), types, mesh",
        "program_key(), mesh",
        "tests/test_execution.py",
    ),
    Fault(
        "sharded: sums over split widths dropped",
        EXECUTION,
        "sums = tuple(a for d in sorted(summed & split.keys()) for a in axes.get(d, ()))",
        "sums = ()",
        f"{EDGES} -k explicit",
    ),
    Fault(
        "sharded: a configuration of another type goes through on a mesh",
        SHARDED,
        "    op.check_asked(platform, cfg)\n",
        "",
        f"{EDGES} -k wrong_call",
    ),
    Fault(
        "a token of no device's vocabulary is a row of zeros",
        "ejdist/embedding.py",
        "jnp.where(known, 0, jnp.nan)[..., None]",
        "0",
        "tests/test_embedding.py -k outside",
    ),
    Fault(
        "a negative token is that from the end",
        "ejdist/embedding.py",
        "wrap_negative_indices=False",
        "wrap_negative_indices=True",
        "tests/test_embedding.py -k outside",
    ),
    Fault(
        "sharded: out_specs are not checked",
        EXECUTION,
        "        check_out_specs(out_specs, wanted, mesh)\n",
        "        pass\n",
        f"{EDGES} -k out_specs",
    ),
    Fault(
        "sharded: an axis on two dims goes through",
        EXECUTION,
        "    axes = apart(",
        "    apart(",
        f"{EDGES} -k heads_before",
    ),
    Fault(
        "sharded: specs with an axis on two dims go through",
        EXECUTION,
        "said=in_specs is not None or is_explicit(mesh)",
        "said=False",
        f"{EDGES} -k two_dims",
    ),
    Fault(
        "sharded: stray targets of a split vocabulary are no NaN",
        "kernels/ops/cross_entropy/functions.py",
        'vocabulary=call.dims["V"],',
        "vocabulary=1 << 30,",
        f"{EDGES} -k strays",
    ),
    Fault(
        "sharded: a mesh that the layout does not know",
        PLACEMENT,
        "    layout.check(mesh, also=",
        "    dict(mesh=mesh, also=",
        f"{EDGES} -k ones_own",
    ),
    Fault(
        "sharded: heads and the keys that serve them split apart",
        PLACEMENT,
        "    for first, second in op.tied_dims:\n",
        "    for first, second in ():\n",
        "tests/test_sharded.py -k names_what_to_change",
    ),
    Fault(
        "sharded: whole weights are not typed as varying",
        DISPATCH,
        'to="varying") if missing else x',
        'to="varying") if missing and False else x',
        f"{EDGES} -k inside",
    ),
    Fault(
        "sharded: every eager call compiles",
        EXECUTION,
        "            _decided[kind] = program\n",
        "            pass\n",
        f"{EDGES} -k compiles_nothing",
    ),
    Fault(
        "sharded: stored weights are gathered outside",
        EXECUTION,
        "gathered = stored_specs(op, call, axes, mesh, specs) if stored else {}",
        "gathered = {}",
        f"{EDGES} -k scattered",
    ),
    Fault(
        "a layout is of every thread",
        "ejdist/layout.py",
        "        _layout.set(self._before)\n",
        "        pass\n",
        f"{EDGES} -k one_thread",
    ),
    Fault(
        "sharded: the logits of another vocabulary part are counted",
        "ejdist/vocabulary_parallel.py",
        "targets = targets - jax.lax.axis_index(vocabulary) * size",
        "targets = targets % size",
        "tests/test_sharded.py -k fused_cross_entropy-dp2_tp2",
    ),
    Fault(
        "gradients of parameters stay whole",
        "ejdist/layout.py",
        "(constrain(gradient, dims, mesh, layout.parameters),)",
        "(gradient,)",
        "tests/test_mesh_layout.py",
    ),
)
