"""Checkpoints on a disk of each host, between those that last."""

import json
import shutil
import sys

import jax
import numpy as np
import pytest
from damaged_checkpoints import BESIDE, described, small_state
from small_run import TINY, losses

from ejdist.cluster.hosts import Hosts
from ejdist.training.checkpoint import CheckpointError, CheckpointSection
from ejdist.training.checkpoint_format import DamagedCheckpoint
from ejdist.training.checkpoint_policy import Clock, Saves
from ejdist.training.local_tier import LocalCheckpoints
from launch.errors import DONE, WRONG
from launch.processes import Job
from launch.train import main


@pytest.fixture
def state():
    return small_state()


@pytest.fixture
def tier(tmp_path):
    return LocalCheckpoints(tmp_path, "a-run", Hosts(60))


def saved(tier, state, *steps):
    for step in steps:
        tier.save(step, state, BESIDE)
    tier.wait()
    return tier


def nobody(moment, word):
    return word


def steps_of(tier, state):
    return tier.common(described(state))[0]


def test_what_is_saved_comes_back_where_it_lay_and_three_stay(tier, state):
    """Two while the next one is written: hosts may be a save apart."""
    saved(tier, state, 1, 2, 3, 4)
    assert tier.common(described(state)) == ([4, 3, 2], "")
    found, beside = tier.restore(4, described(state), nobody)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state)):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert beside == BESIDE and type(found) is type(state)


def test_what_a_run_goes_on_from_stays_and_what_is_past_it_goes(tier, state):
    for step, left in ((3, [3, 2]), (2, [2]), (1, [])):
        saved(tier, state, 2, 3)
        (tier.directory / "4.unfinished").mkdir()
        tier.forget_after(step)
        assert steps_of(tier, state) == left and len(list(tier.directory.iterdir())) == len(left)


def test_folders_of_earlier_starts_go_once_this_one_has_its_own_and_those_of_this_start_stay(tmp_path, state):
    """The machine was host 5 of 8 before, and has pieces from others; another process of this start has the same disk."""
    disk = tmp_path / "a-run"
    old, other, fetched = (saved(LocalCheckpoints(tmp_path, "a-run", Hosts(60)), state, 1, 2) for _ in range(3))
    for tier, name in ((old, "host-5-of-8"), (other, "host-1-of-2"), (fetched, "fetched-0-of-2")):
        shutil.copytree(disk / "host-0-of-1", disk / name)
        tier.directory = disk / name
    shutil.rmtree(disk / "host-0-of-1")
    mine = LocalCheckpoints(tmp_path, "a-run", Hosts(60))
    for tier, start in ((old, 3), (other, 4), (mine, 4)):
        tier.start = start
        tier.check_writable()

    def steps(tier):
        return sorted(int(path.name) for path in tier.directory.iterdir() if path.name.isdigit())

    saved(mine, state, 3)
    assert [steps(t) for t in (old, fetched, other, mine)] == [[1, 2], [1, 2], [1, 2], [3]]
    saved(mine, state, 4)
    assert [steps(t) for t in (old, fetched, other, mine)] == [[1, 2], [1, 2], [1, 2], [3, 4]]
    saved(mine, state, 5)
    assert [steps(t) for t in (old, fetched, other, mine)] == [[], [], [1, 2], [3, 4, 5]]


def test_a_machine_that_was_away_brings_back_nothing_that_the_run_has_gone_back_over(tmp_path, state):
    section, run = CheckpointSection(local=str(tmp_path / "fast"), local_every=1), tmp_path / "run"
    first = Saves(run, section, Hosts(60))
    first.begin(0, print)
    saved(first.local, state, 2, 4)
    shutil.copytree(tmp_path / "fast", tmp_path / "away")
    second = Saves(run, section, Hosts(60))
    assert [step for step, _ in second.find(described(state))] == [4, 2]
    second.begin(3, print)  # it went on from a checkpoint in run.dir
    saved(second.local, state, 5)
    fast, away = (next((tmp_path / name).iterdir()) for name in ("fast", "away"))
    (away / "host-0-of-1").rename(fast / "host-7-of-8")
    told = []
    third = Saves(run, section, Hosts(60))
    assert [step for step, _ in third.find(described(state), told.append)] == [5, 2] and not told
    shutil.rmtree(fast / "host-7-of-8" / "2")
    shutil.rmtree(fast / "host-0-of-1")
    assert not third.find(described(state), told.append)
    assert "gone back to step 3 since, and what is there is of later steps; it is not used to resume" in told[0]


