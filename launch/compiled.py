"""The cache of compiled programs (`run.compile_cache`): what a later start need not compile again.

JAX keeps it. An entry is named by the program, its devices and the versions that compiled it. The first process alone writes,
and an entry that is torn, since another process still writes it or the disk was full, is compiled again. So hosts may share the
folder or have one each, and whatever is wrong with it never fails a run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def use_cache(where: str | None) -> str:
    """Configures JAX's cache, before anything is compiled, and returns a line about it; empty if there is nothing to tell.

    Args:
      where: `run.compile_cache`.
    """
    import jax

    from ejdist.paths import is_url
    from ejdist.training.data import default_cache_dir

    set_before, cpu = jax.config.jax_compilation_cache_dir, jax.default_backend() == "cpu"
    if where is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return ""
    if where == "auto" and (set_before is not None or cpu):
        # On CPUs programs compile fast, and one from the cache may reorder its collectives: see `start_jax`.
        return (
            "" if cpu or not set_before else f"compiled programs are kept in {set_before} (JAX_COMPILATION_CACHE_DIR)"
        )
    folder = os.path.join(default_cache_dir(), "compiled") if where == "auto" else where
    if not is_url(folder):
        folder = str(Path(folder).expanduser().absolute())
        if reason := _unwritable(Path(folder)):
            jax.config.update("jax_enable_compilation_cache", False)
            return f"no program is kept: {folder} {reason}; run.compile_cache=FOLDER names another, null none"
    jax.config.update("jax_compilation_cache_dir", folder)
    # XLA's own cache beside it is written by every host while it compiles, where a failure could be the program's.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return f"compiled programs are kept in {folder} (run.compile_cache)"


def _unwritable(folder: Path) -> str:
    """Creates a folder, and returns why nothing can be written to it; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return f"cannot be written ({error.strerror or error})"
    return ""
