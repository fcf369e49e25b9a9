"""Faults of what starts a run on a cluster, of what looks at one before, and of meshes over several slices."""

from faults import Fault

OF_MESH, OF_GKE, OF_TPU_VM = "tests/test_mesh_layout.py", "tests/test_gke.py", "tests/test_tpu_vm.py"
OF_DOCTOR, OF_CLUSTER = "tests/test_doctor.py", "tests/test_cluster.py"

LAUNCHED = "tests/test_slurm.py"

FAULTS = (
    Fault(
        "a host without a device of the mesh takes part",
        "check_hosts",
        "[$i for $i in range(jax.process_count()) if $i not in $working]",
        "[$i for $i in range(jax.process_count()) if $i in ()]",
        f"{OF_DOCTOR} -k no_device_of_the_mesh",
    ),
    Fault(
        "a chip of two devices is counted once",
        "_devices_of_a_chip",
        "CHIPS[$o.topology.partition(':')[0]].per_chip if $o.topology else 1",
        "1",
        f"{OF_GKE} -k two_devices",
    ),
    Fault(
        "a job is queued for a mesh that its slices do not have",
        "abstract_mesh",
        "between_slices($shape, [[None] * $each] * $num_slices, $section.fsdp_across_slices)",
        "pass",
        f"{OF_GKE} -k called_wrongly",
    ),
    Fault(
        "a job is queued for a recipe that does not fit its devices",
        "options:check_run",
        "$devices is not None",
        "False",
        f"{LAUNCHED} -k called_wrongly",
    ),
    Fault(
        "a job is told to stop when it begins, and is queued again for ever",
        "slurm:parse",
        "0 < $seconds <= $made.grace",
        "False",
        f"{LAUNCHED} -k called_wrongly",
    ),
    Fault(
        "a TPU VM without machines is a run that has ended well",
        "_workers",
        "not $count",
        "False",
        f"{OF_TPU_VM} -k by_gcloud",
    ),
    Fault(
        "devices of one process wait for each other's threads",
        "start_jax",
        "$only and ($devices := _virtual_cpus($recipe, only=False)) > 1",
        "False",
        f"{OF_CLUSTER} -k whoever_waits",
    ),
    Fault(
        "two numbers of a time are hours and minutes",
        "slurm:_seconds",
        "len($numbers) == 3",
        "len($numbers) >= 2",
        f"{LAUNCHED} -k 'called_wrongly or leave_room'",
    ),
    Fault(
        "sbatch gets two answers to one question",
        "slurm:parse",
        "$name in _OWN",
        "False",
        f"{LAUNCHED} -k called_wrongly",
    ),
    Fault(
        "of a variable that is given twice one is dropped",
        "launch/options:read",
        "$inner in $own.setdefault($section, {})",
        "$own.setdefault($section, {}) is None",
        f"{OF_GKE} -k called_wrongly",
    ),
    Fault(
        "a program that is given as nothing is left out",
        "options:_value",
        "if not $value:\n    $$body",
        "if False:\n    $$body",
        f"{LAUNCHED} -k called_wrongly",
    ),
    Fault(
        "the doctor looks at no stage of a curriculum but the last",
        "Doctor.devices",
        "[stage_program($stage) for $stage in $stages]",
        "[stage_program($stage) for $stage in $stages[-1:]]",
        f"{OF_DOCTOR} -k every_stage",
    ),
    Fault("any axis may leave a slice", "between_slices", "$over_fsdp > 1", "False", f"{OF_MESH} -k would_leave"),
    Fault(
        "machines with GPUs count as slices",
        "slices_of",
        "getattr($device, 'slice_index', 0) if $device.platform == 'tpu' else 0",
        "getattr($device, 'slice_index', 0)",
        f"{OF_MESH} -k no_slices",
    ),
    Fault(
        "a run that was refused is started again",
        "jobset",
        "{'containerName': _CONTAINER, 'operator': 'In', 'values': sorted(NO_USE)}",
        "{'containerName': _CONTAINER, 'operator': 'NotIn', 'values': sorted(NO_USE)}",
        f"{OF_GKE} -k start_the_run_again",
    ),
    Fault(
        "the coordinator is another pod than process 0",
        "_cluster",
        "f'cluster.coordinator={$o.name}-{_JOB}-0-0.{$o.name}:{$o.port}'",
        "f'cluster.coordinator={$o.name}-{_JOB}-0-1.{$o.name}:{$o.port}'",
        f"{OF_GKE} -k knows_the_others",
    ),
    Fault(
        "Kubernetes puts its variables into what a user gave",
        "_literal",
        "$word.replace('$', '$$')",
        "$word",
        f"{OF_GKE} -k knows_the_others",
    ),
    Fault(
        "Python is process 1 of its container, and cannot abort",
        "_pod",
        "{'restartPolicy': 'Never', 'terminationGracePeriodSeconds': $o.grace, 'shareProcessNamespace': "
        "True, 'nodeSelector': _nodes($o), 'containers': [{$key: $value for $key, $value in "
        "$container.items() if $value != []}]}",
        "{'restartPolicy': 'Never', 'terminationGracePeriodSeconds': $o.grace, 'shareProcessNamespace': "
        "False, 'nodeSelector': _nodes($o), 'containers': [{$key: $value for $key, $value in "
        "$container.items() if $value != []}]}",
        f"{OF_GKE} -k pod_of_a_tpu_slice",
    ),
    Fault(
        "a run outside of the volume is started",
        "gke:_check_folders",
        "not _inside($folder, $o.mount)",
        "False",
        f"{OF_GKE} -k called_wrongly",
    ),
    Fault(
        "the last bad exit code is told",
        "Connections.wait",
        "[HOST_LOST if $code == _NO_CONNECTION else $code for $_, $code in self._failed]",
        "[HOST_LOST if $code == _NO_CONNECTION else $code for $_, $code in self._failed[::-1]]",
        f"{OF_TPU_VM} -k first_bad_code",
    ),
    Fault(
        "a command outlives its connection",
        "_REMOTE",
        '_REMOTE = \'exec 3<&0\\n{command} 3<&- </dev/null &\\nrun=$!\\n(while read -r name; do kill -s "$name" '
        "$run; done; kill -s TERM $run) <&3 >/dev/null 2>&1 &\\nreader=$!\\nwait $run; code=$?\\nkill "
        "$reader\\nexit $code'",
        '_REMOTE = \'exec 3<&0\\n{command} 3<&- </dev/null &\\nrun=$!\\n(while read -r name; do kill -s "$name" '
        "$run; done) <&3 >/dev/null 2>&1 &\\nreader=$!\\nwait $run; code=$?\\nkill $reader\\nexit $code'",
        f"{OF_TPU_VM} -k connection_that_ends",
    ),
    Fault(
        "every machine is told that it is process 0",
        "remote",
        "f'cluster.process_id={$index}'",
        "f'cluster.process_id=0'",
        f"{OF_TPU_VM} -k has_its_number",
    ),
    Fault(
        "cluster=manual asks the cluster around it",
        "launch/cluster:_place",
        "cluster.kind == 'manual'",
        "cluster.kind == 'none'",
        f"{OF_CLUSTER} -k asks_nobody",
    ),
    Fault(
        "a TPU VM does not find its neighbours",
        "train:_main",
        "if $given.shown:\n    $$body",
        "if $given.shown:\n    $$body\nos.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')",
        f"{OF_DOCTOR} -k left_in_the_environment",
    ),
    Fault(
        "a clock that is behind is not noticed",
        "clock_failures",
        "abs($facts['ahead']) > CLOCKS",
        "$facts['ahead'] > CLOCKS",
        f"{OF_DOCTOR} -k every_failure",
    ),
    Fault(
        "any folder of that name is the one of the run",
        "SharedFolder.sees_first",
        "self._file(0)",
        "self._folder",
        f"{OF_DOCTOR} -k folder_of_ones_own",
    ),
    Fault(
        "an all-reduce sends what a reduce-scatter does",
        "_collectives",
        "2 * $others",
        "$others",
        f"{OF_DOCTOR} -k bandwidth_of",
    ),
    Fault(
        "the doctor finds failures, and ends as if there were none",
        "_examine",
        "WRONG if $count else DONE",
        "DONE",
        f"{OF_DOCTOR} -k does_not_fit_is_a_failure",
    ),
    Fault(
        "a job is queued with a learning rate that is no number",
        "options:check_run",
        "validate($recipe)",
        "",
        "tests/test_slurm.py -k called_wrongly",
    ),
    Fault(
        "a process that a signal has ended is no failure",
        "of_start",
        "[137 if $c is None else 128 - $c if $c < 0 else $c for $c in $codes]",
        "[137 if $c is None else 0 if $c < 0 else $c for $c in $codes]",
        "tests/test_many_processes.py -k as_the_process",
    ),
    Fault(
        "a host counts its own rows as those of all",
        "run_steps",
        "$data.global_batch / len($rows)",
        "1.0",
        "tests/test_many_processes.py -k bit_for_bit",
    ),
)
