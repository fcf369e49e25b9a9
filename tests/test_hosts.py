"""What hosts say to each other through the coordinator's store: here a store in memory, and hosts that are threads.

Processes that do the same are in tests/test_many_processes.py.
"""

import sys
import threading
import time

import jax
import pytest
from etils import epath
from many_hosts import HERE, Store, hosts_of_threads

import ejdist.cluster.hosts as hosts_module
from ejdist.cluster import HostLost, Hosts, HostsDiffer, agreement, ending
from ejdist.cluster.presence import Gone, Presence
from ejdist.training import checkpoint_policy
from ejdist.training.checkpoint import CheckpointSection
from ejdist.training.checkpoint_format import CheckpointError
from launch.errors import BAD_CHECKPOINT, HOST_LOST, WRONG, exit_code_of


@pytest.fixture
def together(monkeypatch):
    return hosts_of_threads(monkeypatch)


def test_hosts_with_the_same_facts_go_on_together(together):
    def act(hosts):
        time.sleep(0.05 * hosts.index)
        for moment in ("the start", "the first step", "the start"):
            hosts.compare(moment, {"recipe": [1, 2.5, None], "package jax": "0.11"})
        return hosts.broadcast("a name", f"of host {hosts.index}")

    assert together(3, act) == ["of host 0"] * 3


def test_a_difference_is_told_on_every_host_with_its_host_and_both_values(together):
    def act(hosts):
        rate = 1e-3 if hosts.index == 2 else 3e-3
        hosts.compare("the start", {"run.steps": 5, "optimizer.learning_rate": rate})

    found = together(4, act)
    assert {type(e) for e in found} == {HostsDiffer} and len({str(e) for e in found}) == 1
    text = str(found[0])
    assert "host 2 (" in text and "optimizer.learning_rate = 0.001" in text and "has 0.003" in text
    assert exit_code_of(found[0]) == WRONG


def test_hosts_that_agree_send_no_facts_and_only_two_do_where_they_differ(together, monkeypatch):
    sent, put = [], hosts_module._put
    monkeypatch.setattr(hosts_module, "_put", lambda key, value: (sent.append((HERE.index, value)), put(key, value)))
    long = {f"key {i}": "x" * 100 for i in range(50)}
    assert together(4, lambda hosts: hosts.compare("the start", long)) == [None] * 4
    assert max(len(str(value)) for _, value in sent) < 100
    sent.clear()
    found = together(4, lambda hosts: hosts.compare("the start", long | ({"key 7": "y"} if hosts.index > 1 else {})))
    assert {type(e) for e in found} == {HostsDiffer} and "host 2 (" in str(found[3]) and "key 7 = y" in str(found[3])
    assert {index for index, value in sent if len(str(value)) > 1000} == {2}, "host 0 looks at its own"


@pytest.mark.parametrize("shared", [True, False])
def test_what_hosts_share_one_makes_before_the_others_look(together, monkeypatch, tmp_path, shared):
    monkeypatch.setattr(agreement, "_SEEN_AT_ONCE", 0.2)
    began, ended, meet = [], [], threading.Barrier(3, timeout=5)

    def act(hosts):
        with agreement.first_alone(hosts, tmp_path / ("of all" if shared else str(hosts.index)), "its data"):
            began.append((hosts.index, list(ended)))
            if not shared:
                meet.wait()  # all are here at once
            time.sleep(0.1)
            ended.append(hosts.index)
        return hosts.broadcast("a word", "later")

    assert together(3, act, limit=0.5) == ["later"] * 3, "and the next words are the same ones"
    if shared:
        assert began[0] == (0, []) and all(before[0] == 0 for _, before in began[1:])
        assert not list((tmp_path / "of all").iterdir())


def test_hosts_that_wait_for_what_one_makes_hear_that_it_failed(together, tmp_path):
    def act(hosts):
        with hosts.together(), agreement.first_alone(hosts, tmp_path, "its data"):
            raise ValueError("data.source: no file")

    found = together(3, act)
    assert {type(e) for e in found} == {ValueError, HostsDiffer} and "no file" in str(found[2])


@pytest.mark.parametrize("odd", [0, 1])
def test_a_fact_that_only_some_hosts_have_is_a_difference(together, odd):
    (text, _) = map(
        str, together(2, lambda hosts: hosts.compare("x", {"a": 1} | ({"b": 2} if hosts.index == odd else {})))
    )
    assert "has b = " in text and "nothing" in text and "2" in text


