"""The files that bring the program onto a cluster, against what their readers accept. Each check catches a mistake.

Nothing here starts a machine. KubeRay's own fields are those of its custom resource definitions (v1, commit feeaf72fa)
and of its chart ray-cluster, as they stand in its repository, written down below; what KubeRay takes over from
Kubernetes is checked by the models of the official client. The short lists of AWS, of the ServiceMonitor, of kustomize
and of Anyscale come from their documentation, since no schema of them can be had in a package.
"""

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from kubernetes import client
from kubernetes.utils.quantity import parse_quantity
from ray._private.ray_constants import DEFAULT_OBJECT_STORE_MEMORY_PROPORTION
from ray.autoscaler._private.util import prepare_config
from training import config as configuration

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "04-ray-in-production/program"
DEPLOYMENT = PROGRAM / "deployment"
RAY = re.search(r"^ray\[.*\]==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]

PROVIDER = {
    "aws": {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips", "security_group"},
    "local": {"type", "head_ip", "worker_ips"},
}
EC2 = {  # of run_instances, as far as a cluster of this workshop may want it
    "InstanceType", "ImageId", "KeyName", "BlockDeviceMappings", "InstanceMarketOptions", "IamInstanceProfile",
    "SubnetIds", "SecurityGroupIds", "Placement", "TagSpecifications",
}  # fmt: skip
MACHINES = {"g4dn.xlarge": (4, 16, 1), "m5.xlarge": (4, 16, 0)}  # vCPUs, GiB and GPUs, from AWS's list
FOR_PODS = 0.8  # of a machine of this size; the rest is for Kubernetes and what runs on every node
DISK = {"DeviceName", "Ebs", "VolumeSize", "VolumeType", "Iops", "Throughput", "Encrypted"}

# KubeRay's fields: {name: the fields below it}; POD, ENV and such are Kubernetes' own, and {} has free names.
POD, LEAF, FREE = client.V1PodTemplateSpec, None, {}
GROUP = {"rayStartParams": FREE, "template": POD, "labels": FREE, "resources": FREE}
RAY_CLUSTER = {
    "authOptions": {"mode": LEAF, "secretName": LEAF, "enableK8sTokenAuth": LEAF},
    "autoscalerOptions": {
        "env": [client.V1EnvVar], "idleTimeoutSeconds": LEAF, "image": LEAF, "imagePullPolicy": LEAF,
        "resources": client.V1ResourceRequirements, "securityContext": client.V1SecurityContext, "upscalingMode": LEAF,
        "version": LEAF, "volumeMounts": [client.V1VolumeMount], "args": LEAF, "command": LEAF,
    },
    "enableInTreeAutoscaling": LEAF, "headServiceAnnotations": FREE, "managedBy": LEAF, "rayVersion": LEAF,
    "suspend": LEAF, "tlsOptions": {"enabled": LEAF}, "upgradeStrategy": {"type": LEAF},
    "headGroupSpec": {**GROUP, "enableIngress": LEAF, "headService": client.V1Service, "serviceType": LEAF},
    "workerGroupSpecs": [{
        **GROUP, "groupName": LEAF, "replicas": LEAF, "minReplicas": LEAF, "maxReplicas": LEAF, "numOfHosts": LEAF,
        "idleTimeoutSeconds": LEAF, "priority": LEAF, "suspend": LEAF, "scaleStrategy": {"workersToDelete": LEAF},
    }],
}  # fmt: skip
RAY_JOB = {
    "activeDeadlineSeconds": LEAF, "backoffLimit": LEAF, "clusterSelector": FREE, "entrypoint": LEAF,
    "entrypointNumCpus": LEAF, "entrypointNumGpus": LEAF, "entrypointResources": LEAF, "jobId": LEAF, "managedBy": LEAF,
    "metadata": FREE, "preRunningDeadlineSeconds": LEAF, "rayClusterSpec": RAY_CLUSTER, "runtimeEnvYAML": LEAF,
    "shutdownAfterJobFinishes": LEAF, "submissionMode": LEAF, "submitterConfig": {"backoffLimit": LEAF},
    "submitterPodTemplate": POD, "suspend": LEAF, "ttlSecondsAfterFinished": LEAF,
}  # fmt: skip
CHART_GROUP = {
    "initContainers": [client.V1Container], "labels": FREE, "serviceAccountName": LEAF, "restartPolicy": LEAF,
    "runtimeClassName": LEAF, "containerEnv": [client.V1EnvVar], "envFrom": [client.V1EnvFromSource],
    "resources": client.V1ResourceRequirements, "annotations": FREE, "nodeSelector": FREE,
    "tolerations": [client.V1Toleration], "affinity": client.V1Affinity,
    "podSecurityContext": client.V1PodSecurityContext, "securityContext": client.V1SecurityContext,
    "volumes": [client.V1Volume], "volumeMounts": [client.V1VolumeMount],
    "sidecarContainers": [client.V1Container], "command": LEAF, "args": LEAF, "rayStartParams": FREE,
}  # fmt: skip
CHART = {
    "image": {"repository": LEAF, "tag": LEAF, "pullPolicy": LEAF}, "nameOverride": LEAF, "fullnameOverride": LEAF,
    "imagePullSecrets": LEAF, "gcsFaultTolerance": {"enabled": LEAF}, "common": {"containerEnv": [client.V1EnvVar]},
    "head": {
        **CHART_GROUP, "rayVersion": LEAF, "enableInTreeAutoscaling": LEAF, "headService": FREE,
        "autoscalerOptions": RAY_CLUSTER["autoscalerOptions"],
    },
    "worker": {
        **CHART_GROUP, "groupName": LEAF, "replicas": LEAF, "minReplicas": LEAF, "maxReplicas": LEAF,
        "numOfHosts": LEAF,
    },
    "additionalWorkerGroups": FREE, "service": {"type": LEAF},
}  # fmt: skip
SERVICE_MONITOR = {
    "selector": {"matchLabels": FREE}, "namespaceSelector": {"matchNames": LEAF}, "jobLabel": LEAF,
    "endpoints": [{"port": LEAF, "interval": LEAF, "path": LEAF, "scheme": LEAF, "scrapeTimeout": LEAF}],
}  # fmt: skip
KUSTOMIZATION = {
    "apiVersion": LEAF, "kind": LEAF, "namespace": LEAF, "resources": LEAF,
    "images": [{"name": LEAF, "newName": LEAF, "newTag": LEAF}],
}  # fmt: skip
KINDS = {
    "Namespace": client.V1Namespace, "PersistentVolumeClaim": client.V1PersistentVolumeClaim,
    "Service": client.V1Service, "NetworkPolicy": client.V1NetworkPolicy, "RayCluster": RAY_CLUSTER, "RayJob": RAY_JOB,
    "ServiceMonitor": SERVICE_MONITOR,
}  # fmt: skip
ANYSCALE_NODES = {
    "instance_type": LEAF, "name": LEAF, "resources": FREE, "min_nodes": LEAF, "max_nodes": LEAF, "market_type": LEAF,
}  # fmt: skip
ANYSCALE = {
    "job.yaml": {
        "name": LEAF, "containerfile": LEAF, "image_uri": LEAF, "compute_config": LEAF, "working_dir": LEAF,
        "excludes": LEAF, "entrypoint": LEAF, "env_vars": FREE, "requirements": LEAF, "max_retries": LEAF,
        "timeout_s": LEAF,
    },
    "compute.yaml": {"cloud": LEAF, "head_node": ANYSCALE_NODES, "worker_nodes": [ANYSCALE_NODES]},
}  # fmt: skip


def check(value: object, allowed: object, where: str = "") -> None:
    """Raises ValueError where `value` has a field that `allowed` does not name."""
    if isinstance(allowed, type):
        allowed.model_validate(value, by_alias=True, by_name=False)  # a ValidationError is a ValueError
    elif isinstance(allowed, list):
        for each in value:
            check(each, allowed[0], f"{where}[]")
    elif allowed:
        for name, below in value.items():
            if name not in allowed:
                raise ValueError(f"{where}.{name}: no such field")
            check(below, allowed[name], f"{where}.{name}")


def check_document(document: dict) -> None:
    """Raises ValueError for a Kubernetes object with a field that its kind has not."""
    kind = document["kind"]
    if isinstance(KINDS[kind], type):
        check(document, KINDS[kind])
    else:
        check(document, {"apiVersion": LEAF, "kind": LEAF, "metadata": client.V1ObjectMeta, "spec": KINDS[kind]}, kind)


def check_cluster(config: dict) -> None:
    """Raises ValueError for a file of `ray up` that Ray or AWS would not understand."""
    schema = json.loads((Path(ray.__path__[0]) / "autoscaler/ray-schema.json").read_text())
    try:
        jsonschema.validate(config, schema)
        prepare_config(copy.deepcopy(config))
    except (jsonschema.ValidationError, KeyError, AssertionError) as error:
        raise ValueError(str(error)) from error
    if config.get("head_node_type") not in config.get("available_node_types", {None: None}):
        raise ValueError(f"head_node_type: {config['head_node_type']} is no node type")
    provider = config["provider"]["type"]
    unknown = set(config["provider"]) - PROVIDER[provider]
    for name, node_type in config.get("available_node_types", {}).items():
        unknown |= set(node_type["node_config"]) - EC2
        for disk in node_type["node_config"].get("BlockDeviceMappings", []):
            unknown |= (set(disk) | set(disk["Ebs"])) - DISK
        if node_type["node_config"].get("InstanceType") is None:
            raise ValueError(f"{name}: no InstanceType")
    if unknown:
        raise ValueError(f"{sorted(unknown)}: not known to {provider}")
    commands = "\n".join(each for name, value in config.items() if name.endswith("_commands") for each in value)
    for install in re.finditer(r"apt-get (?!update)[^\n;&|]*install .*", commands):
        if "apt-get update" not in commands[: install.start()] or "DPkg::Lock::Timeout=" not in install[0]:
            raise ValueError(f"{install[0]}: without fresh lists of packages, or without waiting for dpkg's lock")


def check_size(part: dict, machine: str) -> None:
    """Raises ValueError for a head or a worker that does not fit on its machine, or of which Ray is told too much."""
    cpus, gib, gpus = MACHINES[machine]
    size = {"cpu": cpus, "memory": gib * 2**30, "nvidia.com/gpu": gpus}
    beside = part.get("beside", {})  # what the pod's second container requests
    requests, limits, beside = (
        {name: float(parse_quantity(value)) for name, value in each.items()}
        for each in (part["resources"]["requests"], part["resources"]["limits"], beside)
    )
    told = {name: float(part["rayStartParams"].get(f"num-{name}s", 0)) for name in ("cpu", "gpu")}
    (shm,) = [each["emptyDir"]["sizeLimit"] for each in part["volumes"] if each["name"] == "shared-memory"]
    store = limits["memory"] * DEFAULT_OBJECT_STORE_MEMORY_PROPORTION
    for name in ("cpu", "memory"):
        if requests[name] + beside.get(name, 0) > FOR_PODS * size[name]:
            raise ValueError(f"{name}: stays Pending on a {machine}")
    if any(value > limits[name] for name, value in requests.items()) or any(v > size[n] for n, v in limits.items()):
        raise ValueError(f"limits below the requests, or above a {machine}")
    if told["cpu"] > limits["cpu"] or told["gpu"] > limits.get("nvidia.com/gpu", 0):
        raise ValueError("Ray is told of more CPUs or GPUs than the pod has")
    if not store < float(parse_quantity(shm)) <= limits["memory"]:
        raise ValueError("Ray's object store does not fit into /dev/shm, or that not into the pod")


def documents(path: Path) -> list[dict]:
    """All documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def mutated(document: dict, path: str, value: object) -> dict:
    """A copy in which the field at a path like spec.groups.0.name has another value; a new field is added."""
    new = copy.deepcopy(document)
    *above, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    at = new
    for part in above:
        at = at[part]
    at[last] = value
    return new


def kubernetes(name: str, kind: str | None = None) -> dict:
    """A document of a file in kubernetes/."""
    (found,) = [each for each in documents(DEPLOYMENT / "kubernetes" / name) if kind in (None, each.get("kind"))]
    return found


def part_of(name: str) -> dict:
    """The head or the worker of raycluster.yaml, in the chart's words."""
    group = kubernetes("raycluster.yaml")["spec"]
    group = group["headGroupSpec"] if name == "head" else group["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    fields = {"podSecurityContext": "securityContext", "nodeSelector": "nodeSelector", "tolerations": "tolerations"}
    return {
        "rayStartParams": group["rayStartParams"], "labels": group["template"]["metadata"]["labels"],
        "resources": pod["containers"][0]["resources"], "volumeMounts": pod["containers"][0]["volumeMounts"],
        "volumes": pod["volumes"], **{chart: pod[field] for chart, field in fields.items() if field in pod},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster-local.yaml"])
def test_rays_launcher_takes_its_files(name):
    check_cluster(yaml.safe_load((DEPLOYMENT / name).read_text()))


@pytest.mark.parametrize(("name", "path", "value"), [
    ("cluster.yaml", "min_wokers", 2),
    ("cluster.yaml", "available_node_types/gpu-worker/max_worker", 2),
    ("cluster.yaml", "head_node_type", "haed"),
    ("cluster.yaml", "max_workers", "5"),
    ("cluster.yaml", "provider/regoin", "us-west-2"),
    ("cluster.yaml", "available_node_types/head/node_config/InstanceTyp", "m5.large"),
    ("cluster.yaml", "available_node_types/head/node_config/BlockDeviceMappings/0/Ebs/VolumSize", 1),
    ("cluster.yaml", "initialization_commands/0", "true"),
    ("cluster.yaml", "setup_commands/0", "sudo apt-get install -qq -y python3-venv"),
    ("cluster-local.yaml", "provider/workers_ips", []),
])  # fmt: skip
def test_a_mistake_in_a_launchers_file_is_caught(name, path, value):
    with pytest.raises(ValueError):
        check_cluster(mutated(yaml.safe_load((DEPLOYMENT / name).read_text()), path, value))


def test_kubernetes_knows_every_field():
    found = [each for path in (DEPLOYMENT / "kubernetes").glob("*.yaml") for each in documents(path)]
    kinds = [each.get("kind", "values") for each in found]
    assert sorted({*kinds}) == sorted([*KINDS, "Kustomization", "values"])
    for document in found:
        if document.get("kind") in KINDS:
            check_document(document)
    check(kubernetes("kustomization.yaml"), KUSTOMIZATION)
    check(kubernetes("values.yaml"), CHART)
    listed = set(kubernetes("kustomization.yaml")["resources"])
    there = {path.name for path in (DEPLOYMENT / "kubernetes").glob("*.yaml")}
    assert there - listed == {"kustomization.yaml", "values.yaml", "rayjob.yaml", "servicemonitor.yaml"}


@pytest.mark.parametrize(("name", "path", "value"), [
    ("raycluster.yaml", "spec/enableInTreeAutoscalling", True),
    ("raycluster.yaml", "spec/workerGroupSpecs/0/minReplica", 2),
    ("raycluster.yaml", "spec/workerGroupSpecs/0/template/spec/nodeSelecter", {}),
    ("raycluster.yaml", "spec/workerGroupSpecs/0/template/spec/node_selector", {}),
    ("raycluster.yaml", "spec/headGroupSpec/template/spec/containers/0/resource", {}),
    ("raycluster.yaml", "spec/autoscalerOptions/resources/limit", {}),
    ("raycluster.yaml", "metadata/namspace", "x"),
    ("rayjob.yaml", "spec/entryPoint", "x"),
    ("rayjob.yaml", "spec/rayClusterSpec/headGroupSpec/replicas", 1),
    ("networkpolicy.yaml", "spec/ingress/1/ports/0/protocoll", "TCP"),
    ("namespace.yaml", "metadata/label", {}),
])  # fmt: skip
def test_a_mistake_in_a_kubernetes_file_is_caught(name, path, value):
    with pytest.raises(ValueError):
        check_document(mutated(kubernetes(name), path, value))


def test_a_mistake_in_the_other_files_is_caught():
    with pytest.raises(ValueError, match=r"head\.replicas: no such field"):
        check(mutated(kubernetes("values.yaml"), "head/replicas", 1), CHART)
    with pytest.raises(ValueError):
        check(mutated(kubernetes("values.yaml"), "worker/tolerations/0/operater", "Exists"), CHART)
    with pytest.raises(ValueError, match="intervall: no such field"):
        monitor = kubernetes("servicemonitor.yaml", "ServiceMonitor")
        check_document(mutated(monitor, "spec/endpoints/0/intervall", "15s"))
    with pytest.raises(ValueError, match="resource: no such field"):
        check(mutated(kubernetes("kustomization.yaml"), "resource", []), KUSTOMIZATION)
    with pytest.raises(ValueError, match="entrypoints: no such field"):
        job = yaml.safe_load((DEPLOYMENT / "anyscale/job.yaml").read_text())
        check({**job, "entrypoints": "x"}, ANYSCALE["job.yaml"])


def test_anyscale_knows_every_field():
    for name, allowed in ANYSCALE.items():
        check(yaml.safe_load((DEPLOYMENT / "anyscale" / name).read_text()), allowed, name)


def test_the_files_agree_with_each_other():
    cluster, job, values = kubernetes("raycluster.yaml"), kubernetes("rayjob.yaml"), kubernetes("values.yaml")
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    group = cluster["spec"]["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 4, 8)
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    container = group["template"]["spec"]["containers"][0]
    for name in ("replicas", "minReplicas", "maxReplicas", "groupName"):
        assert values["worker"][name] == group[name]
    for name in ("head", "worker"):
        assert {**values[name], **part_of(name)} == values[name]
        mounted = {mount["name"] for mount in part_of(name)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in part_of(name)["volumes"]}
    assert values["fullnameOverride"] == cluster["metadata"]["name"]
    token = {variable["name"]: variable for variable in values["common"]["containerEnv"]}
    secret = token["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"]
    assert cluster["spec"]["authOptions"] == {"mode": token["RAY_AUTH_MODE"]["value"], "secretName": secret}
    assert values["head"]["autoscalerOptions"]["env"] == values["common"]["containerEnv"]  # both containers of the head
    claims = {each["metadata"]["name"]: each["spec"] for each in documents(DEPLOYMENT / "kubernetes/storage.yaml")}
    used = {each["persistentVolumeClaim"]["claimName"] for each in group["template"]["spec"]["volumes"][:2]}
    assert used == set(claims) == {"datasets", "checkpoints"}
    assert all(claim["accessModes"] == ["ReadWriteMany"] for claim in claims.values())
    service = kubernetes("servicemonitor.yaml", "Service")
    monitor = kubernetes("servicemonitor.yaml", "ServiceMonitor")
    assert service["metadata"]["labels"] == monitor["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == group["template"]["metadata"]["labels"]
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert kubernetes("networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]
    namespaces = {
        each["metadata"].get("namespace")
        for path in (DEPLOYMENT / "kubernetes").glob("*.yaml")
        for each in documents(path)
        if "metadata" in each and each["kind"] != "Namespace"
    }
    assert namespaces == {kubernetes("namespace.yaml")["metadata"]["name"]}


def test_the_pods_fit_on_the_machines_that_the_page_names():
    page = (DEPLOYMENT / "kubernetes/README.md").read_text()
    worker, head = re.findall(r"`(\w+\.\w+large)`", page)
    check_size(part_of("worker"), worker)
    autoscaler = kubernetes("raycluster.yaml")["spec"]["autoscalerOptions"]["resources"]["requests"]
    check_size({**part_of("head"), "beside": autoscaler}, head)
    assert MACHINES[worker][2] == 1 and MACHINES[head][2] == 0
    assert "precision=bf16" not in page  # a T4 has no units for it, and the program refuses it there
    assert "kubectl apply -f servicemonitor.yaml" in page
    for node_type in yaml.safe_load((DEPLOYMENT / "cluster.yaml").read_text())["available_node_types"].values():
        cpus, _, gpus = MACHINES[node_type["node_config"]["InstanceType"]]
        assert node_type["resources"] in ({"CPU": 0}, {"CPU": cpus, "GPU": gpus})


@pytest.mark.parametrize(("name", "path", "value", "words"), [
    ("worker", "resources/requests/cpu", "4", "cpu: stays Pending"),
    ("worker", "resources/requests/memory", "16Gi", "memory: stays Pending"),
    ("worker", "resources/limits/memory", "32Gi", "above a g4dn.xlarge"),
    ("worker", "resources/limits/cpu", "2", "below the requests"),
    ("worker", "rayStartParams/num-cpus", "8", "more CPUs"),
    ("worker", "rayStartParams/num-gpus", "2", "or GPUs"),
    ("worker", "volumes/2/emptyDir/sizeLimit", "3Gi", "object store"),
    ("head", "beside", {"cpu": "2"}, "cpu: stays Pending"),
])  # fmt: skip
def test_a_pod_that_does_not_fit_is_found(name, path, value, words):
    with pytest.raises(ValueError, match=words):
        check_size(mutated(part_of(name), path, value), {"head": "m5.xlarge", "worker": "g4dn.xlarge"}[name])


def test_one_version_of_ray():
    text = "\n".join(path.read_text() for path in DEPLOYMENT.rglob("*") if path.is_file())
    versions = set(re.findall(r"(?:ray:|training:|tag: |newTag: |rayVersion: \"?)(\d+\.\d+\.\d+)", text, re.IGNORECASE))
    assert versions == {RAY}


def test_every_command_is_one_that_the_program_takes():
    entries = [kubernetes("rayjob.yaml")["spec"]["entrypoint"]]
    entries += [yaml.safe_load((DEPLOYMENT / "anyscale/job.yaml").read_text())["entrypoint"]]
    for entry in entries:
        python, dash_m, module, *options = shlex.split(entry)
        assert (python, dash_m, module) == ("python", "-m", "training.distributed_training")
        changes = [value for name, value in zip(options[::2], options[1::2], strict=True) if name == "--set"]
        config = configuration.load(PROGRAM / "config", changes)  # raises for a key that is not there
        assert config.cluster.use_gpu and config.cluster.num_workers == (4, 4)
    dockerfile = (DEPLOYMENT / "Dockerfile").read_text()
    assert "-f 04-ray-in-production/program/deployment/Dockerfile" in dockerfile
    mounts = yaml.safe_load((DEPLOYMENT / "cluster.yaml").read_text())["file_mounts"].values()
    assert {(DEPLOYMENT / path).resolve() for path in mounts if not path.startswith("~")} == {ROOT}


@pytest.mark.parametrize("path", sorted(PROGRAM.rglob("*.sh")), ids=lambda path: path.name)
def test_the_shell_scripts_are_well(path):
    found = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert path.stat().st_mode & 0o100, "not executable"


def test_the_dockerfile_is_well_and_a_mistake_is_caught(tmp_path):
    found = subprocess.run(["hadolint", DEPLOYMENT / "Dockerfile"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\nRUN cd /x && pip install y\n")
    assert subprocess.run(["hadolint", tmp_path / "Dockerfile"], capture_output=True).returncode == 1
    (tmp_path / "wrong.sh").write_text("#!/bin/bash\ncd $1\nrm -rf $2/*\n")
    assert subprocess.run(["shellcheck", tmp_path / "wrong.sh"], capture_output=True).returncode == 1
