"""What schemes, dispatches, orders, parts and remat policies declare of their costs: each is asked, none is costed as another,
and what a scheme declares is what its program sends."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejdist import make_mesh, order, ring_attention
from ejdist.costs import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Traffic, Undeclared
from ejdist.documents import ONE_DOCUMENT, documents_of
from ejdist.experts.by_rank import ByRank
from ejdist.experts.choice import choose
from ejdist.experts.cost import ExchangeShape, arriving_of, cost_of, memory_of
from ejdist.experts.dispatch import exchange
from ejdist.experts.schemes import SCHEMES as DISPATCHES
from ejdist.experts.schemes import AllToAll, fitting
from ejdist.layout import spec
from ejdist.mapped import map_shards
from ejdist.mesh import AXES, mesh_shape
from ejdist.models.config import ExpertsShape, LatentShape, SparseShape
from ejdist.models.decoder import DecoderConfig
from ejdist.models.mixture import has_experts
from ejdist.models.model import CAUSAL, Flops
from ejdist.models.parameters import Param
from ejdist.models.part import Costs, Part
from ejdist.models.parts import PARTS
from ejdist.models.recurrent_shapes import GatedDeltaShape, GlaShape, KdaShape, LightningShape, Mamba2Shape, Rwkv7Shape
from ejdist.models.remat import REMAT, PartBytes, Remat
from ejdist.models.share import Share
from ejdist.models.stack import counted_parts
from ejdist.order import NAMES as ORDERS
from ejdist.order import Order
from ejdist.planning.candidates import (
    BUFFER,
    GROUPS,
    HOPS,
    LATENTS,
    LEVELS,
    ORDER,
    OUTER,
    SCHEME,
    candidate_of,
    details,
    orders_searched,
    policies_searched,
    products,
    ways,
)
from ejdist.planning.search import Predictor, search
from ejdist.planning.targets import target_of
from ejdist.sequence.cost import AttentionShape, SchemeBytes, chunks_of_documents, needed_hops
from ejdist.sequence.halo import reach_of, sent
from ejdist.sequence.schedule import imbalance
from ejdist.sequence.scheme import Scheme
from ejdist.sequence.schemes import SCHEMES, AllGather, Ring, Ulysses, scheme_of
from kernels.engines.attention.masks import MaskInfo, window_of
from recipes.schema import compose

TPU, GPU = target_of("v5p:2x2x2", None, None, None), target_of(None, 8, "h200", None)
DENSE = "recipe=long_context mesh.fsdp=2 mesh.sp=4 data.sequence_length=1024 data.global_batch=8"
MIXED = "recipe=moe mesh.dp=2 mesh.ep=4 mesh.fsdp=1 experts.axes=[dp,ep] data.sequence_length=256 data.global_batch=8"


def predicted(sections, target=TPU):
    sizes = mesh_shape(sections.mesh.sizes, target.count)
    return Predictor(sections, target).checked(candidate_of(sections, sizes))


def share_of(remat="none", scheme=None, tokens=256, ranks=4, **options):
    """Returns a share of a sequence over four ranks, of features over two."""
    own = {"itemsize": 2, "length": 1024, "remat": REMAT[remat], "scheme": scheme or Ring(), "features": 2}
    return Share(tokens, order=Order("zigzag", ranks), **{"dispatch": AllToAll(), **own, **options})


def attending(c, tokens, hops, itemsize, forwards=1, over=(("sp", 4),)):
    """Returns the attention of so many tokens of a rank, by all heads of a model."""
    query, key = (tokens * heads * c.head_dim * itemsize for heads in (c.num_heads, c.num_kv_heads))
    heads = 4 * tokens * c.num_heads, c.num_heads, c.num_kv_heads
    return AttentionShape(over, hops, query, key, key, query, *heads, itemsize, forwards)


# -- the planner asks everything that is registered -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SCHEMES])
def test_the_planner_costs_every_scheme_order_and_policy(name):
    """Of each candidate the bytes along the sequence are those that the scheme itself declares; time and memory are there."""
    sections = compose([*DENSE.split(), f"sequence.scheme={name}"])
    scheme, seen = SCHEMES[name](), set()
    for lie, remat in itertools.product(ORDERS, REMAT):
        sections.sequence.order, sections.model.remat = lie, remat
        for target in (TPU, GPU):
            made = predicted(sections, target)
            assert made.time.total > 0 and made.memory.total > 0 and math.isfinite(made.rate)
        c, b = sections.model, 2 if sections.model.compute_dtype == "bfloat16" else 4
        tokens, hops = 8 * 1024 // 8, needed_hops(Order(lie, 4), 1024, CAUSAL)
        shape = attending(c, tokens, hops, b, 1 + (not REMAT[remat].asked))
        shape = dataclasses.replace(
            shape, chunks=chunks_of_documents(order.order_for(lie, 4, 1024), 1024, CAUSAL, ONE_DOCUMENT)
        )
        layers = sum(scheme.cost(shape).bytes.values()) * c.num_layers
        gradients = made.time.sent["sp"] - layers
        assert layers > 0 and gradients >= 0  # parameters are stored over the sequence's axis too
        seen.add(gradients)
    assert len(seen) == 1  # what is left over has to do with neither


@pytest.mark.parametrize("name", fitting((2, 4)))
def test_the_planner_costs_every_dispatch(name):
    for remat in REMAT:
        made = predicted(compose([*MIXED.split(), f"experts.dispatch={name}", f"model.remat={remat}"]))
        assert made.time.sent["ep"] > 0 and made.time.sent["dp"] > 0 and made.memory.total > 0


@pytest.mark.parametrize(("name", "needs"), [("local", "one device"), ("two_level", "two axes")])
def test_a_dispatch_that_does_not_fit_its_axes_is_refused(name, needs):
    words = MIXED.replace("mesh.dp=2 mesh.ep=4", "mesh.dp=1 mesh.ep=8").replace("[dp,ep]", "[ep]")
    with pytest.raises(ValueError, match=f"experts.dispatch = '{name}' is for experts on {needs}"):
        predicted(compose([*words.split(), f"experts.dispatch={name}"]))


@pytest.mark.parametrize("name", [*PARTS])
@pytest.mark.parametrize("remat", [*REMAT])
def test_every_part_declares_its_costs(name, remat):
    """More is kept the more a policy keeps, what is kept is not computed again, and a device has less of more devices' work."""
    c = DecoderConfig(
        num_heads=8, num_kv_heads=4, sliding_window=128, qk_norm=True,
        experts=ExpertsShape(num=8, top_k=2, ffn_dim=64), latent=LatentShape(kv_rank=32), sparse=SparseShape(16, 4, 32),
        gated_delta=GatedDeltaShape(2, 8), kda=KdaShape(8), mamba2=Mamba2Shape(8), lightning=LightningShape(8),
        gla=GlaShape(8), rwkv7=Rwkv7Shape(8),
    )  # fmt: skip
    part, policy = Costs(PARTS[name]), REMAT[remat]
    on = share_of(remat, experts=(("ep", 4),))
    made = part.memory(c, on)
    everything = made.saved + made.offloaded + made.products + made.rest
    assert 0 <= policy.kept(made) <= everything and made.work > 0
    assert not policy.rest or policy.kept(made) == everything
    assert not policy.host or policy.kept(made) == policy.asked * made.saved
    assert policy.kept_on_host(made) == (policy.host and policy.asked) * made.offloaded
    assert 0 <= part.recomputed(policy) <= 1 and part.recomputed(REMAT["none"]) == 0
    assert part.traffic(c, on).bytes[("tp", "all_reduce")] > 0
    alone = part.traffic(c, share_of(remat, ranks=1, features=1))
    assert not alone.bytes
    halved = part.memory(c, dataclasses.replace(on, tokens=128))
    assert halved.work == pytest.approx(made.work / 2, rel=0.01)