def test_a_run_is_itself_through_a_link_and_a_copy_of_it_is_another(tmp_path, state):
    """Its local checkpoints were passed over without a word where run.dir was written in another way."""
    section, run = CheckpointSection(local=str(tmp_path / "fast"), local_every=1), tmp_path / "run"
    first = Saves(run, section, Hosts(60))
    first.begin(0, print)
    saved(first.local, state, 2)
    (tmp_path / "link").symlink_to(run)
    shutil.copytree(run, tmp_path / "copy")
    ways = [run, tmp_path / "link", run / ".." / "run"]
    assert [Saves(way, section, Hosts(60)).find(described(state))[0][0] for way in ways] == [2, 2, 2]
    assert not Saves(tmp_path / "copy", section, Hosts(60)).find(described(state))
    run.rename(tmp_path / "moved")
    assert not Saves(tmp_path / "moved", section, Hosts(60)).find(described(state))


def test_the_next_step_may_write_where_the_state_lay(tier, state):
    before = jax.tree.map(np.array, state)
    tier.save(1, state, BESIDE)
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 3, s), donate_argnums=0)(state))
    tier.wait()
    found, _ = tier.restore(1, jax.tree.map(lambda x, y: described(y), before, small_state()), nobody)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), tuple(found), tuple(before)))


def test_a_mesh_of_which_there_are_no_pieces_has_no_checkpoint_here(tier, state):
    saved(tier, state, 1)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    four = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    other = described(state)
    embedding = jax.ShapeDtypeStruct((64, 32), np.float32, sharding=four)
    other = other._replace(params=other.params | {"embedding": embedding})
    steps, why = tier.common(other)
    assert steps == [] and why == "what is there is cut for another mesh, or is of another model"


@pytest.mark.parametrize("file", ["pieces.bin", "index.json"])
@pytest.mark.parametrize("cut", [True, False])
def test_damage_is_refused_by_name_or_not_listed(tier, state, file, cut):
    saved(tier, state, 1)
    path = tier.directory / "1" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data[: len(data) // 2] if cut else data)
    if file == "index.json" or cut:
        assert steps_of(tier, state) == []
    with pytest.raises(
        DamagedCheckpoint, match="pieces are missing" if file == "index.json" or cut else r"\] is not what"
    ):
        tier.restore(1, described(state), nobody)


def test_pieces_of_another_time_are_noticed_though_each_is_whole(tier, state):
    """As where one host has gone on from another state, and both have a step of that number."""
    saved(tier, state, 1)
    index = tier.directory / "1" / "index.json"
    stored = json.loads(index.read_text())
    body = json.loads(stored["body"])
    name = "params.norm"
    for span, (at, size, _, shape) in body["pieces"][name].items():
        other = np.zeros(size, np.uint8).tobytes()
        with (tier.directory / "1" / "pieces.bin").open("r+b") as file:
            file.seek(at)
            file.write(other)
        import zlib

        body["pieces"][name][span] = [at, size, zlib.crc32(other), shape]
    stored["body"] = json.dumps(body)
    stored["crc32"] = zlib.crc32(stored["body"].encode())
    index.write_text(json.dumps(stored))
    with pytest.raises(DamagedCheckpoint, match=r"params\.norm is not what was saved"):
        tier.restore(1, described(state), nobody)


def test_a_failed_write_is_told_at_the_next_save(tmp_path, state):
    (tmp_path / "file").write_text("")
    tier = LocalCheckpoints(tmp_path / "file", "a-run", Hosts(60))
    with pytest.raises(ValueError, match=r"checkpoint\.local: .* cannot be written"):
        tier.check_writable()
    tier.save(1, state, BESIDE)
    with pytest.raises(CheckpointError, match="could not be written to"):
        tier.save(2, state, BESIDE)


# -- runs -----------------------------------------------------------------------------------------------------------------


def command(tmp_path, corpus, *more, run="run"):
    local = [f"checkpoint.local={tmp_path}/fast", "checkpoint.local_every=2"]
    return main([*TINY, *corpus, *local, "checkpoint.every=6", f"run.dir={tmp_path / run}", *more])


@pytest.mark.slow
def test_a_run_goes_on_from_the_newer_of_both_and_without_the_disk_from_the_one_that_lasts(
    corpus, tmp_path, monkeypatch, capsys
):
    """It dies at step 9, twice: 6 is in run.dir, 8 on the disk of the host, and stays there until a later one is."""
    from ejdist.training import steps

    def dies(run, train_step, state, writer, start, *rest):
        made = []

        def step(state, batch):
            made.append(1)
            if start + len(made) == 9:
                raise RuntimeError("dies")
            return train_step(state, batch)

        return make(run, step, state, writer, start, *rest)

    make = steps.run_steps
    assert main([*TINY, *corpus, f"run.dir={tmp_path / 'calm'}"]) == DONE
    with monkeypatch.context() as patch:
        patch.setattr(steps, "run_steps", dies)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="dies"):
                command(tmp_path, corpus)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    capsys.readouterr()
    assert command(tmp_path, corpus) == DONE
    said = capsys.readouterr().out
    assert f"resuming from step 8 of {tmp_path}/run, from the local checkpoint in" in said
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")
    # A copy of the run is another run: what is on the disk is not its own.
    assert command(tmp_path, corpus, run="copy") == DONE
    said = capsys.readouterr().out
    assert f"resuming from step 6 of {tmp_path}/copy\n" in said
    assert losses(tmp_path / "copy") == losses(tmp_path / "calm")


