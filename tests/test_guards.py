"""Guards: bad numbers stop a run, are left out or gone past; replicas are compared; hosts that hang or are slow are named."""

import collections
import dataclasses
import json
import math
import random
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_run import TINY, losses

from ejdist.cluster import Hosts, ending, watchdog
from ejdist.mesh import make_mesh
from ejdist.models.model import Metric
from ejdist.training import step_timer, steps
from ejdist.training.goodput import NAME, Ledger, account, read
from ejdist.training.guards import LAG, SKIPPED_FILE, Finite, GuardsSection, Rewind, SkippedBatches, Watch
from ejdist.training.loop import train
from ejdist.training.metrics import read_rows
from ejdist.training.optimizer import OptimizerSection, make_optimizer
from ejdist.training.placing import place_limits
from ejdist.training.program import make_program
from ejdist.training.replicas import Replicas, ReplicasDiffer, different
from ejdist.training.step import init_state, make_train_step
from ejdist.training.stop import Diverged
from launch.errors import DIVERGED, REPLICAS, exit_code_of
from launch.train import main
from recipes.schema import compose

ONE = [*TINY, "mesh.sp=1", "model.num_layers=1", "run.steps=14", "checkpoint.every=4", "checkpoint.keep=9"]


def run(directory, corpus, *overrides):
    said = []
    outcome = train(compose([*ONE, *corpus, f"run.dir={directory}", *overrides]), log=said.append)
    return outcome, "\n".join(said)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nonfinite": "off"}, "guards.nonfinite = 'off' is unknown; use stop, skip, rewind"),
        ({"spike": "ignore"}, "guards.spike = 'ignore' is unknown; use off, stop, skip, rewind"),
        ({"spike_factor": 0.0}, "guards.spike_factor must be a positive number"),
        ({"spike_window": 3}, "guards.spike_window must be at least 4"),
        ({"most_skips": 0}, "guards.most_skips must be at least 1"),
        ({"most_rewinds": 0}, "guards.most_rewinds must be at least 1"),
        ({"replicas_every": -1}, "guards.replicas_every must be at least 0"),
        ({"stragglers_every": -1}, "guards.stragglers_every must be at least 0"),
        ({"hang_seconds": -1.0}, "guards.hang_seconds must be 0, for never"),
    ],
)
def test_a_wrong_section_names_the_key(change, words):
    with pytest.raises(ValueError, match=words):
        GuardsSection(**change).validate()


# -- the step ---------------------------------------------------------------------------------------------------------


def lowered(*overrides):
    recipe = compose([*TINY, "mesh.sp=1", "model.num_layers=1", *overrides])
    program = make_program(recipe, make_mesh(**vars(recipe.mesh)))
    return program.lower().as_text()


@pytest.mark.slow
def test_the_compiled_step_has_nothing_of_guards_that_need_nothing_of_it():
    plain = lowered()
    others = ["guards.nonfinite=rewind", "guards.spike=stop", "guards.replicas_every=3", "guards.hang_seconds=5"]
    assert lowered(*others) == plain
    assert lowered("guards.nonfinite=skip") != plain


@pytest.mark.slow
def test_limits_are_an_argument_of_the_step_and_not_in_the_batch():
    """And accumulation splits the batch alone."""
    recipe = compose([*TINY, "mesh.sp=1", "model.num_layers=1", "accumulation=2", "guards.spike=skip"])
    program = make_program(recipe, make_mesh(**vars(recipe.mesh)))
    assert set(program.batch) == {"tokens", "targets", "positions", "segment_ids"}
    assert program.limits.shape == (2,) and len(program.lower().in_avals[0]) == 3
    (limits,) = place_limits(np.array([3, 4], np.float32), program)
    assert limits.tolist() == [3, 4] and limits.sharding.is_fully_replicated
    plain = make_program(dataclasses.replace(recipe, guards=GuardsSection()), program.mesh)
    assert plain.limits is None and place_limits(limits, plain) == () and len(plain.lower().in_avals[0]) == 2


