"""`python -m launch.train recipe=long_context [KEY=VALUE ...]`: trains a recipe, or resumes a run."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence

from launch.cluster import join
from launch.errors import DONE, HOST_LOST, PREEMPTED, AtOnce, exit_code_of, leaver, run_command, state, tell
from launch.flags import check_known

USAGE = """usage: python -m launch.train [GROUP=VARIANT ...] [KEY=VALUE ...]

  python -m launch.train recipe=long_context
  python -m launch.train recipe=long_context mesh.sp=2 run.steps=20 run.dir=outputs/try
  python -m launch.train recipe=long_context model=8b data.sequence_length=131072 mesh=fsdp_sequence
  python -m launch.train -m recipe=long_context optimizer.learning_rate=1e-3,3e-3 run.seed=range(0,3)

If run.dir holds a run, it resumes from its last checkpoint. --help KEY tells what a key or a group means: --help data.source.

flags:
  --config-dir DIR, -cd     your own variants: DIR/recipe/mine.yaml is recipe=mine, DIR/model/big.yaml is model=big
  --cfg job, -c             prints the composed recipe, which you can save as a recipe; --package SECTION prints only that,
                            and --resolve substitutes the values of ${...}
  --multirun, -m            a run for every combination of the given values, each in its own folder in run.dir
"""


def _usage(arguments: Sequence[str]) -> str:
    from recipes.arguments import read
    from recipes.plugins import load_plugins
    from recipes.schema import GROUPS, keys_of, variants_of

    parsed = read([a for a in arguments if a not in ("-h", "--help")], every=True)
    load_plugins(parsed)
    groups = "\n".join(f"  {g}={{{','.join(variants_of(g, parsed.config_dir))}}}" for g in GROUPS)
    return f"{USAGE}\ngroups:\n{groups}\n\nkeys:\n  " + "\n  ".join(keys_of())


def _virtual_cpus(recipe, only: bool) -> int:
    """Returns the number of virtual CPU devices of this process if there is no accelerator: its share of the mesh.

    Raises:
      ValueError: there is `only` the CPU, and the mesh is too large for one machine.
    """
    meshes = [mesh.sizes for mesh in (recipe.mesh, *(stage.mesh for stage in recipe.curriculum if stage.mesh))]
    count, sizes = max(
        ((_devices_of(sizes, recipe.run.cpu_devices), sizes) for sizes in meshes), key=lambda pair: pair[0]
    )
    if count > _MOST_CPUS and only:
        written = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1)
        raise ValueError(
            f"{written} is {count:,} devices, but there is no accelerator here and at most {_MOST_CPUS} virtual CPU devices "
            "are allowed; make an axis smaller, or check whether it fits a TPU slice with python -m launch.plan"
        )
    return min(max(1, count // (recipe.cluster.num_processes or 1)), _MOST_CPUS)


def _devices_of(sizes: dict[str, int], cpu_devices: int) -> int:
    fixed = math.prod(size for size in sizes.values() if size > 0)
    return fixed * max(1, cpu_devices // fixed) if -1 in sizes.values() else fixed


# Each one costs memory and threads.
_MOST_CPUS = 512

_SIDE_BY_SIDE = "xla_cpu_enable_concurrency_optimized_scheduler"

# In XLA's thread pool, for programs with collectives.
_LEAST_THREADS = 16

# Device files of NVIDIA and AMD GPUs and of TPUs.
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")


def start_jax(recipe, command: str = "launch.train") -> None:
    """Joins the cluster, for a command, and configures JAX's CPU devices, before the devices are created."""
    import glob

    import jax

    if "JAX_PLATFORMS" not in os.environ and not any(glob.glob(pattern) for pattern in ACCELERATORS):
        # Accelerator packages may be installed without the device; probing for it takes long and reports failures.
        jax.config.update("jax_platforms", "cpu")
    check_known()
    _allow_locked_memory()
    only = jax.config.jax_platforms == "cpu"
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", _virtual_cpus(recipe, only))
    if only and recipe.cluster.kind != "local":
        # A CPU executable loaded from the compilation cache may reorder its collectives and deadlock with a process that
        # runs them in another order. Seen in gdb with jaxlib 0.11.2; without a cache never.
        jax.config.update("jax_enable_compilation_cache", False)
    elif only and (devices := _virtual_cpus(recipe, only=False)) > 1:
        # In one process any order is fine, but a device that waits in a collective blocks a thread of XLA's pool, which has
        # as many as cores or devices: with more pending collectives than threads, all may wait for a device without one.
        os.environ.setdefault("PJRT_NPROC", str(max(_LEAST_THREADS, 4 * devices, os.cpu_count() or 1)))
        # XLA begins transfers that do not wait for each other side by side, and takes one for the other: a hybrid in a zigzag
        # of short rows over four devices ended in its first step.
        if _SIDE_BY_SIDE not in (flags := os.environ.get("XLA_FLAGS", "")):
            os.environ["XLA_FLAGS"] = f"{flags} --{_SIDE_BY_SIDE}=false".strip()
    join(recipe.cluster, command, recipe.run.dir)


def _allow_locked_memory() -> None:
    """Raises this process' limit of locked memory as far as it may: a TPU's driver locks what the device reads and writes."""
    import contextlib
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    for limit in (resource.RLIM_INFINITY, hard):  # the first needs CAP_SYS_RESOURCE, unless the hard limit is none
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            return


