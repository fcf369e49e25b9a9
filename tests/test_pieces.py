"""Pieces of local checkpoints: which step all of them exist of, and how a host gets those that it lacks from others."""

import shutil
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import certificates
import jax
import numpy as np
import pytest
from damaged_checkpoints import BESIDE, described, small_state
from many_hosts import hosts_of_threads

from ejdist.cluster.hosts import Hosts
from ejdist.cluster.presence import presence
from ejdist.training import peers
from ejdist.training.checkpoint_format import DamagedCheckpoint
from ejdist.training.integrity import Changed
from ejdist.training.local_pieces import Piece, Pieces, PieceWriter, Save, Stored, shares_of
from ejdist.training.local_plan import plan_of
from ejdist.training.local_tier import LocalCheckpoints

ALONE = Hosts(60, before_devices=True)


def hosts_with(*hosts):
    """Each host: the shares that it needs, and step or (step, start, state) -> the shares that it holds."""
    reports = {}
    for i, (needs, holds) in enumerate(hosts):
        saves = {(save if isinstance(save, tuple) else (save, 0, "s")): shares for save, shares in holds.items()}
        reports[i] = [f"name-{i}", {"needs": [*needs], "holds": [[*save, [*held]] for save, held in saves.items()]}]
    return reports


@pytest.mark.parametrize(
    ("hosts", "starts", "steps", "why"),
    [
        ([("a", {50: "a", 40: "a"}), ("a", {})], [], [(50, 0), (40, 0)], ""),
        ([("a", {50: "a"}), ("b", {}), ("a", {}), ("b", {50: "b"})], [], [(50, 0)], ""),
        ([("ab", {}), ("cd", {50: "abcd"})], [], [(50, 1)], ""),
        ([("a", {50: "b"}), ("b", {50: "a"})], [], [(50, None)], ""),
        (
            [("a", {60: "a", 50: "a"}), ("b", {50: "b"}), ("a", {}), ("b", {})],
            [],
            [(50, 0)],
            "of step 60 the pieces for hosts 1, 3 are on no disk",
        ),
        ([("a", {50: "a"}), ("b", {})], [], [], "of step 50 the pieces for host 1 are on no disk"),
        (
            [("a", {(50, 0, "s"): "a"}), ("b", {(50, 0, "t"): "b"})],
            [],
            [],
            "the pieces for host 0 are on no disk",
        ),
        (
            [("a", {(50, 0, "s"): "a"}), ("b", {(50, 1, "s"): "b"})],
            [],
            [],
            "the pieces for host 0 are on no disk",
        ),
        ([("a", {(50, 0, "s"): "a", (40, 0, "s"): "a"})], [0, 40], [(40, None)], ""),
        ([("a", {(50, 0, "s"): "a"})], [0, 40], [], "the run has gone back to step 40 since"),
        ([("a", {(50, 1, "s"): "a"})], [0, 40], [(50, None)], ""),
        ([("x", {50: "a"}), ("y", {50: "b"})], [], [], "cut for another mesh, or is of another model"),
        ([("a", {}), ("b", {})], [], [], "no host has a checkpoint there"),
    ],
)
def test_a_run_resumes_from_the_newest_step_of_which_every_piece_is_on_some_disk(hosts, starts, steps, why):
    saves, told = plan_of(hosts_with(*hosts), starts)
    assert [(step, source) for step, _, _, source in saves] == steps
    assert why in told if why else told == ""


def test_what_a_thousand_hosts_read_of_it_is_short():
    hosts = [(f"{i:016x}", dict.fromkeys((7, 8, 9), f"{i:016x}") if i % 8 else {}) for i in range(1024)]
    saves, why = plan_of(hosts_with(*[([needs], {s: [h] for s, h in holds.items()}) for needs, holds in hosts]))
    assert saves == [] and why == (
        "of step 9 the pieces for hosts 0, 8, 16, 24, 32, 40, 48, 56 and 120 more are on no disk"
    )


