"""`python -m benchmarks.step [GROUP=VARIANT ...] [KEY=VALUE ...] [steps=3] [warmup=3] [timed=5] [documents=0] [top=15]
[out=FILE] [commit=]`: where the time of a recipe's training step goes, by the profiler.

Everything but these options is of the recipe, as `python -m launch.train` takes it; nothing is written to run.dir. After
`warmup` steps, `timed` ones are timed by the clock, back to back, and `steps` more are traced. Times are of a step and a
device.

class: matmuls, attention forward and backward, our Triton kernels by name, the optimizer, copies (with transposes and casts),
XLA's other kernels, collectives. Shares are of the time between the first kernel that was traced and the end of the last.
gaps: the part of it in which no kernel runs. exposed: that in which only collectives do, in all and by the named scope of the
collective; where several run at once, the one with the larger sum has it.
documents: 0 trains on the recipe's data; else on random tokens, in documents of so many.

Kernels inside a CUDA graph are known by their names alone; XLA_FLAGS=--xla_gpu_enable_command_buffer= keeps XLA from making
any.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from benchmarks.measure import provenance
from benchmarks.options import recorded, split
from benchmarks.plan import predicted_ms
from benchmarks.timing import Kernel, has_kernel_times, traced, union
from ejdist.device_rates import peak_flops
from ejdist.mesh import make_mesh
from ejdist.training.data import build as build_data
from ejdist.training.flops import step_flops
from ejdist.training.placing import local_rows, permuted, place_batch, place_limits
from ejdist.training.program import Program, make_program
from launch.train import start_jax
from recipes.schema import compose

OPTIONS = {"steps": 3, "warmup": 3, "timed": 5, "documents": 0, "top": 15, "out": "", "commit": ""}

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
# What moves numbers and computes none.
MOVES = frozenset(
    "parameter constant iota copy copy-start copy-done transpose convert bitcast bitcast-convert reshape broadcast slice "
    "concatenate pad reverse tuple get-tuple-element dynamic-slice dynamic-update-slice".split()
)
# Of the kernels of cuBLAS and CUTLASS, and of XLA's own products.
_MATMUL = re.compile(r"gemm|nvjet|xmma|cutlass|cublas|splitk", re.I)
_OPERATION = re.compile(r"(\w+)\.(\w+_gpu|xla)(\.backward)?(?=/|$)")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .+? ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(")


# -- what a kernel is -------------------------------------------------------------------------------------------------


@dataclass
class Instruction:
    """An instruction of a compiled program."""

    name: str
    opcode: str
    op_name: str = ""  # the path of scopes that it was traced in
    source: str = ""  # file:line
    target: str = ""  # of a custom call
    inner: frozenset[str] = field(default_factory=frozenset)  # opcodes of a fusion
    scopes: tuple[str, ...] = ()  # op_names of what is fused


def instructions(text: str) -> dict[str, Instruction]:
    """Returns name -> instruction of a compiled program's text. Fusions know what is in them."""
    found: dict[str, Instruction] = {}
    inside: dict[str, list[Instruction]] = defaultdict(list)
    calls: dict[str, str] = {}
    computation = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _INSTRUCTION.match(line):
            name, opcode, rest = match.groups()
            made = Instruction(name, opcode, _quoted(rest, "op_name"), target=_quoted(rest, "custom_call_target"))
            file, number = _quoted(rest, "source_file"), re.search(r"source_line=(\d+)", rest)
            made.source = f"{'/'.join(file.split('/')[-2:])}:{number[1]}" if file and number else ""
            if called := re.search(r"calls=%?([\w.\-]+)", rest):
                calls[name] = called[1]
            inside[computation].append(made)
            found[name] = made
    for name, called in calls.items():
        found[name].inner = frozenset(i.opcode for i in inside[called])
        found[name].scopes = tuple(dict.fromkeys(i.op_name for i in inside[called] if i.op_name))
    return found


def _quoted(text: str, key: str) -> str:
    match = re.search(rf'{key}="([^"]*)"', text)
    return match[1] if match else ""


def _plain(name: str) -> str:
    """Returns a name as a kernel may have it: of letters, digits and _."""
    return re.sub(r"\W", "_", name)


