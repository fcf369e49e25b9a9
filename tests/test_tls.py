"""cluster.tls: who has no certificate of the run is turned away at the door, and JAX's service is told to ask for one too."""

import socket
import ssl
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import certificates
import jax
import pytest

from ejdist.cluster import line as line_module
from ejdist.cluster.door import Door, Lines, listening
from ejdist.cluster.line import TurnedAway, knock, occupant
from ejdist.cluster.presence import Presence, Who, presence
from ejdist.cluster.tls import context
from launch import cluster
from launch.processes import Job, free_port
from recipes.schema import compose


def who(index, count=2):
    return Who(index, count, "launch.train", "/runs/a", "", f"n{index}", 10 + index)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns folders: of the run, of another authority, and by the run's authority without a name of a process."""
    base = tmp_path_factory.mktemp("tls")
    authority = certificates.make(base / "run")
    certificates.make(base / "other")
    certificates.make(base / "unnamed", "https://example.com", authority)
    return base


@pytest.fixture
def door(folders):
    """Returns a door with TLS, with its address and what it has said."""
    server, said = listening("", 0), []
    made = Door(who(0), server, Presence(), said.append, context(str(folders / "run"), server=True))
    yield SimpleNamespace(door=made, port=server.getsockname()[1], said=said)
    made.close()


def hears(door, word):
    end = threading.Event()
    for _ in range(200):
        if any(word in one for one in door.said):
            return
        end.wait(0.02)
    raise AssertionError((word, door.said))


def test_processes_of_the_run_join(door, folders):
    """And what they say is encrypted: nothing that is sent has their names."""
    address, sent = f"localhost:{door.port}", []
    admit = threading.Thread(target=lambda: (door.door.wait(5), door.door.admit(7777)))
    admit.start()
    line = knock(address, who(1), 5.0, tls=str(folders / "run"))
    admit.join()
    assert line.port == 7777
    left, mine = [], Presence()
    line.keep(mine, sent.append, left.append)
    door.door.bye(2, "the disk is full")
    door.door.close()
    assert mine.gone(5) is None or "the disk is full" in mine.gone().text
    for _ in range(200):
        if left:
            break
        threading.Event().wait(0.02)
    assert left and left[0].code == 2 and "the disk is full" in left[0].text


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        pytest.param("other", "do not take each other's certificates", marks=pytest.mark.slow),
        ("unnamed", "has no URI that begins with ejdist://"),
    ],
)
def test_another_certificate_is_turned_away(door, folders, theirs, message):
    with pytest.raises(TurnedAway, match=message):
        knock(f"localhost:{door.port}", who(1), 5.0, tls=str(folders / theirs))


@pytest.mark.parametrize("theirs", ["other", pytest.param("unnamed", marks=pytest.mark.slow)])
def test_the_door_asks_for_a_certificate_itself(door, folders, theirs):
    """Of a program that takes any server."""
    bad = context(str(folders / theirs), server=False)
    bad.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("localhost", door.port)) as plain:
        plain.settimeout(5)
        with bad.wrap_socket(plain) as stray:
            lines = Lines(stray)
            lines.send({"hello": who(1).__dict__})
            hears(door, "which has no certificate of this run (cluster.tls); this run goes on")
    assert not door.door._members


def test_a_process_without_tls_is_turned_away(door, monkeypatch):
    monkeypatch.setattr(line_module, "_ANSWER", 0.5)
    with pytest.raises((TurnedAway, line_module.NobodyCame)):
        knock(f"localhost:{door.port}", who(1), 1.5)
    hears(door, "which has no certificate of this run (cluster.tls)")
    assert not door.door._members


def test_a_door_without_tls_is_not_taken_for_one_with(folders):
    server = listening("", 0)
    door = Door(who(0), server, Presence(), print)
    try:
        with pytest.raises(line_module.NobodyCame, match=r"is closing, or has no certificates \(cluster.tls\)"):
            knock(f"localhost:{server.getsockname()[1]}", who(1), 1.0, tls=str(folders / "run"))
    finally:
        door.close()


def test_a_port_that_a_run_has_is_told_with_the_run(door, folders):
    text, ending = occupant(door.port, who(0), str(folders / "run"))
    assert "launch.train with run.dir = /runs/a" in text and not ending


def test_jax_asks_for_certificates_too(folders, monkeypatch):
    asked = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: asked.update(k))
    words = [
        "cluster=manual",
        f"cluster.coordinator=localhost:{free_port()}",
        "cluster.num_processes=1",
        "cluster.process_id=0",
    ]
    try:
        cluster.join(compose([*words, f"cluster.tls={folders / 'run'}"]).cluster)
    finally:
        presence().side.close()
        presence().side = None
    wanted = {"mtls_cert_file": "tls.crt", "mtls_key_file": "tls.key", "mtls_ca_file": "ca.crt"}
    assert {key: Path(asked[key]).name for key in wanted} == wanted
    assert asked["verify_secure_credentials"] is True and asked["mtls_peer_uri_prefix"] == "ejdist://"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tls.key", None, "must be a folder with tls.crt, tls.key and ca.crt: .*tls.key cannot be read"),
        (
            "tls.crt",
            "no certificate",
            "must be a certificate and its key, and ca.crt that of its authority, all as PEM",
        ),
        ("ca.crt", "", "must be a certificate and its key"),
    ],
)
def test_a_folder_that_is_wrong(tmp_path, file, text, message):
    certificates.make(tmp_path / "a")
    if text is None:
        (tmp_path / "a" / file).unlink()
    else:
        (tmp_path / "a" / file).write_text(text)
    words = ["cluster=manual", "cluster.coordinator=a:1", "cluster.num_processes=2", "cluster.process_id=0"]
    with pytest.raises(ValueError, match=message):
        cluster.join(compose([*words, f"cluster.tls={tmp_path / 'a'}"]).cluster)
    with pytest.raises(ValueError, match=r"cluster\.tls = 'a' is for several processes"):
        cluster.join(compose(["cluster.tls=a"]).cluster)


@pytest.mark.slow
def test_two_processes_and_a_stranger(folders, tmp_path):
    """JAX's own service, which a client without a certificate can neither join nor end."""
    program = (
        "import sys, time\nfrom launch.cluster import join\nfrom recipes.schema import compose\nimport jax\n"
        "c = compose(sys.argv[1:]).cluster\njoin(c)\n"
        "from jax._src.distributed import global_state as s\n"
        "if s.process_id == 0: print('address', s.coordinator_address, flush=True)\n"
        "s.client.wait_at_barrier('a', 60000); time.sleep(8); s.client.wait_at_barrier('b', 60000)\nprint('done')\n"
    )
    job = Job(2, tmp_path / "logs", 1, (sys.executable, "-c", program))
    job.start([f"cluster.tls={folders / 'run'}"])
    while "address" not in job.log(0).read_text():
        assert all(p.poll() is None for p in job.processes), job.log(0).read_text() + job.log(1).read_text()
        threading.Event().wait(0.1)
    address = job.log(0).read_text().split()[1]
    stray = f"import jax; jax.distributed.initialize('{address}', 2, 1, initialization_timeout=4)"
    other = Job(1, tmp_path / "stray", 1, (sys.executable, "-c", stray)).start([])
    assert other.wait(60) != [0]
    assert job.wait(60) == [0, 0], job.log(0).read_text()[-2000:] + job.log(1).read_text()[-2000:]
