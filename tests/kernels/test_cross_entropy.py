"""Cross entropy against optax and NumPy float64; blocks, vocabulary shards, and memory."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grid import error, value_and_gradients

import ejdist
from ejdist import make_mesh
from kernels import Unsupported
from kernels.engines.rows import vocabulary, vocabulary_pallas
from kernels.framework.interpret import interpret
from kernels.ops.cross_entropy import (
    BLOCK_ELEMENTS,
    CrossEntropyConfig,
    LossSums,
    fused_cross_entropy,
    fused_loss_sums,
    fused_token_losses,
)
from kernels.ops.cross_entropy.contract import logits_op, op, sums_op
from kernels.toolchains.simulate import ahead_of_time as checks

T, D, V = 23, 8, 37


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((T, D)), rng.standard_normal((D, V))
    targets = rng.integers(0, V, T)
    targets[[0, 7, 22]] = -1
    return hidden, head, targets, rng.random(T)


def oracle(hidden, head, targets, weights=None, smoothing=0.0, z_loss=0.0, cap=None):
    """Returns (mean loss, d hidden, d head) in float64, a token at a time."""
    total, count = 0.0, 0.0
    d_hidden, d_head = np.zeros_like(hidden), np.zeros_like(head)
    for t, target in enumerate(targets):
        if target == -1:
            continue
        w = 1.0 if weights is None else weights[t]
        raw = hidden[t] @ head
        z = raw if cap is None else cap * np.tanh(raw / cap)
        lse = np.log(np.sum(np.exp(z - z.max()))) + z.max()
        goal = np.full(V, smoothing / V)
        goal[target] += 1 - smoothing
        total += w * (np.sum(goal * (lse - z)) + z_loss * lse**2)
        count += w
        dz = w * ((1 + 2 * z_loss * lse) * np.exp(z - lse) - goal)
        dz = dz if cap is None else dz * (1 - np.tanh(raw / cap) ** 2)
        d_hidden[t], d_head = head @ dz, d_head + np.outer(hidden[t], dz)
    return total / count, d_hidden / count, d_head / count


OPTIONS = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "cap": {"cap": 3.0},
    "all": {"smoothing": 0.2, "z_loss": 1e-3, "cap": 5.0},
}


@pytest.mark.parametrize(
    ("block_rows", "weighted"),
    [
        (7, True),
        pytest.param(None, False, marks=pytest.mark.slow),
        *(pytest.param(*how, marks=pytest.mark.slow) for how in ((7, False), (None, True))),
    ],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_float64(options, block_rows, weighted):
    hidden, head, targets, weights = inputs()
    weights = weights if weighted else None
    wanted = oracle(hidden, head, targets, weights, **options)

    def loss(hidden, head, **how):
        return fused_cross_entropy(
            hidden,
            head,
            jnp.asarray(targets),
            weights=None if weights is None else jnp.asarray(weights, jnp.float32),
            label_smoothing=options.get("smoothing", 0.0),
            z_loss=options.get("z_loss", 0.0),
            logits_soft_cap=options.get("cap"),
            **how,
        )

    # The same loss from logits that exist.

    def through(x, w):
        return loss(None, None, logits=jnp.dot(x, w, precision="highest"))

    @jax.jit
    def both(x, w):
        blocked = functools.partial(loss, cfg=CrossEntropyConfig(block_rows))
        return [jax.value_and_grad(f, (0, 1))(x, w) for f in (blocked, through)]

    for value, gradients in both(hidden.astype(np.float32), head.astype(np.float32)):
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
        for got, want in zip(gradients, wanted[1:], strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-4)


@pytest.mark.slow
def test_against_optax():
    hidden, head, targets, _ = inputs()
    x, w, keep = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), targets >= 0
    logits = jnp.dot(x, w, precision="highest")
    each = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    got = fused_cross_entropy(x, w, jnp.asarray(targets), reduction="none")
    np.testing.assert_allclose(got, jnp.where(keep, each, 0), rtol=1e-5, atol=1e-6)
    smooth = optax.losses.softmax_cross_entropy(
        logits, optax.losses.smooth_labels(jax.nn.one_hot(jnp.maximum(targets, 0), V), 0.1)
    )
    got = fused_cross_entropy(x, w, jnp.asarray(targets), label_smoothing=0.1, reduction="sum")
    np.testing.assert_allclose(got, jnp.sum(jnp.where(keep, smooth, 0)), rtol=1e-5)


def test_ignored_tokens_never_count():
    hidden, head, targets, _ = inputs()
    x, w = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    for index in (-1, -100, 5):
        marked = np.where(targets == -1, index, np.where(targets == index, 6, targets))
        got = fused_cross_entropy(x, w, jnp.asarray(marked), ignore_index=index, z_loss=0.1)
        kept = fused_cross_entropy(
            x[targets >= 0], w, jnp.asarray(marked[targets >= 0]), ignore_index=index, z_loss=0.1
        )
        np.testing.assert_allclose(got, kept, rtol=1e-6)
    nothing = jnp.full(T, -1)
    value, gradient = jax.value_and_grad(lambda x: fused_cross_entropy(x, w, nothing, z_loss=1.0))(x)
    assert value == 0 and not np.any(gradient)


def test_a_stray_target_is_not_a_silent_zero():
    hidden, head, targets, _ = inputs()
    x, w = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    for stray in (V, -2):
        marked = jnp.asarray(targets).at[3].set(stray)
        assert np.flatnonzero(np.isnan(fused_token_losses(x, w, marked).loss)).tolist() == [3]
        gradient = jax.grad(lambda x: fused_cross_entropy(x, w, marked))(x)  # noqa: B023
        assert np.isnan(gradient[3]).all() and np.isfinite(np.delete(gradient, 3, axis=0)).all()


def test_minus_one_hundred_is_ignored_too():
    hidden, head, targets, _ = inputs()
    x, w = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    usual = fused_cross_entropy(x, w, jnp.asarray(targets), z_loss=0.1)
    assert fused_cross_entropy(x, w, jnp.asarray(np.where(targets == -1, -100, targets)), z_loss=0.1) == usual


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_targets_of_a_narrow_dtype_are_the_tokens_that_they_say(dtype):
    """-1 and -100 are tokens of 8 unsigned bits, and a vocabulary may be larger than what 8 bits hold."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((5, 4), (4, 300)))
    targets = jnp.array([1, 100, 127, 0, 3] if dtype == "int8" else [1, 156, 255, 0, 3])
    how = {"cfg": CrossEntropyConfig(block_rows=4)}
    for function in (fused_token_losses, fused_loss_sums):
        got, want = (function(x, w, t, **how) for t in (targets.astype(dtype), targets))
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert np.isfinite(want.loss).all() and jnp.sum(want.counted) == 5