@pytest.mark.slow
def test_a_lost_or_damaged_local_checkpoint_falls_back_and_says_so(corpus, tmp_path, capsys):
    for stop in (3, 5):
        assert command(tmp_path, corpus, f"run.stop_after={stop}") == DONE
    local = next((tmp_path / "fast").glob("*/host-0-of-1"))
    assert sorted(p.name for p in local.iterdir() if p.name.isdigit()) == ["2", "4"]
    # As if the last one in run.dir had not been written: 4 is the newest.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "5")
    (local / "4" / "pieces.bin").write_bytes(b"")
    shutil.rmtree(local / "2")
    capsys.readouterr()
    assert command(tmp_path, corpus, "run.stop_after=6") == DONE
    said = capsys.readouterr().out
    assert "resuming from step 3" in said
    assert "is not used to resume" in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["checkpoint.local=/tmp/x"], "checkpoint.local = '/tmp/x' and checkpoint.local_every = 0: give both"),
        (["checkpoint.local_every=2"], "give both"),
        (["checkpoint.local=gs://a/b", "checkpoint.local_every=2"], "must be a folder on a disk of each host"),
        (["checkpoint.keep_every=3", "checkpoint.every=2"], "must be a multiple of checkpoint.every = 2"),
        (["checkpoint.keep_every=3"], "must be a multiple of checkpoint.every = 0"),
        (["checkpoint.minutes=-1"], "checkpoint.minutes must be 0, for none, or positive, got -1"),
    ],
)
def test_keys_that_do_not_go_together(given, words, corpus, tmp_path, capsys):
    assert main([*TINY, *corpus, f"run.dir={tmp_path / 'run'}", *given]) == WRONG
    assert words in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_hosts_go_on_from_their_own_disks_and_where_no_other_has_the_pieces_from_what_lasts(corpus, tmp_path):
    """Host 1 is killed at step 10: 6 lasts, 8 is on the disks of both. The run that nothing happens to saves by time. With a
    replica: `test_a_replaced_machine_goes_on_from_the_pieces_of_its_replica`."""
    small = [a for a in TINY if not a.startswith(("run.", "checkpoint.", "mesh."))]
    common = [*small, *corpus, "run.steps=14", "run.host_timeout=120", "mesh.fsdp=2", "mesh.sp=1"]
    tiers = ["checkpoint.every=6", f"checkpoint.local={tmp_path / 'fast'}", "checkpoint.local_every=2"]
    slow = {
        i: [sys.executable, "-m", "launch.disturbed", json.dumps({"do": "sleep", "seconds": 0.2})] for i in range(2)
    }
    doing = {"do": "signal", "number": 9, "step": 10, "seconds": 0.2}
    killed = slow | {1: [sys.executable, "-m", "launch.disturbed", json.dumps(doing)]}

    def start(name, *more, run="run", commands=None):
        job = Job(2, tmp_path / name, 1).start([*common, *more, f"run.dir={tmp_path / run}"], commands=commands)
        return job.wait(600, 150), (tmp_path / name / "host-0.log").read_text()

    by_time = ["checkpoint.every=0", "checkpoint.minutes=0.005", "checkpoint.keep=20"]
    codes, said = start("calm", *by_time, run="calm", commands=slow)
    assert codes == [DONE, DONE], said
    assert len(list((tmp_path / "calm" / "checkpoints").iterdir())) > 3
    codes, said = start("killed", *tiers, commands=killed)
    assert codes[1] == -9, said
    for folder in ("run", "fast"):
        shutil.copytree(tmp_path / folder, tmp_path / "before" / folder)
    codes, said = start("again", *tiers)
    assert codes == [DONE, DONE] and "resuming from step 8" in said and "host-0-of-2" in said, said
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")
    for folder in ("run", "fast"):
        shutil.rmtree(tmp_path / folder)
        shutil.copytree(tmp_path / "before" / folder, tmp_path / folder)
    shutil.rmtree(next((tmp_path / "fast").glob("*/host-1-of-2")))
    codes, said = start("replaced", *tiers)
    assert codes == [DONE, DONE] and "resuming from step 6" in said, said
    assert "of step 8 the pieces for host 1 are on no disk; it is not used to resume" in said
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")


