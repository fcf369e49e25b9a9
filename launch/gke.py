"""`python -m launch.gke image=IMAGE topology=v5p:4x4x4 [slices=2] [KEY=VALUE ...]`, or with nodes=4 gpus_per_node=8: a JobSet
that trains on Kubernetes.

Prints the YAML, or applies it with submit=true. A run that was stopped and has saved, or that lost a process or a node, is
started again on all nodes and goes on. One that would only end in the same way ends the JobSet.
"""

from __future__ import annotations

import math
import posixpath
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from ejdist.cluster.presence import START
from ejdist.cluster.verdict import FILE, NO_USE
from launch.errors import run_command
from launch.options import VARIABLES, check_run, command_option, help_of, option, read, show_or_submit

# Of each TPU generation: the label of its nodes, and dims of a topology.
_TPUS = {
    "v4": ("tpu-v4-podslice", 3),
    "v5e": ("tpu-v5-lite-podslice", 2),
    "v5p": ("tpu-v5p-slice", 3),
    "v6e": ("tpu-v6e-slice", 2),
    "tpu7x": ("tpu7x", 3),
}
_CHIPS = 4  # of a node of a slice of several nodes, of every generation
_CONTAINER, _JOB = "run", "slice"
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_LABEL_WORDS = "a lower-case letter, then such letters, digits and dashes"
_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"  # of any object of Kubernetes


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
    name: str = option("ejdist", _LABEL_WORDS, pattern=_LABEL)
    namespace: str = option("", _LABEL_WORDS, pattern=_LABEL)
    volume: str = option(
        "", "the name of a PersistentVolumeClaim that all nodes may write; run.dir must be in it", pattern=_NAME
    )
    mount: str = option("/mnt/runs", "where to mount the volume: an absolute path without a colon", pattern="/[^:]+")
    service_account: str = option(
        "", "a Kubernetes service account that may read and write what the run needs", pattern=_NAME
    )
    queue: str = option("", "the Kueue local queue to submit to", pattern=_NAME)
    spot: bool = option(False, "use spot machines, which get only 15 s of grace")
    grace: int = option(300, "seconds for a run that is told to stop to end its step and save")
    restarts: int = option(100, "how often the run may be restarted", least=0)
    port: int = option(8476, "of the coordinator, where there are GPUs", most=65535)
    python: str = option("python", "the Python command in the image", program=True)
    env: dict[str, str] = field(default_factory=dict, metadata=VARIABLES)
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
    foreign = names & ({"nodes", "gpus_per_node", "gpu", "port"} if o.topology else {"slices", "chips_per_node"})
    if foreign:
        kinds = ("GPUs", "TPUs, which topology= says") if o.topology else ("TPUs", "GPUs, as topology= is not given")
        raise ValueError(f"{sorted(foreign)[0]}= is of {kinds[0]}, and this is a run on {kinds[1]}")
    if o.topology:
        _check_topology(o)
    elif not o.gpus_per_node:
        raise ValueError("give topology=GENERATION:SHAPE for TPUs, or nodes=N gpus_per_node=N for GPUs")
    longest = f"{o.name}-{_JOB}-{o.slices - 1}-{o.pods - 1}-xxxxx"
    if len(longest) > 63:
        raise ValueError(
            f"name = {o.name!r} is too long: a pod would be called {longest}, which may have 63 characters"
        )
    devices = o.slices * o.pods * o.per_node * _devices_of_a_chip(o)
    recipe = check_run(rest, "launch.gke sets how the processes find each other", devices, o.slices)
    _check_folders(o, recipe)
    return o, rest


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
    if recipe.checkpoint.local is not None:
        raise ValueError(
            f"checkpoint.local = {recipe.checkpoint.local!r} would be a folder of a container, which the next start of its pod "
            "does not find: leave it and checkpoint.local_every out"
        )
    for key, folder in (("run.dir", run), ("checkpoint.dir", recipe.checkpoint.dir)):
        if folder is not None and "://" not in folder and not _inside(folder, o.mount):
            raise ValueError(
                f"{key} = {folder!r} is not in the volume {o.volume}, which is mounted at {o.mount} (mount=), and what a "
                f"container writes elsewhere is lost with it; use for example {key}={posixpath.join(o.mount, 'first')}"
            )


def _check_topology(o: Options) -> None:
    generation, colon, shape = o.topology.partition(":")
    sizes = shape.split("x")
    if generation not in _TPUS or not all(n.isascii() and n.isdigit() and int(n) > 0 for n in sizes):
        raise ValueError(
            f"topology = {o.topology!r} must be GENERATION:SHAPE, as v5p:4x4x4, with one of {', '.join(_TPUS)}"
        )
    if len(sizes) != _TPUS[generation][1]:
        raise ValueError(f"topology = {o.topology!r}: a slice of {generation} has {_TPUS[generation][1]} dims")
    if o.chips % o.per_node:
        raise ValueError(f"chips_per_node = {o.per_node} does not divide the {o.chips} chips of {o.topology}")


def _inside(path: str, folder: str) -> bool:
    return posixpath.normpath(path).startswith(posixpath.normpath(folder) + "/")


