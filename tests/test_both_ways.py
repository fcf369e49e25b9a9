"""Both ways around a ring: the numbers of one device, half of the bytes each way, where it is taken and what it refuses."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from test_sequence import MASKS, PACKED, assert_close, on_one_device, outputs_and_gradients

import kernels
from ejdist import Order, make_mesh, ring_attention
from ejdist.costs import PERMUTE, PERMUTE_BOTH
from ejdist.experts.choice import links_of
from ejdist.mesh import mesh_shape
from ejdist.planning.candidates import candidate_of
from ejdist.planning.links import Links
from ejdist.planning.search import Predictor
from ejdist.planning.targets import target_of
from ejdist.sequence import Halo, Ring, Ulysses, both_ways, exchange, in_place
from ejdist.sequence.cost import AttentionShape
from ejdist.sequence.section import SequenceSection
from recipes.schema import compose

BOTH = Ring(directions=2)
MESHES = {"sp2": {"sp": 2}, "sp4": {"sp": 4}, "sp8": {"sp": 8}, "sp4_fsdp2": {"sp": 4, "fsdp": 2}}


# Every transfer of a program has the number 1, and XLA's CPU runtime lets two of these begin at once, which ends the process
# (rendezvous.h: more participants than threads). It does not with this flag, in a process of its own.
ENDS_THE_PROCESS = ("soft_cap", "striped", "sp8")
IN_TURN = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def grid():
    for name in MASKS:
        for order in ("contiguous", "zigzag", "striped"):
            for mesh in MESHES:
                quick = (name, order, mesh) == ("sinks_packed_window", "zigzag", "sp4")
                marks = [] if quick else [pytest.mark.slow]
                if (name, order, mesh) == ENDS_THE_PROCESS:
                    continue
                yield pytest.param(name, order, mesh, marks=marks)


@pytest.mark.parametrize(("name", "order", "mesh"), list(grid()))
def test_the_numbers_of_one_device(name, order, mesh):
    check_numbers(name, order, mesh)


@pytest.mark.slow
def test_the_numbers_of_one_device_where_two_transfers_would_begin_at_once():
    code = f"import test_both_ways; test_both_ways.check_numbers(*{ENDS_THE_PROCESS})"
    where = {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    environment = os.environ | where | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {IN_TURN}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def check_numbers(name, order, mesh):
    """Of four heads and two of keys: hops that are left out too, which the second half makes from the last one on."""
    made = Order(order, MESHES[mesh]["sp"], 4 if order == "striped" else 1)
    ring = functools.partial(ring_attention, mesh=make_mesh(**MESHES[mesh]), order=made, scheme=BOTH)
    assert_close(outputs_and_gradients(ring, made, MASKS[name]), on_one_device(name), f"{name} {order} {mesh}")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [BOTH, Ring("bfloat16", directions=2)], ids=lambda scheme: scheme.gradients)
@pytest.mark.parametrize("capability", [None, 90])
def test_in_bfloat16_in_a_balanced_order_with_nothing_that_lies_in_padding(scheme, capability):
    """On Hopper by the kernels that add in place; here, what they merge is merged by XLA."""
    order, rng = Order("balanced", 4, 128), np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 5, (2, 1024)), 1)
    ids[:, -70:] = -1
    index = order.text_indices(np.where(ids >= 0, 1.0 + np.arange(1024), 0))
    q, k, v, d_out = (rng.standard_normal((2, 1024, heads, 64)).astype(np.float32) for heads in (4, 2, 2, 4))

    def everything(attend, ids, at, *arrays):
        packed = {"q_segment_ids": ids, "kv_segment_ids": ids}
        out, pull = jax.vjp(lambda *a: attend(*a, causal=True, **packed, **at), *arrays[:3])
        return out, *pull(arrays[3])

    wanted = everything(
        functools.partial(kernels.flash_attention, platform="xla"), jnp.asarray(ids), {}, q, k, v, d_out
    )
    lost = [np.where((ids < 0)[..., None, None], np.nan, x) for x in (q, k, v, d_out)]
    placed = [jnp.asarray(order.permute(x, index=index), jnp.bfloat16) for x in lost]
    at = {n: jnp.asarray(index) for n in ("q_positions", "kv_positions")}
    ring = functools.partial(ring_attention, mesh=make_mesh(sp=4), order=order, scheme=scheme)
    with kernels.compile_for(capability) if capability else jax.named_scope("here"):
        made = jax.jit(functools.partial(everything, ring, jnp.asarray(order.permute(ids, index=index)), at))(*placed)
    for x, y in zip(made, wanted, strict=True):
        assert error(order.inverse(x, index=index), y) < 2e-2


def permutes(jaxpr, times=1):
    """Yields (by how many ranks, bytes) of each transfer of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            by = {(b - a) % len(eqn.params["perm"]) for a, b in eqn.params["perm"]}
            yield from ((*by, times * v.aval.size * v.aval.dtype.itemsize) for v in eqn.invars)
        for inner in jaxprs_in_params(eqn.params):
            yield from permutes(inner, times * eqn.params.get("length", 1))


