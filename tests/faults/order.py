"""Faults of the order of tokens (ejdist/tokens.py), and of sequences that a caller's `shard_map` splits."""

from faults import Fault

TOKENS = "ejdist/tokens.py"
SHARDED = "ejdist/sharded.py"
LOSSES = "ejdist/experts/losses.py"
ORDERED = "kernels/framework/ordered.py"
ORDER = "tests/test_order.py"
MAPPED = "tests/test_sequence_mapped.py"

FAULTS = (
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
        ORDERED,
        'compares |= call.arguments.get("alibi_slopes") is not None or ',
        "compares |= ",
        f"{ORDER} -k own_distances",
    ),
    Fault(
        "positions of the caller's own are not read",
        ORDERED,
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
        "two orders, of the argument and of the layout",
        TOKENS,
        "found != of_layout and ranks > 1",
        "found != of_layout and ranks < 1",
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
        "return replace(prepared, sums=sums).result(op, outputs)",
        "return prepared.result(op, outputs)",
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
)
