"""The plan command: what it says, and a training step compiled ahead of time by the real TPU compiler."""

import copy
import json
import math
import re
import shlex

import pytest

from ejdist.cluster.bandwidth import measure
from ejdist.mesh import AXES, make_mesh
from ejdist.planning.chips import CHIPS
from ejdist.planning.compiled import Compiled, collectives_of
from ejdist.planning.measured import COLLECTIVES, read
from ejdist.planning.step_time import EXPOSED, KEYS
from ejdist.planning.targets import NoCompiler
from ejdist.sequence.scheme import WAITED
from ejdist.training.curriculum import stages_of
from launch.plan import main
from recipes.schema import compose

SMALL = [
    "recipe=long_context",
    "model.num_layers=2",
    "model.model_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
]
SMALL += ["model.head_dim=128", "model.ffn_dim=512", "data.sequence_length=1024", "data.global_batch=2"]


@pytest.mark.slow  # the TPU compiler, 15 s
def test_a_step_on_four_chips(capsys):
    """Parameters are stored over fsdp and sp: gathered where they are used, their gradients scattered; keys travel over sp.
    A mesh that uses all chips leaves nothing to search. The TPU compiler takes a third of the time for rows so short."""
    keys = [*SMALL, "data.sequence_length=256", "mesh.fsdp=2", "mesh.sp=2"]
    assert main(["topology=v5p:2x2x1", *keys, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["mesh"]["fsdp"] == made["mesh"]["sp"] == 2 and made["parameters"] > 1e6
    assert 0 < made["arguments"] < made["peak"] < 2**30 and made["temporaries"] > 0
    calls = made["collectives"]
    assert {"all-gather", "reduce-scatter", "collective-permute"} <= set(calls), calls
    # What was predicted: the state to the padding of the compiler, and the whole where small things weigh more.
    assert not made["searched"] and made["fits"] and made["overrides"] == ""
    expected = made["plan"]["predicted"]
    state = sum(expected["bytes_of"][n] for n in ("parameters", "optimizer moments", "batch"))
    assert made["arguments"] == pytest.approx(state, rel=0.02)
    assert made["peak"] == pytest.approx(expected["bytes"], rel=0.35)


@pytest.mark.slow  # half a minute of the TPU compiler
def test_microbatches_are_summed_where_parameters_lie(capsys):
    """Left alone the compiler sums whole gradients, and of this program ends in a RET_CHECK of its own (libtpu 0.0.51)."""
    shape = ["num_layers=1", "model_dim=512", "ffn_dim=1024", "vocab_size=1024", "num_heads=4", "num_kv_heads=2"]
    data = ["data.sequence_length=512", "data.global_batch=8", "accumulation=2"]
    keys = ["recipe=long_context", "model=8b", *(f"model.{k}" for k in shape), *data, "mesh.fsdp=4", "mesh.sp=1"]
    assert main(["topology=v5p:2x2x1", *keys, "search=false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["collectives"].get("reduce-scatter", 0) > 0


@pytest.fixture
def compiler(monkeypatch):
    """A stand-in for the compiler; `peak` is what it says of every step, and `asked` what it was asked."""

    class Stand:
        peak, asked = 2**30, []

        def __call__(self, sections, target):
            self.asked.append(sections)
            return Compiled({"sp": 8}, 1_000_000, 2**29, 2**28, self.peak, {"all-gather": 2}, 1.0, ["a choice"])

    stand = Stand()
    stand.asked = []
    monkeypatch.setattr("ejdist.planning.compiled.compiled_step", stand)
    return stand


LARGE = ["recipe=long_context", "model=8b", "data.sequence_length=131072", "data.global_batch=8"]
PINNED = [*LARGE, "mesh.fsdp=8", "mesh.sp=8"]  # where nothing is asked of the search


def test_what_it_says_of_a_recipe_as_it_is(compiler, capsys):
    compiler.peak = 5 << 30
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.fsdp=8", "mesh.sp=8"]) == 0
    said = capsys.readouterr().out
    assert len(compiler.asked) == 1 and compiler.asked[0].model.remat == "attention"
    assert "v5p:4x4x4: the recipe as it is" in said and "5.00 GiB of 95 GiB: fits" in said and "2 all-gather" in said
    assert "1,000,000 parameters" in said and "a choice" in said and "optimizer moments" in said and "MFU" in said
    assert "the plan:" not in said


def test_a_step_that_does_not_fit_says_so_and_what_would(compiler, capsys):
    compiler.peak = 97 << 30
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.fsdp=8", "mesh.sp=8"]) == 1
    said = capsys.readouterr().out
    assert "97.00 GiB of 95 GiB: DOES NOT FIT" in said
    (line,) = re.findall(r"would fit, with fewer tokens (\(.*\)): data.sequence_length=65536", said)
    size, rate, times = re.fullmatch(r"\(predicted ([\d.]+) GiB, ([\d,]+) tokens/s, \+(\d+\.\d)%\)", line).groups()
    own = float(re.search(r"step time, predicted: .* s, ([\d,]+) tokens/s", said)[1].replace(",", ""))
    assert float(size) < 95 and float(rate.replace(",", "")) / own - 1 == pytest.approx(float(times) / 100, abs=1e-3)
    assert float(times) > 1


def test_a_plan_is_searched_and_given_keys_stay(compiler, capsys):
    mixture = "data.mixture=[{source: the web, weight: 1.0}]"
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.sp=8", "model.remat=full", mixture]) == 0
    out = capsys.readouterr()
    assert (
        "plan 1 of at most 3: mesh.dp=" in out.err and "compiling for v5p:4x4x4" in out.err and len(compiler.asked) == 1
    )
    asked = compiler.asked[0]
    assert (asked.mesh.sp, asked.model.remat, asked.data.global_batch) == (8, "full", 8)
    again = compose(shlex.split(out.out.splitlines()[-1].split("python -m launch.train ")[1]))
    assert (
        again.data.mixture == asked.data.mixture
        and again.mesh == asked.mesh
        and again.accumulation == asked.accumulation
    )
    assert "given: data.global_batch, mesh.sp, model.remat" in out.out and "next: " in out.out


def test_what_the_recipe_has_is_compiled_with_search_false(compiler, capsys):
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.fsdp=8", "mesh.sp=-1", "search=false", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert not made["searched"] and compiler.asked[0].mesh.sp == 8


def test_a_search_beside_a_given_mesh(compiler, capsys):
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.fsdp=8", "mesh.sp=8", "search=true"]) == 0
    assert "model.remat=" in capsys.readouterr().out and compiler.asked[0].mesh.sp == 8


@pytest.mark.slow
def test_gpus_that_cannot_be_compiled_for_are_estimated(monkeypatch, capsys):
    def absent(sections, target):
        raise NoCompiler("there is no plugin")

    monkeypatch.setattr("ejdist.planning.compiled.compiled_step", absent)
    assert main(["devices=64", "device=h200", *PINNED]) == 0
    said = capsys.readouterr().out
    assert "predicted and not compiled" in said
    assert "nothing was compiled, and memory is an estimate: there is no plugin" in said


@pytest.mark.slow
def test_nothing_is_compiled_where_no_finalist_is_asked_for(compiler, capsys):
    assert main(["devices=64", "device=h200", *PINNED, "finalists=0"]) == 0
    assert not compiler.asked and "predicted and not compiled" in capsys.readouterr().out


def test_packed_rows_are_planned_by_their_documents(compiler, capsys):
    words = ["devices=64", "device=h200", *LARGE, "mesh.sp=8", "mesh.fsdp=8", "finalists=0", "search=false"]
    assert main([*words, "sequence.order=zigzag", "documents=1024"]) == 0
    said = capsys.readouterr().out
    assert "attention of the busiest device of a sequence over the mean, with rows of documents = 1024: " in said
    assert main([*words, "documents=1024", "--json"]) == 0
    balanced = json.loads(capsys.readouterr().out)
    assert balanced["documents"] == "1024" and balanced["plan"]["chosen"]["sequence.order"] == "contiguous"
    # Documents reach few other ranks there: a ring sends less, which is more than it waits for its busiest device.
    assert main([*words, "documents=1024", "sequence.order=balanced", "--json"]) == 0
    even = json.loads(capsys.readouterr().out)["plan"]["predicted"]
    assert even["uneven"] < 1.05 < balanced["plan"]["predicted"]["uneven"]
    assert sum(even["seconds_of"].values()) > sum(balanced["plan"]["predicted"]["seconds_of"].values())


@pytest.mark.slow
def test_other_errors_of_a_compiler_are_no_estimates(monkeypatch):
    """A fault of the program is not taken for a compiler that is not there."""

    def broken(sections, target):
        raise RuntimeError("a fault")

    monkeypatch.setattr("ejdist.planning.compiled.compiled_step", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["devices=64", "device=h200", *PINNED])


# -- bandwidth that was measured --------------------------------------------------------------------------------------


@pytest.fixture
def bandwidth(tmp_path):
    """Returns a function: axis -> devices of the mesh that is measured, and changes -> the file."""

    def write(sizes, kind="NVIDIA H200", crosses=None, change=lambda found: None, seconds=lambda n: 1e-4 + n / 50e9):
        mesh = {axis: sizes.get(axis, 1) for axis in AXES}
        rows = [
            {"collective": name, "message_bytes": 2 * n, "bytes": n, "seconds": seconds(n), "bytes_per_second": 0}
            for name in COLLECTIVES
            for n in (2**20, 2**24, 2**27)
        ]
        axes = {}
        for i, (axis, n) in enumerate(mesh.items()):
            span = math.prod(list(mesh.values())[i:])
            over = crosses or ("devices" if span <= 8 else "hosts")
            if n > 1:
                axes[axis] = {"size": n, "crosses": over, "measured": copy.deepcopy(rows)}
        found = {"device_kind": kind, "mesh": mesh, "axes": axes, "at": "2026-01-01T00:00:00Z"}
        change(found)
        file = tmp_path / "bandwidth.json"
        file.write_text(json.dumps(found))
        return file

    return write


H200S = ["devices=64", "device=h200", *LARGE, "mesh.fsdp=8", "mesh.sp=8", "finalists=0"]


def planned(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_was_measured_takes_the_place_of_the_data_sheet(bandwidth, capsys):
    words = [*H200S, "sequence.scheme=ring"]
    plain = planned(capsys, *words)
    file = bandwidth({"fsdp": 8, "sp": 8})
    made = planned(capsys, *words, f"bandwidth={file}")
    assert not any(link["measured"] for link in plain["links"].values())
    assert {a: link["measured"] for a, link in made["links"].items()} == {"fsdp": True, "sp": True}
    # Half of the time of every message, by hand: keys travel in 7 of 8 hops, forward and backward, and their gradients.
    sent, keys = plain["plan"]["predicted"]["bytes_sent_along"], ("collectives, exposed", KEYS)
    assert sent == made["plan"]["predicted"]["bytes_sent_along"]
    seconds, longest = made["plan"]["predicted"]["seconds_of"], sum(sent.values()) / 50e9
    took = sum(seconds[key] for key in keys)
    assert (
        WAITED[True] * longest < took < 1.2 * EXPOSED * longest
        and WAITED[True] * sent["sp"] / 50e9 > 0.9 * seconds[KEYS]
    )
    slow = bandwidth({"fsdp": 8, "sp": 8}, seconds=lambda n: 2 * (1e-4 + n / 50e9))
    again = planned(capsys, *words, f"bandwidth={slow}")["plan"]["predicted"]["seconds_of"]
    assert sum(again[key] for key in keys) == pytest.approx(2 * took)


def test_a_file_from_before_there_was_an_axis_is_read(bandwidth, capsys):
    file = bandwidth({"fsdp": 8, "sp": 8}, change=lambda found: found["mesh"].pop("cp"))
    made = planned(capsys, *H200S, f"bandwidth={file}")
    assert {a: link["measured"] for a, link in made["links"].items()} == {"fsdp": True, "sp": True}


def test_what_was_not_measured_is_said_to_be_assumed(bandwidth, capsys):
    assert main([*H200S, f"bandwidth={bandwidth({'sp': 8})}"]) == 0
    said = capsys.readouterr().out
    assert "speed of sp: measured over 8 devices" in said
    assert "speed of fsdp: assumed: data sheet (400 Gbit/s per device), as nothing was measured between hosts" in said
    assert main([*H200S, f"bandwidth={bandwidth({'sp': 4})}"]) == 0
    assert "speed of sp: assumed: as measured along sp, over 4 devices" in capsys.readouterr().out
    # Where processes are a device each, whether they share a host is not in the file.
    assert main([*H200S, f"bandwidth={bandwidth({'sp': 8}, crosses='hosts')}"]) == 0
    assert "its processes are taken for ones of a host of 8" in capsys.readouterr().out
    assert main(H200S) == 0
    assert re.search(r"speed of sp: assumed: [\d,]+ Gbit/s per device, measured elsewhere\n", capsys.readouterr().out)
    # A host of eight was measured, and half of one is planned for.
    few = ["devices=4", "device=h200", *SMALL, "mesh.sp=4", "finalists=0"]
    assert main([*few, f"bandwidth={bandwidth({'sp': 8})}"]) == 0
    assert "speed of sp: assumed: as measured along sp, over 8 devices" in capsys.readouterr().out
    # All chips of a TPU slice are linked, whichever hosts they are of.
    file = bandwidth({"sp": 4}, kind="TPU v5", crosses="hosts")
    assert main(["topology=v5p:2x2x1", *SMALL, "mesh.sp=4", "finalists=0", f"bandwidth={file}"]) == 0
    said = capsys.readouterr().out
    assert "speed of sp: measured over 4 devices" in said and "are taken for ones of a host" not in said


def _first(found):
    return found["axes"]["sp"]["measured"][0]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"kind": "NVIDIA H100 80GB HBM3"}, "was measured on NVIDIA H100 80GB HBM3, but the plan is for NVIDIA H200"),
        ({"kind": "cpu"}, "was measured on cpu"),
        ({"change": lambda f: f["axes"].clear()}, "axes.sp is missing"),
        ({"change": lambda f: f.pop("mesh")}, "mesh is missing"),
        ({"change": lambda f: f["mesh"].update(sp=3)}, "axes.sp has size 8"),
        ({"change": lambda f: f["mesh"].pop("dp")}, "must have the devices along dp"),
        ({"change": lambda f: f["axes"].update(sp=[])}, "axes.sp.size is missing"),
        ({"change": lambda f: _first(f).update(seconds=0)}, "axes.sp.measured[0] has 1048576 bytes in 0 s"),
        ({"change": lambda f: _first(f).update(seconds=math.nan)}, "bytes in nan s"),
        ({"change": lambda f: _first(f).update(bytes=True)}, "axes.sp.measured[0].bytes is True"),
        ({"change": lambda f: _first(f).update(bytes=2**24)}, "a size twice of all_gather"),
        ({"change": lambda f: f["axes"]["sp"]["measured"].__delitem__(slice(3))}, "axes.sp has no all_gather"),
        ({"sizes": {}}, "was measured on one device"),
        ({"sizes": {"sp": 16}, "crosses": "devices"}, "devices_per_host = 8; give the hosts' real size"),
    ],
)
def test_files_of_bandwidths_that_are_refused(made, words, bandwidth):
    file = bandwidth(**({"sizes": {"sp": 8}} | made))
    with pytest.raises(ValueError) as error:
        read(file, CHIPS["h200"], 8)
    said = str(error.value)
    assert words in said and str(file) in said and "\n" not in said


def test_a_file_that_is_no_json_or_is_not_there(tmp_path, capsys):
    (tmp_path / "half.json").write_text('{"device_kind": "NVIDIA H200", "mesh"')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.json").write_text("[" * 100000)
    for name, words in (
        ("deep.json", "is damaged: it is not JSON"),
        ("half.json", "is damaged: it is not JSON"),
        ("bytes.json", "not JSON"),
        ("no.json", "cannot be read: No such file"),
    ):
        assert main(["devices=8", "device=h200", *SMALL, f"bandwidth={tmp_path / name}"]) == 2
        said = capsys.readouterr().err
        assert words in said and name in said and "bandwidth = " in said and said.count("\n") == 1


def test_what_the_doctor_writes_can_be_read(monkeypatch, tmp_path):
    monkeypatch.setattr("ejdist.cluster.bandwidth._seconds", lambda run, given, calls, rounds: given.nbytes / 1e9)
    found = json.loads(json.dumps(measure(make_mesh(dp=2, sp=4), [4096, 8192])))
    (tmp_path / "b.json").write_text(json.dumps(found | {"device_kind": "NVIDIA H200"}))
    made = read(tmp_path / "b.json", CHIPS["h200"], 8)
    assert made.mesh == {"dp": 2, "fsdp": 1, "ep": 1, "cp": 1, "sp": 4, "tp": 1} and set(made.axes) == {"dp", "sp"}
    assert len(made.axes["sp"].points["permute"]) == 2 and made.axes["dp"].size == 2


# -- slices of TPUs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_dp_goes_between_slices(compiler, capsys):
    compiler.peak = 9 << 30
    assert main(["topology=v5p:4x4x4", "slices=2", *LARGE, "mesh.sp=8"]) == 0
    said = capsys.readouterr().out
    asked = compiler.asked[0]
    assert asked.mesh.dp % 2 == 0 and math.prod(asked.mesh.sizes.values()) == 128
    assert (
        "2 slices of v5p:4x4x4: considered" in said and "and between slices, over the data-centre network: 0." in said
    )
    assert "speed of network: assumed: data sheet (50 Gbit/s per device)" in said


def test_bytes_between_slices_are_those_of_sums_that_were_made_inside(capsys):
    """dp=4 over two slices: two replicas of a slice add up first, and each sends half of the sum to the other slice."""
    words = [*LARGE[:-1], "data.global_batch=16", "mesh.dp=4", "mesh.fsdp=4", "mesh.sp=8", "finalists=0"]
    made = planned(capsys, "topology=v5p:4x4x4", "slices=2", *words)
    sent = made["plan"]["predicted"]["bytes_sent_along"]
    local = made["plan"]["predicted"]["bytes_of"]["parameters"] / 4 * 2  # of the gradients, in bfloat16
    assert sent["network"] == pytest.approx(local / 2, rel=0.15) and sent["dp"] == pytest.approx(local, rel=0.15)
    one = planned(capsys, "topology=v5p:4x8x4", *words)["plan"]["predicted"]
    assert "network" not in one["bytes_sent_along"] and one["bytes_sent_along"]["dp"] > sent["dp"]
    assert made["plan"]["predicted"]["step_seconds"] > one["step_seconds"]


def test_a_measured_network_is_taken_for_slices(bandwidth, capsys):
    file = bandwidth({"dp": 2, "fsdp": 4}, kind="TPU v5p", change=lambda f: f["axes"]["dp"].update(crosses="slices"))
    words = ["topology=v5p:2x2x1", "slices=2", *SMALL, "mesh.dp=2", "mesh.fsdp=4", "data.global_batch=8", "finalists=0"]
    words.remove("data.global_batch=2")
    made = planned(capsys, *words, f"bandwidth={file}")["links"]
    assert {axis: link["measured"] for axis, link in made.items()} == {"network": True, "fsdp": True}


def test_slices_that_the_compiler_does_not_know_are_predicted(monkeypatch, capsys):
    from ejdist.planning import targets

    def one(name, slices=1):
        if slices > 1:
            raise ValueError("not so many")
        return real(name)

    real = targets.tpu_topology
    monkeypatch.setattr(targets, "tpu_topology", one)
    words = [*SMALL, "mesh.dp=2", "mesh.fsdp=4", "data.global_batch=8"]
    words.remove("data.global_batch=2")
    assert main(["topology=v5p:2x2x1", "slices=2", *words]) == 0
    said = capsys.readouterr().out
    assert "memory is an estimate: the compiler supports v5p:2x2x1, but not 2 slices of it" in said


@pytest.mark.slow  # a minute of the TPU compiler
def test_a_step_over_two_slices_is_compiled(capsys):
    words = [*SMALL, "mesh.dp=2", "mesh.fsdp=2", "mesh.sp=2", "data.global_batch=4"]
    words.remove("data.global_batch=2")
    made = planned(capsys, "topology=v5p:2x2x1", "slices=2", *words)
    assert made["compiled"] and made["mesh"]["dp"] == 2 and made["collectives"].get("all-reduce", 0) > 0


# -- a curriculum -----------------------------------------------------------------------------------------------------


def test_each_stage_of_a_curriculum_is_planned(compiler, capsys):
    """And what is pasted is the curriculum with what was found, which composes to those stages."""
    assert main(["devices=8", "device=h200", "recipe=length_curriculum"]) == 0
    said = capsys.readouterr().out
    lengths = [s.data.sequence_length for s in compiler.asked]
    assert lengths == [512, 1024, 2048] and [s.model.rope_scaling for s in compiler.asked] == [None, "ntk", "ntk"]
    assert all(f"stage {n}, steps " in said for n in (1, 2, 3)) and said.count("experts.dispatch, sequence.order") == 3
    again = stages_of(compose(shlex.split(said.splitlines()[-1])[3:]))
    for stage, asked in zip(again, compiler.asked, strict=True):
        assert stage.sections.mesh.sizes == asked.mesh.sizes and stage.sections.model == asked.model
        assert stage.sections.data == asked.data and stage.sections.accumulation == asked.accumulation


def test_stages_of_the_command_line_stay(compiler, capsys):
    first = "{until: 3, sequence_length: 1024, global_batch: 8, mesh: {fsdp: 8}, remat: full}"
    words = ["devices=8", "device=h200", *SMALL, "run.steps=6", f"+curriculum=[{first}, {{}}]", "--json"]
    made = main(words), json.loads(capsys.readouterr().out)
    stages = made[1]["stages"]
    assert made[0] == 0 and [s["searched"] for s in stages] == [False, True] and made[1]["fits"]
    assert compiler.asked[0].mesh.fsdp == 8 and compiler.asked[0].model.remat == "full"
    again = stages_of(compose([*words[2:-2], *shlex.split(made[1]["overrides"])]))
    assert [s.sections.mesh.sizes for s in again] == [s.mesh.sizes for s in compiler.asked] and "remat: full" in made[
        1
    ]["overrides"]
    # An axis of the command line stays in every stage that has no mesh of its own.
    first = "{until: 3, sequence_length: 1024}"
    assert main([*words[:-2], "mesh.sp=2", f"curriculum=[{first}, {{}}]", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    # Every stage has a mesh of its own now, and mesh.sp would be refused beside them.
    assert made["kept"] == words[2:-2]
    again = stages_of(compose([*made["kept"], *shlex.split(made["overrides"])]))
    assert [s.sections.mesh.sp for s in again] == [2, 2] and math.prod(again[0].sections.mesh.sizes.values()) == 8


@pytest.mark.slow
def test_a_stage_that_is_wrong_or_does_not_fit_is_named(compiler, capsys):
    bad = "{until: 3, sequence_length: 1023, mesh: {sp: 8}}"
    words = ["devices=8", "device=h200", *SMALL, "run.steps=6", "finalists=0"]
    assert main([*words, f"curriculum=[{bad}, {{}}]"]) == 2
    said = capsys.readouterr().err
    assert "error: stage 1 of the curriculum: " in said and "1023" in said
    assert main([*words, "curriculum=[{until: 9}, {}]"]) == 2 and "curriculum[0]" in capsys.readouterr().err
    large = "{until: 3, sequence_length: 8388608, global_batch: 256, mesh: {fsdp: 8}}"
    assert main([*words, f"curriculum=[{large}, {{}}]"]) == 1
    assert "the curriculum does not fit: stage 1" in capsys.readouterr().out


@pytest.mark.slow  # a minute of XLA's compiler for GPUs
def test_a_gpu_that_is_not_there_is_compiled_for(capsys):
    """The very bytes that a real H200's compiler took, which are in the benchmark's results."""
    from benchmarks.plan import STEPS

    found = json.loads((STEPS / "1b_8k_h200.json").read_text())
    assert main(["devices=1", "device=h200", *found["recipe"], "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["compiled"], made["notes"]
    assert made["arguments"] / 2**30 == pytest.approx(found["arguments_gib"], rel=1e-3)
    assert made["temporaries"] / 2**30 == pytest.approx(found["temporaries_gib"], rel=0.05)


@pytest.mark.slow  # a second minute of the TPU compiler, for what the step on four chips shows of another mesh
def test_what_it_says_of_eight_chips(capsys):
    assert main(["topology=v5e:2x4", *SMALL, "mesh.sp=4", "mesh.tp=2", "sequence.scheme=all_gather"]) == 0
    said = capsys.readouterr().out
    assert "mesh {'sp': 4, 'tp': 2}" in said and "GiB of 16 GiB: fits" in said and "collective" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which devices is the plan for? Give device=v5p-128"),
        (["topology=v5p"], "topology = 'v5p' has no size: name the slice, for example device=v5p-128"),
        (["topology=v9:2x2"], "v9:2x2"),
        (["topology=v5p:2x2x1", "mesh.sp=8"], "8"),
        (["topology=v5p:2x2x1", "mesh.sp=2", "search=false", "finalists=0"], "2 devices, and v5p:2x2x1 has 4"),
        (["topology=v5p:2x2x1", "mesh.sp=3"], "4 devices are not divisible by 3"),
        (["topology=v5p:2x2x1", "devices=4", "device=h200"], "not both"),
        (["devices=four", "device=h200"], "devices must be a number"),
        (["devices=\u00b2", "device=h200"], "devices must be a number"),
        (["topology=", "devices=4", "device=h200"], "topology= must name a slice"),
        (["devices=8", "device=h200", "recipe=moe", "experts.axes=[foo]"], "experts.axes = ['foo'] must be"),
        (["devices=8", "device=h200", "recipe=moe", "experts.buffer=nan"], "experts.buffer must be a number above 0"),
        (["devices=8", "device=h200", "recipe=moe", "experts.capacity=0"], "experts.capacity must be a number above 0"),
        (["topology=v5p:2x2x1", "topology=v5p:4x4x4"], "topology is given twice"),
        (["--config-dir", "device", "topology=v5p:2x2x1"], "--config-dir device"),
        (
            ["devices=8", "device=h200", "compile=false"],
            "finalists=0 of launch.plan predicts a plan and compiles nothing",
        ),
        (["topolgy=v5p:2x2x1"], "unknown key 'topolgy'; did you mean 'topology'?"),
        (["topology=v5p:2x2x1", "search=yes"], "search must be auto, true or false"),
        (["topology=v5p:3x3x3"], "'v5p:3x3x3' is not available"),
        (["topology=v5p:4x4"], "a slice of v5p has 3 dims, for example v5p:4x4x4"),
        (["topology=v5p:64x64x64"], "at most"),
        (["devices=8", "device=h200", "bandwidth="], "bandwidth= must name a file"),
        (["devices=8", "device=h200", "documents="], "documents= must name one, a mean length"),
        (
            ["devices=8", "device=h200", "documents=none.txt"],
            "use a mean length, 'one', or a file with one length per line",
        ),
        (["topology=v5p:2x2x1", "slices=2", "mesh.dp=1"], "mesh.dp = 1 must be a multiple of 2"),
        (
            ["devices=8", "device=h200", "recipe=moe", "mesh.ep=8", "experts.dispatch=local"],
            "experts.dispatch = 'local'",
        ),
        (
            [
                "devices=4",
                "device=h200",
                "model=hybrid_nano",
                "model.num_layers=4",
                "mesh.sp=4",
                "sequence.order=balanced",
            ],
            "sequence.order = 'balanced' is another one for each row, and layers with gated_delta have no form for it",
        ),
        (["topology=v5p:2x2x1", "slices=0"], "slices must be a number from 1 on"),
        (["topology=v5p:2x2x1", "slices=2", "mesh.fsdp=8"], "only mesh.dp crosses the network"),
        (["devices=8", "device=h200", "slices=2"], "slices= is for TPUs"),
        (["devices=0", "device=h200"], "devices must be a number from 1 on"),
        (["devices=8", "device=foo"], "device = 'foo' is unknown; use one of a100, a100-40gb, h100"),
        (["devices=8", "device=h200", "data.sequence_length=0"], "data.sequence_length must be at least 2, got 0"),
        (["devices=8", "device=h200", "mesh.sp=0"], "mesh.sp must be a positive number"),
        (["devices=8", "device=h200", "optimizer.schedule=foo"], "optimizer.schedule = 'foo' is unknown"),
        (
            ["devices=8", "device=h200", "accumulation=3"],
            "data.global_batch = 2 must be a multiple of accumulation = 3",
        ),
        (["devices=8", "device=h200", "sequence.scheme=foo"], "sequence.scheme = 'foo' is unknown"),
        (["topology=v5p:2x2x1", "mesh.sp=4", "model.num_hedas=4"], "model.num_heads"),
    ],
)
def test_what_it_refuses(arguments, words, capsys):
    assert main([*SMALL, *arguments]) == 2
    message = capsys.readouterr().err
    assert "error: " in message and words in message and "Traceback" not in message


def test_collectives_are_counted_by_what_they_are():
    text = """
%all-reduce-scatter.1 (a: f32[8]) -> f32[4] {
  %x = f32[8]{0} all-reduce(%a), to_apply=%add
}
ENTRY %main {
  %y = (f32[8], f32[8]) all-gather-start(%b), dimensions={0}
  %z = f32[8] all-gather-done(%y)
  ROOT %w = f32[] all-reduce(%z), to_apply=%add
}
"""
    assert collectives_of(text) == {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 1}


@pytest.mark.slow
def test_eight_billion_parameters_and_131072_tokens_fit_a_slice_of_64_chips(capsys):
    sizes = ["model=8b", "data.sequence_length=131072", "data.global_batch=8", "mesh.fsdp=8", "mesh.sp=8"]
    assert main(["topology=v5p:4x4x4", "recipe=long_context", *sizes, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["parameters"] == 8_030_261_248 and made["peak"] < 40 * 2**30
