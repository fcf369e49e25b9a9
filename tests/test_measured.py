"""Dispatch by measurement: which backend runs on a kind of device that has a file, and what becomes of it without one."""

import dataclasses
import json
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jaxtyping import Array, Float

import kernels
from benchmarks import ranking, report
from benchmarks.cases import abstract
from kernels.framework import measured, target
from kernels.framework.config import FwdParams, KernelConfig, PersistentCache, decode
from kernels.framework.contract import Op, Unsupported
from kernels.framework.select import ConfigSelectorChain, Request

CHIP = "A Chip 9"
CASES = [{"case": "wide", "date": "2026-01-02", "commit": "0123456789abcdef"}]


def make_op():
    """Three backends for CUDA, in the contract's order sine, cosine, tanh, which is what tells their programs apart."""

    def toy(x: Float[Array, "T D"], *, flip: bool = False) -> Float[Array, "T D"]:
        return jnp.sin(x)

    op = Op(
        toy,
        ordered=False,
        priority=("sine", "cosine", "tanh"),
        autotune_key=lambda call: (
            None if call.dims["D"] == 3 else f"{call.dtype} D{measured.bucket(call.dims['D'], 16, 64)}"
        ),
        config=KernelConfig,
    )
    facts = {"platforms": {"cuda", "cpu"}, "dtypes": {"float32"}}
    candidates = [KernelConfig(FwdParams(q_blocksize=n)) for n in (16, 32)]
    op.register(lambda x: jnp.sin(x), lambda saved, x: {"x": jnp.sin(saved.d_out)}, name="sine", **facts)
    op.register(
        lambda x, flip, cfg: jnp.cos(x), lambda saved, x, flip: {"x": jnp.cos(saved.d_out)}, name="cosine",
        rejects=lambda call: "T must not be 13" if call.dims["T"] == 13 else None,
        heuristic=lambda call, platform: KernelConfig(FwdParams(q_blocksize=8, kv_blocksize=4)),
        candidates=lambda call: candidates[: call.dims["T"]],
        version=2, symbolic={"T", "D"}, **facts,
    )  # fmt: skip
    op.register(
        lambda x, flip: jnp.tanh(x), lambda saved, x, flip: {"x": jnp.tanh(saved.d_out)}, name="tanh",
        symbolic={"T", "D"}, **facts,
    )  # fmt: skip
    return op


@pytest.fixture
def chip(tmp_path, monkeypatch):
    """Returns a function that writes the file of this kind of device, which every program for CUDA is now compiled for."""

    def write(times, of="float32 D<16", name="toy", configs=None, device=CHIP, format=measured.FORMAT):
        forward = {backend: both[0] for backend, both in times.items()}
        backward = {backend: both[1] for backend, both in times.items() if len(both) > 1}
        found = {"forward": forward, "backward": backward, "configs": configs or {}, "cases": CASES}
        data = {"format": format, "device": device, "operations": {name: {of: found}}}
        measured.path_of(CHIP).write_text(json.dumps(data))
        measured.of_device.cache_clear()

    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    monkeypatch.setattr(target, "device_kind", lambda platform: CHIP if platform == "cuda" else None)
    measured.of_device.cache_clear()
    yield write
    measured.of_device.cache_clear()


def runs(op, x, platform="cuda", differentiated=False, **options):
    """Returns the backend that runs, or those of the forward and the backward, by what is in the program."""

    def function(x):
        return jnp.sum(op(x, **options))

    program = jax.jit(jax.value_and_grad(function) if differentiated else function)
    text = export.export(program, platforms=[platform])(jax.ShapeDtypeStruct(x, "float32")).mlir_module()
    found = re.findall(r"stablehlo\.(sine|cosine|tanh)", text)
    assert len(found) == 1 + differentiated
    return tuple(found) if differentiated else found[0]


def test_what_was_fastest_of_the_class_goes_first(chip):
    chip({"sine": [9.0, 1.0], "cosine": [5.0, 9.0], "tanh": [7.0, 2.0]})
    op = make_op()
    assert runs(op, (4, 5)) == "cosine"
    assert runs(op, (4, 5), differentiated=True) == ("cosine", "sine"), "each by itself"
    assert runs(op, (4, 5), platform="cpu") == "sine", "measurements of another platform's devices do not apply"


def test_one_backend_for_both_is_ranked_by_their_sum():
    """Where a differentiated forward keeps what the contract calls `kept`."""
    found = measured.Measured(CHIP, {"sine": 9.0, "cosine": 5.0, "tanh": 2.0}, {"sine": 1.0, "cosine": 2.0}, {}, CASES)
    assert found.times(True, True) == {"sine": 10.0, "cosine": 7.0}
    assert found.times(True, False) == found.backward and found.times(False, True) == found.forward


def test_where_nothing_was_measured_the_order_is_the_contracts(chip):
    op = make_op()
    assert runs(op, (4, 5)) == "sine", "no file"
    chip({"sine": [9.0, 9.0], "cosine": [1.0, 1.0]})
    op = make_op()
    assert runs(op, (4, 17)) == "sine", "another class"
    assert runs(op, (4, 3)) == "sine", "no class"
    op.name = "another"
    assert runs(make_op(), (4, 5)) == "cosine" and op.choose(op.bind(jnp.ones((4, 5))), None)["cuda"].name == "sine"
    chip({"tanh": [1.0, 1.0]})
    assert runs(make_op(), (4, 5)) == "sine", "a single measurement ranks nothing"


