"""The metadata stored with a checkpoint's arrays, and the errors of reading and writing one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ejdist.cluster.lost import lost
from ejdist.paths import ELSEWHERE
from ejdist.training.integrity import RUN_FILE, Changed, check_run, checksum, digests_of, kinds_of, leaves_of, reason_of
from ejdist.training.pytree_io import from_arrays, is_key, kind_of, like_arrays

# Keys added to the run's metadata: the digest, dtype and shape of each array, and the kind of each PRNG key.
_DIGEST, _KINDS, _KEYS = "digest", "kinds", "keys"
_FINISHES = "save_finalize"  # Orbax's thread that ends a save


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message says which, why, and what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint cannot be read back; the message names the array or the file. An earlier one may be intact."""


def raise_if_lost(error: BaseException) -> None:
    """Raises HostLost if that is what an error amounts to: it then says nothing about the disk."""
    if (gone := lost(error)) is not None:
        raise gone


def barrier_of_saves() -> Callable[..., None]:
    """Returns what Orbax waits with for the other hosts: a host whose own part of a save has failed does not wait.

    The thread that finishes a save waits for all hosts even while it passes on a failure. The others never come, as they wait
    for this host's part: nobody would hear of a full disk before the save's time limit, and then only of a host that is lost.
    """
    import orbax.checkpoint as ocp

    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        # Only there: other threads may be called by whoever handles an error of something else.
        if threading.current_thread().name == _FINISHES and (error := sys.exception()) is not None:
            raise error
        wait(key=key, timeout_ms=timeout_ms)

    return barrier


def array_handler() -> Any:
    """Returns Orbax's handler of the arrays of a state, without its metadata by process.

    That is a file of each process, and a restore would read all of them in each process: with a thousand a million reads. It
    says what typed PRNG keys are, which are arrays here (`pytree_io`) and have their kinds beside the digests.
    """
    import orbax.checkpoint as ocp

    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        (jax.Array, types.ArrayHandler(array_metadata_store=None)), (np.ndarray, types.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def described(arrays: Any, keys: dict[str, str], run: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata to store with the arrays: the run, and the digests to verify the arrays with."""
    run = run | {_DIGEST: digests_of(arrays), _KINDS: kinds_of(arrays)} | ({_KEYS: keys} if keys else {})
    return run | {_DIGEST: run[_DIGEST] | {RUN_FILE: checksum(run)}}


def split(stored: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int], dict[str, str], dict[str, str]]:
    """Returns (run, digests, kinds, kinds of keys), verified. Checkpoints from before checksums have no kinds."""
    if not isinstance(stored.get(_DIGEST), dict):
        raise Changed(f"{RUN_FILE} is not what was saved: it has no digests")
    digests = dict(stored[_DIGEST])
    written = digests.pop(RUN_FILE, None)
    check_run(stored | {_DIGEST: digests}, written)
    run = {k: v for k, v in stored.items() if k not in (_DIGEST, _KINDS, _KEYS)}
    return run, digests, stored.get(_KINDS, {}), stored.get(_KEYS, {})


def whole(arrays: Any, wanted: Any, like: Any) -> Any:
    """Returns the state built from the arrays that were read, with the empty fields that are not on disk."""
    return from_arrays(wanted._replace(**arrays) if hasattr(wanted, "_replace") else arrays, like)


def nonempty_fields(state: Any) -> Any:
    """Returns the nonempty fields of a named tuple as a dict. Fields that a model does not use, such as buffers, are then not
    in its checkpoints, and checkpoints from before a field existed stay readable."""
    if not hasattr(state, "_asdict"):
        return state
    return {name: value for name, value in state._asdict().items() if jax.tree.leaves(value)}


def keys_of(tree: Any) -> dict[str, str]:
    """Returns the kind of each typed PRNG key, by name. The stored key data alone does not determine it."""
    return {name: kind_of(leaf) for name, leaf in leaves_of(tree) if is_key(leaf)}


def check_same_model(where: str, like: Any, found: dict[str, str]) -> None:
    """Raises CheckpointError unless `like` has the same leaves as were saved, with their dtypes and shapes."""
    wanted = {name: kind_of(leaf) for name, leaf in leaves_of(like_arrays(like))} | keys_of(like)
    for name, kind in wanted.items():
        if name in found and found[name] != kind:
            raise CheckpointError(
                f"{where} has another model: {name} is {found[name]} there and {kind} "
                f"in this recipe; restore the recipe, or {ELSEWHERE}"
            )
    if set(found) != set(wanted):
        odd = sorted(set(found) ^ set(wanted))[:3]
        raise CheckpointError(
            f"{where} has another model or optimizer: {', '.join(odd)} exists on one side "
            f"only; restore the recipe, or {ELSEWHERE}"
        )


@dataclass
class Writing:
    """Turns any failure while writing into a CheckpointError, or HostLost if a host is gone, which can surface here through
    arrays that are still being computed."""

    directory: str
    step: int | None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        raise_if_lost(error)
        what = "the last checkpoint" if self.step is None else f"checkpoint {self.step}, or the one before it,"
        full = "no space" in str(error).lower() or "quota" in str(error).lower()
        remedy = "free space on that disk" if full else "check that the disk is mounted and writable"
        raise CheckpointError(
            f"{what} could not be written to {self.directory} ({reason_of(error)}); {remedy} and start again: "
            "the run resumes from the last complete one"
        ) from error