class Names:
    """Finds the instruction that a kernel is of: by what the profiler says of it, else by its name."""

    def __init__(self, text: str) -> None:
        self.found = instructions(text)
        self.by_kernel = {_plain(name): i for name, i in self.found.items()}

    def of(self, kernel: Kernel) -> Instruction | None:
        said = self.found.get(kernel.hlo_op)
        if said is None or said.opcode in ("call", "while", "conditional"):
            return self.by_kernel.get(_plain(kernel.name), said)
        return said


def triton_kernels() -> dict[str, str]:
    """Returns name -> operation of our Triton kernels that are loaded: in a CUDA graph there is no more than the name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("kernels.ops.", "kernels.engines.")):
            functions = (getattr(value, "fn", None) for value in vars(module).values())
            owner = {"attention": "flash_attention"}.get(name.split(".")[2], name.split(".")[2])
            found |= {f.__name__: owner for f in functions if getattr(f, "__module__", "") == name}
    return found


def class_of(kernel: Kernel, at: Instruction | None, ours: dict[str, str]) -> str:
    """Returns the class of a kernel, of the instruction `at`; `ours` is `triton_kernels()`."""
    name, op_name = kernel.name, "" if at is None else at.op_name
    if name.startswith("nccl") or (at and at.opcode.startswith(COLLECTIVES)):
        return "collectives"
    operation = _OPERATION.search(op_name)
    if "sdpa" in name or "fmha" in name or (at and "fmha" in at.target):
        back = "bprop" in name or "bwd" in name or (at is not None and "Backward" in at.target)
        return f"attention {'backward' if back else 'forward'}"
    if name in ours or (at and "triton" in at.target):
        if "attention" in (operation[1] if operation else ours.get(name, "")):
            back = operation[3] if operation else "gradient" in name or "bwd" in name
            return f"attention {'backward' if back else 'forward'}"
        return f"Triton {name}"
    if _MATMUL.search(name) or (at and (_MATMUL.search(at.target) or "dot" in at.inner or at.opcode == "dot")):
        return "matmuls"
    if "/optimizer/" in op_name or (at and any("/optimizer/" in scope for scope in at.scopes)):
        return "optimizer"
    if name.lower().startswith(("memcpy", "memset")) or (
        at and (at.opcode in MOVES or (at.inner and at.inner <= MOVES))
    ):
        return "copies"
    return "XLA, other" if at else "unknown"


# What JAX writes around and between the scopes of a program, and is no name that anybody gave.
_WRAPPED = re.compile(
    r"^(jit|pjit|jvp|transpose|vmap|checkpoint|rematted_computation|remat|custom_\w+|shmap_body)\((.*)\)$"
)
_NO_SCOPE = re.compile(
    r"^(jit|pjit|while|body|cond|body_jaxpr|branch_\d+_fun|closed_call|shard_map|checkpoint|rematted_computation|core_call|"
    r"custom_(jvp|vjp)_call\w*)?$"
)


def scope_of(at: Instruction | None) -> str:
    """Returns the named scopes that an instruction was traced in, and whether for a gradient: "attention/exchange, backward".

    `unknown` is what XLA says nothing of.
    """
    if at is None or not at.op_name:
        return "unknown"
    *parts, primitive = at.op_name.split("/")
    names, backward = [], False
    for part in parts:
        while wrapped := _WRAPPED.match(part):
            backward |= wrapped[1] == "transpose"
            part = "" if wrapped[1] in ("jit", "pjit") else wrapped[2]
        if not _NO_SCOPE.match(part):
            names.append(part)
    return "/".join(names or [primitive]) + (", backward" if backward else "")


def exposed_by_scope(working: dict[str, list[Any]], sent: dict[str, dict[str, list[Any]]]) -> dict[str, float]:
    """Returns scope -> the time in which one of its collectives ran and nothing in `working`, summed over devices; longest
    collectives first. The sum is the time in which any did: what several cover is the first one's.

    Args:
      working: device -> spans. sent: scope -> device -> spans.
    """
    covered = {device: list(spans) for device, spans in working.items()}
    found = {}
    for scope in sorted(sent, key=lambda name: -sum(map(union, sent[name].values()))):
        before = sum(map(union, covered.values()))
        for device, spans in sent[scope].items():
            covered[device] += spans
        found[scope] = sum(map(union, covered.values())) - before
    return found


def summary(kernels: list[Kernel], text: str, steps: int, top: int) -> dict[str, Any]:
    """Returns where the time of a step goes; of several devices their mean."""
    names, ours = Names(text), triton_kernels()
    devices = sorted({k.device for k in kernels})
    parts = 1e-6 / steps / len(devices)  # of the sum over all, ms of a step and a device
    classes: dict[str, float] = defaultdict(float)
    each: dict[tuple[str, str], list[Any]] = {}
    spans: dict[str, list[Any]] = {d: [] for d in devices}
    working: dict[str, list[Any]] = {d: [] for d in devices}
    sent: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {d: [] for d in devices})
    for k in kernels:
        at = names.of(k)
        kind = class_of(k, at, ours)
        classes[kind] += (k.end - k.start) * parts
        spans[k.device].append((k.start, k.end))
        if kind == "collectives":
            sent[scope_of(at)][k.device].append((k.start, k.end))
        else:
            working[k.device].append((k.start, k.end))
        label = at.name if at and kind in ("XLA, other", "copies", "optimizer") else k.name
        row = each.setdefault((kind, label), [0.0, 0, at])
        row[0] += (k.end - k.start) * parts
        row[1] += 1
    window = sum(max(e for _, e in s) - min(b for b, _ in s) for s in spans.values()) * parts
    busy = sum(map(union, spans.values())) * parts
    scopes = {name: ms * parts for name, ms in exposed_by_scope(working, sent).items()}
    exposed = busy - sum(map(union, working.values())) * parts
    largest = sorted(each.items(), key=lambda item: -item[1][0])

    def row(kind: str, label: str, ms: float, calls: int, at: Instruction | None) -> dict[str, Any]:
        said = {"kernel": label[:120], "class": kind, "ms": ms, "calls": calls / steps / len(devices)}
        if at:
            scopes = [s for s in (at.op_name, *at.scopes) if s]
            said |= {"op_name": at.op_name, "source": at.source, "scopes": list(dict.fromkeys(scopes))[:6]}
        return said

    def rows(of: Any, count: int) -> list[dict[str, Any]]:
        return [row(*key, *found) for key, found in largest if of(key[0])][:count]

    return {
        "window_ms": window,
        "classes": {
            kind: {"ms": ms, "share": ms / window} for kind, ms in sorted(classes.items(), key=lambda item: -item[1])
        },
        "gaps": {"ms": window - busy, "share": 1 - busy / window},
        "exposed_collectives": {"ms": exposed, "share": exposed / window},
        "exposed_by_scope": {
            name: {"ms": ms, "share": ms / window, "of_ms": sum(map(union, sent[name].values())) * parts}
            for name, ms in scopes.items()
        },
        "kernels_of_a_step": sum(found[1] for found in each.values()) / steps / len(devices),
        "largest_of_xla": rows(lambda kind: kind in ("XLA, other", "copies", "optimizer", "unknown"), top),
        "largest": rows(lambda kind: True, 2 * top),
    }


# -- the run ----------------------------------------------------------------------------------------------------------


def batches(sections: Any, program: Program, documents: int) -> Iterator[tuple[dict[str, jax.Array], Any]]:
    """Yields (a batch on the devices, its FLOPs on all of them) without end."""
    rows = local_rows(program)
    length, step = sections.data.sequence_length, 0
    share = sections.data.global_batch / len(rows)
    data = None if documents else build_data(sections.data, seed=sections.run.seed)
    while True:
        batch = (
            random_rows(rows, length, sections.model.vocab_size, documents) if data is None else data.batch(step, rows)
        )
        flops = step_flops(program.model.flops, batch["segment_ids"])
        yield place_batch(permuted(batch, program), program, rows), (flops.causal * share, flops.full * share)
        step += 1


def random_rows(rows: np.ndarray, length: int, vocabulary: int, documents: int) -> dict[str, np.ndarray]:
    """Returns rows of random tokens in documents of that many."""
    count, at = len(rows), np.arange(length)
    tokens = np.random.default_rng(int(rows[0])).integers(0, vocabulary, (count, length + 1)).astype(np.int32)

    def every_row(x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x.astype(np.int32), (count, length))

    segments, positions = every_row(at // documents), every_row(at % documents)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segment_ids": segments}


def measure(sections: Any, o: dict[str, Any]) -> dict[str, Any]:
    """Returns what was measured of the recipe's step."""
    mesh = make_mesh(**vars(sections.mesh))
    program = make_program(sections, mesh)
    start = time.perf_counter()
    compiled = program.lower().compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    feed = batches(sections, program, o["documents"])
    state = program.init()
    losses, limits = [], place_limits(np.full(2, np.inf, np.float32), program)

    def run(count: int) -> Any:
        nonlocal state
        metrics = None
        for batch, _ in given[:count]:
            state, metrics = compiled(state, batch, *limits)
            losses.append(metrics["loss"])
        return jax.block_until_ready((state, metrics))

    given = [next(feed) for _ in range(max(o["warmup"], o["timed"], o["steps"]))]
    run(o["warmup"])
    start = time.perf_counter()
    run(o["timed"])
    seconds = (time.perf_counter() - start) / o["timed"]
    flops = [float(np.mean([f[i] for _, f in given[: o["timed"]]])) for i in (0, 1)]
    tokens = sections.data.global_batch * sections.data.sequence_length
    kind = mesh.devices.flat[0].device_kind
    peak = peak_flops(kind)
    found = {
        "device": kind,
        "devices": mesh.size,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "jax": jax.__version__,
        "parameters": program.num_parameters,
        "notes": list(dict.fromkeys(program.notes)),
        "step_ms": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_causal": flops[0] / seconds / mesh.size / 1e12,
        "mfu_causal": None if peak is None else flops[0] / seconds / mesh.size / peak,
        "mfu_full": None if peak is None else flops[1] / seconds / mesh.size / peak,
        "predicted_ms": predicted_ms(sections, kind, mesh.size, flops[0]),
        "compile_seconds": compile_seconds,
        "arguments_gib": memory.argument_size_in_bytes / 2**30,
        "temporaries_gib": memory.temp_size_in_bytes / 2**30,
        "peak_gib": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
    }
    if has_kernel_times():
        found |= summary(traced(lambda: run(o["steps"])), compiled.as_text(), o["steps"], o["top"])
    return found | {"losses": [float(x) for x in losses]}


