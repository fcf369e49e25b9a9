"""Checkpoints: asynchronous, through Orbax; each holds the state, the data cursor and what the run was started with.

A digest of every array, made on the devices, is written beside them and compared after a restore: storage that gives other bits
back is noticed, on whatever mesh they are restored to.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.training.leaves import bits_of, from_arrays, is_key, kind_of, like_arrays, name_of, to_arrays

_STATE, _RUN = "state", "run"
_ASIDE = ".damaged"
_DIGEST, _KEYS = "digest", "keys"  # what is added to the run: of each array its digest, of each PRNG key its kind


@dataclass
class CheckpointSection:
    """The `checkpoint` section of a recipe."""

    every: int = 100  # steps between checkpoints; the last step and a stop always make one; 0 for only those
    keep: int = 3  # how many of the last ones stay


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message says which, why, and what to do."""


class DamagedCheckpoint(CheckpointError):
    """What was saved cannot be read back. An earlier checkpoint may be whole."""


@jax.jit
def digest(tree: Any) -> Any:
    """Returns a uint32 for each array: the sum, modulo 2^32, of a hash of each element's bits and place.

    A change of any one element changes it, and of several all but once in 2^32. It does not depend on how the array lies on
    devices, and costs one pass over it. The hash is the finalizer of MurmurHash3 (Appleby), which is one to one.
    """

    def one(x: jax.Array) -> jax.Array:
        bits = jnp.atleast_1d(x)
        if jnp.iscomplexobj(bits):
            bits = jnp.stack((bits.real, bits.imag), axis=-1)
        if bits.dtype != jnp.bool:
            bits = jax.lax.bitcast_convert_type(bits, jnp.dtype(f"uint{8 * min(bits.dtype.itemsize, 4)}"))
        place = jnp.zeros(bits.shape, jnp.uint32)
        for d in range(bits.ndim):
            place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, d)
        hashed = bits.astype(jnp.uint32) + place * jnp.uint32(0x9E3779B1)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            hashed = (hashed ^ (hashed >> shift)) * jnp.uint32(factor)
        return jnp.sum(hashed ^ (hashed >> 16), dtype=jnp.uint32)

    return jax.tree.map(one, tree)


