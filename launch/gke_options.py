"""The options of `launch.gke`, and what of them cannot be."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from launch.gke_network import NETWORKS
from launch.gke_patch import read_patch
from launch.options import (
    SECRETS,
    VARIABLES,
    check_no_secret,
    check_run,
    command_option,
    flags_option,
    option,
    read,
    shared_cache,
)
from recipes.arguments import key_of

# Of each TPU generation: the label of its nodes, and dims of a topology.
TPUS = {
    "v4": ("tpu-v4-podslice", 3),
    "v5e": ("tpu-v5-lite-podslice", 2),
    "v5p": ("tpu-v5p-slice", 3),
    "v6e": ("tpu-v6e-slice", 2),
    "tpu7x": ("tpu7x", 3),
}
_CHIPS = 4  # of a node of a slice of several nodes, of every generation
JOB = "slice"  # of the JobSet: a slice, or all machines with GPUs
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_LABEL_WORDS = "a lower-case letter, then such letters, digits and dashes"
_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"  # of any object of Kubernetes
_QUANTITY = r"\d+(\.\d+)?([KMGTP]i?|m)?"
# A taint as kubectl writes one: KEY[=VALUE]:EFFECT.
_TAINT = r"[\w./-]+(=[\w.-]*)?:(NoSchedule|NoExecute|PreferNoSchedule)"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The Kubernetes options; the rest of the command line is the recipe's."""

    image: str = option(MISSING, "the container image with this project")
    topology: str = option("", "the TPU slice, such as v5p:4x4x4")
    slices: int = option(1, "TPU slices; mesh.dp crosses them, the other axes stay within one")
    chips_per_node: int | None = option(None, "TPU chips per machine; default: 4, or all chips of a smaller slice")
    nodes: int = option(1, "number of GPU machines; each runs one process")
    gpus_per_node: int = option(0, "GPUs of a machine", least=0)
    gpu: str = option("", "the GPU type, as in the label cloud.google.com/gke-accelerator")
    network: str = option(
        "", "how NCCL reaches other machines: tcpx (A3 High), tcpxo (A3 Mega), rdma (A3 Ultra, A4); pods: the cluster's own",
        choices=(*NETWORKS, "pods"),
    )  # fmt: skip
    interfaces: str = option(
        "", "the cluster's Network objects of a pod's interfaces, as default,vpc1,...; default: those of Google's guides",
        pattern=rf"{_NAME}(,{_NAME})*",
    )  # fmt: skip
    name: str = option("ejdist", _LABEL_WORDS, pattern=_LABEL)
    namespace: str = option("", _LABEL_WORDS, pattern=_LABEL)
    volume: str = option(
        "", "the name of a PersistentVolumeClaim that all nodes may write; run.dir must be in it", pattern=_NAME
    )
    mount: str = option("/mnt/runs", "where to mount the volume: an absolute path without a colon", pattern="/[^:]+")
    local_disk: str = option(
        "", "a folder of each machine, on a local SSD or in memory, that stays when a pod goes: for checkpoint.local in it",
        pattern="(/[^/:]+)+",
    )  # fmt: skip
    service_account: str = option(
        "", "a Kubernetes service account that may read and write what the run needs", pattern=_NAME
    )
    queue: str = option("", "the Kueue local queue to submit to", pattern=_NAME)
    cpu: str = option("", "CPUs to request for a pod, such as 100", pattern=_QUANTITY)
    memory: str = option(
        "", "memory to request for a pod, such as 300Gi; default: four fifths of a TPU machine's", pattern=_QUANTITY
    )
    privileged: bool = option(
        False, "a privileged container; otherwise one on TPUs may raise its limit of locked memory (SYS_RESOURCE)"
    )
    tls: str = option(
        "",
        "the secret with tls.crt, tls.key and ca.crt by which the processes know each other (cluster.tls)",
        pattern=_NAME,
    )
    tolerations: str = option(
        "",
        "taints to tolerate beside those of accelerators, as KEY=VALUE:NoSchedule,...",
        pattern=f"{_TAINT}(,{_TAINT})*",
    )
    priority: str = option("", "the name of a PriorityClass", pattern=_NAME)
    pull_secret: str = option("", "the name of the secret by which the image is pulled", pattern=_NAME)
    reservation: str = option("", "the name of a Compute Engine reservation to use", pattern=_NAME)
    strategy: str = option(
        "BlockingRecreate", "how JobSet restarts: BlockingRecreate waits until the old pods are gone, Recreate does not",
        choices=("BlockingRecreate", "Recreate"),
    )  # fmt: skip
    ttl: int | None = option(None, "seconds after its end at which the JobSet is deleted; default: never")
    patch: str = option(
        "", "a YAML file that is merged into the JobSet: lists of named things by their names", free=True
    )
    spot: bool = option(False, "use spot machines, which get only 15 s of grace")
    grace: int = option(300, "seconds for a run that is told to stop to end its step and save")
    restarts: int = option(100, "how often the run may be restarted", least=0)
    port: int = option(8476, "of the coordinator, where there are GPUs", most=65535)
    python: str = option("python", "the Python command in the image", program=True)
    flags: bool = flags_option()
    env: dict[str, str] = field(default_factory=dict, metadata=VARIABLES)
    secret: dict[str, str] = field(default_factory=dict, metadata=SECRETS)
    command: str = command_option()
    submit: bool = option(False, "apply it with kubectl")

    @property
    def chips(self) -> int:
        """TPU chips of a slice; 0 where there are GPUs."""
        shape = self.topology.partition(":")[2]
        return math.prod(int(n) for n in shape.split("x")) if shape else 0

    @property
    def per_node(self) -> int:
        """Accelerators of a machine."""
        return (self.chips_per_node or min(_CHIPS, self.chips)) if self.topology else self.gpus_per_node

    @property
    def pods(self) -> int:
        """Machines of a slice, or all machines with GPUs."""
        return self.chips // self.per_node if self.topology else self.nodes


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns (the Kubernetes options, the run's arguments). Raises ValueError, naming the argument."""
    o, rest = read(Options, argv)
    names = {a.partition("=")[0] for a in argv}
    of_gpus = {"nodes", "gpus_per_node", "gpu", "port", "network", "interfaces"}
    foreign = names & (of_gpus if o.topology else {"slices", "chips_per_node"})
    if foreign:
        kinds = ("GPUs", "TPUs, which topology= says") if o.topology else ("TPUs", "GPUs, as topology= is not given")
        raise ValueError(f"{sorted(foreign)[0]}= is of {kinds[0]}, and this is a run on {kinds[1]}")
    if o.topology:
        _check_topology(o)
    elif not o.gpus_per_node:
        raise ValueError("give topology=GENERATION:SHAPE for TPUs, or nodes=N gpus_per_node=N for GPUs")
    _check_secrets(o)
    if o.tls and any(key_of(a) == "cluster.tls" for a in rest):
        raise ValueError("tls= mounts a secret as cluster.tls, which is given too: give one")
    if o.interfaces and o.network not in NETWORKS:
        raise ValueError("interfaces= is of network=tcpx, tcpxo or rdma, which is not given")
    if o.patch:
        read_patch("patch", o.patch)
    longest = f"{o.name}-{JOB}-{o.slices - 1}-{o.pods - 1}-xxxxx"
    if len(longest) > 63:
        raise ValueError(
            f"name = {o.name!r} is too long: a pod would be called {longest}, which may have 63 characters"
        )
    devices = o.slices * o.pods * o.per_node * _devices_of_a_chip(o)
    recipe = check_run(rest, "launch.gke sets how the processes find each other", devices, o.slices)
    _check_folders(o, recipe)
    return o, [*rest, *(shared_cache(rest, recipe, {*o.env, *o.secret}) if o.command == "train" else ())]


def _check_secrets(o: Options) -> None:
    for name in o.env:
        check_no_secret(f"env.{name}", name, f"secret.{name}=SECRET/KEY, of a secret of Kubernetes")
    for name, value in o.secret.items():
        if not re.fullmatch(rf"{_NAME}/[-\w.]+", value):
            raise ValueError(f"secret.{name} = {value!r} must be SECRET/KEY: a secret of Kubernetes, and a key in it")
        if name in o.env:
            raise ValueError(f"{name} is given as env.{name} and as secret.{name}; give one")


def _devices_of_a_chip(o: Options) -> int:
    """Returns how many devices JAX has of an accelerator."""
    from ejdist.planning.chips import CHIPS

    return CHIPS[o.topology.partition(":")[0]].per_chip if o.topology else 1


def _check_folders(o: Options, recipe: Any) -> None:
    run = recipe.run.dir
    if not o.volume:
        raise ValueError(
            f"run.dir = {run!r} would be a folder of a container, which no other pod sees and which is lost with it: give "
            "volume=CLAIM and a run.dir in it; checkpoints may go to checkpoint.dir=gs://BUCKET/FOLDER"
        )
    _check_local(o, recipe.checkpoint.local)
    for key, folder in (("run.dir", run), ("checkpoint.dir", recipe.checkpoint.dir)):
        if folder is not None and "://" not in folder and not _inside(folder, o.mount):
            raise ValueError(
                f"{key} = {folder!r} is not in the volume {o.volume}, which is mounted at {o.mount} (mount=), and what a "
                f"container writes elsewhere is lost with it; use for example {key}={posixpath.join(o.mount, 'first')}"
            )


def _check_local(o: Options, local: str | None) -> None:
    if local is None and not o.local_disk:
        return
    if local is None:
        raise ValueError(
            f"local_disk = {o.local_disk!r} is for checkpoint.local, which is not given: add "
            f"checkpoint.local={posixpath.join(o.local_disk, 'ejdist')} and checkpoint.local_every, or leave it out"
        )
    if not o.local_disk:
        raise ValueError(
            f"checkpoint.local = {local!r} would be a folder of a container, which the next start of its pod does not find: "
            "give local_disk=FOLDER, a folder of each machine, and a checkpoint.local in it, or leave it and "
            "checkpoint.local_every out"
        )
    if not _inside(posixpath.join(local, "x"), o.local_disk):
        raise ValueError(
            f"checkpoint.local = {local!r} is not in local_disk = {o.local_disk!r}, and what a container writes elsewhere is "
            f"lost with it; use for example checkpoint.local={posixpath.join(o.local_disk, 'ejdist')}"
        )
    folders = [posixpath.normpath(folder) + "/" for folder in (o.local_disk, o.mount)]
    if folders[0].startswith(folders[1]) or folders[1].startswith(folders[0]):
        raise ValueError(
            f"local_disk = {o.local_disk!r} and mount = {o.mount!r} overlap: one is of each machine and one of all "
            "machines, so give them separate paths"
        )


def _check_topology(o: Options) -> None:
    generation, colon, shape = o.topology.partition(":")
    sizes = shape.split("x")
    if generation not in TPUS or not all(n.isascii() and n.isdigit() and int(n) > 0 for n in sizes):
        raise ValueError(
            f"topology = {o.topology!r} must be GENERATION:SHAPE, as v5p:4x4x4, with one of {', '.join(TPUS)}"
        )
    if len(sizes) != TPUS[generation][1]:
        raise ValueError(f"topology = {o.topology!r}: a slice of {generation} has {TPUS[generation][1]} dims")
    if o.chips % o.per_node:
        raise ValueError(f"chips_per_node = {o.per_node} does not divide the {o.chips} chips of {o.topology}")


def _inside(path: str, folder: str) -> bool:
    return posixpath.normpath(path).startswith(posixpath.normpath(folder) + "/")
