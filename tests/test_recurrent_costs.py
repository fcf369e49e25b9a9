"""What layers that are recurrences cost: what they send, what they compute, and plans of models that have them."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_recurrences import IDS, KINDS, SIZES, config, drawn

import kernels
from ejdist import make_mesh
from ejdist.costs import ALL_GATHER, ALL_REDUCE, PERMUTE
from ejdist.experts.schemes import AllToAll
from ejdist.layout import ACTIVATIONS, PARAMETERS, sharding
from ejdist.models import parts
from ejdist.models.parameters import num_parameters
from ejdist.models.recurrent_shapes import (
    GatedDeltaShape,
    GlaShape,
    KdaShape,
    LightningShape,
    Mamba2Shape,
    Rwkv7Shape,
)
from ejdist.models.remat import REMAT
from ejdist.models.share import Share
from ejdist.operations import bind_ops
from ejdist.order import Order
from ejdist.planning.candidates import orders_searched
from ejdist.planning.memory import held, memory
from ejdist.planning.share import share_of
from ejdist.sequence.schemes import Ring
from ejdist.training.program import make_program
from kernels.framework.work import nbytes
from launch.plan import parse, plan
from recipes.schema import compose


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_sends_is_states_and_windows(kind):
    """Four ranks, one row of a document, bfloat16: two hops of a scan and one to the next rank, each of what a rank does to the
    states, in float32, and of what it does to the inputs before a token; forward and backward."""
    c, m = config(kind), SIZES[kind]
    on = Share(64, 2, 256, REMAT["none"], Ring(), Order("contiguous", 4), AllToAll())
    numbers = {
        "gated_delta": lambda: 4 * (3 * 5 + 3 * 3) + (3 - 1) * 2 * (3 + 3 + 2 * 5),
        "kda": lambda: 4 * (3 * 5 + 3 * 3) + (3 - 1) * 4 * (3 + 3 + 5),
        "mamba2": lambda: 4 * (3 * 5 + 1) + (3 - 1) * (4 * 3 + 2 * 2 * 5),
        "lightning": lambda: 4 * (3 * 3 + 1),
        "gla": lambda: 4 * (3 * 5 + 3),
        "rwkv7": lambda: 4 * (3 * 3 + 3 * 3) + (2 - 1) * 8,
    }[kind]()
    sent = parts.PARTS[kind].traffic(c, on)
    assert m == getattr(c, kind) and sent.bytes == {("sp", PERMUTE): 2 * 3 * 4 * numbers}
    longer = dataclasses.replace(on, tokens=1024, length=4096)
    assert parts.PARTS[kind].traffic(c, longer).bytes == sent.bytes
    again = parts.PARTS[kind].traffic(c, dataclasses.replace(on, remat=REMAT["full"]))
    assert again.bytes == {("sp", PERMUTE): 3 * 3 * 4 * numbers}


@pytest.mark.slow
def test_a_compiled_layer_of_rwkv7_sends_over_heads_what_it_declares():
    """Sums: of its result, of the gradients of the three inputs that products with all heads read, and of narrow vectors. The
    tokens before are gathered, and the gradient of what was shifted."""
    c, mesh, part = config("rwkv7"), make_mesh(tp=2, devices=jax.devices()[:2]), parts.PARTS["rwkv7"]
    places = {n: sharding(mesh, p.dims.split(), PARAMETERS, shape=p.shape) for n, p in part.declare(c).items()}
    at = parts.LayerContext(c, bind_ops(mesh), {"segment_ids": jnp.asarray(IDS)}, 0, 0, 0, 0, {})
    params = jax.device_put(drawn(part, c), places)
    x = jax.device_put(np.ones((*IDS.shape, c.model_dim), np.float32), sharding(mesh, "BTD", ACTIVATIONS))
    step = jax.jit(jax.grad(lambda p, x: jnp.sum(part.apply(x, p, at)[0] ** 2), argnums=(0, 1)))
    text = step.lower(params, x).compile().as_text()
    made = {}
    for kind, times in ((ALL_REDUCE, 2), (ALL_GATHER, 1)):  # how often a device sends the half of a result
        results = re.findall(rf" = (.*?) {kind.replace('_', '-')}(?:-start)?\(", text)
        shapes = re.findall(r"f32\[([\d,]+)\]", " ".join(results))
        made["tp", kind] = times * 4 * sum(math.prod(map(int, shape.split(","))) for shape in shapes) / 2
    on = Share(IDS.size, 4, IDS.shape[1], REMAT["none"], Ring(), Order("contiguous", 1), AllToAll(), features=2)
    assert part.traffic(c, on).bytes == made


def test_flops_of_layers_by_hand():
    """Projections; taps of convolutions; and of each state 2 for a product with it and 2 for what is added."""
    assert parts.PARTS["gated_delta"].flops(config("gated_delta")).token == (
        2 * 8 * (2 * (3 + 3 + 10) + 4 * 5 + 2 * 4 + 4 * 5) + 2 * 3 * 2 * 16 + 6 * 4 * 3 * 5
    )
    assert parts.PARTS["kda"].flops(config("kda")).token == (
        2 * 8 * (4 * (3 + 3 + 5) + 4 + 2 * 8 + 4 * 5) + 2 * 8 * 4 * (3 + 5) + 2 * 3 * 4 * 11 + 6 * 4 * 3 * 5
    )
    assert parts.PARTS["mamba2"].flops(config("mamba2")).token == (
        2 * 8 * (3 * 4 * 3 + 2 * 2 * 5 + 4) + 2 * 3 * (4 * 3 + 2 * 2 * 5) + 4 * 4 * 3 * 5
    )
    assert parts.PARTS["lightning"].flops(config("lightning")).token == 2 * 8 * 5 * 4 * 3 + 4 * 4 * 3 * 3
    assert parts.PARTS["gla"].flops(config("gla")).token == (
        2 * 8 * (4 * (3 + 3 + 5 + 5) + 8 + 4 * 5) + 2 * 8 * 4 * 3 + 4 * 4 * 3 * 5
    )
    assert parts.PARTS["rwkv7"].flops(config("rwkv7")).token == (
        2 * 8 * (4 * 4 * 3 + 8 + 8 + 16) + 2 * (8 + 8 + 16) * 4 * 3 + 2 * 2 * 8 + 8 * 4 * 3 * 3
    )


def test_a_hybrid_is_planned():
    """It trains long rows faster than its twin with attention alone, and in an order that its recurrences take."""

    def planned(model):
        words = (
            "device=h100 devices=8 finalists=0 recipe=hybrid_long_context data.sequence_length=262144 mesh.sp=8".split()
        )
        orders = orders_searched(compose([f"model={model}", "recipe=hybrid_long_context"]), (("sp", 4),))
        made = plan(parse([*words, "search=false", f"model={model}"]))["plan"]["predicted"]
        return made, {name for name in orders if Order(name, 4).carried}

    (mixed, none), (dense, carried) = planned("hybrid_nano"), planned("nano")
    assert mixed["tokens_per_second"] > dense["tokens_per_second"] and mixed["bytes"] > 0
    assert not none and carried


OF_TPUS = {  # sizes of layers, and their operation's arrays
    "gated_delta": (
        "delta_rule",
        GatedDeltaShape(8, 16, 128, 64),
        {"key": (8, 128), "value": (16, 64), "beta": (16,), "g": (16, 1)},
    ),
    "kda": ("delta_rule", KdaShape(8, 64, 128), {"key": (8, 64), "value": (8, 128), "beta": (8,), "g": (8, 64)}),
    "mamba2": ("state_space_v2", Mamba2Shape(16, 64, 128), {"x": (16, 64), "dt": (16,), "B": (1, 128), "C": (1, 128)}),
    "lightning": ("linear_attention", LightningShape(8, 64), {"query": (8, 64), "key": (8, 64), "value": (8, 64)}),
    "gla": (
        "linear_attention",
        GlaShape(4, 64, 128),
        {"query": (4, 64), "key": (4, 64), "value": (4, 128), "gk": (4, 64)},
    ),
}


KEPT = OF_TPUS | {"rwkv7": ("rwkv7", Rwkv7Shape(5, 64), dict.fromkeys("rwkvab", (5, 64)))}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plans_for_tpus_count_what_their_kernels_keep(kind, dtype):
    """What a forward keeps for its backward there is as large as the backend declares."""
    name, shape, arrays = KEPT[kind]
    op, T, itemsize = kernels.operations()[name], 1024, jnp.dtype(dtype).itemsize
    arrays = {n: jax.ShapeDtypeStruct((2, T, *x), dtype) for n, x in arrays.items()}
    arrays |= {"query": arrays["key"]} if kind in ("gated_delta", "kda") else {}
    arrays |= {"A": jax.ShapeDtypeStruct((16,), dtype)} if kind == "mamba2" else {}
    kept = op.plan(op.bind(**arrays), None, None, differentiated=True).kept
    c = dataclasses.replace(config("gla"), **{kind: shape})
    on = Share(2 * T, itemsize, T, REMAT["none"], Ring(), Order("contiguous", 1), AllToAll())
    assert parts.PARTS[kind].memory(c, on).tpu_rest == nbytes(*kept.values()) > 0
    with kernels.compile_for(90):
        kept = op.plan(op.bind(**arrays), None, None, differentiated=True).kept
    assert parts.PARTS[kind].memory(c, on).gpu_rest == nbytes(*kept.values())
    assert bool(kept) == (kind in ("gated_delta", "kda")), "what else keeps anything for its backward there?"


@pytest.mark.parametrize("kind", OF_TPUS)
def test_plans_for_gpus_count_what_their_kernels_store(kind):
    """States and their gradients, of chunks of 64 tokens, in float32 of 16; and where XLA has no kernel its own arrays."""
    T, c = 1024, dataclasses.replace(config("gla"), **{kind: OF_TPUS[kind][1]})
    states = {"gated_delta": 16 * 128 * 64, "kda": 8 * 64 * 128, "mamba2": 16 * 64 * 128, "lightning": 8 * 64 * 64}
    turned = (
        3 * 8 * 64 * (kind == "kda")
    )  # queries and keys with the decays of their channels in them, and written ones
    for itemsize, chunk in ((2, 64), (4, 16)):
        on = Share(T, itemsize, T, REMAT["none"], Ring(), Order("contiguous", 1), AllToAll())
        stored = 2 * states.get(kind, 4 * 64 * 128) // chunk
        part = parts.PARTS[kind].memory(c, on)
        assert part.gpu_work == T * itemsize * (stored + turned) and part.tpu_work == 0
        wide = dataclasses.replace(parts.PARTS[kind].size(c), key=256).memory(c, on)
        assert wide.gpu_work == wide.tpu_work > 0
        assert 0 < part.moved and part.work + part.moved == wide.work + wide.moved, "a step's time is as measured"


@pytest.mark.parametrize(("remat", "layers"), [("none", 3), ("dots", 0)])
def test_where_everything_is_kept_plans_for_tpus_have_what_kernels_keep(remat, layers):
    """Of a model of four layers, of which three are recurrences."""
    sections, mesh = (
        compose(["recipe=hybrid_long_context", f"model.remat={remat}"]),
        make_mesh(devices=jax.devices()[:1]),
    )
    of = held(sections, make_program(sections, mesh).model, mesh)
    tpu, gpu = (memory(sections, of, mesh, platform) for platform in ("tpu", "gpu"))
    each = parts.PARTS["gated_delta"].memory(sections.model, share_of(sections, mesh))
    assert each.tpu_rest > each.gpu_rest > 0
    assert tpu.classes["activations kept"] - gpu.classes["activations kept"] == layers * (each.tpu_rest - each.gpu_rest)


@pytest.mark.parametrize(
    ("name", "size", "active"),
    [
        ("qwen3_next_80b_a3b", 80e9, 3.3e9),
        ("kimi_linear_48b_a3b", 49.1e9, 2.8e9),
        ("nemotron_h_8b", 8.1e9, 7.1e9),
    ],
)
def test_a_published_hybrid_is_as_large_as_it_is_called_and_is_planned(name, size, active):
    """Billions of parameters, of which so many multiply a token, beside embedding and output projection."""
    c = compose([f"model={name}"]).model
    model, table = c.build(), c.vocab_size * c.model_dim
    assert num_parameters(model.declared) == pytest.approx(size, rel=0.01)
    assert sum(f.token for f in model.flops) / 2 - table == pytest.approx(active, rel=0.05)
    words = f"device=h200 devices=64 finalists=0 recipe=moe_long_context model={name} search=false"
    made = plan(
        parse(
            [
                *words.split(),
                "data.sequence_length=131072",
                "data.global_batch=16",
                "mesh.fsdp=8",
                "mesh.sp=8",
                "mesh.ep=1",
            ]
        )
    )
    assert 0.1 < made["plan"]["predicted"]["mfu"] < 0.6 and made["fits"]