@pytest.mark.slow
def test_a_part_of_the_vocabulary_over_devices_may_be_all_padding():
    logits, targets = jnp.cos(jnp.arange(32.0)).reshape(2, 16).at[:, 8:].set(-jnp.inf), jnp.array([1, 7])

    def value_and_gradient(mesh):
        return jax.value_and_grad(lambda x: ejdist.fused_cross_entropy(logits=x, targets=targets, mesh=mesh))(logits)

    got, want = value_and_gradient(make_mesh(tp=2)), value_and_gradient(None)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), got, want)


TILES = (("triton", 16), ("triton", 64), ("triton", 256), ("pallas", 128), ("pallas", 256))


@pytest.mark.parametrize(
    ("cap", "tiles"),
    [
        pytest.param(None, (TILES[0], TILES[2], TILES[4]), marks=pytest.mark.slow),
        (3.0, (TILES[1], TILES[3])),
        *(pytest.param(cap, TILES, marks=pytest.mark.slow) for cap in (None, 3.0)),
    ],
)
def test_a_vocabulary_that_is_masked_out_in_part(cap, tiles, monkeypatch):
    """In blocks all of which, or some entries of which, are masked out: no sum of the kernel may become NaN."""
    monkeypatch.setattr(vocabulary_pallas, "ELEMENTS", 16 * 128)  # a tile of 16 rows, and one of what is left
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((20, 200)).astype(np.float32) * 20
    logits[::4, :150] = logits[1::4, 50:] = logits[2::4, ::2] = -np.inf
    a = {"logits": jnp.asarray(logits), "targets": jnp.asarray(np.tile([160, 3, 1, -1], 5), jnp.int32)}
    a |= {} if cap is None else {"logits_soft_cap": cap}
    truth, wanted, d = value_and_gradients(logits_op.function, a)
    with interpret():
        for platform, size in tiles:
            cfg = CrossEntropyConfig(block_vocab=size, num_warps=1)
            got, gradients, _ = value_and_gradients(lambda **a: logits_op(**a, platform=platform, cfg=cfg), a, d)  # noqa: B023
            for actual, want in zip(got, truth, strict=True):
                np.testing.assert_allclose(actual, want, rtol=3e-6, atol=3e-5)
            np.testing.assert_allclose(gradients["logits"], wanted["logits"], atol=1e-5)


