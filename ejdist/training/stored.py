"""What stands in a checkpoint beside the arrays, and the errors of reading and writing one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ejdist.cluster.hosts import lost
from ejdist.paths import ELSEWHERE
from ejdist.training.integrity import RUN_FILE, Changed, check_run, checksum, digests_of, kinds_of, leaves_of, reason_of
from ejdist.training.leaves import from_arrays, is_key, kind_of, like_arrays

# What is added to the run: of each array its digest, dtype and shape, of each PRNG key its kind.
_DIGEST, _KINDS, _KEYS = "digest", "kinds", "keys"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message says which, why, and what to do."""


class DamagedCheckpoint(CheckpointError):
    """What was saved cannot be read back; the message names the array or the file. An earlier checkpoint may be whole."""


def raise_if_lost(error: BaseException) -> None:
    """Raises HostLost if that is what an error means: nothing is known then of the disk, or of what is on it."""
    if (gone := lost(error)) is not None:
        raise gone


def described(arrays: Any, keys: dict[str, str], run: dict[str, Any]) -> dict[str, Any]:
    """Returns what is written beside the arrays: the run, and what the arrays are compared with when they are read."""
    run = run | {_DIGEST: digests_of(arrays), _KINDS: kinds_of(arrays)} | ({_KEYS: keys} if keys else {})
    return run | {_DIGEST: run[_DIGEST] | {RUN_FILE: checksum(run)}}


def split(stored: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int], dict[str, str], dict[str, str]]:
    """Returns (run, digests, kinds, kinds of keys), checked. Checkpoints of before there was a checksum have no kinds."""
    if not isinstance(stored.get(_DIGEST), dict):
        raise Changed(f"{RUN_FILE} is not what was saved: it has no digests")
    digests = dict(stored[_DIGEST])
    written = digests.pop(RUN_FILE, None)
    check_run(stored | {_DIGEST: digests}, written)
    run = {k: v for k, v in stored.items() if k not in (_DIGEST, _KINDS, _KEYS)}
    return run, digests, stored.get(_KINDS, {}), stored.get(_KEYS, {})


def whole(arrays: Any, wanted: Any, like: Any) -> Any:
    """Returns the state of the arrays that were read: with the empty fields that are not on disk."""
    return from_arrays(wanted._replace(**arrays) if hasattr(wanted, "_replace") else arrays, like)


def nonempty_fields(state: Any) -> Any:
    """Returns a named tuple as a dict of its fields that hold something. What a model has no use for, such as buffers, is
    then not in its checkpoints, and those written before there was such a field are read as before."""
    if not hasattr(state, "_asdict"):
        return state
    return {name: value for name, value in state._asdict().items() if jax.tree.leaves(value)}


def keys_of(tree: Any) -> dict[str, str]:
    """Returns the kind of each typed PRNG key, by name. On disk it is its data, of which several kinds have the same."""
    return {name: kind_of(leaf) for name, leaf in leaves_of(tree) if is_key(leaf)}


def check_same_model(where: str, like: Any, found: dict[str, str]) -> None:
    """Raises CheckpointError unless `like` has the leaves that were saved, each of its dtype and shape."""
    wanted = {name: kind_of(leaf) for name, leaf in leaves_of(like_arrays(like))} | keys_of(like)
    for name, kind in wanted.items():
        if name in found and found[name] != kind:
            raise CheckpointError(
                f"{where} is of another model: {name} is {found[name]} there and {kind} "
                f"in this recipe; restore the recipe, or {ELSEWHERE}"
            )
    if set(found) != set(wanted):
        odd = sorted(set(found) ^ set(wanted))[:3]
        raise CheckpointError(
            f"{where} is of another model or optimizer: {', '.join(odd)} is on one side "
            f"only; restore the recipe, or {ELSEWHERE}"
        )


@dataclass
class Writing:
    """Turns whatever goes wrong while writing into one clear error: HostLost where it is that a host is gone, of which arrays
    that are still being computed tell here too."""

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
        remedy = "free space on that disk" if full else "check that the disk is there and can be written"
        raise CheckpointError(
            f"{what} could not be written to {self.directory} ({reason_of(error)}); {remedy} and start again: "
            "the run goes on from the last complete one"
        ) from error