@pytest.mark.parametrize(
    ("come", "missing"), [([0, 2], "host 1 has"), ([0], "hosts 1, 2 have"), ([1, 2], "host 0 has")]
)
def test_who_does_not_come_is_named_after_the_limit(together, monkeypatch, come, missing):
    if 0 not in come:  # the others give host 0 more time, to hear from it who else is missing
        monkeypatch.setattr(hosts_module, "_FOR_RESULT", 0.0)
    start = time.monotonic()
    found = together(3, lambda hosts: hosts.compare("the first step", {}), limit=0.5, come=come)
    assert time.monotonic() - start < 3
    for error in found:
        assert isinstance(error, HostLost) and f"{missing} not reached the first step within 0.5 s" in str(error)
        assert "run.host_timeout" in str(error) and exit_code_of(error) == HOST_LOST


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("data.source: no file"), HostsDiffer),
        (OSError("disk"), HostLost),
        (HostLost("another host is gone", known=False), HostLost),  # in a collective of which the others were no part
    ],
)
def test_a_host_that_fails_ends_the_waits_of_the_others(together, failing, error, kind):
    def act(hosts):
        with hosts.together():
            if hosts.index == failing:
                raise error
            hosts.compare("the first step", {})

    start = time.monotonic()
    found = together(3, act, limit=30)
    assert time.monotonic() - start < 5
    assert found[failing] is error
    for i in {0, 1, 2} - {failing}:
        assert type(found[i]) is kind and f"host {failing} (" in str(found[i]) and str(error) in str(found[i])


@pytest.mark.parametrize(
    ("error", "code"), [(CheckpointError("no room"), BAD_CHECKPOINT), (KeyError("a fault"), HOST_LOST)]
)
def test_all_hosts_end_with_the_code_of_the_one_that_failed(together, monkeypatch, error, code):
    """Else a cluster starts a run again and again that nobody but the user can mend."""
    monkeypatch.setattr(hosts_module, "_code_of", hosts_module._code_of)
    hosts_module.end_with(exit_code_of)

    def act(hosts):
        with hosts.together():
            if hosts.index == 1:
                raise error
            hosts.compare("the first step", {})

    found = together(3, act, limit=30)
    assert [exit_code_of(found[i]) for i in (0, 2)] == [code, code]


def test_a_host_that_is_known_to_be_gone_is_not_waited_for_long(monkeypatch):
    left, there = [], Presence()
    there.lose(Gone("host 1 (b) is gone", None))
    monkeypatch.setattr(ending, "presence", lambda: there)
    for name, seconds in {"_EVERY": 0.01, "_GONE": 0.01, "_GRACE": 3.0}.items():
        monkeypatch.setattr(ending, name, seconds)
    monkeypatch.setattr(ending, "leave", lambda message, code: left.append((message, code)) or sys.exit())
    start = time.monotonic()
    with pytest.raises(SystemExit):
        ending._watch(
            ending.Codes(75, 69), lambda: hosts_module.Failed("host 1 (b) is gone", False, None), threading.Event()
        )
    assert time.monotonic() - start < 2
    assert left[0][1] == 69 and left[0][0].startswith("error: host 1 (b) is gone; the same command resumes")


@pytest.mark.parametrize(("code", "ends", "words"), [(3, 3, "no room"), (None, 69, "the same command resumes")])
def test_a_step_that_waits_for_a_host_that_failed_ends_with_its_code(monkeypatch, code, ends, words):
    left = []
    monkeypatch.setattr(ending, "_EVERY", 0.01)
    monkeypatch.setattr(ending, "_GRACE", 0.01)
    monkeypatch.setattr(ending, "leave", lambda message, code: left.append((message, code)) or sys.exit())
    failed = hosts_module.Failed("host 1 (b) failed, which ends all hosts: no room", False, code)
    with pytest.raises(SystemExit):
        ending._watch(ending.Codes(75, 69), lambda: failed, threading.Event())
    assert len(left) == 1 and left[0][1] == ends and words in left[0][0]
    # Two hosts notice that no step ends, and tell each other: both find out who holds them up before they end.
    with ending.finding_out():
        ending._watch(ending.Codes(75, 69), lambda: failed, threading.Event())
    assert len(left) == 1


@pytest.mark.parametrize(
    ("code", "text"), [(None, "host 3 (d) is gone"), (2, "host 1 (b) failed, which ends all hosts: no room")]
)
def test_what_hosts_fail_by_because_of_one_that_is_gone_is_no_reason(monkeypatch, code, text):
    """But one that nobody can mend by starting again is, whoever is gone."""
    there = Presence()
    there.lose(Gone("host 3 (d) is gone", None))
    monkeypatch.setattr(hosts_module, "presence", lambda: there)
    monkeypatch.setattr(hosts_module, "_read", lambda prefix: {1: ["b", False, code, "no room"]})
    hosts = Hosts(1)
    hosts.count = 4
    assert hosts.failed() == hosts_module.Failed(text, False, code)


def test_the_first_host_that_says_something_is_heard_by_all(together):
    def act(hosts):
        quiet = hosts.first_error("a moment", None)
        return quiet, hosts.first_error("the reading", f"chunk {hosts.index} is odd" if hosts.index > 0 else None)

    found = together(3, act)
    assert {quiet for quiet, _ in found} == {None}
    assert {word.split(" (on")[0] for _, word in found} == {"chunk 1 is odd"} and "on host 1, " in found[0][1]


