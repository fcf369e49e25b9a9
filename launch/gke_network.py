"""The network between GPU machines on GKE: what a pod needs so that NCCL reaches the machine's fast network cards.

Without it a pod has one interface, on the cluster's own network, and NCCL speaks TCP over it. Sources: the pages of Google
"Maximize GPU network bandwidth" (A3 High, A3 Mega) and "Create an AI-optimized GKE cluster" (A3 Ultra, A4), and the decorators
of XPK (src/xpk/core/workload_decorators at 367c838), whose paths, devices and images these are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_INSTALLED = "/home/kubernetes/bin"  # where the installers of the drivers and NCCL plugins leave them on a machine
_DEVICES = [*(f"/dev/nvidia{i}" for i in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm"]


@dataclass(frozen=True)
class Network:
    """What a pod on one kind of machine needs.

    Attributes:
      gpus: labels of machines that have it.
      interfaces: names of the cluster's Network objects, by interface, as Google's pages create them.
      library: the folder of the machine's NVIDIA libraries, and where it is mounted.
      profile: a script on the machine that sets NCCL's variables; empty: `variables` are all.
      variables: of the run's container.
      mounts: further folders of the machine: where there -> where in the container.
      daemon: a container beside the run, which moves the data; None: there is none.
    """

    gpus: tuple[str, ...]
    interfaces: tuple[str, ...]
    library: tuple[str, str]
    profile: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    daemon: dict[str, Any] | None = None
    devices: tuple[str, ...] = ()


_TCPX = Network(
    gpus=("nvidia-h100-80gb",),
    interfaces=("default", "vpc1", "vpc2", "vpc3", "vpc4"),
    library=(f"{_INSTALLED}/nvidia/lib64", "/usr/local/nvidia/lib64"),
    # As MaxText's tools/orchestration/gpu_multi_process_run.sh at e591f30 has them; the CPUs are those of a3-highgpu-8g.
    variables={
        "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx", "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4", "NCCL_GPUDIRECTTCPX_FORCE_ACK": "0",
        "NCCL_GPUDIRECTTCPX_TX_BINDINGS": "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177",
        "NCCL_GPUDIRECTTCPX_RX_BINDINGS": "eth1:22-35,124-139;eth2:22-35,124-139;eth3:74-87,178-191;eth4:74-87,178-191",
        "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "1000000",
        "NCCL_GPUDIRECTTCPX_TX_COMPLETION_NANOSLEEP": "1000",
        "NCCL_SOCKET_IFNAME": "eth0", "NCCL_CROSS_NIC": "0", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
        "NCCL_NET_GDR_LEVEL": "PIX", "NCCL_P2P_PXN_LEVEL": "0", "NCCL_NVLS_ENABLE": "0",
        "NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "1", "NCCL_MAX_NCHANNELS": "12", "NCCL_MIN_NCHANNELS": "12",
        "NCCL_DYNAMIC_CHUNK_SIZE": "524288", "NCCL_P2P_NET_CHUNKSIZE": "524288", "NCCL_P2P_PCI_CHUNKSIZE": "524288",
        "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
    },
    mounts={"/run/tcpx": "/run/tcpx"},
    devices=tuple(_DEVICES),
    daemon={
        "name": "tcpx-daemon",
        "image": "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.11",
        "command": [
            "/tcpgpudmarxd/build/app/tcpgpudmarxd", "--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd",
            "--uds_path", "/run/tcpx", "--setup_param", '"--verbose 128 2 0 "',
        ],
        "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}},
        "mounts": {"/run/tcpx": "/run/tcpx", "/sys": "/hostsysfs", "/proc/sys": "/hostprocsysfs"},
    },
)  # fmt: skip
_TCPXO = Network(
    gpus=("nvidia-h100-mega-80gb",),
    interfaces=("default", *(f"vpc{i}" for i in range(1, 9))),
    library=(f"{_INSTALLED}/nvidia", "/usr/local/nvidia"),
    profile="/usr/local/nvidia/lib64/nccl-env-profile.sh",
    variables={
        "NCCL_LIB_DIR": "/usr/local/nvidia/lib64",  # which the profile reads
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
    },
    mounts={"/dev/aperture_devices": "/dev/aperture_devices"},
    devices=(*_DEVICES, "/dev/dmabuf_import_helper"),
    daemon={
        "name": "tcpxo-daemon",
        "image": "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.12",
        "command": [
            "/bin/sh", "-c",
            "set -ex; chmod 755 /fts/entrypoint_rxdm_container.sh; exec /fts/entrypoint_rxdm_container.sh "
            "--num_hops=2 --num_nics=8 --uid= --alsologtostderr",
        ],
        "securityContext": {"capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]}},
        "mounts": {"/sys": "/hostsysfs", "/proc/sys": "/hostprocsysfs"},
    },
)  # fmt: skip
_RDMA = Network(
    gpus=("nvidia-h200-141gb", "nvidia-b200"),
    interfaces=("default", "gvnic-1", *(f"rdma-{i}" for i in range(8))),
    library=(f"{_INSTALLED}/nvidia", "/usr/local/nvidia"),
    profile="/usr/local/gib/scripts/set_nccl_env.sh",
    mounts={f"{_INSTALLED}/gib": "/usr/local/gib"},
)
NETWORKS = {"tcpx": _TCPX, "tcpxo": _TCPXO, "rdma": _RDMA}
OF_GPU = {gpu: name for name, network in NETWORKS.items() for gpu in network.gpus}
_LIBRARIES = {"tcpx": "/usr/local/nvidia/lib64", "tcpxo": "/usr/local/nvidia/lib64",
              "rdma": "/usr/local/nvidia/lib64:/usr/local/gib/lib64"}  # fmt: skip


def add_network(template: dict[str, Any], name: str, interfaces: Sequence[str] = ()) -> None:
    """Adds to the template of a pod, whose first container is the run's, what NCCL needs on the machines of a network.

    Args:
      name: of `NETWORKS`.
      interfaces: the cluster's Network objects, in the order of the interfaces; default: those of Google's pages.
    """
    network, pod = NETWORKS[name], template["spec"]
    rows = [{"interfaceName": f"eth{i}", "network": one} for i, one in enumerate(interfaces or network.interfaces)]
    annotations = template.setdefault("metadata", {}).setdefault("annotations", {})
    annotations |= {"networking.gke.io/default-interface": "eth0", "networking.gke.io/interfaces": json.dumps(rows)}
    folders = {network.library[0]: network.library[1], **network.mounts}
    run = pod["containers"][0]
    before = {one["name"] for one in run["env"]}
    variables = {"LD_LIBRARY_PATH": _LIBRARIES[name], **network.variables}
    run["env"] += [{"name": key, "value": value} for key, value in variables.items() if key not in before]
    run["volumeMounts"] += _mounts(folders)
    if network.profile:
        # Its variables are those of the machine's NCCL plugin. The shell is replaced by Python, which gets the signals.
        run["command"] = ["bash", "-c", f'. {network.profile} && exec "$$@"', "run", *run["command"]]
    if network.daemon is not None:
        theirs = network.daemon["mounts"]
        daemon = {key: value for key, value in network.daemon.items() if key != "mounts"} | {
            "restartPolicy": "Always",  # a sidecar: it starts before the run, and ends after it
            "env": [{"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"}],
            "volumeMounts": _mounts({network.library[0]: network.library[1], **theirs}),
        }
        pod.setdefault("initContainers", []).append(daemon)
        paths = "".join(f"- path: {device}\n" for device in network.devices)
        annotations[f"devices.gke.io/container.{network.daemon['name']}"] = paths
        folders |= theirs
    pod.setdefault("volumes", [])
    pod["volumes"] += [{"name": _volume(there), "hostPath": {"path": there}} for there in folders]


def _mounts(folders: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": _volume(there), "mountPath": here} for there, here in folders.items()]


def _volume(folder: str) -> str:
    """Returns the name of the volume that a folder of the machine is."""
    return folder.strip("/").removeprefix(_INSTALLED.strip("/") + "/").replace("/", "-").replace("_", "-")
