"""KL divergence of teacher and student: against NumPy float64 and optax, blocks, vocabulary shards, and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grid import FLOOR, error, value_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

import ejdist
from ejdist import make_mesh
from kernels import Unsupported, fused_kl_divergence
from kernels.engines.rows import vocabulary, vocabulary_pallas
from kernels.framework.interpret import interpret
from kernels.ops.kl_divergence import KLDivergenceConfig
from kernels.ops.kl_divergence.contract import logits_op, op

T, D, DT, V = 23, 8, 6, 37
RNG = np.random.default_rng(0)
HIDDEN, HEAD = RNG.standard_normal((T, D)), RNG.standard_normal((D, V))
TEACHER_HIDDEN, TEACHER_HEAD = RNG.standard_normal((T, DT)), RNG.standard_normal((DT, V))
TARGETS, WEIGHTS = np.arange(T), RNG.random(T)
TARGETS[[0, 7, 22]], TARGETS[4] = -1, -100
ARRAYS = (HIDDEN, HEAD, TEACHER_HIDDEN, TEACHER_HEAD)
narrow = functools.partial(jax.tree.map, lambda x: jnp.asarray(np.asarray(x, np.float32)))


def distributions(raw, cap, temperature):
    """Returns (logarithms of probabilities, derivative of the logits under the softmax), one token."""
    z = (raw if cap is None else cap * np.tanh(raw / cap)) / temperature
    slope = (1 if cap is None else 1 - np.tanh(raw / cap) ** 2) / temperature
    return z - z.max() - np.log(np.sum(np.exp(z - z.max()))), slope


def oracle(hidden, head, teacher_hidden, teacher_head, direction="forward", temperature=1.0, caps=(None, None)):
    """Returns (each token's divergence, d hidden, d head of their weighted sum) in float64, from the definition, by tokens."""
    each, d_hidden, d_head = np.zeros(len(hidden)), np.zeros_like(hidden), np.zeros_like(head)
    for t in range(len(hidden)):
        log_s, slope = distributions(hidden[t] @ head, caps[0], temperature)
        log_t, _ = distributions(teacher_hidden[t] @ teacher_head, caps[1], temperature)
        s, p = np.exp(log_s), np.exp(log_t)
        if direction == "forward":
            each[t] = np.sum(p * (log_t - log_s))
            dz = s - p
        else:
            each[t] = np.sum(s * (log_s - log_t))
            dz = (np.diag(s) - np.outer(s, s)) @ (log_s - log_t + 1)  # the Jacobian of the softmax, and the sum's own
        dz = dz * slope * WEIGHTS[t] * (TARGETS[t] >= 0)
        d_hidden[t], d_head = head @ dz, d_head + np.outer(hidden[t], dz)
    return each, d_hidden, d_head


OPTIONS = {
    "forward": {},
    "reverse": {"direction": "reverse"},
    "all": {"temperature": 2.5, "caps": (3.0, 5.0)},
    "all, reverse": {"direction": "reverse", "temperature": 0.7, "caps": (None, 4.0)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_float64(options):
    each, *gradients = oracle(*ARRAYS, **options)
    counted = WEIGHTS * (TARGETS >= 0)
    caps = options.get("caps", (None, None))
    how = {k: v for k, v in options.items() if k != "caps"}
    how |= {"logits_soft_cap": caps[0], "teacher_logits_soft_cap": caps[1], "targets": TARGETS, "reduction": "sum"}
    how["weights"] = jnp.asarray(WEIGHTS, jnp.float32)
    hidden, head, *teacher = narrow(ARRAYS)

    def fused(hidden, head):
        return fused_kl_divergence(hidden, head, *teacher, **how, cfg=KLDivergenceConfig(7))

    def of_logits(hidden, head):
        z, zt = (jnp.dot(a, b, precision="highest") for a, b in ((hidden, head), teacher))
        return fused_kl_divergence(logits=z, teacher_logits=zt, **how)

    def plain(hidden, head):
        def logs(x, w, cap):
            z = jnp.dot(x, w, precision="highest")
            return jax.nn.log_softmax((z if cap is None else cap * jnp.tanh(z / cap)) / options.get("temperature", 1.0))

        s, t = logs(hidden, head, caps[0]), logs(*teacher, caps[1])
        a, b = (s, t) if how.get("direction") == "reverse" else (t, s)
        return jnp.sum(jnp.sum(jnp.exp(a) * (a - b), axis=-1) * counted.astype(np.float32))

    plainly = jax.jit(jax.grad(plain, (0, 1)))(hidden, head)
    rounding = [error(g, w) for g, w in zip(plainly, gradients, strict=True)]
    for function in (fused, of_logits):
        value, got = jax.jit(jax.value_and_grad(function, (0, 1)))(hidden, head)
        np.testing.assert_allclose(value, np.sum(each * counted), rtol=1e-5)
        for g, w, rounded in zip(got, gradients, rounding, strict=True):
            # The measure of every operation: twice what a plain program in float32 is off, and a floor.
            assert error(g, w) <= 2 * rounded + FLOOR["float32"]


def test_reductions_and_ignored_tokens():
    each, *_ = oracle(*ARRAYS)
    arrays, keep, fives = narrow(ARRAYS), TARGETS >= 0, (TARGETS != 5) & (TARGETS != -100)
    of = functools.partial(fused_kl_divergence, *arrays)
    np.testing.assert_allclose(of(reduction="none"), each, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of(targets=TARGETS, reduction="none"), each * keep, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of(targets=TARGETS), each[keep].mean(), rtol=1e-5)
    np.testing.assert_allclose(of(targets=TARGETS, ignore_index=5), each[fives].mean(), rtol=1e-5)
    weighted = np.sum((each * WEIGHTS)[keep]) / np.sum(WEIGHTS[keep])
    np.testing.assert_allclose(of(targets=TARGETS, weights=WEIGHTS.astype(np.float32)), weighted, rtol=1e-5)
    assert of(targets=np.full(T, -1)) == 0


def test_marks_of_a_narrow_dtype_are_the_tokens_that_they_say():
    marks = jnp.array([255, 156, 3])  # as int8 the first two are -1 and -100
    z, zt = jnp.cos(jnp.arange(12.0)).reshape(3, 4), jnp.zeros((3, 4))
    each = functools.partial(fused_kl_divergence, logits=z, teacher_logits=zt, reduction="none")
    np.testing.assert_array_equal(each(targets=marks.astype(jnp.uint8)), each(targets=marks))
    assert each(targets=marks).all()


def test_against_optax():
    z, zt = narrow((HIDDEN @ HEAD, TEACHER_HIDDEN @ TEACHER_HEAD))
    got = fused_kl_divergence(logits=z, teacher_logits=zt, reduction="none")
    wanted = optax.losses.kl_divergence(jax.nn.log_softmax(z), jax.nn.softmax(zt))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_masked_entries_and_infinite_divergences(direction):
    """An entry that both mask out counts nothing; one that q alone masks out is infinitely far, and where the token is not
    counted that reaches nothing."""
    z, zt = (np.array(x, np.float32) for x in (HIDDEN @ HEAD, TEACHER_HIDDEN @ TEACHER_HEAD))
    z[:, :5] = zt[:, :5] = -np.inf
    first, second = (z, zt) if direction == "forward" else (zt, z)
    first[0, 9] = -np.inf  # only q

    def loss(z, targets=None):
        return fused_kl_divergence(logits=z, teacher_logits=zt, direction=direction, targets=targets)

    each = fused_kl_divergence(logits=z, teacher_logits=zt, direction=direction, reduction="none")
    assert np.flatnonzero(~np.isfinite(each)).tolist() == [0] and each[0] == np.inf
    clean = oracle(np.asarray(z)[1:, 5:], np.eye(V - 5), np.asarray(zt)[1:, 5:], np.eye(V - 5), direction)[0]
    np.testing.assert_allclose(each[1:], clean, rtol=1e-4, atol=1e-5)
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(z), jnp.asarray(TARGETS))
    counted = TARGETS[1:] >= 0
    np.testing.assert_allclose(value, clean[counted].mean(), rtol=1e-4)
    assert np.isfinite(gradient).all() and not np.any(gradient[0]) and not np.any(gradient[:, :5])


def test_the_teacher_has_no_gradient():
    gradients = jax.grad(lambda *a: fused_kl_divergence(*a, direction="reverse"), (0, 1, 2, 3))(*narrow(ARRAYS))
    assert [bool(np.any(g)) for g in gradients] == [True, True, False, False]


def test_a_teacher_of_another_dtype():
    hidden, head, *teacher = narrow(ARRAYS)
    got = fused_kl_divergence(hidden, head, *(x.astype("bfloat16") for x in teacher))
    np.testing.assert_allclose(got, fused_kl_divergence(hidden, head, *teacher), rtol=0.05)


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Compiled scratch memory of forward and backward, beside what scales with tokens times D."""
    width, vocabulary, rows = 8, 4096, 128

    def scratch(tokens):
        shapes = [(tokens, width), (width, vocabulary), (tokens, width), (width, vocabulary)]
        f = functools.partial(fused_kl_divergence, direction="reverse", cfg=KLDivergenceConfig(rows))
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        return jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile().memory_analysis().temp_size_in_bytes

    small, large = scratch(512), scratch(8192)
    assert large < 4 * 8192 * vocabulary / 4  # of one of the two logits
    assert large - small < 4 * (8192 - 512) * 12 * width  # rows of hidden states and numbers of a token only


MESHES = {"tp2": {"tp": 2}, "dp2_tp2": {"dp": 2, "tp": 2}}


@pytest.mark.parametrize("mesh", [pytest.param("tp2", marks=pytest.mark.slow), "dp2_tp2"])
@pytest.mark.parametrize("direction", ["forward", pytest.param("reverse", marks=pytest.mark.slow)])
def test_a_vocabulary_over_devices(direction, mesh):
    hidden, head, *teacher = narrow(
        (HIDDEN[:20].reshape(2, 10, D), HEAD[:, :36], TEACHER_HIDDEN[:20], TEACHER_HEAD[:, :36])
    )
    teacher[0] = teacher[0].reshape(2, 10, DT)
    how = {"direction": direction, "targets": TARGETS[:20].reshape(2, 10), "temperature": 1.5}

    def run(function, **where):
        def f(h, w):
            return function(h, w, *teacher, **how, **where)

        return jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, head)

    got, want = run(ejdist.fused_kl_divergence, mesh=make_mesh(**MESHES[mesh])), run(fused_kl_divergence)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-4, atol=1e-6), got, want)


def test_a_part_of_the_vocabulary_over_devices_may_be_all_padding():
    z, zt = (np.array(x[:, :36], np.float32) for x in (HIDDEN @ HEAD, TEACHER_HIDDEN @ TEACHER_HEAD))
    z[:, 18:] = zt[:, 18:] = -np.inf
    f = functools.partial(ejdist.fused_kl_divergence, teacher_logits=jnp.asarray(zt), mesh=make_mesh(tp=2))
    value, gradient = jax.jit(jax.value_and_grad(lambda z: f(logits=z)))(jnp.asarray(z))
    np.testing.assert_allclose(value, fused_kl_divergence(logits=z[:, :18], teacher_logits=zt[:, :18]), rtol=1e-5)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    "masked", ["student", *(pytest.param(m, marks=pytest.mark.slow) for m in ("teacher", "half of the teacher"))]
)
def test_an_ignored_token_over_devices_has_no_gradient_however_far_it_is(masked):
    zs, zt = narrow((HIDDEN[:3, :4] @ HEAD[:4, :16], HIDDEN[3:6, :4] @ HEAD[4:, :16]))
    if masked == "student":
        zs = zs.at[1].set(-jnp.inf)
    else:
        zt = zt.at[1, 0 if masked == "teacher" else 8 :].set(-jnp.inf)

    def value_and_gradient(mesh):
        f = functools.partial(ejdist.fused_kl_divergence, teacher_logits=zt, direction="reverse", mesh=mesh)
        return jax.value_and_grad(lambda z: f(logits=z, targets=jnp.array([0, -1, 0])))(zs)

    got, want = value_and_gradient(make_mesh(tp=2)), value_and_gradient(None)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), got, want)
    assert np.isfinite(want[1]).all() and not want[1][1].any()


@pytest.mark.slow
def test_a_part_of_the_vocabulary_over_devices_that_has_nothing_may_be_infinitely_far():
    z, zt = jnp.cos(jnp.arange(16.0))[None].at[:, 8:].set(-jnp.inf), jnp.sin(jnp.arange(16.0))[None].at[:, 8:].set(-300)

    def value_and_gradient(mesh):
        return jax.value_and_grad(lambda z: ejdist.fused_kl_divergence(logits=z, teacher_logits=zt, mesh=mesh))(z)

    got, want = value_and_gradient(make_mesh(tp=2)), value_and_gradient(None)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), got, want)
    assert np.isfinite(want[0])


@pytest.mark.slow  # random calls; each option has a quick test
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_random_calls(data):
    random_call(data)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_many_random_calls(data):
    random_call(data)


def random_call(data):
    tokens, width, teachers, vocabulary = (data.draw(st.integers(1, 9)) for _ in range(4))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    shapes = [(tokens, width), (width, vocabulary), (tokens, teachers), (teachers, vocabulary)]
    arrays = [rng.standard_normal(s) for s in shapes]
    options = {
        "direction": data.draw(st.sampled_from(["forward", "reverse"])),
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 4.0])),
    }
    cap = data.draw(st.sampled_from([None, 2.0]))
    got = fused_kl_divergence(
        *narrow(arrays),
        **options,
        logits_soft_cap=cap,
        reduction="none",
        cfg=KLDivergenceConfig(data.draw(st.integers(1, 10))),
    )
    wanted = divergences(*arrays, caps=(cap, None), **options)
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)


def divergences(hidden, head, teacher_hidden, teacher_head, direction, temperature, caps):
    student = [distributions(h @ head, caps[0], temperature)[0] for h in hidden]
    teacher = [distributions(h @ teacher_head, caps[1], temperature)[0] for h in teacher_hidden]
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    return [np.sum(np.exp(a) * (a - b)) for a, b in zip(p, q, strict=True)]


H, W, H2, W2 = (np.ones(s, np.float32) for s in ((4, 8), (8, 6), (4, 5), (5, 6)))
MARKS = np.zeros(4, np.int32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fused_kl_divergence(H, W, H2), "pass either 'hidden', 'lm_head', 'teacher_hidden'"),
        (lambda: fused_kl_divergence(H, W, teacher_logits=H), "pass either .* are its hidden @ lm_head"),
        (lambda: fused_kl_divergence(H, W, H2, W2, logits=H), "pass either"),
        (lambda: fused_kl_divergence(logits=[[1.0]], teacher_logits=H), "'logits' must be an array, got list"),
        (lambda: fused_kl_divergence(H, W, H2, W2[:, 1:]), "'teacher_lm_head' of shape .* V = 5"),
        (lambda: fused_kl_divergence(H, W, H2[1:], W2), "'teacher_hidden' of shape"),
        (lambda: fused_kl_divergence(H, W, H2, W2, direction="jsd"), "'direction' = 'jsd'"),
        (lambda: fused_kl_divergence(H, W, H2, W2, reduction="avg"), "mean, sum or none"),
        (lambda: fused_kl_divergence(H, W, H2, W2, temperature=0.0), "'temperature' must be positive"),
        (lambda: fused_kl_divergence(H, W, H2, W2, teacher_logits_soft_cap=-1.0), "'teacher_logits_soft_cap' must be"),
        (lambda: fused_kl_divergence(H, W, H2, W2, targets=MARKS[1:]), "'targets' must have shape"),
        (lambda: fused_kl_divergence(H, W, H2, W2, targets=H[:, 0]), "'targets' must be integers"),
        (lambda: fused_kl_divergence(H, W, H2, W2, weights=H), "'weights' must have shape"),
        (lambda: fused_kl_divergence(H.astype("bfloat16"), W, H2, W2), "'lm_head' is float32"),
        (lambda: fused_kl_divergence(H, W[:, :0], H2, W2), "'lm_head' of shape .* or no vocabulary"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=f"(fused_)?kl_divergence(_of_logits)?: .*{words}"):
        call()


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_kernel_in_small_blocks_of_a_vocabulary_that_is_masked_out_in_part(reverse, monkeypatch):
    monkeypatch.setattr(vocabulary_pallas, "ELEMENTS", 2 * 16 * 128)  # a tile of 16 rows, and one of what is left
    rng = np.random.default_rng(6)
    student, teacher = (rng.standard_normal((20, 200)).astype(np.float32) * 10 for _ in range(2))
    p, q = (student, teacher) if reverse else (teacher, student)
    p[::4, :150] = p[1::4, 30:] = p[2::4, ::2] = -np.inf
    q[1::4, 60:] = -np.inf  # where p is, too: what q leaves out p may not have
    a = {"logits": jnp.asarray(student), "teacher_logits": jnp.asarray(teacher), "reverse": reverse, "temperature": 2.0}
    truth, wanted, d = value_and_gradients(logits_op.function, a, no_gradient=("teacher_logits",))
    with interpret():
        more = (("triton", 64), ("triton", 256), ("pallas", 256)) if reverse else ()
        for platform, size in (("triton", 16), ("pallas", 128), *more):
            cfg = KLDivergenceConfig(block_vocab=size, num_warps=1)
            got, gradients, _ = value_and_gradients(
                lambda **a: logits_op(**a, platform=platform, cfg=cfg),  # noqa: B023
                a,
                d,
                ("teacher_logits",),
            )
            for actual, want in zip(got, truth, strict=True):
                np.testing.assert_allclose(actual, want, rtol=3e-6, atol=3e-5)
            there = np.isfinite(np.asarray(wanted["logits"]))
            np.testing.assert_allclose(gradients["logits"][there], wanted["logits"][there], atol=2e-5)
            assert np.isfinite(np.asarray(gradients["logits"])).all()


def test_kernels_with_the_vocabulary_split_over_the_devices_of_a_mesh():
    rng = np.random.default_rng(7)
    arrays = [jnp.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((8, 6), (6, 20), (8, 5), (5, 20))]

    def value_and_gradient(function, **how):
        return jax.jit(jax.value_and_grad(lambda *a: function(*a, direction="reverse", **how), (0, 1)))(*arrays)

    wanted = value_and_gradient(fused_kl_divergence)
    with interpret():
        got = value_and_gradient(ejdist.fused_kl_divergence, mesh=make_mesh(dp=2, tp=2), platform="triton")
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-6, rtol=1e-5), got, wanted)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_columns_that_align_rows_are_no_entries(reverse, monkeypatch):
    """Logits are about -90 and less, so that a logit of 0 would be most of every softmax, and its share infinite."""
    monkeypatch.setattr(vocabulary, "_WORTH_WIDENING", 5)
    rng = np.random.default_rng(0)
    hidden, head, other, others = (abs(rng.standard_normal(s, "f")) for s in ((5, 8), (8, 37), (5, 6), (6, 37)))
    a = {"hidden": 1 + hidden, "lm_head": -12 - head, "teacher_hidden": 1 + other, "teacher_lm_head": -12 - others}
    assert vocabulary.widened([(a["hidden"], a["lm_head"])])[0][1].shape == (8, 40)
    a = {name: jnp.asarray(x) for name, x in a.items()} | {"reverse": reverse}
    of = ("teacher_hidden", "teacher_lm_head")
    truth, wanted, d = value_and_gradients(op.function, a, no_gradient=of)
    cfg = KLDivergenceConfig(block_rows=3, block_vocab=16, num_warps=1)
    with interpret():
        got, gradients, _ = value_and_gradients(lambda **a: op(**a, platform="triton", cfg=cfg), a, d, of)
    for actual, want in [*zip(got, truth, strict=True), *((gradients[n], wanted[n]) for n in wanted)]:
        assert error(actual, want) < 1e-4  # float32 holds a logit of 150 to 8e-6


def test_dispatch_and_refusals():
    x, w = jnp.ones((2, 4)), jnp.ones((4, 8))
    chosen = op.choose(op.bind(x, w, x, w), None)
    assert [chosen[p].name for p in ("cpu", "cuda", "rocm", "tpu")] == ["xla", "triton_gpu", "xla", "xla"]
    assert logits_op.choose(logits_op.bind(w, w), None)["tpu"].name == "pallas_tpu"
    with interpret(), pytest.raises(Unsupported, match="an array has no elements"):
        fused_kl_divergence(x[:0], w, x[:0], w, platform="triton")
    with pytest.raises(Unsupported, match="kl_divergence has no pallas backend"):
        fused_kl_divergence(x, w, x, w, platform="pallas")
