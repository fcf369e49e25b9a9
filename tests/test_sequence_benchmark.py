"""The benchmark of attention over a split sequence: whose pairs are whose, and that nothing wrong is timed. No test looks at a
time."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from benchmarks import report, sequence, step, timing
from benchmarks.sequence import calls, devices, pairs, rank, rank_programs
from benchmarks.sequence.calls import Attention
from benchmarks.sequence.plans import PLANS
from benchmarks.sequence.rows import Rows
from ejdist import Order, make_mesh
from ejdist.order import NAMES
from ejdist.sequence import SCHEMES, Ring
from ejdist.sequence.schemes import scheme_of
from kernels.toolchains.simulate.ahead_of_time import export_cuda

ZIGZAG = Order("zigzag", 4)
SMALL = ["heads=4", "kv_heads=2", "width=8", "dtype=float32", "check=32", "rounds=1", "tokens=32", "orders=zigzag"]


@pytest.fixture(autouse=True)
def quick():
    """Little is optimised: compiling is what these tests would take their time for."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# -- rows and their pairs ----------------------------------------------------------------------------------------------


def test_rows_are_cut_from_documents_of_such_lengths(tmp_path):
    ids = calls.segment_ids("64", 2**16)
    assert ids.dtype == np.int32 and ids.min() == 0 and np.all(np.diff(ids) >= 0)
    assert 0.8 < len(ids) / (ids[-1] + 1) / 64 < 1.25
    assert np.array_equal(ids, calls.segment_ids("64", 2**16)) and not np.array_equal(
        ids, calls.segment_ids("64", 2**16, 1)
    )
    assert not calls.segment_ids("one", 64).any() and not calls.segment_ids("none", 64).any()
    (tmp_path / "lengths.txt").write_text("# of mine\n3\n\n5\n")
    lengths = np.bincount(calls.segment_ids(str(tmp_path / "lengths.txt"), 4096))[1:-1]
    assert {*lengths} == {3, 5}
    assert np.array_equal(calls.thinned(np.array([0, 0, 1, 1, 2, 2, 2, 2]), 4), [0, 1, 2, 2])


@pytest.mark.parametrize(("lengths", "message"), [("7\n-2\n", "the line '-2'"), ("# none\n", "has no lengths")])
def test_wrong_files_of_lengths_are_refused(lengths, message, tmp_path):
    (tmp_path / "lengths.txt").write_text(lengths)
    with pytest.raises(ValueError, match=f"{message}.*a mean length"):
        calls.segment_ids(str(tmp_path / "lengths.txt"), 64)
    with pytest.raises(ValueError, match=r"documents = 'nowhere' cannot be read.*'one', 'none'"):
        calls.segment_ids("nowhere", 64)


@pytest.mark.parametrize("order", NAMES)
@pytest.mark.parametrize("window", [0, 7])
def test_pairs_are_those_of_the_mask(order, window):
    """All of a rank are those of its hops, and all of the row those of its ranks."""
    n, length = 4, 96
    call = Attention(1, 1, 8, "float32", window=window)
    ids, order = calls.segment_ids("30", length), Order(order, n)
    at = np.arange(length)
    visible = (ids[:, None] == ids) & (at[:, None] >= at)
    if window:
        visible &= at[:, None] - at < window
    of_ranks = pairs.of_ranks(call.keys_seen(ids), order)
    tokens = pairs.tokens_of(call, ids, order)
    for r in range(n):
        made = rank_programs.hops_made(call, order, length)
        of_hops = [pairs.of_hop(call, ids, order, r, hop) for hop in made]
        assert of_hops == [visible[np.ix_(tokens[r], tokens[(r - hop) % n])].sum() for hop in made]
        assert sum(of_hops) == of_ranks[r] == visible[tokens[r]].sum()
    assert of_ranks.sum() == visible.sum()
    assert pairs.busiest(call.keys_seen(ids), order) == (of_ranks.argmax(), of_ranks.max() / of_ranks.mean())