# -- by time --------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_due_when_the_last_one_is_too_old_and_hosts_meet_at_few_steps():
    """Steps of 1 s for two minutes, then of 2 s; one checkpoint of another kind in between."""
    now, said = [0.0], []

    class Said(Hosts):
        def broadcast(self, name, value=None):
            said.append(value)
            return value

    clock = Clock(1.0, Said(60), now=lambda: now[0])
    due = []
    for step in range(1, 200):
        now[0] += 1 if step <= 120 else 2
        if clock.due(step):
            due.append(now[0])
            clock.saved(step)
        elif step == 90:
            clock.saved(step)
    assert due[:1] == [61.0], "counted from the first step"
    assert 150 <= due[1] <= 182, "and from whatever checkpoint came last; late by what steps came to last longer"
    gaps = np.diff(due[1:])
    assert len(gaps) and gaps.min() >= 60 and gaps.max() <= 64, "never early, and at most two steps late"
    assert len(said) < 199 / 2


def test_what_another_host_says_decides():
    class Other(Hosts):
        def broadcast(self, name, value=None):
            return [True, 5]

    clock = Clock(1000.0, Other(60))
    assert [clock.due(step) for step in range(1, 9)] == [False, True, False, False, False, False, True, False]


@pytest.mark.slow
def test_a_run_saves_by_time_and_keeps_by_steps(corpus, tmp_path):
    keys = ["checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=4", f"run.dir={tmp_path / 'steps'}"]
    assert main([*TINY, *corpus, *keys]) == DONE
    assert sorted(int(p.name) for p in (tmp_path / "steps" / "checkpoints").iterdir()) == [4, 8, 10]
    saves = Saves(tmp_path / "none", CheckpointSection(every=0, minutes=1e-9), Hosts(60))
    assert [saves.due(step, last=False) is saves.durable for step in range(1, 6)] == [False, True, True, True, True]


def test_keep_hours_keeps_the_first_and_one_after_each_so_many():
    import datetime
    from types import SimpleNamespace

    from ejdist.training.checkpoint import _preservation

    begin = datetime.datetime(2026, 1, 1)
    saved = [SimpleNamespace(step=10 * n, time=begin + datetime.timedelta(minutes=40 * n)) for n in range(8)]
    policy = _preservation(CheckpointSection(every=10, keep=2, keep_hours=1))
    stay = [one.step for one, stays in zip(saved, policy.should_preserve(saved, context=None)) if stays]
    assert stay == [0, 20, 40, 60, 70]
