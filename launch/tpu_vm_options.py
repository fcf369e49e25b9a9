"""The options of `launch.tpu_vm`, and what of them cannot be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from launch.flags import FLAGS, TPU, variable_of
from launch.options import (
    VARIABLES,
    check_no_secret,
    check_run,
    command_option,
    flags_option,
    option,
    read,
    shared_cache,
)

_OF_GCLOUD = ("zone", "project", "internal_ip", "iap", "key", "gcloud", "wait", "create")
_OF_SSH = ("coordinator", "sync", "ssh")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The machines; the rest of the command line is the recipe's."""

    tpu: str = option("", "the name of a TPU VM, whose machines gcloud knows; of several slices, as a,b in their order")
    queued: str = option("", "the name of a queued resource, whose TPU VMs these are")
    zone: str = option("", "of the TPU VMs")
    project: str = option("", "of the TPU VMs; else that of gcloud")
    hosts: str = option("", "machines, as a,b,c, for plain ssh; the first is process 0")
    cluster: str = option(
        "auto", "auto: the machines of a slice find each other; manual: any machines", choices=("auto", "manual")
    )
    internal_ip: bool = option(False, "gcloud connects to the machines' internal addresses")
    iap: bool = option(False, "gcloud connects through Identity-Aware Proxy, for machines without an external address")
    key: str = option("", "the file with the private key that gcloud gives to ssh", free=True)
    gcloud: str = option("", "other options of gcloud compute tpus tpu-vm ssh, as they are", program=True)
    batch: int = option(32, "connections that are being made at once")
    coordinator: str = option("", "HOST:PORT of process 0 for the others; default: port 8476 of the first of hosts")
    dir: str = option("", "the folder on each machine to start the command in", free=True)
    sync: bool = option(False, "copy this project's code into dir first, by rsync")
    ssh: str = option("ssh", "how ssh is started", program=True)
    python: str = option("python3", "the Python command on a machine", program=True)
    wait: int = option(0, "seconds to wait, at each start, for the TPU VMs to be READY", least=0)
    create: str = option(
        "", "the command that makes the TPU VMs, run when they are preempted or gone; it deletes what is left of them",
        program=True,
    )  # fmt: skip
    secrets: str = option(
        "", "variables of this command's environment that every process gets, as A,B: they are on no command line",
        pattern=r"[A-Za-z_]\w*(,[A-Za-z_]\w*)*",
    )  # fmt: skip
    restarts: int = option(0, "how often a run that was stopped or lost a machine is started again", least=0)
    generation: str = option(
        "", "of the TPUs, for their compiler flags", choices=[kind for kind in FLAGS if TPU in variable_of(kind)]
    )
    flags: bool = flags_option()
    env: dict[str, str] = field(default_factory=dict, metadata=VARIABLES)
    command: str = command_option()

    @property
    def machines(self) -> list[str]:
        return self.hosts.split(",") if self.hosts else []

    @property
    def slices(self) -> list[str]:
        return self.tpu.split(",") if self.tpu else []

    @property
    def passed(self) -> list[str]:
        return self.secrets.split(",") if self.secrets else []


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns (the machines, the run's arguments). Raises ValueError, naming the argument."""
    o, rest = read(Options, argv)
    if [bool(o.tpu), bool(o.queued), bool(o.hosts)].count(True) != 1:
        raise ValueError(
            "give tpu=NAME zone=ZONE for a TPU VM, queued=NAME zone=ZONE for a queued resource, or hosts=a,b,c for plain ssh"
        )
    names = {a.partition("=")[0] for a in argv}
    misplaced = [name for name in (_OF_GCLOUD if o.hosts else _OF_SSH) if name in names]
    if misplaced:
        raise ValueError(f"{misplaced[0]}= is of {'tpu= and queued=' if o.hosts else 'hosts='}, which is not given")
    if not o.hosts and (not o.zone or o.cluster != "auto"):
        raise ValueError(f"{'tpu' if o.tpu else 'queued'}= needs zone=, and cluster=auto: its machines know each other")
    if o.iap and o.internal_ip:
        raise ValueError("iap=true and internal_ip=true are two ways to a machine: give one")
    for name in o.env:
        check_no_secret(f"env.{name}", name, f"secrets={name}, with the variable in this command's environment")
    if missing := [name for name in o.passed if name not in os.environ]:
        raise ValueError(f"secrets = {o.secrets!r}: there is no {missing[0]} in this command's environment")
    for name, machines in (("hosts", o.machines), ("tpu", o.slices), ("queued", [o.queued] if o.queued else [])):
        if not all(machines) or len(set(machines)) < len(machines):
            raise ValueError(f"{name} = {','.join(machines)!r} must name each once, with a comma between two")
        if any(one.startswith("-") for one in machines):
            raise ValueError(f"{name} = {','.join(machines)!r}: a name that begins with a dash would be an ssh option")
    if o.coordinator and o.cluster != "manual":
        raise ValueError("coordinator= is of cluster=manual, which is not given")
    if o.coordinator:
        from ejdist.cluster.section import check_address

        check_address("coordinator", o.coordinator)
    if o.sync and not o.dir:
        raise ValueError("sync=true needs dir=, the folder of each machine that the code is copied to")
    recipe = check_run(rest, "launch.tpu_vm sets how the processes find each other")
    on_tpus = not o.hosts or o.generation
    return o, [*rest, *(shared_cache(rest, recipe, o.env) if on_tpus and o.command == "train" else ())]