def test_of_sizes_that_are_not_known_there_is_no_class(chip):
    chip({"tanh": [1.0, 1.0], "cosine": [5.0, 5.0]})
    op, symbols = make_op(), export.symbolic_shape("T, D")
    assert runs(op, symbols, flip=True) == "cosine" and runs(op, (4, 5), flip=True) == "tanh"


def test_who_refuses_is_passed_over_and_who_was_not_measured_keeps_its_place(chip):
    chip({"sine": [9.0, 9.0], "cosine": [1.0, 1.0], "tanh": [5.0, 5.0], "gone": [0.1, 0.1]})
    op = make_op()
    assert runs(op, (13, 5)) == "tanh", "cosine refuses"
    assert runs(op, (4, 5), flip=True) == "cosine"
    chip({"cosine": [9.0, 9.0], "tanh": [5.0, 5.0]})
    op = make_op()
    assert runs(op, (4, 5)) == "sine", "a backend without measurements keeps its priority"
    assert runs(op, (4, 5), flip=True) == "tanh"


def test_a_backend_asked_for_by_name_is_not_ranked(chip):
    chip({"sine": [9.0, 9.0], "cosine": [1.0, 1.0]})
    op = make_op()
    call = op.bind(jnp.ones((4, 5)))
    assert [op.choose(call, name)["cuda"].name for name in (None, "sine")] == ["cosine", "sine"]
    facts = {"platforms": {"cuda"}, "dtypes": {"float32"}}
    op.register(lambda x: jnp.tanh(x), name="sine_too", **facts)  # of the same toolchain
    chip({"sine": [9.0, 9.0], "cosine": [5.0, 5.0], "sine_too": [1.0, 1.0]})
    assert [op.choose(call, name)["cuda"].name for name in (None, "sine")] == ["sine_too", "sine"]
    with pytest.raises(Unsupported, match="cosine: T must not be 13; platform='sine' can"):
        op(jnp.ones((13, 5)), platform="cosine")


def test_a_plan_says_which_measurement_decided(chip):
    chip({"sine": [9.0, 9.0], "cosine": [1.0, 3.0]})
    op = make_op()
    call = op.bind(jnp.ones((4, 5)))
    reasons = {c.platform: c.reason for c in op.plan(call, None, None, differentiated=True).choices}
    assert reasons["cuda"] == "measured on A Chip 9: cosine 3 µs, sine 9 µs (wide, 2026-01-02, 012345678)"
    assert reasons["cpu"] == "" and "cannot be compiled for tpu" in reasons["tpu"]
    flipped = op.plan(op.bind(jnp.ones((4, 5)), flip=True), None, None, differentiated=True).choices
    assert {c.reason for c in flipped if c.backend} == {""}, "only one capable backend was measured"


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda text: text[:40], "JSONDecodeError"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "format 0 for"),
        (lambda text: text.replace(CHIP, "Another"), "for Another"),
        (lambda text: text.replace('"backward"', '"both"'), "unexpected keyword argument 'both'"),
        (lambda text: "[]", "TypeError"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_in_one_sentence(chip, damage, words):
    """Nothing falls back: other hosts of the job could read theirs."""
    chip({"sine": [9.0, 9.0], "cosine": [1.0, 1.0]})
    path = measured.path_of(CHIP)
    path.write_text(damage(path.read_text()))
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            make_op()(jnp.ones((4, 5)))
        said = str(error.value)
        assert said.startswith(f"{path} is damaged or of another version") and words in said and "\n" not in said
        assert "reinstall the package" in said and "python -m benchmarks --write" in said


def test_the_kind_of_device_is_this_processs_own(monkeypatch):
    assert target.device_kind("cpu") == jax.local_devices()[0].device_kind
    assert target.device_kind("cuda") is None and target.device_kind("tpu") is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(device_kind=CHIP)])
    assert target.device_kind("cuda") == CHIP and target.device_kind("cpu") is None
    with kernels.compile_for(90):
        assert target.device_kind("cuda") is None, "several kinds of device share a compute capability"


def test_a_program_for_another_gpu_is_chosen_anew(monkeypatch, tmp_path, chip):
    """What was chosen for this machine's GPU is not what `compile_for` asks for."""
    monkeypatch.setattr(
        target, "device_kind", lambda p: CHIP if p == "cuda" and target.asked_compute_capability() is None else None
    )
    chip({"sine": [9.0, 9.0], "cosine": [1.0, 1.0]})
    op = make_op()
    assert runs(op, (4, 5)) == "cosine"
    with kernels.compile_for(80):
        assert runs(op, (4, 5)) == "sine"
    assert runs(op, (4, 5)) == "cosine"


# -- configurations ---------------------------------------------------------------------------------------------------


