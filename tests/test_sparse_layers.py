"""Layers with native sparse attention: against a loop in NumPy, on every mesh and in every order, in runs and as texts; what
they cost, and what is refused."""

import dataclasses
import functools
import re

import decoder_loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_recurrence import slope
from small_recurrences import IDS, drawn
from small_run import TINY, losses
from test_generation import Known, finish, prompts

import ejdist
from ejdist import Unsupported, make_mesh, operations
from ejdist.costs import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER
from ejdist.experts.schemes import LOCAL
from ejdist.experts.schemes import scheme_of as dispatch_named
from ejdist.layout import ACTIVATIONS, PARAMETERS, sharding
from ejdist.mesh import mesh_shape
from ejdist.models import decoder, parts
from ejdist.models.config import SparseShape
from ejdist.models.parameters import initialise, map_declared
from ejdist.models.remat import REMAT
from ejdist.models.share import Share
from ejdist.operations import bind_ops
from ejdist.order import Order
from ejdist.planning.candidates import candidate_of
from ejdist.planning.compiled import compiled_step
from ejdist.planning.search import Predictor
from ejdist.planning.targets import target_of
from ejdist.sequence import GroupCast, Ring
from ejdist.training.attended import Attended
from ejdist.training.flops import step_flops
from ejdist.training.loop import train
from ejdist.training.program import make_program
from kernels.framework.work import nbytes
from kernels.ops.native_sparse_attention import op as sparse_op
from recipes.schema import compose

PART = parts.PARTS["sparse_attention"]
PLACES = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3], [*range(11), 0, 1, 2, 0, 0]])
# Every option of plain attention that it has.
OPTIONS = {
    "qk_norm": True, "attention_bias": True, "attention_gate": True, "attention_output_bias": True, "attention_scale": 0.4,
    "rotary_dim": 4, "zero_centered_norms": True,
}  # fmt: skip


def config(**changes):
    """Blocks of which a query of the second row cannot see all: beside those that it always sees it chooses one."""
    sizes = {"model_dim": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn_dim": 12, "norm_eps": 1e-5}
    sizes |= {"num_layers": 2, "layer_pattern": ("sparse+mlp",), "sparse": SparseShape(2, 4, 3)}
    return decoder.DecoderConfig(**sizes | changes)


def batch_of(ids=IDS, places=PLACES):
    return {"segment_ids": ids.astype(np.int32), "positions": places.astype(np.int32)}


def layer(c, batch):
    """Returns the function (params, x) -> the result of a layer."""
    at = parts.LayerContext(c, bind_ops(None), jax.tree.map(jnp.asarray, batch), 0, jnp.int32(0), 0, 0, {})
    return lambda params, x: PART.apply(x, params, at)[0]


@pytest.mark.parametrize("options", [OPTIONS, pytest.param({}, marks=pytest.mark.slow)], ids=["options", "plain"])
def test_a_layer_is_what_it_is_published_as(options):
    """Its result, and its derivative along a direction of everything at once, for documents packed into rows."""
    c, batch, rng = config(**options), batch_of(), np.random.default_rng(1)
    params = drawn(PART, c)
    x = rng.standard_normal((*IDS.shape, c.model_dim)).astype(np.float32)
    weight = np.cos(np.arange(x.size)).reshape(x.shape)

    @jax.jit
    def of(params, x):
        out, back = jax.vjp(layer(c, batch), params, x)
        return out, back(jnp.asarray(weight, jnp.float32))

    def loop(a):
        return decoder_loop.PARTS["sparse_attention"](a["x"], {n: p for n, p in a.items() if n != "x"}, batch, c)

    out, (grads, dx) = of(params, x)
    floats = {n: np.float64(p) for n, p in params.items()} | {"x": np.float64(x)}
    np.testing.assert_allclose(out, loop(floats), rtol=1e-5, atol=1e-5)
    along = {n: rng.standard_normal(p.shape) for n, p in floats.items()}
    expected = slope(lambda a: float(np.sum(weight * loop(a))), floats, along)
    every = {**grads, "x": dx}
    assert sum(float(np.sum(along[n] * np.float64(every[n]))) for n in along) == pytest.approx(expected, rel=2e-4)
    assert all(np.abs(g).max() > 0 for g in every.values()), "every parameter has an effect"


@pytest.mark.slow
def test_packed_documents_are_as_separate_rows():
    """Blocks are counted from the start of a document, and nothing is read across: not by padding either."""
    c, rng = config(**OPTIONS), np.random.default_rng(2)
    params = drawn(PART, c)
    x = rng.standard_normal((*IDS.shape, c.model_dim)).astype(np.float32)
    packed = np.asarray(jax.jit(layer(c, batch_of()))(params, x))
    for row, ids in enumerate(IDS):
        for n in {*ids.tolist()} - {-1}:
            where = np.flatnonzero(ids == n)
            alone = np.zeros((1, *x.shape[1:]), np.float32)
            alone[0, : len(where)] = x[row, where]
            one = np.where(np.arange(IDS.shape[1]) < len(where), 0, -1)[None]
            of_one = jax.jit(layer(c, batch_of(one, np.maximum(np.arange(IDS.shape[1])[None], 0))))(params, alone)
            np.testing.assert_allclose(packed[row, where], of_one[0, : len(where)], rtol=2e-5, atol=2e-5)
    bias = params["sparse_output_bias"]
    np.testing.assert_allclose(packed[IDS < 0], x[IDS < 0] + bias, rtol=1e-6)


@pytest.mark.slow
def test_a_layer_in_bfloat16_is_as_near_as_its_roundings():
    c = config(compute_dtype="bfloat16")
    declared, params = PART.declare(c), drawn(PART, c)
    x = np.asarray(jnp.asarray(np.random.default_rng(4).standard_normal((*IDS.shape, c.model_dim)), jnp.bfloat16))
    cast = {n: jnp.asarray(w, jnp.bfloat16) if declared[n].cast else w for n, w in params.items()}
    out = jax.jit(layer(c, batch_of()))(cast, x)
    # Of the same layer in float32, whose blocks are chosen by other numbers: few queries may choose another.
    wide = jax.jit(layer(c, batch_of()))(jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), cast), np.float32(x))
    assert out.dtype == jnp.bfloat16
    off = np.abs(np.float64(out) - np.float64(wide)).max(-1) / np.abs(np.float64(wide) - np.float64(x)).max()
    assert np.mean(off > 0.04) < 0.1


