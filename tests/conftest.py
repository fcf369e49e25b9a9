"""Every test runs on eight virtual CPU devices; tests marked gpu run on the CUDA device instead."""

import atexit
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from shared import once

# The expression of -m, not a path with the word in it, nor "not gpu".
if any(re.fullmatch(r"(-m *)?gpu( and .*)?", argument) for argument in sys.argv):
    os.environ["EJDIST_TESTS_ON_GPU"] = "1"  # workers have other arguments
if "EJDIST_TESTS_ON_GPU" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"
    given = os.environ.get("XLA_FLAGS", "")
    flags = {"xla_force_host_platform_device_count": 8}
    # Programs of tests are small, and LLVM's optimisations of them cost more than they save: half of all the time. XLA's own
    # passes are those of every program. XLA_FLAGS=--xla_backend_optimization_level=3 gives LLVM's back; the example trainer in
    # tests/test_examples.py and the main job of .ci/run are compiled with none of these flags.
    flags |= {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": "true"}
    # A third of what is left: for each program, however small, XLA would make one MLIR context or more to write its fusions.
    # The other writer of fusions needs none. Which operations are fused is decided before, in the same way.
    flags |= {"xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters=true"}
    # Nor is a small program compiled sooner in 32 parts.
    flags |= {"xla_cpu_parallel_codegen_split_count": 1}
    added = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
    # Runs that are stopped and go on compile the same programs again, in this process and in those that it starts. Each
    # worker has a folder of its own, since a file that another one is still writing would be read in part.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] += "/" + os.environ["PYTEST_XDIST_WORKER"]
    elif "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="ejdist-tests-")
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    # A program that is compiled sooner than this is not written: to compress and to read it takes as long.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    # The C library keeps an arena for each thread of the compilers, and gives little of it back. Workers inherit this.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    # Threads of NumPy's products wait by spinning, on cores that the other worker could use.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Nor does anyone read which lines of Python each instruction of a program comes from.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# The metadata server of a cloud TPU is asked for at start and, away from one, waited for.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

# A background job of a shell ignores it, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["budget", "isolation", "kept_programs", "memory"]
gc.disable()  # until modules and tests are there, which stay to the end


def pytest_collection_finish() -> None:
    """Traces have no cycles: garbage is looked for less often, and not in what is there by now."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(150_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def _only_programs_of_runs_are_kept(request):
    """A run that goes on, in this process or in another, compiles what it did before. Elsewhere each is compiled once, and the
    cache is not even asked: the key of a small program takes a fifth of the time of compiling it."""
    if (
        "jax" not in sys.modules
        or "EJDIST_TESTS_ON_GPU" in os.environ
        or {"TINY", "PLAIN"} & vars(request.module).keys()
    ):
        yield
        return
    # Not jax_enable_compilation_cache, which commands set, and tests of them read.
    from jax._src import compilation_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation_cache, "is_cache_used", lambda backend: False)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Recipe keys for a few short documents of real text, so that every row is packed from several."""

    def make(folder):
        lines = Path(json.__file__).read_text().splitlines()
        rows = [json.dumps({"text": "\n".join(lines[i : i + 2])}) for i in range(0, len(lines) - 2, 2)]
        (folder / "rows.jsonl").write_text("\n".join(rows))

    folder = once(tmp_path_factory, "corpus", make)
    return [f"data.source={folder}/rows.jsonl", f"data.cache_dir={folder}/cache"]


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """The path of a second corpus."""

    def make(folder):
        (folder / "other.txt").write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(200)))

    return f"{once(tmp_path_factory, 'other_corpus', make)}/other.txt"


@pytest.fixture(scope="session")
def _store():
    """A stand-in for Google's store: one for all tests, since TensorStore reads where it is once for a process."""
    from gcs_server import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def server(_store):
    """That store, where the libraries look for it."""
    before = dict(os.environ)
    os.environ.update(_store.address())
    yield _store
    os.environ.clear()
    os.environ.update(before)
