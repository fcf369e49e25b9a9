"""`python -m launch.plan device=v5p-128 | devices=64 device=h200 [GROUP=VARIANT ...] [KEY=VALUE ...]`: how to train a
recipe on devices that need not be there.

Searches mesh, remat, accumulation, batch, and how keys and tokens travel, by predicted memory and time; keys that are given
stay. Where nothing fits, moments and activations go to the host, and then moments to bfloat16. The best plan is compiled with
the real compiler of the devices, and printed as overrides, with bytes on a device by class, bytes along each axis, step time
and MFU. A recipe whose mesh sizes are given and use all devices is compiled as it is; so is any with search=false. The stages
of a curriculum are planned one by one.

device=NAME                 a TPU slice by its name, v5p-128, v6e-256; or GPUs: a100, a100-40gb, h100, h200, b200, gb200
devices=N                   how many devices, where the name does not say it
topology=GENERATION:SHAPE   a TPU slice by its shape: v5p:4x4x4
slices=N                    so many TPU slices, joined by the data-centre network
devices_per_host=8          GPUs that NVLink joins; 72 of gb200
documents=one               of a row: one; a mean length (lognormal); or a file with one length a line
bandwidth=FILE              of launch.doctor: how fast the devices communicate, in place of data sheets
search=auto                 true searches what is left open beside a given mesh too; false nothing
finalists=3                 plans that may be compiled until one fits; 0 predicts only
--json                      prints JSON
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.errors import DONE, NOT_COMPILED, leaver, run_command
from launch.options import check_spelling
from launch.planned import is_curriculum, summary, text_of
from recipes.arguments import expanded, key_of

OWN = ("topology", "slices", "devices", "device", "devices_per_host", "bandwidth", "documents", "search", "finalists")


@dataclass(frozen=True)
class Args:
    """The command line: its own options, and the recipe's words."""

    topology: str | None
    devices: int | None
    device: str | None
    per_host: int | None
    search: str
    finalists: int
    recipe: list[str]
    as_json: bool
    slices: int | None = None
    bandwidth: str | None = None
    documents: str = "one"


def parse(argv: Sequence[str]) -> Args:
    """Parses the command line. Raises ValueError, naming the option."""
    options: dict[str, str] = {}
    recipe = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name not in OWN or not equals:
            if equals or (word.startswith("--") and word != "--json"):  # else a folder of --config-dir
                check_spelling(name, OWN)
            recipe += [] if word == "--json" else [word]
        elif name in options:
            raise ValueError(f"{name} is given twice")
        else:
            options[name] = value

    def number(name: str, least: int) -> int | None:
        if name not in options:
            return None
        if not re.fullmatch("[0-9]{1,18}", options[name]) or int(options[name]) < least:
            raise ValueError(f"{name} must be a number from {least} on, got {options[name]!r}")
        return int(options[name])

    for name, words in (
        ("topology", "a slice"),
        ("device", "a GPU"),
        ("bandwidth", "a file that launch.doctor has written"),
        ("documents", "one, a mean length, or a file with a length in each line"),
    ):
        if options.get(name) == "":
            raise ValueError(f"{name}= must name {words}; or leave it out")
    if options.get("search", "auto") not in ("auto", "true", "false"):
        raise ValueError(f"search must be auto, true or false, got {options['search']!r}")
    finalists = number("finalists", 0)
    return Args(
        options.get("topology"), number("devices", 1), options.get("device"), number("devices_per_host", 1),
        options.get("search", "auto"), 3 if finalists is None else finalists, expanded(recipe), "--json" in argv,
        number("slices", 1), options.get("bandwidth"), options.get("documents", "one"),
    )  # fmt: skip


def given_keys(words: Sequence[str]) -> set[str]:
    """Returns the searchable keys that a command line sets; `mesh=VARIANT` sets every axis."""
    from ejdist.planning.candidates import SEARCHED

    names = {key_of(w) for w in words}
    return {k for k in SEARCHED if k in names or ("mesh" in names and k.startswith("mesh."))}


def searches(args: Args, sections: Any, keys: set[str], count: int) -> bool:
    """Returns whether there is something to search."""
    if args.search != "auto":
        return args.search == "true"
    sizes = [getattr(sections.mesh, k.removeprefix("mesh.")) for k in keys if k.startswith("mesh.")]
    # One that is -1 takes what is left.
    return not sizes or (-1 not in sizes and math.prod(sizes) != count)