def test_replicas_have_the_same_share_whatever_the_mesh_and_one_that_cuts_otherwise_has_not():
    def shares(axes, spec):
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        like = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=placed)
        return shares_of({"weight": like, "step": np.zeros(())})

    two = shares({"dp": 2, "fsdp": 2}, ("fsdp",))
    assert two == shares({"dp": 4, "fsdp": 2}, ("fsdp",)) == shares({"fsdp": 2}, ("fsdp",)) and len(two) == 2
    assert sorted(two.values()) == [[("step", ""), ("weight", f"{a}:{a + 4},0:4")] for a in (0, 4)]
    assert not set(two) & set(shares({"fsdp": 4}, ("fsdp",)))


# -- hosts that are threads ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state():
    return small_state()


def saved(disk, state, *steps):
    tier = LocalCheckpoints(disk, "a-run", ALONE)
    for step in steps:
        tier.save(step, state, BESIDE)
    tier.wait()
    return tier


@pytest.fixture
def restored(monkeypatch, tmp_path, state):
    """Returns a function: step -> of each host, each with its own disk, its steps, what it restores or raises, and its tier."""
    together = hosts_of_threads(monkeypatch)

    def run(count, step):
        def act(hosts):
            tier = LocalCheckpoints(tmp_path / str(hosts.index), "a-run", hosts)
            steps, _ = tier.common(described(state))
            return SimpleNamespace(
                steps=steps, tier=tier, found=tier.restore(step, described(state), hosts.first_error)
            )

        return together(count, act)

    return run


def same(found, state):
    return jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), found, state))


def harm(disk, step, piece):
    stored = Stored.read(disk / "a-run" / "host-0-of-1" / str(step))
    path = stored.path / "pieces.bin"
    data = bytearray(path.read_bytes())
    data[stored.pieces[piece][0]] ^= 1
    path.write_bytes(data)


def test_a_machine_without_pieces_gets_them_from_a_replica_and_has_them_from_then_on(restored, tmp_path, state):
    """Host 0's machine is new, host 1's has the steps 1 and 2, host 2's only step 1."""
    saved(tmp_path / "1", state, 1, 2)
    saved(tmp_path / "2", state, 1)
    hosts = restored(3, 2)
    for host in hosts:
        assert host.steps == [2, 1] and host.found[1] == BESIDE and same(host.found[0], state)
    count = len({piece for share in shares_of(described(state)._asdict()).values() for piece in share})
    assert hosts[0].tier.filled == f", with {2 * count} pieces for hosts 0, 2 from others"
    for disk in "02":
        alone = LocalCheckpoints(tmp_path / disk, "a-run", ALONE)
        assert alone.common(described(state))[0][0] == 2 and same(
            alone.restore(2, described(state), lambda m, w: w)[0], state
        )


def test_a_damaged_piece_is_no_piece(restored, tmp_path, state):
    piece, other = Piece("params.embedding", "0:32,0:32"), Piece("params.norm", "0:32")
    for disk, damaged in (("0", piece), ("1", other)):
        saved(tmp_path / disk, state, 1)
        harm(tmp_path / disk, 1, damaged)
    for host in restored(2, 1):
        assert same(host.found[0], state) and host.tier.filled == ", with 2 pieces for hosts 0, 1 from others"
    for disk in "01":
        saved(tmp_path / disk, state, 1)
        harm(tmp_path / disk, 1, piece)
    for folder in tmp_path.glob("*/a-run/fetched-*"):
        (folder / "1" / "pieces.bin").write_bytes(b"")
    for error in restored(2, 1):
        assert isinstance(error, DamagedCheckpoint)
        assert "params.embedding[0:32,0:32] did not come from another host: no host has it intact on its disk" in str(
            error
        )


def test_pieces_of_two_states_are_not_mixed(tmp_path, state):
    """The machine was host 0 of another start, whose file is cut, and then host 7, which saved other numbers at that step."""
    first = saved(tmp_path, state, 1)
    path = first.directory / "1" / "pieces.bin"
    other = jax.tree.map(lambda x: x + 1, state)
    with path.open("rb") as file:
        data = file.read()
    first.directory.rename(first.directory.parent / "kept")
    saved(tmp_path, other, 1)
    first.directory.rename(first.directory.parent / "host-7-of-8")
    (first.directory.parent / "kept").rename(first.directory)
    path.write_bytes(data[:-8])
    tier = LocalCheckpoints(tmp_path, "a-run", ALONE)
    assert same(tier.restore(1, described(state), lambda moment, word: word)[0], other)