@pytest.mark.parametrize("size", [16, 64], ids=["several tiles", "one tile"])
def test_columns_that_align_rows_are_no_entries(size, monkeypatch):
    """Logits are -90 and less, so that a logit of 0 would be most of every softmax, and its share infinite."""
    monkeypatch.setattr(vocabulary, "_WORTH_WIDENING", T)
    hidden, head, targets, weights = (jnp.asarray(x, dtype) for x, dtype in zip(inputs(), "ffif", strict=True))
    x, w = 1 + abs(hidden), -12 - abs(head)
    assert vocabulary.widened([(x, w)])[0][1].shape == (D, 40)
    assert vocabulary.widened([(x[1:], w)])[0][1] is w and vocabulary.widened([(x, w[:, 1:])])[0][1].shape == (D, 36)
    cfg = CrossEntropyConfig(block_rows=10, block_vocab=size, num_warps=1)
    sums = {"z_loss": 1e-3, "label_smoothing": 0.1}
    for operation, a in (
        (op, {"hidden": x, "lm_head": w, "targets": targets}),
        (sums_op, {"hidden": x, "lm_head": w, "targets": targets, "weights": weights, **sums}),
    ):
        truth, wanted, d = value_and_gradients(operation.function, a)
        with interpret():
            got, gradients, _ = value_and_gradients(lambda **a: operation(**a, platform="triton", cfg=cfg), a, d)  # noqa: B023
        for actual, want in [*zip(got, truth, strict=True), *((gradients[n], wanted[n]) for n in wanted)]:
            assert error(actual, want) < 1e-4  # float32 holds a logit of 150 to 8e-6


def test_a_row_that_is_no_number_is_none_and_no_other_row_is():
    logits = np.cos(np.arange(5 * 200)).reshape(5, 200).astype(np.float32)
    logits[1, 130], logits[2, 3], logits[3], logits[4, 7] = np.nan, np.inf, -np.inf, 3e38
    logits, targets = jnp.asarray(logits), jnp.asarray([5, 6, 199, 0, 200], jnp.int32)
    d = tuple(jnp.full((5,), n, jnp.float32) for n in (0.5, -1, 2))

    def both(platform):
        outputs, pull = jax.vjp(lambda x: logits_op(x, targets, platform=platform, cfg=cfg), logits)
        return outputs, pull(d)

    cfg = None
    wanted = both("xla")
    with interpret():
        for size in (128, 256):
            cfg = CrossEntropyConfig(block_vocab=size)
            jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-6), both("pallas"), wanted)
    (lse, _, _), (gradient,) = wanted
    assert np.isnan(lse[1]) and np.isnan(gradient[1]).all() and np.isfinite(gradient[jnp.array([0, 3, 4])]).all()


@pytest.mark.parametrize("mesh", [None, {"tp": 2}], ids=["one device", "tp"])
def test_an_ignored_token_of_which_all_is_masked_out_has_no_gradient(mesh):
    """Its lse is -inf, and the derivative of z_loss, of none too, holds lse."""
    logits, targets = jnp.cos(jnp.arange(48.0)).reshape(3, 16).at[1].set(-jnp.inf), jnp.array([1, -1, 7])

    def loss(logits):
        return ejdist.fused_cross_entropy(logits=logits, targets=targets, mesh=mesh and make_mesh(**mesh))

    gradient = jax.grad(loss)(logits)
    counted = jnp.array([0, 2])
    wanted = jax.grad(lambda x: fused_cross_entropy(logits=x, targets=targets[counted]))(logits[counted])
    np.testing.assert_allclose(gradient, jnp.zeros_like(logits).at[counted].set(wanted), atol=1e-7)


