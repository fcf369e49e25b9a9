"""Faults of the order of tokens (ejdist/tokens.py), and of sequences that a caller's `shard_map` splits."""

from faults import Fault

ORDER = "tests/test_order.py"
MAPPED = "tests/test_sequence_mapped.py"
NESTED = "tests/test_nested_maps.py"

FAULTS = (
    Fault(
        "a map inside a map: gradients of what is whole are not summed",
        "_nested.mapped.summed",
        "[jax.lax.psum($g, $m) if $m else $g for $g, $m in zip($gradients, $whole, strict=True)]",
        "$gradients",
        "tests/test_edges.py -k own_shard",
    ),
    Fault(
        "a map inside a map: what is whole is differentiated as it is",
        "_nested.mapped.forward.body",
        "alike($some)",
        "$some",
        "tests/test_edges.py -k own_shard",
    ),
    Fault(
        "a recurrence runs on tokens in another order",
        "linear_attention/contract:op",
        "Op($$args, **$$before, ordered=True, **$$after)",
        "Op($$args, **$$before, ordered=False, **$$after)",
        f"{ORDER} -k every_operation_on",
    ),
    Fault(
        "a sequence that is whole in this call is taken for one in its own order",
        "order_of_call",
        "$split or $layout.activations.get('T', ())",
        "$split",
        MAPPED + " -k order_inside",
    ),
    Fault(
        "an order that nobody knows the ranks of is taken for one rank's",
        "order_of_call",
        "$shards == 1 and (not $unknown)",
        "$shards == 1",
        f"{ORDER} -k over_one_rank",
    ),
    Fault(
        "cuts of a sequence in its own order are taken for those of one in another",
        "order_of_call",
        "$prepared.cuts or depends_on_order($op, $prepared.call)",
        "depends_on_order($op, $prepared.call)",
        f"{ORDER} -k cuts",
    ),
    Fault(
        "latent attention takes tokens in another order for contiguous ones",
        "_in_a_ring",
        "ring_attention(*$heads, axis_name=$axes['T'], order=$order, softmax_scale=$scale, return_lse=True, "
        "**$options)",
        "ring_attention(*$heads, axis_name=$axes['T'], order='contiguous', softmax_scale=$scale, "
        "return_lse=True, **$options)",
        f"{ORDER} -k latent",
    ),
    Fault(
        "slopes are no positions",
        "by_positions",
        "$call.arguments.get('alibi_slopes') is not None or $call.arguments.get('dropout_prob', 0) > 0",
        "$call.arguments.get('dropout_prob', 0) > 0",
        f"{ORDER} -k own_distances",
    ),
    Fault(
        "positions of the caller's own are not read",
        "by_positions",
        "$mask is None or $mask.q_positions is None",
        "True",
        f"{ORDER} -k positions_of_its_own",
    ),
    Fault(
        "an order given to bound operations goes to attention alone",
        "bind_ops",
        "functools.partial($$args, order=$order, **$$after)",
        "functools.partial($$args, **$$after)",
        f"{ORDER} -k bound_operations",
    ),
    Fault(
        "what a part of a model calls itself knows no order",
        "make_program.loss",
        "set_layout(order=$order)",
        "set_layout(order=Order('contiguous', $order.shards))",
        f"{ORDER} -k layer_that",
    ),
    Fault(
        "two orders, of the argument and of the layout",
        "resolve_order",
        "$ranks > 1",
        "$ranks < 1",
        f"{ORDER} -k takes_the_order",
    ),
    Fault(
        "an order by itself takes the axes away",
        "set_layout.__init__",
        "replace(self._before, **$$args)",
        "replace(DEFAULT, **$$args)",
        f"{ORDER} -k order_of_the_layout",
    ),
    Fault(
        "a rank's part of a sequence is computed as a whole one",
        "axes_of_rank",
        "bound_axes($dims)",
        "bound_axes(())",
        f"{MAPPED} -k no_form",
    ),
    Fault(
        "a mean is over the tokens of one rank",
        "run_on_rank",
        "$prepared = replace($prepared, sums=jax.lax.psum($prepared.sums, $axes))",
        "pass",
        f"{MAPPED} -k mean_pooling",
    ),
    Fault(
        "cuts of a whole sequence are taken for those of a rank's part",
        "axes_of_rank",
        "if $prepared.cuts:\n    $$body",
        "if False:\n    $$body",
        f"{MAPPED} -k no_form",
    ),
    Fault(
        "a loss of sequences counts the experts of one rank",
        "sequence_balance_loss",
        "jax.lax.psum($counts, $axis_name) if $axis_name else $counts",
        "$counts",
        f"{MAPPED} -k loss_of_sequences",
    ),
    Fault(
        "a loss of documents reads those of the first rank",
        "_shares.of_row",
        "jax.lax.axis_index($axis) * $own",
        "0",
        f"{MAPPED} -k loss_of_sequences",
    ),
    Fault(
        "inside a map over some axes a kernel is left to the partitioner",
        "current_mesh",
        "_left_of($mesh)",
        "None",
        f"{NESTED} -k 'tpus or nobody_placed'",
    ),
    Fault(
        "what one map inside another keeps is that of the first shard",
        "_nested.mapped.forward",
        "jax.P($split)",
        "jax.P(None)",
        f"{NESTED} -k numbers",
    ),
    Fault(
        "a map inside one that does not track what varies has its own derivative",
        "map_shards.mapped",
        "not varying_axes(jax.lax.axis_index($around.manual_axes[0]))",
        "varying_axes(jax.lax.axis_index($around.manual_axes[0]))",
        f"{NESTED} -k outer_map",
    ),
    Fault(
        "integers among the results of an inner map have cotangents",
        "_nested.mapped.backward",
        "[($x, $s) for $x, $s in $sent if $x.dtype != jax.dtypes.float0]",
        "[($x, $s) for $x, $s in $sent]",
        f"{NESTED} -k 'numbers and moe'",
    ),
    Fault(
        "a rank's rows are not mapped over the axes that its map leaves",
        "run_on_rank",
        "current_mesh() is not None",
        "False",
        f"{NESTED} -k rows_of_a_rank",
    ),
    Fault(
        "constraints of a stage name the whole mesh",
        "constrain",
        "NamedSharding($around, $where.spec) if $around.manual_axes else $where",
        "$where",
        f"{NESTED} -k model_in_a_stage",
    ),
)