def jobset(o: Options, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the JobSet, as YAML holds it: a job for each slice, in it a pod for each machine, in it one process."""
    metadata: dict[str, Any] = {"name": o.name}
    if o.namespace:
        metadata["namespace"] = o.namespace
    if o.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": o.queue}
    if o.slices > 1:
        # Each job is on one node pool, which is one slice.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    job = {
        "completionMode": "Indexed",
        "parallelism": o.pods,
        "completions": o.pods,
        "backoffLimit": 0,  # no pod is replaced alone: all processes of a run start together
        "podFailurePolicy": {
            "rules": [
                # Evicted, preempted, or its node is gone: whatever the exit code, this is no fault of the run.
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": sorted(NO_USE)},
                },
            ]
        },
        "template": {"spec": _pod(o, arguments)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # A headless service of this name, so that pods find each other by theirs.
            "network": {"enableDNSHostnames": True, "subdomain": o.name},
            "failurePolicy": {
                "maxRestarts": o.restarts if o.command == "train" else 0,
                "rules": [
                    {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [{"name": _JOB, "replicas": o.slices, "template": {"spec": job}}],
        },
    }


def _pod(o: Options, arguments: Sequence[str]) -> dict[str, Any]:
    resource = "google.com/tpu" if o.topology else "nvidia.com/gpu"
    volumes, mounts = [], []
    if o.volume:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": o.volume}})
        mounts.append({"name": "runs", "mountPath": o.mount})
    if not o.topology:
        # What processes and NCCL share is more than the 64 MB that a container has by default.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container = {
        "name": _CONTAINER,
        "image": o.image,
        # No shell: a signal reaches Python itself, and the exit code is its own.
        "command": [*map(_literal, shlex.split(o.python)), "-m", f"launch.{o.command}"],
        "args": [*map(_literal, arguments), *_cluster(o)],
        "env": [
            *({"name": name} | value for name, value in _own_env().items() if name not in o.env),
            *({"name": name, "value": _literal(value)} for name, value in o.env.items()),
        ],
        "resources": {"limits": {resource: o.per_node}},
        "volumeMounts": mounts,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": o.grace,
        # Python is not process 1 of its container, for which SIGABRT does nothing: its exit code would be 139, not 134.
        "shareProcessNamespace": True,
        "nodeSelector": _nodes(o),
        "containers": [{key: value for key, value in container.items() if value != []}],
    }
    if o.service_account:
        pod["serviceAccountName"] = o.service_account
    if o.slices > 1:
        # Between slices traffic goes over the network of the machine, without that of Kubernetes in between.
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod | ({"volumes": volumes} if volumes else {})


def _own_env() -> dict[str, Any]:
    """Returns variable -> its value: what a process says of itself, the start that it is of, and where its end is stated."""

    def field(path: str) -> dict[str, Any]:
        return {"valueFrom": {"fieldRef": {"fieldPath": path}}}

    return {
        "POD_NAME": field("metadata.name"),
        "NODE_NAME": field("spec.nodeName"),
        START: field("metadata.labels['jobset.sigs.k8s.io/restart-attempt']"),
        FILE: {"value": "/dev/termination-log"},  # which kubectl describe shows
    }


def _literal(word: str) -> str:
    """Returns a word in which Kubernetes puts no variable in the place of $(NAME)."""
    return word.replace("$", "$$")


def _nodes(o: Options) -> dict[str, str]:
    """Returns the labels of the machines."""
    cloud = "cloud.google.com"
    labels = {}
    if o.topology:
        generation, _, shape = o.topology.partition(":")
        labels = {f"{cloud}/gke-tpu-accelerator": _TPUS[generation][0], f"{cloud}/gke-tpu-topology": shape}
    elif o.gpu:
        labels = {f"{cloud}/gke-accelerator": o.gpu}
    return labels | ({f"{cloud}/gke-spot": "true"} if o.spot else {})


def _cluster(o: Options) -> list[str]:
    """Returns how the processes find each other.

    On TPUs JAX reads what GKE sets in each pod of a slice, and of several slices. On GPUs it would ask the API of Kubernetes,
    for which the image needs a package and the pod a permission; the names of the pods and their numbers say the same.
    """
    if o.topology:
        return ["cluster=auto"]
    return [
        "cluster=manual",
        f"cluster.coordinator={o.name}-{_JOB}-0-0.{o.name}:{o.port}",
        f"cluster.num_processes={o.pods}",
        "cluster.process_id=$(JOB_COMPLETION_INDEX)",  # which Kubernetes fills in
    ]


def text(o: Options, arguments: Sequence[str]) -> str:
    """Returns the YAML."""
    import yaml

    pods = f"{o.slices} x {o.pods}" if o.slices > 1 else f"{o.pods}"
    head = f"# Made by python -m launch.gke for {pods} pods. It needs JobSet in the cluster; start it with kubectl apply -f.\n"
    return head + yaml.safe_dump(jobset(o, arguments), sort_keys=False, width=10**6)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    usage = f"{__doc__}\nKubernetes options, with their defaults:\n{help_of(Options)}"
    return run_command(argv, _main, lambda _: usage)


def _main(arguments: list[str]) -> int:
    options, rest = parse(arguments)
    return show_or_submit(text(options, rest), options.submit, ["kubectl", "apply", "-f", "-"])


if __name__ == "__main__":
    sys.exit(main())
