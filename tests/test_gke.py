"""launch.gke: its YAML is held against the schema of JobSet, and what it starts against what Kubernetes and GKE set."""

import functools
import importlib
import json
import re
import shlex
import stat
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from ejdist.cluster.verdict import again as starts_again
from launch import gke
from launch.errors import BAD_CHECKPOINT, DIVERGED, HOST_LOST, PREEMPTED, REPLICAS, WRONG
from launch.options import check_run
from launch.options import read as read_options
from recipes.schema import compose

sys.path.insert(0, str(Path(__file__).parent / "schemas"))
import jobset as schema_of_jobset

RUN = ["recipe=long_context", "volume=runs", "run.dir=/mnt/runs/first"]
TPU = ["image=example.com/ejdist:1", "topology=v5p:4x4x4", *RUN]
LOCAL = ["checkpoint.local_every=5"]
GPU = ["image=example.com/ejdist:1", "nodes=4", "gpus_per_node=8", *RUN]


@functools.cache
def validator():
    """The schema is checked once: that takes a hundred times as long as to hold a file against it."""
    schema = schema_of_jobset.schema()
    made = jsonschema.validators.validator_for(schema)
    made.check_schema(schema)
    return made(schema)


@functools.cache
def text_of(*arguments):
    return gke.text(*gke.parse(arguments))


def made(*arguments):
    """Returns the JobSet of a command line, after it was read from the YAML that is printed and held against the schema."""
    read = yaml.safe_load(text_of(*arguments))
    validator().validate(read)
    _check_mounts(pod_of(read))
    assert all(isinstance(v, str) for v in read["metadata"].get("labels", {}).values())
    return read


def _check_mounts(pod):
    """What Kubernetes asks of volumes, and the schema does not say: each once, and no two at one path of a container."""
    volumes = [one["name"] for one in pod["volumes"]]
    assert len(set(volumes)) == len(volumes), volumes
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        paths = [one["mountPath"] for one in container["volumeMounts"]]
        assert len(set(paths)) == len(paths) and {one["name"] for one in container["volumeMounts"]} <= set(volumes)
        names = [one["name"] for one in container["env"]]
        assert len(set(names)) == len(names), names


def job_of(read):
    (job,) = read["spec"]["replicatedJobs"]
    return job["replicas"], job["template"]["spec"]


def pod_of(read):
    return job_of(read)[1]["template"]["spec"]


def expanded(text, variables):
    """Returns an argument as Kubernetes gives it to the container."""

    def one(found):
        name = found[1]
        return "$" if name is None else variables.get(name, found[0])

    return re.sub(r"\$(?:\$|\(([^()]*)\))", one, text)


def started(read, **variables):
    """Returns the command line of a pod."""
    (container,) = pod_of(read)["containers"]
    return [expanded(a, variables) for a in [*container["command"], *container["args"]]]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["slices=2", "mesh.dp=2", "mesh.sp=64"],
        ["queue=research", "service_account=trainer", "namespace=models", "spot=true", "name=long-run"],
        ["env.XLA_FLAGS=--a --b", "env.EMPTY=", "command=doctor"],
        ["cpu=100", "memory=300Gi", "privileged=true", "tolerations=team=a:NoSchedule,gpu:NoExecute", "ttl=3600"],
        ["priority=high", "pull_secret=registry", "reservation=ours", "strategy=Recreate", "secret.TOKEN=hub/token"],
    ],
)
@pytest.mark.parametrize("kind", [TPU, GPU], ids=["tpu", "gpu"])
def test_it_is_a_jobset(kind, more):
    if kind is TPU or "slices=2" not in more:
        made(*kind, *more)


def test_the_schema_refuses_what_kubernetes_does_not_know():
    for place, wrong in (
        (lambda read: read["spec"], {"replicatedJob": []}),
        (lambda read: read["spec"]["failurePolicy"], {"maxRestart": 3}),
        (lambda read: job_of(read)[1], {"backofLimit": 0}),
        (pod_of, {"terminationGracePeriodSecond": 3}),
        (lambda read: pod_of(read)["containers"][0], {"arguments": []}),
        (lambda read: job_of(read)[1], {"parallelism": "4"}),
        (lambda read: pod_of(read)["containers"][0]["resources"]["limits"], {"google.com/tpu": [4]}),
    ):
        read = made(*TPU)
        place(read).update(wrong)
        with pytest.raises(jsonschema.ValidationError, match=next(iter(wrong)) + "|not of type|not valid"):
            validator().validate(read)


