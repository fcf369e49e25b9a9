"""Faults of the order of tokens (ejdist/tokens.py), and of sequences that a caller's `shard_map` splits."""

from faults import Fault

TOKENS = "ejdist/tokens.py"
SHARDED = "ejdist/sharded.py"
LOSSES = "ejdist/experts/losses.py"
MASKS = "kernels/engines/attention/masks.py"
ORDERED = "kernels/framework/ordered.py"
ORDER = "tests/test_order.py"
MAPPED = "tests/test_sequence_mapped.py"
INSIDE = "ejdist/mapped.py"
NESTED = "tests/test_nested_maps.py"

FAULTS = (
    Fault(
        "a map inside a map: gradients of what is whole are not summed",
        "ejdist/mapped.py",
        "            return [jax.lax.psum(g, m) if m else g for g, m in zip(gradients, whole, strict=True)]",
        "            return gradients",
        "tests/test_edges.py -k own_shard",
    ),
    Fault(
        "a map inside a map: what is whole is differentiated as it is",
        "ejdist/mapped.py",
        "jax.vjp(apart, alike(some), has_aux=True)",
        "jax.vjp(apart, some, has_aux=True)",
        "tests/test_edges.py -k own_shard",
    ),
    Fault(
        "a recurrence runs on tokens in another order",
        "kernels/ops/linear_attention/contract.py",
        "ordered=True",
        "ordered=False",
        f"{ORDER} -k every_operation_on",
    ),
    Fault(
        "a sequence that is whole in this call is taken for one in its own order",
        TOKENS,
        'for a in split or layout.activations.get("T", ())',
        "for a in split",
        MAPPED + " -k order_inside",
    ),
    Fault(
        "an order that nobody knows the ranks of is taken for one rank's",
        TOKENS,
        "(shards == 1 and not unknown)",
        "shards == 1",
        f"{ORDER} -k over_one_rank",
    ),
    Fault(
        "cuts of a sequence in its own order are taken for those of one in another",
        TOKENS,
        "if prepared.cuts or depends_on_order(op, prepared.call):",
        "if depends_on_order(op, prepared.call):",
        f"{ORDER} -k cuts",
    ),
    Fault(
        "latent attention takes tokens in another order for contiguous ones",
        "ejdist/latent_attention.py",
        'axis_name=axes["T"], order=order,',
        'axis_name=axes["T"], order="contiguous",',
        f"{ORDER} -k latent",
    ),
    Fault(
        "slopes are no positions",
        MASKS,
        'compares = call.arguments.get("alibi_slopes") is not None or ',
        "compares = ",
        f"{ORDER} -k own_distances",
    ),
    Fault(
        "positions of the caller's own are not read",
        MASKS,
        "if mask is None or mask.q_positions is None:",
        "if True:",
        f"{ORDER} -k positions_of_its_own",
    ),
    Fault(
        "an order given to bound operations goes to attention alone",
        "ejdist/operations.py",
        "f.with_stored_weights, order=order, **where",
        "f.with_stored_weights, **where",
        f"{ORDER} -k bound_operations",
    ),
    Fault(
        "what a part of a model calls itself knows no order",
        "ejdist/training/program.py",
        "with set_layout(order=order):",
        'with set_layout(order=Order("contiguous", order.shards)):',
        f"{ORDER} -k layer_that",
    ),
    Fault(
        "two orders, of the argument and of the layout",
        TOKENS,
        "asked != order and ranks > 1",
        "asked != order and ranks < 1",
        f"{ORDER} -k takes_the_order",
    ),
    Fault(
        "an order by itself takes the axes away",
        "ejdist/layout.py",
        "replace(self._before, order=order)",
        "replace(DEFAULT, order=order)",
        f"{ORDER} -k order_of_the_layout",
    ),
    Fault(
        "a rank's part of a sequence is computed as a whole one",
        TOKENS,
        "axes = bound_axes(dims)",
        "axes = bound_axes(())",
        f"{MAPPED} -k no_form",
    ),
    Fault(
        "a mean is over the tokens of one rank",
        SHARDED,
        "prepared = replace(prepared, sums=jax.lax.psum(prepared.sums, axes))",
        "pass",
        f"{MAPPED} -k mean_pooling",
    ),
    Fault(
        "cuts of a whole sequence are taken for those of a rank's part",
        TOKENS,
        "    if prepared.cuts:\n        raise ValueError(",
        "    if False:\n        raise ValueError(",
        f"{MAPPED} -k no_form",
    ),
    Fault(
        "a loss of sequences counts the experts of one rank",
        LOSSES,
        "counts = jax.lax.psum(counts, axis_name) if axis_name else counts",
        "counts = counts",
        f"{MAPPED} -k loss_of_sequences",
    ),
    Fault(
        "a loss of documents reads those of the first rank",
        LOSSES,
        "jax.lax.axis_index(axis) * own, own)",
        "0, own)",
        f"{MAPPED} -k loss_of_sequences",
    ),
    Fault(
        "inside a map over some axes a kernel is left to the partitioner",
        "ejdist/mesh.py",
        "return _left_of(mesh) if mesh.manual_axes else mesh",
        "return None if mesh.manual_axes else mesh",
        f"{NESTED} -k 'tpus or nobody_placed'",
    ),
    Fault(
        "what one map inside another keeps is that of the first shard",
        INSIDE,
        "(out_specs, jax.P(split)))(some, rest)",
        "(out_specs, jax.P(None)))(some, rest)",
        f"{NESTED} -k numbers",
    ),
    Fault(
        "a map inside one that does not track what varies has its own derivative",
        INSIDE,
        "if inside and not varying_axes(",
        "if inside and varying_axes(",
        f"{NESTED} -k outer_map",
    ),
    Fault(
        "integers among the results of an inner map have cotangents",
        INSIDE,
        "if x.dtype != jax.dtypes.float0]",
        "]",
        f"{NESTED} -k 'numbers and moe'",
    ),
    Fault(
        "a rank's rows are not mapped over the axes that its map leaves",
        SHARDED,
        "if current_mesh() is not None:\n        whole",
        "if False:\n        whole",
        f"{NESTED} -k rows_of_a_rank",
    ),
    Fault(
        "constraints of a stage name the whole mesh",
        "ejdist/layout.py",
        "NamedSharding(around, where.spec) if around.manual_axes else where",
        "where",
        f"{NESTED} -k model_in_a_stage",
    ),
)
