"""The JobSet that `launch.gke` prints: a job for each slice, in it a pod for each machine, in it one process."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from ejdist.cluster.presence import START
from ejdist.cluster.verdict import FILE, NO_USE
from launch.flags import variable_of
from launch.gke_network import NETWORKS, add_network
from launch.gke_options import JOB, TPUS, Options
from launch.gke_patch import merged, read_patch
from recipes.arguments import key_of

_CONTAINER = "run"
_KINDS = {
    "nvidia-h100-80gb": "h100", "nvidia-h100-mega-80gb": "h100", "nvidia-h200-141gb": "h200", "nvidia-b200": "b200"
}  # fmt: skip
_TLS = "/etc/ejdist-tls"  # where its secret is mounted
_TIMEOUT = 1800  # seconds for all pods to come
# Memory in GB of a machine of a generation with so many chips: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus,
# as axlearn has it (cloud/gcp/system_characteristics.py at 34aed43).
_MEMORY = {("v4", 4): 407, ("v5e", 4): 192, ("v5p", 4): 448, ("v6e", 4): 720, ("tpu7x", 4): 960}
_REQUESTED = 0.8  # of it, as axlearn does: the rest is for what GKE runs on every machine


def jobset(o: Options, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the JobSet, as YAML holds it: a job for each slice, in it a pod for each machine, in it one process."""
    metadata: dict[str, Any] = {"name": o.name}
    if o.namespace:
        metadata["namespace"] = o.namespace
    if o.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": o.queue}
    if o.topology:
        # Each job is on one node pool, which is one slice: pods would mix the nodes of two pools of the same shape.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    template: dict[str, Any] = {"spec": _pod(o, arguments)}
    if o.network in NETWORKS:
        add_network(template, o.network, o.interfaces.split(",") if o.interfaces else ())
    job = {
        "completionMode": "Indexed",
        "parallelism": o.pods,
        "completions": o.pods,
        "backoffLimit": 0,  # no pod is replaced alone: all processes of a run start together
        "podFailurePolicy": {
            "rules": [
                # Evicted, preempted, or deleted by JobSet as it came to another node pool than the first pod: the pod is made
                # again. Where the run had begun, the other pods end, and that restarts all.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": sorted(NO_USE)},
                },
            ]
        },
        "template": template,
    }
    result = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # A headless service of this name, so that pods find each other by theirs.
            "network": {"enableDNSHostnames": True, "subdomain": o.name},
            **({"ttlSecondsAfterFinished": o.ttl} if o.ttl else {}),
            "failurePolicy": {
                "restartStrategy": o.strategy,
                "maxRestarts": o.restarts if o.command == "train" else 0,
                "rules": [
                    {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [{"name": JOB, "replicas": o.slices, "template": {"spec": job}}],
        },
    }
    return merged(result, read_patch("patch", o.patch)) if o.patch else result


def _pod(o: Options, arguments: Sequence[str]) -> dict[str, Any]:
    resource = "google.com/tpu" if o.topology else "nvidia.com/gpu"
    volumes, mounts = [], []
    if o.volume:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": o.volume}})
        mounts.append({"name": "runs", "mountPath": o.mount})
    if o.local_disk:
        # Of the machine, as an emptyDir goes with its pod, and every start makes new pods.
        volumes.append({"name": "local", "hostPath": {"path": o.local_disk, "type": "DirectoryOrCreate"}})
        mounts.append({"name": "local", "mountPath": o.local_disk})
    if o.tls:
        volumes.append({"name": "tls", "secret": {"secretName": o.tls, "defaultMode": 0o400}})
        mounts.append({"name": "tls", "mountPath": _TLS, "readOnly": True})
    if not o.topology:
        # What processes and NCCL share is more than the 64 MB that a container has by default.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container = {
        "name": _CONTAINER,
        "image": o.image,
        # No shell: a signal reaches Python itself, and the exit code is its own.
        "command": [*map(_literal, shlex.split(o.python)), "-m", f"launch.{o.command}"],
        "args": [
            *map(_literal, arguments),
            *_cluster(o),
            *_patience(arguments),
            *([f"cluster.tls={_TLS}"] if o.tls else []),
        ],
        "env": [
            *(
                {"name": name} | value
                for name, value in (_own_env() | _flags(o)).items()
                if name not in {*o.env, *o.secret}
            ),
            *({"name": name, "value": _literal(value)} for name, value in o.env.items()),
            *(_of_secret(name, *value.split("/")) for name, value in o.secret.items()),
        ],
        "resources": {"limits": {resource: o.per_node}, **_requests(o)},
        **_security(o),
        "volumeMounts": mounts,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": o.grace,
        # Python is not process 1 of its container, for which SIGABRT does nothing: its exit code would be 139, not 134.
        "shareProcessNamespace": True,
        "nodeSelector": _nodes(o),
        "tolerations": _tolerations(o, resource),
        "containers": [container],
    }
    if o.service_account:
        pod["serviceAccountName"] = o.service_account
    if o.priority:
        pod["priorityClassName"] = o.priority
    if o.pull_secret:
        pod["imagePullSecrets"] = [{"name": o.pull_secret}]
    if o.slices > 1:
        # Between slices traffic goes over the network of the machine, without that of Kubernetes in between.
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod | ({"volumes": volumes} if volumes else {})