@pytest.mark.parametrize(
    ("code", "again"),
    [(PREEMPTED, True), (HOST_LOST, True), (134, True), (137, True), (139, True), (135, True), (WRONG, False),
     (BAD_CHECKPOINT, False), (DIVERGED, False), (REPLICAS, False), (1, False), (130, False)],
)  # fmt: skip
def test_which_ends_start_the_run_again(code, again):
    """A pod's exit code fails its job, with the reason that ends the JobSet or another one, after which it is made again."""
    read = made(*TPU)
    _, job = job_of(read)
    assert job["backoffLimit"] == 0 and pod_of(read)["restartPolicy"] == "Never"
    disrupted, by_code = job["podFailurePolicy"]["rules"]
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = by_code["onExitCodes"]
    assert codes["operator"] == "In" and codes["containerName"] == pod_of(read)["containers"][0]["name"]
    reason = "PodFailurePolicy" if code in codes["values"] else "BackoffLimitExceeded"
    (rule,) = read["spec"]["failurePolicy"]["rules"]
    ends = rule["action"] == "FailJobSet" and reason in rule["onJobFailureReasons"]
    assert ends is not again and by_code["action"] == "FailJob" and starts_again(code) is again
    assert read["spec"]["failurePolicy"]["maxRestarts"] == 100