def test_an_mlp_without_a_gate_costs_two_products():
    """One is kept by some policies and computed again by others, its numbers and those of the activation as wide as the MLP."""
    c, part = DecoderConfig(model_dim=64, ffn_dim=320), PARTS["ungated_mlp"]
    on = share_of("none", tokens=256)
    wide, x = 256 * 320 // 2 * 2, 256 * 64 * 2
    made = part.memory(c, on)
    assert (made.products, made.rest, made.offloaded, made.saved) == (wide, wide + x, 0, 0) and made.work > 4 * wide
    assert part.flops(c).token == 2 * 2 * 64 * 320
    assert [part.recomputed(REMAT[name]) for name in ("none", "dots", "attention", "full")] == [0, 0, 0.5, 0.5]
    assert part.traffic(c, on).bytes == PARTS["mlp"].traffic(c, on).bytes


def test_zeros_of_a_ring_are_there_in_every_layer_of_a_gpu():
    """XLA for GPUs makes them before the loop over layers; at the height, the MLP's, its kernel has one result more as well. On
    Hopper a ring of whole tiles adds in place and needs none."""
    sections = compose(DENSE.split())
    c, b = sections.model, 2 if sections.model.compute_dtype == "bfloat16" else 4
    gpu, tpu = (predicted(sections, target).memory.classes["activations at work"] for target in (GPU, TPU))
    assert gpu - tpu == 1024 * c.ffn_dim * b
    zeros = 2 * 4 * c.num_heads * c.head_dim  # bytes of a token
    for where, words, more in (
        ("a100", "", zeros), ("h200", "data.sequence_length=512", zeros), ("h200", "sequence.scheme=all_gather", zeros),
        ("h200", "model.attention_sinks=true", zeros), ("h200", "sequence.order=striped sequence.stripe=128", 0),
    ):  # fmt: skip
        there = compose([*DENSE.split(), *words.split()])
        gpu, tpu = (
            predicted(there, target).memory.classes["activations at work"]
            for target in (target_of(None, 8, where, None), TPU)
        )
        assert gpu - tpu == there.data.sequence_length * (c.ffn_dim * b + more), (where, words)


def test_what_is_searched_is_what_is_registered():
    sections, every = compose(DENSE.split()), {*SCHEMES}
    found = [*ways(sections, (1, 2, 1, 1, 4, 1), ())]
    assert {scheme for scheme, _, _ in found} == every
    sections.mesh.fsdp, sections.mesh.sp = 1, 8  # no part of four heads for each of eight ranks, but over two by four
    assert {scheme for scheme, _, _ in ways(sections, (1, 1, 1, 1, 8, 1), ())} == every - {"ulysses"}
    assert {scheme for scheme, _, _ in ways(sections, (1, 1, 1, 2, 4, 1), ())} == every
    assert {scheme for scheme, _, _ in ways(sections, (1, 1, 1, 1, 4, 2), ())} == every - {"ulysses"}
    assert [*dict.fromkeys(lie for _, lie, _ in found)] == ["zigzag", "balanced", "striped", "contiguous"]
    packed = [lie for _, lie, _ in ways(sections, (1, 2, 1, 1, 4, 1), (SCHEME,), documents_of("64"))]
    assert [*dict.fromkeys(packed)][:2] == ["balanced", "striped"] and set(packed) == set(ORDERS)
    assert {lie for _, lie, _ in ways(sections, (1, 2, 1, 1, 4, 1), (ORDER,))} == set(ORDERS)
    sections.sequence.order = "zigzag"
    assert {lie for _, lie, _ in ways(sections, (1, 2, 1, 1, 4, 1), (ORDER,))} == {None}
    sections.data.sequence_length = 1028  # no multiple of eight
    assert orders_searched(sections, (("sp", 4),)) == ["striped", "balanced", "contiguous"]
    assert set(policies_searched()) == {name for name, remat in REMAT.items() if not remat.host}
    mixed = compose(MIXED.split())
    assert (
        {way for _, _, way in ways(mixed, (2, 1, 4, 1, 1, 1), ())}
        == set(fitting((2, 4)))
        == set(DISPATCHES) - {"local"}
    )