@pytest.mark.slow
def test_pallas_takes_targets_of_64_bits():
    with jax.enable_x64(True), interpret():
        logits, targets = jnp.cos(jnp.arange(60, dtype="float32")).reshape(3, 20), jnp.array([2**32, 4, -1], "int64")
        got, want = (
            jax.vjp(lambda x: logits_op(x, targets, platform=platform), logits)  # noqa: B023
            for platform in ("pallas", "xla")
        )
        d = (jnp.ones(3, "float32"),) * 3
        for a, b in [*zip(got[0], want[0], strict=True), (got[1](d)[0], want[1](d)[0])]:
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow  # compiled; cases of the operation are compiled in the quick tests
def test_pallas_has_room_for_many_tokens_of_a_small_vocabulary():
    """A column is 128 lanes wide in VMEM, and so is what a row has of numbers."""

    def both(logits, targets):
        outputs, pull = jax.vjp(lambda x: logits_op(x, targets, platform="pallas"), logits)
        return outputs, pull(tuple(map(jnp.ones_like, outputs)))

    shapes = jax.ShapeDtypeStruct((16384, 20), "bfloat16"), jax.ShapeDtypeStruct((16384,), "int32")
    assert checks.mosaic_calls(checks.compile_tpu(both, *shapes)) == 2


@pytest.mark.parametrize("which", [pytest.param(w, marks=pytest.mark.slow) for w in ("first", "last", "own")])
def test_numbers_of_the_tuning_candidates(which):
    case = next(case for case in op.cases if case.name == "odd")
    a = op.case_inputs(case)
    found = list(op.backends["triton_gpu"].candidates(op.bind(**a)))
    assert len(found) == len(set(found)) >= 2
    own = CrossEntropyConfig(block_rows=64, block_vocab=16, num_warps=1)
    cfg = {"first": found[0], "last": found[-1], "own": own}[which]
    truth, true_gradients, d = value_and_gradients(op.function, a)
    with interpret():
        got, gradients, _ = value_and_gradients(lambda **a: op(**a, platform="triton", cfg=cfg), a, d)
    for actual, wanted in [*zip(got, truth), *((gradients[n], true_gradients[n]) for n in true_gradients)]:
        assert error(actual, wanted) < 5e-6, cfg


def test_kernels_with_the_vocabulary_split_over_devices():
    hidden, head, targets, _ = inputs()
    x, w, t = jnp.asarray(hidden[:22], jnp.float32), jnp.asarray(head[:, :36], jnp.float32), targets[:22] % 36

    def value_and_gradient(function, **how):
        def loss(x, w):
            return function(x, w, jnp.asarray(t), z_loss=1e-2, label_smoothing=0.1, **how)

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)

    wanted = value_and_gradient(fused_cross_entropy)
    with interpret():
        got = value_and_gradient(ejdist.fused_cross_entropy, mesh=make_mesh(dp=2, tp=2), platform="triton")
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-6, rtol=1e-5), got, wanted)


# -- sums, whose gradients are made in the forward --------------------------------------------------------------------

HOW = {"z_loss": 1e-2, "label_smoothing": 0.1, "logits_soft_cap": 5.0, "ignore_index": 3}


def sums_and_gradients(function, dtype="float32", **how):
    """Returns (sums, gradients of hidden, head and weights for a cotangent of one)."""
    hidden, head, targets, weights = (jnp.asarray(x) for x in inputs())
    how = {**HOW, **how}

    def loss(h, w, each):
        sums = function(h[:22], w[:, :36], targets[:22] % 36, weights=each[:22], **how)
        return sums.total, sums

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, sums), gradients = run(hidden.astype(dtype), head.astype(dtype), weights.astype(jnp.float32))
    return sums, gradients


