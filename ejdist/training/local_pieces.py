"""Pieces of arrays on a disk of this host. A piece is (array name, span): whoever has it can give it to a device that needs it.

    FOLDER/<step>/index.json   what is where, of which save, with checksums
                  pieces.bin   the pieces after each other

The pieces that one device needs are its share. Shares are compared by a digest, as their lists are long: devices that hold the
same pieces, as replicas do, have the same share, whatever their numbers and hosts are.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ejdist.training.integrity import RUN_FILE, Changed, leaves_of

INDEX, PIECES = "index.json", "pieces.bin"
UNFINISHED = ".unfinished"
_THREADS = 4  # that compute checksums


class Piece(NamedTuple):
    """A part of an array: its name, and the slice as text, 0:4,8:16; "" for a number."""

    name: str
    span: str

    def __str__(self) -> str:
        return f"{self.name}[{self.span}]"


class Save(NamedTuple):
    """What distinguishes the saves of a run: the step, the number of the start that made it, and a digest of the whole state.
    Pieces of different saves are never mixed."""

    step: int
    start: int
    state: str


class Data(NamedTuple):
    """The bytes of a piece, their CRC-32, and the shape of the piece."""

    data: memoryview
    crc32: int
    shape: tuple[int, ...]


def save_of(step: int, start: int, run: dict[str, Any]) -> Save:
    """Returns what distinguishes a save.

    Args:
      run: its metadata with the digests of whole arrays, see `checkpoint_format.described`. These are the same on all hosts.
    """
    digests = {name: digest for name, digest in run.get("digest", {}).items() if name != RUN_FILE}
    text = json.dumps([digests, run.get("kinds"), run.get("keys")], sort_keys=True)
    return Save(step, start, hashlib.sha256(text.encode()).hexdigest()[:16])


def span_of(index: Any, shape: tuple[int, ...]) -> str:
    """Returns the span of a shard, from its slices."""
    bounds = (part.indices(size)[:2] for part, size in zip(index, shape))
    return ",".join(f"{start}:{stop}" for start, stop in bounds)


def shares_of(arrays: Any) -> dict[str, list[Piece]]:
    """Returns digest -> pieces for the share of each of this host's devices; devices with the same share count once.

    Args:
      arrays: tree of arrays, or of `jax.ShapeDtypeStruct` with shardings. Each device has all of a NumPy array.
    """
    of_devices: dict[Any, list[Piece]] = {}
    of_all: list[Piece] = []
    for name, leaf in leaves_of(arrays):
        if isinstance(leaf, np.ndarray):
            of_all.append(Piece(name, ""))
            continue
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            of_devices.setdefault(device, []).append(Piece(name, span_of(index, leaf.shape)))
    shares = {}
    for pieces in of_devices.values() or [[]]:
        share = sorted(of_all + pieces)
        shares[hashlib.sha256("\n".join(map(str, share)).encode()).hexdigest()[:16]] = share
    return shares


def pieces_of(arrays: Any) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yields the pieces on this host's devices, each once. Later steps do not change them."""
    leaves = leaves_of(arrays)
    for _, leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    for name, leaf in leaves:
        if isinstance(leaf, np.ndarray):
            yield Piece(name, ""), leaf.copy()
            continue
        held = {span_of(shard.index, leaf.shape): shard for shard in leaf.addressable_shards}
        for span, shard in held.items():
            # On the CPU this is the device's own memory, which JAX does not reuse while the array is alive.
            yield Piece(name, span), np.asarray(shard.data)


