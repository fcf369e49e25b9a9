"""Which exchanges of experts run beside products, by the schedule that XLA makes for GPUs."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from schedules import transfers

from ejdist.mesh import make_mesh
from ejdist.operations import bind_ops
from ejdist.planning.targets import NoCompiler, target_of

RANKS, LAYERS = 8, 2
ROWS, TOKENS, D, E, F, K = 2, 1024, 512, 16, 256, 2  # rows of a device, tokens of a row


@functools.cache
def exchanges(overlap, in_scan):
    """Returns the exchanges of 1 MiB or more of two layers on eight H200s, forward and backward, in the order of the program:
    products, then experts and a shared one."""
    made = target_of(None, RANKS, "h200", None)
    try:
        mesh = make_mesh(ep=RANKS, devices=made.devices())
    except NoCompiler as error:
        pytest.skip(str(error))
    # With room for all that may come there is no loop over further passes, which nothing would run beside.
    ops = bind_ops(mesh, platform="xla", experts={"dispatch": "all_to_all", "buffer": 8, "overlap": overlap})

    def layer(xs, w):
        out = []
        for x in xs:
            x = x + jnp.einsum("bte,ed->btd", jax.nn.gelu(jnp.einsum("btd,de->bte", x, w["wide"])), w["narrow"])
            shared = {name: w[name] for name in ("shared_gate", "shared_up", "shared_down")}
            out.append(x + ops.moe(x, w["router"], w["gate"], down=w["down"], top_k=K, **shared)[0])
        return out

    def run(weights, x):
        xs = ops.halved(x)
        if in_scan:
            xs, _ = jax.lax.scan(lambda xs, w: (layer(xs, w), None), xs, weights)
        else:
            for i in range(LAYERS):
                xs = layer(xs, jax.tree.map(lambda w, i=i: w[i], weights))
        return ops.joined(xs)

    def both(weights, x, d):
        y, pull = jax.vjp(run, weights, x)
        return y, pull(d)

    def array(*shape, split=(), dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split)))

    first, last = (array(LAYERS, *shape) for shape in ((D, 4 * F), (4 * F, D)))
    weights = {
        "wide": array(LAYERS, D, 4 * D), "narrow": array(LAYERS, 4 * D, D),
        "shared_gate": first, "shared_up": first, "shared_down": last,
        "router": array(LAYERS, D, E, dtype=jnp.float32),
        "gate": array(LAYERS, E, D, 2, F, split=(None, "ep")), "down": array(LAYERS, E, F, D, split=(None, "ep")),
    }  # fmt: skip
    x = array(ROWS * RANKS, TOKENS, D, split=("ep",))
    with made.lowering():
        lowered = jax.jit(both).lower(weights, x, x)
    return [t for t in transfers(lowered.compile().as_text(), 2**20, products=True) if t.kind == "all-to-all"]


@pytest.mark.slow
def test_of_halves_every_exchange_but_the_first_runs_beside_products():
    """Of two layers that are no loop: two halves, out and back, forward and backward."""
    found = exchanges("halves", in_scan=False)
    assert len(found) == 2 * 2 * 2 * LAYERS and {t.bytes for t in found} == {RANKS * TOKENS * D * 2}, found
    assert [bool(t.beside) for t in found] == [False, *[True] * (len(found) - 1)], found


@pytest.mark.slow
def test_a_shared_expert_runs_beside_one_exchange_of_two():
    """In a loop over layers, forward beside what comes back, backward beside what goes home; the others wait alone."""
    found = exchanges("none", in_scan=True)
    assert len(found) == 2 * 2 and {t.bytes for t in found} == {RANKS * ROWS * TOKENS * D * 2}, found
    assert [bool(t.beside) for t in found] == [False, True, False, True], found


@pytest.mark.slow
def test_no_array_is_copied():
    """Of kernels for eight H200s, in the program of a layer and its gradients and in its loops over further passes: sums are
    added to where they are, and what a kernel writes over is needed by nothing else."""
    made = target_of(None, RANKS, "h200", None)
    try:
        mesh = make_mesh(ep=RANKS, devices=made.devices())
    except NoCompiler as error:
        pytest.skip(str(error))
    ops = bind_ops(mesh, experts={"dispatch": "all_to_all", "buffer": 1.25})

    def both(weights, x, d):
        def run(weights, x):
            return ops.moe(x, weights["router"], weights["gate"], down=weights["down"], top_k=4)[0]

        y, pull = jax.vjp(run, weights, x)
        return y, pull(d)

    def array(*shape, split=(), dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split)))

    weights = {
        "router": array(D, 32, dtype=jnp.float32), "gate": array(32, D, 2, F, split=("ep",)),
        "down": array(32, F, D, split=("ep",)),
    }  # fmt: skip
    x = array(RANKS, 2 * TOKENS, D, split=("ep",))
    with made.lowering():
        text = jax.jit(both).lower(weights, x, x).compile().as_text()
    assert text.count(" while(") >= 4
    sizes = [
        math.prod(int(n) for n in dims.split(",") if n) for dims in re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)
    ]
    assert sizes and max(sizes) <= 1024, sizes