def test_the_call_beside_it_does_as_much():
    seen = Attention(1, 1, 8, "float32").keys_seen(np.zeros(4096, np.int32))
    assert calls.same_work(seen, 512 * 513 // 2) == 512 and calls.same_work(seen, 512 * 513 // 2 + 1) == 768
    assert calls.same_work(seen, 1e12) == 4096


def test_the_balance_of_every_order_is_listed():
    """One document is even in a zigzag, and packed ones are not."""
    call = Attention(1, 1, 8, "float32")
    one = pairs.imbalances(call, "one", 4096, 8, 0, rows=3)
    assert [len(x) for x in one.values()] == [1] * len(NAMES) and one["zigzag"] == [1.0] and one["contiguous"][0] > 1.8
    packed = pairs.imbalances(call, "512", 4096, 8, 0, rows=3)
    assert min(packed["zigzag"]) > 1.1 and len(packed["zigzag"]) == 3
    short = pairs.imbalances(call, "512", 4096, 8, 0, rows=3, stripe=8)
    assert max(short["balanced"]) < 1.02 and max(short["striped"]) < 1.1 < max(packed["striped"])
    assert [*pairs.imbalances(call, "one", 4096 + 8, 16, 0, rows=1)] == [] and [*one] == [*NAMES]


# -- one rank on one device --------------------------------------------------------------------------------------------


@pytest.mark.slow  # a process for every rank of a ring, 10 s
def test_a_rank_of_a_ring_is_checked_then_timed(tmp_path, monkeypatch, capsys):
    words = [*SMALL, "ranks=4", "documents=40", "window=24", "sinks=1", "schemes=ring", f"out={tmp_path}/out.json"]
    sequence.main([*words, "rank=worst"])
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {row["direction"]: row for row in found["rows"].values() if row["kind"] == "rank"}
    (balance,) = (row for row in found["rows"].values() if row.get("order") == "zigzag" and row["kind"] == "balance")
    for row in rows.values():
        assert 0 < row["error"] < 1e-5 and row["rank"] == np.argmax(balance["pairs_of_ranks"])
        assert row["pairs"] == max(balance["pairs_of_ranks"]) == sum(hop["pairs"] for hop in row["hops"])
        # The call beside it would have 256 tokens, and has the whole row.
        assert row["length"] == 128 and row["share"] == pytest.approx(row["pairs"] / sum(balance["pairs_of_ranks"]))
        assert row["hops_ms"] == pytest.approx(sum(hop["ms"] for hop in row["hops"]))
        of_row = row["pairs"] / sum(balance["pairs_of_ranks"]) * row["row_ms"][1]
        assert row["efficiency_of_row"] == pytest.approx(of_row / row["whole_ms"][1])
        whole, alone = row["whole_ms"][1], row["alone_ms"][1]
        assert row["efficiency"] == pytest.approx(row["share"] * alone / whole)
        assert row["efficiency_of_hops"] == pytest.approx(row["share"] * alone / row["hops_ms"])
    assert {*rows} == {"forward", "backward"} and "window 24, sinks x 4, ring, zigzag" in capsys.readouterr().out
    assert f"| {rows['forward']['pairs']:,} |" in report.sequences(tmp_path)

    monkeypatch.setattr(rank, "checked", lambda *a: 0.01)
    sequence.main([*words, "rank=1", "directions=forward"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    (wrong,) = (row for label, row in rows.items() if "rank 1, forward" in label)
    assert wrong == {"refused": "whole: ValueError: wrong by 0.01"}


@pytest.mark.slow  # 8 s
@pytest.mark.parametrize(
    "words",
    [
        "schemes=all_gather orders=zigzag documents=40",
        "schemes=all_gather orders=striped stripe=8 documents=10 sinks=1",
        "schemes=halo orders=striped stripe=8 documents=10 sinks=1 window=12",
        "schemes=halo orders=zigzag documents=40 window=20",
        "schemes=all_gather orders=balanced stripe=8 documents=20",
        "schemes=group_cast orders=balanced stripe=8 documents=20",
        "schemes=group_cast orders=striped stripe=8 documents=10 buffer=2",
        "schemes=ring orders=balanced stripe=8 documents=20",
    ],
)
def test_a_rank_of_one_call_is_checked_then_timed(words, tmp_path):
    sequence.main([*SMALL[:-1], *words.split(), "rank=1", "ranks=4", f"out={tmp_path}/out.json"])
    rows = [row for row in json.loads((tmp_path / "out.json").read_text())["rows"].values() if row["kind"] == "rank"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert all(row["error"] < 1e-5 and row["efficiency"] > 0 for row in rows)
    assert all(("hops" in row) == ("schemes=ring" in words) for row in rows)


def test_all_ranks_are_listed_and_none_is_timed(tmp_path):
    sequence.main([*SMALL[:-1], "rank=all", "ranks=4", "documents=40", f"out={tmp_path}/out.json"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["order"] for row in rows.values()] == [*NAMES] and {row["kind"] for row in rows.values()} == {"balance"}
    assert "| zigzag |" in report.sequences(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("call", [Attention(32, 8, 128, "bfloat16"), Attention(64, 8, 64, "bfloat16", 128, True)])
def test_a_rank_compiles_for_hopper(call):
    """What the plan of one GPU runs, with its kernels for Hopper."""
    order, tokens = Order("zigzag", 8), 8192
    floats = {
        n: jax.ShapeDtypeStruct(s, "float32" if s == (call.heads,) else call.dtype)
        for n, s in call.shapes(tokens).items()
    }
    d_out, number = floats.pop("d_out"), jax.ShapeDtypeStruct((), "int32")
    data = {"rank": number, "whole": {"kv_segment_ids": jax.ShapeDtypeStruct((1, 8 * tokens), "int32")}}
    bare = dataclasses.replace(call, sinks=False)
    whole, hop = rank_programs.programs(call, order, Ring()), rank_programs.hop_programs(bare, order)
    state, pulled = (jax.eval_shape(lambda d=d: rank_programs.begun(d, floats)) for d in ("forward", "backward"))
    saved = {"saved": jax.eval_shape(lambda s, d: rank_programs.saved_of(bare, *s, d), state, d_out)}
    for function, arguments, count in (
        (whole.forward, (floats, data), 1),
        (whole.both, (floats, d_out, data), 2),
        (lambda *a: hop["forward"](*a), (number, data, floats, state), 1),
        (lambda *a: hop["backward"](*a), (number, data | saved, floats, pulled), 1),
    ):
        assert len({kernel.name for kernel in export_cuda(function, *arguments).kernels}) == count


# -- over devices ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_attention_over_a_split_sequence_is_checked_then_timed(tmp_path, monkeypatch, capsys):
    words = [*SMALL, "documents=40", "directions=backward", "schemes=ring", f"out={tmp_path}/out.json"]
    mesh = make_mesh(sp=2)
    monkeypatch.setattr(sequence.ejdist, "make_mesh", lambda cp, sp: mesh)
    sequence.main([*words, "backends=auto,cudnn"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    here = "32 tokens, documents of 40, 4/2 x 8, backward"
    ring, refused = (rows[f"{here}, ring, zigzag, {backend}"] for backend in ("auto", "cudnn"))
    exchange, one = rows[f"{here}, ring, zigzag, exchange"], rows[f"{here}, one device, auto"]
    assert ring["error"] < 1e-5 and ring["efficiency"] == pytest.approx(ring["tflops"] / one["tflops"])
    assert ring["exposed_ms"] == pytest.approx(ring["whole_ms"][1] - ring["work_ms"][1])
    assert ring["exposed_share"] == pytest.approx(ring["exposed_ms"] / exchange["whole_ms"][1])
    assert "dtype float32" in refused["refused"] and f"| {here}, ring, zigzag, auto | " in capsys.readouterr().out
    assert f"| {here}, ring, zigzag, auto | " in report.sequences(tmp_path)

    monkeypatch.setattr(devices, "checked", lambda *a: 0.01)
    sequence.main(words)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    wrong = rows["32 tokens, documents of 40, 4/2 x 8, backward, ring, zigzag, auto"]
    assert wrong == {"refused": "whole: ValueError: wrong by 0.01"}


@pytest.mark.slow
def test_an_order_that_each_row_brings_is_checked_then_timed(tmp_path, monkeypatch):
    words = [word for word in SMALL if not word.startswith("orders=")]
    words += ["orders=balanced", "stripe=4", "documents=10", "schemes=ring,all_gather", f"out={tmp_path}/out.json"]
    mesh = make_mesh(sp=2)
    monkeypatch.setattr(sequence.ejdist, "make_mesh", lambda cp, sp: mesh)
    sequence.main(words)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    split = [row for row in rows.values() if row["kind"] == "split"]
    assert len(split) == 4 and all(row["error"] < 1e-5 and row["whole_ms"][1] > 0 for row in split)
    assert all(row["imbalance"] < 1.05 for row in split)


KINDS = {"ppermute": "collective-permute", "all_gather": "all-gather", "all_to_all": "all-to-all"}
KINDS |= {"psum_scatter": "reduce-scatter", "reduce_scatter": "reduce-scatter"}


def sent(jaxpr):
    """Returns the kind of every transfer in a program, sorted."""
    found = []
    for equation in jaxpr.eqns:
        kind = KINDS.get(equation.primitive.name)
        found += [kind] if kind else []
        for inner in jaxprs_in_params(equation.params):
            found += sent(inner)
    return sorted(found)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.slow
def test_transfers_alone_are_those_of_the_whole(scheme):
    """After the compiler has taken out what nobody reads and joined what is equal; and work alone sends nothing but ids."""
    mesh, call = make_mesh(sp=4), Attention(4, 2, 8, "float32")
    arrays = calls.draw(call, 64, mesh)
    data = calls.data_of(call, calls.segment_ids("20", 64), mesh)
    floats = {n: arrays[n] for n in ("query", "key", "value")}
    whole = devices.split(call, mesh, scheme_of(scheme), ZIGZAG)
    forward = sent(jax.make_jaxpr(whole.forward)(floats, data).jaxpr)
    both = sent(jax.make_jaxpr(whole.both)(floats, arrays["d_out"], data).jaxpr)
    alone = {}
    for direction in ("forward", "backward"):
        run = devices.travelling(call, mesh, scheme_of(scheme), ZIGZAG, direction)
        text = run.lower(devices.to_send(arrays), data).compile().as_text()
        alone[direction] = sorted(re.findall(rf" ({'|'.join({*KINDS.values()})})(?:-start)?\(", text))
    # By ids and an exchange of numbers a scheme that reads the batch knows what to send; a backward by itself has its own.
    reads = scheme_of(scheme).reads_batch
    assert alone["forward"] == forward and sorted(forward + alone["backward"]) == sorted(both + ["all-gather"] * reads)
    work = devices.split(call, mesh, devices.Work(scheme_of(scheme)), ZIGZAG)
    numbers = {"all-to-all"} if reads else set()
    assert {*sent(jax.make_jaxpr(work.both)(floats, arrays["d_out"], data).jaxpr)} == {"all-gather"} | numbers


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("schemes=ring,rang", "'rang' is unknown; use ring"),
        ("orders=spiral", "'spiral' is unknown; use contiguous"),
        ("directions=sideways", "'sideways' is unknown; use forward"),
        ("tokens=8k", "must be tokens of a device"),
        ("window=-1", "window = -1 must be at least 0"),
        ("sinks=2", "sinks = 2 must be 1, learned sinks, or 0"),
        ("heads=3", "heads = 3 must be a multiple of kv_heads = 8"),
        ("rank=3", "rank and ranks belong together"),
        ("rank=3 ranks=1", "ranks = 1 must be at least 2"),
        ("rank=3 ranks=2 tokens=32 heads=8", "rank = '3' is no rank of 2; use a number from 0 to 1, 'worst' or 'all'"),
        (
            "rank=0 ranks=2 schemes=ulysses",
            "one rank of 'ulysses' computes by itself is not known; use ring, all_gather",
        ),
        ("part=0/2", "part = '0/2' is of the cases of a plan"),
        ("plan=ranks part=2/2", "part = '2/2' must be NUMBER/COUNT"),
        ("outer=tree", "outer = 'tree' is unknown; use ring"),
        ("head_groups=-1", "head_groups = -1 must be at least 0"),
        ("rank=0 ranks=3 tokens=31", "must be a multiple of 6"),
        ("plan=everything", "'everything' is unknown; use one_gpu"),
    ],
)
def test_a_wrong_option_says_what_to_do(word, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sequence.main(word.split())


def test_plans_are_of_options_that_there_are():
    for plan in PLANS:
        for case in sequence.cases({**sequence.OPTIONS, "plan": plan}):
            assert case.keys() == sequence.OPTIONS.keys()
            sequence.check(case)
            calls.segment_ids(case["documents"], 4096)


def test_no_case_is_begun_after_the_budget(tmp_path, monkeypatch):
    times = iter([0.0, 1.0, 3.0, 3.0, 3.0])
    monkeypatch.setattr(sequence.time, "perf_counter", lambda: next(times))
    cases = [{"rank": "all", "ranks": 2, "tokens": "32"}] * 3
    monkeypatch.setitem(PLANS, "mine", cases)
    sequence.main(["plan=mine", "budget=2", f"out={tmp_path}/out.json"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["rows"]) == len(NAMES) and len(found["left_out"]) == 2


# -- traces ------------------------------------------------------------------------------------------------------------


def kernel(name, start, end, module="jit_hop"):
    return timing.Kernel("/device:GPU:0", name, start, end, "", module)


def test_calls_in_a_trace_are_told_apart():
    mark = "jit__between_calls"
    kernels = [
        kernel("wrapped_atan2", 0, 1),
        kernel("m", 1, 2, mark),
        kernel("a", 2, 5),
        kernel("b", 4, 6),
        kernel("m", 8, 9, mark),
    ]
    kernels += [kernel("a", 10, 11), timing.Kernel("/device:GPU:1", "a", 0, 99, "", "jit_hop")]
    assert timing.seconds_between(kernels, 2) == [pytest.approx(4e-9), pytest.approx(1e-9)]
    with pytest.raises(RuntimeError, match="shows 2 calls, 2 with kernels, and not 3"):
        timing.seconds_between(kernels, 3)
    with pytest.raises(RuntimeError, match="1 with kernels"):
        timing.seconds_between(kernels[:5], 2)


# A trace as the profiler writes it of a GPU: two streams of one device, and a line of the host that holds no kernel.
TRACE = """
planes { name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "flash_kernel" } } event_metadata { key: 2 value { id: 2 name: "ncclSendRecv" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  lines { id: 1 name: "Stream #13(Compute)" timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 0 duration_ps: 10000 stats { metadata_id: 1 str_value: "attend.1" }
             stats { metadata_id: 2 str_value: "jit_step" } } }
  lines { id: 2 name: "Stream #20(NCCL)" timestamp_ns: 100
    events { metadata_id: 2 offset_ps: 5000 duration_ps: 25000
             stats { metadata_id: 1 str_value: "collective-permute-start.1" } }
    events { metadata_id: 2 offset_ps: 40000 duration_ps: 10000 stats { metadata_id: 1 str_value: "all-gather-start.1" } }
    events { metadata_id: 2 offset_ps: 45000 duration_ps: 15000
             stats { metadata_id: 1 str_value: "collective-permute-start.2" } } }
}
planes { name: "/host:CPU" event_metadata { key: 1 value { id: 1 name: "python" } }
  lines { id: 1 name: "Stream" events { metadata_id: 1 offset_ps: 0 duration_ps: 900000 } } }
"""
PROGRAM = """
ENTRY %main (a: f32[4]) -> f32[4] {
  %attend.1 = f32[4]{0} custom-call(%a), metadata={op_name="jit(step)/layers/while/body/attention/hop/mul"}
  %collective-permute-start.1 = f32[4]{0} collective-permute-start(%a), metadata={op_name="jit(step)/jvp(layers)/while/body/\
attention/exchange/ppermute"}
  %collective-permute-start.2 = f32[4]{0} collective-permute-start(%a), metadata={op_name="jit(step)/transpose(jvp(layers))/\
while/body/checkpoint/attention/exchange/ppermute"}
  %all-gather-start.1 = f32[4]{0} all-gather-start(%a), metadata={op_name="jit(step)/all_gather"}
}
""".replace("\\\n", "")


def test_exposed_time_is_of_the_scope_whose_collective_it_is(tmp_path):
    """From a trace file, synthetic: no GPU is here. What two collectives cover counts once, for the longer."""
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(TRACE))
    kernels = timing.kernels_in(str(path))
    assert (kernels[0].name, kernels[0].hlo_op, kernels[0].module) == ("flash_kernel", "attend.1", "jit_step")
    assert len(kernels) == 4 and {k.device for k in kernels} == {"/device:GPU:0"}
    found = step.summary(kernels, PROGRAM, steps=1, top=3)
    by_scope = {name: (round(x["of_ms"] * 1e6), round(x["ms"] * 1e6)) for name, x in found["exposed_by_scope"].items()}
    assert by_scope == {
        "layers/attention/exchange": (25, 20),  # 5 of it beside a kernel
        "layers/attention/exchange, backward": (15, 15),
        "all_gather": (10, 5),  # 5 of it beside the other
    }
    assert round(found["exposed_collectives"]["ms"] * 1e6) == 40
    shown = step.text_of(found | {
        "parameters": 1, "devices": 1, "device": "x", "mesh": {}, "step_ms": 1.0, "tokens_per_second": 1, "tflops_causal": 1,
        "mfu_causal": None, "arguments_gib": 0, "temporaries_gib": 0, "peak_gib": 0, "compile_seconds": 0, "losses": [1, 1],
    })  # fmt: skip
    assert "| layers/attention/exchange, backward | 0.00 | 0.00 | 25.0% |" in shown


def test_what_a_part_cannot_do_hides_nothing_that_another_can():
    """The whole row may have no room on a device beside a rank whose times are there."""

    def refuses():
        raise ValueError("no room")

    rows = Rows(lambda text: None)
    assert rows.add("rank", "whole", lambda: (lambda: 0, (), {"kind": "rank"})) and not rows.add("rank", "row", refuses)
    assert not rows.add("other", "whole", refuses)
    assert rows.rows["rank"] == {"kind": "rank", "row_refused": "row: ValueError: no room"}
    assert rows.rows["other"] == {"refused": "whole: ValueError: no room"}
