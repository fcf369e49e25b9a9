"""Latents travel over the ranks of a sequence, and each rank makes the keys and values of its heads where they arrive: the
numbers and all gradients of one device, the bytes that are declared, and when they do."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_declared_costs import collectives
from test_sequence import assert_close

import kernels
from ejdist import Order, make_mesh, set_layout
from ejdist.costs import PERMUTE
from ejdist.documents import ONE_DOCUMENT
from ejdist.frozen import Frozen
from ejdist.latent_attention import over_ranks
from ejdist.mapped import map_shards
from ejdist.models.attention import LatentAttention
from ejdist.models.config import LatentShape
from ejdist.models.decoder import DecoderConfig
from ejdist.models.parameters import initialise
from ejdist.models.part import Costs, LayerContext
from ejdist.models.remat import REMAT
from ejdist.models.share import Share
from ejdist.operations import bind_ops
from ejdist.planning.candidates import candidate_of
from ejdist.planning.search import Predictor
from ejdist.planning.share import share_of
from ejdist.planning.targets import target_of
from ejdist.sequence import AllGather, GroupCast, Halo, Ring, Scheme, Ulysses, by_window, exchange
from ejdist.sequence.cost import attention_shape, chunks_of_documents
from ejdist.sequence.latents import sends_latents, travels
from ejdist.sequence.reshard import Reshard
from ejdist.sequence.windows import ByWindow
from kernels.ops.multi_latent_attention import op
from recipes.schema import compose

B, T, N, H, HR, HV, R = 2, 32, 8, 6, 4, 5, 8
RNG = np.random.default_rng(3)
DIMS = {"query": (B, T, N, H), "key_value": (B, T, R), "w_kc": (R, N, H), "w_vc": (R, N, HV)}
DIMS |= {"query_rope": (B, T, N, HR), "key_rope": (B, T, HR), "softmax_aux": (N,)}
ARRAYS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in DIMS.items()}
D_OUT, D_LSE = (RNG.standard_normal(shape).astype(np.float32) for shape in ((B, T, N, HV), (B, T, N)))
IDS = np.sort(RNG.integers(0, 4, (B, T)), axis=1).astype(np.int32)
IDS[:, T - 3 :] = -1
MASKS = {
    "causal": {"causal": True},
    "full": {},
    "packed": {"causal": True, "segment_ids": IDS},
    "packed_window": {"causal": True, "segment_ids": IDS, "sliding_window": 5, "logits_soft_cap": 2.0},
}
# Which arrays lie as the tokens do.
TOKENS = ("query", "key_value", "query_rope", "key_rope")


def numbers(function, order, options, sinks=False):
    """Returns out, lse and the gradient of every array, in the order of the text."""
    options = {n: order.permute(np.asarray(x)) if n == "segment_ids" else x for n, x in options.items()}
    arrays = {n: np.asarray(x) for n, x in ARRAYS.items() if sinks or n != "softmax_aux"}
    arrays = {n: order.permute(x) if n in TOKENS else x for n, x in arrays.items()}

    @jax.jit
    def run(arrays, d_out, d_lse):
        (out, lse), pull = jax.vjp(lambda arrays: function(**arrays, **options, return_lse=True), arrays)
        return out, lse, pull((d_out, jnp.where(jnp.isfinite(lse), d_lse, 0)))[0]

    permuted = [order.permute(np.asarray(x)) for x in (D_OUT, D_LSE)]
    out, lse, grads = jax.device_get(run(arrays, *permuted))
    whole = [order.inverse(grads[n]) if n in TOKENS else grads[n] for n in sorted(grads)]
    return [order.inverse(out), order.inverse(lse), *whole]


@functools.cache
def on_one_device(mask, sinks):
    def contract(return_lse, **arguments):  # which compiles in half the time, and the grid holds the operation to it
        call = kernels.flash_mla.prepare(**arguments).call
        return op.function(**call.traced(), **call.static())

    return numbers(contract, Order("contiguous", 1), MASKS[mask], sinks)


SCHEMES = {
    "ring": Ring(),
    "all_gather": AllGather(),
    "ulysses": Ulysses(),
    "groups": Ulysses(head_groups=2),
    "halo": Halo(),
    "group_cast": GroupCast(),
}
MESHES = {"sp2": {"sp": 2}, "sp4": {"sp": 4}, "tp2": {"sp": 2, "tp": 2, "fsdp": 2}, "cp2": {"cp": 2, "sp": 2}}
QUICK = {
    ("packed", "sp2", ("zigzag",), "ring"),
}


def grid():
    for mask in MASKS:
        for mesh in MESHES:
            for order in (("contiguous",), ("zigzag",), ("striped", 1), ("striped", 4)):
                for scheme in SCHEMES:
                    ranks = math.prod(MESHES[mesh].get(a, 1) for a in ("sp", "cp"))
                    over = tuple((a, MESHES[mesh][a]) for a in ("cp", "sp") if a in MESHES[mesh])
                    if SCHEMES[scheme].rejects(N // MESHES[mesh].get("tp", 1), over):
                        continue
                    quick = (mask, mesh, order, scheme) in QUICK
                    yield pytest.param(
                        mask, mesh, Order(order[0], ranks, *order[1:]), scheme,
                        marks=() if quick else (pytest.mark.slow,),
                    )  # fmt: skip


@pytest.mark.parametrize(("mask", "mesh", "order", "scheme"), list(grid()))
def test_the_numbers_of_one_device(mask, mesh, order, scheme):
    sinks, always = mask == "packed_window", ByWindow(SCHEMES[scheme], SCHEMES[scheme], "always")
    split = functools.partial(over_ranks(always), mesh=make_mesh(**MESHES[mesh]))
    with set_layout(order=order):
        got = numbers(split, order, MASKS[mask], sinks)
    assert_close(got, on_one_device(mask, sinks), f"{mask} {mesh} {order} {scheme}")


# -- what is sent ------------------------------------------------------------------------------------------------------


def sent(scheme, sizes, width=R):
    """Returns what the program of a gradient sends, and the shape that it is declared for; bfloat16, one row of 64 tokens."""
    ranks = math.prod(sizes.values())
    mesh, names = make_mesh(**sizes, devices=jax.devices()[:ranks]), [n for n in DIMS if n != "softmax_aux"]
    dims = {"B": 1, "T": 64, "N": N, "K": N, "H": H, "Hr": HR, "Hv": HV, "R": width}
    letters = ("B T N H", "B T R", "R K H", "R K Hv", "B T N Hr", "B T Hr")
    shapes = [jax.ShapeDtypeStruct([dims[d] for d in of.split()], jnp.bfloat16) for of in letters]

    def loss(arrays):
        with set_layout(order="zigzag"):
            return over_ranks(scheme)(**arrays, causal=True, mesh=mesh, platform="xla").astype(jnp.float32).sum()

    program = jax.make_jaxpr(jax.grad(loss))(dict(zip(names, shapes, strict=True)))
    return collectives(program.jaxpr, dict(mesh.shape)), attention_shape(
        tuple(sizes.items()), dims | {"T": 64 // ranks}, 2, ranks - 1
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("ring", {"sp": 4}),
        ("all_gather", {"sp": 4}),
        ("ulysses", {"sp": 4}),
        ("groups", {"cp": 2, "sp": 2}),
        ("group_cast", {"sp": 4}),
    ],
)
def test_what_is_sent_is_what_is_declared(name, sizes):
    scheme = SCHEMES[name]
    made, shape = sent(by_window(scheme, None, "always"), sizes)
    order = Order("zigzag", shape.ranks)
    shape = dataclasses.replace(
        shape, chunks=chunks_of_documents(order, 64, kernels.MaskInfo(causal=True), ONE_DOCUMENT)
    )
    declared = scheme.cost(shape)
    assert made.bytes == declared.bytes and made.calls == declared.calls
    heads = scheme.cost(dataclasses.replace(shape, latents=0))
    assert sum(declared.bytes.values()) < sum(heads.bytes.values())
    if name == "ring":  # by the formula: forward and again backward, sums in float32, and home
        (bytes_,) = made.bytes.values()
        assert bytes_ == 16 * (R + HR) * (2 * 2 * 3 + 4 * 2 + 2)
        assert sent(by_window(scheme, None, "never"), sizes)[0].bytes == heads.bytes


EXPANDED = 2 * 512 * 128 * (128 + 128)  # FLOPs a token of DeepSeek-V3's keys and values


def test_gradients_of_gathered_latents_are_sums_on_the_rank_of_their_tokens():
    order, x = Order("zigzag", 2), ARRAYS["key_value"]
    way = Reshard(op, "sp", order, ("N", "K"), ("T", "S"), {})

    def there_and_back(x):
        return way.back("key_value", way.there("key_value", x) * (1 + exchange.rank("sp")), None)

    mapped = map_shards(there_and_back, make_mesh(sp=2, devices=jax.devices()[:2]), (P(None, "sp"),), P(None, "sp"))
    np.testing.assert_allclose(jax.jit(mapped)(x), 3 * x, rtol=1e-6)


def test_of_deepseek_v3_a_ring_sends_a_fiftieth():
    """Of a layer of the published sizes, in plans, and by the ring's own arithmetic; and it holds less."""
    c = compose(["model=deepseek_v3"]).model

    def cost(latents, **features):
        scheme = by_window("ring", None, latents)
        share = Share(
            16384, 2, 131072, REMAT["attention"], scheme, Order("zigzag", 8), dispatch=None, **features
        )  # fmt: skip
        part = LatentAttention()
        repeated = part.repeated(c, share) / part.flops(c).token
        held, b = Costs(part).memory(c, share), 2 * 16384
        kept = held.products - b * c.num_heads * (128 + 64) // share.features
        return Costs(part).traffic(c, share).bytes["sp", PERMUTE], held.work, repeated, kept // b

    latents, heads = cost("auto"), cost("never")
    assert latents == cost("always") and heads[2] == 0
    assert latents[0] == heads[0] * 576 / (128 * (192 + 128)) < heads[0] / 50
    assert latents[1] < heads[1] and latents[2] == pytest.approx(
        (8 * 4 - 4) * EXPANDED / LatentAttention().flops(c).token
    )
    narrow = 1536 + 512 + 64 + c.model_dim
    assert latents[3] == narrow and heads[3] == narrow + 128 * (192 + 128)
    assert cost("auto", features=8)[0] == latents[0] < cost("never", features=8)[0] / 8


