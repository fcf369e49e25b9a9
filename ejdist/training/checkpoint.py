"""Asynchronous checkpoints through Orbax. Each holds the state, the data cursor and the recipe.

`ejdist.training.integrity` describes the digests stored with the arrays, which reveal storage that returns different bits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from ejdist.paths import check_home, check_place, is_step, is_url, place
from ejdist.sections import operational
from ejdist.training.checkpoint_format import (
    CheckpointError,
    DamagedCheckpoint,
    Writing,
    array_handler,
    barrier_of_saves,
    check_same_model,
    described,
    keys_of,
    nonempty_fields,
    raise_if_lost,
    split,
    whole,
)
from ejdist.training.checkpoint_rows import StoredArray, open_arrays, save_args
from ejdist.training.integrity import check_digests, check_kinds, item_of, leaves_of, reason_of
from ejdist.training.one_replica import read_once
from ejdist.training.pytree_io import kind_of, like_arrays, to_arrays

_STATE, _RUN = "state", "run"
_ASIDE = ".damaged"


@dataclass
class CheckpointSection:
    """The `checkpoint` section of a recipe."""

    # Steps between checkpoints; the last step and a stop always save; 0 for only those.
    every: int = operational(100)
    minutes: float = operational(0)  # also save when the last checkpoint is this many minutes old; 0: off
    keep: int = operational(3)  # how many of the latest to keep
    keep_every: int = operational(0)  # keep checkpoints at multiples of this step forever; 0: none
    keep_hours: float = operational(0)  # keep the first forever, then one per this many hours; 0: none
    # A folder that all hosts share, or gs://BUCKET/FOLDER; default: checkpoints in run.dir, which they then share.
    dir: str | None = operational(None)
    local: str | None = operational(None)  # a folder on a fast disk of each host, for checkpoints between those in dir
    local_every: int = operational(0)  # steps between local checkpoints

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        if self.every < 0:
            raise ValueError(f"checkpoint.every must be >= 0 steps, 0 for the end alone, got {self.every}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be >= 1, the latest checkpoint, got {self.keep}")
        for key in ("minutes", "keep_every", "keep_hours", "local_every"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"checkpoint.{key} must be 0, for none, or positive, got {getattr(self, key)}")
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"checkpoint.keep_every = {self.keep_every} must be a multiple of checkpoint.every = {self.every}, or "
                "there is no checkpoint to keep at those steps"
            )
        if (self.local is None) != (self.local_every == 0):
            raise ValueError(
                f"checkpoint.local = {self.local!r} and checkpoint.local_every = {self.local_every}: give both, a folder on "
                "each host and the steps between checkpoints there, or neither"
            )
        if self.local is not None and (is_url(self.local) or not self.local.strip()):
            raise ValueError(f"checkpoint.local = {self.local!r} must be a folder on a disk of each host")
        if self.local is not None:
            check_home("checkpoint.local", self.local)
        if self.dir is not None:
            check_place("checkpoint.dir", self.dir)


class Checkpoints:
    """The checkpoints of one run, in `<run.dir>/checkpoints` or `checkpoint.dir`. Nothing is created until the first save."""

    def __init__(self, run_dir: str | Path, section: CheckpointSection, timeout: float = 900) -> None:
        """`timeout`: seconds that a save waits for the slowest host.

        Raises:
          ValueError: the section is wrong, or the library for its `dir` is not installed.
        """
        section.validate()
        self.section = section
        self._key = "run.dir" if section.dir is None else "checkpoint.dir"
        if section.dir is None:
            self.directory = epath.Path(Path(run_dir).absolute() / "checkpoints")
        else:
            self.directory = place("checkpoint.dir", section.dir)
        self._timeout = max(1, round(timeout))
        self._made: Any = None

    def _manager(self) -> Any:
        if self._made is None:
            import orbax.checkpoint as ocp

            # Orbax logs every array that it writes, and tracebacks of failures that are reported here.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            handlers = {_STATE: array_handler(), _RUN: ocp.JsonCheckpointHandler()}
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_preservation(self.section),
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(timeout_secs=self._timeout, barrier_sync_fn=barrier_of_saves()),
            )
            self._made = _manager_class()(self.directory, options=options, item_handlers=handlers)
        return self._made

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint, or None. Ignores interrupted saves.

        Raises:
          CheckpointError: the folder holds files that this project did not write, or cannot be listed.
        """
        try:
            if not self.directory.exists():
                return None
            if not self.directory.is_dir():
                raise CheckpointError(f"{self.directory} is not a folder; choose another {self._key}, or remove it")
            names = self._names()
        except CheckpointError:
            raise
        except Exception as error:  # from the disk, or any of the libraries that access a bucket
            raise CheckpointError(
                f"{self.directory} cannot be listed ({reason_of(error)}); repair the disk or the connection to it"
            ) from error
        ours = [n for n in names if is_step(n) or "orbax-checkpoint-tmp" in n or _ASIDE in n or n.startswith(".")]
        strangers = set(names) - set(ours)
        if strangers:
            raise CheckpointError(
                f"{self.directory} holds {', '.join(sorted(strangers)[:3])}, which this project did not write; choose another "
                f"{self._key}, or remove it"
            )
        return self._manager().latest_step()

    def _names(self) -> list[str]:
        # A bucket may list the folder itself under an empty name.
        return [p.name for p in self.directory.iterdir() if p.name and p != self.directory]

    def interrupted(self) -> list[str]:
        """Returns the names of interrupted saves, which are otherwise ignored. In a bucket they have the name of a step."""
        if not self.directory.exists():
            return []
        names, whole = self._names(), set(self._manager().all_steps())
        return sorted(n for n in names if "orbax-checkpoint-tmp" in n or (is_step(n) and int(n) not in whole))

    def due(self, step: int) -> bool:
        return self.section.every > 0 and step % self.section.every == 0

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Starts writing a checkpoint; returns once the arrays are copied. Raises the failure of an earlier save, if any.

        Args:
          state: tree of arrays, typed PRNG keys, and Python and NumPy numbers.
          run: a JSON value, returned by `restore`.

        Raises:
          ValueError: a leaf of the state cannot be saved; nothing was written. CheckpointError: this checkpoint, or the one
            before it, could not be written.
        """
        import orbax.checkpoint as ocp

        arrays, keys = nonempty_fields(to_arrays(state)), keys_of(state)
        manager = self._manager()
        with self._writing(step):
            if manager.latest_step() != step:
                run = described(arrays, keys, run)
                args = {_STATE: ocp.args.PyTreeSave(arrays, save_args(arrays)), _RUN: ocp.args.JsonSave(run)}
                manager.save(step, args=ocp.args.Composite(**args))

    def wait(self) -> None:
        """Waits until everything is on disk. Raises CheckpointError if a write failed."""
        if self._made is not None:
            with self._writing(None):
                self._made.wait_until_finished()

    def _writing(self, step: int | None) -> Writing:
        return Writing(str(self.directory), step)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, newest first."""
        return sorted(self._manager().all_steps(), reverse=True) if self.directory.exists() else []

    def restore(self, step: int, like: Any, first: Any = lambda moment, word: word) -> tuple[Any, dict[str, Any]]:
        """Returns (state, the `run` passed to `save`).

        Args:
          like: tree of `jax.ShapeDtypeStruct` with shardings; the mesh may differ from the one that saved. Numbers in it
            only give their type.
          first: `Hosts.first_error` of a run on several hosts: if one of them cannot read an item, all fail.

        Raises:
          DamagedCheckpoint: it cannot be read, or its bits differ from what was saved. CheckpointError: it has another model.
        """

        def of_all(read: Callable[[], Any]) -> Any:
            result, reason = None, None
            try:
                result = read()
            except Exception as error:  # which one depends on what is damaged: JSON, index, chunk
                raise_if_lost(error)
                reason = self._reason(step, error)
            if reason := first(f"the reading of checkpoint {step}", reason):
                raise self._damaged(step, reason)
            return result

        run, written, kinds = of_all(lambda: self._described(step))
        check_same_model(f"checkpoint {self.directory / str(step)}", like, kinds)
        wanted = like_arrays(like)
        arrays = read_once(nonempty_fields(wanted), lambda like: self._read_arrays(step, like), of_all)
        with self._reading(step):  # all hosts have read the arrays, so the outcome is the same on all
            check_digests(arrays, written)
        return whole(arrays, wanted, like), run

    def _read(self, step: int, what: str, handler: Any, args: Any) -> Any:
        """Reads an item of a checkpoint through its handler. An Orbax manager or checkpointer would end each read with a
        barrier, which hangs if one process cannot read its part."""
        with contextlib.closing(handler):
            return handler.restore(self.directory / str(step) / what, args=args)

    def _read_arrays(self, step: int, like: Any, **how: Any) -> Any:
        import orbax.checkpoint as ocp

        wanted = ocp.checkpoint_utils.construct_restore_args(like)
        return self._read(step, _STATE, array_handler(), ocp.args.PyTreeRestore(item=like, restore_args=wanted, **how))

    def _reason(self, step: int, error: Exception) -> str:
        return item_of(self.directory / str(step), error) + reason_of(error)

    def _damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        path = self.directory / str(step)
        if not is_url(str(path)) and not path.exists():
            reason = "it no longer exists: a running training removes older ones, see checkpoint.keep"
        return DamagedCheckpoint(f"checkpoint {path} cannot be read ({reason})")

    def set_aside(self, step: int) -> epath.Path:
        """Renames a checkpoint so that it is ignored, and returns its new path. Only one process may do this."""
        aside = self.directory / f"{step}{_ASIDE}"
        for n in itertools.count(2):
            if not aside.exists():
                break
            aside = self.directory / f"{step}{_ASIDE}-{n}"
        (self.directory / str(step)).rename(aside)
        return aside

    def remove_interrupted(self) -> None:
        """Removes interrupted saves. Only one process may do this, while none saves."""
        for name in self.interrupted():
            (self.directory / name).rmtree()

    def reload(self) -> None:
        """Lists the folder again, after another process may have changed it."""
        if self._made is not None:
            self._made.reload()

    def described(self, step: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns (the `run` passed to `save`, the kinds of its arrays and keys). Raises whatever is wrong with it."""
        run, _, kinds = self._described(step)
        return run, kinds

    def run_of(self, step: int) -> dict[str, Any]:
        """Returns the `run` passed to `save`. Raises CheckpointError if it cannot be read."""
        with self._reading(step):
            return self._run(step)[0]

    def digests_of(self, step: int) -> dict[str, int]:
        """Returns array name -> digest. Raises CheckpointError if it cannot be read."""
        with self._reading(step):
            return self._run(step)[1]

    def restore_part(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Reads only the arrays that `like` names.

        Args:
          like: nested dict of `jax.ShapeDtypeStruct` with shardings, with the names of the saved state.

        Raises:
          CheckpointError: the checkpoint is damaged, or lacks these arrays.
        """
        with self._reading(step):
            digests = self._digests_of_part(step, like)
            arrays = self._read_arrays(step, like, partial_restore=True)
            check_digests(arrays, digests)
            return arrays

    def open_part(self, step: int, like: dict[str, Any]) -> dict[str, StoredArray]:
        """Returns name -> array, each to be read whole or by rows; otherwise as `restore_part`, on one process.

        Args:
          like: name -> `jax.ShapeDtypeStruct`.
        """
        with self._reading(step):
            digests = self._digests_of_part(step, like)
            reading = functools.partial(self._reading, step)
            return open_arrays(self.directory / str(step) / _STATE, digests, list(like), reading)

    def _digests_of_part(self, step: int, like: dict[str, Any]) -> dict[str, int]:
        """Returns the digests of the arrays that `like` names. Raises CheckpointError if it lacks one."""
        _, digests, kinds = self._described(step)
        for name, kind in ((name, kind_of(leaf)) for name, leaf in leaves_of(like)):
            if kinds.get(name) != kind:
                raise CheckpointError(
                    f"checkpoint {self.directory / str(step)} has another model: {name} is "
                    f"{kinds.get(name, 'missing')} there and {kind} here; use the keys of its model"
                )
        return {name: digests.get(name, -1) for name, _ in leaves_of(like)}

    def _run(self, step: int) -> tuple[dict[str, Any], dict[str, int], dict[str, str], dict[str, str]]:
        import orbax.checkpoint as ocp

        return split(self._read(step, _RUN, ocp.JsonCheckpointHandler(), ocp.args.JsonRestore()))

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns any failure while reading into a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # which one depends on what is damaged: JSON, index, chunk
            raise_if_lost(error)
            raise self._damaged(step, self._reason(step, error)) from error

    def _described(self, step: int) -> tuple[dict[str, Any], dict[str, int], dict[str, str]]:
        """Returns (the `run` passed to `save`, digests, kinds of arrays and keys), verified."""
        run, digests, saved, keys = self._run(step)
        kinds = self._kinds(step)
        check_kinds(kinds, saved or kinds)
        return run, digests, kinds | keys

    def _kinds(self, step: int) -> dict[str, str]:
        """Returns the dtype and shape of each array, by name."""
        with contextlib.closing(array_handler()) as handler:  # the manager's would read two more files on every host
            stored = handler.metadata(self.directory / str(step) / _STATE)
        stored = getattr(stored, "tree", stored)
        return {name: kind_of(leaf) for name, leaf in leaves_of(stored)}

    def close(self) -> None:
        """Closes Orbax's manager; a later call opens another one."""
        if self._made is not None:
            manager, self._made = self._made, None
            with self._writing(None):
                manager.close()


@functools.cache
def _manager_class() -> Any:
    import orbax.checkpoint as ocp

    class Manager(ocp.CheckpointManager):
        """Disables Orbax's own preemption poll, which runs in the thread that finishes a save, with the step of that save. It
        would desynchronise JAX's sync point: JAX takes the last polled step for the current one, and could make the hosts agree
        to stop at a step in the past, so that some or all never stop."""

        def reached_preemption(self, step: int) -> bool:
            return False

    return Manager


def _preservation(section: CheckpointSection) -> Any:
    """Returns the policy that keeps the latest checkpoints, and those that the section keeps forever."""
    from orbax.checkpoint import checkpoint_managers as policies

    stays: list[Any] = [policies.LatestN(section.keep)]
    if section.keep_every:
        stays.append(policies.EveryNSteps(section.keep_every))
    if section.keep_hours:
        stays.append(policies.EveryNSeconds(max(1, round(3600 * section.keep_hours))))
    return policies.AnyPreservationPolicy(stays)