# -- on a mesh, and in runs -----------------------------------------------------------------------------------------------


def value_and_gradient(mesh=None, order="contiguous", **changes):
    """Returns the loss of a model of such layers on packed rows, and its gradient; on a mesh, of parameters as stored."""
    c = config(vocab_size=16, num_layers=1, layer_pattern=("sparse+none",), **OPTIONS, **changes)
    model, rng = c.build(), np.random.default_rng(3)
    batch = {n: rng.integers(0, 16, IDS.shape).astype(np.int32) for n in ("tokens", "targets")} | batch_of()
    params = initialise(model.declared, jax.random.key(0))
    params["layers"] |= {n: jnp.asarray(x)[None] for n, x in drawn(PART, c).items()}
    if mesh is not None:
        order = Order(order, mesh.shape["cp"] * mesh.shape["sp"])
        places = map_declared(lambda _, p: sharding(mesh, p.dims.split(), PARAMETERS, shape=p.shape), model.declared)
        params = jax.device_put(params, places)
        batch = {n: jax.device_put(order.permute(x), sharding(mesh, "BT", ACTIVATIONS)) for n, x in batch.items()}
    ops = bind_ops(mesh, order=None if mesh is None else order)
    return jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, ops)[0]))(params)


@functools.cache
def on_one_device():
    return value_and_gradient()


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        pytest.param({"sp": 2, "tp": 2}, "striped", marks=pytest.mark.slow),
        pytest.param({"sp": 2}, "contiguous", marks=pytest.mark.slow),
        pytest.param({"sp": 4}, "contiguous", marks=pytest.mark.slow),
        pytest.param({"sp": 4}, "zigzag", marks=pytest.mark.slow),
        pytest.param({"cp": 2, "sp": 2}, "zigzag", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_neither_loss_nor_gradient(sizes, order):
    mesh = make_mesh(**sizes, devices=jax.devices()[: np.prod([*sizes.values()])])
    expected, gradient = on_one_device()
    value, split = value_and_gradient(mesh, order)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5 * np.abs(np.asarray(one)).max())