def summed_terms(hidden, head, targets, weights, **how):
    """The same by `fused_token_losses`, which computes logits twice."""
    terms = fused_token_losses(hidden, head, targets, **how)
    total, z_loss, counted = (jnp.sum(x * weights) for x in terms)
    return LossSums(total, total - z_loss, z_loss, counted)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        pytest.param(None, "float32", marks=pytest.mark.slow),
        pytest.param(5, "float32", marks=pytest.mark.slow),
        (5, "bfloat16"),
    ],
)
def test_sums_and_their_gradients_are_those_of_the_terms(rows, dtype):
    cfg = CrossEntropyConfig(rows)
    got, want = (sums_and_gradients(f, dtype, cfg=cfg) for f in (fused_loss_sums, summed_terms))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and error(a, b) < 1e-6


@pytest.mark.parametrize("mesh", [pytest.param({"dp": 2}, marks=pytest.mark.slow), {"dp": 2, "tp": 2}], ids=str)
def test_sums_on_a_mesh(mesh):
    got = sums_and_gradients(ejdist.fused_loss_sums, mesh=make_mesh(**mesh))
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5, rtol=1e-5), got, sums_and_gradients(summed_terms)
    )


def products(function, differentiated=True, field=None, **how):
    """Returns how many matmuls a program has: one that differentiates all of the result, or a field and reports the rest."""
    x, w, t = jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.zeros(4, jnp.int32)

    def loss(x, w):
        result = function(x, w, t, **how)
        return sum(map(jnp.sum, jax.tree.leaves(getattr(result, field) if field else result))), result

    run = jax.grad(loss, (0, 1), has_aux=True) if differentiated else loss
    return jax.jit(run).lower(x, w).as_text().count("stablehlo.dot_general")


@pytest.mark.slow  # what is computed, not what comes out
def test_logits_are_computed_twice_only_where_it_is_said():
    split = {"mesh": make_mesh(tp=2)}
    assert products(fused_loss_sums) == products(fused_cross_entropy, reduction="sum") == 3
    assert products(ejdist.fused_loss_sums, mesh=make_mesh(dp=2)) == products(fused_cross_entropy) == 3
    assert products(fused_token_losses) == products(fused_cross_entropy, reduction="none") == 4
    assert products(ejdist.fused_loss_sums, **split) == products(ejdist.fused_cross_entropy, **split) == 4
    assert products(fused_loss_sums, field="total", z_loss=0.1) == products(fused_loss_sums, field="loss") == 3
    assert products(ejdist.fused_loss_sums, field="total", z_loss=0.1, mesh=make_mesh(dp=2)) == 3
    for field in ("loss", "z_loss"):  # the gradient of one part by itself is not what the forward kept
        assert products(fused_loss_sums, field=field, z_loss=0.1) == 6
    # Without a derivative nothing is made for one.
    assert products(fused_loss_sums, differentiated=False) == products(fused_token_losses, differentiated=False) == 1


@pytest.mark.parametrize("backend", ["xla", pytest.param("triton_gpu", marks=pytest.mark.slow)])
def test_what_a_forward_keeps_is_what_the_contract_says(backend):
    case = next(case for case in sums_op.cases if case.name == "odd")
    call = sums_op.bind(**sums_op.case_inputs(case, dtype="bfloat16"))
    cfg = CrossEntropyConfig(block_rows=128, block_vocab=64, num_warps=1)
    wanted = jax.jit(lambda a: sums_op.extra_residuals(**a, **call.static()))(call.traced())
    with interpret():
        run = jax.jit(lambda a: sums_op.backends[backend].run("forward_with_residuals", {**a, **call.static()}, cfg))
        _, got = run(call.traced())
    assert {n: x.dtype for n, x in got.items()} == {n: x.dtype for n, x in wanted.items()}
    for name, want in wanted.items():
        assert error(got[name], want) < (1e-4 if name == "losses" else 1e-2), name


FIELDS = ("total", "loss", "z_loss")


def dense_sums(hidden, head, targets, weights, z_loss):
    """The sums in plain JAX, of whole logits."""
    logits = jnp.dot(hidden, head, precision="highest")
    lse, counts = jax.nn.logsumexp(logits, axis=-1), weights * (targets >= 0)
    each = lse - jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    loss, of_z = jnp.sum(counts * each), jnp.sum(counts * z_loss * lse**2)
    return LossSums(loss + of_z, loss, of_z, jnp.sum(counts))