def sent(scheme, order="zigzag", window=None):
    """Returns (bytes by how many ranks they go, transfers) of a gradient, with bfloat16 keys of 8 numbers, heads 4 and 2."""
    arrays = [jax.ShapeDtypeStruct((1, 64, heads, 8), jnp.bfloat16) for heads in (4, 2, 2)]
    how = {"mesh": make_mesh(sp=4), "order": order, "scheme": scheme, "platform": "xla", "sliding_window": window}
    attend = functools.partial(ring_attention, causal=True, **how)
    program = jax.make_jaxpr(jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum(), (0, 1, 2)))(*arrays)
    found = [*permutes(program.jaxpr)]
    return {by: sum(size for b, size in found if b == by) for by, _ in found}, len(found)


@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
def test_half_of_the_bytes_go_each_way(gradients):
    """What is sent, and in how many transfers but for those of a loop, is what is declared."""
    one, two = (sent(Ring(gradients, directions=n))[0] for n in (1, 2))
    assert set(one) == {1} and set(two) == {1, 3} and two[1] == two[3] == one[1] // 2
    sizes = (16 * heads * 8 * 2 for heads in (4, 2, 2, 4))
    shape = AttentionShape((("sp", 4),), 3, *sizes, 16 * 4 * 4, 4, 2, 2)
    for directions, name, arrays in ((1, PERMUTE, 2), (2, PERMUTE_BOTH, 4)):
        made = Ring(gradients, directions=directions).cost(shape)
        assert made.bytes == {("sp", name): one[1]} and made.calls == {("sp", name): 3 * 3 * arrays}


def test_hops_that_are_left_out_are_so_both_ways():
    """A window that reaches one neighbour: each half of the heads makes that hop, and no other."""
    one, two = (sent(Ring(directions=n), "contiguous", 9)[0] for n in (1, 2))
    assert sum(one.values()) == sum(two.values()) and set(two) <= {1, 3}


@pytest.fixture
def taken(monkeypatch):
    """On devices whose links form a ring: how many calls went both ways."""
    calls, around = [], both_ways.around
    monkeypatch.setattr(exchange, "on_torus", lambda: True)
    monkeypatch.setattr(both_ways, "around", lambda *a: calls.append(a) or around(*a))
    return calls