def step_of(*skip, schedule="constant"):
    """Returns a step on one vector of parameters and one buffer, and its first state; `batch` is its gradient."""
    section = OptimizerSection(learning_rate=0.1, schedule=schedule, warmup_steps=4, weight_decay=0.1)
    optimizer, rate = make_optimizer(section, 10, {"w": True})

    def loss(p, b, *, context):
        value = jnp.sum(p["w"] * b["tokens"])
        numbers = {"loss": Metric(value, "mean"), "tokens": Metric(jnp.float32(1)), "seen": Metric(value, "update")}
        return value, numbers

    def update(buffers, seen):
        return {"bias": buffers["bias"] + seen["seen"]}

    step = jax.jit(make_train_step(loss, optimizer, update=update, schedule=rate, skip=skip))
    return step, init_state({"w": jnp.arange(1.0, 5.0)}, optimizer, {"bias": jnp.float32(0)}), rate


def counts(state):
    """Returns (updates that Adam has counted, steps that the schedule has)."""
    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    found = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, kinds))
    adam, schedule = (next(int(x.count) for x in found if isinstance(x, kind)) for kind in kinds)
    return adam, schedule


INF = np.full(2, np.inf, np.float32)


@pytest.mark.parametrize(
    ("skip", "gradient", "limits"),
    [
        (("nonfinite",), [1, math.nan, 1, 1], None),
        (("nonfinite",), [1, math.inf, 1, 1], None),
        (("nonfinite",), [1, 1e25, 1, 1], None),  # the loss is a number, and the norm is not
        (("nonfinite", "spike"), [1, -math.inf, 1, 1], INF),
        (("spike",), [1, 1, 50, 1], np.array([10, np.inf], np.float32)),
        (("spike",), [1, 1, -50, 1], np.array([np.inf, 10], np.float32)),
    ],
)
def test_a_skipped_step_is_counted_and_changes_nothing_else(skip, gradient, limits):
    """Not the parameters, their moments, Adam's count of updates or the buffers: the next good step is as if it had not
    been; the schedule goes on, so that the learning rate is that of the step's number."""
    more = () if limits is None else (jnp.asarray(limits),)
    step, first, rate = step_of(*skip, schedule="warmup_cosine")
    good, bad = ({"tokens": jnp.asarray(g, jnp.float32)} for g in ([1, 2, 1, 0.5], gradient))
    state, one = step(first, good, *more)
    skipped, two = step(state, bad, *more)
    assert (int(one["skipped"]), int(two["skipped"])) == (0, 1) and int(skipped.step) == 2
    for part in ("params", "buffers"):
        assert jax.tree.map(np.array_equal, getattr(skipped, part), getattr(state, part)) in (
            {"w": True},
            {"bias": True},
        )
    moments = [[np.asarray(x) for x in jax.tree.leaves(s.opt_state) if x.ndim] for s in (state, skipped)]
    assert len(moments[0]) == 2 and all(map(np.array_equal, *moments))
    assert counts(state) == (1, 1) and counts(skipped) == (1, 2)
    after, three = step(skipped, good, *more)
    assert counts(after) == (2, 3) and float(three["learning_rate"]) == float(rate(2)) and int(three["skipped"]) == 0
    assert np.isfinite(after.params["w"]).all()


def test_a_step_without_a_bad_number_is_what_it_is_without_guards():
    (plain, first, _), (guarded, again, _) = step_of(), step_of("nonfinite")
    batch = {"tokens": jnp.asarray([1, 2, 3, 4], jnp.float32)}
    for _ in range(3):
        (first, a), (again, b) = plain(first, batch), guarded(again, batch)
        assert b.pop("skipped") == 0 and jax.tree.all(jax.tree.map(np.array_equal, (first, a), (again, b)))


def test_a_step_says_what_it_cannot_skip():
    with pytest.raises(ValueError, match="skip has 'late'; there are nonfinite and spike"):
        step_of("late")
    step, state, _ = step_of("spike")
    with pytest.raises(ValueError, match=r"takes limits, float32\[2\], after"):
        step(state, {"tokens": jnp.ones(4)})


# -- what is a spike --------------------------------------------------------------------------------------------------


class Number(float):
    def copy_to_host_async(self):
        pass


def numbers(loss, norm=1.0):
    return {"loss": Number(loss), "grad_norm": Number(norm)}


def watched(values, tmp_path, saves=(), first=0, kept=None, **section):
    """Returns the watch that has seen values, of steps after `first`, and the limits that each step had."""
    section = {"spike": "skip", "spike_window": 8, "most_skips": 50} | section
    watch, limits = Watch(GuardsSection(**section), tmp_path, None, kept), {}
    for step, value in enumerate(values, first + 1):
        limits[step] = watch.limits(step).tolist()
        watch.add(step, numbers(*value), wait=step in saves)
    return watch, limits


