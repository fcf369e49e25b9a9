"""The faults of `launch.rehearse`: what is injected, on which host, and the expected outcome."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.cluster_drills import CLUSTER_DRILLS
from launch.errors import BAD_CHECKPOINT, DIVERGED, DONE, HOST_LOST, PREEMPTED, REPLICAS, WRONG
from launch.scenes import GONE, Disturbance, Scene


def _sigterm(s: Scene) -> Disturbance:
    host, step = s.host(), s.chance.randrange(2, max(3, s.steps - 4))
    # Steps of some length, as in a real run: the hosts agree on a step that none of them has begun.
    inside: dict[int, dict[str, Any]] = {i: {"do": "sleep", "seconds": 0.2} for i in range(s.hosts)}
    inside[host] |= {"do": "signal", "number": int(signal.SIGTERM), "step": step}
    return Disturbance(
        f"SIGTERM to host {host} at step {step}",
        (PREEMPTED,),
        inside=inside,
        says=("stopped by SIGTERM after step",),
    )


def _kill(s: Scene) -> Disturbance:
    host, step = s.host(), s.step()
    doing = {"do": "signal", "number": int(signal.SIGKILL), "step": step}
    return Disturbance(f"kill -9 of host {host} at step {step}", GONE, inside={host: doing})


def _kill_in_save(s: Scene) -> Disturbance:
    host, step = s.host(), s.save()
    return Disturbance(
        f"kill -9 of host {host} in the save of step {step}", GONE, inside={host: {"do": "kill_in_save", "step": step}}
    )


def _nan(s: Scene) -> Disturbance:
    step = s.step()
    doing = {host: {"do": "nan", "step": step} for host in range(s.hosts)}
    return Disturbance(
        f"a NaN in the parameters at step {step}",
        (DIVERGED,),
        inside=doing,
        says=("nothing was saved since",),
        again=False,
    )


def _spike(s: Scene) -> Disturbance:
    # A spike is known as one once there are some steps to compare it with.
    step = s.chance.randrange(min(max(s.every + 1, 12), s.steps - 1), s.steps)
    return Disturbance(
        f"parameters become thirty times as large at step {step}, and guards.spike=rewind",
        (DONE,),
        arguments=["guards.spike=rewind", "guards.nonfinite=rewind", "guards.spike_window=4"],
        inside={host: {"do": "scale", "step": step} for host in range(s.hosts)},
        says=(f"step {step} has loss", "rewinding to step"),
        goes_on=False,  # it has made all steps, some of them with other batches
    )


def _hang(s: Scene) -> Disturbance:
    host, step = s.host(), s.step()
    return Disturbance(
        f"host {host} sleeps forever at step {step}, and guards.hang_seconds=20",
        (HOST_LOST, -6),
        arguments=["guards.hang_seconds=20"],
        inside={host: {"do": "hang", "step": step}},
        says=("no step has ended for", f"held up by host {host} (", "most recent call first"),
    )


def _replica(s: Scene) -> Disturbance:
    host, step = s.host(), s.step()
    return Disturbance(
        f"a device of host {host} has a flipped bit in its replica of an array at step {step}",
        (REPLICAS,),
        arguments=["guards.replicas_every=2"],
        inside={host: {"do": "flip_replica", "step": step}},
        says=("bits on device ", f"of host {host} (", "nothing was saved since"),
        again=False,
    )


def _slow(s: Scene) -> Disturbance:
    host = s.host()
    return Disturbance(
        f"host {host} sleeps 1 s before each step",
        (DONE,),
        arguments=["guards.stragglers_every=4"],
        inside={host: {"do": "sleep", "seconds": 1.0}},
        says=(f"host {host} needs 1.",) if s.hosts > 1 else (),
    )


def _truncate(s: Scene) -> Disturbance:
    return _damaged(s, "half of a file of the newest checkpoint is gone", _halve)


def _flip(s: Scene) -> Disturbance:
    return _damaged(s, "a bit of the newest checkpoint is flipped", _flip_bit)


def _damaged(s: Scene, description: str, harm: Callable[[Path, random.Random], None]) -> Disturbance:
    stop = 2 * s.every + 1

    def after(run: Path) -> None:
        newest = max((p for p in (run / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        files = sorted(p for p in (newest / "state").rglob("*") if p.is_file() and p.stat().st_size > 64)
        largest = max(files, key=lambda p: p.stat().st_size)
        harm(largest, s.chance)

    says = ("cannot be read", "resuming from the one before it")
    return Disturbance(f"{description}, after step {stop}", (DONE,), stop_after=stop, after=after, says_after=says)


def _halve(path: Path, chance: random.Random) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip_bit(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _disk_full(s: Scene) -> Disturbance:
    step = s.save()
    # Host 0 finds it out as its own failure; the others by its message, or by its end.
    codes = (BAD_CHECKPOINT, WRONG, *GONE)
    doing = {host: {"do": "no_room", "step": step} for host in range(s.hosts)}
    return Disturbance(
        f"no room for files from the save of step {step} on",
        codes,
        inside=doing,
        says_all=("could not be written",),
        again=False,
    )


def _missing_data(s: Scene) -> Disturbance:
    host = s.other()
    says = ("failed, which ends all hosts", "data.source")
    return _refused(f"host {host} does not have the file of the corpus", says, **_copies(s, host, ""))


def _other_data(s: Scene) -> Disturbance:
    host = s.other()
    says = (f"host {host} (", "corpus")
    return _refused(f"host {host} has a different letter in its copy of the corpus", says, **_copies(s, host, "gold"))


def _copies(s: Scene, odd: int, word: str) -> dict[str, Any]:
    """Gives each host its own folder with a copy of a corpus; the odd host's differs in a word, or is missing."""
    text = "A run is as good as what it does when something goes wrong.\n" * 2000
    for host in range(s.hosts):
        folder = s.folder / "texts" / str(host)
        folder.mkdir(parents=True, exist_ok=True)
        if host != odd:
            (folder / "text.txt").write_text(text)
        elif word:
            (folder / "text.txt").write_text(text.replace("good", word, 1))
    return {
        "inside": {host: {"folder": str(s.folder / "texts" / str(host))} for host in range(s.hosts)},
        "arguments": _text("text.txt"),
        "environment": {i: {"EJDIST_CACHE_DIR": str(s.folder / "caches" / str(i))} for i in range(s.hosts)},
    }