@pytest.mark.parametrize(
    ("scheme", "mesh", "kv_heads", "options", "both"),
    [
        (Ring(), {"sp": 4}, 2, {"order": "zigzag", **PACKED}, True),
        (Ring(hops="mask"), {"sp": 4}, 2, {}, True),
        (Halo(), {"sp": 4}, 2, {}, True),
        (Ulysses(), {"cp": 4, "sp": 2}, 4, {"axis_name": ("cp", "sp")}, True),
        (Ulysses(), {"cp": 4, "sp": 2}, 2, {"axis_name": ("cp", "sp")}, False),  # one head of keys is left
        (Ring(directions=1), {"sp": 4}, 2, {}, False),
        (Ring(), {"sp": 2}, 2, {}, False),  # the other rank is on both sides
        (Ring(), {"sp": 4}, 1, {}, False),
        (Ring(), {"sp": 4}, 2, {"sliding_window": 9}, False),  # the other way round is farther
        (Ring(hops="batch"), {"sp": 4}, 2, PACKED, False),
        (Ring(levels=2), {"cp": 2, "sp": 2}, 2, {"axis_name": ("cp", "sp")}, False),
    ],
    ids=[f"{n}" for n in range(11)],
)
def test_auto(taken, scheme, mesh, kv_heads, options, both):
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 8), jnp.float32) for heads in (4, kv_heads))
    ring = functools.partial(ring_attention, causal=True, mesh=make_mesh(**mesh), scheme=scheme, **options)
    jax.eval_shape(jax.grad(lambda *a: ring(*a).sum()), q, k, k)
    assert bool(taken) == both


def test_auto_is_one_way_where_there_is_no_torus(monkeypatch):
    calls = []
    monkeypatch.setattr(both_ways, "around", lambda *a: calls.append(a))
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 8), jnp.float32) for heads in (4, 2))
    jax.eval_shape(functools.partial(ring_attention, causal=True, mesh=make_mesh(sp=4)), q, k, k)
    assert not calls


