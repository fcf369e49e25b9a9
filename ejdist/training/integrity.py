"""Verifies that a checkpoint reads back as it was saved, and finds the item that does not.

A checkpoint stores a digest of each array, computed on the devices before the write, its dtype and shape, and a checksum of
the JSON that holds them. Restored arrays are compared with these, on whatever mesh they are restored to.
"""

from __future__ import annotations

import json
import re
import traceback
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.training.pytree_io import bits_of, kind_of, name_of
from ejdist.training.rounding import mixed

RUN_FILE = "run/metadata"
_METADATA, _SHARDING = "state/_METADATA", "state/_sharding"
_JSON = ("_CHECKPOINT_METADATA", RUN_FILE, _METADATA, _SHARDING)


class Changed(ValueError):
    """An item differs from what was saved; the message names it."""


@jax.jit
def digest(tree: Any) -> Any:
    """Returns a uint32 for each array: the sum, modulo 2^32, of a hash of each element's bits and index.

    Changing one element always changes the digest; changing several misses it once in 2^32. It does not depend on the sharding,
    and costs one pass over the array. The hash is the finalizer of MurmurHash3 (Appleby), which is a bijection.
    """

    return jax.tree.map(_digest, tree)


def _digest(x: jax.Array) -> jax.Array:
    if jax.typeof(x).memory_space != jax.memory.Space.Host:
        return _sum_of_hashes(jnp.atleast_1d(x))
    if x.ndim < 3:
        return _sum_of_hashes(jax.device_put(x, jax.memory.Space.Device))

    # A stack of layers, of which the device need not hold more than one at a time.
    def of_row(row: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(x, row, 0, keepdims=False)
        return _sum_of_hashes(jax.device_put(one, jax.memory.Space.Device), row)

    return jnp.sum(jax.lax.map(of_row, jnp.arange(x.shape[0])), dtype=jnp.uint32)


@jax.jit
def digest_of_row(x: jax.Array, row: jax.Array) -> jax.Array:
    """Returns what a row of the first dim adds to the digest of its array, which is their sum, modulo 2^32."""
    return _sum_of_hashes(x, row)


def _sum_of_hashes(bits: jax.Array, row: jax.Array | None = None) -> jax.Array:
    """Returns the digest of an array, or of this row's part of it."""
    start = jnp.uint32(0) if row is None else row.astype(jnp.uint32)
    if jnp.iscomplexobj(bits):
        bits = jnp.stack((bits.real, bits.imag), axis=-1)
    if bits.dtype != jnp.bool:
        bits = jax.lax.bitcast_convert_type(bits, jnp.dtype(f"uint{8 * min(bits.dtype.itemsize, 4)}"))
    place = jnp.broadcast_to(start, bits.shape)
    for d in range(bits.ndim):
        place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, d)
    return jnp.sum(mixed(bits.astype(jnp.uint32) + place * jnp.uint32(0x9E3779B1)), dtype=jnp.uint32)


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Returns the name of each leaf that has a shape, and the leaf."""
    return [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if hasattr(leaf, "shape")]


def digests_of(arrays: Any) -> dict[str, int]:
    """Returns the digest of each array, by name."""
    digests = jax.device_get(digest(jax.tree.map(bits_of, arrays)))
    return {name: int(value) for name, value in leaves_of(digests)}


def kinds_of(arrays: Any) -> dict[str, str]:
    """Returns the dtype and shape of each array, by name."""
    return {name: kind_of(leaf) for name, leaf in leaves_of(arrays)}


def check_digests(arrays: Any, written: dict[str, int]) -> None:
    """Raises Changed, naming the arrays, if their digests differ from the stored ones."""
    read = digests_of(arrays)
    changed = sorted(name for name in {*read, *written} if read.get(name) != written.get(name))
    if changed:
        raise Changed(f"{_named(changed)} is not what was saved")


def check_kinds(found: dict[str, str], written: dict[str, str]) -> None:
    """Raises Changed, naming the array, if the files give it another dtype or shape than it was saved with."""
    changed = sorted(name for name in {*found, *written} if found.get(name) != written.get(name))
    if changed:
        name = changed[0]
        raise Changed(
            f"{_METADATA} or the index of the arrays has {name} as {found.get(name, 'nothing')}, but it was saved as "
            f"{written.get(name, 'nothing')}"
        )


def checksum(run: dict[str, Any]) -> int:
    """Returns the CRC-32 of a JSON object. It does not depend on the order of keys."""
    return zlib.crc32(json.dumps(run, sort_keys=True).encode())


def check_run(run: dict[str, Any], written: int | None) -> None:
    """Raises Changed if the JSON does not match its checksum."""
    if written is not None and checksum(run) != written:
        raise Changed(f"{RUN_FILE} is not what was saved")


def reason_of(error: BaseException, most: int = 300) -> str:
    """Returns the type and the first line of an error's root cause, without the debug details that TensorStore appends. A long
    line keeps both ends, because paths come first and the cause last."""
    if isinstance(error, Changed):
        return str(error)
    cause = _first(error)
    lines = str(cause).splitlines() or [""]
    first = re.split(r"[.,]? (?:See full TensorStore details|\[tensorstore_spec|\[source locations)", lines[0])[0]
    if len(first) > most:
        first = f"{first[: most // 3]} ... {first[-2 * most // 3 :]}"
    return f"{type(cause).__name__}: {first}" if first else type(cause).__name__


def item_of(checkpoint: Any, error: BaseException) -> str:
    """Returns the file of a checkpoint that an error comes from, as a prefix for its reason; "" if the reason already names a
    file or an array, as TensorStore's do. The readers of the JSON files do not name the file.

    Args:
      checkpoint: path of the folder of a step.
    """
    reason = reason_of(error)
    if isinstance(error, Changed):
        return ""
    if " in OCDBT " in reason or "local file" in reason:
        return "" if _agrees(checkpoint / _METADATA) else f"{_METADATA} has two names for one array: "
    for name in _JSON:
        try:
            content = json.loads((checkpoint / name).read_text())
            # A missing key is an error too.
            if name == _SHARDING:  # JSON in JSON
                _ = [json.loads(text)["sharding_type"] for text in content.values()]
        except FileNotFoundError:
            return f"{name} is missing: "
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # not JSON, or without a key
            return f"{name}: "
    # It is JSON, but not what its reader expects.
    readers = " ".join(frame.filename for frame in traceback.extract_tb(_first(error).__traceback__))
    return f"{_SHARDING}: " if "sharding" in readers + reason else f"{_METADATA}: "


def _agrees(metadata: Any) -> bool:
    """Returns whether both places in that file give each array the same name; arrays are looked up by the second."""
    try:
        for name, one in json.loads(metadata.read_text())["tree_metadata"].items():
            if name != str(tuple(key["key"] for key in one["key_metadata"])):
                return False
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True  # unknown
    return True


def _first(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _named(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
