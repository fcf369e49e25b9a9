"""A ring by kernels that add in place: Hopper's, interpreted, over two and four ranks, beside one device."""

import contextlib
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hopper import interpreted
from hopper_attention import THREE
from jax.extend.core import jaxprs_in_params

import kernels
from benchmarks.sequence.calls import Attention, segment_ids
from benchmarks.sequence.rank import checked
from ejdist import make_mesh, ring_attention
from ejdist.documents import places
from ejdist.order import Order
from ejdist.sequence import AllGather, GroupCast, Ring, in_place
from ejdist.sequence.gathered import Gathered, groups_of
from kernels import MaskInfo
from kernels.engines.attention import triton_calls
from kernels.engines.attention.pairs import keys_at
from kernels.ops.flash_attention import op, triton_hops

HEADS, KEY_HEADS = 4, 2
AT = jnp.arange(512, dtype=jnp.int32)[None]


@pytest.fixture
def hopper(monkeypatch):
    with interpreted(monkeypatch, op, triton_calls):
        yield


@pytest.fixture
def taken(monkeypatch):
    """Which calls found kernels, in turn."""
    found, kernels_of = [], in_place.kernels_of

    def look(*call):
        found.append(kernels_of(*call))
        return found[-1]

    monkeypatch.setattr(in_place, "kernels_of", look)
    return found


def floats(length, width, value_width, batch=1, key_heads=KEY_HEADS):
    rng = np.random.default_rng(3)
    shapes = {"q": (batch, length, HEADS, width), "k": (batch, length, key_heads, width)}
    shapes |= {"v": (batch, length, key_heads, value_width), "d_out": (batch, length, HEADS, value_width)}
    return {n: jnp.asarray(rng.standard_normal(s).astype(jnp.bfloat16)) for n, s in shapes.items()}


def documents(length, kind):
    """Returns segment ids: [1, T] of one document, [2, T] of several and padding, others in each row, or None."""
    at = np.arange(length)
    if kind == "packed":
        rows = [np.where(at < length - 70, at * 5 // length, -1), np.where(at < length - 9, at > length * 2 // 3, -1)]
        return jnp.asarray(np.stack(rows), jnp.int32)
    return jnp.zeros((1, length), jnp.int32) if kind == "one" else None


def everything(attend, arrays, *rest):
    """Returns out and the gradients, by name."""
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *rest), *(arrays[n] for n in "qkv"))
    return {"out": out, **dict(zip("qkv", pull(arrays["d_out"]), strict=True))}