REFUSED = [
    (lambda: Ring(directions=3), r"sequence.directions = 3 is unknown; use 1, 2, or auto"),
    (lambda: Ring(directions=True), r"sequence.directions = True is unknown"),
    (
        lambda: Ring(directions=2, levels=2),
        r"sequence.directions = 2 is for one ring over all ranks.*leave one of the two out",
    ),
    (lambda: Ring(directions=2, hops="batch"), r"sequence.directions = 2 makes all hops.*leave one of the two out"),
    (
        lambda: SequenceSection(directions="both").validate(),
        r"sequence.directions = 'both' is unknown; use one of 1, 2, auto",
    ),
    (
        lambda: SequenceSection(scheme="ulysses", directions="2").validate(),
        r"sequence.directions = 2 is no option of the scheme 'ulysses': use sequence.scheme=ring",
    ),
    (
        lambda: ring_attention(*(jnp.ones((1, 64, n, 8)) for n in (4, 1, 1)), mesh=make_mesh(sp=4), scheme=BOTH),
        r"sequence.directions = 2 halves the heads of what travels, and 'key' has 1 on a device: use 1 or auto",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_recipe_says_which_and_plans_count_it():
    """On TPUs both directions take half of the time of one; links of GPUs have both in use, and two are more messages."""
    assert SequenceSection(directions="2").made().full == BOTH
    both = SequenceSection(directions="1", scheme="ring", window_scheme="ring").made()
    assert both.full == both.window == Ring(directions=1)
    torus, switch = links_of("TPU v5"), links_of("NVIDIA H200")
    assert torus.rate(PERMUTE_BOTH, 8) == 2 * torus.rate(PERMUTE, 8)
    assert switch.rate(PERMUTE_BOTH, 8) == switch.rate(PERMUTE, 8)

    words = "recipe=long_context model=8b mesh.fsdp=1 mesh.sp=8 data.sequence_length=131072 data.global_batch=1".split()

    def predicted(target, *more):
        sections = compose([*words, *more])
        candidate = candidate_of(sections, mesh_shape(sections.mesh.sizes, target.count))
        return Predictor(sections, target, None).checked(candidate).time

    for target, gains in ((target_of("v5p:2x2x2", None, None, None), True), (target_of(None, 8, "h100", None), False)):
        auto, one, two = (predicted(target, f"sequence.directions={n}").total for n in ("auto", "1", "2"))
        assert (auto == two < one) if gains else (auto == one <= two)


@pytest.mark.parametrize(
    ("target", "torus"), [(("v5p:2x2x2", None, None, None), True), ((None, 8, "h200", None), False)]
)
def test_auto_is_the_direction_that_costs_least(target, torus):
    """So plans need not search it: with odd heads or latents, which have no halves, few ranks, and hops that are left out."""
    made, found = target_of(*target), set()
    links = Links(made.chip, made.per_host)
    for kv_heads, ranks, hops, by_batch, latents in itertools.product(
        (1, 2, 8), (2, 4, 8), (1, 3, 7), (None, 1), (0, 2**20)
    ):
        if hops >= ranks:
            continue
        shape = AttentionShape(
            (("sp", ranks),),
            hops,
            *(2**24,) * 4,
            2**16,
            8,
            kv_heads,
            2,
            by_batch=by_batch,
            torus=torus,
            latents=latents,
        )
        ways = (1, 2) if kv_heads % 2 == 0 and not latents else (1,)
        took = {way: links.alone(Ring(directions=way).cost(shape), {"sp": ranks}) for way in (*ways, "auto")}
        assert took["auto"] == min(took.values()), (shape, took)
        if ranks == 2 or hops < ranks - 1:  # both halves may go the same way
            assert {*took.values()} == {took[1]}, (shape, took)
        found.add(took["auto"] < took[1])
    assert found == ({False, True} if torus else {False})


def test_where_links_form_a_ring():
    """The devices that a call is mapped over say it."""

    def seen(mesh):
        found = []
        run = jax.shard_map(lambda x: found.append(exchange.on_torus()) or x, mesh=mesh, in_specs=P(), out_specs=P())
        jax.eval_shape(jax.jit(run), jnp.ones(4))
        return found

    mesh = make_mesh(sp=4)
    device = jax.sharding.AbstractDevice(device_kind="TPU v5", num_cores=2, platform="tpu")
    assert seen(mesh) == [False] and seen(mesh.abstract_mesh.update(abstract_device=device)) == [True]
    assert exchange.compiler_options(mesh) == {}


def test_kernels_that_add_in_place_are_of_half_of_the_heads(monkeypatch):
    found, attends = [], in_place.attends
    monkeypatch.setattr(in_place, "attends", lambda local, *a: found.append(local.sizes["K"]) or attends(local, *a))
    q, k = (jax.ShapeDtypeStruct((1, 1024, heads, 64), jnp.bfloat16) for heads in (4, 2))
    with kernels.compile_for(90):
        ring = functools.partial(ring_attention, causal=True, mesh=make_mesh(sp=4), order="zigzag", scheme=BOTH)
        jax.eval_shape(ring, q, k, k)
    assert found == [1, 1]


@pytest.mark.parametrize(("ids", "arrays"), [(None, 2), (jnp.zeros((1, 64), jnp.int32), 1)])
def test_a_loop_of_a_backward_holds_an_output_only_where_a_kernel_reads_it(ids, arrays):
    """cuDNN's does, which takes no segment ids; beside it there is the output's cotangent, of as many numbers."""
    query, key, value = (jnp.ones((1, 64, heads, width)) for heads, width in ((4, 16), (2, 16), (2, 8)))

    def attend(*inputs):
        how = {"mesh": make_mesh(sp=8), "order": "zigzag", "scheme": "ring", "causal": True}
        return ring_attention(*inputs, q_segment_ids=ids, kv_segment_ids=ids, **how)

    def loops(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                yield [x.aval.shape for x in eqn.invars]
            for inner in jaxprs_in_params(eqn.params):
                yield from loops(inner)

    gradient = jax.grad(lambda *inputs: attend(*inputs).sum(), (0, 1, 2))
    found = [shapes.count((1, 8, 4, 8)) for shapes in loops(jax.make_jaxpr(gradient)(query, key, value).jaxpr)]
    assert max(found) == arrays, found
