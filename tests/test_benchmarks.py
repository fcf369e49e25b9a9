"""The benchmark command on a CPU: what it writes, and that it reports nothing that is wrong. No test looks at a time."""

import dataclasses
import functools
import importlib
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import TINY

import kernels
from benchmarks import measure, options, peers, race, ranking, report, resumed, step, timing
from benchmarks.__main__ import main
from benchmarks.cases import abstract, contract_fits, scaled, split, within
from benchmarks.contestants import Contestant
from benchmarks.programs import programs_of
from kernels.engines.attention.masks import MaskInfo

OPERATIONS = kernels.operations()
RMS, FLASH = OPERATIONS["rms_norm"], OPERATIONS["flash_attention"]
FEW = ["rounds=2", "seconds=0.001"]
QUICK = [*FEW, "gflop=0.0005"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings measured, and little optimised: compiling is what these tests would take their time for."""
    monkeypatch.setattr(measure, "ceilings", lambda dtype: (1e12, 1e11))
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def peer(function, operations=("rms_norm",), available=lambda: None):
    express = function if isinstance(function, str) else (lambda *x, **a: function(*x, **a))
    return SimpleNamespace(
        FRAMEWORK="jax", OPERATIONS=operations, available=available, express=lambda op_name, arguments: express
    )


def norm(x, weight):
    return RMS.function(x, weight)[0]


def only_file(folder):
    (path,) = folder.glob("*.json")
    return path, json.loads(path.read_text())


def of(block, name):
    return next(row for row in block["rows"] if row["contestant"] == name)


def test_the_ceilings_are_measured():
    matmul, copy = timing.ceilings("float32", rounds=1)
    assert matmul > 0 and copy > 0


@pytest.mark.slow
def test_rms_norm(tmp_path, monkeypatch, capsys):
    def broken(x, weight):
        raise RuntimeError("no such kernel\nand a long story")

    everyone = {
        "right": peer(norm),
        "wrong": peer(lambda x, weight: 1.01 * norm(x, weight)),
        "wrong_backward": peer(lambda x, weight: norm(x, weight) + (weight - jax.lax.stop_gradient(weight))),
        "failing": peer(broken),
        "refusing": peer("it cannot say this"),
        "absent": peer(norm, available=lambda: "it is not installed"),
        "of_another_operation": peer(norm, operations=("gated_mlp",)),
    }
    monkeypatch.setattr(peers, "all_peers", lambda: everyone)
    assert main(["rms_norm", "case=model_4k,model_5120", "commit=abc", f"out={tmp_path}", *QUICK]) == 0
    path, result = only_file(tmp_path)
    assert path.name == "rms_norm_cpu.json" and path.with_suffix(".png").stat().st_size > 1000
    assert (result["op"], result["device"], len(result["cases"])) == ("rms_norm", "cpu", 2)
    block = result["cases"][0]
    assert block["scaled"] and block["dims"]["lead"][0] < 16384 and block["basis"] == "wall_us"
    assert block["commit"] == "abc" and {"jax", "jaxlib"} <= set(block["versions"]) and len(block["date"]) == 10
    assert (block["matmul_TFLOP_s"], block["copy_GB_s"], block["copied"]) == (1.0, 100.0, "float32")
    rows, D = block["dims"]["lead"][0], block["dims"]["D"]
    moved = 2 * rows * D * 4 + D * 4 + rows * 4
    assert block["work"]["forward"] == {
        "flops": 4 * rows * D,
        "bytes": moved,
        "roofline_us": measure.short(moved / 1e5),
    }
    ours = of(block, "xla")
    assert ours["ours"] and ours["status"] == "timed" and set(ours["error"]) == {"out", "d_x", "d_weight"}
    for direction in race.DIRECTIONS:
        times = ours[direction]
        low, median, high = times["wall_us"]
        assert 0 < low <= median <= high and times["kernel_us"] is None
        assert times["best_peer"] == "right"
        assert times["of_roofline"] == pytest.approx(block["work"][direction]["roofline_us"] / median, rel=1e-2)
        ratio = of(block, "right")[direction]["wall_us"][1] / median
        assert times["times_as_fast_as_best_peer"] == pytest.approx(ratio, rel=1e-2)
    assert "out: relative error 1.0e-02" in of(block, "wrong")["reason"]
    assert "d_weight" in of(block, "wrong_backward")["reason"] and "out:" not in of(block, "wrong_backward")["reason"]
    assert of(block, "failing")["reason"] == "RuntimeError: no such kernel"
    status = {row["contestant"]: row["status"] for row in block["rows"]}
    assert status == {
        "xla": "timed",
        "right": "timed",
        "wrong": "wrong",
        "wrong_backward": "wrong",
        "failing": "failed",
        "refusing": "cannot",
        "absent": "cannot",
    }
    assert not any(direction in of(block, "wrong") for direction in race.DIRECTIONS)
    assert "wrong: out: relative error" in capsys.readouterr().out

    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(tmp_path, readme)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    for block in result["cases"]:
        (line,) = (x for x in text.splitlines() if x.startswith(f"| {block['case']} ") and "| xla |" in x)
        for direction in race.DIRECTIONS:
            assert f" {report._digits(of(block, 'xla')[direction]['wall_us'][1])} (" in line
    assert (
        "wrong wrong: out: relative error" in text
        and "absent cannot: it is not installed (model_4k, model_5120)" in text
    )

    # Measured again, a case takes its old place's numbers; the other case stays.
    assert main(["rms_norm", "case=model_4k", "against=none", "commit=def", f"out={tmp_path}", *QUICK]) == 0
    _, again = only_file(tmp_path)
    assert {b["case"]: b["commit"] for b in again["cases"]} == {"model_5120": "abc", "model_4k": "def"}
    (row,) = again["cases"][1]["rows"]
    assert row["contestant"] == "xla"
    # Without peers, or where one gives more than the first output, all outputs are compared.
    assert set(row["error"]) == {"out", "rstd", "d_x", "d_weight"}


@pytest.mark.slow
def test_flash_attention(tmp_path):
    assert (
        main(["flash_attention", "case=causal_32k_gqa", "against=jax_nn", f"out={tmp_path}", *FEW, "gflop=0.01"]) == 0
    )
    block = only_file(tmp_path)[1]["cases"][0]
    dims = block["dims"]
    assert dims["T"] == dims["S"] < 32768 and dims["N"] % dims["K"] == 0
    pairs = dims["B"] * dims["N"] * dims["T"] * (dims["T"] + 1) // 2
    assert block["work"]["forward"]["flops"] == 2 * pairs * (dims["H"] + dims["Hv"])
    assert {row["contestant"]: row["status"] for row in block["rows"]} == {"xla": "timed", "jax_nn": "timed"}
    assert set(of(block, "xla")["error"]) == {"out", "d_query", "d_key", "d_value"}
    assert set(of(block, "jax_nn")["error"]) == {"out", "d_query", "d_key", "d_value"}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_backend_of_ours_stops_everything(direction, tmp_path, monkeypatch, capsys):
    backend = RMS.backends["xla"]

    @functools.wraps(getattr(backend, direction))
    def wrong(*saved, **arguments):
        result = getattr(backend, direction)(*saved, **arguments)
        return jax.tree.map(lambda y: y * 1.001, result)

    monkeypatch.setattr(RMS, "_programs", {})
    monkeypatch.setitem(RMS._backends, "xla", dataclasses.replace(backend, **{direction: wrong}))
    assert main(["rms_norm", "case=model_4k", "against=none", f"out={tmp_path}", *QUICK]) == 1
    said = capsys.readouterr()
    assert "nothing is reported" in said.err and "relative error 1.0e-03" in said.err and "µs" not in said.out
    assert not list(tmp_path.iterdir())


def test_a_race_compiles_nothing():
    case = next(case for case in RMS.cases if case.name == "small")
    settings = measure.Settings("float32", rounds=1, seconds=0.001)
    prepared = measure.prepare(RMS, case, settings, {"peer": peer(norm)})
    assert {c.name for c in prepared.able} >= {"xla", "peer"}
    sizes = [p._cache_size() for c in prepared.able for p in vars(c.programs).values()]
    assert sizes == [1] * 4 * len(prepared.able)
    measure.measure(RMS, prepared, settings, (1e12, 1e11))
    assert [p._cache_size() for c in prepared.able for p in vars(c.programs).values()] == sizes


def test_kernel_times_of_a_round_are_of_one_trace(monkeypatch):
    """Each is of one call of its own: of those that the profiler sees, and of those that time themselves."""
    ran, traces = [], []

    def contestant(name, seconds, kernel_seconds=None):
        programs = SimpleNamespace(kernel_seconds=kernel_seconds, block=lambda result: None, load=lambda *inputs: None)
        programs.forward = lambda inputs: ran.append(seconds)
        return Contestant(name, True, programs, backward=False)

    def of_each(runs):
        traces.append(len(runs))
        found = []
        for run in runs:
            ran.clear()
            run()
            found.append(sum(ran))
        return found

    monkeypatch.setattr(race, "has_kernel_times", lambda: True)
    monkeypatch.setattr(race, "kernel_seconds_of_each", of_each)
    able = [contestant("a", 1e-6), contestant("torch", 9.0, lambda run, calls: 5e-6), contestant("b", 2e-6)]
    times = race.race(able, {}, lambda c: (), number=1, rounds=3, seconds=1e-5)
    assert {name: t["forward"]["kernel_us"] for name, t in times.items()} == {
        "a": pytest.approx([1] * 3),
        "b": pytest.approx([2] * 3),
        "torch": pytest.approx([5] * 3),
    }
    assert traces == [2] * 3


@pytest.mark.slow
def test_a_case_too_large_for_the_contract():
    """It is checked smaller, and as a whole against xla: a peer that is wrong only there is found."""

    def wrong(x, weight):
        return norm(x, weight) * (1.01 if x.shape[0] > 256 else 1.0)

    case = next(c for c in RMS.cases if c.name == "model_4k")
    case = dataclasses.replace(case, dims={"lead": (512,), "D": 16})
    settings = measure.Settings("float32", rounds=1, seconds=0.001, oracle_bytes=4 * 256 * 16)
    squared = peer(norm)
    squared.express = lambda op_name, arguments: peers.Expression(
        lambda x, weight: norm(x, weight) ** 2, lambda out, rstd: out**2
    )
    chosen = {"right": peer(norm), "wrong": peer(wrong), "squared": squared}
    prepared = measure.prepare(RMS, case, settings, chosen)
    assert prepared.checked["dims"] == {"lead": [256], "D": 16} and prepared.checked["whole_case_against"] == "xla"
    assert not prepared.scaled and prepared.case is case
    assert [c.name for c in prepared.able] == ["xla", "right", "squared"]
    assert prepared.rows["wrong"]["status"] == "wrong"


def test_all_pairs_of_attention_count_as_one_array():
    case = next(c for c in FLASH.cases if c.name == "causal_32k_gqa")
    small = scaled(FLASH, case, contract_fits(FLASH, 16 * 1024 * 1024 * 4))
    assert (small.dims["T"], small.dims["S"], small.dims["N"], small.dims["H"]) == (1024, 1024, 16, 128)


@pytest.mark.slow
def test_what_an_expression_gives_is_what_it_is_held_to(tmp_path):
    assert main(["cross_entropy", "against=optax_cross_entropy", f"out={tmp_path}", *FEW, "gflop=0.01"]) == 0
    row = of(only_file(tmp_path)[1]["cases"][0], "optax_cross_entropy")
    assert row["status"] == "timed" and set(row["error"]) == {"value", "d_hidden", "d_lm_head"}


@pytest.mark.parametrize(
    "argv, said",
    [
        (["rms_nrom"], "operation 'rms_nrom' is unknown: did you mean 'rms_norm'?"),
        (["rms_norm", "case=model_4"], "case of rms_norm 'model_4' is unknown: did you mean 'model_4k'?"),
        (["flash_attention", "against=cuddn"], "peer 'cuddn' is unknown: did you mean 'cudnn'?"),
        (["rms_norm", "dtyp=float32"], "option 'dtyp' is unknown: did you mean 'dtype'?"),
        (["rms_norm", "dtype=float8"], "dtype 'float8' is unknown"),
        (["rms_norm", "rounds=0"], "option 'rounds' must be a positive number, got '0'"),
        (["rms_norm", "seconds=inf"], "option 'seconds' must be a positive number, got 'inf'"),
        (["rms_norm", "case=model_4k,"], "case of rms_norm '' is unknown"),
        (["rms_norm", "dtype=float32", "dtype=float16"], "option 'dtype' is given twice"),
        (["rms_norm", "model_4k"], "argument 'model_4k' must be written name=value"),
        (["rms_norm", "out=/dev/null/folder"], "option 'out': results cannot be kept in /dev/null/folder"),
        (["--write", "out=/no/such/folder"], "option 'out': /no/such/folder has no results"),
        (["--write", "case=model_4k"], "option 'case' has no place beside --write"),
    ],
)
def test_unknown_names_are_refused(argv, said, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1


def test_packed_documents_as_cudnn_is_told_of_them():
    """Runs of ids, row by row; and what it cannot be told of is said, so that nothing else is timed."""
    from benchmarks.peers.cudnn_packed import express, lie

    lengths, starts = lie(np.array([[0, 0, 0, 2, 2, 5], [1, 1, 1, 1, 1, 1]]))
    assert lengths.tolist() == [[3, 2, 1], [6, -1, -1]] and starts.tolist() == [[0, 3, 5, -1], [0, -1, -1, -1]]
    x = jnp.zeros((1, 6, 2, 16), jnp.bfloat16)
    for ids, window, said in (
        ([0, 0, 1, 1, 2, 2], (3, 0), None),
        ([0, 0, 1, 1, 2, 2], (3, 1), "it supports windows only backward"),
        ([0, 0, 1, 1, 0, 0], None, "one after another"),
        ([0, 0, 1, 1, 1, -1], None, "no padding"),
    ):
        mask = MaskInfo.from_segments(jnp.array([ids]), causal=True, window=window)
        found = express("flash_attention", {"query": x, "key": x, "value": x, "mask": mask})
        assert callable(found) if said is None else said in found


def test_without_arguments_it_lists_what_there_is(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    for name in (*OPERATIONS, *peers.all_peers(), "causal_8k", "it needs a GPU"):
        assert name in said


# Operations with so many or so large cases that their shapes take seconds.
MANY = ("delta_rule", "quantized_matmul", "page_attention", "native_sparse_attention")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in MANY)) for n in OPERATIONS])
def test_every_bench_case_can_be_scaled_down(name):
    op = OPERATIONS[name]
    fits = within(op, "float32", 0.1, 8)
    for case in op.cases:
        if "bench" in case.tags:
            large = [n for n, make in case.make.items() if hasattr(make, "shaped")]
            given = abstract(op, case, "bfloat16") if large else {}
            assert all(isinstance(given[n], jax.ShapeDtypeStruct) for n in large), "nothing large is made"
            small = scaled(op, case, fits)
            assert small is not case and fits(small) and small.name == case.name
            arguments = abstract(op, small, "bfloat16")
            real = op.case_inputs(small, dtype="bfloat16", shapes_only=True)
            assert jax.tree.map(jnp.shape, arguments) == jax.tree.map(jnp.shape, real)
            floats, data, static = split(real)
            # What the contract alone says of shapes holds for them too.
            jax.eval_shape(lambda arrays, given=static: op.function(**arrays, **given), floats | data)


def test_peers_say_what_they_are():
    """And importing them imports no package of others."""
    others = ("torch", "fla", "tokamax", "optax")
    probe = (
        f"import sys; from benchmarks import peers; peers.all_peers(); print([m for m in {others} if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr
    for module in peers.all_peers().values():
        assert module.FRAMEWORK in ("jax", "torch") and module.OPERATIONS and module.__doc__
        assert module.available() is None or isinstance(module.available(), str)


def test_the_readme_is_what_the_results_say():
    text = report.README.read_text()
    assert text.partition(report.BEGIN)[2].partition(report.END)[0] == f"\n{report.tables(report.RESULTS)}\n"


def test_times_that_overlap_count_once():
    assert timing.union([(0, 2), (5, 6), (1, 3), (1, 2)]) == 4
    assert timing.quartiles([5.0]) == [5.0] * 3 and timing.quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == [2.0, 3.0, 4.0]


def test_copies_outgrow_the_cache():
    x = {"x": jnp.ones(1000)}
    assert race.copies(x, cache=6000, memory_bound=True) == 3
    assert race.copies(x, cache=6000, memory_bound=False) == 1
    words = ({"x": jnp.ones(1000)}, {"words": jnp.ones(1000, jnp.int32), "mask": (jnp.ones(1000, jnp.int32),)})
    assert race.copies(words, cache=6000, memory_bound=True) == 1


def test_integers_are_copied_as_floats_are():
    """Else quantised words, or ids, would stay in the cache while calls go round copies of the rest."""
    floats, data = {"x": jnp.ones(8)}, {"words": jnp.arange(8), "mask": (jnp.ones(2, bool),)}
    loaded = programs_of("jax", lambda x, words, mask: x * words).load(floats, data)
    for a, b in zip(jax.tree.leaves((floats, data)), jax.tree.leaves(loaded), strict=True):
        assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() and (a == b).all()


def test_the_kernels_of_a_step_are_told_apart():
    """The instructions of a compiled program, and kernels as the profiler would name them."""

    def run(x, w):
        with jax.named_scope("optimizer"):
            w = w - 0.1 * jnp.sin(w)
        return jnp.tanh(x @ w).sum(), x.T.astype(jnp.bfloat16), w

    x = jnp.ones((64, 32))
    text = jax.jit(run).lower(x, jnp.ones((32, 32))).compile().as_text()
    text += """
%called (a: f32[4]) -> f32[4] {
  %triton.1 = (f32[4]{0}, f32[]) custom-call(%a), custom_call_target="triton_kernel_call_ffi", metadata={op_name="jit(f)/\
layer/flash_attention.triton_gpu.backward/triton_kernel_call" source_file="/x/y/z.py" source_line=7}
  %norm.1 = f32[4]{0} custom-call(%a), custom_call_target="triton_kernel_call_ffi", metadata={op_name="jit(f)/rms_norm.\
triton_gpu/triton_kernel_call"}
  %fmha.1 = f32[4]{0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %all-reduce-start.2 = f32[4]{0} all-reduce-start(%a)
}
""".replace("\\\n", "")
    names = step.Names(text)
    made = {i.opcode: name for name, i in names.found.items()}
    optimizer = next(
        n for n, i in names.found.items() if i.opcode == "fusion" and any("/optimizer/" in s for s in i.scopes)
    )
    assert names.found["triton.1"].source == "y/z.py:7"
    importlib.import_module("kernels.ops.flash_attention.triton_gpu")  # whose kernels are known by name
    spans = [
        ("query_gradient_kernel", "", 0, 10),
        ("rms_norm_fwd_kernel", "norm.1", 10, 20),
        ("cudnn_sdpa", "fmha.1", 20, 30),
        ("nvjet_tst_128x256", made["dot"], 30, 50),
        (optimizer.replace(".", "_"), "call", 60, 70),
        ("ncclDevKernel_AllReduce", "all-reduce-start.2", 65, 90),
        ("MemcpyD2D", "", 100, 110),
        ("mystery", "", 110, 120),
    ]
    kernels = [timing.Kernel(f"/device:GPU:{n}", name, a, b, hlo) for n in (0, 1) for name, hlo, a, b in spans]
    found = step.summary(kernels, text, steps=2, top=3)
    assert {name: round(x["ms"] * 2e6) for name, x in found["classes"].items()} == {
        "attention backward": 20,
        "Triton rms_norm_fwd_kernel": 10,
        "matmuls": 20,
        "optimizer": 10,
        "collectives": 25,
        "copies": 10,
        "unknown": 10,
    }
    assert round(found["window_ms"] * 2e6) == 120 and round(found["gaps"]["ms"] * 2e6) == 20
    assert round(found["exposed_collectives"]["ms"] * 2e6) == 20 and found["kernels_of_a_step"] == len(spans) / 2
    assert found["largest"][0]["class"] == "collectives" and found["largest_of_xla"][0]["class"] == "optimizer"


@pytest.mark.slow  # a step is compiled and timed, 7 s
def test_a_step_is_measured_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "start_jax", lambda sections: None)
    words = [
        *TINY,
        f"run.dir={tmp_path}/run",
        "documents=32",
        "warmup=1",
        "timed=1",
        "steps=1",
        f"out={tmp_path}/out.json",
    ]
    step.main(words)
    found = json.loads((tmp_path / "out.json").read_text())
    assert (
        found["devices"] == 2 and found["step_ms"] > 0 and len(found["losses"]) == 2 and not (tmp_path / "run").exists()
    )
    shown = report.steps(tmp_path)
    assert f"| {found['step_ms']:.1f} | {found['tokens_per_second']:,.0f} |" in shown and found["commit"][:9] in shown
    found |= {"window_ms": 10.0, "classes": {"matmuls": {"ms": 6.0}, "unknown": {"ms": 3.0}}, "gaps": {"ms": 1.0}}
    found |= {"largest": [{"kernel": "mine", "class": "unknown", "ms": 3.0}], "exposed_collectives": {"ms": 0.5}}
    (tmp_path / "out.json").write_text(json.dumps(found))
    assert "| matmuls 60.0%, mine 30.0%, gaps 10.0%, collectives, exposed 5.0% |" in report.steps(tmp_path)


# -- what dispatch is told -------------------------------------------------------------------------------------------------


def block(measured_case, backends, **changes):
    """Returns what is kept of a case: backend -> (forward µs, backward µs, what it was tuned to)."""
    rows = [
        {"contestant": name, "ours": True, "status": "timed", "forward": {"kernel_us": [0, forward, 0]}}
        | ({"backward": {"kernel_us": [0, backward, 0]}} if backward else {})
        | ({"tuned": tuned} if tuned else {})
        for name, (forward, backward, tuned) in backends.items()
    ]
    rows += [
        {"contestant": "a_peer", "ours": False, "status": "timed", "forward": {"kernel_us": [0, 0.1, 0]}},
        {"contestant": "pallas_tpu", "ours": True, "status": "cannot", "reason": "no TPU"},
    ]
    dims = {n: list(s) if isinstance(s, tuple) else s for n, s in measured_case.dims.items()}
    about = {
        "case": measured_case.name,
        "dims": dims,
        "scaled": False,
        "dtype": "bfloat16",
        "basis": "kernel_us",
        "rows": rows,
    }
    return about | {"date": "2026-01-02", "commit": "abc"} | changes


def ranked(folder, *blocks, op="rms_norm", device="A Chip 9"):
    result = {"format": report.FORMAT, "op": op, "device": device, "cases": list(blocks)}
    (folder / "one.json").write_text(json.dumps(result))
    return ranking.rankings(folder).get(device, {}).get("operations", {}).get(op, {})


def test_a_class_has_the_geometric_mean_of_its_cases(tmp_path):
    case = {c.name: c for c in RMS.cases}
    best = {"version": 1, "config": {"num_warps": 4}}
    found = ranked(
        tmp_path,
        block(case["model_8k"], {"triton_gpu": (8.0, 20.0, best), "xla": (16.0, None, None)}),
        block(case["model_5120"], {"triton_gpu": (2.0, 5.0, best), "xla": (4.0, 7.0, None)}),
        block(case["model_4k"], {"triton_gpu": (1.0, 1.0, None), "xla": (1.5, 1.0, None)}),
        block(case["model_2k"], {"triton_gpu": (1.0, 1.0, None)}),
    )
    assert list(found) == ["bfloat16 width<=4096 rows>=8192", "bfloat16 width<=8192 rows>=8192"], "one alone is no race"
    of = found["bfloat16 width<=8192 rows>=8192"]
    assert of["forward"] == {"triton_gpu": 4.0, "xla": 8.0} and of["backward"] == {"triton_gpu": 10.0}
    assert of["configs"] == {"triton_gpu": best}
    assert of["cases"] == [{"case": n, "date": "2026-01-02", "commit": "abc"} for n in ("model_5120", "model_8k")]


def test_what_says_nothing_of_the_cases_as_they_are_is_left_out(tmp_path):
    case = next(c for c in RMS.cases if c.name == "model_4k")
    times = {"triton_gpu": (1.0, 1.0, None), "xla": (2.0, 1.0, None)}
    assert ranked(tmp_path, block(case, times))
    assert not ranked(tmp_path, block(case, times, scaled=True))
    assert not ranked(tmp_path, block(case, times, dims={"lead": [16384], "D": 4000}))
    assert not ranked(tmp_path, block(case, times, case="gone"))
    assert not ranked(tmp_path, block(case, times), device="cpu")
    assert not ranked(tmp_path, block(case, times), op="gone")
    assert not ranked(tmp_path, block(case, {"xla": times["xla"], "another": times["xla"]}))
    pairs = [
        block(c, times | {"triton_gpu": (1.0, 1.0, {"version": 1, "config": {"num_warps": c.dims["D"] // 1024}})})
        for c in RMS.cases
        if c.name in ("model_5120", "model_8k")
    ]
    assert ranked(tmp_path, pairs[0]) and ranked(tmp_path, pairs[1])
    assert not ranked(tmp_path, *pairs), "tuned to each case, a backend was not measured as the class would run it"


@pytest.mark.slow
def test_our_backends_may_run_tuned(tmp_path, monkeypatch):
    """With the configuration that the tuner gave, which is kept beside the times."""
    heuristic = FLASH.backends["xla"].heuristic
    seen = []

    def tuned(request):
        seen.append((request.backend.name, request.platform, request.concrete))
        found = heuristic(request.call, "cpu")
        return dataclasses.replace(found, fwd_params=dataclasses.replace(found.fwd_params, q_blocksize=8))

    monkeypatch.setattr("kernels.framework.tuning.tune", tuned)
    given = ["flash_attention", "case=causal_8k", "against=none", "tune=true", f"out={tmp_path}", *FEW, "gflop=0.001"]
    assert main(given) == 0
    row = of(only_file(tmp_path)[1]["cases"][0], "xla")
    assert seen == [("xla", "cpu", True)]
    assert row["status"] == "timed" and row["tuned"]["version"] == FLASH.backends["xla"].version
    assert row["tuned"]["config"]["fwd_params"]["q_blocksize"] == 8
    assert "| xla (tuned) |" in report.tables(tmp_path)


def test_writing_makes_the_files_of_the_devices_that_were_measured(tmp_path, monkeypatch):
    case = next(c for c in RMS.cases if c.name == "model_4k")
    monkeypatch.setattr(ranking.measured, "FOLDER", tmp_path / "measured")
    ranked(tmp_path, block(case, {"triton_gpu": (3.0, 1.0, None), "xla": (2.0, 1.0, None)}))
    (path,) = ranking.write(tmp_path)
    assert path == tmp_path / "measured" / "a_chip_9.json"
    found = ranking.measured.of_device("A Chip 9")["rms_norm", "bfloat16 width<=4096 rows>=8192"]
    assert found.forward == {"triton_gpu": 3.0, "xla": 2.0} and found.backward == {"triton_gpu": 1.0, "xla": 1.0}
    ranking.measured.of_device.cache_clear()


def test_what_each_start_of_a_run_took(tmp_path, capsys):
    rows = [
        {"at": 100.0, "phase": "restart", "start": True},
        {"at": 102.0, "phase": "compile"},
        {"at": 110.0, "phase": "restart"},
        {"at": 111.0, "phase": "restart", "resumed": 0},
        {"at": 112.0, "phase": "productive", "step": 0},
        {"at": 113.0, "phase": "productive", "step": 7},
        {"at": 113.5, "hosts": {}, "step": 7, "steps": 7},
        {"at": 150.0, "phase": "restart", "start": True},
        {"at": 151.0, "phase": "compile"},
        {"at": 156.0, "phase": "restart"},
        {"at": 166.0, "phase": "restart", "resumed": 5},
        {"at": 167.0, "phase": "productive", "step": 5},
        {"at": 168.0, "phase": "productive", "step": 6},
        {"at": 169.0, "phase": "end", "step": 6},
    ]
    (tmp_path / "goodput.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "recipe.json").write_text(json.dumps({"mesh.sp": 2, "mesh.dp": 1, "run.steps": 6}))
    resumed.main(
        [str(tmp_path), "device=a chip", "checkpoint_gb=20", "commit=0123456789ab", f"out={tmp_path}/out.json"]
    )
    found = json.loads((tmp_path / "out.json").read_text())
    first = {"made": 0, "from": 0, "down_s": 0, "compile_s": 8, "state_s": 1, "first_step_s": 13}
    again = {"made": 7, "from": 5, "down_s": 36.5, "compile_s": 5, "state_s": 10, "first_step_s": 18}
    assert found["starts"] == [first, again] and found["recipe"] == {"run.steps": 6, "mesh.sp": 2}
    assert found["goodput"]["starts"] == 2 and found["goodput"]["lost"] > 0
    (tmp_path / "goodput.jsonl").unlink()
    (tmp_path / "recipe.json").unlink()
    shown = report.resumed(tmp_path)
    assert "| 7 | 5 | 36.5 | 5.0 | 10.0 | 2.0 | 18.0 |" in shown and "a chip, 1 processes" in shown
    with pytest.raises(SystemExit, match="has a goodput"):
        resumed.main([str(tmp_path)])


@pytest.mark.parametrize(
    "name",
    [
        "dealing",
        "experts",
        "hosts",
        "plan",
        "replicas",
        "resumed",
        "rows",
        "sequence",
        "small_operations",
        "step",
        "tokenize",
    ],
)
def test_every_benchmark_names_what_it_does_not_know(name):
    with pytest.raises((SystemExit, ValueError), match="nonsense"):
        importlib.import_module(f"benchmarks.{name}").main(["nonsense=1"])


def test_the_page_shows_operations_beside_attention(tmp_path):
    timed = {
        "op": "rms_norm",
        "case": "model_4k",
        "direction": "backward",
        "who": "triton_gpu",
        "us": 119.6,
        "of_copy": 0.872,
    }
    failed = {"op": "rms_norm", "case": "model_8k", "who": "xla", "failed": "WRONG: {'out': 1.0}"}
    found = {"device": "NVIDIA X", "date": "2026-11-23", "commit": "0123456789ab", "rows": [timed, failed]}
    (tmp_path / "x.json").write_text(json.dumps(found))
    shown = report.small_operations(tmp_path)
    assert "| rms_norm | model_4k | backward | triton_gpu | 120 |  | 0.87 |  |  |" in shown
    assert "Not timed: rms_norm model_8k, xla: WRONG" in shown and "2026-11-23 `012345678`" in shown


def test_an_option_that_is_given_twice():
    assert options.split({"rounds": 1}, ["rounds=2", "recipe=moe"]) == ({"rounds": 2}, ["recipe=moe"])
    with pytest.raises(SystemExit, match="rounds is given twice"):
        options.split({"rounds": 1}, ["rounds=2", "rounds=3"])


def test_configurations_of_peers_are_compiled_side_by_side(monkeypatch, capsys):
    """All of them before the tuner runs, once for each of its choices; the tuner meets one that fails again."""
    from triton.runtime import autotuner
    from triton.runtime._async_compile import active_mode

    from benchmarks import tuners

    compiled, ran, waits = [], [], threading.Barrier(3, timeout=30)

    class Kernel:
        def run(self, x, **how):
            assert how["warmup"]
            if how["BLOCK"] == 7:
                raise ValueError("no such block")
            active_mode.get().submit(how["BLOCK"], waits.wait, lambda kernel: compiled.append(how["BLOCK"]), None)

    class Tuner:
        arg_names, keys, fn, base_fn = ["x", "n"], ["n"], Kernel(), Kernel.run
        configs = tuple(autotuner.Config({"BLOCK": b}) for b in (1, 2, 3, 7))

        def __init__(self):
            self.cache = {}

        def prune_configs(self, kwargs):
            assert self.nargs["x"] is not None and kwargs == {"n": 5}
            return self.configs

        def run(self, *args, **kwargs):
            ran.append(sorted(compiled))
            self.cache[(kwargs["n"], str(args[0].dtype))] = self.configs[0]
            return "result"

    monkeypatch.setattr(autotuner, "Autotuner", Tuner)
    tuners.compile_side_by_side.__wrapped__(3)
    tuner, x = Tuner(), np.zeros(2, np.float32)
    assert tuner.run(x, n=5) == tuner.run(x, n=5) == "result"
    assert ran == [[1, 2, 3], [1, 2, 3]] and active_mode.get() is None
    said = capsys.readouterr().out
    assert said.count("BLOCK: 7") == said.count("no such block") == 1 and "BLOCK: 2" not in said


def test_what_flash_linear_attention_can_say(monkeypatch):
    """RWKV-6's bonus, with decays of channels alone."""
    from benchmarks.peers import fla

    monkeypatch.setattr(fla, "compile_side_by_side", lambda: None)
    op = OPERATIONS["linear_attention"]
    case = next(c for c in op.cases if c.name == "rwkv6")
    arguments = op.case_inputs(case, dtype="bfloat16", shapes_only=True) | dict.fromkeys(
        ("segment_ids", "initial_state")
    )
    assert callable(fla.express("linear_attention", arguments))
    assert fla.express("linear_attention", {**arguments, "g": arguments["gk"]}) == "it cannot say bonus, g, gk"
