"""`python tests/gpu/sanitize.py [TOOL]`: small calls of attention's kernels for Hopper under compute-sanitizer, a process each.

TOOL is memcheck (accesses out of bounds, the default), racecheck (of shared memory), synccheck or initcheck. Prints a line a
call when it has ended, and ends with 1 where one has a report, could not run, or took more than 100 s (they take 15 s).
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import jax.numpy as jnp
import numpy as np

from kernels import flash_attention
from kernels.framework.config import FwdParams, KernelConfig
from kernels.ops.flash_attention.triton_gpu import THREE_WARPGROUPS, WARP_SPECIALIZED

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
THREE = {"cfg": KernelConfig(FwdParams(THREE_WARPGROUPS, 128, WARP_SPECIALIZED, 2))}
# (widths of keys and of values, options) of each kernel that differs, and of what differs in it.
CALLS = {
    "heads of 64": (64, 64, {}),
    "heads of 64, three warpgroups": (64, 64, THREE),
    "heads of 128": (128, 128, {}),
    "heads of 128, a window": (128, 128, {"sliding_window": 100}),
    "heads of 128, a soft cap": (128, 128, {"logits_soft_cap": 30.0}),
    "heads of 192 and 128": (192, 128, {}),
    "heads of 256": (256, 256, {}),
}
SECONDS = 100
CLEAN = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")


def call(name):
    """Returns (a function of query, key and value, with both directions in it, and such arrays), 400 tokens of four heads."""
    width, value_width, options = CALLS[name]
    rng = np.random.default_rng(0)
    shapes = (4, width), (2, width), (2, value_width)
    arrays = [rng.standard_normal((1, 400, *shape)).astype(jnp.bfloat16) for shape in shapes]

    def both(*arrays):
        out, pull = jax.vjp(lambda *x: flash_attention(*x, causal=True, platform="triton", **options), *arrays)
        return out, pull(out)

    return both, arrays


def run(name):
    function, arrays = call(name)
    jax.block_until_ready(jax.jit(function)(*arrays))


def report(tool, name):
    """Returns (whether a call is clean under a tool, the lines that say so, or what came instead)."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--run", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        # Seen once, beside other work on the device: the tool was gone, its program waited for it, and no kernel ran.
        return False, f"had not ended after {SECONDS} s; if other work is on the device, try again without"
    # Its lines begin with this, in the middle of a line where the program's last one has no end.
    said = [line.split("========= ")[-1] for line in done.stdout.splitlines() if "========= " in line]
    clean = done.returncode == 0 and any(line.startswith(CLEAN) for line in said)
    return clean, said[-1] if clean else "\n".join([*said[:20], done.stderr[-2000:]])


def main(arguments):
    if arguments[:1] == ["--run"]:
        return run(arguments[1])
    tool = arguments[0] if arguments else TOOLS[0]
    if len(arguments) > 1 or tool not in TOOLS:
        sys.exit(f"usage: python {sys.argv[0]} [{'|'.join(TOOLS)}]")
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    with ThreadPoolExecutor(8) as pool:
        found = {pool.submit(report, tool, name): name for name in CALLS}
        for ended in as_completed(found):
            clean, said = ended.result()
            print(f"{'clean' if clean else 'NOT CLEAN'}  {tool}  {found[ended]}: {said}", flush=True)
    sys.exit(not all(ended.result()[0] for ended in found))


if __name__ == "__main__":
    main(sys.argv[1:])
