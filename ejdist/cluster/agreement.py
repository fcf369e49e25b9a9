"""Facts that must be the same on every host of a run, in a form that can be compared and printed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
import os
import platform
import time
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from ejdist.cluster.health import SharedFolder, folder_failures
from ejdist.cluster.hosts import Hosts, HostsDiffer
from ejdist.paths import is_url

PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-triton", "triton", "numpy", "optax", "orbax-checkpoint", "tensorstore", "grain",
    "tokenizers",
)  # fmt: skip
CODE = ("ejdist", "kernels", "launch", "recipes")
# Flags that do not change the program, and may name a different path on each host.
_NO_PROGRAM = ("--xla_dump",)
_SEEN_AT_ONCE = 2.0  # seconds for a file whose name nobody has asked for before
_SEEN_WITHIN = 30.0  # seconds after which a network file system shows a new file to every host


def code_digest() -> str:
    """Returns a digest of this project's installed sources."""
    digest = hashlib.sha256()
    for name in CODE:
        spec = importlib.util.find_spec(name)
        for root in sorted(spec.submodule_search_locations or []) if spec else ():
            for path in sorted(Path(root).rglob("*")):
                if path.suffix in (".py", ".yaml", ".json"):
                    digest.update(f"{name}/{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def _code_of_process() -> str:
    """Returns the digest of the code that this process has imported, whatever becomes of the files."""
    return code_digest()


def environment() -> dict[str, Any]:
    """Returns name -> value of everything that a program depends on: packages, this project's code, devices, flags."""
    return software() | devices()


def devices() -> dict[str, Any]:
    """Returns the kind and number of this host's devices. Initialises the JAX backend if it is not yet."""
    return {"device kind": jax.local_devices()[0].device_kind, "devices of a host": jax.local_device_count()}


def software() -> dict[str, Any]:
    """Returns `environment` without the devices."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            facts[f"package {name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[f"package {name}"] = None
    facts["code (digest of the project's sources)"] = _code_of_process()
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_NO_PROGRAM)]
    facts["XLA_FLAGS"] = " ".join(sorted(flags))
    facts["LIBTPU_INIT_ARGS"] = os.environ.get("LIBTPU_INIT_ARGS", "")
    return facts


def program_digest(lowered: Any) -> str:
    """Returns a digest of a lowered program, the compiler's input."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]


def check_shared(hosts: Hosts, directory: Any, key: str = "run.dir", *, alone: bool = False) -> None:
    """Checks that a folder is shared and writable: that every host writes a file there, and sees that of host 0. Leaves nothing
    there, the folder neither if this made it.

    Args:
      directory: a `pathlib.Path` or `etils.epath.Path`.
      key: the recipe key that names it.
      alone: check that a single host can write, too.

    Raises:
      HostsDiffer: a host has another folder under this name, or cannot write there; names it. HostLost: a host does not answer.
    """
    if hosts.count == 1 and not alone:
        return
    folder = directory if is_url(str(directory)) else Path(directory)
    first = SharedFolder(folder, 0, uuid.uuid4().hex) if hosts.index == 0 else None
    try:
        sent = None if first is None else [first.token, first.failure]
        token, failure = hosts.broadcast(f"a file in {key}", sent)
        # Where host 0 cannot write, the others would wait in vain for what it writes.
        mine = first or SharedFolder(folder, hosts.index, token, writes=failure is None)
    except BaseException:
        if first is not None:
            first.close()
        raise
    try:
        seen = failure is None and mine.failure is None and mine.sees_first(min(_SEEN_WITHIN, hosts.limit / 2))
        facts = {"writes": mine.failure, "sees": seen}
        judged = hosts.reduce(
            f"the check of {key}", facts, lambda reports: folder_failures(key, directory)(reports)[:1]
        )
        if hosts.index > 0:
            mine.close()
        hosts.reduce(f"the end of the check of {key}", None, lambda reports: None)  # host 0 removes the folder last
        if judged:
            raise HostsDiffer(judged[0])
    finally:
        mine.close()


@contextlib.contextmanager
def first_alone(hosts: Hosts, folder: Path, what: str) -> Iterator[None]:
    """On hosts that share a folder host 0 runs the body first, and the others once it is through: they find there what it has
    made, instead of making it a thousand times. On hosts with folders of their own all run it at once.

    Args:
      what: is made there, for the messages of a timeout.

    Raises:
      HostLost: a host does not answer. The others wait for host 0 as long as it lives.
    """
    shared = hosts.count > 1 and _is_shared(hosts, folder, what)
    if shared and hosts.index > 0:
        hosts.broadcast(what, limit=math.inf)
    yield
    if shared and hosts.index == 0:
        hosts.broadcast(what, True)


def _is_shared(hosts: Hosts, folder: Path, what: str) -> bool:
    """Returns, on all hosts, whether all see at once what host 0 writes to a folder. Nothing is left in it."""
    seen, name = folder / f".seen-by-all-{uuid.uuid4().hex}", ""
    if hosts.index == 0:
        with contextlib.suppress(OSError):  # whoever has to write there says what is wrong
            folder.mkdir(parents=True, exist_ok=True)
            seen.touch()
            name = seen.name
    try:
        name = hosts.broadcast(
            f"a file beside {what}", name
        )  # words that are the same on all hosts, as folders may not be
        end = time.monotonic() + _SEEN_AT_ONCE
        while not (there := bool(name) and (folder / name).exists()) and name and time.monotonic() < end:
            time.sleep(0.1)
        return hosts.reduce(f"the look for {what}", there, lambda values: all(there for _, there in values.values()))
    finally:
        if hosts.index == 0:
            with contextlib.suppress(OSError):
                seen.unlink(missing_ok=True)
