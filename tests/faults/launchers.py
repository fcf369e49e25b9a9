"""Faults of what launchers print for a cluster, and of how they reach its machines."""

from faults import Fault

SLURM, GKE, TPU_VM, DOOR = "tests/test_slurm.py", "tests/test_gke.py", "tests/test_tpu_vm.py", "tests/test_door.py"

FAULTS = (
    Fault(
        "one process of a machine uses one of its GPUs",
        "slurm:_step",
        "$each > 1 and $o.tasks == 1",
        "False",
        f"{SLURM} -k has_its_share",
    ),
    Fault(
        "two processes of a machine use the same GPUs",
        "launch/slurm.py",
        "first=$((SLURM_LOCALID * {each}))",
        "first=$((0 * {each}))",
        f"{SLURM} -k has_its_share",
    ),
    Fault(
        "a step has the memory that Slurm gives without a word",
        "slurm:_memory",
        "'0' if $o.exclusive else ''",
        "''",
        f"{SLURM} -k has_its_share",
    ),
    Fault(
        "srun gets two answers to one question",
        "slurm:_check_others",
        "$key == 'srun' and $name in _OF_STEP",
        "False",
        f"{SLURM} -k called_wrongly",
    ),
    Fault(
        "a slice may have nodes of two pools",
        "jobset",
        "if $o.topology:\n    $$body",
        "if $o.slices > 1:\n    $$body",
        f"{GKE} -k one_node_pool",
    ),
    Fault(
        "a secret is in clear in the JobSet",
        "_of_secret",
        "{'name': $name, 'valueFrom': {'secretKeyRef': {'name': $secret, 'key': $key}}}",
        "{'name': $name, 'value': $secret + '/' + $key}",
        f"{GKE} -k may_be_given",
    ),
    Fault(
        "a pod keeps the limit of locked memory",
        "_security",
        "{'securityContext': {'capabilities': {'add': ['SYS_RESOURCE']}}} if $o.topology else {}",
        "{}",
        f"{GKE} -k pod_of_a_tpu_slice",
    ),
    Fault(
        "the daemon of a network ends with its first error",
        "launch/gke_network.py",
        '"restartPolicy": "Always"',
        '"restartPolicy": "Never"',
        f"{GKE} -k fast_network",
    ),
    Fault(
        "machines with a fast network speak TCP, and nobody says so",
        "slow_network",
        "$o.topology or $o.nodes == 1 or $o.network or $o.patch",
        "True",
        f"{GKE} -k slow_network",
    ),
    Fault(
        "a patch replaces a list of named things",
        "_key_of",
        "('mountPath', 'name')",
        "('mountPath',)",
        f"{GKE} -k merged_by_names",
    ),
    Fault(
        "variables are on command lines",
        "tpu_vm:_start",
        "variables($options, $start)",
        "[]",
        f"{TPU_VM} -k 'no_command_line or as_they_are'",
    ),
    Fault(
        "all connections are made at once",
        "Connections.start",
        "len(self._in_making()) >= $batch and self._told == 0",
        "False",
        f"{TPU_VM} -k in_batches",
    ),
    Fault(
        "machines that are gone are waited for",
        "tpu_vm_gcloud:_GONE",
        "('PREEMPTED', 'TERMINATED', 'SUSPENDED', 'FAILED', 'not there')",
        "('TERMINATED', 'SUSPENDED', 'FAILED', 'not there')",
        f"{TPU_VM} -k made_again",
    ),
    Fault(
        "a process that a cluster makes again alone ends the job",
        "Door._greet",
        "self._is_replaced($who)",
        "False",
        f"{DOOR} -k again_alone",
    ),
)
