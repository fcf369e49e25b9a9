"""The report of `launch.plan` about a plan, as JSON and as text."""

from __future__ import annotations

from typing import Any

from ejdist.documents import ONE
from ejdist.planning.links import NETWORK
from recipes.arguments import in_shell, key_of

GIB = 2**30


def is_curriculum(word: str) -> bool:
    """Returns whether a word of the command line gives the stages of a curriculum."""
    return key_of(word) == "curriculum"


def summary(p: Any, keys: set[str]) -> dict[str, Any]:
    """Returns a prediction as JSON values: bytes on a device, seconds, bytes along axes."""
    from ejdist.planning.search import overrides_text

    return {
        "mesh": {axis: n for axis, n in p.candidate.sizes.items() if n > 1},
        "remat": p.candidate.remat,
        "accumulation": p.candidate.accumulation,
        "global_batch": p.candidate.global_batch,
        "chosen": {key: value for key, value in p.candidate.overrides().items() if key not in keys},
        "overrides": overrides_text(p.candidate, keys),
        "predicted": {
            "bytes": p.memory.total,
            "bytes_of": p.memory.classes,
            "bytes_on_host": p.memory.on_host,
            "height": p.memory.moment,
            "step_seconds": p.time.total,
            "seconds_of": p.time.seconds,
            "mfu": p.time.mfu,
            "uneven": p.time.uneven,
            "tokens_per_second": p.rate,
            "bytes_sent_along": p.time.sent,
        },
    }


def text_of(r: dict[str, Any]) -> str:
    """Returns a report as text."""
    command = " ".join(filter(None, [in_shell(r["recipe"]), r["overrides"]]))
    if "stages" not in r:
        lines = _lines(r | {"topology": r["topology"]}, "the recipe")
        return "\n".join([*lines, *(_pasted(command, r["searched"]) if r["fits"] else ())])
    lines = []
    for one in r["stages"]:
        name = f"stage {one['stage']}, steps {one['steps'][0]} to {one['steps'][1]}"
        lines += [name, *_lines(one | {n: r[n] for n in ("topology", "memory_of_a_device")}, "the stage"), ""]
    if r["fits"]:
        searched = any(one["searched"] for one in r["stages"])
        lines += _pasted(" ".join(filter(None, [in_shell(r["kept"]), r["overrides"]])), searched)
    else:
        lines.append(
            "the curriculum does not fit: " + ", ".join(f"stage {s['stage']}" for s in r["stages"] if not s["fits"])
        )
    return "\n".join(lines).rstrip("\n")


def _pasted(command: str, searched: bool) -> list[str]:
    """Returns the lines with the command that trains, which come last."""
    return ["the plan:" if searched else "it trains with:", f"  python -m launch.train {command}".rstrip()]


def _on_host(r: dict[str, Any]) -> list[str]:
    """Returns the lines about what is in the memory of the host."""
    predicted, host = r["plan"]["predicted"], r["host"]
    of = sum(predicted["bytes_on_host"].values())
    compiled = f", compiled: {r['host_compiled'] / GIB:.2f} GiB" if r["compiled"] else ""
    moving = [f"{s:.3g} s for {name}" for name, s in predicted["seconds_of"].items() if "the host" in name]
    return [
        f"memory of the host, predicted: {of / GIB:.2f} GiB of each device{compiled}; {host['bytes'] / GIB:,.4g} GiB of "
        f"{host['memory'] / GIB:,.4g} GiB of a host:",
        *(f"    {n / GIB:9.3f} GiB  {name}" for name, n in predicted["bytes_on_host"].items()),
        f"  transfers in a step: {', '.join(moving)}, at {host['rate'] / 1e9:.3g} GB/s each way; {host['source']}",
    ]


def _experts(r: dict[str, Any]) -> list[str]:
    """Returns the lines about experts over devices, or all on each: why one is faster, and the best plan over devices."""
    if "expert_axes" not in r:
        return []
    lines, over = [r["expert_axes"]["why"]], r["expert_axes"]["over_devices"]
    told = [r["plan"], *r.get("others", ())]
    if over is not None and all(p["overrides"] != over["overrides"] for p in told):
        p = over["predicted"]
        speed = f"{p['bytes'] / GIB:.1f} GiB, {p['tokens_per_second']:,.0f} tokens/s"
        lines.append(f"over devices: {over['overrides']}: {speed}")
    return lines


