"""A checkpoint that is damaged anywhere is restored right, or refused with the name of what is bad."""

import random
from collections import Counter

import pytest
from damaged_checkpoints import BESIDE, REFUSED, RIGHT, described, save, small_state, tried
from shared import once

from ejdist.training.checkpoint import Checkpoints, CheckpointSection
from ejdist.training.checkpoint_format import DamagedCheckpoint
from ejdist.training.integrity import RUN_FILE


@pytest.fixture
def whole(tmp_path_factory):
    return once(tmp_path_factory, "whole-checkpoint", lambda folder: save(folder, small_state()))


def outcomes(whole, scratch, seeds):
    state = small_state()
    found = [tried(whole, scratch, state, random.Random(seed)) for seed in seeds]
    bad = [one for one in found if one.outcome not in (RIGHT, REFUSED)]
    assert not bad, bad[:3]
    return Counter(one.outcome for one in found)


def test_some_random_damage(whole, tmp_path):
    assert set(outcomes(whole, tmp_path / "copy", range(20))) == {RIGHT, REFUSED}


@pytest.mark.slow
def test_much_random_damage(whole, tmp_path):
    found = outcomes(whole, tmp_path / "copy", range(1000, 1400))
    assert min(found.values()) > 40, found


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        # A digit of what the run was started with, which is as good JSON as before.
        (RUN_FILE, b'"run.steps": 20', b'"run.steps": 30', "run/metadata is not what was saved"),
        (RUN_FILE, b'"seed": 0', b'"seed": 1', "run/metadata is not what was saved"),
        # The checksum's own name: there is then none, as in checkpoints of before there was one.
        (RUN_FILE, b'"run/metadata"', b'"run/metadatb"', "run/metadatb is not what was saved"),
        (RUN_FILE, b'"digest"', b'"dygest"', "run/metadata is not what was saved: it has no digests"),
        ("state/_METADATA", b'"jax.Array"', b'"jay.Array"', "state/_METADATA: "),
        ("state/_METADATA", b'"key": "up"', b'"key": "uq"', "state/_METADATA has two names for one array: "),
        ("state/_sharding", b"NamedSharding", b"NamedShardinh", "state/_sharding: "),
    ],
)
def test_damage_that_is_still_json_is_named(file, old, new, words, whole, tmp_path):
    import shutil

    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy" / "checkpoints" / "7" / file
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new, 1))
    checkpoints = Checkpoints(tmp_path / "copy", CheckpointSection())
    with pytest.raises(DamagedCheckpoint) as caught:
        checkpoints.restore(7, described(small_state()))
    assert words in str(caught.value)
    checkpoints.close()


def test_a_checkpoint_of_before_there_was_a_checksum_is_read(whole, tmp_path):
    import json
    import shutil

    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy" / "checkpoints" / "7" / RUN_FILE
    stored = json.loads(path.read_text())
    del stored["kinds"], stored["digest"][RUN_FILE]
    path.write_text(json.dumps(stored))
    checkpoints = Checkpoints(tmp_path / "copy", CheckpointSection())
    assert checkpoints.restore(7, described(small_state()))[1] == BESIDE == checkpoints.run_of(7)
    checkpoints.close()
