"""docs/platforms.md: fields of manifests are those of their platforms, and dsl reads each command as the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.support import pages

from dsl.cli import deepspeed, torchrun
from dsl.model.request import Request
from dsl.resources.hosts import find_allocation, parse_hostfile

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "platforms.md"
EXAMPLES = ROOT / "examples" / "kubernetes"
ANY: dict[str, Any] = {"type": "object"}
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NAMES = {"type": "array", "items": TEXT}


def fields(required: str = "", **known: Any) -> dict[str, Any]:
    """An object that has these fields and no other."""
    return {
        "type": "object",
        "properties": known,
        "additionalProperties": False,
        "required": required.split(),
    }


def listed(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def document(group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = fields("name", name=TEXT, labels=ANY)
    return fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": group}, kind={"const": kind}, metadata=metadata, spec=spec,
    )  # fmt: skip


# JobSet: api/jobset/v1alpha2/jobset_types.go of kubernetes-sigs/jobset. A template is a Job's, which is checked as one.
JOBSET_SPEC = fields(
    "replicatedJobs",
    network=fields(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
    successPolicy=fields("operator", operator={"enum": ["All", "Any"]}, targetReplicatedJobs=NAMES),
    failurePolicy=fields(
        maxRestarts=NUMBER,
        restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
        rules=listed(
            fields(
                "name action",
                name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                onJobFailureReasons=listed({"enum": ["BackoffLimitExceeded", "PodFailurePolicy"]}),
                targetReplicatedJobs=NAMES,
            )
        ),
    ),
    replicatedJobs=listed(
        fields(
            "name template",
            name=TEXT,
            replicas=NUMBER,
            template=ANY,
            dependsOn=listed(fields("name status", name=TEXT, status={"enum": ["Ready", "Complete"]})),
        )
    ),
)
TRAINER = "trainer.kubeflow.org/v1alpha1"  # pkg/apis/trainer/v1alpha1 of kubeflow/trainer
REPLICAS = fields(
    "template",
    replicas=NUMBER, template=ANY, restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
)  # fmt: skip
SCHEMAS = {
    "JobSet": document("jobset.x-k8s.io/v1alpha2", "JobSet", JOBSET_SPEC),
    # pkg/apis/kubeflow/v2beta1/types.go of kubeflow/mpi-operator
    "MPIJob": document(
        "kubeflow.org/v2beta1",
        "MPIJob",
        fields(
            "mpiReplicaSpecs",
            slotsPerWorker=NUMBER,
            runLauncherAsWorker=FLAG,
            sshAuthMountPath=TEXT,
            mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
            launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
            runPolicy=fields(
                cleanPodPolicy={"enum": ["All", "Running", "None"]},
                backoffLimit=NUMBER, ttlSecondsAfterFinished=NUMBER, activeDeadlineSeconds=NUMBER,
            ),
            mpiReplicaSpecs=fields("Launcher", Launcher=REPLICAS, Worker=REPLICAS),
        ),
    ),
    "TrainJob": document(
        TRAINER,
        "TrainJob",
        fields(
            "runtimeRef",
            runtimeRef=fields(
                "name", name=TEXT, kind={"enum": ["ClusterTrainingRuntime", "TrainingRuntime"]}, apiGroup=TEXT
            ),
            trainer=fields(
                image=TEXT, command=NAMES, args=NAMES, env=listed(ANY), numNodes=NUMBER,
                numProcPerNode=NUMBER, resourcesPerNode=ANY,
            ),
        ),
    ),
    "TrainingRuntime": document(
        TRAINER,
        "TrainingRuntime",
        fields(
            "template",
            mlPolicy=fields(
                numNodes=NUMBER,
                mpi=fields(
                    numProcPerNode=NUMBER, mpiImplementation={"enum": ["OpenMPI"]},
                    sshAuthMountPath=TEXT, runLauncherAsNode=FLAG,
                ),
            ),
            template=fields("spec", spec=JOBSET_SPEC),
        ),
    ),
}  # fmt: skip


def documents(name: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8"))}


def faults(kind: str, found: Any) -> list[str]:
    return [
        f"{one.json_path}: {one.message}" for one in Draft202012Validator(SCHEMAS[kind]).iter_errors(found)
    ]


def validate(kind: str, spec: Any, version: str) -> None:
    """A part of a manifest that is Kubernetes' own."""
    whole = {"apiVersion": version, "kind": kind, "metadata": {"name": "train"}, "spec": spec}
    kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["jobset.yaml", "mpijob.yaml", "trainjob.yaml", "trainjob-mpi.yaml"])
