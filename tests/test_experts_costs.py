"""What the exchange of tokens costs, read from programs: memory, collectives, what waits for what; compiled for a TPU."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from expert_calls import EP4, Where, einsum_experts, on_mesh, rows_only, shapes
from jax.sharding import PartitionSpec as P

from ejdist.experts.dispatch import exchange
from ejdist.mapped import map_shards
from kernels.toolchains.simulate.ahead_of_time import compile_tpu, tpu_topology

# Of value and gradient, beside arguments and results: at most so many arrays [rows, D] of the tokens of all ranks (n M rows),
# of a rank's own choices (M k), and of a pass (buffer M k). dispatch.md says the same.
BOUNDS = {"all_to_all": (0, 0, 9), "two_level": (0, 0, 11), "ragged_all_to_all": (0, 4, 5), "all_gather": (5, 0, 6)}


def memory(scheme, buffer, topology=None, M=256, k=4, D=128):
    """Returns what a program needs on each of eight devices, in arrays [M k, D] of float32."""
    devices = np.asarray(tpu_topology(topology).devices if topology else jax.devices()[:8])
    mesh = jax.sharding.Mesh(devices.reshape(2, 4), ("hosts", "devices"))
    by = P(("hosts", "devices"))

    def body(d_out, x, experts, weights, params):
        def run(x, weights, params):
            where = {"axis": ("hosts", "devices"), "num_experts": 8, "scheme": scheme, "buffer": buffer}
            return exchange(x, experts, weights, params, rows_only, **where)[0]

        return jax.vjp(run, x, weights, params)[1](d_out)

    arguments = jax.ShapeDtypeStruct((8 * M, D), jnp.float32), *shapes(8 * M, k, 8, D, 1)
    lies = jax.sharding.NamedSharding(mesh, by)
    arguments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=lies), arguments)
    function = map_shards(body, mesh, (by,) * 5, (by,) * 3)
    if topology:
        compiled = compile_tpu(function, *arguments, topology=topology)
    else:
        compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (M * k * D * 4)


def check_memory(scheme, buffer, k, **where):
    """Sizes do not depend on the router, so a program's memory is that of the worst imbalance: then a rank has all rows."""
    tokens, choices, one_pass = BOUNDS[scheme]
    used = memory(scheme, buffer, k=k, **where)
    assert used < tokens * 8 / k + choices + one_pass * buffer, used
    return used


@pytest.mark.parametrize(
    "scheme", ["all_to_all", *(pytest.param(s, marks=pytest.mark.slow) for s in ("all_gather", "two_level"))]
)
@pytest.mark.slow
def test_memory_is_that_of_the_buffer(scheme):
    low, balanced = (check_memory(scheme, buffer, 4) for buffer in (0.25, 1.25))
    assert low < balanced / (1.5 if scheme == "all_gather" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", BOUNDS)
@pytest.mark.parametrize(("k", "buffer"), [(8, 0.25), (8, 1.25), (2, 1.25)])
def test_memory_on_a_tpu(scheme, k, buffer):
    """Arrays that are too large for what a core has of its own. Whatever the number of choices, none is made of all at once."""
    check_memory(scheme, buffer, k, topology="v5e:2x4", M=1024, D=2048)


def inside(jaxpr, name, times):
    """Returns the jaxpr, of those in this one, that has so many equations of that name itself."""
    if sum(e.primitive.name == name for e in jaxpr.eqns) == times:
        return jaxpr
    subs = (s for e in jaxpr.eqns for s in jax.extend.core.jaxprs_in_params(e.params))
    return next((found for s in subs if (found := inside(getattr(s, "jaxpr", s), name, times)) is not None), None)


def test_a_chunk_waits_for_no_products_of_another():
    """In a pass of three chunks rows go out before any product, and come back after those of their own chunk alone."""
    layer = shapes(16, 2, 8, 4, 4)
    function = on_mesh(EP4, 8, scheme="all_to_all", chunks=3)
    jaxpr = inside(jax.make_jaxpr(function)(*layer).jaxpr, "all_to_all", 6)
    needs, found, products = {}, [], 0
    for i, e in enumerate(jaxpr.eqns):
        before = frozenset().union(*(needs.get(id(v), frozenset()) for v in e.invars))
        if e.primitive.name == "all_to_all":
            found.append(len(before))
        own = {i} if "dot_general" in str(e) and e.primitive.name != "while" else set()
        products += len(own)
        needs |= {id(v): before | own for v in e.outvars}
    assert sorted(found) == [0, 0, 0, *[products // 3] * 3] and products >= 9


@pytest.mark.slow
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
    function = on_mesh(Where({"ep": 1}, "ep", ("ep",)), 8, scheme="all_to_all")
    assert collectives(function, layer) == []
    assert "all_to_all" not in str(jax.make_jaxpr(function)(*layer))  # nor one that XLA takes out


@pytest.mark.slow
def test_a_checkpoint_sends_no_sums_again():
    """Choices and tokens there, sums back, and of the gradient d out there, gradients of tokens and weights back; under a
    checkpoint the first two there again."""
    function = on_mesh(EP4, 8, scheme="all_to_all", buffer=4.0)  # room for everything
    layer = shapes(16, 2, 8, 4, 4)
    assert collectives(function, layer).count("all-to-all") == 6
    assert collectives(jax.checkpoint(function), layer).count("all-to-all") == 8


@pytest.mark.slow
def test_a_layer_on_one_gpu_makes_no_pass_over_the_rows_of_its_choices():
    """Compiled for an H200: what has as many rows is made by kernels alone, and of the width of tokens it is the results, their
    gradients, and those of the tokens that the first product read by index."""
    import ejdist
    from ejdist.planning.targets import target_of

    target, M, k, D, E, F = target_of(None, 1, "h200", None), 4096, 4, 1024, 16, 256
    where = jax.sharding.SingleDeviceSharding(target.devices()[0])
    shapes_of = {"x": (1, M, D), "router": (D, E), "gate": (E, D, 2, F), "down": (E, F, D), "d": (1, M, D)}
    arrays = {
        n: jax.ShapeDtypeStruct(s, jnp.float32 if n == "router" else jnp.bfloat16, sharding=where)
        for n, s in shapes_of.items()
    }

    def both(d, **params):
        out, pull = jax.vjp(lambda p: ejdist.moe(**p, top_k=k)[0], params)
        return out, pull(d)

    with target.lowering():
        lowered = jax.jit(both).lower(**arrays)
    made = []
    for line in lowered.compile().as_text().partition("ENTRY")[2].splitlines():
        parts = re.match(r"\s+(?:ROOT )?\S+ = (.*?) ([\w-]+)\(%", line)
        if (
            parts
            and re.search(rf"\[{M * k},\d+\]", parts[1])
            and parts[2] not in ("get-tuple-element", "bitcast", "tuple")
        ):
            made.append(parts.groups())
    assert made and {kind for _, kind in made} == {"custom-call"}, made
    assert sum(f"bf16[{M * k},{D}]" in result for result, _ in made) == 3, made
