"""`python -m benchmarks.plan [case=NAME] [out=benchmarks/results/plans/plans.json] [write=false] [commit=]`: predictions of
`launch.plan` beside what compilers and measurements say.

Each case is a recipe on devices that need not be there: its memory is predicted, and its step is compiled for them; both are
of a device. A case's row is written as soon as it is done, in place of the one before; case=all makes all of them. Then step
times are predicted for every training step in results/steps, with the (query, key) pairs that were there, and put beside the
measured ones. case=none compiles nothing. write=true puts the tables into README.md beside this file, after it has predicted
every case again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import provenance
from benchmarks.options import read
from ejdist.mesh import mesh_shape
from ejdist.models.lora import build
from ejdist.planning.candidates import candidate_of
from ejdist.planning.chips import chip_of_kind
from ejdist.planning.compiled import compiled_step
from ejdist.planning.links import Links
from ejdist.planning.memory import held
from ejdist.planning.search import Predictor
from ejdist.planning.step_time import step_time
from ejdist.planning.targets import target_of
from ejdist.training.flops import matmul_flops_per_token
from recipes.schema import compose

HERE = Path(__file__).parent
RESULTS, STEPS, README = HERE / "results" / "plans" / "plans.json", HERE / "results" / "steps", HERE / "README.md"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
GIB = 2**30

_HYBRID = (
    "recipe=hybrid_long_context model=1b model.layer_pattern=[gated_delta+mlp,gated_delta+mlp,gated_delta+mlp,full+mlp] "
    "model.gated_delta.num_key_heads=16 model.gated_delta.num_value_heads=16 mesh=single data.global_batch=1"
)
_MIXTURE = "recipe=moe_long_context data.sequence_length=32768 data.global_batch=64 mesh.ep=64 mesh.sp=1"
_NEMOTRON = "recipe=hybrid_long_context model=nemotron_h_8b data.sequence_length=32768 mesh.sp=1"
_DEEPSEEK = "recipe=moe_long_context model=deepseek_v3 model.remat=full"
_8B, _SHORT = "recipe=long_context model=8b", "data.sequence_length=8192 data.global_batch=64"
# name -> (topology, or devices and device; the recipe).
CASES: dict[str, tuple[str | tuple[int, str], str]] = {
    "1b_8k_h200": (
        (1, "h200"),
        "recipe=long_context model=1b mesh=single data.sequence_length=8192 data.global_batch=2",
    ),
    "1b_8k_dots_h200": (
        (1, "h200"),
        "recipe=long_context model=1b mesh=single data.sequence_length=8192 data.global_batch=2 model.remat=dots",
    ),
    "1b_8k_sums_h200": (
        (1, "h200"),
        "recipe=long_context model=1b mesh=single data.sequence_length=8192 data.global_batch=2 accumulation=2 "
        "optimizer.accumulate=bfloat16",
    ),
    "1b_8k_offload_h200": (
        (1, "h200"),
        "recipe=long_context model=1b mesh=single data.sequence_length=8192 data.global_batch=2 optimizer.offload=host",
    ),
    "8b_8k_lora_h200": (
        (1, "h200"),
        "recipe=long_context model=8b mesh=single data.sequence_length=8192 data.global_batch=2 lora.rank=16",
    ),
    "8b_8k_lora_int8_h200": (
        (1, "h200"),
        "recipe=long_context model=8b mesh=single data.sequence_length=8192 data.global_batch=2 lora.rank=16 lora.base=int8",
    ),
    "8b_1m_offload_h100": (
        (8, "h100"),
        "model=qwen3_8b data.sequence_length=1048576 data.global_batch=1 mesh.sp=8 model.remat=offload "
        "sequence.scheme=ulysses optimizer.offload=host",
    ),
    "8b_3670k_h100": (
        (8, "h100"),
        "model=qwen3_8b data.sequence_length=3670016 data.global_batch=1 mesh.sp=8 model.remat=offload_inputs "
        "sequence.scheme=ulysses optimizer.offload=host optimizer.moments=bfloat16 optimizer.accumulate=bfloat16",
    ),
    "8b_3670k_ring_h100": (
        (8, "h100"),
        "model=qwen3_8b data.sequence_length=3670016 data.global_batch=1 mesh.sp=8 model.remat=offload_inputs "
        "sequence.scheme=ring optimizer.offload=host optimizer.moments=bfloat16 optimizer.accumulate=bfloat16",
    ),
    "8b_128k_h200": ((64, "h200"), f"{_8B} data.sequence_length=131072 data.global_batch=16 mesh.fsdp=16 mesh.sp=4"),
    "30b_4k_h200": (
        (64, "h200"),
        "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=256 mesh.ep=64",
    ),
    "30b_4k_fsdp_h200": (
        (64, "h200"),
        "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=256 mesh.ep=8 mesh.fsdp=8",
    ),
    "1b_hybrid_32k_h200": ((1, "h200"), f"{_HYBRID} data.sequence_length=32768"),
    "1b_hybrid_128k_h200": ((1, "h200"), f"{_HYBRID} data.sequence_length=131072"),
    "qwen3_next_32k_h200": ((64, "h200"), f"{_MIXTURE} model=qwen3_next_80b_a3b"),
    "kimi_linear_32k_h200": ((64, "h200"), f"{_MIXTURE} model=kimi_linear_48b_a3b"),
    "nemotron_h_32k_h200": ((8, "h200"), f"{_NEMOTRON} data.global_batch=8 mesh.fsdp=8"),
    "deepseek_v3_8k_h200": (
        (256, "h200"),
        f"{_DEEPSEEK} data.sequence_length=8192 data.global_batch=1024 mesh.ep=2 mesh.fsdp=128 mesh.sp=1 "
        "model.precision=fp8_block",
    ),
    "deepseek_v3_128k_h200": (
        (256, "h200"),
        f"{_DEEPSEEK} data.sequence_length=131072 data.global_batch=32 mesh.ep=32 mesh.sp=8 model.precision=fp8_block",
    ),
    "8b_8k": ("v5p:4x4x4", f"{_8B} {_SHORT} mesh.fsdp=64 mesh.sp=1"),
    "8b_8k_full": ("v5p:4x4x4", f"{_8B} {_SHORT} mesh.fsdp=64 mesh.sp=1 model.remat=full"),
    "8b_8k_dots": ("v5p:4x4x4", f"{_8B} {_SHORT} mesh.fsdp=64 mesh.sp=1 model.remat=dots"),
    "8b_8k_offload": ("v5p:4x4x4", f"{_8B} {_SHORT} mesh.fsdp=64 mesh.sp=1 optimizer.offload=host"),
    "8b_8k_moments": ("v5p:4x4x4", f"{_8B} {_SHORT} mesh.fsdp=64 mesh.sp=1 optimizer.moments=bfloat16"),
    "8b_8k_sums": (
        "v5p:4x4x4",
        f"{_8B} data.sequence_length=8192 data.global_batch=128 accumulation=2 mesh.fsdp=64 mesh.sp=1 "
        "optimizer.accumulate=bfloat16",
    ),
    "8b_8k_lora": ("v5p:4x4x4", f"{_8B} {_SHORT} mesh.fsdp=64 mesh.sp=1 lora.rank=16"),
    "8b_8k_tp": ("v5p:4x4x4", f"{_8B} {_SHORT} mesh.fsdp=16 mesh.tp=4 mesh.sp=1"),
    "8b_128k": ("v5p:4x4x4", f"{_8B} data.sequence_length=131072 data.global_batch=8 mesh.fsdp=8 mesh.sp=8"),
    "8b_1m": ("v5p:8x8x8", f"{_8B} data.sequence_length=1048576 data.global_batch=8 mesh.fsdp=8 mesh.sp=64"),
    "30b_4k": (
        "v5p:4x4x4",
        "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=256 mesh.ep=64",
    ),
    "nemotron_h_32k": ("v5p:4x4x4", f"{_NEMOTRON} data.global_batch=64 mesh.fsdp=64"),
    "235b_128k": (
        "v5p:8x8x8",
        "recipe=moe_long_context model=qwen3_235b_a22b data.sequence_length=131072 data.global_batch=64 mesh.ep=64 mesh.sp=8",
    ),
    "deepseek_v3_8k": (
        "v5p:8x8x8",
        f"{_DEEPSEEK} data.sequence_length=8192 data.global_batch=1024 mesh.ep=64 mesh.fsdp=8 mesh.sp=1 accumulation=2",
    ),
    "deepseek_v3_128k": (
        "v5p:8x8x8",
        f"{_DEEPSEEK} data.sequence_length=131072 data.global_batch=32 mesh.ep=32 mesh.sp=16",
    ),
}


def case_of(name: str) -> tuple[str, Any, Any, Any, Any]:
    """Returns of a case (its recipe, the target, the sections, the candidate, what is predicted of it)."""
    where, words = CASES[name]
    target = target_of(where, None, None, None) if isinstance(where, str) else target_of(None, *where, None)
    sections = compose(words.split())
    candidate = candidate_of(sections, mesh_shape(sections.mesh.sizes, target.count))
    return words, target, sections, candidate, Predictor(sections, target).checked(candidate)


def predicted_of(memory: Any, compiled: int) -> dict[str, Any]:
    """Returns the fields of a row that hold a prediction and its error against the compiled bytes."""
    predicted = {
        "bytes": memory.total,
        "arguments": memory.arguments,
        "host": memory.host,
        "of": memory.classes,
    }
    return {"predicted": predicted, "error": memory.total / compiled - 1}


def compiled_row(name: str) -> dict[str, Any]:
    """Returns the bytes of a device, predicted and compiled, of a case."""
    words, target, sections, candidate, expected = case_of(name)
    start = time.process_time()
    made = compiled_step(candidate.applied(sections), target)
    return {
        "target": target.name,
        "recipe": words,
        "mesh": {a: n for a, n in made.mesh.items() if n > 1},
        "remat": candidate.remat,
        "parameters": made.parameters,
        "compiled": {
            "bytes": made.peak,
            "arguments": made.arguments,
            "temporaries": made.temporaries,
            "host": made.host,
        },
        **predicted_of(expected.memory, made.peak),
        "compile_seconds": made.compile_seconds,
        "compile_cpu_seconds": time.process_time() - start,
        "jax": jax.__version__,
    }


def measured_rows() -> list[dict[str, Any]]:
    """Returns the step times, predicted and measured, of every step in results/steps on a device that is known. What is
    predicted is a step of the fastest backends: one for which others were asked is left out."""
    rows = []
    for path in sorted(STEPS.glob("*.json")):
        found = json.loads(path.read_text())
        if any(word.startswith("platform=") for word in found["recipe"]):
            continue
        flops = found["tflops_causal"] * 1e12 * found["step_ms"] / 1e3 * found["devices"]
        expected = predicted_ms(compose(found["recipe"]), found["device"], found["devices"], flops)
        if expected is None:
            continue
        rows.append(
            {
                "name": path.stem,
                "measured_ms": found["step_ms"],
                "predicted_ms": expected,
                "error": expected / found["step_ms"] - 1,
                "commit": found["commit"],
            }
        )
    return rows


def predicted_ms(sections: Any, kind: str, devices: int, flops: float) -> float | None:
    """Returns the time that is expected of a recipe's step, None on a device that is not known.

    Args:
      kind: as `jax.Device.device_kind` says it.
      flops: of the step on all devices, by the convention `causal`: the (query, key) pairs that were there follow from it.
    """
    chip = chip_of_kind(kind)
    if chip is None:
        return None
    candidate = candidate_of(sections, mesh_shape(sections.mesh.sizes, devices))
    sections, mesh, model = candidate.applied(sections), candidate.abstract_mesh(), build(sections.model, sections.lora)
    tokens = sections.data.global_batch * sections.data.sequence_length
    pairs = (flops / 3 - matmul_flops_per_token(model.flops) * tokens) / sum(p.pair for p in model.flops)
    return 1e3 * step_time(sections, held(sections, model, mesh), mesh, Links(chip, chip.host), pairs=pairs).total


def tables(compiled: dict[str, Any]) -> str:
    """Returns the tables in Markdown."""
    lines = [
        "| memory of a device | on | mesh | remat | predicted GiB | compiled GiB | error | CPU s of the compiler |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in compiled.items():
        mesh = " ".join(f"{a}={n}" for a, n in r["mesh"].items()) or "one"
        cpu = "" if r["compile_cpu_seconds"] is None else f"{r['compile_cpu_seconds']:.0f}"
        sizes = f"{r['predicted']['bytes'] / GIB:.2f} | {r['compiled']['bytes'] / GIB:.2f}"
        lines.append(f"| {name} | {r['target']} | {mesh} | {r['remat']} | {sizes} | {r['error']:+.1%} | {cpu} |")
    lines += ["", "| step time | predicted ms | measured ms | error | measured at |", "|---|---|---|---|---|"]
    for r in measured_rows():
        lines.append(
            f"| {r['name']} | {r['predicted_ms']:.0f} | {r['measured_ms']:.0f} | {r['error']:+.1%} | `{r['commit']}` |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")  # the devices are described, not opened
    o = read({"case": "all", "out": str(RESULTS), "write": "false", "commit": ""}, argv)
    if o["case"] not in (*CASES, "all", "none"):
        raise SystemExit(f"case = {o['case']!r} is unknown; use all, none, {', '.join(CASES)}")
    out = Path(o["out"])
    rows = json.loads(out.read_text()) if out.exists() else {}
    for name in CASES if o["case"] == "all" else [n for n in CASES if n == o["case"]]:
        made = compiled_row(name) | provenance(o["commit"])
        rows = {n: made if n == name else rows[n] for n in CASES if n == name or n in rows}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name}: {made['error']:+.1%} in {made['compile_seconds']:.0f} s", flush=True)
    if o["write"] == "true":
        rows = {n: r | predicted_of(case_of(n)[-1].memory, r["compiled"]["bytes"]) for n, r in rows.items()}
        out.write_text(json.dumps(rows, indent=1) + "\n")
    text = tables(rows)
    print(text)
    if o["write"] == "true":
        before, rest = README.read_text().split(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
