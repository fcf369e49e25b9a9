"""What the TPU compiler makes of recurrences, attention over pages and 8-bit products: bundles of schedules, and bytes moved.

    python -m benchmarks.comparisons.tpu_schedules [OPERATION:CASE ...] [tpus=v5p,v6e] [chunk=TOKENS]

It prints a table of both directions for all generations, and needs no TPU. A backward is given its cotangents and what its
forward keeps, and its forward is not run; "keeping" is the forward of a differentiated call, where a backend keeps arrays.

- Bundles are those of all kernels of a direction, for 128 tokens of a head, or of 128 channels: a bundle takes at least a
  cycle, and waiting for memory is in none. Those of a loop inside a step of the grid count as often as it runs, and those of
  both branches of a condition count. Of attention over pages they are those for a page, all inside the loops over blocks of
  keys, for one query of 32 heads or for 64. "JAX" is JAX's own kernel (`ragged_paged_attention`), with as many keys a block and
  queries a tile.
  Of products in 8 bits they are those for 128 x 128 x 128 entries, and of what makes their operands for 128 x 128; the kernel
  that writes these runs once for each array that is quantised.
- Bytes are those that every instruction of the program reads from main memory and writes to it. Of an operand that is only
  sliced or gathered from, they are what is taken. Beside them stands how many times what the operation declares (`Op.work`)
  that is, with what is kept for the backward where that is written or read.

A program is compiled in a process of its own, as the compiler reads where to write its schedules when it is loaded.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

CASES = (
    "linear_attention:head_16k",
    "linear_attention:gla_8k",
    "state_space_v2:mamba2_8k",
    "delta_rule:qwen3_next",
    "delta_rule:kimi_linear",
    "rwkv7:rwkv7_3b",
    "causal_conv1d:mamba2_8k",
    "causal_conv1d:documents_32k",
    "page_attention:decode_8k",
    "page_attention:decode_8k_int8",
    "page_attention:prefill_2k_of_8k",
    "scaled_matmul:block_8192",
    "scaled_grouped_matmul:qwen3_down",
    "scaled_grouped_matmul:mixtral_up_rows",
    "quantize_both_ways:mlp_8k_rows",
    "normalize_both_ways:model_2k_rows",
    "activate_both_ways:mlp_8k_rows",
    "activation_cotangents:mlp_8k_rows",
)
SCALED = ("scaled_matmul", "scaled_grouped_matmul")
QUANTIZING = ("quantize_both_ways", "normalize_both_ways", "activate_both_ways", "activation_cotangents")
JAXS = "JAX"  # the direction of JAX's own kernel
COMPILE = "compile"  # how a process of one program is called
BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s+(?:\w\w)?\s*:\s*(>*)\s*\{")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)")
BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8,
}  # fmt: skip
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done"}
TAKES = {"slice", "dynamic-slice", "gather"}  # what reads only a part of its first operand


# -- bytes ------------------------------------------------------------------------------------------------------------


def size_of(shape: str) -> int:
    """Returns the bytes of the arrays of an instruction's type that lie in main memory, without what tiles are padded by."""
    total = 0
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\]\{([^}]*)\}", shape):
        if "S(" not in layout:
            total += BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
    return total


def _computations(hlo: str) -> dict[str, list[tuple[str, ...]]]:
    """Returns the instructions of each computation by its name; that of the program is "ENTRY"."""
    found: dict[str, list[tuple[str, ...]]] = {}
    name = ""
    for line in hlo.splitlines():
        if not line.startswith(" ") and line.rstrip().endswith("{"):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0]
            found[name] = []
        elif (instruction := INSTRUCTION.match(line)) and name:
            found[name].append(instruction.groups())
    return found


def _taken(body: list[tuple[str, ...]], number: int) -> int | None:
    """Returns the bytes that a fused computation takes of a parameter that it only slices or gathers from, else None."""
    (parameter,) = (name for name, _, kind, arguments, _ in body if kind == "parameter" and arguments == str(number))
    aliases, total = {parameter}, 0
    for name, shape, kind, arguments, _ in body:
        operands = re.findall(r"%[\w.\-]+", arguments)
        if not aliases & set(operands):
            continue
        if kind == "bitcast":
            aliases.add(name)
        elif kind in TAKES and operands[0] in aliases:
            total += size_of(re.sub(r"S\(\d+\)", "", shape))
        else:
            return None
    return total


def moved(hlo: str) -> int:
    """Returns the bytes that the instructions of a compiled program read from main memory and write to it."""
    computations, sizes, total = _computations(hlo), {}, 0
    for name, shape, kind, arguments, more in computations["ENTRY"]:
        sizes[name] = size_of(shape)
        if kind in FREE:
            continue
        total += 0 if kind == "copy-start" else sizes[name]
        called = re.search(r"calls=(%[\w.\-]+)", more)
        for i, operand in enumerate(re.findall(r"%[\w.\-]+", arguments)):
            read = sizes.get(operand, 0)
            if kind == "fusion" and called:
                part = _taken(computations[called[1]], i)
                read = read if part is None else min(read, part)
            elif kind in TAKES and i == 0:
                read = min(read, sizes[name])
            total += read
    return total


