"""`python -m launch.plan topology=v5p:8x8x8 | devices=64 device=h200 [GROUP=VARIANT ...] [KEY=VALUE ...]`: how to train a
recipe on devices that need not be there.

Searches mesh, remat, accumulation and batch by predicted memory and time; keys that are given stay. The best plan is compiled
with the real compiler of the devices, and printed as overrides, with bytes on a device by class, bytes along each axis, step
time and MFU. A recipe whose mesh sizes are given and use all devices is compiled as it is; so is any with search=false.

topology=GENERATION:SHAPE   a TPU slice
devices=N device=NAME       GPUs: h100, h200, b200; devices_per_host=8
search=auto                 true searches what is left open beside a given mesh too; false nothing
finalists=3                 plans that may be compiled until one fits; 0 predicts only
--json                      prints JSON
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.errors import DONE, NOT_COMPILED, run_command

GIB = 2**30
OWN = ("topology", "devices", "device", "devices_per_host", "search", "finalists")


@dataclass(frozen=True)
class Asked:
    """The command line: its own options, and the recipe's words."""

    topology: str | None
    devices: int | None
    device: str | None
    per_host: int | None
    search: str
    finalists: int
    recipe: list[str]
    as_json: bool


def asked_of(argv: Sequence[str]) -> Asked:
    """Returns what was asked. Raises ValueError, naming the option."""
    own: dict[str, str] = {}
    recipe = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name not in OWN or not equals:
            recipe += [] if word == "--json" else [word]
        elif name in own:
            raise ValueError(f"{name} is given twice")
        else:
            own[name] = value

    def number(name: str, least: int) -> int | None:
        if name not in own:
            return None
        if not own[name].isdigit() or int(own[name]) < least:
            raise ValueError(f"{name} must be a number from {least} on, got {own[name]!r}")
        return int(own[name])

    if own.get("search", "auto") not in ("auto", "true", "false"):
        raise ValueError(f"search must be auto, true or false, got {own['search']!r}")
    finalists = number("finalists", 0)
    return Asked(
        own.get("topology"), number("devices", 1), own.get("device"), number("devices_per_host", 1),
        own.get("search", "auto"), 3 if finalists is None else finalists, recipe, "--json" in argv,
    )  # fmt: skip


def given_keys(words: Sequence[str]) -> set[str]:
    """Returns the keys of the search that a command line gives; `mesh=VARIANT` gives every axis."""
    from ejdist.planning.search import SEARCHED

    names = {w.partition("=")[0].lstrip("+~") for w in words}
    return {k for k in SEARCHED if k in names or ("mesh" in names and k.startswith("mesh."))}


def searches(asked: Asked, sections: Any, given: set[str], count: int) -> bool:
    """Returns whether there is something to search."""
    if asked.search != "auto":
        return asked.search == "true"
    sizes = [getattr(sections.mesh, k.removeprefix("mesh.")) for k in given if k.startswith("mesh.")]
    # One that is -1 takes what is left.
    return not sizes or (-1 not in sizes and math.prod(sizes) != count)


def plan(asked: Asked) -> dict[str, Any]:
    """Returns everything that was found, as JSON has it.

    Raises:
      ValueError: an option, a key, or a size that fits no mesh; names it, and the remedy.
      jax.errors.JaxRuntimeError: the compiler refuses the given recipe for another reason than memory.
    """
    from ejdist.planning.search import SEARCHED, Predictor, as_given, nearest, overrides_text, search
    from ejdist.planning.targets import target_of
    from recipes.schema import compose

    start = time.perf_counter()
    target = target_of(asked.topology, asked.devices, asked.device, asked.per_host)
    sections, given = compose(asked.recipe), given_keys(asked.recipe)
    wide = searches(asked, sections, given, target.count)
    compiler = Compiler(target)
    report: dict[str, Any] = {
        "topology": target.name,
        "devices": target.count,
        "memory_of_a_device": target.chip.memory,
    }
    report |= {"recipe": list(asked.recipe), "searched": wide}
    if wide:
        found = search(
            sections, target, given, compiler if asked.finalists else None, finalists=asked.finalists, told=_say
        )
        best, made, refused = found.best, found.compiled, found.refused
        report |= {"looked_at": found.looked_at, "given": sorted(given)}
        report["refused"] = [{"overrides": overrides_text(p.candidate, given), "why": why} for p, why in refused]
        report["others"] = [summary(p, given) for p in found.others]
        shown = best or (refused[0][0] if refused else found.smallest)
    else:
        shown = Predictor(sections, target).checked(as_given(sections, target))
        made, refused = compiler.tried(shown.candidate.applied(sections)) if asked.finalists else (None, "")
        expected = shown.memory.total if made is None else made.peak
        best = shown if not refused and expected <= target.chip.memory else None
        report["refused"] = [{"overrides": "", "why": refused}] if refused else []
    assert shown is not None
    report |= {"fits": best is not None, "plan": summary(shown, given if wide else set())}
    report["overrides"] = overrides_text(shown.candidate, given) if wide else ""
    report |= {"compiled": made is not None, **(asdict(made) if made else {})}
    report["notes"] = [*compiler.notes, *(made.notes if made else ())]
    if best is None:
        keys, start_from = (given, sections) if wide else (set(SEARCHED), shown.candidate.applied(sections))
        report["nearest"] = [
            summary(p, given) | {"changed": what, "overrides": " ".join(f"{key}={value}" for key, value in new.items())}
            for what, p, new in nearest(start_from, target, keys)
        ]
    return report | {"seconds": time.perf_counter() - start}


