"""Checkpoints: asynchronous, through Orbax; each holds the state, the data cursor and what the run was started with.

`ejdist.training.integrity` says what is written beside the arrays, so that storage that gives other bits back is noticed.
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
from ejdist.training.integrity import check_digests, check_kinds, item_of, leaves_of, reason_of
from ejdist.training.leaves import kind_of, like_arrays, to_arrays
from ejdist.training.stored import (
    CheckpointError,
    DamagedCheckpoint,
    Writing,
    check_same_model,
    described,
    keys_of,
    nonempty_fields,
    raise_if_lost,
    split,
    whole,
)

_STATE, _RUN = "state", "run"
_ASIDE = ".damaged"


@dataclass
class CheckpointSection:
    """The `checkpoint` section of a recipe."""

    # Steps between checkpoints; the last step and a stop always make one; 0 for only those.
    every: int = operational(100)
    minutes: float = operational(0)  # a checkpoint too where the last one is so many minutes old; 0: none by time
    keep: int = operational(3)  # how many of the last ones stay
    keep_every: int = operational(0)  # steps: those of its multiples stay for good; 0: none
    keep_hours: float = operational(0)  # hours: the first one stays for good, and then one after each so many; 0: none
    dir: str | None = operational(None)  # a folder, or gs://BUCKET/FOLDER; default: checkpoints in run.dir
    local: str | None = operational(None)  # a folder on a fast disk of each host, for checkpoints between those of dir
    local_every: int = operational(0)  # steps between those

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        if self.every < 0 or self.keep < 1:
            raise ValueError(f"checkpoint.every must be >= 0 and checkpoint.keep >= 1, got {self.every}, {self.keep}")
        for key in ("minutes", "keep_every", "keep_hours", "local_every"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"checkpoint.{key} must be 0, for none, or positive, got {getattr(self, key)}")
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"checkpoint.keep_every = {self.keep_every} must be a multiple of checkpoint.every = {self.every}: else there "
                "is no checkpoint at those steps"
            )
        if (self.local is None) != (self.local_every == 0):
            raise ValueError(
                f"checkpoint.local = {self.local!r} and checkpoint.local_every = {self.local_every}: give both, a folder of "
                "each host and the steps between checkpoints in it, or none"
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
        """`timeout` is in seconds: how long a save waits for its last host.

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

            # Orbax tells of every array that it writes, and of a failure with its traceback; what matters is said here.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            handlers = {_STATE: ocp.StandardCheckpointHandler(), _RUN: ocp.JsonCheckpointHandler()}
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_preservation(self.section),
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(timeout_secs=self._timeout),
            )
            self._made = _manager_class()(self.directory, options=options, item_handlers=handlers)
        return self._made

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint, None if there is none. Interrupted saves do not count.

        Raises:
          CheckpointError: the folder holds something that is not a checkpoint of ours, or cannot be listed.
        """
        try:
            if not self.directory.exists():
                return None
            if not self.directory.is_dir():
                raise CheckpointError(f"{self.directory} is not a folder; choose another {self._key}, or remove it")
            names = self._names()
        except CheckpointError:
            raise
        except Exception as error:  # of the disk, or of one of many libraries below that of a bucket
            raise CheckpointError(
                f"{self.directory} cannot be listed ({reason_of(error)}); mend the disk, or what is needed to reach it"
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
        # A bucket may list the folder itself, as an empty name.
        return [p.name for p in self.directory.iterdir() if p.name and p != self.directory]

    def interrupted(self) -> list[str]:
        """Returns the names of saves that were cut off; they are ignored. In a bucket they have the name of a step."""
        if not self.directory.exists():
            return []
        names, whole = self._names(), set(self._manager().all_steps())
        return sorted(n for n in names if "orbax-checkpoint-tmp" in n or (is_step(n) and int(n) not in whole))

    def due(self, step: int) -> bool:
        return self.section.every > 0 and step % self.section.every == 0

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Begins to write a checkpoint; returns once the arrays are copied. An earlier failure is raised here.

        Args:
          state: tree of arrays, typed PRNG keys, and numbers of Python and NumPy.
          run: what JSON holds, given back by `restore`.

        Raises:
          ValueError: a leaf of the state cannot be saved; nothing has been written. CheckpointError: it, or the one before
            it, could not be written.
        """
        import orbax.checkpoint as ocp

        arrays, keys = nonempty_fields(to_arrays(state)), keys_of(state)
        manager = self._manager()
        with self._writing(step):
            if manager.latest_step() != step:
                run = described(arrays, keys, run)
                args = {_STATE: ocp.args.StandardSave(arrays), _RUN: ocp.args.JsonSave(run)}
                manager.save(step, args=ocp.args.Composite(**args))

    def wait(self) -> None:
        """Returns when everything is on disk. Raises CheckpointError if it could not be written."""
        if self._made is not None:
            with self._writing(None):
                self._made.wait_until_finished()

    def _writing(self, step: int | None) -> Writing:
        return Writing(str(self.directory), step)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the last one first."""
        return sorted(self._manager().all_steps(), reverse=True) if self.directory.exists() else []

    def restore(self, step: int, like: Any, first: Any = lambda moment, word: word) -> tuple[Any, dict[str, Any]]:
        """Returns (state, what `save` was given beside it).

        Args:
          like: tree of `jax.ShapeDtypeStruct` with shardings; the mesh may differ from the one that saved. A number in it
            stands for its type.
          first: `Hosts.first_error` of a run on several hosts: what one of them cannot read, none restores.

        Raises:
          DamagedCheckpoint: it cannot be read, or has other bits than were saved. CheckpointError: it is of another model.
        """
        import orbax.checkpoint as ocp

        def of_all(read: Callable[[], Any]) -> Any:
            found, reason = None, None
            try:
                found = read()
            except Exception as error:  # which one depends on what is damaged: JSON, index, chunk
                raise_if_lost(error)
                reason = self._reason(step, error)
            if reason := first(f"the reading of checkpoint {step}", reason):
                raise self._damaged(step, reason)
            return found

        run, written, kinds = of_all(lambda: self._described(step))
        check_same_model(f"checkpoint {self.directory / str(step)}", like, kinds)
        wanted = like_arrays(like)
        args = ocp.args.StandardRestore(nonempty_fields(wanted))
        arrays = of_all(lambda: self._read(step, _STATE, ocp.StandardCheckpointHandler(), args))
        with self._reading(step):  # of arrays that all hosts have read: the same on all of them
            check_digests(arrays, written)
        return whole(arrays, wanted, like), run

    def _read(self, step: int, what: str, handler: Any, args: Any) -> Any:
        """Returns an item of a checkpoint. By its handler alone: a manager, or a checkpointer, ends each read by waiting for
        all processes, which is for ever where one of them cannot read its part."""
        with contextlib.closing(handler):
            return handler.restore(self.directory / str(step) / what, args=args)

    def _reason(self, step: int, error: Exception) -> str:
        return item_of(self.directory / str(step), error) + reason_of(error)

    def _damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        path = self.directory / str(step)
        if not is_url(str(path)) and not path.exists():
            reason = "it is there no more: a run that is going on removes older ones, see checkpoint.keep"
        return DamagedCheckpoint(f"checkpoint {path} cannot be read ({reason})")

    def set_aside(self, step: int) -> epath.Path:
        """Renames a checkpoint, so that it is none any more, and returns its new path. Only one process may do this."""
        aside = self.directory / f"{step}{_ASIDE}"
        for n in itertools.count(2):
            if not aside.exists():
                break
            aside = self.directory / f"{step}{_ASIDE}-{n}"
        (self.directory / str(step)).rename(aside)
        return aside

    def remove_interrupted(self) -> None:
        """Removes what saves that were cut off have left. Only one process may do this, while none saves."""
        for name in self.interrupted():
            (self.directory / name).rmtree()

    def reload(self) -> None:
        """Looks again at what is there: another process may have changed it."""
        if self._made is not None:
            self._made.reload()

    def run_of(self, step: int) -> dict[str, Any]:
        """Returns what `save` was given beside the state. Raises CheckpointError if it cannot be read."""
        with self._reading(step):
            return self._run(step)[0]

    def digests_of(self, step: int) -> dict[str, int]:
        """Returns the digest of each array that was saved, by name. Raises CheckpointError if it cannot be read."""
        with self._reading(step):
            return self._run(step)[1]

    def restore_part(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Returns those arrays of a checkpoint that `like` names, and reads no others.

        Args:
          like: nested dict of `jax.ShapeDtypeStruct` with shardings, with the names that the state has.

        Raises:
          CheckpointError: the checkpoint is damaged, or has not these arrays.
        """
        import orbax.checkpoint as ocp

        with self._reading(step):
            _, digests, found = self._described(step)
            for name, kind in ((name, kind_of(leaf)) for name, leaf in leaves_of(like)):
                if found.get(name) != kind:
                    raise CheckpointError(
                        f"checkpoint {self.directory / str(step)} is of another model: {name} is "
                        f"{found.get(name, 'not')} there and {kind} here; take the keys of its model"
                    )
            args = ocp.args.PyTreeRestore(
                item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
            )
            arrays = self._read(step, _STATE, ocp.PyTreeCheckpointHandler(), args)
            check_digests(arrays, {name: digests.get(name, -1) for name, _ in leaves_of(like)})
            return arrays

    def _run(self, step: int) -> tuple[dict[str, Any], dict[str, int], dict[str, str], dict[str, str]]:
        import orbax.checkpoint as ocp

        return split(self._read(step, _RUN, ocp.JsonCheckpointHandler(), ocp.args.JsonRestore()))

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns whatever goes wrong while reading into one clear error."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # which one depends on what is damaged: JSON, index, chunk
            raise_if_lost(error)
            raise self._damaged(step, self._reason(step, error)) from error

    def _described(self, step: int) -> tuple[dict[str, Any], dict[str, int], dict[str, str]]:
        """Returns (what `save` was given beside the state, digests, kinds of the arrays and keys), checked."""
        run, digests, saved, keys = self._run(step)
        kinds = self._kinds(step)
        check_kinds(kinds, saved or kinds)
        return run, digests, kinds | keys

    def _kinds(self, step: int) -> dict[str, str]:
        """Returns the dtype and shape of each array, by name."""
        stored = self._manager().item_metadata(step)[_STATE]
        stored = getattr(stored, "tree", stored)
        if stored is None:
            raise FileNotFoundError(f"there is no {_STATE!r} in it")
        return {name: kind_of(leaf) for name, leaf in leaves_of(stored)}

    def close(self) -> None:
        if self._made is not None:
            with self._writing(None):
                self._made.close()


@functools.cache
def _manager_class() -> Any:
    import orbax.checkpoint as ocp

    class Manager(ocp.CheckpointManager):
        """Leaves it to the training loop to ask JAX whether the run is to stop. Orbax asks too, in the thread that ends a save
        and for the step of that save; JAX takes the step of the last question for where the run is, and would have the hosts
        stop at a step that they have made already: some or all would then never stop."""

        def reached_preemption(self, step: int) -> bool:
            return False

    return Manager


def _preservation(section: CheckpointSection) -> Any:
    """Returns which checkpoints stay: the last ones, and those that the section keeps for good."""
    from orbax.checkpoint import checkpoint_managers as policies

    stays: list[Any] = [policies.LatestN(section.keep)]
    if section.keep_every:
        stays.append(policies.EveryNSteps(section.keep_every))
    if section.keep_hours:
        stays.append(policies.EveryNSeconds(max(1, round(3600 * section.keep_hours))))
    return policies.AnyPreservationPolicy(stays)