def some_values(count, seed=0):
    chance = random.Random(seed)
    return [(3 + chance.random(), 30.0 if i % 17 == 11 else 1 + 0.1 * chance.random()) for i in range(count)]


def test_limits_are_the_mean_and_deviations_of_good_steps_long_enough_ago(tmp_path):
    values = some_values(60)
    _, limits = watched(values, tmp_path, spike_factor=6.0)
    good = [(step, *value) for step, value in enumerate(values, 1) if value[1] < 30 or step < 24]
    assert all(limits[step] == [math.inf, math.inf] for step in range(1, 5 + LAG))
    for step in (30, 45, 60):
        last = [row for row in good if row[0] < step - LAG][-8:]
        for i in (1, 2):
            column = [row[i] for row in last]
            assert limits[step][i - 1] == pytest.approx(np.mean(column) + 6 * np.std(column), rel=1e-6)


@pytest.mark.parametrize("saves", [(20,), (13, 26, 39), range(1, 61)])
def test_limits_are_the_same_bits_whenever_the_run_saved_and_began_again(tmp_path, saves):
    values = some_values(60)
    _, whole = watched(values, tmp_path)
    watch, parts = watched(values[: saves[0]], tmp_path, saves)
    kept = json.loads(json.dumps(watch.to_json()))
    _, rest = watched(values[saves[0] :], tmp_path, saves, saves[0], kept)
    assert parts | rest == whole


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (3.0, math.inf), (90.0, 1.0), (3.0, 90.0)])
@pytest.mark.parametrize("action", ["stop", "rewind", "skip"])
def test_what_is_done_about_a_bad_step(tmp_path, bad, action):
    values = [*some_values(10), *some_values(10, 1), bad, *some_values(LAG - 1)]
    section = {"nonfinite": action, "spike": action}
    watch, _ = watched(values, tmp_path, **section)
    wanted = {"stop": Diverged, "rewind": Rewind}.get(action)
    if wanted is None:
        watch.add(29, numbers(3.0), wait=False)
        assert watch.to_json()["skips"] == 1
        watch.add(30, numbers(3.0), wait=False)
        assert watch.to_json()["skips"] == 0, "in a row"
        return
    with pytest.raises(wanted, match=r"step 21 has loss .* and gradient norm") as found:
        watch.add(29, numbers(3.0), wait=False)
    assert action != "rewind" or found.value.step == 21
    assert action != "stop" or "nothing was saved since" in str(found.value)


def test_too_many_skips_in_a_row_stop_the_run_also_over_a_restart(tmp_path):
    values = [(math.nan, math.nan)] * 3
    watch, _ = watched(values, tmp_path, saves=(3,), nonfinite="skip", most_skips=4)
    again, _ = watched(values[:1], tmp_path, (4,), 3, watch.to_json(), nonfinite="skip", most_skips=4)
    with pytest.raises(Diverged, match=r"5 updates in a row were skipped \(guards.most_skips\)") as found:
        again.add(5, numbers(math.nan), wait=True)
    assert exit_code_of(found.value) == DIVERGED


@pytest.mark.parametrize("action", ["stop", "skip", "rewind"])
def test_parameters_that_are_not_finite_are_not_saved(tmp_path, action):
    mesh = make_mesh(dp=2, fsdp=2, sp=1)
    params = {name: state_on(mesh) for name in ("first", "second")}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    watch = Watch(GuardsSection(nonfinite=action), tmp_path, Finite(like, mesh))
    watch.before_save(3, params)
    for name, value in (("split", math.nan), ("own", -math.inf)):  # of the last of several devices
        params["second"][name] = params["second"][name].at[3, 1].set(value)
    with pytest.raises(Rewind if action == "rewind" else Diverged) as found:
        watch.before_save(4, params)
    assert str(found.value).startswith("after step 4 second.own and 1 more parameters are not finite")
    if action != "rewind":
        assert exit_code_of(found.value) == DIVERGED and "guards.nonfinite=rewind to skip the data" in str(found.value)