class Compiler:
    """Compiles steps for a target, or says once why it cannot."""

    def __init__(self, target: Any) -> None:
        self.target, self.notes = target, []

    def __call__(self, sections: Any) -> Any:
        """Returns what the compiler says, None where there is none. Raises `DoesNotFit`."""
        import jax

        from ejdist.planning.compiled import compiled_step, does_not_fit
        from ejdist.planning.search import DoesNotFit

        try:
            return compiled_step(sections, self.target)
        except jax.errors.JaxRuntimeError as error:
            if not does_not_fit(error) and self.target.chip.platform == "gpu":
                return self._absent(str(error).splitlines()[0][:300])
            raise DoesNotFit(f"the compiler refuses: {str(error)[:600]}", memory=does_not_fit(error)) from error
        except RuntimeError as error:
            return self._absent(str(error))

    def tried(self, sections: Any) -> tuple[Any, str]:
        """Returns (what the compiler says, "") or (None, why it refuses)."""
        from ejdist.planning.search import DoesNotFit

        try:
            return self(sections), ""
        except DoesNotFit as error:
            return None, str(error)

    def _absent(self, why: str) -> None:
        self.notes.append(f"nothing was compiled, and memory is an estimate: {why}")


def summary(p: Any, given: set[str]) -> dict[str, Any]:
    """Returns a prediction as JSON has it: bytes on a device, seconds, bytes along axes."""
    from ejdist.planning.search import overrides_text

    return {
        "mesh": {axis: n for axis, n in p.candidate.sizes.items() if n > 1},
        "remat": p.candidate.remat,
        "accumulation": p.candidate.accumulation,
        "global_batch": p.candidate.global_batch,
        "overrides": overrides_text(p.candidate, given),
        "predicted": {
            "bytes": p.memory.total,
            "bytes_of": p.memory.classes,
            "height": p.memory.moment,
            "step_seconds": p.time.total,
            "seconds_of": p.time.seconds,
            "mfu": p.time.mfu,
            "tokens_per_second": p.rate,
            "bytes_sent_along": p.time.sent,
        },
    }


def text_of(r: dict[str, Any]) -> str:
    """Returns a report as it is printed."""
    shown = r["plan"]
    said = shown["predicted"]
    room = r["memory_of_a_device"]
    head = (
        f"{r['topology']}: looked at {r['looked_at']:,} plans"
        if r["searched"]
        else f"{r['topology']}: the recipe as it is"
    )
    lines = [head + (f"; given: {', '.join(r['given'])}" if r.get("given") else "")]
    for refusal in r["refused"]:
        lines.append(f"refused: {refusal['overrides']}: {refusal['why']}".replace(": :", ":"))
    lines.append(
        f"mesh {shown['mesh'] or 'of one'}, remat {shown['remat']}, accumulation {shown['accumulation']}, global batch "
        f"{shown['global_batch']}" + (f", {r['parameters']:,} parameters" if r["compiled"] else "")
    )
    refused_here = r["refused"] and not r["compiled"] and said["bytes"] <= room
    verdict = "fits" if r["fits"] else "DOES NOT COMPILE" if refused_here else "DOES NOT FIT"
    if r["compiled"]:
        error = said["bytes"] / r["peak"] - 1
        lines += [
            f"memory per device, compiled: {r['peak'] / GIB:.2f} GiB of {room / GIB:.4g} GiB: {verdict}",
            f"  state and batch {r['arguments'] / GIB:.2f} GiB, temporaries {r['temporaries'] / GIB:.2f} GiB",
            f"  predicted: {said['bytes'] / GIB:.2f} GiB ({error:+.1%}), at its height in {said['height']}:",
        ]
    else:
        lines.append(
            f"memory per device, predicted and not compiled: {said['bytes'] / GIB:.2f} GiB of {room / GIB:.4g} GiB: {verdict}; "
            f"at its height in {said['height']}:"
        )
    lines += [f"    {n / GIB:9.3f} GiB  {name}" for name, n in said["bytes_of"].items() if n]
    lines.append(
        f"step time, predicted: {said['step_seconds']:.3g} s, {said['tokens_per_second']:,.0f} tokens/s, MFU {said['mfu']:.1%}"
    )
    lines += [f"    {s:9.3f} s    {name}" for name, s in said["seconds_of"].items()]
    sent = ", ".join(f"{axis} {n / 1e9:.1f} GB" for axis, n in said["bytes_sent_along"].items()) or "nothing"
    lines.append(f"sent by a device along each axis in a step, predicted: {sent}")
    if r["compiled"]:
        calls = ", ".join(f"{n} {kind}" for kind, n in r["collectives"].items()) or "none"
        lines.append(f"collectives in the program: {calls}; compiled in {r['compile_seconds']:.0f} s")
    lines += r["notes"]
    for other in r.get("others", ()):
        p = other["predicted"]
        lines.append(f"next: {other['overrides']}: {p['bytes'] / GIB:.1f} GiB, {p['tokens_per_second']:,.0f} tokens/s")
    for near in r.get("nearest", ()):
        lines.append(
            f"would fit, with {near['changed']} (predicted {near['predicted']['bytes'] / GIB:.1f} GiB): {near['overrides']}"
        )
    if r["searched"] and r["fits"]:
        lines += ["the plan:", f"  python -m launch.train {' '.join([*r['recipe'], r['overrides']])}"]
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the command: 1 where nothing fits."""
    return run_command(argv, _main, lambda _: (__doc__ or "").strip())


def _main(arguments: list[str]) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")  # the devices are described, not opened
    asked = asked_of(arguments)
    report = plan(asked)
    print(json.dumps(report, indent=1) if asked.as_json else text_of(report))
    return DONE if report["fits"] else NOT_COMPILED


if __name__ == "__main__":
    sys.exit(main())
