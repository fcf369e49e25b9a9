"""Local checkpoints on each host's own disk, between the durable ones (`checkpoint.local`).

Each host writes the pieces on its own devices, each piece once, to its own folder: nothing goes over the network, and no host
waits for another. A restarted run resumes from the newest step of which every piece is on some host's disk. Hosts may have
other numbers than before; one that was replaced gets its pieces from hosts that have the same ones, such as another replica of
`mesh.dp` (`ejdist.training.peers`). If a piece is on no disk, or arrays are cut otherwise, the run falls back to
`checkpoint.dir`.

    DIR/<id of the run>/host-2-of-4/<step>/      what this host has saved, see `ejdist.training.local_pieces`
                        fetched-2-of-4/<step>/   what it has from others
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejdist.cluster.hosts import Hosts
from ejdist.training.checkpoint_format import (
    DamagedCheckpoint,
    Writing,
    check_same_model,
    described,
    keys_of,
    nonempty_fields,
    split,
    whole,
)
from ejdist.training.integrity import Changed, check_digests, reason_of
from ejdist.training.local_pieces import (
    Piece,
    Pieces,
    PieceWriter,
    Save,
    Stored,
    entries,
    pieces_of,
    save_of,
    shares_of,
    span_of,
    stored_in,
)
from ejdist.training.local_plan import plan_of, short_of
from ejdist.training.peers import gather, offered
from ejdist.training.pytree_io import like_arrays, name_of, to_arrays

# Complete ones that stay while the next is written: all hosts have the older of these two once the arrays of the next are
# computed, which takes all hosts, as a save waits for the one before it.
_KEPT = 2
_START = ".start"  # in a folder: which start of the run writes there


@dataclass(frozen=True)
class _Found:
    """A save whose pieces are on the disks of the hosts; `stored`: what of it is on this one."""

    save: Save
    stored: Sequence[Stored]
    run: dict[str, Any]


class LocalCheckpoints:
    """This host's checkpoints of one run. Nothing is created until the first save."""

    def __init__(self, folder: str | Path, run_id: str, hosts: Hosts, starts: Sequence[int] = ()) -> None:
        """Args:
        run_id: distinguishes runs that share a folder.
        starts: on host 0, the step from which each start of the run went on, in order.
        """
        self._root, self._hosts, self._starts = Path(folder).expanduser().absolute() / run_id, hosts, starts
        self.run_id = run_id
        me = f"{hosts.index}-of-{hosts.count}"
        self.directory, self._fetched = self._root / f"host-{me}", self._root / f"fetched-{me}"
        self.start = len(starts)  # the number of this start, which `Saves.begin` sets on all hosts
        self.filled = ""  # which hosts had to get pieces from others at the last restore, for the log
        self._found: dict[int, _Found] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def common(self, like: Any) -> tuple[list[int], str]:
        """Returns (the steps of which every piece is on some host's disk, newest first; why the newest save is not one of them,
        as a part of a sentence, "" if it is). Call it on all hosts.

        Args:
          like: tree of `jax.ShapeDtypeStruct` with shardings.
        """
        stored = stored_in(self._root)
        shares: dict[Save, set[str]] = {}
        for one in stored:
            shares.setdefault(one.save, set()).update(one.shares)
        report = {
            "needs": sorted(shares_of(nonempty_fields(like_arrays(like)))),
            "holds": [[*save, sorted(held)] for save, held in sorted(shares.items())],
        }
        moment = "the list of checkpoints in checkpoint.local"
        saves, why = self._hosts.reduce(moment, report, partial(plan_of, starts=self._starts))
        self._found = {}
        for *save, source in saves:
            here = [one for one in stored if one.save == Save(*save)]
            run = here[0].run if here else None
            if source is not None:  # a host has nothing of it
                what = f"what describes local checkpoint {save[0]}"
                run = self._hosts.broadcast(what, run, source=source, needed=run is None)
            self._found[save[0]] = _Found(Save(*save), here, run or {})
        return list(self._found), why

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Starts writing a checkpoint; returns once the arrays are copied and the checkpoint before it is on disk.

        Raises:
          CheckpointError: the one before it could not be written. ValueError: a leaf of the state cannot be saved.
        """
        self.wait()
        arrays = nonempty_fields(to_arrays(state))
        run = described(arrays, keys_of(state), run)
        arguments = save_of(step, self.start, run), run, list(shares_of(arrays)), list(pieces_of(arrays))
        self._thread = threading.Thread(target=self._write, args=arguments, name="local checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until everything is on disk. Raises CheckpointError if a write failed."""
        self.close()
        self._thread = None
        with Writing(str(self.directory), None):
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def described(self, step: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns (the `run` passed to `save`, the kinds of its arrays and keys) of a step that `common` has listed. Raises
        whatever is wrong with it."""
        run, _, kinds, keys = split(self._found[step].run)
        return run, kinds | keys

    def restore(self, step: int, like: Any, first: Any) -> tuple[Any, dict[str, Any]]:
        """Returns (state, the `run` passed to `save`), as `Checkpoints.restore` does. Gets pieces that this host lacks from
        others, and writes them to its disk first.

        Raises:
          DamagedCheckpoint: no host can read a piece, or its bits differ. CheckpointError: it has another model.
        """
        if step not in self._found:
            self.common(like)
        if step not in self._found:
            raise DamagedCheckpoint(f"checkpoint {self.directory / str(step)} cannot be read (pieces are missing)")
        found, wanted = self._found[step], like_arrays(like)
        arrays, run, digests, reason = None, {}, {}, None
        try:
            run, digests, kinds, keys = split(found.run)
            check_same_model(f"the local checkpoint of step {step}", like, kinds | keys)
        except Changed as error:
            reason = str(error)
        pieces = self._pieces(found, shares_of(nonempty_fields(wanted)), reason, first)
        try:
            arrays = _placed(pieces, nonempty_fields(wanted))
        except Exception as error:
            reason = reason_of(error)
        self._agree(step, first, reason)
        try:
            check_digests(arrays, digests)
        except Changed as error:
            reason = str(error)
        self._agree(step, first, reason)
        return whole(arrays, wanted, like), run

    def _pieces(self, found: _Found, shares: dict[str, list[Piece]], reason: str | None, first: Any) -> Pieces:
        """Returns the pieces of these shares, once this host has those that it lacks from others. Call it on all hosts.

        Args:
          reason: why this host cannot read the checkpoint, if so.

        Raises:
          DamagedCheckpoint: a host cannot read it.
        """
        pieces, (step, start, state) = Pieces(found.stored), found.save
        lacking = pieces.lacking(piece for share in shares.values() for piece in share)
        moment = f"the look for pieces of local checkpoint {step}"
        reason, short = self._hosts.reduce(moment, [len(lacking), reason], short_of)
        self._agree(step, lambda moment, word: word, reason)
        self.filled = f", with {short} from others" if short else ""
        if not short:
            return pieces
        if self._hosts.count == 1:
            more = f" and {len(lacking) - 1:,} more pieces are" if len(lacking) > 1 else " is"
            self._agree(step, first, f"{lacking[0]}{more} not what was saved")
        topic = f"pieces/{step}-{start}-{state}"
        here = set[str]().union(*(one.shares for one in found.stored))
        offer = offered(topic, here, pieces, self._hosts.index) if found.stored else contextlib.nullcontext()
        with offer:
            self._hosts.reduce("the offer of pieces", None, lambda reports: None)
            if lacking:
                try:
                    self._fetch(found, topic, shares, lacking, pieces)
                except Exception as error:  # of the disk, or that no host has a piece
                    reason = reason_of(error)
            self._agree(step, first, reason)  # while all still offer theirs
        return pieces

    def _fetch(
        self, found: _Found, topic: str, shares: dict[str, list[Piece]], lacking: list[Piece], pieces: Pieces
    ) -> None:
        """Writes pieces from other hosts to this host's disk, and adds them to `pieces`."""
        writer = PieceWriter(self._fetched, found.save)
        try:
            gather(topic, shares, lacking, writer, self._hosts.index)
            complete = [digest for digest, share in shares.items() if all(piece in writer.index for piece in share)]
            pieces.add(Stored.read(writer.finish(found.run, complete)))
        finally:
            writer.discard()

    def _agree(self, step: int, first: Any, reason: str | None) -> None:
        if reason := first(f"the reading of local checkpoint {step}", reason):
            raise DamagedCheckpoint(f"checkpoint {self.directory / str(step)} cannot be read ({reason})")

    def set_aside(self, step: int) -> Path:
        """Removes an unreadable checkpoint. Every host removes its own."""
        for folder in entries(self._root):
            shutil.rmtree(folder / str(step), ignore_errors=True)
        self._found.pop(step, None)
        return self.directory

    def forget_after(self, step: int) -> None:
        """Removes checkpoints of later steps, and interrupted ones: the run does not resume from them."""
        for folder in entries(self._root):
            for path in entries(folder):
                if path.is_dir() and (not path.name.isdigit() or int(path.name) > step):
                    shutil.rmtree(path, ignore_errors=True)

    def check_writable(self) -> None:
        """Raises ValueError if nothing can be written here. Marks the folder as that of this start."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / _START).write_text(str(self.start))
        except OSError as error:
            raise ValueError(
                f"checkpoint.local: {self.directory} cannot be written ({error.strerror}); give a folder on a local disk of "
                "each host, or leave it out"
            ) from error

    def _write(self, save: Save, run: dict[str, Any], shares: list[str], pieces: list[tuple[Piece, Any]]) -> None:
        try:
            self._remove_old(save.step)
            writer = PieceWriter(self.directory, save)
            for piece, array in pieces:
                writer.add(piece, array.shape, [np.ascontiguousarray(array).reshape(-1).view(np.uint8)])
            writer.finish(run, shares)
        except BaseException as error:
            self._failure = error

    def _remove_old(self, step: int) -> None:
        """Removes what is older than the checkpoints that stay, also from folders of earlier starts: of a host that had another
        number, and of pieces from others."""
        done = sorted(int(p.name) for p in _steps_in(self.directory) if int(p.name) < step)
        if len(done) < _KEPT:
            return
        for folder in entries(self._root):
            if folder == self.directory or not self._is_written(folder):
                for path in _steps_in(folder):
                    if int(path.name) < done[-_KEPT]:
                        shutil.rmtree(path, ignore_errors=True)

    def _is_written(self, folder: Path) -> bool:
        """Returns whether another process on this disk, of the same start, writes to a folder."""
        try:
            return (folder / _START).read_text() == str(self.start)
        except OSError:
            return False


def _steps_in(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.name.isdigit()]


def _placed(pieces: Pieces, like: Any) -> Any:
    """Returns the arrays on this host's devices. Raises Changed if a piece is missing."""

    def one(path: Any, leaf: Any) -> Any:
        def piece(index: Any) -> np.ndarray:
            wanted = Piece(name_of(path), span_of(index, leaf.shape))
            found = pieces.find(wanted)
            if found is None:
                raise Changed(f"{wanted} is not what was saved")
            return np.frombuffer(found.data, leaf.dtype).reshape(found.shape)

        if isinstance(leaf, np.ndarray):
            return piece(()).copy()
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, piece)

    return jax.block_until_ready(jax.tree_util.tree_map_with_path(one, like))