@pytest.mark.slow
def test_a_run_does_not_end_well_with_parameters_that_are_none(corpus, tmp_path, capsys):
    """The loss and the gradient of its one step are finite, and the update is not."""
    bad = [
        *ONE,
        *corpus,
        f"run.dir={tmp_path}",
        "run.steps=1",
        "optimizer.learning_rate=3.3e38",
        "optimizer.weight_decay=2",
    ]
    assert main(bad) == DIVERGED
    assert "error: after step 1 " in (said := capsys.readouterr().err) and "not finite, and was not saved" in said
    assert not list(tmp_path.glob("checkpoints/*")) and math.isfinite(losses(tmp_path)[0])
    assert main([*bad, "guards.nonfinite=rewind", "guards.most_rewinds=2"]) == DIVERGED
    said = capsys.readouterr()
    assert (
        said.out.count("not finite: rewinding to step 0 and skipping batches") == 2
        and "guards.most_rewinds" in said.err
    )


# -- going back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_no_step_takes_a_batch_that_a_rewind_went_past(tmp_path, seed):
    """A run that is rewound and killed at random, as it would be with a list of the batches that each step took."""
    chance, skipped, gone, saved, step, taken = random.Random(seed), SkippedBatches(), set(), 0, 0, {}
    for _ in range(40):
        step += 1
        taken[step] = skipped.number(step)
        assert taken[step] not in gone and taken[step] > max((taken[s] for s in range(1, step)), default=-1)
        what = chance.random()
        if what < 0.2:
            saved = step
        elif what < 0.4:
            gone |= {taken[s] for s in range(saved + 1, step + 1)}
            skipped = skipped.after_rewind(step, saved)
            assert skipped.number(saved + 1) == taken[step] + 1
            skipped.write(tmp_path)
            step = saved
        elif what < 0.6:  # killed: what is known is the checkpoint and the folder
            skipped, step = SkippedBatches.read(tmp_path, skipped.until(saved), saved), saved
    assert SkippedBatches().number(7) == 6


def test_a_file_of_rewinds_that_is_none_is_named(tmp_path):
    (tmp_path / SKIPPED_FILE).write_text('{"rewinds": [[1')
    with pytest.raises(ValueError, match=f"{SKIPPED_FILE} cannot be read .* restore it, or remove it"):
        SkippedBatches.read(tmp_path, [], 0)
    assert SkippedBatches.read(tmp_path / "none", [[3, 2]], 4).rewinds == [[3, 2]]


@pytest.mark.parametrize("restored", [[8, 8], [8, 12], [12, 4], [8, 4, 4], [4, 12, 8]])
def test_rewinds_after_each_other_take_every_batch_once_and_leave_out_the_bad(restored, tmp_path):
    """To the same checkpoint, a later one, or an earlier one, where those after it were damaged. Whichever checkpoint a run
    goes on from knows of them all."""
    skipped, made = SkippedBatches(), {}
    for to in restored:
        bad = to + 3
        made |= {step: skipped.number(step) for step in range(1, bad + 1) if step not in made}
        last = skipped.number(bad)
        skipped = skipped.after_rewind(bad, to)
        made = {step: batch for step, batch in made.items() if step <= to}
        # From the checkpoint on, one batch after another, from the one after the bad step's.
        after = [skipped.number(step) for step in range(to + 1, to + 20)]
        assert after == list(range(last + 1, last + 20))
        assert {step: skipped.number(step) for step in made} == made, "what the checkpoint was made from"
    skipped.write(tmp_path)
    for step in range(20):
        assert SkippedBatches.read(tmp_path, skipped.until(step), step).rewinds == skipped.rewinds


@pytest.fixture
def poison(monkeypatch):
    """Returns a function that makes batches, by their numbers, turn the parameters into NaN."""
    make, place, state = steps.run_steps, steps.place_batch, {"bad": False, "taken": []}

    def of(data, wrong):
        def with_place(batch, program, first):
            number = next(i for i in range(60) if np.array_equal(data.batch(i)["tokens"], batch["tokens"]))
            state["taken"].append(number)
            state["bad"] = number in wrong
            return place(batch, program, first)

        def with_steps(run, train_step, *rest):
            def step(s, batch):
                spoilt = jax.tree.map(lambda x: x * math.nan, s.params) if state["bad"] else s.params
                return train_step(s._replace(params=spoilt), batch)

            return make(run, step, *rest)

        monkeypatch.setattr(steps, "place_batch", with_place)
        monkeypatch.setattr(steps, "run_steps", with_steps)
        return state["taken"]

    return of