@pytest.mark.parametrize(
    ("name", "ranks", "kind", "widths", "options"),
    [
        pytest.param("zigzag", 2, "packed", (64, 64), {}, marks=pytest.mark.slow),
        pytest.param("zigzag", 2, "none", (128, 64), {"logits_soft_cap": 3.0}, marks=pytest.mark.slow),
        pytest.param("striped", 4, "packed", (64, 64), {}, marks=pytest.mark.slow),
        ("balanced", 2, "packed", (64, 64), {}),
        pytest.param(
            "contiguous", 2, "packed", (64, 64), {"causal": False, "softmax_scale": 0.3}, marks=pytest.mark.slow
        ),
        pytest.param("contiguous", 4, "one", (64, 64), {"softmax_scale": 0.3}, marks=pytest.mark.slow),
        pytest.param("striped", 2, "one", (64, 64), {"softmax_aux": jnp.ones(HEADS)}, marks=pytest.mark.slow),
        pytest.param("zigzag", 4, "packed", (64, 64), {"scheme": Ring("bfloat16")}, marks=pytest.mark.slow),
        # Whose hops are those that documents need.
        pytest.param("contiguous", 4, "packed", (64, 64), {}, marks=pytest.mark.slow),
        pytest.param("zigzag", 4, "packed", (64, 64), {"scheme": Ring(hops="batch")}, marks=pytest.mark.slow),
        pytest.param("zigzag", 4, "packed", (128, 128), {}, marks=pytest.mark.slow),
        pytest.param("balanced", 4, "packed", (128, 128), {}, marks=pytest.mark.slow),
        pytest.param("striped", 4, "packed", (64, 64), {"causal": False}, marks=pytest.mark.slow),
        # Over chunks that are put together of those of other ranks.
        pytest.param("balanced", 2, "packed", (64, 64), {"scheme": GroupCast(0.5)}, marks=pytest.mark.slow),
        pytest.param("striped", 4, "one", (64, 64), {"scheme": GroupCast()}, marks=pytest.mark.slow),
        # All others' keys at once.
        pytest.param(
            "striped",
            4,
            "packed",
            (64, 64),
            {"scheme": AllGather(head_groups=2)},
            id="gathered-striped",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "balanced",
            2,
            "packed",
            (64, 64),
            {"scheme": AllGather(head_groups=4), "keys": 4},
            id="gathered-balanced",
            marks=pytest.mark.slow,
        ),
        pytest.param("balanced", 4, "packed", (64, 64), {"scheme": AllGather(head_groups=2)}, marks=pytest.mark.slow),
        pytest.param(
            "zigzag",
            4,
            "none",
            (128, 64),
            {"scheme": AllGather(head_groups=2), "logits_soft_cap": 3.0},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "contiguous",
            2,
            "packed",
            (64, 64),
            {"scheme": AllGather(head_groups=2), "causal": False},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "zigzag",
            4,
            "packed",
            (128, 128),
            {"scheme": AllGather(head_groups=1), "softmax_aux": jnp.ones(HEADS)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_numbers_of_one_device(hopper, taken, name, ranks, kind, widths, options):
    hold(taken, name, ranks, kind, widths, options, "triton")


@pytest.mark.slow  # interpreted kernels, 15 s each
@pytest.mark.parametrize("scheme", [Ring(), AllGather()])
def test_a_rank_by_itself_has_the_numbers_of_one_device(hopper, taken, scheme):
    """The benchmark of one rank of several, in two groups of heads."""
    call, ids = Attention(HEADS, KEY_HEADS, 64, "bfloat16", platform="triton"), segment_ids("100", 768)
    assert 0 < checked(call, Order("striped", 3, 128), scheme, 1, ids) < 0.02 and taken and None not in taken


@pytest.mark.slow
def test_a_program_for_hopper_that_is_lowered_elsewhere_merges(taken):
    with kernels.compile_for(90):
        hold(taken, "zigzag", 4, "packed", (64, 64), {}, None)


@pytest.mark.parametrize(
    ("tokens", "width", "groups", "scheme", "taken"),
    [
        (2**15, 64, 2, AllGather(), True),
        (2**14, 64, 1, AllGather(), True),  # too few tiles of queries for two launches
        (2**15, 64, 1, AllGather(head_groups=1), True),
        (512, 96, 0, AllGather(), False),  # no tile of columns ends with the keys
        (512, 64, 0, AllGather(hops="batch"), False),
    ],
)
def test_which_calls_gather_by_heads(monkeypatch, tokens, width, groups, scheme, taken):
    calls, of = [], Gathered.of
    monkeypatch.setattr(Gathered, "of", lambda *call, **way: calls.append(of(*call, **way)) or calls[-1])
    ids = jnp.zeros((1, tokens), jnp.int32)
    how = {"mesh": make_mesh(sp=2), "order": Order("striped", 2, 128), "scheme": scheme, "causal": True}
    query, key = (jax.ShapeDtypeStruct((1, tokens, n, width), jnp.bfloat16) for n in (16, KEY_HEADS))
    with kernels.compile_for(90):
        attend = functools.partial(ring_attention, **how, q_segment_ids=ids, kv_segment_ids=ids)
        jax.eval_shape(attend, query, key, key)
    assert [call is not None for call in calls] == [taken]
    assert not taken or calls[0].groups == groups


@pytest.mark.parametrize(
    ("tiles", "ranks", "forward", "backward"),
    [(256, 4, 4, 8), (64, 4, 2, 2), (256, 2, 4, 4), (64, 2, 2, 2), (16, 8, 1, 1)],
    ids=["many tiles", "few tiles", "few tiles of keys", "two at least", "hardly any tiles"],
)
def test_launches_of_groups_have_enough_tiles(tiles, ranks, forward, backward):
    """Of 32 query heads and 8 of keys: a forward has 8 query heads at least, a backward those of a key head."""
    assert [groups_of(tiles, ranks, 32, 8, way) for way in (True, False)] == [forward, backward]


@pytest.mark.parametrize(("tokens", "part", "side"), [(8192, 0, 32), (32768, 8, 8), (32768, 0, None)])
def test_few_blocks_have_all_heads_side_by_side(tokens, part, side):
    """So that the longest of all come first; of many the caches decide."""
    call = SimpleNamespace(options={"B": 1, "T": tokens, "N": 32, "PART": part})
    assert triton_hops._side_by_side(call) == side


def test_groups_of_gathered_keys_divide_their_heads():
    how = {"mesh": make_mesh(sp=2), "order": "contiguous", "causal": True}
    arrays = floats(64, 16, 16)
    with pytest.raises(
        ValueError, match="2 heads of keys on a device cannot be gathered in 4 groups; use head_groups=2"
    ):
        ring_attention(*(arrays[n] for n in "qkv"), scheme=AllGather(head_groups=4), **how)


@pytest.mark.parametrize("carried", [False, True])
def test_tiles_of_gathered_keys_are_in_the_order_of_the_text(carried):
    """So that a query sees a run of them, and a kernel visits no others."""
    order = Order("striped", 4, 128)
    at = np.concatenate(order.positions(np.arange(4), 1024))[None]
    at = np.concatenate([at, at[:, ::-1]]) if carried else at
    local = SimpleNamespace(
        mask=MaskInfo(kv_positions=at if carried else None),
        static=SimpleNamespace(order=order),
        ranks=4,
        query=np.zeros((1, 256, 1, 1)),
    )
    table = np.asarray(Gathered(local, SimpleNamespace(tile=128), 1).table())
    assert (np.diff(np.take_along_axis(at[:, ::128], table, 1)) > 0).all() and table.shape == (len(at), 8)


def test_blocks_of_keys_that_most_queries_see_run_first():
    spans = np.array([[[0, 0, 0, 1], [2, 2, 2, 5], [3, 3, 3, 3]], [[0, 0, 0, 0], [1, 1, 1, 2], [0, 0, 0, 9]]], np.int32)
    call = triton_hops._longest_first(triton_calls.Call({}, {}, MaskInfo()), spans)
    assert call.arrays["order_ptr"].tolist() == [[1, 0, 2], [2, 1, 0]] and call.options == {"LIST_BATCH": 1}


def test_gradients_in_bfloat16_travel_so(taken):
    """Nothing of the keys is sent in float32."""
    arrays, found = floats(1024, 64, 64), {}
    for dtype in ("float32", "bfloat16"):
        how = {"mesh": make_mesh(sp=4), "order": "contiguous", "scheme": Ring(dtype), "causal": True}
        attend = functools.partial(ring_attention, **how)
        with kernels.compile_for(90):
            text = str(jax.make_jaxpr(lambda arrays, attend=attend: everything(attend, arrays))(arrays))
        found[dtype] = len(re.findall(r":f32\[\d+,\d+,\d+,\d+\](?:\{\S*\})? = ppermute", text))
    assert taken and None not in taken and found["float32"] > 0 == found["bfloat16"]


def hold(taken, name, ranks, kind, widths, options, platform):
    """Out and all gradients over ranks are those of one device."""
    order = Order(name, ranks, 128 if name in ("striped", "balanced") else 1)
    length = ranks * (128 if name == "contiguous" else 256)
    ids, options = documents(length, kind), {"causal": True} | options
    scheme, key_heads = options.pop("scheme", "ring"), options.pop("keys", KEY_HEADS)
    arrays = floats(length, *widths, 1 if ids is None else len(ids), key_heads)
    rules = MaskInfo(causal=options["causal"])
    of_ids = {} if ids is None else {"q_segment_ids": ids, "kv_segment_ids": ids}
    wide = {n: x.astype(jnp.float32) for n, x in arrays.items()}
    wanted = everything(lambda q, k, v: kernels.flash_attention(q, k, v, platform="xla", **options, **of_ids), wide)

    index = None
    if order.carried:
        seen = np.stack([np.where(row >= 0, keys_at(rules, places(row)), 0) for row in np.asarray(ids)])
        index = order.text_indices(seen)
        of_ids |= {"q_positions": jnp.asarray(index), "kv_positions": jnp.asarray(index)}

    def moved(x):
        return order.permute(x, index=index)

    if ids is not None:  # what lies in padding reaches nothing
        arrays = {n: jnp.where((ids < 0)[..., None, None], jnp.nan, x) for n, x in arrays.items()}
    mine = {n: moved(x) if n.endswith("segment_ids") else x for n, x in of_ids.items()}
    how = {"mesh": make_mesh(sp=ranks), "order": order, "platform": platform, "scheme": scheme, **options}
    made = jax.jit(lambda arrays: everything(lambda q, k, v: ring_attention(q, k, v, **how, **mine), arrays))(
        {n: moved(x) for n, x in arrays.items()}
    )
    assert taken and None not in taken
    for n, x in made.items():
        assert error(order.inverse(x, index=index), wanted[n]) < 2e-2, n


CAUSAL = {"causal": True}


@pytest.mark.parametrize(
    ("order", "length", "width", "options", "found"),
    [
        (Order("zigzag", 2), 512, 128, CAUSAL, True),
        (Order("zigzag", 2), 512, 128, {**CAUSAL, "softmax_aux": jnp.ones(HEADS)}, True),  # sinks join after all keys
        (Order("zigzag", 2), 256, 128, CAUSAL, False),  # runs of 64 tokens: of a tile of two runs some pairs are hidden
        (Order("zigzag", 2), 256, 128, {}, True),  # where nothing is causal runs do not matter
        (Order("striped", 2, 128), 512, 128, CAUSAL, True),
        (Order("striped", 2, 64), 512, 128, CAUSAL, False),
        (Order("contiguous", 1), 512, 128, CAUSAL, False),
        (Order("zigzag", 2), 512, 136, CAUSAL, False),  # the kernel of wide heads leaves no registers to merge
        (Order("zigzag", 2), 512, 100, CAUSAL, False),  # not one that TMA loads
        (Order("zigzag", 2), 512, 128, {**CAUSAL, "sliding_window": 300}, False),
        (Order("zigzag", 2), 512, 128, {**CAUSAL, "deterministic": True}, False),
        (Order("zigzag", 2), 512, 128, {**CAUSAL, "dropout_prob": 0.1, "dropout_seed": jnp.int32(1)}, False),
        (Order("zigzag", 2), 512, 128, {**CAUSAL, "alibi_slopes": jnp.ones(HEADS)}, False),
        (Order("zigzag", 2), 512, 128, {**CAUSAL, "platform": "xla"}, False),
        (Order("zigzag", 2), 512, 64, {**CAUSAL, "cfg": THREE}, False),  # tiles of another size are asked for
        (Order("contiguous", 2), 512, 128, {**CAUSAL, "q_positions": AT, "kv_positions": AT}, False),  # any positions
    ],
    ids=str,
)
def test_which_calls_take_it(taken, order, length, width, options, found):
    arrays, how = floats(length, width, width), {"mesh": make_mesh(sp=order.shards), "order": order, **options}
    with kernels.compile_for(90):
        jax.eval_shape(lambda q, k, v: ring_attention(q, k, v, **how), *(arrays[n] for n in "qkv"))
    assert [made is not None for made in taken] == [found] or (not taken and not found)


@pytest.mark.parametrize("capability", [None, 80])
def test_no_hopper_no_kernels(taken, capability):
    arrays, how = floats(512, 64, 64), {"mesh": make_mesh(sp=2), "order": "zigzag", "causal": True}
    with contextlib.nullcontext() if capability is None else kernels.compile_for(capability):
        jax.eval_shape(lambda q, k, v: ring_attention(q, k, v, **how), *(arrays[n] for n in "qkv"))
    assert taken == [None]


def test_out_is_rounded_once_or_twice():
    """Over four ranks what is merged is float32 until the last hop; over two the first part has the dtype of the queries."""
    for ranks, dtypes in ((2, ["bfloat16"] * 2), (4, ["float32", "float32", "bfloat16"])):
        ring = functools.partial(ring_attention, mesh=make_mesh(sp=ranks), order="zigzag", causal=True)
        arrays = floats(256 * ranks, 64, 64)
        with kernels.compile_for(90):
            jaxpr = jax.make_jaxpr(ring)(*(arrays[n] for n in "qkv"))
        found = [str(out.aval.dtype) for out in outputs_of_calls(jaxpr.jaxpr) if out.aval.ndim == 4]
        assert found == dtypes  # hops between the first and the last are one loop


def outputs_of_calls(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ejdist_call":
            yield from equation.outvars
        for inner in jaxprs_in_params(equation.params):
            yield from outputs_of_calls(inner)


def test_a_backend_that_was_asked_for_does_not_fall_back():
    arrays = floats(512, 64, 64)
    ring = functools.partial(ring_attention, mesh=make_mesh(sp=2), order="zigzag", causal=True, platform="triton")
    with (
        kernels.compile_for(90),
        pytest.raises(Exception, match=r"'platform' names runs on cuda devices; leave it out"),
    ):
        jax.jit(ring).lower(*(arrays[n] for n in "qkv"))