def _lines(r: dict[str, Any], what: str) -> list[str]:
    shown = r["plan"]
    predicted = shown["predicted"]
    room = r["memory_of_a_device"]
    head = (
        f"{r['topology']}: considered {r['looked_at']:,} plans"
        if r["searched"]
        else f"{r['topology']}: {what} as it is"
    )
    lines = [head + (f"; given: {', '.join(r['given'])}" if r.get("given") else "")]
    for refusal in r["refused"]:
        lines.append(f"refused: {refusal['overrides']}: {refusal['why']}".replace(": :", ":"))
    lines.append(
        f"mesh {shown['mesh'] or 'of one'}, remat {shown['remat']}, accumulation {shown['accumulation']}, global batch "
        f"{shown['global_batch']}" + (f", {r['parameters']:,} parameters" if r["compiled"] else "")
    )
    refused_here = r["refused"] and not r["compiled"] and predicted["bytes"] <= room
    verdict = "fits" if r["fits"] else "DOES NOT COMPILE" if refused_here else "DOES NOT FIT"
    if r["compiled"]:
        error = predicted["bytes"] / r["peak"] - 1
        lines += [
            f"memory per device, compiled: {r['peak'] / GIB:.2f} GiB of {room / GIB:.4g} GiB: {verdict}",
            f"  state and batch {r['arguments'] / GIB:.2f} GiB, temporaries {r['temporaries'] / GIB:.2f} GiB",
            f"  predicted: {predicted['bytes'] / GIB:.2f} GiB ({error:+.1%}), peaking in {predicted['height']}:",
        ]
    else:
        lines.append(
            f"memory per device, predicted and not compiled: {predicted['bytes'] / GIB:.2f} GiB of {room / GIB:.4g} GiB: "
            f"{verdict}; peaking in {predicted['height']}:"
        )
    lines += [f"    {n / GIB:9.3f} GiB  {name}" for name, n in predicted["bytes_of"].items() if n]
    if predicted["bytes_on_host"]:
        lines += _on_host(r)
    lines.append(
        f"step time, predicted: {predicted['step_seconds']:.3g} s, {predicted['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {predicted['mfu']:.1%}"
    )
    lines += [f"    {s:9.3g} s    {name}" for name, s in predicted["seconds_of"].items()]
    if predicted["uneven"] > 1.005:
        rows = "one document a row" if r["documents"] == ONE else f"rows of documents = {r['documents']}"
        lines.append(
            f"  attention of the busiest device of a sequence over the mean, with {rows}: {predicted['uneven']:.2f}"
        )
    along = {axis: n for axis, n in predicted["bytes_sent_along"].items() if axis != NETWORK}
    sent = ", ".join(f"{axis} {n / 1e9:,.3g} GB" for axis, n in along.items()) or "nothing"
    lines.append(f"bytes sent by a device along each axis per step, predicted: {sent}")
    if between := predicted["bytes_sent_along"].get(NETWORK):
        lines.append(f"  and between slices, over the data-centre network: {between / 1e9:.2f} GB")
    speeds: dict[str, list[str]] = {}
    for axis, link in r["links"].items():
        speeds.setdefault(("" if link["measured"] else "assumed: ") + link["speed"], []).append(axis)
    lines += [f"  speed of {', '.join(axes)}: {speed}" for speed, axes in speeds.items()]
    if r["compiled"]:
        calls = ", ".join(f"{n} {kind}" for kind, n in r["collectives"].items()) or "none"
        lines.append(f"collectives in the program: {calls}; compiled in {r['compile_seconds']:.0f} s")
    lines += r["notes"]
    for other in r.get("others", ()):
        p = other["predicted"]
        changed = [f"{key}={value}" for key, value in other["chosen"].items() if shown["chosen"].get(key) != value]
        speed = f"{p['bytes'] / GIB:.1f} GiB, {p['tokens_per_second']:,.0f} tokens/s"
        lines.append(f"next: {' '.join(changed)}: {speed}; {other['why_later']}")
    lines += _experts(r)
    if r.get("nearest") == []:
        lines.append("no plan with one change fits either: change several keys, or use a smaller model")
    for near in r.get("nearest", ()):
        p, rate = near["predicted"], predicted["tokens_per_second"]
        lines.append(
            f"would fit, with {near['changed']} (predicted {p['bytes'] / GIB:.1f} GiB, {p['tokens_per_second']:,.0f} tokens/s, "
            f"{p['tokens_per_second'] / rate - 1:+.1%}): {near['overrides']}"
        )
    return lines
