"""`python -m launch.gke image=IMAGE topology=v5p:4x4x4 [slices=2] [KEY=VALUE ...]`, or with nodes=4 gpus_per_node=8: a JobSet
that trains on Kubernetes.

Prints the YAML, or applies it with submit=true. A run that was stopped and has saved, or that lost a process or a node, is
started again on all nodes and goes on. One that would only end in the same way ends the JobSet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.errors import run_command
from launch.gke_jobset import jobset
from launch.gke_network import NETWORKS, OF_GPU
from launch.gke_options import Options, parse
from launch.options import help_of, show_or_submit


def slow_network(o: Options) -> str:
    """Returns a warning where NCCL would speak TCP over the pods' network between machines that have a faster one."""
    if o.topology or o.nodes == 1 or o.network or o.patch:
        return ""
    known = OF_GPU.get(o.gpu)
    how = f"network={known}" if known else f"network= ({', '.join(NETWORKS)}, by the kind of machine), or patch=FILE"
    return (
        f"warning: between the {o.nodes} machines NCCL would speak TCP over the pods' network; give {how}, in a cluster that "
        "is set up for it, or network=pods to say that this is meant"
    )


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
    if warning := slow_network(options):
        print(warning, file=sys.stderr)
    return show_or_submit(text(options, rest), options.submit, ["kubectl", "apply", "-f", "-"])


if __name__ == "__main__":
    sys.exit(main())