def test_the_heads_of_one_key_head_are_not_split():
    """They choose blocks together, and each device would choose by its own."""
    mesh = make_mesh(tp=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"dim N = 4 of 'query' is split over tp, but all of it decides together"):
        value_and_gradient(mesh, num_kv_heads=1)
    heads = {n: jnp.ones((1, 8, heads, 4)) for n, heads in (("query", 4), ("key", 2), ("value", 2))}
    with pytest.raises(ValueError, match=r"K = 2, which cannot be divided over tp=4: make that a divisor of K$"):
        ejdist.native_sparse_attention(**heads, block_size=4, mesh=make_mesh(tp=4, devices=jax.devices()[:4]))


RUN = [
    *TINY, "model.layer_pattern=[sparse+mlp,full+mlp]", "model.sparse.block_size=4", "model.sparse.num_blocks=5",
    "model.sparse.window=6", "run.steps=3", "optimizer.learning_rate=1e-2",
]  # fmt: skip


def run(directory, corpus, *overrides):
    train(compose([*RUN, *corpus, f"run.dir={directory}", *overrides]), log=lambda line: None)
    return losses(directory)


@pytest.mark.slow
def test_losses_are_the_same_on_every_mesh_and_after_a_stop(corpus, tmp_path):
    one = run(tmp_path / "one", corpus, "mesh.sp=1")
    layouts = (
        ["mesh.sp=2", "mesh.tp=2"],
        ["mesh.sp=4", "sequence.order=zigzag"],
        ["mesh.sp=4", "sequence.order=contiguous"],
        ["mesh.sp=4", "sequence.order=zigzag", "sequence.scheme=group_cast", "sequence.buffer=0.3"],
    )
    for number, layout in enumerate(layouts):
        assert run(tmp_path / f"{number}", corpus, *layout) == pytest.approx(one, abs=2e-5)
    keep = ["checkpoint.every=1", "mesh.sp=2"]
    run(tmp_path / "stopped", corpus, "run.stop_after=2", *keep)
    assert run(tmp_path / "stopped", corpus, *keep) == pytest.approx(one, abs=2e-5) and one[-1] < one[0]


def test_how_even_the_ranks_are_is_of_runs_of_the_text():
    """Whatever the order: tokens change places before they attend."""
    even = {}
    for order in ("contiguous", "zigzag"):
        recipe = compose([*RUN, "mesh.sp=4", f"sequence.order={order}", "model.layer_pattern=[sparse+mlp]"])
        program = make_program(recipe, make_mesh(**vars(recipe.mesh)))
        ids = np.zeros((recipe.data.global_batch, recipe.data.sequence_length), np.int32)
        even[order] = Attended.of(program, ids).evenness(program, recipe)["imbalance_sp"]
    assert even["zigzag"] == even["contiguous"] > 1.02


def test_steps_that_repeat_their_bits_take_kernels_on_gpus_and_nothing_else(monkeypatch):
    heads = {n: jnp.ones((1, 8, heads, 4)) for n, heads in (("query", 4), ("key", 2), ("value", 2))}

    def attend(of: str, platform: str | None):
        monkeypatch.setattr(operations, "platform_of", lambda mesh: of)
        ops = bind_ops(make_mesh(devices=jax.devices()[:1]), platform=platform, deterministic_attention=True)
        return ops.native_sparse_attention(**heads, block_size=4)

    for platform in (None, "xla"):
        assert attend("cpu", platform).shape == (1, 8, 4, 4)
    with pytest.raises(Unsupported, match="deterministic_attention = true, but on GPUs platform=xla"):
        attend("gpu", "xla")
    with pytest.raises(Unsupported, match="triton"):  # which it asks for by name: this is a CPU
        attend("gpu", None)
    with pytest.raises(Unsupported, match="pallas"):  # what is asked for by name is not replaced
        attend("gpu", "pallas")


# -- texts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_texts_are_those_of_the_full_forward():
    """Prompts in chunks and in one, of one page and of several, and texts longer than what a query selects."""
    known = Known(layer_pattern=["sparse+mlp"], sparse=SparseShape(4, 5, 5), **OPTIONS | {"rotary_dim": 4})
    for chunk in (8, 64):  # the second is longer than any request
        engine = known.engine(chunk=chunk)
        numbers = [engine.submit(ids, max_tokens=9, temperature=0) for ids in prompts([1, 30, 17, 9])]
        results = finish(engine)
        for number in numbers:
            known.check(results[number])
        assert engine.programs == 2