def _hints(arguments: Sequence[str], recipe) -> list[str]:
    import jax

    from launch.compiled import use_cache
    from recipes.schema import unread

    cache_hint = use_cache(recipe.run.compile_cache)
    cache = jax.config.jax_compilation_cache_dir
    off = cache is not None and not jax.config.jax_enable_compilation_cache and jax.process_count() > 1
    without = (
        f"the compilation cache {cache} is off for this run (jax_compilation_cache_dir): with several CPU processes, programs "
        "loaded from it may hang"
    )
    return [
        hint for hint in (without if off else cache_hint, _how_to_scale(recipe), *unread(arguments, recipe)) if hint
    ]


def _how_to_scale(recipe) -> str:
    import jax

    if jax.default_backend() != "cpu":
        return ""
    words = "recipe=long_context model=8b data.sequence_length=131072 mesh=fsdp_sequence"
    if "experts" in recipe.model.part_names():
        words = "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=256 mesh.ep=8 mesh.fsdp=-1"
    return (
        "no accelerator here: training on virtual CPU devices. On GPUs or a TPU slice: "
        f"python -m launch.train {words} cluster=auto"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    # Before the first step, or at the second Ctrl-C, unsaved work is lost.
    message = "stopped at once by SIGINT; the same command resumes from the last complete checkpoint"
    return run_command(argv, _main, _usage, needs_arguments=False, stopped=(message, PREEMPTED))


def _main(arguments: list[str]) -> int:
    from recipes.arguments import read

    began = time.time()
    parsed = read(arguments, every=True)
    if parsed.multirun:
        from launch.sweep import sweep

        return sweep(parsed)
    if parsed.shown:
        from recipes.schema import text_of

        print(text_of(parsed), end="")
        return DONE
    import jax

    from ejdist.training.loop import train
    from launch.after import next_commands
    from recipes.plugins import check_words
    from recipes.schema import RecipeError, compose

    try:
        recipe = compose(arguments)
    except RecipeError as error:  # a key of a plugin that the run has and this command line does not name
        check_words(parsed.overrides, error)
        raise
    start_jax(recipe)
    hints = _hints(arguments, recipe)  # on every process: it sets the cache of compiled programs
    if jax.process_index() == 0:
        for hint in hints:
            print(hint, flush=True)
    outcome = train(recipe, log=lambda line: print(line, flush=True), began=began)
    # A signal may come before run.stop_after too; then the run is not done.
    stopped_early = outcome.step < min(recipe.run.steps, recipe.run.stop_after or recipe.run.steps)
    if outcome.summary is not None:
        s = outcome.summary
        mfu = "" if s["mfu_causal"] is None else f", MFU {s['mfu_causal']:.1%} causal, {s['mfu_full']:.1%} full"
        first, last = ("none" if x is None else f"{x:.3f}" for x in (s["loss_first"], s["loss_last"]))
        print(
            f"loss {first} -> {last} in {s['steps']} steps, "
            f"{s['tokens_per_second']:,.0f} tokens/s, {s['tflops_per_device']:.4f} TFLOP/s per device{mfu}; "
            f"written to {recipe.run.dir}"
        )
        print("\n".join(next_commands(parsed.words(), recipe, outcome.step)))
    return PREEMPTED if stopped_early else DONE


def unraisable(told) -> None:
    """Silences the tracebacks of TensorStore tasks that outlive their event loop after a failed checkpoint, which is reported
    already. Repeats a Ctrl-C that JAX's garbage-collection callback swallowed."""
    if isinstance(told.exc_value, KeyboardInterrupt):
        import signal
        import threading

        again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()
    elif str(told.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(told)


def command(before: Callable[[], object] = lambda: None, body: Callable[[], int] = main) -> None:
    """Runs `main`, or another command that trains, as the main program of this process, after `before`, and exits."""
    import signal

    leave = leaver()
    if {"-m", "--multirun"} & set(sys.argv[1:]):  # each run is a process of its own, which does what follows
        sys.exit(body())
    sys.unraisablehook = unraisable
    # First, so that threads started from here on leave SIGTERM to the one that listens. SIGINT is blocked until the command
    # can handle it: until then it would print a traceback of some import.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        from ejdist.cluster.ending import Codes, listen
        from ejdist.cluster.hosts import end_with
        from ejdist.cluster.verdict import give
    except ImportError as error:
        sys.exit(tell(error))

    listen(Codes(PREEMPTED, HOST_LOST))
    end_with(exit_code_of, state)
    try:
        before()
        code = body()
    except Exception as error:  # a bug: with its traceback, and without waiting for the other hosts
        code = state(error)
    well = code in (DONE, PREEMPTED) and not isinstance(code, AtOnce)
    give(code, "" if well else f"it ended with exit code {code}")
    if not well:
        _end_now(code)
    leave(code)


# Seconds for the other hosts to learn why this one fails, before its coordinator goes away.
_FAREWELL = 20


def _end_now(code: int) -> None:
    """Exits without waiting for other hosts, for which JAX would wait minutes and then exit with its own code, or for
    dispatched steps: an XLA thread that enters Python during shutdown aborts the process."""
    import threading

    import jax

    if jax.distributed.is_initialized():
        farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        farewell.start()
        farewell.join(0 if code == HOST_LOST else _FAREWELL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