def test_a_host_whose_disk_is_full_ends_the_restore_on_all(restored, tmp_path, state, monkeypatch):
    saved(tmp_path / "0", state, 1)
    add = PieceWriter.add

    def full(self, piece, *rest):
        if "norm" in piece.name:
            raise OSError(28, "No space left on device")
        return add(self, piece, *rest)

    monkeypatch.setattr(PieceWriter, "add", full)
    for error in restored(2, 1):
        assert isinstance(error, DamagedCheckpoint) and "No space left on device" in str(error)
    assert not list(tmp_path.glob("1/a-run/*/*"))


# -- over TCP ------------------------------------------------------------------------------------------------------------

WHOLE = {Piece("a", "0:4"): np.arange(4, dtype=np.uint8), Piece("b", "0:3"): np.arange(3, dtype=np.uint8)}
SAVE = Save(5, 0, "s")


def pieces_in(folder, pieces=WHOLE):
    writer = PieceWriter(folder, SAVE)
    for piece, array in pieces.items():
        writer.add(piece, array.shape, [array])
    return Pieces([Stored.read(writer.finish({}, ["share"]))])


def asked(place, *lines):
    with socket.create_connection((place.address, place.port), timeout=10) as connection:
        try:
            connection.sendall(b"".join(lines))
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").read()
        except OSError:  # closed before it has read all
            return b""


def test_pieces_are_for_those_who_know_the_key_and_others_do_no_harm(tmp_path):
    with peers.PieceServer(pieces_in(tmp_path), "localhost") as server:
        key, a = f"{server.place.key}\n".encode(), b'["a", "0:4"]\n'
        for lines in ([b"\n", a], [b"x" * 100_000], [b"GET / HTTP/1.1\r\n\r\n", a], [key[:-2] + b"\n", a]):
            assert asked(server.place, *lines) == b""
        assert (
            asked(server.place, key, b'{"a": 1}\n') in (b"", b"null\n") and asked(server.place, key, b"[[]]\n") == b""
        )
        assert asked(server.place, key, b'["../a", "0:4"]\n', a).startswith(b"null\n[4, ")
        writer = PieceWriter(tmp_path / "to", SAVE)
        peers.fetch(server.place, [*WHOLE, Piece("c", "")], writer)
        assert list(writer.index) == list(WHOLE)
    with pytest.raises(OSError):
        asked(server.place, key)


@pytest.mark.parametrize("sent", [b"", b"null", b'[4, 0, "x"', b"[9, 7, [9]]\n12345", b"[4, 7, [4]]\n1234null\n"])
def test_who_breaks_off_or_sends_other_bytes_is_left_for_the_next(tmp_path, monkeypatch, sent):
    monkeypatch.setattr(peers, "_PART", 3)
    monkeypatch.setattr(peers, "_IDLE", 0.2)
    server = socket.create_server(("localhost", 0))

    def answer():
        with server.accept()[0] as connection:
            connection.recv(100)
            connection.sendall(sent)

    threading.Thread(target=answer, daemon=True).start()
    broken = peers.Place("localhost", server.getsockname()[1], "key")
    with peers.PieceServer(pieces_in(tmp_path / "from"), "localhost") as good:
        places = {2: ["name", broken], 3: ["name", good.place]}
        # No host has all of the share: others may have some of its pieces.
        monkeypatch.setattr(peers, "posted", lambda topic: places if topic == "topic" else {})
        writer = PieceWriter(tmp_path / "to", SAVE)
        peers.gather("topic", {"share": list(WHOLE)}, WHOLE, writer, 4)
        path = writer.finish({}, ["share"])
        assert (path / "pieces.bin").stat().st_size == 7
        found = Pieces([Stored.read(path)])
        for piece, array in WHOLE.items():
            data = found.find(piece)
            assert data is not None and bytes(data.data) == array.tobytes()
        places.pop(3)
        with pytest.raises(Changed, match=r"a\[0:4\] and 1 more pieces did not come from another host: host 2 at "):
            peers.gather("topic", {"share": list(WHOLE)}, WHOLE, PieceWriter(tmp_path / "to", SAVE), 4)
    server.close()