def test_a_shipped_configuration_stands_behind_the_users_own(chip, tmp_path):
    def shipped(version, blocks, T=4, **more):
        config = dataclasses.asdict(KernelConfig(FwdParams(blocks))) | more
        configs = {"cosine": {"version": version, "config": config}}
        chip({"sine": [9.0], "cosine": [1.0]}, configs=configs)
        op = make_op()
        request = Request(op, op.backends["cosine"], op.bind(jnp.ones((T, 5))), "cuda", None, lambda r: None)
        return request, chain.select(request).fwd_params

    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path / "own"), autotune=False)
    assert shipped(2, 32)[1] == FwdParams(q_blocksize=32, kv_blocksize=4), "the rest is completed"
    assert shipped(1, 32)[1].q_blocksize == 8, "of older code"
    assert shipped(2, 32, gone=None)[1].q_blocksize == 8, "of code with other fields"
    assert shipped(2, 64)[1].q_blocksize == 8, "no candidate"
    assert shipped(2, 32, T=1)[1].q_blocksize == 8, "not a candidate for this call with the same key"
    request, _ = shipped(2, 32)
    chain.persistent.put(request.key(), KernelConfig(FwdParams(q_blocksize=16)))
    assert chain.select(request).fwd_params.q_blocksize == 16
    assert len(chain.cache) == 1, "shipped configurations must not be cached"
    tuning = ConfigSelectorChain(autotune=True)
    tuned = dataclasses.replace(request, tuner=lambda r: KernelConfig(FwdParams(q_blocksize=48)))
    assert tuning.select(tuned).fwd_params.q_blocksize == 48, "requested tuning takes precedence"
    request = dataclasses.replace(request, platform="cpu")
    assert chain.select(request).fwd_params.q_blocksize == 8, "tuned on another kind of device"


# -- what is shipped --------------------------------------------------------------------------------------------------

OPERATIONS = kernels.operations()


def test_a_device_without_measurements_has_those_of_one_with_its_chip(chip, monkeypatch):
    monkeypatch.setattr(measured, "SAME_CHIP", {CHIP: re.compile("B Chip.*")})
    chip({"sine": (9.0,), "cosine": (3.0,)})
    assert measured.of_device("B Chip 2") == measured.of_device(CHIP) != {}
    assert measured.of_device("C Chip") == {}


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB"])
def test_hoppers_share_what_was_measured_on_one(kind):
    assert set(measured.of_device(kind)) >= set(measured.of_device("NVIDIA H200")) != set()


SHIPPED = {path.stem: json.loads(path.read_text()) for path in sorted(measured.FOLDER.glob("*.json"))}


def test_every_file_is_what_the_results_say():
    wanted = {measured.path_of(kind).stem: data for kind, data in ranking.rankings(report.RESULTS).items()}
    assert wanted == SHIPPED, "run: python -m benchmarks --write"
    for data in SHIPPED.values():
        assert measured.of_device(data["device"])


@pytest.mark.parametrize(
    ("device", "name"),
    [(d, name) for d, data in SHIPPED.items() for name in data["operations"]],
)
def test_what_is_shipped_is_of_classes_and_backends_that_there_are(device, name):
    op = OPERATIONS[name]
    of_cases = {op.autotune_key(op.bind(**abstract(op, case, "bfloat16"))) for case in op.cases if "bench" in case.tags}
    for of, found in SHIPPED[device]["operations"][name].items():
        assert of in of_cases
        backends = set(found["forward"])
        assert 2 <= len(backends) and backends <= set(op.backends) and set(found["backward"]) <= backends
        assert {c["case"] for c in found["cases"]} <= {case.name for case in op.cases}
        for backend, tuned in found["configs"].items():
            assert tuned["version"] == op.backends[backend].version and decode(op.config, tuned["config"])


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=op.name, marks=[pytest.mark.slow] * (op.name == "delta_rule"))
        for op in OPERATIONS.values()
        if op.autotune_key
    ],
)
def test_every_case_has_a_class_that_its_dtype_tells_apart(op):
    for case in op.cases:
        of = {op.autotune_key(op.bind(**abstract(op, case, dtype))) for dtype in ("bfloat16", "float32")}
        assert len(of) == 2 and None not in of


def test_attention_on_an_h200_is_chosen_by_what_was_timed_there(monkeypatch):
    monkeypatch.setattr(target, "device_kind", lambda platform: "NVIDIA H200" if platform == "cuda" else None)
    op = OPERATIONS["flash_attention"]
    (case,) = (c for c in op.cases if c.name == "causal_8k")
    call = op.bind(**abstract(op, case, "bfloat16"))
    (choice,) = (c for c in op.plan(call, None, None, differentiated=True).choices if c.platform == "cuda")
    times = measured.of_device("NVIDIA H200")[op.name, op.autotune_key(call)].times(True, False)
    able = [b.name for b in op.backends.values() if "cuda" in b.platforms and not b.refuses(op, call, True)]
    fastest = min((n for n in able if n in times), key=times.__getitem__)
    # One that was not measured yet may stand before those that were.
    assert choice.backend.name == (fastest if able[0] in times else able[0])
    assert choice.reason.startswith("measured on NVIDIA H200: ") and "causal_8k, " in choice.reason