def test_plans_follow_the_key():
    words = ["model=deepseek_v3", "mesh.fsdp=8", "mesh.sp=8", "mesh.ep=4", "data.sequence_length=131072"]
    target = target_of("v5p:8x8x4", None, None, None)
    plans = {}
    for latents in ("auto", "never"):
        s = compose([*words, "data.global_batch=32", f"sequence.latents={latents}"])
        plans[latents] = Predictor(s, target).checked(
            candidate_of(s, {"dp": 1, "fsdp": 8, "ep": 4, "cp": 1, "sp": 8, "tp": 1})
        )
    auto, never = (plans[n].time for n in ("auto", "never"))
    assert auto.sent["sp"] < never.sent["sp"] and auto.seconds["matmuls"] > never.seconds["matmuls"]
    assert auto.flops == never.flops and auto.total < never.total


def test_latents_travel_where_they_are_cheaper():
    def shape(ranks=8, **dims):
        of = {"B": 1, "T": 1, "N": 128, "K": 128, "H": 128, "Hr": 64, "Hv": 128, "R": 512} | dims
        return attention_shape((("sp", ranks),), of, 2, ranks - 1)

    auto = [*map(by_window, ("ring", "all_gather", "ulysses"), (None,) * 3)]
    assert all(sends_latents(scheme, shape()) for scheme in auto)
    assert not any(sends_latents(scheme, shape(ranks=1)) for scheme in (*auto, by_window("ring", None, "always")))
    few = shape(N=2, K=2)  # of two heads on a device keys and values are hardly wider, and latents are computed again
    assert not sends_latents(auto[0], few) and sends_latents(by_window("ring", None, "always"), few)
    assert not sends_latents(by_window("ring", None, "never"), shape())
    assert by_window(OfKeys(), None).latents == "never"
    of_layer = {"N": 8, "K": 8, "H": 128, "Hr": 64, "Hv": 128, "R": 512}

    def of_model(platform=None, latents="auto", **sizes):
        return travels(make_mesh(**sizes), by_window("ring", None, latents), platform, 2, False, **of_layer)

    assert of_model(sp=8) and of_model("xla", sp=8) and not of_model(dp=8) and not of_model(sp=2, tp=4)
    assert not of_model("pallas", sp=8) and of_model("pallas", "always", sp=8)


