"""Tokens that travel once to a rank: how many rows, in which numbers, to how many ranks, and a router that sends all to one."""

import functools
import gc
import itertools
import math
import re

import experts_loop
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from expert_calls import EP4, PLACES, Where, backward, check, on_mesh, rows_only, shapes
from experts_loop import Layer

import ejdist
from ejdist.experts import placed, route
from ejdist.experts.cost import limit_of_ranks, reached
from ejdist.experts.metrics import rank_tokens
from ejdist.experts.placed import hosts_of
from ejdist.experts.rows import plan_of, spread, taken

EP8 = Where({"ep": 8}, "ep", ("ep",))


# -- how many rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "own", "top_k"), [(4, 4, 6), (2, 4, 3), (8, 1, 3), (1, 4, 2)])
def test_a_token_meets_as_many_ranks_as_all_its_choices_say(ranks, own, top_k):
    choices = itertools.combinations(range(ranks * own), top_k)
    met = [len({e // own for e in chosen}) for chosen in choices]
    assert reached(ranks, top_k, ranks * own) == pytest.approx(sum(met) / len(met))


def test_a_token_of_few_ranks_meets_those_alone():
    assert reached(8, 8, 64, max_ranks=1) == 1 and reached(8, 8, 64, max_ranks=8) == reached(8, 8, 64)
    assert reached(8, 3, 64, max_ranks=2) == pytest.approx(reached(2, 3, 16))
    assert reached(64, 8) == pytest.approx(64 * (1 - (63 / 64) ** 8))
    # 8 groups, of which a token has 4: on 4 ranks of 8, on 8 of 16, on any of 4; and groups that do not fit ranks say nothing.
    assert [limit_of_ranks(n, None, 8, 4) for n in (8, 16, 4, 6)] == [4, 8, None, None]
    assert limit_of_ranks(8, 3, 8, 4) == 3 and limit_of_ranks(8, 9) is None


@pytest.mark.parametrize(("k", "max_ranks"), [pytest.param(4, None, marks=pytest.mark.slow), (4, 2)])
def test_the_bytes_of_a_compiled_exchange_are_those_of_the_ranks_that_a_token_meets(k, max_ranks):
    M, E, D, n = 64, 16, 256, 4
    function = on_mesh(EP4, E, apply=rows_only, scheme="all_to_all", max_ranks=max_ranks)
    text = jax.jit(lambda *a: function(*a)[0]).lower(*shapes(n * M, k, E, D, D)).compile().as_text()
    main = text[text.index("\nENTRY") :]  # the first pass
    parts = [line for line in main.splitlines() if " all-to-all(" in line]
    rows = [
        sum(math.prod(map(int, s.split(","))) for s in re.findall(r"f32\[([\d,]+)\]", p.split(" all-to-all(")[0]))
        for p in parts
    ]
    among = max_ranks or n
    met = np.mean([len({e // 4 for e in c}) for c in itertools.combinations(range(4 * among), k)])
    room = math.ceil(1.25 * M * met / n)
    assert sorted(rows) == [n * room * 2 * k, n * room * D, n * room * D], parts  # beside, there and back
    assert room < 1.25 * M * k / n / 1.3


# -- in which numbers --------------------------------------------------------------------------------------------------------


def rounded(x):
    """Returns x [M, D] as e4m3 with a scale for each 128 numbers of a row would have it."""
    x, out = np.asarray(x, np.float32), np.zeros(x.shape)
    for m, start in itertools.product(range(x.shape[0]), range(0, x.shape[1], 128)):
        part = x[m, start : start + 128]
        scale = np.float32(max(np.abs(part).max(), 1e-30) / 448)
        out[m, start : start + 128] = (part / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return out


def in_8_bits(layer, d_out, ranks, precision):
    """Returns what `experts_loop.run` does, with rows rounded where they travel; from each rank comes one sum of a token."""
    own = len(layer.gate) // ranks
    gradients = rounded if precision == "fp8_both" else np.asarray
    sums = rounded if precision in ("fp8", "fp8_both") else np.asarray
    layer = layer._replace(x=rounded(layer.x))
    out, total = 0.0, None
    for r in range(ranks):
        here = layer._replace(experts=np.where(layer.experts // own == r, layer.experts, -1))
        part, d, _ = experts_loop.run(here, gradients(d_out))
        out, d["x"] = out + sums(part), gradients(d["x"])
        total = d if total is None else {n: total[n] + d[n] for n in d}
    return out, total


PRECISIONS = [("ep", "all_to_all", "fp8")]
SLOW = [
    ("ep", "all_gather", "fp8_tokens"),
    ("ep", "all_to_all", "fp8_both"),
    ("ep and sp", "two_level", "fp8_tokens"),
    ("ep", "ragged_all_to_all", "fp8"),
]


# -- rows on their way out on GPUs -------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Takes the branch for GPUs, whose operations then run as they do on this platform."""
    placed._compiled.cache_clear()
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *a, default, cuda=None, **_: (cuda or default)(*a))
    yield
    placed._compiled.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_rows_are_written_to_all_their_places(dtype, as_on_gpus):
    rng = np.random.default_rng(0)
    order = plan_of(jnp.asarray(rng.integers(-1, 5, (24, 3)), jnp.int32), 4)
    x = jnp.asarray(8 * rng.standard_normal((24, 32)), dtype)
    got, there = jax.jit(spread)(x, order.pairs, order.slots), np.asarray(order.pairs) >= 0
    np.testing.assert_array_equal(got[there], taken(x, order.pairs, 3)[there])


def test_a_mesh_has_the_numbers_of_the_loop_as_on_gpus(as_on_gpus):
    rng = np.random.default_rng(0)
    layer = Layer(
        rng.standard_normal((16, 8)), rng.integers(-1, 9, (16, 3)), rng.random((16, 3)).astype(np.float32),
        *(rng.standard_normal(s) for s in ((8, 8, 4), (8, 8, 4), (8, 4, 8))),
    )  # fmt: skip
    assert check(EP4, layer, scheme="all_to_all", buffer=0.4).extra_passes > 0


@pytest.mark.parametrize(
    ("place", "scheme", "precision"), [*PRECISIONS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_rows_of_8_bits_have_the_numbers_of_their_oracle(place, scheme, precision):
    """Widths of one block and a part of one. Sums that are rounded may fall to the other side of a step."""
    where, rng = PLACES[place], np.random.default_rng(0)
    layer = Layer.random(rng, 16, 3, 8, width=200)
    d_out = np.cos(np.arange(layer.x.size)).reshape(layer.x.shape).astype(np.float32)
    params = {n: getattr(layer, n) for n in ("gate", "up", "down")}
    function = on_mesh(where, 8, scheme=scheme, precision=precision, buffer=0.8)

    @jax.jit
    def run(x, weights, params):
        return jax.vjp(lambda *a: function(a[0], layer.experts, *a[1:]), x, weights, params, has_aux=True)

    out, pull, stats = run(layer.x, layer.weights, params)
    d_x, d_weights, d_params = backward(pull, d_out)
    want, d_want = in_8_bits(layer, d_out, 4, precision)
    for name, got in {"out": out, "x": d_x, "weights": d_weights, **d_params}.items():
        true = want if name == "out" else d_want[name]
        error, size = np.abs(np.asarray(got, np.float64) - true), np.abs(true).max()
        assert np.mean(error <= 1e-5 * size) > 0.99 and error.max() <= size / 8, (name, error.max(), size)
    exact, d_exact, _ = experts_loop.run(layer, d_out)
    assert 1e-3 < np.abs(out - exact).max() / np.abs(exact).max() < 0.1  # 8 bits they are
    assert stats.extra_passes > 0 and np.abs(d_x - d_exact["x"]).max() > 1e-3 * np.abs(d_exact["x"]).max()


def test_eight_bits_are_what_travels():
    """Of tokens and sums, with a float32 for each 128 of them; gradients go back as they are."""
    M, D, n = 64, 256, 4
    layer = shapes(n * M, 2, 8, D, D)
    function = on_mesh(EP4, 8, apply=rows_only, scheme="all_to_all", precision="fp8", buffer=4.0)
    program = jax.make_jaxpr(jax.grad(lambda x, e, w, p: function(x, e, w, p)[0].sum()))(*layer)
    sent = sorted(re.findall(r"\b([fi]\w+)\[(\d+,\d+)\]\{[^}]*\} = all_to_all", str(program)))
    wide = f"{n * M},{D}"
    assert (
        sent.count(("i8", wide)) == 2 and sent.count(("f32", f"{n * M},2")) >= 2 and sent.count(("f32", wide)) == 2
    ), sent


# -- to how many ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"score": "softmax"}, marks=pytest.mark.slow),
        pytest.param({"score": "sigmoid", "bias": True}, marks=pytest.mark.slow),
        pytest.param({"score": "sigmoid", "num_groups": 4, "topk_groups": 2}, marks=pytest.mark.slow),
        {"score": "sigmoid", "num_groups": 16, "topk_groups": 6, "group_top": 1, "bias": True},
    ],
)
def test_a_token_has_experts_of_the_best_ranks_alone(options):
    """In the words of DeepSeek-V3: a rank is as good as the sum of its best top_k / max_ranks scores."""
    E, n, k, rng = 16, 8, 3, np.random.default_rng(0)
    most = 3 if options.get("num_groups") == E else 2
    x, router = rng.standard_normal((2, 9, 5)).astype(np.float32), rng.standard_normal((5, E)).astype(np.float32)
    bias = 0.3 * rng.standard_normal(E).astype(np.float32)
    options = {**options, **({"bias": bias} if options.pop("bias", False) else {})}
    experts = np.asarray(route(x, router, top_k=k, ranks=n, max_ranks=most, **options).experts)
    logits = x.astype(np.float64) @ router
    scores = (
        np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        if options["score"] == "softmax"
        else 1 / (1 + np.exp(-logits))
    )
    for at in np.ndindex(2, 9):
        choice = scores[at] + options.get("bias", 0)
        left = set(range(E))
        if "num_groups" in options:
            groups = np.arange(E).reshape(options["num_groups"], -1)
            worth = [sum(sorted(choice[g], reverse=True)[: options.get("group_top", 2)]) for g in groups]
            left = {
                e for g in np.argsort(-np.asarray(worth), kind="stable")[: options["topk_groups"]] for e in groups[g]
            }
        lowest = min(choice[e] for e in left)
        judged = [[choice[e] if e in left else lowest for e in range(r * 2, r * 2 + 2)] for r in range(n)]
        worth = [
            sum(sorted(j, reverse=True)[: -(-k // most)]) if {2 * r, 2 * r + 1} & left else -np.inf
            for r, j in enumerate(judged)
        ]
        kept = {e for r in np.argsort(-np.asarray(worth), kind="stable")[:most] for e in (2 * r, 2 * r + 1)} & left
        assert experts[at].tolist() == sorted(kept, key=lambda e: (-choice[e], e))[:k]


def test_ranks_and_hosts_are_counted():
    """What each of four ranks has, in choices and in tokens."""
    experts = np.array([[0, 1, -1], [0, 7, 2], [-1, -1, -1], [4, 5, 6]])
    np.testing.assert_array_equal(rank_tokens(jnp.asarray(experts), 4, 8), [2, 1, 1, 2])
    assert [hosts_of(p) for p in ([0, 0, 1, 1], [0, 1, 0, 1], [3, 3, 3], [0, 0, 0, 1], [1, 0])] == [2, 1, 1, 1, 2]


@pytest.mark.slow
def test_the_layer_keeps_to_the_limit_and_says_what_ranks_have():
    rng, E, k = np.random.default_rng(1), 16, 4
    dims = {"x": (4, 8, 6), "router": (6, E), "gate": (E, 6, 4), "up": (E, 6, 4), "down": (E, 4, 6)}
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in dims.items()}
    mesh = ejdist.make_mesh(ep=4, devices=jax.devices()[:4])
    call = functools.partial(ejdist.moe, top_k=k, mesh=mesh)
    free, few = (jax.jit(lambda a, m=m: call(**a, max_ranks=m, dispatch="all_to_all"))(arrays)[1] for m in (None, 1))
    assert few.rank_tokens.sum() == 32 < free.rank_tokens.sum() and few.tokens == 32
    np.testing.assert_array_equal(few.rank_counts, k * few.rank_tokens)
    np.testing.assert_array_equal(few.host_counts, [32 * k])
    for wrong, words in {0: "an integer of at least 1", True: "an integer of at least 1"}.items():
        with pytest.raises(ValueError, match=f"moe: argument 'max_ranks' must be None, or {words}"):
            jax.eval_shape(lambda a, m=wrong: call(**a, max_ranks=m), arrays)
    with pytest.raises(
        ValueError, match="'max_ranks' = 1 leaves a token 2 experts, 2 on each rank, and top_k is 4; use at least 2"
    ):
        few_experts = {
            n: a[:8] if n in ("gate", "up", "down") else a[:, :8] if n == "router" else a for n, a in arrays.items()
        }
        jax.eval_shape(lambda a: call(**a, max_ranks=1), few_experts)
    with pytest.raises(ValueError, match=r"moe: .*'exchange' = 'fp4' is unknown; use one of bf16, fp8"):
        jax.eval_shape(lambda a: call(**a, exchange="fp4"), arrays)
    with pytest.raises(ValueError, match=r"'fp8' has 8-bit sums, but the scheme 'all_gather' adds rows up"):
        jax.eval_shape(lambda a: call(**a, dispatch="all_gather", exchange="fp8"), arrays)


# -- all to one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_steps_of_a_router_that_sends_all_to_one_rank():
    """Nothing is dropped and memory stays as it is: that of the program, which is one, and that of the arrays."""
    M, k, E, width = 16, 3, 8, 6
    rng, where = np.random.default_rng(0), EP4
    layer = Layer.random(rng, M, k, E, width=width, experts=rng.integers(2, 4, (M, k)))  # experts 2 and 3 are rank 1's
    function = on_mesh(where, E, scheme="all_to_all", buffer=1.0)
    spread = np.stack([rng.permutation(E)[:k] for _ in range(M)]).astype(np.int32)

    @jax.jit
    def step(experts, x, weights, params):
        def loss(x, weights, params):
            out, stats = function(x, experts, weights, params)
            return jnp.sum(out**2) / 2, (out, stats)

        (_, beside), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, params)
        moved = jax.tree.map(lambda a, d: a - 1e-4 * d, (x, weights, params), grads)
        return moved, beside

    state = jax.tree.map(jnp.asarray, (layer.x, layer.weights, {n: getattr(layer, n) for n in ("gate", "up", "down")}))
    compiled = step.lower(spread, *state).compile()
    balanced = compiled(spread, *state)[1][1]

    marks = {}
    for number in range(100):
        old, (state, (out, stats)) = state, compiled(layer.experts.astype(np.int32), *state)
        assert stats.dropped == 0 and stats.counts.sum() == M * k and stats.extra_passes > balanced.extra_passes
        if number in (2, 99):
            gc.collect()
            marks[number] = sum(a.nbytes for a in jax.live_arrays())
        if number in (0, 99):
            x, weights, params = jax.tree.map(np.array, old)
            want, d, _ = experts_loop.run(layer._replace(x=x, weights=weights, **params), out)
            np.testing.assert_allclose(out, want, atol=1e-5 * np.abs(want).max())
            d_x = (x - np.asarray(state[0])) / 1e-4
            np.testing.assert_allclose(d_x, d["x"], atol=2e-2 * np.abs(d["x"]).max())
    assert marks[2] == marks[99], marks