# -- what it costs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["triton_gpu", "pallas_tpu"])
def test_plans_count_what_kernels_keep(backend):
    """What a forward keeps for its backward is as large as the backend declares; one gradient of queries, their sum in
    float32 and tables are at the peak of TPUs."""
    c, T = config(sparse=SparseShape(4, 3, 5)), 64
    arrays = {n: jax.ShapeDtypeStruct((2, T, h, 6), "bfloat16") for n, h in (("query", 4), ("key", 2), ("value", 2))}
    arrays |= {n: jax.ShapeDtypeStruct((2, T, 4), "bfloat16") for n in ("g_cmp", "g_slc", "g_swa")}
    call = sparse_op.bind(**arrays, block_size=4, num_blocks=3, window=5)
    kept = nbytes(*sparse_op.backends[backend].keeps(call, None).values())
    on = Share(2 * T, 2, T, REMAT["none"], Ring(), Order("contiguous", 1), dispatch_named(LOCAL))
    made = PART.memory(c, on)
    assert (made.gpu_rest if backend == "triton_gpu" else made.tpu_rest) == kept > 0
    queries, tables = nbytes(call.query), 4 * 2 * T * 4 * 16
    assert made.tpu_work == 3 * queries + tables and made.gpu_work == kept + 8 * queries


@pytest.mark.slow  # compiles a step with all kernels of a layer, 100 s or more
def test_a_plan_of_sparse_layers_is_near_what_the_tpu_compiler_says():
    """Of arrays that are too large for a TPU's fast memory, in which the compiler keeps some of smaller ones."""
    words = "model=sparse_8b model.num_layers=2 model.model_dim=512 model.num_heads=4 model.num_kv_heads=1 model.ffn_dim=256 "
    words += "model.vocab_size=1024 model.remat=attention data.sequence_length=32768 data.global_batch=4 mesh.fsdp=4 mesh.sp=1"
    sections, target = compose(["recipe=long_context", *words.split()]), target_of("v5e:2x2", None, None, None)
    plan = Predictor(sections, target).checked(candidate_of(sections, mesh_shape(sections.mesh.sizes, target.count)))
    assert plan.memory.total == pytest.approx(compiled_step(sections, target).peak, rel=0.1)


def test_flops_are_of_what_is_read():
    """Counted query by query, of documents of several lengths: selected tokens, tokens of the window, a mean for each block."""
    c, lengths = config(sparse=SparseShape(4, 3, 5)), (33, 20, 7)
    ids = np.repeat([0, 1, 2], lengths)[None]
    layers = [f for f in c.build().flops if f.pair]
    each = 2 * 2 * c.num_heads * c.head_dim
    pairs = sum(min(t + 1, 12) + min(t + 1, 5) + (t + 1) / 4 for n in lengths for t in range(n))
    without = sum(f.token for f in c.build().flops) * ids.size
    assert len(layers) == 2
    assert step_flops(c.build().flops, ids).causal == pytest.approx(3 * (without + 2 * each * pairs))
    # By the other convention all pairs count once, as in a layer with full attention.
    assert step_flops(c.build().flops, ids).full == 3 * (without + 2 * each * ids.size**2)
    assert PART.flops(c).token == 2 * c.model_dim * (c.head_dim * 12 + 3 * c.num_heads)


def share_of(remat, order, scheme):
    made = {"scheme": scheme, "dispatch": dispatch_named(LOCAL)}
    return Share(8, itemsize=4, length=8 * order.shards, remat=REMAT[remat], order=order, **made)