def plan(args: Args) -> dict[str, Any]:
    """Returns all results as JSON values; for a curriculum, `stages` with the results of each.

    Raises:
      ValueError: an option, a key, or a size that fits no mesh; names it, and the remedy.
      jax.errors.JaxRuntimeError: the compiler refuses the given recipe for another reason than memory.
    """
    from ejdist.documents import documents_of
    from ejdist.planning import curriculum
    from ejdist.planning.measured import read
    from ejdist.planning.targets import target_of
    from ejdist.sections import validate
    from ejdist.training.curriculum import is_of
    from recipes.schema import compose

    start = time.perf_counter()
    target = target_of(args.topology, args.devices, args.device, args.per_host, args.slices)
    measured = read(args.bandwidth, target.chip, target.per_host) if args.bandwidth is not None else None
    documents = documents_of(args.documents)
    sections, pinned = compose(args.recipe), given_keys(args.recipe)
    validate(sections)
    target.check()
    report: dict[str, Any] = {
        "topology": target.name,
        "devices": target.count,
        "memory_of_a_device": target.chip.memory,
        "recipe": list(args.recipe),
    }
    compiler = Compiler(target)
    if not sections.curriculum:
        report |= plan_of(args, sections, pinned, target, measured, compiler, documents)
    else:
        stages = curriculum.stages(sections, pinned, any(is_curriculum(word) for word in args.recipe))
        results: list[dict[str, Any]] = []
        for stage, keys in stages:
            _print_progress(stage.describe())
            try:
                result = plan_of(args, stage.sections, keys, target, measured, compiler, documents)
            except ValueError as error:
                raise ValueError(f"stage {stage.number} of the curriculum: {error}") from error
            results.append({"stage": stage.number, "steps": [stage.start + 1, stage.until]} | result)
        report |= {"stages": results, "fits": all(r["fits"] for r in results)}
        plans = [r["plan"] if r["searched"] else None for r in results]
        report["overrides"], over = curriculum.overrides_text(sections, plans) if any(plans) else ("", [])
        planned = [w for w in args.recipe if is_curriculum(w) or is_of(key_of(w), over)] if any(plans) else []
        report["kept"] = [w for w in args.recipe if w not in planned]
    return report | {"seconds": time.perf_counter() - start}


def plan_of(
    args: Args, sections: Any, pinned: set[str], target: Any, measured: Any, compiler: Compiler, documents: Any
) -> dict[str, Any]:
    """Returns the results for one recipe or stage. Raises as `plan`.

    Args:
      pinned: keys of the search that stay as the recipe has them.
    """
    from ejdist.planning.candidates import SEARCHED
    from ejdist.planning.expert_axes import compared
    from ejdist.planning.nearest import nearest
    from ejdist.planning.ranking import why_later
    from ejdist.planning.search import Predictor, as_given, overrides_text, search

    wide, notes = searches(args, sections, pinned, target.count), len(compiler.notes)
    predictor = Predictor(sections, target, measured, documents)
    report: dict[str, Any] = {"searched": wide, "documents": documents.words}
    unsaved = None
    if wide:
        outcome = search(
            sections, target, pinned, compiler if args.finalists else None,
            finalists=args.finalists, measured=measured, documents=documents, log=_print_progress,
        )  # fmt: skip
        best, compiled, refused, unsaved = outcome.best, outcome.compiled, outcome.refused, outcome.unsaved
        report |= {"looked_at": outcome.looked_at, "given": sorted(pinned)}
        report["refused"] = [{"overrides": overrides_text(p.candidate, pinned), "why": why} for p, why in refused]
        shown = best or (refused[0][0] if refused else outcome.smallest)
        report["others"] = [
            summary(p, pinned) | {"why_later": "" if shown is None else why_later(shown, p)} for p in outcome.others
        ]
        if outcome.experts is not None:
            over, on_each = outcome.experts
            report["expert_axes"] = {
                "why": compared(sections, over, on_each, pinned),
                "over_devices": summary(over, pinned) if over else None,
                "on_each": summary(on_each, pinned) if on_each else None,
            }
    else:
        shown = predictor.checked(as_given(predictor))
        compiled, refused = compiler.tried(shown.candidate.applied(sections)) if args.finalists else (None, "")
        expected = shown.memory.total if compiled is None else compiled.peak
        best = shown if not refused and expected <= target.chip.memory else None
        report["refused"] = [{"overrides": "", "why": refused}] if refused else []
    assert shown is not None
    report |= {"fits": best is not None, "plan": summary(shown, pinned if wide else set())}
    sources = {axis: predictor.links.source(axis, shown.candidate.sizes) for axis in shown.time.sent}
    report["links"] = {axis: {"measured": s.measured, "speed": s.words} for axis, s in sources.items()}
    report["overrides"] = overrides_text(shown.candidate, pinned) if wide else ""
    chip = target.chip
    report |= {"compiled": compiled is not None, **(asdict(compiled) if compiled else {})}
    report["host_compiled"] = report.pop("host", 0)
    report["host"] = {
        "bytes": target.host_bytes(shown.memory.host), "memory": chip.host_memory, "rate": chip.to_host,
        "source": chip.host_source,
    }  # fmt: skip
    report["notes"] = [*compiler.notes[notes:], *(compiled.notes if compiled else ())]
    if unsaved is not None:
        report["notes"].insert(0, saved(shown, unsaved))
    if best is None:
        keys, start_from = (pinned, sections) if wide else (set(SEARCHED), shown.candidate.applied(sections))
        report["nearest"] = [
            summary(p, pinned)
            | {"changed": what, "overrides": " ".join(f"{key}={value}" for key, value in new.items())}
            for what, p, new in nearest(start_from, target, keys, measured, documents)
        ]
    return report