def test_a_sequence_is_searched_over_two_axes_too(monkeypatch):
    """With the scheme that has another one around it, unless an axis is given; four heads are not for eight ranks."""
    sections = compose(DENSE.split())
    of = candidate_of(sections, dict(zip(AXES, (1, 1, 1, 1, 8, 1), strict=True)))

    def axes(given):
        return [(p.sizes["cp"], p.sizes["sp"], p.scheme) for p in products(sections, of, given)]

    assert axes(()) == [(4, 2, "ring"), (4, 2, "ulysses"), (2, 4, "ring"), (2, 4, "ulysses")]
    assert {p.sequence for p in products(sections, of, ()) if p.scheme == "ring"} == {((LEVELS, 2),)}
    assert axes({"mesh.sp"}) == axes({"mesh.cp"}) == axes({"sequence.scheme", LEVELS}) == []  # that is a ring
    sections.sequence.scheme = "ulysses"
    assert axes({"sequence.scheme"}) == [(4, 2, None), (2, 4, None)]
    tried = []
    monkeypatch.setattr("ejdist.planning.search.products", lambda s, of, given: tried.append(of) or ())
    search(compose(DENSE.split()), TPU, {"mesh.dp", "mesh.fsdp", "data.global_batch", "model.remat"}, None)
    assert tried and {p.sizes["cp"] for p in tried} == {1}


def test_what_a_scheme_leaves_open_is_searched():
    """Of the keys that its scheme reads, those that nobody gives."""
    packed, one = documents_of("64"), documents_of("one")

    def tried(words, sizes, *how, given=()):
        s = compose([*DENSE.split(), *words.split()])
        of = candidate_of(s, dict(zip(AXES, sizes, strict=True)))
        return [dict(c.sequence) for c in details(s, of, given, *how)]

    ring, product = (1, 2, 1, 1, 4, 1), (1, 2, 1, 2, 2, 1)
    assert tried("", ring, one) == tried("", (8, 1, 1, 1, 1, 1), packed, True) == []
    assert tried("", ring, packed) == [{HOPS: "batch"}] and tried("", ring, packed, given={HOPS}) == []
    assert tried("sequence.scheme=ulysses", (2, 2, 1, 1, 2, 1), one, True) == [{GROUPS: 2}]  # two heads on a rank
    assert tried("sequence.scheme=ulysses", ring, one, True) == tried("sequence.scheme=ulysses", ring, packed) == []
    assert tried("sequence.scheme=ulysses", product, one) == [{OUTER: "ring"}, {OUTER: "all_gather"}]
    assert tried("", product, one) == [{LEVELS: 2}] and len(tried("", product, packed)) == 2  # all hops, or fewer
    assert tried("sequence.scheme=group_cast", ring, packed, True) == [{BUFFER: 0.25}, {BUFFER: 0.125}]
    assert tried("sequence.scheme=group_cast", ring, packed) == tried("", ring, one, True) == []
    latent = "model.latent.kv_rank=8 model.layer_pattern=[latent]"
    assert tried(latent, ring, one) == [{LATENTS: "always"}, {LATENTS: "never"}]
    assert len(tried(latent, ring, packed)) == 5 and tried(f"{latent} sequence.latents=never", ring, one) == []
    s = compose(DENSE.split())
    made = next(iter(details(s, candidate_of(s, dict(zip(AXES, ring, strict=True))), (), packed)))
    assert made.applied(s).sequence.hops == made.overrides()[HOPS] == "batch"


def test_a_plan_counts_what_a_scheme_sends_along_each_axis_of_the_sequence():
    words = [*DENSE.split(), "mesh.sp=2", "mesh.cp=2"]
    ring, ulysses = (predicted(compose([*words, f"sequence.scheme={n}"])).time.sent for n in ("ring", "ulysses"))
    c = compose(words).model
    b, tokens = 2 if c.compute_dtype == "bfloat16" else 4, 8 * 1024 // 8
    shape = attending(c, tokens, 3, b, over=(("cp", 2), ("sp", 2)))
    for made, scheme in ((ring, Ring()), (ulysses, Ulysses())):
        for axis in ("cp", "sp"):
            made[axis] -= c.num_layers * scheme.cost(shape).along().get(axis, 0)
    assert ring == ulysses and min(ring.values()) >= 0  # what is left is of parameters


def test_an_order_is_as_uneven_as_its_busiest_rank():
    """Against the pairs of causal attention that each rank has, counted one by one."""
    n, length = 8, 4096
    for name in ORDERS:
        own = Order(name, n).text_indices(np.arange(length) + 1).reshape(n, -1)
        pairs = (own + 1).sum(1)
        assert imbalance(Order(name, n), length, CAUSAL) == pairs.max() / pairs.mean()
        assert imbalance(Order(name, 1), length, CAUSAL, documents_of("64")) == 1
        assert imbalance(Order(name, n), length, MaskInfo(causal=True, window=(63, 0))) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("window", [1, 8, 9, 17, 33, None])