def test_each_field_is_one_of_its_platform(name: str) -> None:
    for kind, found in documents(name).items():
        assert faults(kind, found) == []
        spec = found["spec"]
        for one in (spec.get("template", {}).get("spec", spec)).get("replicatedJobs", []):
            assert set(one["template"]) <= {"metadata", "spec"}
            job = one["template"]["spec"]
            pod = {"restartPolicy": "Never", **job["template"]["spec"]}  # JobSet's default is OnFailure
            validate("Job", {**job, "template": {"spec": pod}}, "batch/v1")
        for one in spec.get("mpiReplicaSpecs", {}).values():
            validate("Pod", one["template"]["spec"], "v1")
        if kind == "TrainJob":
            trainer = spec["trainer"]
            container = {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
            container |= {"name": "node", "resources": trainer["resourcesPerNode"]}
            validate("Pod", {"containers": [container]}, "v1")


@pytest.mark.parametrize(
    "name, kind, old, new",
    [
        ("jobset.yaml", "JobSet", "maxRestarts", "maxRestart"),
        ("jobset.yaml", "JobSet", "FailJobSet", "FailJob"),
        ("mpijob.yaml", "MPIJob", "runLauncherAsWorker", "runLauncherAsNode"),
        ("trainjob.yaml", "TrainJob", "numProcPerNode: 2", "numProcPerNode: two"),
        ("trainjob-mpi.yaml", "TrainingRuntime", "runLauncherAsNode", "runLauncherAsWorker"),
    ],
)
def test_a_field_that_a_platform_does_not_know_is_seen(name: str, kind: str, old: str, new: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    found = {one["kind"]: one for one in yaml.safe_load_all(text.replace(old, new))}
    assert faults(kind, found[kind]) != []


def test_the_pods_of_a_jobset_are_the_nodes_of_one_job() -> None:
    found = documents("jobset.yaml")["JobSet"]
    (one,) = found["spec"]["replicatedJobs"]
    job, (container,) = one["template"]["spec"], one["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["dslrun"]
    assert job["completions"] == job["parallelism"] == 2
    for index in range(job["completions"]):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["args"]]
        request = torchrun.read(words, {})[0]
        assert_place(request, 2, index, "train-node-0-0.train")
        assert request.resources.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
        assert request.signals.preempt == signal.SIGTERM
    name = found["metadata"]["name"]
    assert request.meeting.master_addr == f"{name}-{one['name']}-0-0.{name}"
    grace = job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert max(request.signals.preempt_grace_s or 0, request.signals.grace_s) < grace


def test_dslrun_takes_its_place_from_the_torch_runtime() -> None:
    trainer = documents("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    assert trainer["command"] == ["dslrun"]
    set_by_trainer = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
    }
    for name in set_by_trainer:
        assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
    request = torchrun.read(trainer["args"], set_by_trainer)[0]
    assert_place(request, 2, 1, "train-node-0-0.train")
    assert request.resources.nproc_per_node == "2"
    assert (request.signals.preempt_grace_s or 0) < 30, "a pod's terminationGracePeriodSeconds"


@pytest.mark.parametrize(
    "name, hosts",
    [
        # What the operator writes: newConfigMap of mpi-operator, buildHostFileConfigMap of Trainer.
        ("mpijob.yaml", ["train-launcher.train.default.svc", "train-worker-0.train.default.svc"]),
        ("trainjob-mpi.yaml", ["train-node-0-0.train", "train-launcher-0-0.train"]),
    ],
)
def test_dsl_leads_from_the_launcher(name: str, hosts: list[str]) -> None:
    found = documents(name)
    if "MPIJob" in found:
        spec = found["MPIJob"]["spec"]
        launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
        slots, gpus = spec["slotsPerWorker"], launcher["resources"]["limits"]["nvidia.com/gpu"]
        assert 1 + spec["mpiReplicaSpecs"]["Worker"]["replicas"] == len(hosts)
    else:
        launcher, policy = found["TrainJob"]["spec"]["trainer"], found["TrainingRuntime"]["spec"]["mlPolicy"]
        slots, gpus = launcher["numProcPerNode"], launcher["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
        assert policy["numNodes"] == launcher["numNodes"] == len(hosts)
        assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]
    shell, option, script, called = launcher["command"]
    assert (shell, option, called) == ("sh", "-c", "dsl")
    assert script.endswith('exec dsl "$@"')
    request = deepspeed.read(launcher["args"], {})[0]
    assert request.resources.hostfile == "/etc/mpi/hostfile"
    assert (request.remote.launcher, request.remote.wait_hosts_s) == ("ssh", 600)
    assert slots == gpus
    assert parse_hostfile(f"{host} slots={slots}" for host in hosts) == dict.fromkeys(hosts, slots)


def code(section: str) -> list[str]:
    """The blocks of a section of the page."""
    text = re.split(rf"^## {section}\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    return [block.text for block in pages.blocks(PAGE, text.split("\n## ")[0])]


def test_kubectl_may_replace_ssh() -> None:
    words = shlex.split(code("MPIJob")[1])
    request = deepspeed.read(words[1:], {})[0]
    assert request.remote.ssh_program == "kubectl exec -i {host} -- sh -c"


def test_slurm_counts_the_devices_of_tasks() -> None:
    (script,) = code("Slurm")
    (line,) = [line for line in script.splitlines() if line.startswith("exec ")]
    request = deepspeed.read(shlex.split(line)[2:], {})[0]
    assert (request.signals.preempt, request.signals.preempt_grace_s) == (signal.SIGUSR1, 100)
    asked = dict(re.findall(r"--([-a-z]+)=(\S+)", script))
    assert asked["signal"] == "B:USR1@120"
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
        "SLURM_GPUS_PER_TASK": asked["gpus-per-task"],
    }
    found = find_allocation(variables, lambda _path: None)
    assert found is not None
    assert (found.hosts, found.counts_devices) == ((("n1", 2), ("n2", 2)), True)


def assert_place(request: Request, nodes: int, rank: int, first: str, port: int = 29500) -> None:
    assert {request.resources.min_nodes, request.resources.max_nodes} == {nodes}
    assert request.meeting.node_rank == rank
    assert (request.meeting.master_addr, request.meeting.master_port) == (first, port)


def started(script: str, folder: Path, variables: dict[str, str]) -> Request:
    """What dslrun is asked for by a script that a platform runs with these variables."""
    program = folder / "dslrun"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environ = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
    result = subprocess.run(
        ["bash", "-c", script, "train.sh", "--epochs", "3"],
        env=environ, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return torchrun.read(result.stdout.splitlines(), {})[0]


def test_sagemaker(tmp_path: Path) -> None:
    (script,) = code("SageMaker")
    hosts = json.dumps(["algo-2", "algo-1"])
    for rank, host in enumerate(["algo-1", "algo-2"]):
        request = started(script, tmp_path, {"SM_HOSTS": hosts, "SM_CURRENT_HOST": host})
        assert_place(request, 2, rank, "algo-1")
        assert request.program.args == ("--epochs", "3")


def test_azure_ml(tmp_path: Path) -> None:
    (text,) = code("Azure ML")
    job = yaml.safe_load(text)
    assert job["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    variables = {"NODE_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"}
    assert_place(
        started(job["command"], tmp_path, variables), job["resources"]["instance_count"], 1, "10.0.0.4", 6105
    )


def test_vertex(tmp_path: Path) -> None:
    (script,) = code("Vertex AI")
    cluster = {
        "workerpool0": ["a-0:2222"],
        "workerpool1": ["b-0:2222", "b-1:2222"],
        "workerpool2": ["c-0:2222"],
    }
    for rank, (kind, index) in enumerate([("workerpool0", 0), ("workerpool1", 0), ("workerpool1", 1)]):
        spec = {"cluster": cluster, "environment": "cloud", "task": {"type": kind, "index": index}}
        assert_place(started(script, tmp_path, {"CLUSTER_SPEC": json.dumps(spec)}), 3, rank, "a-0", 2222)


def test_skypilot(tmp_path: Path) -> None:
    (text,) = code("SkyPilot")
    task = yaml.safe_load(text)
    variables = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    request = started(task["run"], tmp_path, variables)
    assert_place(request, 2, 1, "10.0.0.4")
    assert request.resources.nproc_per_node == "8"