def test_where_the_network_lets_nothing_through_few_hosts_are_tried(tmp_path, monkeypatch):
    tried = []

    def nothing(place, wanted, writer, tls):
        tried.append(place)
        raise peers.PeerFailed(f"{place} does not give its pieces (TimeoutError: timed out)")

    monkeypatch.setattr(peers, "fetch", nothing)
    monkeypatch.setattr(peers, "posted", lambda topic: {i: ["name", f"10.0.0.{i}:7"] for i in range(100)})
    why = r"host 49 at 10.0.0.49:7 does not give its pieces \(TimeoutError: timed out\)$"
    with pytest.raises(Changed, match=rf"a\[0:4\] and 1 more pieces did not come from another host: {why}"):
        peers.gather("topic", {"share": list(WHOLE)}, WHOLE, PieceWriter(tmp_path, SAVE), 149)
    assert len(tried) == 4


def test_with_certificates_pieces_go_over_tls_and_to_nobody_else(tmp_path, monkeypatch):
    authority = certificates.make(tmp_path / "tls")
    certificates.make(tmp_path / "stranger")
    certificates.make(tmp_path / "service", uri="https://run", authority=authority)
    monkeypatch.setattr(presence(), "tls", str(tmp_path / "tls"))
    monkeypatch.setattr(peers, "post", lambda topic, place: places.append(place))
    places = []
    with peers.offered("topic", ["share"], pieces_in(tmp_path / "from"), 0):
        writer = PieceWriter(tmp_path / "to", SAVE)
        peers.fetch(places[0], WHOLE, writer, str(tmp_path / "tls"))
        assert list(writer.index) == list(WHOLE)
        for tls in (None, str(tmp_path / "stranger"), str(tmp_path / "service")):
            writer = PieceWriter(tmp_path / "to", SAVE)
            with pytest.raises(peers.PeerFailed, match="does not give its pieces"):
                peers.fetch(places[0], WHOLE, writer, tls)
            assert not writer.index


# -- processes -----------------------------------------------------------------------------------------------------------

PROCESS = """
import sys
import jax
index, count, port, disk, doing = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
jax.config.update("jax_num_cpu_devices", 4 // count)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ejdist.cluster.hosts import Hosts
from ejdist.mesh import make_mesh
from ejdist.training.local_tier import LocalCheckpoints
mesh, hosts = make_mesh(dp=2, fsdp=2), Hosts(60)
whole = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "norm": np.ones(4, np.float32)}
places = {"w": NamedSharding(mesh, PartitionSpec("fsdp")), "norm": NamedSharding(mesh, PartitionSpec())}
state = {n: jax.make_array_from_callback(x.shape, places[n], lambda i, x=x: x[i]) for n, x in whole.items()}
like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[n]) for n, x in whole.items()}
tier = LocalCheckpoints(disk, "a-run", hosts)
if doing == "save":
    for step in (1, 2):
        tier.save(step, state, {"data": step})
    tier.wait()
else:
    steps, why = tier.common(like)
    found, run = tier.restore(steps[0], like, hosts.first_error)
    for name, array in found.items():
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), whole[name][shard.index])
    print("from", steps, run["data"], tier.filled)
jax.distributed.shutdown()
"""


def processes(disks, doing):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", PROCESS]
    started = [
        subprocess.Popen([*command, str(i), str(len(disks)), port, str(disk), doing], stdout=subprocess.PIPE, text=True)
        for i, disk in enumerate(disks)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(disks), said
    return said


@pytest.mark.slow
def test_half_of_each_replica_is_enough_for_as_many_hosts_or_fewer_with_other_numbers(tmp_path):
    """Each of four hosts has half of the pieces, and the machines of hosts 0 and 3, of two replicas, are replaced."""
    disks = [tmp_path / str(i) for i in range(4)]
    processes(disks, "save")
    for disk in (disks[0], disks[3]):
        shutil.rmtree(disk)
    shutil.copytree(tmp_path, tmp_path / "before")
    for said in processes(disks, "restore"):
        assert "from [2, 1] 2 , with 4 pieces for hosts 0, 3 from others" in said
    disks = [tmp_path / "before" / i for i in "21"]
    for said in processes(disks, "restore"):
        assert "from [2, 1] 2 , with 2 pieces for hosts 0, 1 from others" in said