@pytest.mark.parametrize(
    ("remat", "order", "scheme"),
    [
        ("attention", "contiguous", Ring()),
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in (
                ("attention", "contiguous", GroupCast(4.0)),
                ("full", "striped", Ring()),
                ("none", "zigzag", Ring()),
                ("full", "zigzag", GroupCast(4.0)),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_sent_is_what_is_declared(remat, order, scheme):
    """Bytes of a layer's program, forward and backward, by collective. The buffer has room for all blocks at once."""
    c, order, rows = config(remat=remat), Order(order, 4), 1
    mesh = make_mesh(sp=4, devices=jax.devices()[:4])
    ids = np.zeros((rows, 32), np.int32)
    batch = {"segment_ids": ids, "positions": np.arange(32, dtype=np.int32)[None]}
    at = parts.LayerContext(c, bind_ops(mesh, order=order, scheme=scheme), batch, 0, jnp.int32(0), 0, 0, {})
    policy = REMAT[remat].policy(PART.saves, PART.offloads, "input")

    def apply(x, params):
        return PART.apply(x, params, at)[0]

    kept = apply if remat == "none" else jax.checkpoint(apply, policy=policy)

    def of(x, params):
        return jax.grad(lambda x: jnp.sum(jnp.sin(kept(x, params))))(x)

    x = jax.ShapeDtypeStruct((rows, 32, c.model_dim), jnp.float32, sharding=sharding(mesh, "BT_", ACTIVATIONS))
    text = jax.jit(of).lower(x, drawn(PART, c)).compile().as_text()
    assert sent_in(text) == pytest.approx(PART.traffic(c, share_of(remat, order, scheme)).bytes, rel=0.02)
    assert (("sp", PERMUTE) in sent_in(text)) == isinstance(scheme, GroupCast), (
        "which sends what is before a rank's tokens"
    )


def sent_in(text):
    """Returns (axis, collective) -> bytes that a device sends, of arrays of several numbers a token, in a program over four."""
    sent, bodies, further = {}, set(re.findall(r"body=%?([\w.\-]+)", text)), False
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*{$", line):
            further = start[1] in bodies  # passes after the first, of which there are none here
        found = re.search(r"= (.*) (all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(", line)
        if found is None or further:
            continue
        for shape in re.findall(r"f32\[([\d,]+)\]", found[1]):
            size = 4 * int(np.prod([int(n) for n in shape.split(",")]))
            kind = {"all-gather": ALL_GATHER, "reduce-scatter": REDUCE_SCATTER}.get(found[2], ALL_TO_ALL)
            part = {ALL_GATHER: 3 / 4, REDUCE_SCATTER: 3}.get(kind, 3 / 4)
            if found[2] == "collective-permute":  # of each rank on the average; not what it keeps
                pairs = re.findall(r"{(\d),(\d)}", line.partition("source_target_pairs=")[2].partition("}}")[0] + "}")
                part = sum(a != b for a, b in pairs) / 4
                # Tokens that are needed before a rank's own go as far from all ranks; those that change places do not.
                kind = PERMUTE if len({(int(b) - int(a)) % 4 for a, b in pairs}) == 1 else kind
            sent["sp", kind] = sent.get(("sp", kind), 0) + part * size
    return sent


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sparse", [], "model.sparse.block_size must be positive, got 0: model.layer_pattern has layers with sparse_attention"),
        ("sparse", ["sparse.block_size=-2"], "model.sparse.block_size must be positive, got -2"),
        ("sparse", ["sparse.block_size=4", "sparse.window=0"], "model.sparse.window must be positive, got 0"),
        ("sparse", ["sparse.block_size=4", "sparse.num_blocks=2"], "model.sparse.num_blocks = 2 must be at least 3: a query's"),
        ("none", ["sparse.block_size=4"], r"model.sparse is given, but no layer has sparse_attention: .* example sparse\+mlp"),
        ("sparse", ["sparse.block_size=4", "attention_sinks=true"],
         "model.attention_sinks = True is not supported by layers with sparse attention"),
        ("sparse", ["sparse.block_size=4", "attention_soft_cap=5"],
         "model.attention_soft_cap = 5.0 is not supported by layers with sparse attention"),
        ("sparse", ["sparse.block_size=4", "num_kv_heads=3"], "model.num_heads = 4 must be a multiple of model.num_kv_heads"),
    ],
)  # fmt: skip
def test_sizes_that_make_no_layer_are_refused_by_their_key(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        compose([*TINY, f"model.layer_pattern=[{kind}+mlp,full]", *(f"model.{c}" for c in changes)]).model.build()


def test_an_order_of_each_row_is_refused():
    mesh = make_mesh(sp=2, devices=jax.devices()[:2])
    recipe = compose([*RUN, "mesh.sp=2", "sequence.order=balanced", "model.layer_pattern=[sparse+mlp]"])
    with pytest.raises(
        ValueError, match=r"'balanced' is another one .* layers with sparse_attention have no form for it"
    ):
        make_program(recipe, mesh)


def test_a_model_with_other_blocks_is_another_model():
    """Keys of plain attention that such a layer has are among those that decide what it computes."""
    from ejdist.weights.match import differences

    c = config()
    assert differences(c, dataclasses.replace(c, sparse=SparseShape(2, 3, 3))) == ["sparse.num_blocks"]
    assert differences(c, dataclasses.replace(c, rope_base=5e5)) == ["rope_base"]
    assert differences(c, dataclasses.replace(c, num_kv_heads=4)) == ["num_kv_heads"]