@pytest.mark.slow
def test_a_rewind_goes_past_the_data_and_every_start_after_it_has_the_same_bits(corpus, tmp_path, poison):
    from ejdist.training.data import build

    recipe = compose([*ONE, *corpus])
    rewinds = "guards.nonfinite=rewind"
    # The same batches in a run in which nothing was ever wrong.
    (tmp_path / "calm").mkdir()
    SkippedBatches([[9, 2]]).write(tmp_path / "calm")
    _, said = run(tmp_path / "calm", corpus)
    assert f"{SKIPPED_FILE}: 2 batches are skipped from step 9 on" in said, "of a rewind that no checkpoint knows of"
    calm = losses(tmp_path / "calm")

    taken = poison(build(recipe.data, seed=recipe.run.seed), {9})
    outcome, said = run(tmp_path / "whole", corpus, rewinds)
    assert outcome.finished and losses(tmp_path / "whole") == calm
    assert "step 10 has loss nan" in said and "rewinding to step 8 and skipping batches 8 to 9" in said
    assert taken == [*range(12), *range(10, 16)], "steps 9 to 12, and then again from the batch after the bad one"
    spent = account(read(tmp_path / "whole" / NAME))
    assert spent.rewinds == 1 and spent.rewound > 0 == spent.lost and outcome.summary["goodput"]["rewinds"] == 1

    # The last checkpoint lost, and the one that the rewind went to: batches are those of the run as it was.
    whole = tmp_path / "whole"
    for name in ("14", "12", "8"):
        shutil.rmtree(whole / "checkpoints" / name)
    del taken[:]
    _, said = run(whole, corpus, rewinds)
    assert losses(whole) == calm and "rewinding" not in said and taken == [*range(4, 8), *range(10, 16)]
    # Where nobody wrote the rewind down, it is found again; the checkpoints after it know of it themselves.
    (whole / SKIPPED_FILE).unlink()
    shutil.rmtree(whole / "checkpoints" / "14")
    del taken[:]
    run(whole, corpus, rewinds)
    assert losses(whole) == calm and taken == [14, 15]
    for name in ("14", "12"):
        shutil.rmtree(whole / "checkpoints" / name)
    _, said = run(whole, corpus, rewinds)
    assert losses(whole) == calm and "rewinding to step 8" in said


def test_a_run_that_rewinds_in_vain_stops(corpus, tmp_path, poison, capsys):
    from ejdist.training.data import build

    recipe = compose([*ONE, *corpus])
    poison(build(recipe.data, seed=recipe.run.seed), set(range(5, 60)))
    rewinds = ["guards.nonfinite=rewind", "guards.most_rewinds=2", f"run.dir={tmp_path}"]
    assert main([*ONE, *corpus, *rewinds]) == DIVERGED
    said = capsys.readouterr()
    assert said.out.count("rewinding to step 4") == 2
    assert "the run has rewound to step 4 2 times (guards.most_rewinds)" in said.err
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4"]


@pytest.mark.slow  # two runs; a rewind goes the same way
def test_spikes_that_are_skipped_are_the_same_after_a_stop(corpus, tmp_path):
    """With a factor that takes every second step for a spike."""
    skips = ["guards.spike=skip", "guards.spike_factor=0.01", "guards.spike_window=4", "run.steps=20"]
    run(tmp_path / "whole", corpus, *skips, "optimizer.learning_rate=1e-6")
    skipped = [row["skipped"] for row in read_rows(tmp_path / "whole" / "metrics.jsonl")]
    assert 2 <= sum(skipped) < 12 and not any(skipped[:10])
    for stop in (13, 20):
        run(tmp_path / "parts", corpus, *skips, "optimizer.learning_rate=1e-6", f"run.stop_after={stop}")
    rows = read_rows(tmp_path / "parts" / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == skipped and losses(tmp_path / "parts") == losses(tmp_path / "whole")
    found = account(read(tmp_path / "parts" / NAME))
    assert found.starts == 2 and found.lost == 0


# -- replicas ---------------------------------------------------------------------------------------------------------


def flipped(x, device):
    """Returns an array of which one device holds another bit."""
    parts = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.view(np.uint32).ravel()[-1] ^= 1
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def state_on(mesh):
    from ejdist.layout import spec

    def put(dims, *shape):
        at = jax.sharding.NamedSharding(mesh, spec(dims, {"D": ("fsdp",), "B": ("dp", "fsdp")}))
        return jax.device_put(jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape), at)

    return {"split": put("D_", 4, 2), "own": put("B_", 4, 2), "whole": put("__", 3, 2)}