def _text(source: str) -> list[str]:
    """Returns the keys of text that needs no dataset, tokenizer or path of the recipe's."""
    return [f"data.source={source}", "data.mixture=null", "data.tokenizer=bytes"]


def _other_weights(s: Scene) -> Disturbance:
    """Each host starts from the parameters of a copy of the run without a fault; the odd host's lacks the last checkpoint."""
    odd = s.other()
    for host in range(s.hosts):
        copy = s.folder / "weights" / str(host) / "first" / "checkpoints"
        shutil.copytree(s.calm / "checkpoints", copy)
        if host == odd:
            shutil.rmtree(max((p for p in copy.iterdir() if p.name.isdigit()), key=lambda p: int(p.name)))
    return _refused(
        f"host {odd} starts from the weights of an earlier step",
        (f"host {odd} (", "model.init_from"),
        inside={host: {"folder": str(s.folder / "weights" / str(host))} for host in range(s.hosts)},
        # The hosts look for what the recipe names in other folders than it was written for.
        arguments=["model.init_from=first", *_text("stdlib")],
    )


def _other_recipe(s: Scene) -> Disturbance:
    host = s.other()
    return _refused(
        f"host {host} has a different learning rate", (f"host {host} (", "optimizer.learning_rate"),
        of_host={host: ["optimizer.learning_rate=0.00123"]},
    )  # fmt: skip


def _other_code(s: Scene) -> Disturbance:
    import ejdist

    host, copy = s.other(), s.folder / "code"
    root = Path(ejdist.__file__).resolve().parent.parent
    for name in ("ejdist", "kernels", "launch", "recipes"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    with (copy / "ejdist" / "training" / "step.py").open("a") as changed:
        changed.write("\n# A line that the others do not have.\n")
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return _refused(
        f"host {host} has an extra line of code",
        (f"host {host} (", "code (digest"),
        environment={host: {"PYTHONPATH": path}},
    )


def _no_coordinator(s: Scene) -> Disturbance:
    host = s.other()
    return Disturbance(
        f"host {host} is sent to a coordinator that does not exist",
        (HOST_LOST,),
        of_host={host: ["cluster.coordinator=localhost:1"]},
        arguments=["cluster.timeout=10"],
        says=("did not answer",),
        goes_on=False,
        writes=False,
    )


def _refused(description: str, says: Sequence[str], **rest: Any) -> Disturbance:
    return Disturbance(description, (WRONG,), says=says, goes_on=False, writes=False, again=False, **rest)


DRILLS: dict[str, Callable[[Scene], Disturbance]] = {
    "sigterm": _sigterm,
    "kill": _kill,
    "kill_in_save": _kill_in_save,
    "nan": _nan,
    "spike": _spike,
    "hang": _hang,
    "replica": _replica,
    "slow": _slow,
    "truncate": _truncate,
    "flip": _flip,
    "disk_full": _disk_full,
    "missing_data": _missing_data,
    "no_coordinator": _no_coordinator,
    "other_code": _other_code,
    "other_data": _other_data,
    "other_recipe": _other_recipe,
    "other_weights": _other_weights,
    **CLUSTER_DRILLS,
}
# Where one host must differ from another one.
NEED_TWO = (
    "hang",
    "replica",
    "missing_data",
    "no_coordinator",
    "other_code",
    "other_data",
    "other_recipe",
    "other_weights",
    "silent",
    "disk_full_on_one",
    "port_taken",
    "replaced",
)