def _of_secret(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _requests(o: Options) -> dict[str, Any]:
    """Returns the pod's requests. Without any, a pod is the first to be ended when its machine lacks memory."""
    known = _MEMORY.get((o.topology.partition(":")[0], o.per_node))
    memory = o.memory or (f"{math.floor(known * _REQUESTED)}G" if known else "")
    requests = {name: value for name, value in (("cpu", o.cpu), ("memory", memory)) if value}
    return {"requests": requests} if requests else {}


def _security(o: Options) -> dict[str, Any]:
    if o.privileged:
        return {"securityContext": {"privileged": True}}
    # The driver of TPUs locks the memory that they read and write; see `launch.train`, which raises the limit.
    return {"securityContext": {"capabilities": {"add": ["SYS_RESOURCE"]}}} if o.topology else {}


def _tolerations(o: Options, resource: str) -> list[dict[str, str]]:
    """Returns those of the taints that GKE gives to nodes with accelerators and to spot machines, and the user's."""
    rows = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    if o.spot:
        rows.append({"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    for taint in o.tolerations.split(",") if o.tolerations else ():
        pair, _, effect = taint.rpartition(":")
        key, equals, value = pair.partition("=")
        which = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        rows.append({"key": key, **which, "effect": effect})
    return rows


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


def _flags(o: Options) -> dict[str, Any]:
    if not o.flags:
        return {}
    kind = o.topology.partition(":")[0] or _KINDS.get(o.gpu, "")
    return {name: {"value": value} for name, value in variable_of(kind, o.slices).items()}


def _literal(word: str) -> str:
    """Returns a word in which Kubernetes puts no variable in the place of $(NAME)."""
    return word.replace("$", "$$")


def _nodes(o: Options) -> dict[str, str]:
    """Returns the labels of the machines."""
    cloud = "cloud.google.com"
    labels = {}
    if o.topology:
        generation, _, shape = o.topology.partition(":")
        labels = {f"{cloud}/gke-tpu-accelerator": TPUS[generation][0], f"{cloud}/gke-tpu-topology": shape}
    elif o.gpu:
        labels = {f"{cloud}/gke-accelerator": o.gpu}
    if o.reservation:
        labels[f"{cloud}/reservation-name"] = o.reservation
    return labels | ({f"{cloud}/gke-spot": "true"} if o.spot else {})


def _patience(arguments: Sequence[str]) -> list[str]:
    """Returns how long pods wait for the others, of slices whose machines may still have to be made."""
    return [] if any(key_of(a) == "cluster.timeout" for a in arguments) else [f"cluster.timeout={_TIMEOUT}"]


def _cluster(o: Options) -> list[str]:
    """Returns how the processes find each other.

    On TPUs JAX reads what GKE sets in each pod of a slice, and of several slices. On GPUs it would ask the API of Kubernetes,
    for which the image needs a package and the pod a permission; the names of the pods and their numbers say the same.
    """
    if o.topology:
        return ["cluster=auto"]
    return [
        "cluster=manual",
        f"cluster.coordinator={o.name}-{JOB}-0-0.{o.name}:{o.port}",
        f"cluster.num_processes={o.pods}",
        "cluster.process_id=$(JOB_COMPLETION_INDEX)",  # which Kubernetes fills in
    ]