def text_of(found: dict[str, Any]) -> str:
    """Returns what was measured, in Markdown."""
    mfu = "" if found["mfu_causal"] is None else f", MFU {found['mfu_causal']:.1%} causal, {found['mfu_full']:.1%} full"
    lines = [
        f"{found['parameters']:,} parameters, {found['devices']} x {found['device']}, mesh {found['mesh'] or 'of one'}",
        f"{found['step_ms']:.1f} ms a step, {found['tokens_per_second']:,.0f} tokens/s, {found['tflops_causal']:.1f} TFLOP/s a "
        f"device{mfu}",
        f"state and batch {found['arguments_gib']:.1f} GiB, temporaries {found['temporaries_gib']:.1f} GiB, peak "
        f"{found['peak_gib']:.1f} GiB; compiled in {found['compile_seconds']:.0f} s; loss {found['losses'][0]:.3f} -> "
        f"{found['losses'][-1]:.3f}",
    ]
    if found.get("predicted_ms"):  # by `launch.plan`
        lines[1] += f"; predicted {found['predicted_ms']:.1f} ms ({found['predicted_ms'] / found['step_ms'] - 1:+.1%})"
    if "classes" not in found:
        return "\n".join([*lines, "the profiler shows kernels on accelerators only: no shares"])
    lines += ["", f"| of {found['window_ms']:.1f} ms traced | ms | share |", "|---|---|---|"]
    shown = {**found["classes"], "gaps": found["gaps"], "of collectives: exposed": found["exposed_collectives"]}
    lines += [f"| {name} | {x['ms']:.2f} | {x['share']:.1%} |" for name, x in shown.items()]
    if found.get("exposed_by_scope"):
        lines += ["", "| collectives of | ms | exposed, ms | of the step |", "|---|---|---|---|"]
        of_scopes = found["exposed_by_scope"].items()
        lines += [f"| {name} | {x['of_ms']:.2f} | {x['ms']:.2f} | {x['share']:.1%} |" for name, x in of_scopes]
    lines += ["", "| XLA's largest | class | ms | calls | where |", "|---|---|---|---|---|"]
    for r in found["largest_of_xla"]:
        where = " ".join(x for x in (r.get("op_name", "")[-90:], r.get("source", "")) if x)
        lines.append(f"| {r['kernel'][:50]} | {r['class']} | {r['ms']:.2f} | {r['calls']:g} | {where} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    o, words = split(OPTIONS, argv)
    sections = compose(words)
    start_jax(sections)
    found = {"recipe": words, "options": recorded(o), **provenance(o["commit"]), **measure(sections, o)}
    if jax.process_index() == 0:
        print(text_of(found), flush=True)
        if o["out"]:
            with open(o["out"], "w") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
