"""blocksparse_attention: against NumPy, alone and on meshes; that its cost follows the density; patterns; wrong calls."""

import functools

import attention_loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from jax.extend.core import jaxprs_in_params
from sparse_calls import check_draws, check_on_a_mesh, check_slopes, contract_of, mesh_grid, with_gradients

import ejdist
import kernels
from ejdist import make_mesh
from kernels import MaskInfo, Unsupported
from kernels.ops.blocksparse_attention import (
    BlockSparseConfig,
    bigbird_blocks,
    blocks_of_mask,
    blocksparse_attention,
    global_blocks,
    local_blocks,
    op,
    random_blocks,
    strided_blocks,
)
from kernels.ops.blocksparse_attention.xla import _plan

RNG = np.random.default_rng(0)
B, T, S, N, K, H, HV = 2, 13, 17, 4, 2, 6, 5
QUERY, KEY, VALUE = (RNG.standard_normal(s).astype(np.float32) for s in ((B, T, N, H), (B, S, K, H), (B, S, K, HV)))
SINKS = RNG.standard_normal((N, 2)).astype(np.float32)
Q_IDS, K_IDS = (np.sort(RNG.integers(-1, 3, (B, n)), 1).astype(np.int32) for n in (T, S))


def blocks_of(*lead, size=(4, 3), density=0.5):
    found = RNG.random((*lead, -(-T // size[0]), -(-S // size[1]))) < density
    found[..., 1, :] = False  # queries without any key
    return found


CALLS = {
    "shared": {"block_mask": blocks_of(), "block_size": (4, 3)},
    "per row and head, causal, dense": {
        "block_mask": blocks_of(B, N),
        "block_size": (4, 3),
        "causal": True,
        "attention_mask": RNG.random((B, N, T, S)) < 0.7,
    },
    "per head, segments": {
        "block_mask": blocks_of(1, N, size=(5, 5), density=0.8),
        "block_size": 5,
        "q_segment_ids": Q_IDS,
        "kv_segment_ids": K_IDS,
    },
    "window, cap, scale, sinks": {
        "sparsity_mask": blocks_of(B, 1).astype(np.int32),
        "block_size": (4, 3),
        "sliding_window": (6, 2),
        "logits_soft_cap": 1.5,
        "softmax_scale": 0.7,
        "softmax_aux": SINKS,
    },
}


def loop(query, key, value, softmax_aux=None, *, block_mask=None, sparsity_mask=None, block_size, **options):
    """Returns (out, lse) in float64, pair by pair."""
    b, t, n, _ = query.shape
    s = key.shape[1]
    blocks = np.asarray(sparsity_mask if block_mask is None else block_mask).astype(bool)
    blocks = np.broadcast_to(blocks, (b, n, *blocks.shape[-2:]))
    size = (block_size,) * 2 if isinstance(block_size, int) else block_size
    window = options.get("sliding_window")
    mask = MaskInfo(
        causal=options.get("causal", False),
        window=(window - 1, 0) if isinstance(window, int) else window,
        q_segment_ids=options.get("q_segment_ids"),
        kv_segment_ids=options.get("kv_segment_ids"),
        attention_mask=options.get("attention_mask"),
    )
    seen = attention_loop.visible(mask, b, n, t, s).copy()
    for at in np.ndindex(seen.shape):
        seen[at] &= blocks[at[0], at[1], at[2] // size[0], at[3] // size[1]]
    arrays = [np.asarray(x, np.float64) for x in (query, key, value)]
    return attention_loop.attention(
        seen,
        None,
        np.ones(seen.shape),
        *arrays,
        softmax_aux=softmax_aux,
        softmax_scale=options.get("softmax_scale"),
        cap=options.get("logits_soft_cap"),
    )


def both(**call):
    return blocksparse_attention(**call, return_lse=True)


def arrays_of(name):
    options = dict(CALLS[name])
    arrays = {"query": QUERY, "key": KEY, "value": VALUE}
    if "softmax_aux" in options:
        arrays["softmax_aux"] = options.pop("softmax_aux")
    return arrays, options


QUICK = ("per row and head, causal, dense", "window, cap, scale, sinks")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CALLS])
def test_value_and_gradients_against_a_loop_over_pairs(name):
    arrays, options = arrays_of(name)
    (out, lse), gradients = with_gradients(functools.partial(both, **options))(arrays, {})
    want = loop(**arrays, **options)
    assert error(out, want[0]) < 2e-6 and error(lse, want[1]) < 2e-6
    assert (np.isneginf(want[1]).any() and (out[np.isneginf(want[1])] == 0).all()) or "softmax_aux" in arrays
    check_slopes(functools.partial(loop, **options), arrays, gradients)


def test_the_blocks_may_be_traced_and_all_set_is_flash_attention():
    x = [jnp.asarray(a) for a in (QUERY, KEY, VALUE)]
    run = jax.jit(lambda blocks: blocksparse_attention(*x, blocks, (4, 3), causal=True))
    for blocks in (blocks_of(), np.ones((4, 6), bool), np.zeros((4, 6), bool)):
        want, _ = loop(*x, block_mask=blocks, block_size=(4, 3), causal=True)
        assert error(run(blocks), want) < 2e-6
    assert error(run(np.ones((4, 6), bool)), kernels.flash_attention(*x, causal=True)) < 1e-6


def test_documented_calls():
    """With the arguments of the documents; a name for the blocks that they also use."""
    x = jnp.asarray(RNG.standard_normal((1, 256, 2, 8)).astype(np.float32))
    block_mask = local_blocks(4) | global_blocks(4)
    output = blocksparse_attention(x, x, x, block_mask=block_mask, block_size=64)
    assert output.shape == x.shape
    np.testing.assert_array_equal(output, kernels.blocksparse_attention(x, x, x, sparsity_mask=block_mask))
    np.testing.assert_array_equal(output, ejdist.BlockSparseAttention()(x, x, x, block_mask))


# -- the cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(1, 1), (1, 4)])
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_what_is_computed_follows_the_set_blocks(lead, lanes):
    """How often the loop runs, times the blocks that a turn computes."""
    x = jnp.zeros((2, 1024, 4, 8))
    cfg = BlockSparseConfig(16, lanes)
    everything = lead[0] * lead[1] * 64 * 64
    for density in (0.05, 0.1, 0.5):
        blocks = np.random.default_rng(2).random((*lead, 64, 64)) < density
        plan = _plan(x, x, jnp.asarray(blocks), None, (16, 16), cfg)
        turns = sum(int(plan.count[lanes[lanes >= 0]].max()) for lanes in np.asarray(plan.lanes))
        assert blocks.sum() <= turns * lanes <= 1.3 * blocks.sum() < 1.4 * density * everything
    plan = _plan(x, x, jnp.ones((1, 1, 64, 64), bool), MaskInfo(causal=True), (16, 16), cfg)
    assert plan.count.sum() == 64 * 65 / 2  # what an ordinary mask hides is not computed either


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    def bytes_at(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        blocks = jax.ShapeDtypeStruct((length // 64, length // 64), jnp.bool_)
        cfg = BlockSparseConfig(64, 1)
        loss = jax.grad(lambda x, blocks: jnp.sum(jnp.sin(blocksparse_attention(x, x, x, blocks, 64, cfg=cfg))))
        return jax.jit(loss).lower(x, blocks).compile().memory_analysis().temp_size_in_bytes

    short, long = bytes_at(4096), bytes_at(16384)
    assert long < 4.2 * short and long < 16384**2 / 8


def test_blocks_that_are_not_set_are_not_read():
    """NaN in them reaches nothing, and they have no gradient. Nor has padding."""
    blocks = np.array([[1, 0, 1], [0, 0, 1]], bool)
    q, k = (jnp.asarray(RNG.standard_normal((1, n, 2, 8)).astype(np.float32)) for n in (8, 12))
    k = k.at[:, 4:8].set(jnp.nan)
    got = jax.jit(jax.grad(lambda k: jnp.sum(jnp.sin(blocksparse_attention(q, k, k, blocks, 4)))))(k)
    assert np.isfinite(got).all() and (got[:, 4:8] == 0).all()
    np.testing.assert_array_equal(got[0, :, 0, 0] != 0, np.repeat(blocks.any(0), 4))


# -- patterns ----------------------------------------------------------------------------------------------------------


def test_patterns_by_hand():
    i, j = np.arange(6)[:, None], np.arange(8)[None]
    own = i + 2  # the last query block is of the same tokens as the last key block
    np.testing.assert_array_equal(local_blocks(6, 8, before=2, after=1), (j >= own - 2) & (j <= own + 1))
    np.testing.assert_array_equal(strided_blocks(6, 8, stride=3), (own - j) % 3 == 0)
    np.testing.assert_array_equal(global_blocks(6, 8, blocks=3), (j < 3) | (own < 3))
    np.testing.assert_array_equal(global_blocks(6, 8, blocks=[7]), (j == 7) | (own == 7))
    drawn = random_blocks(6, 8, count=3, seed=5)
    assert (drawn.sum(1) == 3).all() and (drawn == random_blocks(6, 8, count=3, seed=5)).all()
    assert (drawn != random_blocks(6, 8, count=3, seed=6)).any()
    bird = bigbird_blocks(8, num_global=1, num_random=2)
    assert (bird >= (local_blocks(8) | global_blocks(8) | random_blocks(8, count=2))).all() and bird.sum() < 50


@pytest.mark.parametrize(
    "mask",
    [
        MaskInfo(causal=True, window=(9, 0)),
        pytest.param(MaskInfo.from_segments(np.repeat([[0, 1, -1]], 10, 1)), marks=pytest.mark.slow),
    ],
)
def test_blocks_of_a_mask_lose_nothing_that_it_lets_through(mask):
    x = jnp.asarray(RNG.standard_normal((1, 30, 2, 8)).astype(np.float32))
    blocks = blocks_of_mask(mask, 30, block_size=(4, 6))
    dense = np.asarray(mask.visible(30, 30))[0, 0]
    for i, j in np.ndindex(*blocks.shape):
        assert bool(blocks[i, j]) >= bool(dense[4 * i : 4 * i + 4, 6 * j : 6 * j + 6].any())
    assert blocks.sum() < blocks.size
    got = blocksparse_attention(x, x, x, blocks, (4, 6), mask_info=mask)
    everything = np.ones((1, 2, 30, 30))
    want, _ = attention_loop.attention(np.broadcast_to(dense, everything.shape), None, everything, *[np.asarray(x)] * 3)
    assert error(got, want) < 1e-6


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("'before' must be an integer of at least 0, got -1", lambda: local_blocks(4, before=-1)),
        ("'after' must be an integer of at least 0, got 1.5", lambda: local_blocks(4, after=1.5)),
        ("'stride' must be an integer of at least 1, got 0", lambda: strided_blocks(4, stride=0)),
        (r"'blocks' = \[4\] must be within the 4 key blocks", lambda: global_blocks(4, blocks=[4])),
        ("'blocks' must be an integer of at least 0, got 0.5", lambda: global_blocks(4, blocks=[0.5])),
        ("'count' = 5 must be between 0 and the 4 key blocks", lambda: random_blocks(4, count=5)),
        ("'q_blocks' must be an integer of at least 1 block, got 0", lambda: local_blocks(0)),
        ("'kv_blocks' must be an integer of at least 1 block, got '4'", lambda: local_blocks(4, "4")),
        ("'mask' must be a MaskInfo, got int", lambda: blocks_of_mask(3, 8)),
        ("'q_length' must be an integer of at least 1, got 0", lambda: blocks_of_mask(MaskInfo(), 0)),
        ("'block_size' must be a positive integer, or .* got 0", lambda: blocks_of_mask(MaskInfo(), 8, block_size=0)),
    ],
)
def test_a_pattern_that_cannot_be(said, call):
    with pytest.raises(ValueError, match=said):
        call()


# -- on a mesh ---------------------------------------------------------------------------------------------------------

LONG = {
    "query": RNG.standard_normal((2, 32, 4, 8)).astype(np.float32),
    "key": RNG.standard_normal((2, 32, 2, 8)).astype(np.float32),
    "value": RNG.standard_normal((2, 32, 2, 8)).astype(np.float32),
    "softmax_aux": RNG.standard_normal(4).astype(np.float32),
}
IDS = np.sort(RNG.integers(-1, 4, (2, 32)), 1).astype(np.int32)
PATTERN = RNG.random((2, 4, 16, 8)) < 0.4
ON_MESH = {
    "per_row_and_head": {"block_mask": PATTERN, "block_size": (2, 4), "causal": True, "q_segment_ids": IDS},
    "shared": {"block_mask": PATTERN[0, 0], "block_size": (2, 4), "sliding_window": 9},
}


@functools.cache
def on_one_device(name):
    contract = functools.partial(contract_of(blocksparse_attention, op), **ON_MESH[name])
    return with_gradients(contract)(LONG, {})


@pytest.mark.parametrize(("name", "mesh"), mesh_grid(ON_MESH, {("per_row_and_head", "dp2_sp2_tp2")}))
def test_the_numbers_of_one_device_on_a_mesh(name, mesh):
    sharded = functools.partial(ejdist.blocksparse_attention, **ON_MESH[name], return_lse=True)
    check_on_a_mesh(sharded, mesh, LONG, {}, on_one_device(name))


def count_of(name, jaxpr):
    return sum(
        (e.primitive.name == name) + sum(count_of(name, j) for j in jaxprs_in_params(e.params)) for e in jaxpr.eqns
    )


def test_hops_without_a_set_block_are_not_made():
    x, mesh = LONG["query"], make_mesh(sp=4)

    def sends(blocks):
        def run(x, blocks):
            return ejdist.blocksparse_attention(x, x, x, blocks, 4, mesh=mesh)

        if isinstance(blocks, np.ndarray):
            return count_of("ppermute", jax.make_jaxpr(lambda x: run(x, blocks))(x).jaxpr)
        return count_of("ppermute", jax.make_jaxpr(run)(x, blocks).jaxpr)

    assert sends(np.eye(8, dtype=bool)) == 0
    assert sends(local_blocks(8, before=1, after=0)) == 2  # keys and values, one hop
    assert sends(jnp.ones((8, 8), bool)) > 2


@pytest.mark.parametrize(
    ("kind", "said", "options"),
    [
        (ValueError, r"'block_size' = \(16, 16\) does not divide the 8 tokens that each of 4", {"block_size": 16}),
        (Unsupported, "'attention_mask' is as large as T x T", {"attention_mask": np.ones((2, 32, 32), bool)}),
    ],
)
def test_refused_on_a_mesh(kind, said, options):
    size = options.pop("block_size", 4)
    blocks = np.ones((32 // size,) * 2, bool)
    x = LONG["query"]
    with pytest.raises(kind, match=f"blocksparse_attention: .*{said}"):
        ejdist.blocksparse_attention(x, x, x, blocks, size, mesh=make_mesh(sp=4), **options)


# -- wrong calls, and right ones drawn at random -----------------------------------------------------------------------

RIGHT = {"block_mask": np.ones((4, 6), bool), "block_size": (4, 3)}


@pytest.mark.parametrize(
    ("said", "options"),
    [
        (r"'block_mask' selects .* got neither", {"block_mask": None}),
        (r"'block_mask' selects .* got both", {"sparsity_mask": np.ones((4, 6), bool)}),
        (r"'block_mask' must be boolean or 0/1 integers.* got float32", {"block_mask": np.ones((4, 6), np.float32)}),
        (r"'block_mask' must be .*\(4, 4, 6\); a mask per head", {"block_mask": np.ones((N, 4, 6), bool)}),
        (r"'block_mask' of shape \(1, 1, 4, 5\) must be \[2 or 1, 4 or 1, 4, 6\]", {"block_mask": np.ones((4, 5), bool)}),
        (r"'block_mask' of shape \(1, 3, 4, 6\) must be", {"block_mask": np.ones((1, 3, 4, 6), bool)}),
        (r"'block_size' must be a positive integer, or .* got 0", {"block_size": 0}),
        (r"'block_size' must be a positive integer, or .* got \(4,\)", {"block_size": (4,)}),
        (r"'block_size' must be a positive integer, or .* got True", {"block_size": True}),
        (r"'block_mask' has rows of different lengths", {"block_mask": [[1, 0], [1]]}),
        (r"'softmax_scale' must be float or None, got 'x'", {"softmax_scale": "x"}),
        (r"'logits_soft_cap' must be positive", {"logits_soft_cap": -1.0}),
        (r"'sliding_window' must be at least 1", {"sliding_window": 0}),
        (r"'softmax_aux' must be \[N\]", {"softmax_aux": np.ones(3, np.float32)}),
        (r"'q_segment_ids' and 'kv_segment_ids' must be given together", {"q_segment_ids": Q_IDS}),
    ],
)  # fmt: skip
def test_a_wrong_call_is_a_value_error(said, options):
    for function in (blocksparse_attention, ejdist.blocksparse_attention):
        with pytest.raises(ValueError, match=f"argument.* {said}"):
            function(QUERY, KEY, VALUE, **{**RIGHT, **options})


def test_other_wrong_calls():
    with pytest.raises(ValueError, match=r"'query' must be \[batch, length, heads, width\]"):
        blocksparse_attention(QUERY[0], KEY, VALUE, **RIGHT)
    with pytest.raises(ValueError, match="N = 3 heads and 'key' has K = 2"):
        blocksparse_attention(QUERY[:, :, :3], KEY, VALUE, **RIGHT)
    with pytest.raises(ValueError, match=r"'block_size' must be \(queries, keys\) of a block, both positive"):
        op(QUERY, KEY, VALUE, np.ones((1, 1, 4, 6), bool), block_size=(0, 3))
    with pytest.raises(Unsupported, match="overlaps more than 32 blocks of 3"):
        blocksparse_attention(QUERY, KEY, VALUE, **RIGHT, platform="pallas")


def integers(rng, low, high, *shape):
    return rng.integers(low, high, shape).astype(np.int32)


def drawn(
    t, s, heads=(4, 2), b=2, size=(4, 3), lead=(1, 1), dtype=np.float32, extra=lambda rng: {}, sinks=0, **options
):
    """Returns the entry of a table of draws: arrays of these shapes, blocks of any density, and what `extra` draws."""

    def draw(rng):
        n, k = heads
        shapes = {"query": (b, t, n, 6), "key": (b, s, k, 6), "value": (b, s, k, 5)} | (
            {"softmax_aux": (n, sinks)} if sinks else {}
        )
        large = rng.choice([0.1, 1.0, 5.0])
        arrays = {name: (large * rng.standard_normal(x)).astype(dtype) for name, x in shapes.items()}
        blocks = rng.random((*lead, -(-t // size[0]), -(-s // size[1]))) < rng.choice([0, 0.1, 0.5, 1])
        return arrays, {"block_mask": blocks, **extra(rng)}

    options = {**options, "block_size": size}
    run = functools.partial(both, **options, cfg=BlockSparseConfig(2, 3))
    contract = functools.partial(contract_of(blocksparse_attention, op), **options)
    return run, contract, draw, functools.partial(loop, **options), True


def segments(t, s, b=2):
    return lambda rng: {"q_segment_ids": integers(rng, -1, 3, b, t), "kv_segment_ids": integers(rng, -1, 3, b, s)}


DRAWN = {
    "causal": drawn(13, 13, causal=True),
    "fewer queries, of each head": drawn(7, 12, lead=(1, 4), size=(3, 5), causal=True, logits_soft_cap=2.0),
    "segments, of each row": drawn(14, 11, lead=(2, 1), size=(5, 2), extra=segments(14, 11)),
    "window, sinks, of each row and head": drawn(
        10, 10, lead=(2, 4), size=(2, 6), sliding_window=(1, 4), sinks=2, softmax_scale=0.3
    ),
    "one query, one head": drawn(1, 9, heads=(1, 1), b=1, size=(1, 2)),
    "blocks longer than the row": drawn(5, 3, heads=(2, 1), size=(8, 4), sliding_window=3),
    "bfloat16": drawn(12, 12, lead=(2, 1), dtype=jnp.bfloat16, causal=True, extra=segments(12, 12)),
}


def test_legal_calls():
    check_draws(DRAWN, "blocks longer than the row", [1])


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_many_legal_calls(name):
    check_draws(DRAWN, name, range(43))