class Checkpoints:
    """The checkpoints of one run, in `<run.dir>/checkpoints`. Nothing is created until the first save."""

    def __init__(self, run_dir: str | Path, section: CheckpointSection, timeout: float = 900) -> None:
        """`timeout` is in seconds: how long a save waits for its last host."""
        if section.every < 0 or section.keep < 1:
            raise ValueError(
                f"checkpoint.every must be >= 0 and checkpoint.keep >= 1, got {section.every}, {section.keep}"
            )
        self.directory, self.section = Path(run_dir).absolute() / "checkpoints", section
        self._timeout = max(1, round(timeout))
        self._made: Any = None

    def _manager(self) -> Any:
        if self._made is None:
            import orbax.checkpoint as ocp

            # Orbax tells of every array that it writes, and of a failure with its traceback; what matters is said here.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            handlers = {_STATE: ocp.StandardCheckpointHandler(), _RUN: ocp.JsonCheckpointHandler()}
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.section.keep,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(timeout_secs=self._timeout),
            )
            self._made = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)
        return self._made

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint, None if there is none. Interrupted saves do not count.

        Raises:
          CheckpointError: the folder holds something that is not a checkpoint of ours.
        """
        if not self.directory.exists():
            return None
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is not a folder; choose another run.dir, or remove it")
        names = [p.name for p in self.directory.iterdir()]
        ours = [n for n in names if n.isdigit() or "orbax-checkpoint-tmp" in n or _ASIDE in n or n.startswith(".")]
        strangers = set(names) - set(ours)
        if strangers:
            raise CheckpointError(
                f"{self.directory} holds {', '.join(sorted(strangers)[:3])}, which this project did not write; choose another "
                "run.dir, or remove it"
            )
        return self._manager().latest_step()

    def interrupted(self) -> list[str]:
        """Returns the names of saves that were cut off; they are ignored."""
        if not self.directory.exists():
            return []
        return sorted(p.name for p in self.directory.iterdir() if "orbax-checkpoint-tmp" in p.name)

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

        arrays, keys = _without_empty(to_arrays(state)), _keys(state)
        manager = self._manager()
        with self._writing(step):
            if manager.latest_step() != step:
                run = run | {_DIGEST: _digests(arrays)} | ({_KEYS: keys} if keys else {})
                args = {_STATE: ocp.args.StandardSave(arrays), _RUN: ocp.args.JsonSave(run)}
                manager.save(step, args=ocp.args.Composite(**args))

    def wait(self) -> None:
        """Returns when everything is on disk. Raises CheckpointError if it could not be written."""
        if self._made is not None:
            with self._writing(None):
                self._made.wait_until_finished()

    def _writing(self, step: int | None) -> _Writing:
        return _Writing(self.directory, step)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the last one first."""
        return sorted(self._manager().all_steps(), reverse=True) if self.directory.exists() else []

    def restore(self, step: int, like: Any, first: Any = lambda moment, word: word) -> tuple[Any, dict[str, Any]]:
        """Returns (state, what `save` was given beside it).

        Args:
          like: tree of `jax.ShapeDtypeStruct` with shardings; the mesh may differ from the one that saved. A number in it
            stands for its type.
          first: `Hosts.first` of a run on several hosts: what one of them cannot read, none restores.

        Raises:
          DamagedCheckpoint: it cannot be read, or has other bits than were saved. CheckpointError: it is of another model.
        """
        import orbax.checkpoint as ocp

        def read(what: str, args: Any) -> Any:
            found, reason = None, None
            try:
                found = self._manager().restore(step, args=ocp.args.Composite(**{what: args}))[what]
            except Exception as error:  # which one depends on what is damaged: JSON, index, chunk
                reason = _reason(error)
            if reason := first(f"the reading of checkpoint {step}", reason):
                raise self._damaged(step, reason)
            return found

        run = read(_RUN, ocp.args.JsonRestore())
        with self._reading(step):
            keys, written = run.pop(_KEYS, {}), run.pop(_DIGEST)
            kinds = self._kinds(step) | keys
        self._check_kinds(step, like, kinds)
        wanted = like_arrays(like)
        arrays = read(_STATE, ocp.args.StandardRestore(_without_empty(wanted)))
        with self._reading(step):  # of arrays that all hosts have read: the same on all of them
            _check_digests(arrays, written)
        whole = wanted._replace(**arrays) if hasattr(wanted, "_replace") else arrays
        return from_arrays(whole, like), run

    def _damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"checkpoint {self.directory / str(step)} cannot be read ({reason})")

    def set_aside(self, step: int) -> Path:
        """Renames a checkpoint, so that it is none any more, and returns its new path. Only one process may do this."""
        aside = self.directory / f"{step}{_ASIDE}"
        for n in itertools.count(2):
            if not aside.exists():
                break
            aside = self.directory / f"{step}{_ASIDE}-{n}"
        (self.directory / str(step)).rename(aside)
        return aside

    def reload(self) -> None:
        """Looks again at what is there: another process may have changed it."""
        if self._made is not None:
            self._made.reload()

    def run_of(self, step: int) -> dict[str, Any]:
        """Returns what `save` was given beside the state. Raises CheckpointError if it cannot be read."""
        with self._reading(step):
            return {k: v for k, v in self._run(step).items() if k not in (_DIGEST, _KEYS)}

    def digests_of(self, step: int) -> dict[str, int]:
        """Returns the digest of each array that was saved, by name. Raises CheckpointError if it cannot be read."""
        with self._reading(step):
            return self._run(step)[_DIGEST]

    def restore_part(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Returns those arrays of a checkpoint that `like` names, and reads no others.

        Args:
          like: nested dict of `jax.ShapeDtypeStruct` with shardings, with the names that the state has.

        Raises:
          CheckpointError: the checkpoint is damaged, or has not these arrays.
        """
        import orbax.checkpoint as ocp

        with self._reading(step):
            digests = self._run(step)[_DIGEST]
            found = self._kinds(step)
            for name, kind in ((name, kind_of(leaf)) for name, leaf in _leaves(like)):
                if found.get(name) != kind:
                    raise CheckpointError(
                        f"checkpoint {self.directory / str(step)} is of another model: {name} is "
                        f"{found.get(name, 'not')} there and {kind} here; take the keys of its model"
                    )
            args = ocp.args.PyTreeRestore(
                item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
            )
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                arrays = reader.restore(self.directory / str(step) / _STATE, args=args)
            _check_digests(arrays, digests)
            return arrays

    def _run(self, step: int) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        return self._manager().restore(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}))[_RUN]

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns whatever goes wrong while reading into one clear error."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # which one depends on what is damaged: JSON, index, chunk
            raise self._damaged(step, _reason(error)) from error

    def _kinds(self, step: int) -> dict[str, str]:
        """Returns the dtype and shape of each array, by name."""
        stored = self._manager().item_metadata(step)[_STATE]
        stored = getattr(stored, "tree", stored)
        if stored is None:
            raise FileNotFoundError(f"there is no {_STATE!r} in it")
        return {name: kind_of(leaf) for name, leaf in _leaves(stored)}

    def _check_kinds(self, step: int, like: Any, found: dict[str, str]) -> None:
        """Raises CheckpointError unless `like` has the leaves that were saved, each of its dtype and shape."""
        wanted = {name: kind_of(leaf) for name, leaf in _leaves(like_arrays(like))} | _keys(like)
        for name, kind in wanted.items():
            if name in found and found[name] != kind:
                raise CheckpointError(
                    f"checkpoint {self.directory / str(step)} is of another model: {name} is {found[name]} there and {kind} "
                    "in this recipe; restore the recipe, or choose another run.dir"
                )
        if set(found) != set(wanted):
            odd = sorted(set(found) ^ set(wanted))[:3]
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} is of another model or optimizer: {', '.join(odd)} is on one side "
                "only; restore the recipe, or choose another run.dir"
            )

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def _reason(error: BaseException, most: int = 300) -> str:
    """Returns the first line of what went wrong, without what a library adds for its own developers. Too long a line keeps
    both ends: paths come first, and the cause last."""
    lines = str(error).splitlines() or [""]
    first = re.split(r"[.,]? (?:See full TensorStore details|\[tensorstore_spec|\[source locations)", lines[0])[0]
    if len(first) > most:
        first = f"{first[: most // 3]} ... {first[-2 * most // 3 :]}"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _without_empty(state: Any) -> Any:
    """Returns a named tuple as a dict of its fields that hold something. What a model has no use for, such as buffers, is
    then not in its checkpoints, and those written before there was such a field are read as before."""
    if not hasattr(state, "_asdict"):
        return state
    return {name: value for name, value in state._asdict().items() if jax.tree.leaves(value)}


def _check_digests(arrays: Any, written: dict[str, int]) -> None:
    found = _digests(arrays)
    changed = [name for name in found if found[name] != written.get(name)]
    if changed:
        raise ValueError(f"{', '.join(changed[:3])} is not what was saved")


def _digests(arrays: Any) -> dict[str, int]:
    found = jax.device_get(digest(jax.tree.map(bits_of, arrays)))
    return {name: int(value) for name, value in _leaves(found)}


def _keys(tree: Any) -> dict[str, str]:
    """Returns the kind of each typed PRNG key, by name. On disk it is its data, of which several kinds have the same."""
    return {name: kind_of(leaf) for name, leaf in _leaves(tree) if is_key(leaf)}


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if hasattr(leaf, "shape")]


@dataclass
class _Writing:
    """Turns whatever goes wrong while writing into one clear error."""

    directory: Path
    step: int | None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        what = "the last checkpoint" if self.step is None else f"checkpoint {self.step}, or the one before it,"
        full = "no space" in str(error).lower() or "quota" in str(error).lower()
        remedy = "free space on that disk" if full else "check that the disk is there and can be written"
        raise CheckpointError(
            f"{what} could not be written to {self.directory} ({_reason(error)}); {remedy} and start again: "
            "the run goes on from the last complete one"
        ) from error