# -- bundles ----------------------------------------------------------------------------------------------------------


def bundles(schedule: str) -> Counter[int]:
    """Returns the bundles of a schedule by the number of loops around them; the first is that over the grid."""
    return Counter(len(match[1]) for match in map(BUNDLE.match, schedule.splitlines()) if match)


def loops_and_share(call: Any, chunk: int | None, case: str) -> tuple[int, float]:
    """Returns (how often the loop in a step of the grid runs, its heads of 128 tokens or of one, or its tiles of channels)."""
    import kernels
    from kernels.engines.scan import pallas_decode, pallas_delta_calls, pallas_dplr_calls, pallas_linear_calls
    from kernels.ops.scaled_matmul import pallas_tpu as scaled_tiles
    from kernels.ops.state_space import pallas_conv, pallas_conv_calls

    d = call.dims
    if call.op_name == "page_attention":
        return 1, pages_of_block(call)
    if call.op_name in SCALED:
        cfg = scaled_tiles.heuristic(call, "tpu")
        return 1, cfg.block_m * cfg.block_n * scaled_tiles.depth_of(call) / 128**3
    if call.op_name in QUANTIZING:
        cfg = kernels.operations()[call.op_name].backends["pallas_tpu"].heuristic(call, "tpu")
        return 1, cfg.block_m * cfg.block_n / 128**2
    if call.op_name == "causal_conv1d":
        span = chunk or pallas_conv_calls.SPANS[0]
        return span // pallas_conv.SLAB, pallas_conv_calls.CHANNELS * span / 128**2
    if "decode" in case:
        return max(1, d["N"] // pallas_decode.SUBLANES), d["N"]
    if "r" in call.arguments:
        pack = pallas_dplr_calls.pack_of(d["H"], d["Hv"])
        packs = pallas_dplr_calls.packs_of(-(-d["N"] // pack), pack)
        return packs, packs * pack
    arguments = call.arguments
    if any(arguments.get(n) is not None for n in ("gk", "bonus")) or (
        call.op_name == "delta_rule" and call.g.shape[-1] > 1
    ):
        heads = pallas_delta_calls.group_of(d["N"], d["N"])[1]
        return heads, heads
    if call.op_name == "delta_rule":
        keys, values, unit = pallas_delta_calls.group_of(d["K"], d["N"])
        return keys // unit, values
    chunk = chunk or pallas_linear_calls.heuristic(call, "tpu").chunk
    return 1, pallas_linear_calls.blocks_of(d["N"], d["K"]).heads * chunk / 128


def blocks_depth(op_name: str, depths: Counter[int]) -> int:
    """Returns the depth from which on bundles count: all in a step of the grid, or in the loop over blocks of keys."""
    if op_name != "page_attention":
        return 1
    return min((depth for depth in depths if depth > 1), key=lambda depth: -depths[depth])


def pages_of_block(call: Any) -> int:
    from kernels.ops.paged_attention import pallas_tpu

    return pallas_tpu.heuristic(call, "tpu").block_k // call.dims["C"]


def of_jax(call: Any, topology: str) -> Any:
    """Returns (JAX's own kernel, its arguments), for the shapes of a call: keys and values are in one cache."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ragged_paged_attention

    from kernels.toolchains.simulate import ahead_of_time

    d, shape = call.dims, jax.ShapeDtypeStruct
    rows = d["B"] * call.query.shape[1]
    queries = min(64, call.query.shape[1])

    def run(query: Any, cache: Any, *integers: Any) -> Any:
        # Its rules of lowering ask for which generation they are.
        mesh = jax.sharding.Mesh(ahead_of_time.tpu_topology(topology).devices[:1], ("one",))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return ragged_paged_attention(
                query,
                cache,
                *integers,
                sm_scale=0.1,
                num_kv_pages_per_block=pages_of_block(call),
                num_queries_per_block=queries,
                vmem_limit_bytes=2**26,
                **({"k_scale": 1.0, "v_scale": 1.0} if call.key_cache.dtype == jnp.int8 else {}),
            )

    arrays = (
        shape((rows, d["N"], d["H"]), call.query.dtype),
        shape((d["pages"], d["C"], 2 * d["K"], d["H"]), call.key_cache.dtype),
    )
    tables = shape(call.block_tables.shape, jnp.int32)
    return run, (*arrays, shape((d["B"],), jnp.int32), tables, shape((d["B"] + 1,), jnp.int32), shape((1,), jnp.int32))


def compiled(op_name: str, case_name: str, topology: str, direction: str, chunk: str, folder: str) -> None:
    """Compiles a direction, and prints what is known of it as JSON."""
    import jax

    import kernels
    from kernels.framework.platforms import PLATFORMS
    from kernels.framework.work import nbytes
    from kernels.toolchains.simulate import ahead_of_time

    op = kernels.operations()[op_name]
    case = next(case for case in op.cases if case.name == case_name)
    dtype = "float8_e4m3fn" if op_name in SCALED else "bfloat16"
    call = op.bind(**op.case_inputs(case, dtype=dtype, shapes_only=True))
    field = "span" if op_name == "causal_conv1d" else "chunk"
    sizes = {field: int(chunk)} | ({"backward_span": int(chunk)} if field == "span" else {}) if chunk else {}
    cfg = op.config(**sizes) if sizes else None
    function, arguments = ahead_of_time.call_of(op, case, dtype=dtype, platform="pallas", cfg=cfg, backward=False)
    declared = op.work(call)[direction == "backward"].bytes
    program_of, inputs = function, (arguments,)
    if direction == JAXS:
        program_of, inputs = of_jax(call, topology)
    elif direction != "forward":
        choice = op.plan(call, "pallas", cfg, differentiated=True).choices[PLATFORMS.index("tpu")]
        shapes = choice.backend.kept(call, choice.cfg)
        declared += nbytes(*shapes.values())
        outputs, pull = jax.eval_shape(lambda x: jax.vjp(function, x), arguments)
        of_backward = [(x.shape, x.dtype) for x in shapes.values()]

        def keeping(arguments: Any) -> Any:
            outputs, pull = jax.vjp(function, arguments)
            return outputs, [x for x in jax.tree.leaves(pull) if (x.shape, x.dtype) in of_backward]

        if direction == "keeping":
            program_of = keeping
        else:
            program_of, inputs = (lambda pull, d: pull(d)), (pull, outputs)
    program = ahead_of_time.compile_tpu(program_of, *inputs, topology=topology)
    repeats, share = loops_and_share(call, int(chunk) if chunk else None, case_name)
    counts = {}
    for schedule in sorted(Path(folder).glob("*_kernel*-final_bundles.txt")):
        kernel = re.search(r"\d-(\w+_kernel)[.\d]*-\d+-final_bundles", schedule.name)
        if kernel:
            depths = bundles(schedule.read_text())
            least = blocks_depth(op_name, depths)
            counts[kernel[1]] = (
                sum(n * (repeats if depth > 1 else 1) for depth, n in depths.items() if depth >= least) / share
            )
    found = {"moved": moved(program.as_text()), "declared": declared, "bundles": counts}
    print(json.dumps(found | {"temporaries": program.memory_analysis().temp_size_in_bytes}))


def directions(case: str) -> tuple[str, ...]:
    """Returns the directions of a case: an operation without a backward is beside JAX's."""
    from kernels import operations

    backend = operations()[case.split(":")[0]].backends["pallas_tpu"]
    if backend.backward is None:
        return ("forward",) if case.split(":")[0] in SCALED + QUANTIZING else ("forward", JAXS)
    return ("forward", "backward") if backend.keeps is None else ("forward", "keeping", "backward")


def row(case: str, topology: str, direction: str, chunk: str) -> str:
    """Returns the row of a direction on a topology."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.comparisons.tpu_schedules", COMPILE, *case.split(":")]
        environment = os.environ | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
        command += [topology, direction, chunk, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} for {topology}: {done.stderr.strip().splitlines()[-1]}")
    x = json.loads(done.stdout.splitlines()[-1])
    each = " + ".join(f"{n:,.0f}" for n in x["bundles"].values())
    cells = [f"`{case.split(':')[1]}`", topology.split(":")[0], direction, each, f"{x['moved'] / 1e6:,.0f}"]
    return f"| {' | '.join(cells)} | {x['moved'] / x['declared']:.2f} | {x['temporaries'] / 1e6:,.0f} |"


def main(arguments: list[str]) -> None:
    if arguments[:1] == [COMPILE]:
        compiled(*arguments[1:])
        return
    from kernels.toolchains.simulate.ahead_of_time import TPU_TOPOLOGIES

    options = dict(word.split("=", 1) for word in arguments if "=" in word)
    wanted = options.get("tpus", ",".join(t.split(":")[0] for t in TPU_TOPOLOGIES)).split(",")
    print("| case | TPU | direction | bundles | MB | of declared | temporaries, MB |\n|---|---|---|---|---|---|---|")
    for case in [word for word in arguments if "=" not in word] or CASES:
        for topology in [t for t in TPU_TOPOLOGIES if t.split(":")[0] in wanted]:
            for direction in directions(case):
                print(row(case, topology, direction, options.get("chunk", "")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