class PieceWriter:
    """Writes pieces to `FOLDER/<step>.unfinished`, which `finish` renames. Nothing is kept in memory."""

    def __init__(self, folder: Path, save: Save) -> None:
        self.index: dict[Piece, list[Any]] = {}
        self._folder, self._save = folder, save
        self._path = folder / f"{save.step}{UNFINISHED}"
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)
        self._file = (self._path / PIECES).open("wb")

    def add(self, piece: Piece, shape: Sequence[int], parts: Iterable[Any], crc32: int | None = None) -> bool:
        """Appends a piece. Returns False, and forgets it, if its checksum is not `crc32`.

        Args:
          parts: its bytes, in parts.
        """
        start, found = self._file.tell(), 0
        try:
            for part in parts:
                found = zlib.crc32(part, found)
                self._file.write(part)
        except BaseException:
            self._back_to(start)
            raise
        if crc32 is not None and found != crc32:
            self._back_to(start)
            return False
        self.index[piece] = [start, self._file.tell() - start, found, list(shape)]
        return True

    def _back_to(self, start: int) -> None:
        self._file.seek(start)
        self._file.truncate()

    def finish(self, run: dict[str, Any], shares: Iterable[str]) -> Path:
        """Completes the checkpoint, and returns its folder.

        Args:
          run: its metadata. shares: those of which all pieces are here.
        """
        index: dict[str, dict[str, Any]] = {}
        for piece, place in self.index.items():
            index.setdefault(piece.name, {})[piece.span] = place
        text = json.dumps({"run": run, "start": self._save.start, "shares": sorted(shares), "pieces": index})
        _flush(self._file)
        self._file.close()
        with (self._path / INDEX).open("w") as file:
            json.dump({"crc32": zlib.crc32(text.encode()), "body": text}, file)
            _flush(file)
        done = self._folder / str(self._save.step)
        shutil.rmtree(done, ignore_errors=True)
        self._path.rename(done)
        return done

    def discard(self) -> None:
        """Removes what `finish` has not completed."""
        self._file.close()
        shutil.rmtree(self._path, ignore_errors=True)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


@dataclass(frozen=True)
class Stored:
    """A checkpoint in one folder of this disk.

    Attributes:
      shares: the digests of the shares of which it has all pieces.
      pieces: piece -> [offset, bytes, CRC-32, shape].
      run: its metadata.
    """

    path: Path
    save: Save
    shares: frozenset[str]
    pieces: dict[Piece, list[Any]]
    run: dict[str, Any]

    @staticmethod
    def read(path: Path) -> Stored:
        """Reads the index of a checkpoint. Raises Changed, or another error, if it cannot be read."""
        stored = json.loads((path / INDEX).read_text())
        if zlib.crc32(stored["body"].encode()) != stored["crc32"]:
            raise Changed(f"{INDEX} is not what was saved")
        body = json.loads(stored["body"])
        pieces = {Piece(n, span): place for n, spans in body["pieces"].items() for span, place in spans.items()}
        end = max((offset + size for offset, size, _, _ in pieces.values()), default=0)
        shares = frozenset(body["shares"] if (path / PIECES).stat().st_size >= end else ())
        return Stored(path, save_of(int(path.name), body["start"], body["run"]), shares, pieces, body["run"])


def stored_in(root: Path) -> list[Stored]:
    """Returns the checkpoints in all folders of a run on this disk: its machine may have had another number. Damaged ones count
    as missing."""
    stored = []
    for path in (path for folder in entries(root) for path in entries(folder) if path.name.isdigit()):
        try:
            stored.append(Stored.read(path))
        except Exception:  # which one depends on what is damaged: JSON, a missing key or file
            continue
    return stored


def entries(folder: Path) -> list[Path]:
    """Returns what is in a folder, sorted; nothing if it cannot be listed: a broken disk has no pieces."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


class Pieces:
    """The pieces of one save on this disk, each as it was saved: copies with another checksum count as missing."""

    def __init__(self, stored: Iterable[Stored]) -> None:
        self._stored = [(one, data) for one in stored if (data := _mapped(one.path / PIECES)) is not None]
        self._intact: dict[Piece, Data] = {}

    def find(self, piece: Piece) -> Data | None:
        """Returns a piece, None if no folder has it intact."""
        if piece not in self._intact:
            for one, data in self._stored:
                offset, size, crc32, shape = one.pieces.get(piece, (0, -1, 0, ()))
                part = data[offset : offset + max(0, size)]
                if len(part) == size and zlib.crc32(part) == crc32:
                    self._intact[piece] = Data(part, crc32, tuple(shape))
                    break
        return self._intact.get(piece)

    def lacking(self, wanted: Iterable[Piece]) -> list[Piece]:
        """Returns those of these pieces that no folder has intact, sorted."""
        each = sorted(set(wanted))
        with ThreadPoolExecutor(_THREADS) as pool:
            return [piece for piece, found in zip(each, pool.map(self.find, each), strict=True) if found is None]

    def add(self, stored: Stored) -> None:
        """Adds a folder of this save."""
        if (data := _mapped(stored.path / PIECES)) is not None:
            self._stored.append((stored, data))


def _mapped(path: Path) -> memoryview | None:
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):  # missing or empty
        return None