def test_replicas_that_are_never_compared_are_not_looked_for():
    """Of thousands of devices that takes seconds, at each stage."""
    never = Replicas(Hosts(5), {"w": object()}, 0)
    never.look(1, None, saves=True)
    assert never.every == 0 and never.groups == {}


def test_a_device_with_another_bit_is_named():
    state = state_on(make_mesh(dp=2, fsdp=2, sp=1))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    replicas = Replicas(Hosts(5), like, 2)
    assert {name: len(groups) for name, groups in replicas.groups.items()} == {"split": 2, "whole": 1}
    for step in [*range(1, 11), *range(5, 31)]:  # with a rewind
        replicas.look(step, state, saves=step % 12 == 0)
    wrong = state | {"split": flipped(state["split"], 3)}
    with pytest.raises(
        ReplicasDiffer, match=r"after step 31 split has not the same bits on device 1 of host 0 .*device 3 of host 0"
    ) as found:
        replicas.look(31, wrong, saves=True)
    assert exit_code_of(found.value) == REPLICAS and "nothing was saved since" in str(found.value)
    assert "whole" not in str(found.value)
    # Without a save it is known some steps later, the same number on every host.
    replicas = Replicas(Hosts(5), like, 40)
    for step in range(1, 40 + 3 * LAG):
        replicas.look(step, state | {"whole": flipped(state["whole"], 1)}, saves=False)
    with pytest.raises(ReplicasDiffer, match=r"whole has other bits on device 1 of host 0 .* than on device 0"):
        replicas.look(40 + 3 * LAG, state, saves=False)


def test_who_differs_over_hosts():
    groups = {"a": [[0, 1, 2, 3]], "b": [[0, 2], [1, 3]]}

    def said(**changed):
        held = {str(d): "0000000a0000000b" for d in range(4)} | {k[1:]: v for k, v in changed.items()}
        return {h: [f"node{h}", {d: held[d] for d in map(str, (2 * h, 2 * h + 1))}] for h in (0, 1)}

    assert different(said(), groups, 5, "") is None
    text = different(said(_3="0000000c0000000b"), groups, 5, "after step 4")
    assert text.startswith(
        "after step 5 a has other bits on device 3 of host 1 (node1) than on device 0 of host 0 (node0)"
    )
    assert "They agreed after step 4" in text and "either may" not in text
    text = different(said(_0="0000000a0000000d"), groups, 5, "")
    assert "b has not the same bits on device 0 of host 0 (node0) and on device 2 of host 1 (node1)" in text
    assert "either may be wrong" in text
    text = different(said(_3="0000000c0000000c"), groups, 5, "")
    assert "a has other bits on device 3" in text and "1 more sets of devices differ" in text


# -- hosts that are slow or hang --------------------------------------------------------------------------------------


def test_slow_hosts_are_named_with_what_they_need():
    even = {h: {"host": 0.01, "data_wait": 0.001, "waits": 0.9, "step_time": 1.0} for h in range(4)}
    assert step_timer.stragglers(even) == {} == step_timer.stragglers({0: even[0] | {"host": 9}})
    slow = step_timer.stragglers(even | {2: even[2] | {"data_wait": 0.4}})
    assert list(slow) == [2] and "host 2 needs 0.410 s of its own for a step of 1.000 s" in slow[2]
    assert "0.400 s for its data and 0.010 s to prepare it" in slow[2]
    assert step_timer.stragglers(even | {2: even[2] | {"host": 0.05}}) == {}, "too little to matter"
    assert list(step_timer.stragglers({0: even[0], 1: even[1] | {"host": 0.5}})) == [1], "of two hosts too"


