"""What `launch.tpu_vm` asks gcloud: whether TPU VMs are ready, how many machines they have, and how to connect to one.

States are those of the Cloud TPU API v2: of a TPU VM READY, of a queued resource ACTIVE. That API has no TPU7x.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from typing import Any

from launch.tpu_vm_options import Options

_EVERY = 30.0  # seconds between two looks at machines that are not ready
_READY = ("READY", "ACTIVE")
# Nothing brings these back: somebody deletes what is left, and asks for new ones.
_GONE = ("PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED", "not there")


def _gcloud(o: Options, kind: str, verb: str, name: str, *more: str, alpha: bool = False) -> list[str]:
    project = [f"--project={o.project}"] if o.project else []
    which = ["alpha"] if alpha else []
    return ["gcloud", *which, "compute", "tpus", kind, verb, name, f"--zone={o.zone}", *project, "--quiet", *more]


def ssh_to(o: Options, name: str, worker: int, command: str) -> list[str]:
    """Returns the command line that runs a command on a machine of a TPU VM; options of ssh may follow after "--"."""
    flags = [*(["--internal-ip"] if o.internal_ip else []), *(["--tunnel-through-iap"] if o.iap else [])]
    flags += [f"--ssh-key-file={o.key}"] if o.key else []
    flags += shlex.split(o.gcloud)
    # gcloud has tunnels to TPU VMs among its alpha commands alone.
    return _gcloud(o, "tpu-vm", "ssh", name, f"--worker={worker}", f"--command={command}", *flags, alpha=o.iap)


def ready(o: Options) -> dict[str, int]:
    """Returns TPU VM -> how many machines it has, once all are ready; waits for that, and has lost ones made again, as the
    options say.

    Raises:
      ValueError: they are not ready in time, are gone, or gcloud cannot tell.
    """
    end, created = time.monotonic() + o.wait, False
    while True:
        states = _states(o)
        waited_for = {name: state for name, (state, _) in states.items() if state not in _READY}
        if not waited_for:
            machines = {name: count for name, (_, count) in states.items()}
            empty = [name for name, count in machines.items() if not count]
            if not empty:
                return machines
            waited_for = {name: states[name][0] for name in empty}
        key, (name, state) = "queued" if o.queued else "tpu", next(iter(waited_for.items()))
        if state.partition(":")[0] in _GONE:
            if o.create and not created:
                created = True
                print(f"{key} = {name!r} is {state}; it is made again: {o.create}", flush=True)
                if code := subprocess.run(shlex.split(o.create), check=False).returncode:
                    raise ValueError(f"create = {o.create!r} ended with exit code {code}")
                continue
            again = "" if o.create else "; make it again, or say how with create="
            raise ValueError(f"{key} = {name!r}{_described(state)}{again}")
        if (left := end - time.monotonic()) <= 0:
            raise ValueError(
                f"{key} = {name!r}{_described(state)}: start this again once it is {_READY[bool(o.queued)]}, or give wait="
            )
        time.sleep(min(_EVERY, left))


def _described(state: str) -> str:
    word, _, text = state.partition(": ")
    return f": gcloud says: {text}" if text else f" has no machines; its state is {word}"


def _states(o: Options) -> dict[str, tuple[str, int]]:
    """Returns TPU VM, or queued resource -> its state, and how many machines it has."""
    slices = o.slices
    if o.queued:
        facts = _describe(o, "queued-resources", "queued", o.queued)
        state = facts.get("state", "unknown")
        word = state.get("state", "unknown") if isinstance(state, dict) else state
        if word not in _READY:
            return {o.queued: (word, 0)}
        slices = _nodes(facts, o.queued)
    states = {}
    for name in slices:
        facts = _describe(o, "tpu-vm", "tpu", name)
        states[name] = facts.get("state", "unknown"), len(facts.get("networkEndpoints", ()))
    return states


def _nodes(facts: dict[str, Any], queued: str) -> list[str]:
    """Returns the TPU VMs of a queued resource, in the order of the slices."""
    names = []
    for spec in facts.get("tpu", {}).get("nodeSpec", ()):
        several = spec.get("multisliceParams") or spec.get("multiNodeParams")
        if several:
            prefix = several.get("nodeIdPrefix") or queued
            names += [f"{prefix}-{i}" for i in range(int(several["nodeCount"]))]
        else:
            names.append(spec["nodeId"])
    if not names:
        raise ValueError(f"queued = {queued!r}: gcloud names no TPU VM of it")
    return names


def _describe(o: Options, kind: str, key: str, name: str) -> dict[str, Any]:
    """Returns what gcloud says about a TPU VM or a queued resource; of one that is not there, or cannot be asked about now, a
    state alone. Raises ValueError if it is something else."""
    line = _gcloud(o, kind, "describe", name, "--format=json")
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    if ran.returncode:
        text = " ".join(ran.stderr.split()) or "nothing"
        return {"state": f"{'not there' if 'NOT_FOUND' in text or 'not found' in text else 'unknown'}: {text}"}
    try:
        facts = json.loads(ran.stdout)
        len(facts.get("networkEndpoints", ()))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{key} = {name!r}: gcloud describes it as {ran.stdout.strip()[:80]!r}, which is not a TPU VM"
        ) from error
    return facts
