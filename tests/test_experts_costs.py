"""What the exchange of tokens costs, read from programs: memory, collectives, what waits for what; compiled for a TPU."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from expert_calls import EP4, Key, Where, compiled, einsum_experts, on_mesh, rows_only, shapes
from jax.sharding import PartitionSpec as P

from ejdist.experts.dispatch import exchange
from ejdist.sharded import map_shards
from kernels._core.ahead_of_time import compile_tpu, tpu_topology


def test_memory_is_that_of_the_buffer():
    """Sizes do not depend on the router, so a program's memory is that of the worst imbalance: then a rank has all rows."""
    M, k, D, n = 256, 4, 128, 8
    where = Where({"ep": n}, "ep", ("ep",))

    def used(buffer):
        run = compiled(Key(*where), n, (("apply", rows_only), ("buffer", buffer), ("scheme", "all_to_all")))
        both = jax.jit(lambda d_out, *layer: run(*layer)[1](d_out))
        args = jax.ShapeDtypeStruct((M * n, D), jnp.float32), *shapes(M * n, k, n, D, 1)
        return both.lower(*args).compile().memory_analysis().temp_size_in_bytes

    # Forward and backward, beside a buffer that takes the worst imbalance in one pass: a rank then has all rows of all ranks.
    assert used(1.25) < used(n) / 4
    assert used(0.25) < used(1.25) / 2


def inside(jaxpr, name):
    """Returns the jaxpr, of those in this one, that has an equation of that name itself."""
    if any(e.primitive.name == name for e in jaxpr.eqns):
        return jaxpr
    subs = (s for e in jaxpr.eqns for s in jax.extend.core.jaxprs_in_params(e.params))
    return next((found for s in subs if (found := inside(getattr(s, "jaxpr", s), name)) is not None), None)


def test_a_chunk_waits_for_no_products_of_another():
    """In a pass of three chunks rows go out before any product, and come back after those of their own chunk alone."""
    layer = shapes(16, 2, 8, 4, 4)
    function = on_mesh(EP4, 8, scheme="all_to_all", chunks=3)
    jaxpr = inside(jax.make_jaxpr(function)(*layer).jaxpr, "all_to_all")
    needs, found, products = {}, [], 0
    for i, e in enumerate(jaxpr.eqns):
        before = frozenset().union(*(needs.get(id(v), frozenset()) for v in e.invars))
        if e.primitive.name == "all_to_all":
            found.append(len(before))
        own = {i} if "dot_general" in str(e) and e.primitive.name != "while" else set()
        products += len(own)
        needs |= {id(v): before | own for v in e.outvars}
    assert sorted(found) == [0, 0, 0, *[products // 3] * 3] and products >= 9


@pytest.mark.parametrize("scheme", ["ragged_all_to_all"])
def test_it_compiles_for_a_tpu(scheme):
    mesh = jax.sharding.Mesh(np.asarray(tpu_topology("v5e:2x4").devices), ("ep",))
    lies = jax.sharding.NamedSharding(mesh, P("ep"))
    layer = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=lies), shapes(1024, 2, 8, 128, 128))

    def body(x, experts, weights, params):
        def loss(x, weights, params):
            out, _ = exchange(x, experts, weights, params, einsum_experts, axis="ep", num_experts=8, scheme=scheme)
            return jnp.sum(out**2)

        return jax.grad(loss, (0, 1, 2))(x, weights, params)

    function = map_shards(body, mesh, (P("ep"),) * 4, (P("ep"),) * 3)
    text = compile_tpu(function, *layer, topology="v5e:2x4").as_text()
    assert scheme.replace("_", "-") in text


def collectives(function, layer):
    """Returns the names in the compiled program of value and gradient, as often as they are there."""

    def loss(x, experts, weights, params):
        return jnp.sum(function(x, experts, weights, params)[0] ** 2)

    text = jax.jit(jax.value_and_grad(loss, (0, 2, 3))).lower(*layer).compile().as_text()
    return re.findall(r" (all-\w+(?:-\w+)?|reduce-scatter|collective-permute|while|conditional)\(", text)


def test_one_rank_has_no_collective_and_no_loop():
    layer = shapes(16, 2, 8, 4, 4)
    assert collectives(on_mesh(Where({"ep": 1}, "ep", ("ep",)), 8, scheme="all_to_all"), layer) == []


@pytest.mark.slow
def test_a_checkpoint_sends_no_sums_again():
    """There, back, and of the gradient d out and weights there, gradients of both back; under a checkpoint x there again."""
    function = on_mesh(EP4, 8, scheme="all_to_all", buffer=4.0)  # room for everything
    layer = shapes(16, 2, 8, 4, 4)
    assert collectives(function, layer).count("all-to-all") == 6
    assert collectives(jax.checkpoint(function), layer).count("all-to-all") == 7
