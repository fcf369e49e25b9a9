"""RoPE and its scalings against NumPy float64 written from the papers, one pair and one position at a time."""

import cmath
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, on_this_machine, value_and_gradients

import ejdist
from ejdist import Order, make_mesh
from kernels import Unsupported
from kernels.framework.interpret import interpret
from kernels.ops.rotary_embedding import RopeScaling, XPos, frequencies, op, pair_op, rotary_embedding
from kernels.toolchains.simulate import ahead_of_time as checks

B, T, N, H = 2, 5, 3, 16


def oracle_frequencies(width, base, scaling):
    """Returns (frequency of each pair, factor), from the definitions, in Python floats."""
    kind = scaling.kind if scaling else None
    s = scaling.factor if scaling else 1.0
    if kind == "ntk":
        base = base * s ** (width / (width - 2))
    plain = [1 / base ** (2 * i / width) for i in range(width // 2)]
    if kind in (None, "ntk"):
        return plain, 1.0
    if kind == "linear":
        return [w / s for w in plain], 1.0
    L = scaling.original_length
    if kind == "llama3":
        low, high, out = scaling.low or 1.0, scaling.high or 4.0, []
        for w in plain:
            wavelength = 2 * math.pi / w
            if wavelength < L / high:
                out.append(w)
            elif wavelength > L / low:
                out.append(w / s)
            else:
                smooth = (L / wavelength - low) / (high - low)
                out.append((1 - smooth) * w / s + smooth * w)
        return out, 1.0
    slow, fast = scaling.low or 1.0, scaling.high or 32.0

    def where(turns):
        return width * math.log(L / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = where(fast), where(slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    out = []
    for i, w in enumerate(plain):
        keep = 1 - min(max((i - first) / (last - first), 0), 1)
        out.append(keep * w + (1 - keep) * w / s)
    factor = scaling.attention_factor
    return out, (0.1 * math.log(s) + 1 if factor is None else factor)


def oracle(x, positions, base=10000.0, scaling=None, interleaved=False, rotary_dim=None, xpos=None):
    width = rotary_dim or x.shape[-1]
    w, factor = oracle_frequencies(width, base, scaling)
    out = np.array(x, np.float64)
    for b, t in np.ndindex(x.shape[:2]):
        for i in range(width // 2):
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
            turn = factor * cmath.exp(1j * float(positions[b % len(positions), t]) * w[i])
            if xpos is not None:
                zeta = (2 * i + xpos.gamma * width) / ((1 + xpos.gamma) * width)
                power = (float(positions[b % len(positions), t]) - xpos.center) / xpos.scale_base
                turn *= zeta**-power if xpos.inverse else zeta**power
            z = (x[b, t, :, one] + 1j * x[b, t, :, two]) * turn
            out[b, t, :, one], out[b, t, :, two] = z.real, z.imag
    return out


OPTIONS = {
    "plain": {},
    "base": {"base": 5e5},
    "interleaved": {"interleaved": True},
    "partial": {"rotary_dim": 10},
    "linear": {"scaling": RopeScaling("linear", 8.0)},
    "ntk": {"scaling": RopeScaling("ntk", 8.0)},
    "yarn": {"scaling": RopeScaling("yarn", 16.0, 4096)},
    "yarn_deepseek": {"scaling": RopeScaling("yarn", 40.0, 4096, 1.0, 32.0, 1.0), "interleaved": True},
    "yarn_gpt_oss": {"scaling": RopeScaling("yarn", 32.0, 4096, truncate=False), "base": 1.5e5},
    "llama3": {"scaling": RopeScaling("llama3", 8.0, 8192), "base": 5e5},
    "xpos": {"xpos": XPos(center=1500), "rotary_dim": 10},
    "xpos_key": {"xpos": XPos(True, 700.0, 0.3, 1000.0), "interleaved": True},
    "llama3_32": {"scaling": RopeScaling("llama3", 32.0, 8192, 1.0, 4.0), "base": 5e5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_float64(options):
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((B, T, N, H)), rng.integers(0, 3000, (B, T))
    d = rng.standard_normal(x.shape)
    got, pull = jax.vjp(lambda x: rotary_embedding(x, jnp.asarray(positions), **options), jnp.asarray(x, jnp.float32))
    # float32 angles: 3000 radians carry an error of about 2e-4.
    np.testing.assert_allclose(got, oracle(x, positions, **options), atol=2e-3)
    # The map is linear, so <d, R x> = <R^T d, x> for every x; the transpose turns back.
    basis = rng.standard_normal(x.shape)
    np.testing.assert_allclose(
        np.sum(np.asarray(pull(jnp.asarray(d, jnp.float32))[0]) * basis),
        np.sum(d * oracle(basis, positions, **options)),
        rtol=1e-3,
        atol=0.05,
    )


@pytest.mark.parametrize("scaling", [o["scaling"] for o in OPTIONS.values() if "scaling" in o], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_frequencies_at_real_widths(scaling, width):
    w, factor = frequencies(width, 5e5, scaling)
    wanted, wanted_factor = oracle_frequencies(width, 5e5, scaling)
    np.testing.assert_allclose(w, wanted, rtol=1e-12)
    assert factor == pytest.approx(wanted_factor)


def test_published_numbers_of_llama_3_1():
    """The ends of the ramp at H = 128, base 5e5: the highest frequency stays 1, the lowest is divided by 8."""
    w, _ = frequencies(128, 5e5, RopeScaling("llama3", 8.0, 8192))
    assert w[0] == 1.0
    assert w[-1] == pytest.approx(5e5 ** (-126 / 128) / 8)


def test_bfloat16_keeps_integer_positions():
    x = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    got = rotary_embedding(x, jnp.array([[256, 257]]))
    wanted = oracle(np.ones((1, 2, 1, 4)), np.array([[256, 257]]))
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=0.01)
    assert abs(wanted[0, 0, 0, 0] - wanted[0, 1, 0, 0]) > 0.4  # so rounding 257 to 256 would be seen


def test_only_relative_positions_matter():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, H)).astype(np.float32)) for _ in range(2))

    def at(x, p):
        return rotary_embedding(x, jnp.array([[p]]))

    def score(i, j):
        return float(jnp.sum(at(q, i) * at(k, j)))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


@pytest.mark.parametrize("center", [0.0, 900.0])
def test_the_product_of_xpos_falls_with_the_distance_alone(center):
    """As the paper states it: the product of each pair falls by zeta_i^(distance / scale_base), wherever the two are."""
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, H)).astype(np.float32)) for _ in range(2))

    def score(query_at, key_at, pair=slice(None), scaled=True):
        options = ({"xpos": XPos(center=center)}, {"xpos": XPos(inverse=True, center=center)}) if scaled else ({}, {})
        at = ((query_at, q), (key_at, k))
        turned = [rotary_embedding(x, jnp.array([[p]]), **o) for (p, x), o in zip(at, options, strict=True)]
        return float(jnp.sum((turned[0] * turned[1])[0, 0, 0, pair]))

    assert score(700, 188) == pytest.approx(score(1700, 1188), abs=2e-3)
    for i in range(H // 2):
        pair = np.array([i, i + H // 2])
        zeta = (i / (H / 2) + 0.4) / 1.4
        assert score(700, 188, pair) == pytest.approx(zeta * score(700, 188, pair, False), rel=1e-3, abs=1e-4)


BACKENDS = ("triton_gpu", "pallas_tpu", "xla")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"xpos": XPos(center=900.0), "rotary_dim": 10, "interleaved": True}],
)
def test_queries_and_keys_at_once_are_both_alone(backend, options):
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(rng.standard_normal((B, T, n, H)).astype(np.float32)) for n in (6, 2))
    positions = jnp.asarray(rng.integers(0, 3000, (1, T)), jnp.int32)
    xpos = options.get("xpos")
    of_key = {**options, "xpos": None if xpos is None else XPos(True, center=900.0)}
    with on_this_machine(op.backends[backend]):
        got = rotary_embedding(q, positions, key=k, platform=backend, **options)
        alone = (
            rotary_embedding(q, positions, platform=backend, **options),
            rotary_embedding(k, positions, platform=backend, **of_key),
        )
    for one, two in zip(got, alone, strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(got[1], oracle(k, np.asarray(positions), **of_key), atol=2e-3)


def test_sines_of_a_million_tokens():
    """The kernel's own sines, where the first pair turns a million radians and where angles are multiples of a quarter turn."""
    x = jnp.ones((1, 64, 1, 2))
    positions = jnp.asarray(np.random.default_rng(0).integers(-(2**20), 2**20, (1, 64)), jnp.int32)
    near = jnp.asarray(np.round(np.arange(64) * 1000 * np.pi / 2).astype(np.int32))[None]
    for p in (positions, near):
        with interpret():
            got = rotary_embedding(x, p, platform="triton", exact_from=None)
        wide = np.asarray(p, np.float64)[0]
        wanted = np.stack([np.cos(wide) - np.sin(wide), np.cos(wide) + np.sin(wide)], -1)
        np.testing.assert_allclose(got[0, :, 0], wanted, atol=3e-7)


# Positions on both sides of the first one with exact angles, of both signs, and where float32 has gaps.
FIRST = 131_072
NEAR, FAR = [0, 1, -77, 4095, FIRST - 1], [FIRST, -FIRST, 2**20 + 1, 2**24, 2**24 + 1, 3 * 2**29 + 5, 2**31 - 1]
TURN = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")
EXACT = {
    "base": {"base": 5e5},
    "yarn": {"base": 1.5e5, "scaling": RopeScaling("yarn", 32.0, 4096, truncate=False), "interleaved": True},
    "llama3": {"base": 5e5, "scaling": RopeScaling("llama3", 32.0, 8192), "rotary_dim": 10},
    "ntk": {"scaling": RopeScaling("ntk", 8.0)},
    "linear": {"base": 0.01, "scaling": RopeScaling("linear", 2.0)},  # frequencies of more than a turn
}


# Each backend, and each layout of pairs; the rest of the grid is slow.
QUICK = {(backend, "base") for backend in BACKENDS} | {("triton_gpu", "yarn"), ("xla", "llama3"), ("xla", "linear")}


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=() if (backend, name) in QUICK else pytest.mark.slow)
        for backend in BACKENDS
        for name in EXACT
    ],
)
def test_angles_are_exact_from_a_position_on_and_float32_before(backend, name):
    """The bound is that of the contract, 6e-7 radians, and a rounding of each number. Angles here are fractions, because the
    product of two float64 is not exact."""
    options, positions = EXACT[name], np.array([NEAR + FAR], np.int32)
    width = options.get("rotary_dim", H)
    frequency, factor = oracle_frequencies(width, options.get("base", 1e4), options.get("scaling"))
    ours, _ = frequencies(width, options.get("base", 1e4), options.get("scaling"))
    np.testing.assert_allclose(ours, frequency, rtol=1e-13)
    angle = np.array([[float(int(p) * Fraction(w) % TURN) for w in ours] for p in positions[0]])
    wanted = factor * np.stack([np.cos(angle) - np.sin(angle), np.cos(angle) + np.sin(angle)], 1)
    x = jnp.ones((1, positions.size, 1, H))
    with on_this_machine(op.backends[backend]):
        got, old, everywhere = (
            np.asarray(rotary_embedding(x, jnp.asarray(positions), platform=backend, **options, **exact))
            for exact in ({}, {"exact_from": None}, {"exact_from": 0} if name == "base" else {})
        )
    pairs = got[0, :, 0, :width]
    pairs = (
        pairs.reshape(-1, width // 2, 2).swapaxes(1, 2)
        if options.get("interleaved")
        else pairs.reshape(-1, 2, width // 2)
    )
    far, bound = len(NEAR), factor * (math.sqrt(2) * 6e-7 + 3e-7)
    np.testing.assert_allclose(pairs[far:], wanted[far:], rtol=0, atol=bound)
    np.testing.assert_array_equal(got[:, :far], old[:, :far])
    np.testing.assert_array_equal(got[:, far:], everywhere[:, far:])
    assert name != "base" or 0 < np.abs(everywhere[:, :far] - old[:, :far]).max() < 0.02
    assert np.abs(old[0, far + 2 :] - got[0, far + 2 :]).max() > 0.01  # a million tokens on, float32 is this far off
    assert (got[0, far + 3] != got[0, far + 4]).any() and (old[0, far + 3] == old[0, far + 4]).all()


@pytest.mark.parametrize(
    "order", [Order("zigzag", 4), pytest.param(Order("striped", 4, 2), marks=pytest.mark.slow)], ids=lambda o: o.name
)
def test_exact_angles_are_those_of_the_position_in_every_order_over_devices(order):
    positions = np.int32(FIRST - 7) + np.arange(16, dtype=np.int32)[None] * 1001
    q, k = (np.random.default_rng(n).standard_normal((1, 16, n, H), np.float32) for n in (4, 2))
    turned = jax.jit(functools.partial(rotary_embedding, base=5e5))(q, positions, key=k)
    there = (order.permute(x) for x in (q, positions, k))
    with ejdist.set_layout(order=order):
        x, at, key = map(jnp.asarray, there)
        got = ejdist.rotary_embedding(x, at, key=key, base=5e5, mesh=make_mesh(sp=4))
    for one, two in zip(got, turned, strict=True):
        np.testing.assert_array_equal(order.inverse(np.asarray(one)), two)


@pytest.mark.parametrize("backend", ["triton_gpu", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
def test_numbers_of_the_tuning_candidates(backend):
    case = {case.name: case for case in pair_op.cases}["interleaved"]
    a = pair_op.case_inputs(case)
    found = list(pair_op.backends[backend].candidates(pair_op.bind(**a)))
    assert len(found) == len(set(found)) >= 1
    truth, true_gradients, d = value_and_gradients(pair_op.function, a)
    tiles = {(cfg.block_tokens, cfg.block_heads): cfg for cfg in found}
    for cfg in tiles.values():
        with interpret():
            got, gradients, _ = value_and_gradients(lambda **a: pair_op(**a, platform=backend, cfg=cfg), a, d)  # noqa: B023
        for actual, wanted in [*zip(got, truth), *((gradients[n], true_gradients[n]) for n in true_gradients)]:
            assert error(actual, wanted) < 3e-6, cfg


@pytest.mark.slow  # compiled; the numbers are quick
def test_heads_of_a_model_are_read_and_written_16_bytes_at_a_time():
    case = {case.name: case for case in pair_op.cases}["llama_8b"]
    kernels = checks.export_cuda(*checks.call_of(pair_op, case)).kernels
    assert len(kernels) == 2  # one launch for queries and keys, in each direction
    for kernel in kernels:
        assert kernel.ptx.count("ld.global.v4.b32") >= 4 and kernel.ptx.count("st.global.v4.b32") >= 4


def test_queries_and_keys_on_a_mesh():
    rng = np.random.default_rng(4)
    q, k = (jnp.asarray(rng.standard_normal((2, 4, n, H)).astype(np.float32)) for n in (4, 2))
    positions = jnp.asarray(rng.integers(0, 100, (2, 4)), jnp.int32)

    def value_and_gradient(function, **where):
        def loss(q, k):
            q, k = function(q, positions, key=k, **where)
            return jnp.sum(jnp.sin(q)) + jnp.sum(jnp.cos(k))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(q, k)

    got = value_and_gradient(ejdist.rotary_embedding, mesh=make_mesh(dp=2, sp=2, tp=2))
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, atol=1e-4), got, value_and_gradient(rotary_embedding))
    with pytest.raises(ValueError, match="dim K = 1 of output 'key' would be made by each of the 2 devices"):
        ejdist.rotary_embedding(q, positions, key=k[:, :, :1], mesh=make_mesh(tp=2))


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_the_gradient_turns_back_by_unsigned_positions(dtype):
    x, positions = jnp.cos(jnp.arange(48.0)).reshape(1, 3, 2, 8), jnp.array([[0, 5, 127]])

    def gradient(positions):
        return jax.grad(lambda x: jnp.sum(jnp.sin(rotary_embedding(x, positions))))(x)

    np.testing.assert_array_equal(gradient(positions.astype(dtype)), gradient(positions))


def test_dispatch_and_refusals():
    x, positions = jnp.ones((1, 2, 2, 8)), jnp.zeros((1, 2), jnp.int32)
    chosen = {
        p: b.name for p, b in pair_op.choose(pair_op.bind(x, x, positions), None).items() if not isinstance(b, str)
    }
    assert chosen == {"cpu": "xla", "cuda": "triton_gpu", "rocm": "xla", "tpu": "pallas_tpu"}
    with interpret():
        with pytest.raises(Unsupported, match="an array has no elements"):
            rotary_embedding(x[:0], positions, platform="triton")
        with pytest.raises(Unsupported, match="H = 16384 is more than 8192"):
            rotary_embedding(jnp.ones((1, 2, 1, 16384)), positions, platform="triton")
        with pytest.raises(Unsupported, match="do not fit in the 10 MiB of VMEM"):
            rotary_embedding(jnp.ones((1, 2, 1, 16384)), positions, platform="pallas")
    with pytest.raises(ValueError, match="'key' is bfloat16 but 'x' is float32"):
        rotary_embedding(x, positions, key=x.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RopeScaling("dynamic", 2.0), "linear, ntk, yarn or llama3"),
        (lambda: RopeScaling("linear", 0.5), "factor must be at least 1"),
        (lambda: RopeScaling("linear", 2.0, low=1.0), "apply to yarn and llama3"),
        (lambda: RopeScaling("llama3", 8.0, low=4.0, high=1.0), "below high"),
        (lambda: RopeScaling("llama3", 8.0, truncate=False), "truncate=False applies to yarn"),
        (lambda: RopeScaling("yarn", 8.0, 0), "original_length"),
        (lambda: RopeScaling("linear", "8"), "scaling factor must be float, got '8'"),
        (lambda: RopeScaling("yarn", 8.0, None), "scaling original_length must be int, got None"),
        (lambda: XPos(scale_base=0), "xpos scale_base must be positive"),
        (lambda: XPos(center=float("nan")), "xpos center must be float, got nan"),
        (lambda: XPos(gamma=-0.4), "xpos gamma must be positive"),
        (lambda: rotary_embedding(jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 1), jnp.int32), rotary_dim=3), "rotary_dim"),
        (
            lambda: rotary_embedding(jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 1), jnp.int32), rotary_dim=10),
            "at most H = 8",
        ),
        (
            lambda: rotary_embedding(
                jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1), jnp.int32), scaling=RopeScaling("ntk", 2.0)
            ),
            "'scaling' of kind 'ntk' .* 'rotary_dim' = 2",
        ),
        (
            lambda: rotary_embedding(
                jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 1), jnp.int32), base=1.0, scaling=RopeScaling("yarn", 2.0)
            ),
            "'base' must be above 1",
        ),
        (lambda: rotary_embedding(jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 1))), "positions"),
        (
            lambda: rotary_embedding(jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 1), jnp.int32), exact_from=-1),
            "'exact_from'.* a position",
        ),
        (lambda: rotary_embedding(jnp.ones((1, 4, 1, 8)), jnp.zeros((1, 3), jnp.int32)), "T"),
    ],
)
def test_errors_name_the_argument(make, words):
    with pytest.raises(ValueError, match=words):
        make()