QUICK_SUMS = {("triton", 0.1)}


@pytest.mark.parametrize(
    ("where", "z_loss"),
    [
        pytest.param(*how, marks=() if how in QUICK_SUMS else pytest.mark.slow)
        for how in itertools.product(("xla", "triton", "dp", "tp"), (0.0, 0.1))
    ],
)
def test_every_field_of_the_sums_has_its_gradient(where, z_loss):
    hidden, head, targets, weights = inputs()
    arrays = tuple(jnp.asarray(x, jnp.float32) for x in (hidden[:22], head[:, :36], weights[:22]))
    targets = jnp.asarray(np.where(targets[:22] < 0, -1, targets[:22] % 36))
    on_mesh = where in ("dp", "tp")
    how = {"mesh": make_mesh(**{where: 2})} if on_mesh else {"platform": where, "cfg": CrossEntropyConfig(block_rows=5)}
    function = ejdist.fused_loss_sums if on_mesh else fused_loss_sums

    def pulled(sums_of):
        """Returns the sums, and the gradients of each field by itself and of all together with different cotangents."""
        sums, pull = jax.vjp(lambda h, w, each: sums_of(h, w, each)[:3], *arrays)
        return sums, [pull(tuple(map(jnp.float32, d))) for d in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, -2, 3))]

    def alone(sums_of):
        """Returns the gradients of each field where nothing depends on the others."""
        return [jax.grad(lambda *a, f=f: getattr(sums_of(*a), f), (0, 1, 2))(*arrays) for f in FIELDS]

    with interpret() if where == "triton" else contextlib.nullcontext():
        got = [
            jax.jit(lambda f=f: f(lambda h, w, e: function(h, w, targets, weights=e, z_loss=z_loss, **how)))()
            for f in (pulled, alone)
        ]
    want = [jax.jit(lambda f=f: f(lambda h, w, e: dense_sums(h, w, targets, e, z_loss)))() for f in (pulled, alone)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), got, want)
    assert np.any(got[1][1][0])


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("xla", marks=pytest.mark.slow),
        pytest.param("triton", marks=pytest.mark.slow),
        "pallas",
        pytest.param("tp", marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_a_token_includes_z_loss(where):
    """Value and gradient of `fused_token_losses(...).loss` are those of `reduction="none"`, which float64 has checked."""
    hidden, head, targets, _ = inputs()
    x, w, t = jnp.asarray(hidden, jnp.float32), jnp.asarray(head[:, :36], jnp.float32), jnp.asarray(targets) % 36
    how = {"mesh": make_mesh(tp=2)} if where == "tp" else {"platform": where}
    of_tokens = ejdist.fused_token_losses if where == "tp" else fused_token_losses
    of_arrays = {"hidden": x, "lm_head": w} if where != "pallas" else {}  # which has a kernel for logits only
    for arrays in filter(None, (of_arrays, {"logits": x @ w})):

        def pulled(losses_of, arrays=arrays, **how):
            losses, pull = jax.vjp(lambda arrays: losses_of(**arrays, targets=t, z_loss=0.1, **how), arrays)
            return losses, pull(jnp.arange(T, dtype=jnp.float32))

        with interpret() if where in ("triton", "pallas") else contextlib.nullcontext():
            got = pulled(lambda **a: of_tokens(**a).loss, **how)
        want = pulled(lambda **a: fused_cross_entropy(**a, reduction="none"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), got, want)
    value = {z: float(jnp.mean(fused_token_losses(x, w, t, z_loss=z).loss)) for z in (0.0, 0.1)}
    assert value[0.1] == pytest.approx(float(fused_cross_entropy(x, w, t, z_loss=0.1)), rel=1e-6)
    assert value[0.1] > value[0.0] + 0.1


def test_flags_are_weights():
    hidden, head, targets, _ = inputs()
    x, w, t = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(targets)
    flags = jnp.asarray(np.arange(T) % 2 == 0)
    got, want = (fused_loss_sums(x, w, t, weights=f) for f in (flags, flags.astype(jnp.float32)))
    assert got == want and got.counted == jnp.sum(flags & (t >= 0))


def test_logits_are_read_and_written_16_bytes_at_a_time():
    case = next(case for case in op.cases if case.name == "llama_8b")
    forward, backward = checks.export_cuda(*checks.call_of(op, case)).kernels
    # A thread has 8 numbers of 16 bits: one load, and another one that reads ahead or masks the last block.
    assert forward.ptx.count("ld.global.v4.b32") >= 2
    assert backward.ptx.count("ld.global.v4.b32") >= 2 and backward.ptx.count("st.global.v4.b32") >= 1
    assert "st.global.b16" not in backward.ptx and "st.global.v2.b16" not in backward.ptx


def test_dispatch_and_refusals():
    x, w, t = jnp.ones((2, 4)), jnp.ones((4, 8)), jnp.zeros(2, jnp.int32)
    chosen = op.choose(op.bind(x, w, t), None)
    assert [chosen[p].name for p in ("cpu", "cuda", "rocm", "tpu")] == ["xla", "triton_gpu", "xla", "xla"]
    assert logits_op.choose(logits_op.bind(jnp.ones((2, 8)), t), None)["tpu"].name == "pallas_tpu"
    with interpret(), pytest.raises(Unsupported, match="an array has no elements"):
        fused_cross_entropy(x[:0], w, t[:0], platform="triton")
    with pytest.raises(Unsupported, match="cross_entropy_sums has no pallas backend"):
        fused_cross_entropy(x, w, t, platform="pallas")


@pytest.mark.parametrize("entries", [2048, 52_224, 128_256, 262_144])
def test_few_rows_of_default_blocks_are_no_tokens(entries):
    for tokens in (1, 1000, 1100, 1537, 2664, 8191, 65_537):
        rows = vocabulary.rows_of_block(tokens, entries, BLOCK_ELEMENTS)
        blocks = -(-tokens // rows)
        assert tokens <= blocks * rows <= 1.17 * tokens
        assert rows <= 1.5 * max(1024, BLOCK_ELEMENTS // entries)


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Compiled scratch memory of forward and backward, beside what scales with tokens times D."""
    width, vocabulary, rows = 8, 4096, 128

    def scratch(tokens):
        def f(h, w, t):
            return fused_cross_entropy(h, w, t, cfg=CrossEntropyConfig(block_rows=rows))

        args = (
            jax.ShapeDtypeStruct((tokens, width), jnp.float32),
            jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        )
        return jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile().memory_analysis().temp_size_in_bytes

    small, large = scratch(512), scratch(8192)
    logits = 4 * 8192 * vocabulary
    assert large < logits / 8
    assert large - small < 4 * (8192 - 512) * 10 * width  # rows of hidden and per-token numbers only


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h, w, t: fused_cross_entropy(h, w), "'targets' is missing"),
        (lambda h, w, t: fused_cross_entropy(h, targets=t), "either 'hidden' and 'lm_head', or 'logits'"),
        (lambda h, w, t: fused_cross_entropy(h, w, t[1:]), "'targets' must have shape"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, reduction="avg"), "mean, sum or none"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, label_smoothing=1.0), "label_smoothing"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, logits_soft_cap=0.0), "logits_soft_cap"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, weights=jnp.ones(2)), "'weights' must have shape"),
        (lambda h, w, t: fused_loss_sums(h, w, t, weights=jnp.ones(2)), "'weights' must have shape"),
        (lambda h, w, t: fused_loss_sums(h, None, t), "either 'hidden' and 'lm_head', or 'logits'"),
        (lambda h, w, t: fused_cross_entropy(h, w[1:], t), "'lm_head'.*D"),
        (lambda h, w, t: fused_cross_entropy(h.astype(jnp.bfloat16), w, t), "'lm_head' is float32"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, ignore_index=2**31), "'ignore_index' must be an int32"),
        (lambda h, w, t: fused_cross_entropy(h[:, :0], w[:0], t), "'hidden' of shape .* has no features"),
        (lambda h, w, t: fused_token_losses(h, w[:, :0], t), "'lm_head' of shape .* or no vocabulary"),
        (lambda h, w, t: fused_token_losses(logits=h[:, :0], targets=t), "'logits' of shape .* or no vocabulary"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.zeros(4, jnp.int32))
