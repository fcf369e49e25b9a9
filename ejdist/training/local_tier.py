"""Local checkpoints on each host's own disk, between the durable ones (`checkpoint.local`).

Each host writes the shards of its own devices, each shard once, to its own folder: nothing goes over the network, and no host
waits for another. A run restarted on the same mesh, with the same host numbers, resumes from the last step that all hosts still
have. If a host has lost its folder, or arrays are sharded differently, the run falls back to `checkpoint.dir`.

    DIR/<id of the run>/host-2-of-4/<step>/index.json   what is where, of which run, with checksums
                                           pieces.bin   the arrays' pieces after each other
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejdist.cluster.hosts import Hosts
from ejdist.training.checkpoint_format import (
    CheckpointError,
    DamagedCheckpoint,
    Writing,
    check_same_model,
    described,
    keys_of,
    nonempty_fields,
    split,
    whole,
)
from ejdist.training.integrity import Changed, check_digests, leaves_of, reason_of
from ejdist.training.pytree_io import like_arrays, name_of, to_arrays

# Two: one stays complete while the next is written, and one is on all hosts while only some have the next.
_KEPT = 2
_NAMED = 8  # hosts that a message names
_INDEX, _PIECES = "index.json", "pieces.bin"


class LocalCheckpoints:
    """This host's checkpoints of one run. Nothing is created until the first save."""

    def __init__(self, folder: str | Path, run_id: str, hosts: Hosts) -> None:
        """`run_id` distinguishes runs that share a folder."""
        self._root, self._hosts = Path(folder).expanduser().absolute() / run_id, hosts
        self.directory = self._root / f"host-{hosts.index}-of-{hosts.count}"
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def steps(self, like: Any) -> list[int]:
        """Returns the steps whose checkpoint has all shards that this host's devices need, newest first.

        Args:
          like: tree of `jax.ShapeDtypeStruct` with shardings.
        """
        wanted = {name: set(_spans(leaf)) for name, leaf in leaves_of(nonempty_fields(like_arrays(like)))}
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        complete = []
        for step in sorted((int(p.name) for p in paths if p.name.isdigit()), reverse=True):
            try:
                pieces = self._index(step)["pieces"]
            except Exception:  # damaged: as if it were not there
                continue
            if all(spans <= set(pieces.get(name, ())) for name, spans in wanted.items()):
                complete.append(step)
        return complete

    def common(self, like: Any) -> tuple[list[int], list[int]]:
        """Returns (the steps that all hosts have, newest first; the hosts that have none, nine at most)."""
        moment = "the list of checkpoints in checkpoint.local"
        steps, without = self._hosts.reduce(moment, self.steps(like), _common)
        return steps, without

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Starts writing a checkpoint; returns once the arrays are copied and the checkpoint before it is on disk.

        Raises:
          CheckpointError: the one before it could not be written. ValueError: a leaf of the state cannot be saved.
        """
        self.wait()
        arrays = nonempty_fields(to_arrays(state))
        body = {"run": described(arrays, keys_of(state), run)}
        pieces = list(_pieces(arrays))
        self._thread = threading.Thread(target=self._write, args=(step, body, pieces), name="local checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until everything is on disk. Raises CheckpointError if a write failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with Writing(str(self.directory), None):
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def described(self, step: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns (the `run` passed to `save`, the kinds of its arrays and keys). Raises whatever is wrong with it."""
        run, _, kinds, keys = split(self._index(step)["run"])
        return run, kinds | keys

    def restore(self, step: int, like: Any, first: Any) -> tuple[Any, dict[str, Any]]:
        """Returns (state, the `run` passed to `save`), as `Checkpoints.restore` does.

        Raises:
          DamagedCheckpoint: a host cannot read it, or its bits differ. CheckpointError: it has another model.
        """
        wanted = like_arrays(like)
        arrays, run, digests, reason = None, {}, {}, None
        try:
            body = self._index(step)
            run, digests, kinds, keys = split(body["run"])
            check_same_model(f"the local checkpoint of step {step}", like, kinds | keys)
            arrays = self._read(step, body["pieces"], nonempty_fields(wanted))
        except CheckpointError:
            raise
        except Exception as error:
            reason = reason_of(error)
        self._agree(step, first, reason)
        try:
            check_digests(arrays, digests)
        except Changed as error:
            reason = str(error)
        self._agree(step, first, reason)
        return whole(arrays, wanted, like), run

    def _agree(self, step: int, first: Any, reason: str | None) -> None:
        if reason := first(f"the reading of local checkpoint {step}", reason):
            raise DamagedCheckpoint(f"checkpoint {self.directory / str(step)} cannot be read ({reason})")

    def set_aside(self, step: int) -> Path:
        """Removes an unreadable checkpoint. Every host removes its own."""
        shutil.rmtree(self.directory / str(step), ignore_errors=True)
        return self.directory

    def forget_after(self, step: int) -> None:
        """Removes checkpoints of later steps, and interrupted ones: the run does not resume from them."""
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            if not path.name.isdigit() or int(path.name) > step:
                shutil.rmtree(path, ignore_errors=True)

    def check_writable(self) -> None:
        """Raises ValueError if nothing can be written here."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / ".written").touch()
            (self.directory / ".written").unlink()
        except OSError as error:
            raise ValueError(
                f"checkpoint.local: {self.directory} cannot be written ({error.strerror}); give a folder on a local disk of "
                "each host, or leave it out"
            ) from error

    def _index(self, step: int) -> dict[str, Any]:
        """Returns the index of a checkpoint. Raises Changed, or another error, if it cannot be read."""
        stored = json.loads((self.directory / str(step) / _INDEX).read_text())
        if zlib.crc32(stored["body"].encode()) != stored["crc32"]:
            raise Changed(f"{_INDEX} is not what was saved")
        return json.loads(stored["body"])

    def _read(self, step: int, pieces: dict[str, Any], like: Any) -> Any:
        with (self.directory / str(step) / _PIECES).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

        def one(path: Any, leaf: Any) -> Any:
            name, read = name_of(path), {}

            def piece(index: Any) -> np.ndarray:
                span = _span(index, leaf.shape)
                if span not in read:
                    offset, size, crc, shape = pieces[name][span]
                    if len(data) < offset + size or zlib.crc32(data[offset : offset + size]) != crc:
                        raise Changed(f"{name}[{span}] in {_PIECES} is not what was saved")
                    read[span] = np.frombuffer(data[offset : offset + size], leaf.dtype).reshape(shape)
                return read[span]

            if isinstance(leaf, np.ndarray):
                return piece(()).copy()
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, piece)

        return jax.block_until_ready(jax.tree_util.tree_map_with_path(one, like))

    def _write(self, step: int, body: dict[str, Any], pieces: list[tuple[str, str, np.ndarray]]) -> None:
        unfinished = self.directory / f"{step}.unfinished"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            index: dict[str, dict[str, Any]] = {}
            with (unfinished / _PIECES).open("wb") as file:
                for name, span, array in pieces:
                    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    index.setdefault(name, {})[span] = [file.tell(), flat.nbytes, zlib.crc32(flat), array.shape]
                    file.write(flat)
                _flush(file)
            text = json.dumps(body | {"pieces": index})
            with (unfinished / _INDEX).open("w") as file:
                json.dump({"crc32": zlib.crc32(text.encode()), "body": text}, file)
                _flush(file)
            whole_one = self.directory / str(step)
            shutil.rmtree(whole_one, ignore_errors=True)
            unfinished.rename(whole_one)
            for old in sorted((int(p.name) for p in self.directory.iterdir() if p.name.isdigit()), reverse=True)[
                _KEPT:
            ]:
                shutil.rmtree(self.directory / str(old))
        except BaseException as error:
            self._failure = error


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _common(reports: dict[int, Any]) -> tuple[list[int], list[int]]:
    steps_of = {host: steps for host, (_, steps) in sorted(reports.items())}
    without = [host for host, steps in steps_of.items() if not steps]
    return sorted(set.intersection(*map(set, steps_of.values())), reverse=True), without[: _NAMED + 1]


def _pieces(arrays: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (array name, span, shard) for the shards on this host's devices, each once. Later steps do not change them."""
    leaves = leaves_of(arrays)
    for _, leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    for name, leaf in leaves:
        if isinstance(leaf, np.ndarray):
            yield name, "", leaf.copy()
            continue
        held = {_span(shard.index, leaf.shape): shard for shard in leaf.addressable_shards}
        for span, shard in held.items():
            # On the CPU this is the device's own memory, which JAX does not reuse while the array is alive.
            yield name, span, np.asarray(shard.data)


def _spans(leaf: Any) -> list[str]:
    if isinstance(leaf, np.ndarray):
        return [""]
    return [_span(index, leaf.shape) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()]


def _span(index: Any, shape: tuple[int, ...]) -> str:
    """Returns a shard's slice of its array as text, 0:4,8:16; "" for a number."""
    bounds = (part.indices(size)[:2] for part, size in zip(index, shape))
    return ",".join(f"{start}:{stop}" for start, stop in bounds)