def saved(best: Any, without: Any) -> str:
    """Returns the line that says why a plan sets keys that save memory."""
    from ejdist.models.remat import REMAT
    from ejdist.planning.candidates import MOMENTS, SUMS

    keys = [f"{key}={value}" for key, value in best.candidate.savings]
    keys += [f"model.remat={best.candidate.remat}"] if REMAT[best.candidate.remat].host else []
    changed = [key for key, _ in best.candidate.savings if key in (MOMENTS, SUMS)]
    losses = f"; {' and '.join(changed)} may change the losses a little" if changed else ""
    return (
        f"nothing fits without {' '.join(keys)}: the plan that needs least takes {without.memory.total / 2**30:.2f} GiB of a "
        f"device, predicted{losses}"
    )


class Compiler:
    """Compiles steps for a target, or prints once why it cannot."""

    def __init__(self, target: Any) -> None:
        self.target, self.notes = target, []

    def __call__(self, sections: Any) -> Any:
        """Returns the compiler's report, None without a compiler. Raises `DoesNotFit`."""
        import jax

        from ejdist.planning.compiled import DoesNotFit, compiled_step, does_not_fit
        from ejdist.planning.targets import NoCompiler
        from ejdist.progress import waiting

        try:
            with waiting(f"compiling for {self.target.name}", _print_progress):
                return compiled_step(sections, self.target)
        except jax.errors.JaxRuntimeError as error:
            if not does_not_fit(error) and self.target.chip.platform == "gpu":
                return self._absent(str(error).splitlines()[0][:300])
            raise DoesNotFit(f"the compiler refuses: {str(error)[:600]}", memory=does_not_fit(error)) from error
        except NoCompiler as error:
            return self._absent(str(error))

    def tried(self, sections: Any) -> tuple[Any, str]:
        """Returns (what the compiler says, "") or (None, why it refuses)."""
        from ejdist.planning.compiled import DoesNotFit

        try:
            return self(sections), ""
        except DoesNotFit as error:
            return None, str(error)

    def _absent(self, why: str) -> None:
        self.notes.append(f"nothing was compiled, and memory is an estimate: {why}")


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 1 if nothing fits."""
    return run_command(argv, _main, lambda _: (__doc__ or "").strip())


def _main(arguments: list[str]) -> int:
    import jax

    # XLA's warning that rematerialization cannot reduce the memory of a program counts what is on the host, and so contradicts
    # the memory that is printed. The compilers of devices, which are loaded below, read the level; JAX has set it to 1.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    jax.config.update("jax_platforms", "cpu")  # the devices are described, not opened
    args = parse(arguments)
    report = plan(args)
    print(json.dumps(report, indent=1) if args.as_json else text_of(report))
    return DONE if report["fits"] else NOT_COMPILED


if __name__ == "__main__":
    leave = leaver()
    leave(main())