class OfKeys(Scheme):
    """A scheme that reads keys and values by name."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: compose(["sequence.latents=sometimes"]).sequence.validate(),
            "sequence.latents = 'sometimes'.* auto, always",
        ),
        (
            lambda: by_window(OfKeys(), None, "always"),
            "sequence.latents = 'always': the scheme OfKeys moves keys and values",
        ),
        (
            lambda: over_ranks(Ring())(**WHOLE, mask_info=DENSE, mesh=make_mesh(sp=4)),
            "flash_mla: 'attention_mask' is as large as T x T",
        ),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises((ValueError, kernels.Unsupported), match=words):
        make()


WHOLE = {n: x for n, x in ARRAYS.items() if n != "softmax_aux"}
DENSE = kernels.MaskInfo(attention_mask=np.ones((B, 1, T, T), bool))


# -- a model -----------------------------------------------------------------------------------------------------------

LAYER = DecoderConfig(
    model_dim=12, num_heads=N, num_kv_heads=N, compute_dtype="float32",
    latent=LatentShape(kv_rank=R, nope_dim=H, rope_dim=HR, value_dim=HV),
)  # fmt: skip


def layer(ops, params, x, batch):
    """Returns the output of a layer's latent attention."""
    ctx = LayerContext(LAYER, ops.of_batch(batch), batch, 1, 0, 0, 0, {})
    return LatentAttention().apply(x, params, ctx)[0]