def test_a_pod_of_a_tpu_slice():
    read = made(*TPU, "slices=2", "mesh.dp=2", "env.LIBTPU_INIT_ARGS=--a=1 --b=$HOME")
    slices, job = job_of(read)
    pod = pod_of(read)
    assert (slices, job["parallelism"], job["completions"], job["completionMode"]) == (2, 16, 16, "Indexed")
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice", "cloud.google.com/gke-tpu-topology": "4x4x4"
    }  # fmt: skip
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": 4}, "requests": {"memory": "358G"}}
    assert container["securityContext"] == {"capabilities": {"add": ["SYS_RESOURCE"]}}
    assert pod["tolerations"] == [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    variables = {one["name"]: one for one in container["env"]}
    assert expanded(variables["LIBTPU_INIT_ARGS"]["value"], {"HOME": "/wrong"}) == "--a=1 --b=$HOME"
    paths = {name: one["valueFrom"]["fieldRef"]["fieldPath"] for name, one in variables.items() if "valueFrom" in one}
    assert paths == {
        "POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName",
        "EJDIST_START": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
    }  # fmt: skip
    assert variables["EJDIST_VERDICT"]["value"] == "/dev/termination-log"
    assert pod["terminationGracePeriodSeconds"] == 300 and pod["shareProcessNamespace"] is True
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/mnt/runs"}]
    assert read["spec"]["network"]["subdomain"] == read["metadata"]["name"]
    assert pod["hostNetwork"] is True
    assert "exclusive-topology" in str(read["metadata"]["annotations"])
    assert started(read)[:3] == ["python", "-m", "launch.train"]
    assert started(read)[-2:] == ["cluster=auto", "cluster.timeout=1800"]
    assert "hostNetwork" not in pod_of(made(*TPU))


def test_a_slice_is_one_node_pool():
    """Of one slice too: the scheduler may fill a job with nodes of two free pools of the same shape."""
    for more in ([], ["slices=2", "mesh.dp=2"]):
        annotations = made(*TPU, *more)["metadata"]["annotations"]
        assert annotations == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert "annotations" not in made(*GPU)["metadata"]


def test_what_a_pod_may_be_given():
    read = made(
        *TPU, "cpu=100", "memory=300Gi", "privileged=true", "tolerations=team=a:NoSchedule,shared:NoExecute", "ttl=3600",
        "priority=high", "pull_secret=registry", "reservation=ours", "secret.HF_TOKEN=hub/token", "spot=true",
        "cluster.timeout=60",
    )  # fmt: skip
    pod, spec = pod_of(read), read["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["requests"] == {"cpu": "100", "memory": "300Gi"}
    assert container["securityContext"] == {"privileged": True}
    secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert secret in container["env"] and pod["priorityClassName"] == "high"
    assert pod["imagePullSecrets"] == [{"name": "registry"}] and spec["ttlSecondsAfterFinished"] == 3600
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "ours"
    assert {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"} in pod["tolerations"]
    assert {"key": "shared", "operator": "Exists", "effect": "NoExecute"} in pod["tolerations"]
    assert "cloud.google.com/gke-spot" in str(pod["tolerations"]) and "cluster.timeout=1800" not in started(read)
    assert spec["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    assert made(*TPU, "strategy=Recreate")["spec"]["failurePolicy"]["restartStrategy"] == "Recreate"


@pytest.mark.parametrize("run", [TPU, GPU])
def test_the_disk_of_a_machine_outlives_its_pods(run):
    pod = pod_of(made(*run, "local_disk=/dev/shm/ejdist", *LOCAL, "checkpoint.local=/dev/shm/ejdist"))
    (volume,) = [one for one in pod["volumes"] if one["name"] == "local"]
    assert volume == {"name": "local", "hostPath": {"path": "/dev/shm/ejdist", "type": "DirectoryOrCreate"}}
    assert {"name": "local", "mountPath": "/dev/shm/ejdist"} in pod["containers"][0]["volumeMounts"]
    assert not [one for one in pod_of(made(*run))["volumes"] if "hostPath" in one]


def test_certificates_are_mounted_from_a_secret():
    read = made(*GPU, "tls=run-tls")
    pod = pod_of(read)
    assert {"name": "tls", "secret": {"secretName": "run-tls", "defaultMode": 0o400}} in pod["volumes"]
    (path,) = [one["mountPath"] for one in pod["containers"][0]["volumeMounts"] if one["name"] == "tls"]
    assert f"cluster.tls={path}" in started(read)
    assert "cluster.tls=/mnt/runs/tls" in started(made(*GPU, "cluster.tls=/mnt/runs/tls"))
    with pytest.raises(ValueError, match=r"tls= mounts a secret as cluster\.tls, which is given too"):
        gke.parse([*GPU, "tls=run-tls", "cluster.tls=/mnt/runs/tls"])


# As XPK's decorators for these machines have it at 367c838: the number of interfaces, the daemon, and where libraries are.
@pytest.mark.parametrize(
    ("gpu", "network", "cards", "daemon", "profile"),
    [
        ("nvidia-h100-80gb", "tcpx", 5, "tcpx-daemon", ""),
        ("nvidia-h100-mega-80gb", "tcpxo", 9, "tcpxo-daemon", "/usr/local/nvidia/lib64/nccl-env-profile.sh"),
        ("nvidia-h200-141gb", "rdma", 10, "", "/usr/local/gib/scripts/set_nccl_env.sh"),
        ("nvidia-b200", "rdma", 10, "", "/usr/local/gib/scripts/set_nccl_env.sh"),
    ],
)
def test_a_machine_with_a_fast_network_uses_it(gpu, network, cards, daemon, profile, capsys):
    read = made(*GPU, f"gpu={gpu}", f"network={network}", "env.NCCL_DEBUG=INFO")
    template = job_of(read)[1]["template"]
    pod, annotations = template["spec"], template["metadata"]["annotations"]
    interfaces = json.loads(annotations["networking.gke.io/interfaces"])
    assert [one["interfaceName"] for one in interfaces] == [f"eth{i}" for i in range(cards)]
    assert interfaces[0]["network"] == "default" and len({one["network"] for one in interfaces}) == cards
    assert annotations["networking.gke.io/default-interface"] == "eth0"
    run = pod["containers"][0]
    assert any(one["mountPath"].startswith("/usr/local/nvidia") for one in run["volumeMounts"])
    variables = {one["name"]: one.get("value") for one in run["env"]}
    assert variables["LD_LIBRARY_PATH"].startswith("/usr/local/nvidia/lib64") and variables["NCCL_DEBUG"] == "INFO"
    if daemon:
        (beside,) = pod["initContainers"]
        assert (beside["name"], beside["restartPolicy"]) == (daemon, "Always")
        devices = yaml.safe_load(annotations[f"devices.gke.io/container.{daemon}"])
        assert {"path": "/dev/nvidia7"} in devices and {"path": "/dev/nvidiactl"} in devices
    else:
        assert "initContainers" not in pod
    line = started(read, JOB_COMPLETION_INDEX="3")
    if profile:
        assert line[:3] == ["bash", "-c", f'. {profile} && exec "$@"'] and line[4:7] == ["python", "-m", "launch.train"]
    else:
        assert line[:3] == ["python", "-m", "launch.train"] and variables["NCCL_GPUDIRECTTCPX_CTRL_DEV"] == "eth0"
    gke.main([*GPU, f"gpu={gpu}", f"network={network}"])
    assert capsys.readouterr().err == ""


def test_the_interfaces_may_have_other_names():
    template = job_of(made(*GPU, "network=rdma", "interfaces=default,net-a,net-b"))[1]["template"]
    rows = json.loads(template["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert [one["network"] for one in rows] == ["default", "net-a", "net-b"]


def test_a_slow_network_is_said(capsys):
    for more, word in (
        (["gpu=nvidia-h100-mega-80gb"], "give network=tcpxo, in a cluster"),
        (["gpu=nvidia-a100-80gb"], "give network= (tcpx, tcpxo, rdma, by the kind of machine), or patch=FILE"),
        (["gpu=nvidia-h200-141gb", "network=pods"], ""),
        (["nodes=1"], ""),
    ):
        base = [a for a in GPU if not a.startswith("nodes=") or "nodes=1" not in more]
        assert gke.main([*base, *more]) == 0
        said = capsys.readouterr().err
        assert word in said and bool(said) is bool(word)


def test_a_patch_is_merged_by_names(tmp_path, capsys):
    patch = tmp_path / "patch.yaml"
    patch.write_text(
        "metadata: {labels: {team: a}}\n"
        "spec:\n  failurePolicy: {maxRestarts: 3}\n  replicatedJobs:\n  - name: slice\n    template: {spec: {template: "
        "{metadata: {annotations: {gke-gcsfuse/volumes: 'true'}}, spec: {nodeSelector: null, containers: [{name: run, "
        "env: [{name: POD_NAME, value: mine}, {name: NEW, value: x}], imagePullPolicy: Always}]}}}}\n"
    )
    read, before = made(*TPU, f"patch={patch}"), made(*TPU)
    pod = pod_of(read)
    assert read["metadata"] == before["metadata"] | {"labels": {"team": "a"}} and "nodeSelector" not in pod
    assert read["spec"]["failurePolicy"] == before["spec"]["failurePolicy"] | {"maxRestarts": 3}
    (container,), (old,) = pod["containers"], pod_of(before)["containers"]
    assert container["imagePullPolicy"] == "Always" and container["args"] == old["args"]
    names = [one["name"] for one in container["env"]]
    assert names == [one["name"] for one in old["env"]] + ["NEW"]
    assert {one["name"]: one for one in container["env"]}["POD_NAME"]["value"] == "mine"
    for text, message in (
        ("[]", "must hold what to change of the JobSet"),
        ("a: [", "is not YAML"),
        ("a: &x [1]\nb: [*x, *x]", "has an alias (*NAME): write out what it stands for"),
        ("spec: {replicatedJobs: [{replicas: 2}]}", "patch: each item of spec.replicatedJobs must have name:"),
    ):
        patch.write_text(text)
        assert gke.main([*TPU, f"patch={patch}"]) == WRONG
        assert message in capsys.readouterr().err
    assert gke.main([*TPU, f"patch={tmp_path}/none"]) == WRONG
    assert "cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topology", "more", "pods", "chips"),
    [
        ("v5p:2x2x1", [], 1, 4),
        ("v5p:8x8x8", [], 128, 4),
        ("v5e:2x4", [], 2, 4),
        ("v5e:2x4", ["chips_per_node=8"], 1, 8),
        ("v6e:1x1", [], 1, 1),
        ("v6e:16x16", [], 64, 4),
        ("v4:2x2x4", [], 4, 4),
        ("tpu7x:4x4x4", [], 16, 4),
    ],
)
def test_machines_of_a_topology(topology, more, pods, chips):
    options, rest = read_options(gke.Options, [*TPU[:1], f"topology={topology}", *more, *RUN])
    read = gke.jobset(options, rest)
    assert job_of(read)[1]["parallelism"] == pods
    assert pod_of(read)["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert pod_of(read)["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology.split(":")[1]


def test_a_chip_may_be_two_devices():
    words = [TPU[0], "topology=tpu7x:2x2x1", *RUN, "data.global_batch=8"]
    assert gke.parse([*words, "mesh.fsdp=8", "mesh.sp=1"])[0].chips == 4
    with pytest.raises(ValueError, match="needs 16 devices, but there are 8"):
        gke.parse([*words, "mesh.fsdp=16", "mesh.sp=1"])


def test_what_gke_sets_is_what_jax_asks_for(monkeypatch):
    """Two slices of two machines: the variables that GKE sets give each process its own number."""
    from jax._src.clusters import cloud_tpu_cluster as cluster

    monkeypatch.setattr(cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cluster.BaseTpuCluster, "wait_for_coordinator", classmethod(lambda *a: None))
    found = []
    for piece in range(2):
        for worker in range(2):
            hosts = ",".join(f"ejdist-slice-{piece}-{i}.ejdist" for i in range(2))
            for name, value in {
                "TPU_WORKER_ID": worker, "TPU_WORKER_HOSTNAMES": hosts, "MEGASCALE_NUM_SLICES": 2,
                "MEGASCALE_SLICE_ID": piece, "MEGASCALE_COORDINATOR_ADDRESS": "ejdist-slice-0-0.ejdist",
            }.items():  # fmt: skip
                monkeypatch.setenv(name, str(value))
            env = cluster.GkeTpuCluster
            assert env.is_env_present()
            found.append((env.get_process_id(), env.get_process_count(), env.get_coordinator_address(1, None)))
    assert found == [(i, 4, "ejdist-slice-0-0.ejdist:8482") for i in range(4)]


def test_a_pod_with_gpus_knows_the_others():
    read = made(*GPU, "gpu=nvidia-h200-141gb", "data.source='$(HOME) $x $$/*.txt'")
    _, job = job_of(read)
    pod = pod_of(read)
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    line = started(read, JOB_COMPLETION_INDEX="3", HOME="/wrong")
    recipe = compose(line[3:])
    # As JobSet names the first pod, and its headless service: SET-JOB-INDEX-POD.SUBDOMAIN.
    assert recipe.cluster.coordinator == "ejdist-slice-0-0.ejdist:8476" and recipe.cluster.kind == "manual"
    assert (recipe.cluster.num_processes, recipe.cluster.process_id) == (4, 3)
    assert recipe.data.source == "$(HOME) $x $$/*.txt"
    assert read["spec"]["replicatedJobs"][0]["name"] == "slice"


def test_the_doctor_is_not_started_again():
    read = made(*TPU, "command=doctor")
    assert started(read)[2] == "launch.doctor" and read["spec"]["failurePolicy"]["maxRestarts"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TPU[1:]], "image= is missing"),
        (["image=i", *RUN], "give topology=GENERATION:SHAPE for TPUs, or nodes=N gpus_per_node=N"),
        (["image=i", "topology=v5p:4x4", *RUN], "a slice of v5p has 3 dims"),
        (["image=i", "topology=v9:4x4", *RUN], "must be GENERATION:SHAPE"),
        (["image=i", "topology=v5p:4xax4", *RUN], "must be GENERATION:SHAPE"),
        ([*TPU, "chips_per_node=5"], "chips_per_node = 5 does not divide the 64 chips"),
        ([*TPU, "network=rdma"], "network= is of GPUs, and this is a run on TPUs"),
        ([*GPU, "network=fast"], "network=fast is unknown; use one of tcpx, tcpxo, rdma, pods"),
        ([*GPU, "interfaces=a,b"], "interfaces= is of network=tcpx, tcpxo or rdma"),
        ([*TPU, "memory=lots"], "memory = 'lots' must be memory to request for a pod"),
        ([*TPU, "tolerations=a=b"], "tolerations = 'a=b' must be taints to tolerate"),
        ([*TPU, "strategy=Never"], "strategy=Never is unknown; use one of BlockingRecreate, Recreate"),
        ([*TPU, "secret.TOKEN=plain"], "secret.TOKEN = 'plain' must be SECRET/KEY"),
        ([*TPU, "secret.A=b/c", "env.A=1"], "A is given as env.A and as secret.A"),
        ([*TPU, "gpus_per_node=8"], "gpus_per_node= is of GPUs, and this is a run on TPUs"),
        ([*GPU, "slices=2"], "slices= is of TPUs, and this is a run on GPUs"),
        ([*TPU, "slices=0"], "slices must be a number from 1 on"),
        ([*TPU, "name=My_Run"], "name = 'My_Run' must be a lower-case letter, then such letters"),
        ([*TPU[:3], "volume=My_Claim", "run.dir=/mnt/runs/a"], "volume = 'My_Claim' must be the name of"),
        ([*TPU, "service_account=a$b"], "service_account = 'a$b' must be a Kubernetes service account"),
        ([*TPU, "env.A=1", "env.A=2"], "env.A is given twice"),
        (["image=", *TPU[1:]], "image is empty; write image=VALUE, or leave it out"),
        ([*GPU, "port=70000"], "port must be a number from 1 to 65535"),
        ([*TPU, "slice=2"], "unknown key 'slice'; did you mean 'slices'?"),
        ([*TPU, "mesh.sp=128"], "mesh.sp=128 needs 128 devices, but there are 64"),
        ([*TPU, "slices=2", "mesh.sp=-1"], "mesh.sp=128 over 2 TPU slices of 64 devices: only mesh.dp"),
        (
            [*TPU, "curriculum=[{until: 9, mesh: {sp: 128}}, {sequence_length: 4096}]"],
            "mesh.sp=128 needs 128 devices, but there are 64",
        ),
        ([*TPU, f"name={'a' * 50}"], "is too long: a pod would be called"),
        ([*TPU, "cluster=auto"], "cluster=auto cannot be set here"),
        ([*TPU, "cluster.num_processes=3"], "cluster.num_processes=3 cannot be set here"),
        ([*TPU, "modle=8b"], "did you mean 'model'"),
        ([*TPU, "env.A-B=3"], "env.A-B must be written env.NAME=VALUE"),
        ([*TPU, "env=A"], "env must be written env.NAME=VALUE"),
        ([*TPU, "image=again"], "image is given twice"),
        ([*TPU, "mount=/mnt/other"], "run.dir = '/mnt/runs/first' is not in the volume runs"),
        ([*TPU[:3], "run.dir=outputs/a"], "run.dir = 'outputs/a' would be a folder of a container"),
        (
            [*TPU, "checkpoint.local=/tmp/a", "checkpoint.local_every=5"],
            "checkpoint.local = '/tmp/a' would be a folder of a container, which the next start of its pod does not find: give "
            "local_disk=FOLDER",
        ),
        ([*TPU, "local_disk=/ssd"], "local_disk = '/ssd' is for checkpoint.local, which is not given: add"),
        ([*TPU, "local_disk=ssd"], "local_disk = 'ssd' must be a folder of each machine"),
        ([*TPU, "local_disk=/ssd", *LOCAL, "checkpoint.local=/ssd2/a"], "'/ssd2/a' is not in local_disk = '/ssd'"),
        ([*TPU, "local_disk=/ssd", *LOCAL, "checkpoint.local=/ssd/../a"], "is not in local_disk = '/ssd'"),
        ([*TPU, "local_disk=/mnt", *LOCAL, "checkpoint.local=/mnt/a"], "overlap: one is of each"),
        ([*TPU, "local_disk=/mnt/runs/a", *LOCAL, "checkpoint.local=/mnt/runs/a"], "overlap: one is of each"),
        ([*TPU, "command=plan"], "command=plan is unknown; use one of train, doctor"),
    ],
)
def test_called_wrongly(arguments, message, capsys):
    assert gke.main(arguments) == WRONG
    assert message in capsys.readouterr().err


def test_checkpoints_may_go_to_a_bucket_and_not_into_a_container(capsys):
    assert "checkpoint.dir=gs://b/run" in started(made(*TPU, "checkpoint.dir=gs://b/run"))
    assert gke.main([*TPU, "checkpoint.dir=/fast/run"]) == WRONG
    assert "checkpoint.dir = '/fast/run' is not in the volume runs" in capsys.readouterr().err


def test_applying_it(tmp_path, monkeypatch, capsys):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/line; cat > {tmp_path}/given; echo made; exit ${{CODE:-0}}\n'
    )
    kubectl.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gke.main([*TPU, "submit=true"]) == 0 and capsys.readouterr().out == "made\n"
    assert (tmp_path / "line").read_text() == "apply -f -\n"
    assert yaml.safe_load((tmp_path / "given").read_text()) == made(*TPU)
    monkeypatch.setenv("CODE", "1")
    assert gke.main([*TPU, "submit=true"]) == WRONG
    monkeypatch.setenv("PATH", "/nowhere")
    assert gke.main([*TPU, "submit=true"]) == WRONG
    assert "there is no kubectl here" in capsys.readouterr().err


def test_launchers_take_what_the_documentation_shows():
    root, shown = Path(__file__).resolve().parent.parent, []
    for page in (root / "README.md", root / "launch/README.md"):
        text = page.read_text().replace("\\\n", " ")
        shown += re.findall(r"^python -m (launch\.(?:gke|slurm|tpu_vm)) ([^>\n]*)", text, re.MULTILINE)
    assert {name for name, _ in shown} >= {"launch.gke", "launch.tpu_vm"}
    for name, words in shown:
        rest = importlib.import_module(name).parse(shlex.split(words))[1]
        check_run(rest, "the documentation", 128 if "mesh.dp=2" in rest else 64)


def test_help(capsys):
    assert gke.main(["--help"]) == 0 and "  restarts=100: how often" in capsys.readouterr().out
    assert gke.main([]) == WRONG