def test_what_the_loop_does_is_counted_and_told(tmp_path, monkeypatch):
    now, lines = [100.0], []
    monkeypatch.setattr(step_timer.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    other = {"host": 3.0, "data_wait": 0.0, "waits": 0.9, "step_time": 4.0}
    monkeypatch.setattr(step_timer, "posted", lambda name: {1: ["node1", other]})
    ledger = Ledger(True)
    ledger.open(tmp_path)
    watched = step_timer.StepTimer(0, Hosts(5), ledger, 4, lines.append)
    watched.start(0)
    for step in range(1, 8):
        for doing, seconds in (
            (step_timer.DATA, 0.5),
            (step_timer.HOST, 0.25),
            (step_timer.CALLS, 3),
            (step_timer.WAITS, 0.25),
        ):
            with watched.during(doing):
                assert watched.doing == doing
                now[0] += seconds
        watched.end_step(step)
    with watched.saving(7):
        now[0] += 2
    watched.close()
    assert len(lines) == 1 and "up to step 4: host 1 needs 3.000 s of its own for a step of 4.000 s" in lines[0]
    rows = read(tmp_path / NAME)
    told = next(row for row in rows if "hosts" in row)
    assert told["hosts"]["0"] == {"host": 0.25, "data_wait": 0.5, "waits": 3.25, "step_time": 4}
    assert (told["slow"], told["steps"], told["step"]) == ([1], 4, 4)
    spent = account(rows)
    assert spent.data_wait == pytest.approx(3.5) and spent.checkpoint == 2 and spent.productive == pytest.approx(24.5)


def posts(*hosts):
    return {i: [f"node{i}", list(said)] for i, said in enumerate(hosts)}


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        (
            [(20, step_timer.WAITS, 1), (12, step_timer.HOST, 1)],
            [(20, step_timer.WAITS, 2), (12, step_timer.HOST, 2)],
            r"held up by host 1 \(node1\), behind: at step 12 while others are at 20, preparing a step",
        ),
        (
            [(20, step_timer.WAITS, 1), (20, step_timer.WAITS, 1)],
            [(20, step_timer.WAITS, 2), (20, step_timer.WAITS, 1)],
            r"held up by host 1 \(node1\), with no sign of life",
        ),
        (
            [(20, step_timer.WAITS, 1), (20, step_timer.DATA, 1), (20, step_timer.WAITS, 1)],
            [(20, step_timer.WAITS, 2), (20, step_timer.DATA, 2), (20, step_timer.WAITS, 2)],
            r"held up by host 1 \(node1\), waiting for data, while others are not",
        ),
        (
            [(20, step_timer.WAITS, 1)] * 2,
            [(20, step_timer.WAITS, 2)] * 2,
            "all hosts have dispatched step 20 and are waiting for its devices: a device or the network hangs",
        ),
    ],
)
def test_who_holds_up_the_others(first, later, words):
    import re

    assert re.search(words, watchdog.behind(posts(*first), posts(*later)))
    assert watchdog.behind({}, {}) == "no host has posted its position"


@pytest.mark.parametrize(
    ("doing", "made", "ago", "ends"),
    [
        (step_timer.WAITS, 5, 3.0, True),
        pytest.param(step_timer.WAITS, 5, -9.0, False, marks=pytest.mark.slow),  # steps end
        (step_timer.WAITS, 0, 3.0, False),  # the first step connects, and may take longer
        (step_timer.SAVES, 5, 3.0, False),  # a save has a limit of its own
        (step_timer.SAVES, 5, 70.0, True),
    ],
)
def test_a_command_whose_steps_do_not_end_is_ended(monkeypatch, doing, made, ago, ends, capfd):
    left, said = [], threading.Event()

    def leave(message, code):
        left.append((message, code))
        said.set()

    monkeypatch.setattr(ending, "_codes", ending.Codes(75, 69))
    monkeypatch.setattr(watchdog, "leave", leave)
    where = collections.namedtuple("Where", "step doing ended made")(7, doing, watchdog.time.monotonic() - ago, made)
    with watchdog.ending_hangs(where, Hosts(60), 0.4, step_timer.SAVES):
        assert said.wait(9 if ends else 1.2) is ends
    if ends:
        message, code = left[0]
        assert code == 69 and "no step has ended for" in message and "guards.hang_seconds = 0.4" in message
        assert "step 7 was the last, and this host is" in message
        assert "Thread 0x" in capfd.readouterr().err, "the stack of every thread"


def test_outside_of_a_command_nothing_watches(monkeypatch):
    monkeypatch.setattr(ending, "_codes", None)
    before = threading.active_count()
    with watchdog.ending_hangs(None, Hosts(60), 0.01, step_timer.SAVES):
        assert threading.active_count() == before