@pytest.mark.parametrize(
    ("name", "scheme", "sizes"),
    [
        ("balanced", "ulysses", {"sp": 2, "tp": 2}),
        ("balanced", "ring", {"sp": 2, "tp": 2, "fsdp": 2}),
        ("contiguous", "all_gather", {"sp": 4, "tp": 2}),
    ],
)
@pytest.mark.slow
def test_a_layer_of_a_model_sends_latents(name, scheme, sizes):
    """In the order that each row brings, too: the numbers and gradients of one device."""
    ranks = sizes["sp"]
    order, mesh = Order(name, ranks, 4 if name == "balanced" else 1), make_mesh(**sizes)
    params = initialise(LatentAttention().declare(LAYER), jax.random.key(0))
    x = RNG.standard_normal((B, T, 12)).astype(np.float32)
    chunks = np.stack([RNG.permutation(T // 4) for _ in range(B)]).reshape(B, ranks, -1)
    index = (np.sort(chunks, -1).reshape(B, -1, 1) * 4 + np.arange(4)).reshape(B, T).astype(np.int32)
    batch = {"positions": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)), "segment_ids": IDS}
    placed = {n: order.permute(v, index=index) for n, v in batch.items()}
    placed |= {"order": index} if name == "balanced" else {}

    def numbers(ops, x, batch):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(layer(ops, *a, batch))), (0, 1))(params, x)

    split = bind_ops(mesh, order=order, scheme=by_window(scheme, None, "always"))
    with set_layout(order=order):
        value, (grads, of_x) = jax.jit(lambda x: numbers(split, x, placed))(order.permute(x, index=index))
    wanted, (of_params, of_input) = jax.jit(lambda x: numbers(bind_ops(None), x, batch))(x)
    got = [value, order.inverse(np.asarray(of_x), index=index), *(grads[n] for n in sorted(grads))]
    assert_close(got, [wanted, of_input, *(of_params[n] for n in sorted(of_params))], name)


def test_a_matrix_with_an_adapter_makes_keys_where_their_tokens_are():
    mesh, up = make_mesh(sp=2, devices=jax.devices()[:2]), jnp.ones((R, N, H))
    params = initialise(LatentAttention().declare(LAYER), jax.random.key(0))
    adapted = {**params, "key_up": Frozen(up, a=jnp.ones((R, 2)), b=jnp.ones((2, N, H)))}
    batch = {"positions": np.arange(T, dtype=np.int32)[None].repeat(B, 0), "segment_ids": IDS}

    def sent(params, latents):
        ops = bind_ops(mesh, scheme=by_window(Ring(hops="mask"), None, latents))
        program = jax.make_jaxpr(lambda x: layer(ops, params, x, batch))(np.ones((B, T, 12), np.float32))
        return sum(n for (_, kind), n in collectives(program.jaxpr, {"sp": 2}).bytes.items() if kind == PERMUTE)

    assert bind_ops(mesh, deterministic_attention=True).flash_mla.keywords["deterministic"] is True
    index = jnp.arange(T)[None]
    read = bind_ops(mesh, order=Order("balanced", 2, 4)).of_batch({"order": index}).flash_mla.keywords["mask_info"]
    assert read.q_positions is read.kv_positions is index
    assert sent(params, "auto") == 4 * B * T // 2 * (R + HR)
    assert sent(adapted, "auto") == sent(params, "never") == 4 * B * T // 2 * N * (H + HR + HV)
    with pytest.raises(ValueError, match=r"sequence.latents = 'always': a matrix .* has an adapter"):
        sent(adapted, "always")
    recipe = compose(["model=deepseek_v3", "lora.rank=4", "mesh.sp=8"])
    assert share_of(recipe, make_mesh(sp=8)).scheme.latents == "never"
    recipe.lora.targets = ("latent_query",)
    assert share_of(recipe, make_mesh(sp=8)).scheme.latents == "auto"
