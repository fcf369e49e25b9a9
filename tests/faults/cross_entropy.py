"""Faults of cross_entropy."""

from faults import Fault

TRITON = "kernels/ops/cross_entropy/triton_gpu.py"
PALLAS = "kernels/ops/cross_entropy/pallas_tpu.py"
TILES = "kernels/engines/rows/vocabulary_pallas.py"
ADAPTERS = "kernels/ops/cross_entropy/adapters.py"
SUMS = "tests/kernels/test_cross_entropy.py -k sums"
FAULTS = (
    Fault(
        "the sums: a gradient of the loss by itself is that of the total",
        ADAPTERS,
        "return of_loss * terms.cross_entropy + of_z * terms.z_loss",
        "return (of_loss + of_z) * (terms.cross_entropy + terms.z_loss)",
        "tests/kernels/test_cross_entropy.py -k every_field",
    ),
    Fault(
        "the sums: without a z_loss only the total has a gradient",
        ADAPTERS,
        "d_total, d_loss, d_z_loss = _added(d_total, d_loss), None, None",
        "d_total, d_loss, d_z_loss = _added(d_total), None, None",
        "tests/kernels/test_cross_entropy.py -k every_field",
    ),
    Fault(
        "the sums on a split vocabulary: reports have no gradient",
        "kernels/ops/cross_entropy/contract.py",
        "return loss + z_loss, loss, z_loss",
        "return loss + z_loss, jax.lax.stop_gradient(loss), z_loss",
        "tests/kernels/test_cross_entropy.py -k every_field",
    ),
    Fault(
        "the loss of a token leaves z_loss out",
        "kernels/ops/cross_entropy/contract.py",
        "TokenLosses(terms.cross_entropy + terms.z_loss, ",
        "TokenLosses(terms.cross_entropy, ",
        "tests/kernels/test_cross_entropy.py -k includes_z_loss",
    ),
    Fault(
        "cross_entropy in Triton: a lane's sum is not rescaled",
        "cross_entropy/triton_gpu:_more",
        "$total * $rescaled + tl.sum(exp_of($x, finite($new)[:, None]), axis=1)",
        "$total + tl.sum(exp_of($x, finite($new)[:, None]), axis=1)",
        "tests/kernels/test_cross_entropy.py -k masked",
    ),
    Fault(
        "cross_entropy in Triton: what is masked out is not a number",
        "cross_entropy/triton_gpu:_more",
        "finite($new)",
        "$new",
        "tests/kernels/test_cross_entropy.py -k masked",
    ),
    Fault(
        "cross_entropy in Triton: the mean is a sum",
        "triton_gpu:cross_entropy_fwd_kernel",
        "tl.sum($plain, axis=0) / $V",
        "tl.sum($plain, axis=0)",
        "tests/test_ops.py -k cross_entropy-small-float32-triton",
    ),
    Fault(
        "cross_entropy in Triton: entries past the vocabulary are capped into the mean",
        "cross_entropy/triton_gpu:_more",
        "$counted = tl.where($cols < $V, $x, 0.0)",
        "$counted = $counted",
        "tests/test_ops.py -k cross_entropy-soft_cap-float32-triton",
    ),
    Fault(
        "cross_entropy in Triton: the cap has no slope",
        "vocabulary_triton:bent",
        "1.0 - $bent * $bent",
        "1.0",
        "tests/test_ops.py -k cross_entropy-soft_cap-float32-triton",
    ),
    Fault(
        "cross_entropy in Pallas: a sum is not rescaled",
        "cross_entropy_fwd_kernel.add",
        "$total[...] * $shrunk",
        "$total[...]",
        "tests/kernels/test_cross_entropy.py -k masked",
    ),
    Fault(
        "cross_entropy in Pallas: what lies past the vocabulary counts",
        "cross_entropy_fwd_kernel.add",
        "$within($x, 0.0)",
        "$x",
        "tests/kernels/test_cross_entropy.py -k masked",
    ),
    Fault(
        "cross_entropy in Pallas: the columns of every tile are those of the first",
        "column",
        "pl.program_id(1) * $shape[1] + jax.lax.broadcasted_iota(jnp.int32, $shape, 1)",
        "jax.lax.broadcasted_iota(jnp.int32, $shape, 1)",
        "tests/kernels/test_cross_entropy.py -k masked",
    ),
    Fault(
        "logits in Pallas: only a tile before the last is cut at the vocabulary's end",
        "tile_by_tile",
        "jnp.where(column($tile) < $V, $x, $other)",
        "$x",
        "tests/kernels/test_cross_entropy.py -k masked",
    ),
    Fault(
        "logits: a row of nothing is no number",
        "shares",
        "jnp.where($lse == -jnp.inf, 0.0, $lse)",
        "$lse",
        "tests/kernels/test_cross_entropy.py -k no_other_row",
    ),
    Fault(
        "logits: a softmax hides that lse is no number",
        "shares",
        "jnp.where($lse == -jnp.inf, 0.0, $lse)",
        "jnp.where(jnp.abs($lse) < jnp.inf, $lse, 0.0)",
        "tests/kernels/test_cross_entropy.py -k no_other_row",
    ),
    Fault(
        "cross_entropy in Triton: what there is of a token is read in the order of the names",
        "cross_entropy/triton_gpu:_pull",
        "[$row[$name] for $name in PER_TOKEN]",
        "[$row[$name] for $name in sorted(PER_TOKEN)]",
        "tests/test_ops.py -k cross_entropy-small-float32-triton",
    ),
    Fault(
        "cross_entropy: targets of the backward are the next token's",
        "cross_entropy/adapters:_per_token",
        "$targets if $name == 'targets' else $saved[$name]",
        "$targets + 1 if $name == 'targets' else $saved[$name]",
        "tests/test_ops.py -k cross_entropy-odd-float32",
    ),
    Fault(
        "cross_entropy: gradients of the sum do not know the weights",
        ADAPTERS,
        'pull_losses(row["weights"])',
        'pull_losses(jnp.ones_like(row["weights"]))',
        SUMS,
    ),
    Fault(
        "cross_entropy: padding counts where another index is ignored",
        ADAPTERS,
        '{"targets": ALSO_IGNORED}',
        '{"targets": -1}',
        SUMS,
    ),
    Fault(
        "cross_entropy: the cotangent of the sum is one",
        "register.backward_sums",
        "{$name: $d_total * $x.astype(jnp.float32) for $name, $x in $gradients.items()}",
        "{$name: $x.astype(jnp.float32) for $name, $x in $gradients.items()}",
        "tests/kernels/test_cross_entropy.py -k float64",
    ),
    Fault(
        "cross_entropy: the gradient of lm_head is that of the last block",
        "gradients_by_block.block",
        "$d_head + dot('td,tv->dv', $hidden[0], $d)",
        "dot('td,tv->dv', $hidden[0], $d)",
        SUMS,
    ),
    Fault(
        "cross_entropy: a sum computes its logits twice on a mesh",
        "vocabulary_parallel:_sums",
        "not $axes['V']",
        "False",
        "tests/kernels/test_cross_entropy.py -k twice",
    ),
    Fault(
        "cross_entropy: targets of another part of the vocabulary are strays of the sum",
        "vocabulary_parallel:_sums",
        "$arguments['lm_head'].shape[-1] * math.prod(map(jax.lax.axis_size, $axes['V']))",
        "$arguments['lm_head'].shape[-1]",
        SUMS,
    ),
    Fault(
        "sharded: sums over leading dims are not added up",
        "summed_dims",
        "{*$op.sum_dims - {'lead'}, *$lead} - {'_'}",
        "set($op.sum_dims)",
        "tests/test_edges.py -k 'explicit and mean'",
    ),
)
