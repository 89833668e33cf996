"""The Job for Kubernetes: its fields are Kubernetes' own, and the command of its pods does what its comments say."""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.conftest import WaitUntil

from dsl.cli import torchrun
from dsl.model.request import Request

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "kubernetes" / "train.yaml"
# podFailurePolicy is stable from 1.31 on.
VERSIONS = ("1.31", kubernetes_validate.latest_version())
# What the Job controller gives each pod of an Indexed Job.
FROM_KUBERNETES = "JOB_COMPLETION_INDEX"
SECRET = "the key of the Secret, of 24 bytes"
REFERENCE = re.compile(r"\$\((\w+)\)")


def documents() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))}


def validate(document: Mapping[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def pod() -> Any:
    return documents()["Job"]["spec"]["template"]["spec"]


def container() -> Any:
    (only,) = pod()["containers"]
    return only


def variables(index: int) -> dict[str, str]:
    own = {one["name"]: one.get("value", SECRET) for one in container()["env"]}
    return {**own, FROM_KUBERNETES: str(index)}


def command(environ: Mapping[str, str]) -> list[str]:
    """The words of the container, as Kubernetes makes them of the variables of its pod."""
    words = [*container()["command"], *container()["args"]]
    return [REFERENCE.sub(lambda found: environ[found[1]], word) for word in words]


def asked(index: int) -> Request:
    return torchrun.read(command(variables(index))[1:], {})[0]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["Service", "Job"])
def test_each_field_is_one_of_the_published_schema(kind: str, version: str) -> None:
    validate(documents()[kind], version)


def changed(document: Any, path: str, value: Any) -> Any:
    """A copy with another value at that place."""
    result = copy.deepcopy(document)
    place: Any = result
    *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    for step in way:
        place = place[step]
    place[last] = value
    return result


@pytest.mark.parametrize(
    "kind, path, value",
    [
        ("Service", "spec/clusterIp", "None"),
        ("Service", "spec/publishNotReadyAddresses", "yes"),
        ("Job", "spec/completionsMode", "Indexed"),
        ("Job", "spec/backoffLimit", "three"),
        ("Job", "spec/template", "a pod"),
        ("Job", "spec/podFailurePolicy/rules/0", {"onExitCodes": {"operator": "In", "values": [75]}}),
        ("Job", "spec/podFailurePolicy/rules/0/onExitCodes/values/0", "75"),
        ("Job", "spec/template/spec/terminationGracePeriod", 120),
        ("Job", "spec/template/spec/containers/0/args/0", 2),
        ("Job", "spec/template/spec/containers/0/env/1/value", 29500),
    ],
)
def test_a_field_that_kubernetes_does_not_know_is_seen(kind: str, path: str, value: Any) -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(changed(documents()[kind], path, value), VERSIONS[-1])


def test_every_variable_of_the_command_is_one_that_the_pod_has() -> None:
    used = {name for word in container()["args"] for name in REFERENCE.findall(word)}
    set_by_the_pod = {one["name"] for one in container()["env"] if "value" in one}
    assert documents()["Job"]["spec"]["completionMode"] == "Indexed"
    assert FROM_KUBERNETES in used
    assert FROM_KUBERNETES not in set_by_the_pod
    assert used == {FROM_KUBERNETES, *set_by_the_pod}


def test_the_pods_are_the_nodes_of_one_job() -> None:
    spec = documents()["Job"]["spec"]
    requests = [asked(index) for index in range(spec["completions"])]
    assert spec["parallelism"] == spec["completions"]
    for index, request in enumerate(requests):
        assert {request.resources.min_nodes, request.resources.max_nodes} == {spec["completions"]}
        assert request.meeting.node_rank == index
        assert request.resources.nproc_per_node == str(container()["resources"]["limits"]["nvidia.com/gpu"])


def test_the_workers_meet_at_a_name_that_the_service_gives_the_first_pod() -> None:
    found = documents()
    name, service = found["Job"]["metadata"]["name"], found["Service"]
    assert asked(1).meeting.master_addr == f"{name}-0.{service['metadata']['name']}"
    assert pod()["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}


def test_kubernetes_waits_longer_than_dslrun() -> None:
    signals = asked(0).signals
    assert signals.preempt == signal.SIGTERM
    assert signals.preempt_grace_s is not None
    assert max(signals.preempt_grace_s, signals.grace_s) < pod()["terminationGracePeriodSeconds"]


def decision(code: int, conditions: frozenset[str] = frozenset()) -> str:
    """What the Job controller does after a pod whose container has ended with that code."""
    for rule in documents()["Job"]["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is None:
            if conditions & {one["type"] for one in rule["onPodConditions"]}:
                return str(rule["action"])
        elif code != 0 and (code in codes["values"]) == (codes["operator"] == "In"):
            assert codes["containerName"] == container()["name"]
            return str(rule["action"])
    return "Count"


def test_an_exit_code_decides_what_follows() -> None:
    assert pod()["restartPolicy"] == "Never"
    assert decision(75) == "Ignore"
    assert [decision(code) for code in (1, 2, 127, 137)] == ["FailJob"] * 4
    assert decision(137, frozenset({"DisruptionTarget"})) == "Ignore"
    assert decision(0) == "Count"


class Pods:
    """The pods of the Job as groups of processes on this machine, each with its command and variables."""

    def __init__(self, dslrun: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        self._instead = {"MASTER": "127.0.0.1", "PORT": port, "CHECKPOINT": str(folder / "model.pt")}
        self._dslrun = dslrun
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *more: str) -> list[subprocess.Popen[bytes]]:
        """Both pods; `more` goes behind the command of the pod."""
        self._running = []
        for index in range(documents()["Job"]["spec"]["completions"]):
            environ = {**variables(index), **self._instead}
            words = [str(self._dslrun), *command(environ)[1:], *more]
            with self.log(index).open("wb") as file:
                self._running.append(
                    subprocess.Popen(
                        words, cwd=ROOT, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
                        stdout=file, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        return self._running

    def log(self, index: int) -> Path:
        return self._folder / f"pod-{index}.log"

    def text(self, index: int) -> str:
        return self.log(index).read_text(encoding="utf-8")

    def kill(self) -> None:
        for one in self._running:
            one.kill()
            one.wait()


@pytest.fixture
def pods(dsl_command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = Pods(dsl_command.with_name("dslrun"), tmp_path)
    yield started
    started.kill()


@pytest.mark.torch
@pytest.mark.proc
@pytest.mark.timeout(300)
def test_a_drained_pod_takes_all_pods_along_and_they_go_on_where_they_were(
    pods: Pods, wait_until: WaitUntil
) -> None:
    """One pod hears SIGTERM, as from a node that is drained: both end with 75, and are made anew."""
    first = pods.start("--log-every=10")
    wait_until(lambda: re.search(r"step \d+0/", pods.text(0)), timeout_s=120)
    first[1].send_signal(signal.SIGTERM)
    assert [one.wait(60) for one in first] == [75, 75], pods.text(0) + pods.text(1)
    step = re.search(r"stopped by a signal after step (\d+)", pods.text(0))
    assert step is not None, pods.text(0)

    again = pods.start(f"--steps={int(step[1]) + 5}")
    assert [one.wait(120) for one in again] == [0, 0], pods.text(0) + pods.text(1)
    assert f"resuming at step {step[1]} on cpu" in pods.text(0)
    ends = re.findall(r"parameters (\w+)", pods.text(0) + pods.text(1))
    assert len(ends) == 4
    assert len(set(ends)) == 1


@pytest.mark.guarantee("G2")
@pytest.mark.torch
@pytest.mark.proc
@pytest.mark.timeout(300)
def test_a_failure_is_the_exit_code_of_its_pod(pods: Pods) -> None:
    """Dslrun ends with the worker's own code, for which the Job ends."""
    running = pods.start("--fail-rank=3", "--fail-at-step=3", "--fail-code=42")
    codes = [one.wait(120) for one in running]
    assert codes[1] == 42
    assert codes[0] not in {0, 75}
    assert [decision(code) for code in codes] == ["FailJob", "FailJob"]