def test_hops_are_those_that_a_pair_of_tokens_needs(name, window):
    """Against a mask of all pairs."""
    n, length = 4, 64
    carried = Order(name, n).carried  # by each batch, so that every rank may have what another needs
    at = np.arange(length) if carried else Order(name, n).indices(length)
    back = at[:, None] - at[None]
    seen = carried | ((back >= 0) & (back < (window or length)))
    ranks = seen.reshape(n, length // n, n, length // n).any((1, 3))
    wanted = {(r - s) % n for r, s in zip(*np.nonzero(ranks), strict=True)} - {0}
    made = needed_hops(Order(name, n), length, MaskInfo(causal=True, window=window_of(window)))
    assert made == len(wanted)


# -- what is declared is what is sent -------------------------------------------------------------------------------------


NAMES = {"ppermute": PERMUTE, "all_gather": ALL_GATHER, "reduce_scatter": REDUCE_SCATTER, "all_to_all": ALL_TO_ALL}


def collectives(jaxpr, sizes, keep=lambda x: True):
    """Returns what a device sends by a program that is not compiled, as `Traffic`, of the arrays that `keep` takes."""
    sent = Traffic()

    def visit(jaxpr, times):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in NAMES:
                axes = eqn.params["axis_name"]
                axes = (axes,) if isinstance(axes, str) else tuple(axes)
                n = math.prod(sizes[a] for a in axes)
                part = {"ppermute": 1, "all_gather": n - 1}.get(name, (n - 1) / n)
                for x in (v.aval for v in eqn.invars if keep(v.aval)):
                    bytes_ = times * part * x.size * x.dtype.itemsize
                    sent.add(axes[0] if len(axes) == 1 else axes, NAMES[name], bytes_, times)
            inside = jax.tree.leaves(
                [*eqn.params.values()], is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
            )
            for inner in (getattr(value, "jaxpr", value) for value in inside):
                if hasattr(inner, "eqns"):
                    visit(inner, times * eqn.params.get("length", 1))

    visit(jaxpr, 1)
    return sent


@pytest.mark.parametrize("name", [*SCHEMES])
@pytest.mark.parametrize(
    ("lie", "window"),
    [
        ("zigzag", None),
        ("contiguous", 9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("contiguous", None), ("striped", None), ("zigzag", 9))
        ),
    ],
)
def test_a_scheme_sends_what_it_declares(name, lie, window):
    """Keys, values and their gradients, in the program of a gradient of `ring_attention` on four ranks."""
    check_sent(name, lie, window, {"sp": 4})


TWO_AXES = [{"cp": 4, "sp": 2}, *(pytest.param({"cp": 2, "sp": n}, marks=pytest.mark.slow) for n in (2, 4))]


@pytest.mark.parametrize("lie", ["zigzag", "contiguous"])
@pytest.mark.parametrize("sizes", TWO_AXES, ids=str)
def test_a_scheme_of_two_axes_sends_what_it_declares_along_each(lie, sizes):
    check_sent("ulysses", lie, None, sizes)


@pytest.mark.parametrize("lie", ["zigzag", "contiguous"])
def test_gradients_in_bfloat16_are_half_of_those_that_travel(lie):
    """All but what goes home, which is in the dtype of the keys anyway."""
    check_sent(Ring("bfloat16"), lie, None, {"sp": 4})
    shape = AttentionShape((("sp", 4),), 3, *(100,) * 5, 4, 2, 2)
    wide, half = (Ring(dtype) for dtype in ("float32", "bfloat16"))
    assert wide.cost(shape).bytes["sp", PERMUTE] - half.cost(shape).bytes["sp", PERMUTE] == 2 * 200
    assert wide.memory(shape).work - half.memory(shape).work == 200


@pytest.mark.parametrize("scheme", [Ring(levels=2), Ring("bfloat16", levels=2)], ids=lambda scheme: scheme.gradients)
@pytest.mark.parametrize("sizes", TWO_AXES, ids=str)
def test_a_ring_of_two_levels_sends_what_it_declares_along_each(scheme, sizes):
    """Along the outer axis a hop for each other group, where a flat ring counts all of its hops."""
    check_sent(scheme, "zigzag", None, sizes)
    shape = AttentionShape(tuple(sizes.items()), 7, *(100,) * 5, 4, 2, 2)
    assert scheme.cost(shape).along()["cp"] < Ring(scheme.gradients).cost(shape).along()["cp"] / 2


@pytest.mark.parametrize("outer", [Ring(), AllGather()], ids=lambda scheme: type(scheme).__name__)
@pytest.mark.parametrize("sizes", [{"sp": 2}, {"cp": 2, "sp": 2}, {"cp": 4, "sp": 2}], ids=str)
def test_groups_of_heads_send_what_they_declare(outer, sizes):
    """Of four heads and two of keys: a group of keys each, or a head of keys for both groups."""
    check_sent(Ulysses(outer, 2), "zigzag", None, sizes)


