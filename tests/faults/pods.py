"""Faults of what starts a run on a cluster, of what looks at one before, and of meshes over several slices."""

from faults import Fault

MESH, GKE, TPU_VM = "ejdist/mesh.py", "launch/gke.py", "launch/tpu_vm.py"
HEALTH, BANDWIDTH, DOCTOR = "ejdist/cluster/health.py", "ejdist/cluster/bandwidth.py", "launch/doctor.py"
OF_MESH, OF_GKE, OF_TPU_VM = "tests/test_mesh_layout.py", "tests/test_gke.py", "tests/test_tpu_vm.py"
OF_DOCTOR, OF_CLUSTER = "tests/test_doctor.py", "tests/test_cluster.py"

FAULTS = (
    Fault(
        "any axis may leave a slice",
        MESH,
        "    if over_fsdp > 1 and not (",
        "    if False and not (",
        f"{OF_MESH} -k would_leave",
    ),
    Fault(
        "machines with GPUs count as slices",
        MESH,
        ' if device.platform == "tpu" else 0',
        "",
        f"{OF_MESH} -k no_slices",
    ),
    Fault(
        "a run that was refused is started again",
        GKE,
        '"operator": "NotIn"',
        '"operator": "In"',
        f"{OF_GKE} -k start_the_run_again",
    ),
    Fault(
        "the coordinator is another pod than process 0",
        GKE,
        "-{_JOB}-0-0.{o.name}",
        "-{_JOB}-0-1.{o.name}",
        f"{OF_GKE} -k knows_the_others",
    ),
    Fault(
        "Kubernetes puts its variables into what a user gave",
        GKE,
        '(a.replace("$", "$$") for a in arguments)',
        "(a for a in arguments)",
        f"{OF_GKE} -k knows_the_others",
    ),
    Fault(
        "Python is process 1 of its container, and cannot abort",
        GKE,
        '"shareProcessNamespace": True',
        '"shareProcessNamespace": False',
        f"{OF_GKE} -k pod_of_a_tpu_slice",
    ),
    Fault(
        "a run outside of the volume is started",
        GKE,
        "and not _inside(folder, o.mount)",
        "and False",
        f"{OF_GKE} -k called_wrongly",
    ),
    Fault(
        "the last bad exit code is told",
        TPU_VM,
        "code = self._failed[0][1]",
        "code = self._failed[-1][1]",
        f"{OF_TPU_VM} -k first_bad_code",
    ),
    Fault(
        "a command outlives its connection",
        TPU_VM,
        "; kill -s TERM $run)",
        ")",
        f"{OF_TPU_VM} -k connection_that_ends",
    ),
    Fault(
        "every machine is told that it is process 0",
        TPU_VM,
        "cluster.process_id={index}",
        "cluster.process_id=0",
        f"{OF_TPU_VM} -k has_its_number",
    ),
    Fault(
        "cluster=manual asks the cluster around it",
        "launch/cluster.py",
        'cluster_detection_method="deactivate", ',
        "",
        f"{OF_CLUSTER} -k asks_nobody",
    ),
    Fault(
        "a TPU VM does not find its neighbours",
        "launch/train.py",
        "    from ejdist.training.loop import train\n",
        '    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")\n    from ejdist.training.loop import train\n',
        f"{OF_DOCTOR} -k left_in_the_environment",
    ),
    Fault(
        "a clock that is behind is not noticed",
        HEALTH,
        'if abs(facts["ahead"]) > CLOCKS',
        'if facts["ahead"] > CLOCKS',
        f"{OF_DOCTOR} -k every_failure",
    ),
    Fault(
        "any folder of that name is the one of the run",
        HEALTH,
        "if self._file(0).exists()",
        "if self._folder.exists()",
        f"{OF_DOCTOR} -k folder_of_ones_own",
    ),
    Fault(
        "an all-reduce sends what a reduce-scatter does",
        BANDWIDTH,
        "2 * others, 1)",
        "others, 1)",
        f"{OF_DOCTOR} -k bandwidth_of",
    ),
    Fault(
        "the doctor finds failures, and ends as if there were none",
        DOCTOR,
        "return WRONG if count else DONE",
        "return DONE",
        f"{OF_DOCTOR} -k does_not_fit_is_a_failure",
    ),
)