@pytest.mark.parametrize(("count", "most"), [(2, 2), (512, 512), (4096, 512)])
def test_hosts_that_wait_do_not_keep_the_coordinator_from_its_work(monkeypatch, count, most):
    """All of them together ask as often as it can answer beside what they wait for, however many they are."""
    asked = []

    class Store:
        def blocking_key_value_get(self, key, milliseconds):
            asked.append(milliseconds)
            return "[null, 7]"

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(hosts_module, "_store", Store)
    monkeypatch.setattr(hosts_module, "_put", lambda *a: None)
    assert Hosts(300).reduce("the start", 1, len) == 7
    assert count / (asked[0] / 1000) == most


def test_a_host_that_is_alone_waits_for_nobody():
    hosts = Hosts(1)
    hosts.compare("the start", {"a": 1, "b": float("nan")})
    assert (
        hosts.first_error("x", None) is None and hosts.first_error("x", "odd") == "odd" and hosts.broadcast("x", 3) == 3
    )
    assert hosts.failed() is None


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_must_be_a_time(limit):
    with pytest.raises(ValueError, match=r"run\.host_timeout must be a positive number"):
        Hosts(limit)


def test_the_folder_of_a_run_must_be_one(together, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "_SEEN_WITHIN", 0.3)
    run = tmp_path / "runs" / "run"
    assert together(2, lambda hosts: agreement.check_shared(hosts, run)) == [None, None]
    run.mkdir(parents=True)
    assert together(2, lambda hosts: agreement.check_shared(hosts, run)) == [None, None]
    assert list(run.iterdir()) == []
    found = together(2, lambda hosts: agreement.check_shared(hosts, tmp_path / f"run-{hosts.index}"))
    assert all(isinstance(e, HostsDiffer) and "host 1 (" in str(e) and "run.dir" in str(e) for e in found)
    assert "or give checkpoint.dir a folder or bucket that they share" in str(found[0])
    assert list(tmp_path.iterdir()) == [run.parent], "what the check makes is gone"


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_cannot_write_where_all_do_is_named(index, together, tmp_path):
    """At once, if it is host 0, and not after the wait for what it writes."""
    (tmp_path / "file").write_text("")

    def act(hosts):
        folder = tmp_path / ("file" if hosts.index == index else "kept") / "run"
        agreement.check_shared(hosts, epath.Path(folder), "checkpoint.dir")

    began = time.monotonic()
    found = together(3, act)
    assert all(isinstance(e, HostsDiffer) and f"host {index} (" in str(e) for e in found)
    assert "cannot write to checkpoint.dir = " in str(found[0]) and "Not a directory" in str(found[0])
    assert time.monotonic() - began < 5 and [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("elsewhere", "asked"), [(None, "run.dir"), ("kept", "checkpoint.dir")])
def test_run_dir_is_shared_where_it_has_the_checkpoints(elsewhere, asked, monkeypatch, tmp_path):
    looked = []
    monkeypatch.setattr(
        checkpoint_policy, "check_shared", lambda hosts, folder, key="run.dir", **how: looked.append((key, str(folder)))
    )
    section = CheckpointSection(dir=None if elsewhere is None else str(tmp_path / elsewhere))
    checkpoint_policy.Saves(tmp_path / "run", section, Hosts(1)).check_shared()
    assert looked == [(asked, str(tmp_path / (elsewhere or "run")))]


def test_the_digest_of_the_code_is_of_every_line_and_file(tmp_path, monkeypatch):
    package = tmp_path / "some_package_of_a_test"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "part.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(agreement, "CODE", ("some_package_of_a_test", "a_package_that_is_not_there"))
    digests = [agreement.code_digest()]
    (package / "inner" / "part.py").write_text("A = 2\n")
    digests.append(agreement.code_digest())
    (package / "inner" / "part.py").rename(package / "inner" / "other.py")
    digests.append(agreement.code_digest())
    (package / "inner" / "notes.txt").write_text("of no meaning")
    digests.append(agreement.code_digest())
    assert len(set(digests)) == 3 and digests[2] == digests[3]


def test_the_environment_has_what_changes_a_program(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_dump_to=/tmp/of-this-host --xla_a=2")
    facts = agreement.environment()
    assert facts["XLA_FLAGS"] == "--xla_a=2 --xla_b=1" and facts["package jax"] == jax.__version__
    assert facts["devices of a host"] == jax.local_device_count() and facts["package libtpu"] is not None


def test_telling_others_makes_no_device(monkeypatch):
    """A host that is stopped while it starts: to make its devices would wait for the others."""

    def waits():
        raise AssertionError("devices are made")

    monkeypatch.setattr(jax, "process_index", waits)
    hosts_module.notify_failure("it was stopped")
    store = Store()
    monkeypatch.setattr(hosts_module, "_index", lambda: 3)
    monkeypatch.setattr(hosts_module, "_store", lambda: store)
    hosts_module.notify_failure("it was stopped")
    assert list(store.values) == ["ejdist/failed/3"]