def test_a_compiled_program_sends_what_is_declared():
    """Forward, in the text of the program: an all-to-all of each array there, and of the output and lse back."""
    mesh, scheme = make_mesh(sp=4), Ulysses(head_groups=2)
    shapes = [jax.ShapeDtypeStruct((1, 64, heads, 16), jnp.float32) for heads in (16, 4, 4)]
    split = functools.partial(ring_attention, causal=True, scheme=scheme, mesh=mesh, return_lse=True)
    text = jax.jit(split).lower(*shapes).compile().as_text()
    sent = [line.split(" all-to-all(")[0].split(" = ")[1] for line in text.splitlines() if " all-to-all(" in line]
    numbers = [math.prod(map(int, part.split(","))) for kinds in sent for part in re.findall(r"f32\[([\d,]+)\]", kinds)]
    query, key = 64 // 4 * 16 * 16 * 4, 64 // 4 * 4 * 16 * 4
    shape = AttentionShape((("sp", 4),), 3, query, key, key, query, 64 // 4 * 16 * 4, 16, 4, 4)
    once, twice = (scheme.cost(dataclasses.replace(shape, forwards=n)).bytes["sp", ALL_TO_ALL] for n in (1, 2))
    assert sum(numbers) * 4 * 3 / 4 == twice - once


def check_sent(scheme, lie, window, sizes):
    scheme = scheme_of(scheme)
    ranks = math.prod(sizes.values())
    mesh = make_mesh(**sizes, devices=jax.devices()[:ranks])
    shapes = [jax.ShapeDtypeStruct((1, 64, heads, 16), jnp.bfloat16) for heads in (4, 2, 2)]

    def loss(q, k, v):
        rules = {} if window is None else {"sliding_window": window}
        how = {"scheme": scheme, "order": lie, "mesh": mesh, "platform": "xla"}
        return ring_attention(q, k, v, causal=True, **rules, **how).astype(jnp.float32).sum()

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*shapes)
    made = collectives(program.jaxpr, dict(mesh.shape))
    query, key, value = (math.prod(x.shape) * 2 // ranks for x in shapes)
    order, mask = Order(lie, ranks), MaskInfo(causal=True, window=window_of(window))
    arrays = query, key, value, query, 4 * 4 * 64 // ranks
    halo = sent(order, 64, reach_of(mask, 64))
    shape = AttentionShape(tuple(sizes.items()), needed_hops(order, 64, mask), *arrays, 4, 2, 2, halo=halo)
    shape = dataclasses.replace(shape, chunks=chunks_of_documents(order, 64, mask, ONE_DOCUMENT))
    wanted = scheme.cost(shape)
    assert made.bytes == wanted.bytes and made.calls == wanted.calls


@pytest.mark.parametrize(
    "name", [n for n in fitting((2, 2)) if n != "ragged_all_to_all"]
)  # whose bytes the router decides
def test_a_dispatch_sends_what_it_declares(name):
    """Rows and what goes beside them, tokens and their gradients, in the program of a gradient of `exchange` on four ranks. The
    buffer has room for whatever comes, so that there is no further pass."""
    sizes = {"dp": 2, "ep": 2}
    mesh, axes = make_mesh(**sizes, devices=jax.devices()[:4]), ("dp", "ep")
    M, D, E, k = 64, 24, 8, 2

    def apply(params, rows, group_sizes):
        return rows * params.mean().astype(rows.dtype)

    def body(x, experts, weights, params):
        return exchange(x, experts, weights, params, apply, axis=axes, num_experts=E, scheme=name, buffer=4)[0]

    rows = spec(("B", "_"), {"B": axes})
    mapped = map_shards(body, mesh, (rows, rows, rows, rows), rows)
    shapes = [((4 * M, D), jnp.bfloat16), ((4 * M, k), jnp.int32), ((4 * M, k), jnp.float32), ((E, D), jnp.float32)]
    shapes = [jax.ShapeDtypeStruct(*s) for s in shapes]
    program = jax.make_jaxpr(jax.grad(lambda *a: mapped(*a).astype(jnp.float32).sum(), allow_int=True))(*shapes)
    scheme = DISPATCHES[name]()
    by_rank = isinstance(scheme, ByRank)  # others do not count what is beside tokens
    made = collectives(program.jaxpr, sizes, keep=lambda x: by_rank or x.shape[-1] == D)
    shape = ExchangeShape((("dp", 2), ("ep", 2)), M, k, D, 0, 2, buffer=4, num_experts=E)
    if not scheme.stepwise:  # over both axes at once; what a plan counts along each is together as much, or more
        shape = dataclasses.replace(shape, over=((axes, 4),))
    wanted = scheme.cost(shape)
    assert made.bytes == wanted.bytes and made.calls == wanted.calls


# -- what is new is costed as itself, or refused ---------------------------------------------------------------------------


class Exchanged(Scheme):
    """A scheme of somebody's own: every array is exchanged as often as it is read."""

    hides = False

    def forward(self, local):
        raise AssertionError("a plan runs nothing")

    backward = forward

    def cost(self, shape):
        sent, arrays = Traffic(), shape.query + shape.key + shape.value + shape.out
        passes = shape.forwards + 2  # the backward sends the same arrays again, and as many gradients
        sent.add(shape.axis, ALL_TO_ALL, passes * arrays * (shape.ranks - 1) / shape.ranks, 4 * passes)
        return sent

    def memory(self, shape):
        return SchemeBytes(2 * (shape.query + shape.key + shape.value + shape.out))


def test_a_new_scheme_is_costed_as_itself(monkeypatch):
    monkeypatch.setitem(SCHEMES, "exchanged", Exchanged)
    words = [*DENSE.split(), "model.ffn_dim=64"]  # so that attention is at the height of memory
    ring, exchanged = (compose([*words, f"sequence.scheme={n}"]) for n in ("ring", "exchanged"))
    c = ring.model
    arrays = 1024 * c.head_dim * 2 * (2 * c.num_heads + 2 * c.num_kv_heads)
    arrays *= 1 if c.compute_dtype == "bfloat16" else 2
    for remat, passes in (("attention", 3), ("full", 4)):
        ring.model.remat = exchanged.model.remat = remat
        made, other = predicted(exchanged), predicted(ring)
        own = other.time.sent["sp"] - c.num_layers * _ring_bytes(c, 1 + (remat == "full"))
        assert made.time.sent["sp"] == own + c.num_layers * passes * arrays * 3 // 4
        assert made.time.total != other.time.total and made.memory.total != other.memory.total
    found = search(compose(DENSE.split()), TPU, {"mesh.sp", "mesh.fsdp", "data.global_batch"}, None)
    assert found.best is not None and "exchanged" in {way for way, _, _ in ways(ring, found.best.candidate.mesh, ())}


def _ring_bytes(c, forwards):
    b = 2 if c.compute_dtype == "bfloat16" else 4
    return sum(Ring().cost(attending(c, 1024, 3, b, forwards)).bytes.values())


class Unpriced(Exchanged):
    """It sends something else than what it inherits the cost of."""

    def forward(self, local):
        raise AssertionError("a plan runs nothing")


class Silent(Scheme):
    """It declares nothing."""

    forward = backward = Unpriced.forward


@pytest.mark.parametrize(("scheme", "member"), [(Silent, "memory"), (Unpriced, "memory")])
def test_a_scheme_without_costs_is_refused_by_name(monkeypatch, scheme, member):
    monkeypatch.setitem(SCHEMES, "new", scheme)
    with pytest.raises(Undeclared, match=rf"{scheme.__name__} does not declare what it costs: add '{member}' to class"):
        predicted(compose([*DENSE.split(), "sequence.scheme=new"]))


@pytest.mark.parametrize("member", ["cost", "memory", "hides"])
def test_a_scheme_declares_all_of_its_costs(monkeypatch, member):
    members = {n: v for n, v in vars(Exchanged).items() if not n.startswith("__") and n != member}
    monkeypatch.setitem(SCHEMES, "new", type("Partly", (Scheme,), members))
    with pytest.raises(Undeclared, match=rf"Partly .* add '{member}'"):
        search(compose(DENSE.split()), TPU, {"mesh.sp", "mesh.fsdp", "data.global_batch"}, None)


def test_a_dispatch_without_costs_is_refused_by_name():
    class Shuffled(AllToAll):
        def dispatch(self, job, window, x):
            raise AssertionError("a plan runs nothing")

    class Windowed(Shuffled):
        def turn(self, job, rows, q):
            raise AssertionError("a plan runs nothing")

    shape = ExchangeShape((("ep", 4),), 64, 2, 16, 16, 2, 1.25)
    with pytest.raises(Undeclared, match=r"Shuffled .* add 'cost' to class Shuffled"):
        cost_of(Shuffled(), shape)
    assert memory_of(Shuffled(), shape) == memory_of(AllToAll(), shape)  # which hangs on the rows alone
    for ask, member in ((memory_of, "memory"), (arriving_of, "arriving")):
        with pytest.raises(Undeclared, match=rf"Windowed .* add '{member}' to class Windowed"):
            ask(Windowed(), shape)


def test_further_passes_need_more_on_tpus():
    """Rows of 16 numbers in bfloat16, between products 8; of eight experts a rank of four has two. Where there is room for all
    that can arrive there is no loop."""
    shape = ExchangeShape((("ep", 4),), 64, 2, 16, 8, 2, 1.25, num_experts=8)
    dense, ragged, levels = (DISPATCHES[name]() for name in ("all_to_all", "ragged_all_to_all", "two_level"))
    missed = math.prod((8 - 2 - i) / (8 - i) for i in range(2))
    flat = math.ceil(1.25 * 64 * 4 * (1 - missed))
    for scheme, rows in ((dense, 4 * math.ceil(flat / 4)), (ragged, flat)):
        assert scheme.arrived(shape) == [rows]
        # Rows, cotangents, in float32 a sum of passes and one of this pass, and the rows of a choice; of experts what is
        # gathered, weighed, and gradients; between products a gradient of two and what a product reads.
        live = rows * 16 * (2 + 2 + 4 + 4 + 2) + 160 * 16 * 2 * 3 + 160 * 8 * 2 * 3
        live += 2 * 4 * 2 * 3 * 16 * 8 + 5 * rows * 4 * 128  # two sums of three matrices, and numbers beside rows
        assert scheme.memory(shape) + scheme.tpu_memory(shape) == live
    over = dataclasses.replace(shape, over=(("dp", 2), ("ep", 2)))
    outer, inner = levels.arrived(over)
    assert outer <= 2 * 64 and inner >= flat and levels.tpu_memory(over) > dense.tpu_memory(over)
    whole = dataclasses.replace(shape, buffer=4.0)
    assert dense.tpu_memory(whole) == ragged.tpu_memory(whole) == 0 == DISPATCHES["all_gather"]().tpu_memory(shape)
    assert levels.tpu_memory(dataclasses.replace(over, buffer=16.0)) == 0
    on, c = share_of(experts=(("ep", 4),)), compose(MIXED.split()).model
    m = c.experts
    sent = on.exchange(m.top_k, c.model_dim, m.ffn_dim // on.features, m.num)
    assert PARTS["experts"].memory(c, on).tpu_work == dense.tpu_memory(sent) > 0


def test_auto_compares_a_new_dispatch_by_its_own_cost(monkeypatch):
    class Nearby(AllToAll):
        def dispatch(self, job, window, x):
            raise AssertionError("a choice runs nothing")

        def cost(self, shape):
            sent = Traffic()
            sent.add(shape.over[0][0], PERMUTE, 8.0)
            return sent

    call = {"axis_sizes": (8,), "tokens": 512, "top_k": 2, "width": 64, "itemsize": 2, "device_kind": "NVIDIA H200"}
    assert choose(**call).scheme in DISPATCHES
    monkeypatch.setitem(DISPATCHES, "nearby", Nearby)
    assert choose(**call).scheme == "nearby"


def test_an_order_without_costs_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(order, "NAMES", (*ORDERS, "new"))
    with pytest.raises(Undeclared, match="the order 'new' does not declare what it costs: say in JOINS_PARTS"):
        _ = Order("new", 4).in_parts


class Mixer(Part):
    """A part that passes a state from rank to rank, and one that declares less."""

    name, role = "mixer", "mixer"

    def declare(self, c):
        return {"mixer_gate": Param((c.model_dim, c.model_dim), "D _")}

    def apply(self, x, params, at):
        raise AssertionError("a plan runs nothing")

    def flops(self, c):
        return Flops(2 * c.model_dim**2)

    def memory(self, c, share):
        x = share.tokens * c.model_dim * share.itemsize
        return PartBytes(0, 0, products=x, rest=x, work=3 * x)

    def traffic(self, c, share):
        sent = Traffic()
        if share.sequence > 1:
            sent.add("sp", PERMUTE, 2 * c.model_dim * share.itemsize, 2)
        return sent

    def recomputed(self, remat):
        return float(not remat.products)


@pytest.fixture
def fresh():
    """The planner keeps what it counted of a model, and here one word means several parts."""
    for kept in (counted_parts, has_experts):
        kept.cache_clear()
    yield
    for kept in (counted_parts, has_experts):
        kept.cache_clear()


def _of_mixers(monkeypatch, part):
    monkeypatch.setitem(PARTS, "mixer", part)
    return compose([*DENSE.split(), "model.layer_pattern=[mixer+mlp,full]", "model.num_layers=2"])


def test_a_new_part_is_costed_as_itself(monkeypatch, fresh):
    mixed = _of_mixers(monkeypatch, Mixer())
    plain, one = (dataclasses.replace(mixed, model=dataclasses.replace(mixed.model)) for _ in range(2))
    plain.model.layer_pattern = ("full",)
    c, made, other = mixed.model, predicted(mixed), predicted(plain)
    b = 2 if c.compute_dtype == "bfloat16" else 4
    assert 0 < made.time.seconds["attention"] == pytest.approx(other.time.seconds["attention"] / 2)
    assert made.memory.classes["activations kept"] < other.memory.classes["activations kept"]
    one.model.remat = "none"
    more = predicted(one).memory.classes["activations kept"] - _kept_by_others(one.model, b)
    assert more == 2 * 1024 * c.model_dim * b  # what the part declares, of a layer


def _kept_by_others(c, b):
    """Returns the bytes that the layers' inputs, two MLPs and one attention keep under the policy that keeps everything."""
    on = Share(1024, b, 1024, REMAT["none"], Ring(), Order("zigzag", 4), AllToAll())
    parts = [PARTS[n].memory(c, on) for n in ("attention", "mlp", "mlp")]
    return 2 * 1024 * c.model_dim * b + sum(REMAT["none"].kept(p) for p in parts)


@pytest.mark.parametrize("member", ["memory", "traffic", "recomputed"])
def test_a_part_declares_all_of_its_costs(monkeypatch, fresh, member):
    members = {n: v for n, v in vars(Mixer).items() if not n.startswith("__") and n != member}
    with pytest.raises(Undeclared, match=rf"Partly does not declare what it costs: add '{member}' to class Partly"):
        predicted(_of_mixers(monkeypatch, type("Partly", (Part,), members)()))


def test_a_part_that_changes_another_declares_its_own_costs():
    class Wider(Mixer):
        def apply(self, x, params, at):
            raise AssertionError("a plan runs nothing")

    with pytest.raises(Undeclared, match=r"Wider .* add 'memory' to class Wider"):
        Costs(Wider()).memory(DecoderConfig(), share_of())


def test_a_new_policy_is_costed_as_itself(monkeypatch):
    """It keeps products, and computes attention again."""
    monkeypatch.setitem(REMAT, "products", Remat(asked=False, products=True))
    sections = compose(DENSE.split())
    made = {}
    for name in ("none", "dots", "products", "full"):
        sections.model.remat = name
        made[name] = predicted(sections)
    kept = {name: p.memory.classes["activations kept"] for name, p in made.items()}
    assert kept["full"] < kept["products"] < kept["dots"] < kept["none"]
    seconds = {name: (p.time.seconds["matmuls"], p.time.seconds["attention"]) for name, p in made.items()}
    assert seconds["products"] == (seconds["dots"][0], seconds["full"][1])
    assert "products" in policies_searched()


@pytest.mark.parametrize(
    "facts", [{"rest": True}, {"host": True, "products": True}, {"host": True, "asked": True, "products": True}]
)
def test_a_policy_that_cannot_be(facts):
    with pytest.raises(ValueError, match=r"saves 'rest'|saves only named values"):
        Remat(**{"asked": False, "products": False, **facts})


def test_a_collective_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="collective = 'gossip' is unknown; use one of all_gather"):
        Traffic().add("sp", "gossip", 1)


def test_what_waits_is_a_part_of_what_is_sent():
    sent, key = Traffic(), ("sp", "permute")
    sent.add(*key, 10, 2)
    sent.add(*key, 10, 2, waits=(1, 1))
    assert (sent.waited().bytes, sent.waited().calls) == ({key: 11}, {key: 3})
    twice = Traffic()
    twice.add_all(sent.hidden(0.5, 7), 2)
    assert (twice.bytes, twice.waited().bytes, twice.waited().calls) == ({key: 40}, {key: 20}, {key: 4})
    assert twice.passes == twice.over(["sp"]).passes == 14 and not twice.over(["tp"]).bytes


def test_schemes_by_hand():
    """Four ranks, 100 bytes of queries, keys of 40 and values of 60, in bfloat16, of eight heads and two of keys."""
    sizes = {"query": 100, "key": 40, "value": 60, "out": 150, "lse": 16, "heads": 8, "kv_heads": 2}
    shape = AttentionShape((("sp", 4),), 3, **sizes, itemsize=2)
    assert Ring().cost(shape).bytes == {("sp", PERMUTE): 3 * 100 + 3 * 100 + 2 * 200 + 100}
    assert AllGather().cost(shape).bytes == {("sp", ALL_GATHER): 2 * 3 * 100, ("sp", REDUCE_SCATTER): 3 * 200}
    again = dataclasses.replace(shape, forwards=2)
    assert Ring().cost(again).bytes[("sp", PERMUTE)] - Ring().cost(shape).bytes[("sp", PERMUTE)] == 300
    assert Ring().memory(shape) == SchemeBytes(3 * 100 + 2 * 100 + 2 * 100, 2 * 2 * 150, in_place=True)
    assert AllGather().memory(shape) == SchemeBytes(4 * 100 + 2 * 100 + 2 * 100, 2 * 2 * 150)
    # Each head of keys is sent twice, so that four ranks have one. Three passes, but the output and lse not as gradients.
    assert Ulysses().cost(shape).bytes == {("sp", ALL_TO_ALL): 3 / 4 * (3 * (100 + 2 * 100) + 2 * 150 + 3 * 16)}
    assert Ulysses().memory(shape) == SchemeBytes(100 + 2 * 100 + 150 + 2 * 16)
    # Two groups of a head each: the heads of keys are not cut, and both groups have them. Two are held.
    two = Ulysses(head_groups=2)
    assert two.cost(shape).bytes == Ulysses().cost(shape).bytes
    assert Ulysses().cost(shape).calls == {("sp", ALL_TO_ALL): 5 + 9} and two.cost(shape).calls == {
        ("sp", ALL_TO_ALL): 2 * 8 + 6
    }
    assert two.memory(shape) == SchemeBytes(2 * (50 + 2 * 100 + 75 + 2 * 8))
    assert Ulysses(head_groups=3).rejects(8, (("sp", 4),)) and two.rejects(8, (("sp", 4),)) is None
    # The scheme outside has the heads of one group.
    nested = Ulysses(Ulysses(), 2)
    assert nested.rejects(8, (("cp", 2), ("sp", 2))) is None and "2 heads" in nested.rejects(8, (("cp", 4), ("sp", 2)))
    # Over two by two ranks each has one of the two heads of keys, and sends it along the outer axis with twice the tokens.
    both = dataclasses.replace(shape, over=(("cp", 2), ("sp", 2)))
    inner = dataclasses.replace(shape, over=(("cp", 2),), hops=1, heads=4, kv_heads=1)
    sent = Ulysses().cost(both).bytes
    assert sent.pop(("sp", ALL_TO_ALL)) == 1 / 2 * (3 * (100 + 100) + 2 * 150 + 3 * 16)
    assert sent == Ring().cost(inner).bytes == {("cp", PERMUTE): 1 * 2 * 100 + 100}
    assert Ulysses().memory(both).work == Ring().memory(inner).work + 100 + 100 + 150 + 2 * 16
    assert Ulysses(AllGather()).cost(both).bytes[("cp", ALL_GATHER)] == 2 * 100


@pytest.mark.parametrize(
    "model", ["sparse_nano", "hybrid_nano model.qk_norm=false model.layer_pattern=[gated_delta+mlp]"]
)
def test_where_no_layer_attends_by_a_scheme_a_plan_begins_as_a_run(model):
    """Layers that gather keys in the order of the text, or pass a state on: all schemes are alike, and the order is that of the
    text; a layer of full attention beside them brings the search back."""
    sections = compose([*DENSE.split(), "sequence.scheme=auto", *f"model={model}".split()])
    axes, mesh = (("sp", 4),), tuple({"fsdp": 2, "sp": 4}.get(axis, 1) for axis in AXES)
    assert orders_searched(sections, axes)[0] == "contiguous" != orders_searched(compose(DENSE.split()), axes)[0]
    tried = [*ways(sections, mesh, {ORDER})]
    assert {scheme for scheme, _, _ in tried} == {"ring"}
    plan = candidate_of(sections, dict(zip(AXES, mesh, strict=True)))
    assert plan.order == "contiguous" and Predictor(sections, TPU).as_a_run(plan).order == "contiguous"
    assert not [*products(sections, plan, ())] and not [*details(sections, plan, ())]
    sections.sequence.scheme = "ulysses"
    assert {scheme for scheme, _, _ in ways(sections, mesh, {ORDER})} == {None}
    sections.model = dataclasses.replace(sections.model, layer_pattern=(*sections.model.layer_pattern, "full+mlp"))
    assert len({scheme for scheme, _, _ in ways(sections, mesh, {ORDER})}) > 2
