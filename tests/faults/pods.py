"""Faults of what starts a run on a cluster, of what looks at one before, and of meshes over several slices."""

from faults import Fault

MESH, GKE, TPU_VM = "ejdist/mesh.py", "launch/gke.py", "launch/tpu_vm.py"
HEALTH, BANDWIDTH, DOCTOR = "ejdist/cluster/health.py", "ejdist/cluster/bandwidth.py", "launch/doctor.py"
OF_MESH, OF_GKE, OF_TPU_VM = "tests/test_mesh_layout.py", "tests/test_gke.py", "tests/test_tpu_vm.py"
OF_DOCTOR, OF_CLUSTER = "tests/test_doctor.py", "tests/test_cluster.py"

SLURM, OPTIONS, LAUNCHED = "launch/slurm.py", "launch/options.py", "tests/test_slurm.py"

FAULTS = (
    Fault(
        "a host without a device of the mesh takes part",
        "ejdist/training/opening.py",
        "i not in working]",
        "i in ()]",
        f"{OF_DOCTOR} -k no_device_of_the_mesh",
    ),
    Fault(
        "a chip of two devices is counted once",
        GKE,
        'CHIPS[o.topology.partition(":")[0]].per_chip if o.topology else 1',
        "1",
        f"{OF_GKE} -k two_devices",
    ),
    Fault(
        "a job is queued for a mesh that its slices do not have",
        MESH,
        "        between_slices(shape, [[None] * each] * num_slices, section.fsdp_across_slices)\n",
        "        pass\n",
        f"{OF_GKE} -k called_wrongly",
    ),
    Fault(
        "a job is queued for a recipe that does not fit its devices",
        OPTIONS,
        "        if devices is not None:",
        "        if False:",
        f"{LAUNCHED} -k called_wrongly",
    ),
    Fault(
        "a job is told to stop when it begins, and is queued again for ever",
        SLURM,
        "    if 0 < seconds <= made.grace:",
        "    if False:",
        f"{LAUNCHED} -k called_wrongly",
    ),
    Fault(
        "a TPU VM without machines is a run that has ended well",
        TPU_VM,
        "    if not count:",
        "    if False:",
        f"{OF_TPU_VM} -k by_gcloud",
    ),
    Fault(
        "devices of one process wait for each other's threads",
        "launch/train.py",
        "elif only and (devices := _virtual_cpus(recipe, only=False)) > 1:",
        "elif False:",
        f"{OF_CLUSTER} -k whoever_waits",
    ),
    Fault(
        "two numbers of a time are hours and minutes",
        SLURM,
        "if dash or len(numbers) == 3 else (60, 1)",
        "if dash or len(numbers) >= 2 else (60, 1)",
        f"{LAUNCHED} -k 'called_wrongly or leave_room'",
    ),
    Fault(
        "sbatch gets two answers to one question",
        SLURM,
        "        if name in _OWN:",
        "        if False:",
        f"{LAUNCHED} -k called_wrongly",
    ),
    Fault(
        "of a variable that is given twice one is dropped",
        OPTIONS,
        "            if inner in own.setdefault(section, {}):",
        "            if own.setdefault(section, {}) is None:",
        f"{OF_GKE} -k called_wrongly",
    ),
    Fault(
        "a program that is given as nothing is left out",
        OPTIONS,
        "    if not value:\n",
        "    if False:\n",
        f"{LAUNCHED} -k called_wrongly",
    ),
    Fault(
        "the doctor looks at no stage of a curriculum but the last",
        DOCTOR,
        "for stage in stages]",
        "for stage in stages[-1:]]",
        f"{OF_DOCTOR} -k every_stage",
    ),
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
        'return word.replace("$", "$$")',
        "return word",
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
