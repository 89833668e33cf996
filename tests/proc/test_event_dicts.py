"""Events as data: what docs/events.md says of them is what they are."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import ran
from tests.support.group import Group

import dsl
from dsl import (
    EVENT_VERSION,
    Called,
    Event,
    Exit,
    Exited,
    ForkServerSlow,
    Output,
    Stdio,
    WorkerSpec,
)
from dsl._record import fields as record_fields

pytestmark = [pytest.mark.engine, pytest.mark.linux_5_4]

DOCS = Path(__file__).resolve().parents[2] / "docs"
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}

SERVER = [sys.executable, str(DOCS.parent / "tests" / "workers" / "fork_server.py"), "serve"]

# Under a guard: what only an agent hears of.
AGENT = """
import json, os, signal, sys
from dsl import Ended, Guard, LaunchSpec, Supervisor, WorkerSpec
guard = Guard()
pid = os.fork()
if pid:
    os._exit(guard.supervise(pid, 5.0).code)
guard.enter_agent()
supervisor = Supervisor(guard=guard)
supervisor.start(LaunchSpec([WorkerSpec(sys.argv[1:])]))
os.kill(os.getpid(), signal.SIGTERM)
events = []
while not (events and isinstance(events[-1], Ended)):
    events += supervisor.wait()
print(json.dumps([event.to_dict() for event in events]), flush=True)
os._exit(0)
"""


def documented() -> dict[str, list[str]]:
    """Fields by heading."""
    engine = (DOCS / "events.md").read_text(encoding="utf-8").split("\n## The events of the engine\n")[1]
    sections = re.split(r"^### ", engine, flags=re.MULTILINE)[1:]
    return {text.split("\n", 1)[0]: re.findall(r"^\* `(\w+)` \(", text, re.MULTILINE) for text in sections}


def run(*workers: WorkerSpec, **options: Any) -> list[Event]:
    with Group(workers, **options) as group:
        group.finish()
    return group.events


def slow(worker: WorkerSpec) -> list[Event]:
    """What is heard of a worker whose fork server has not imported everything."""
    if dsl._core.kernel_interfaces()["pidfd"]:
        return []
    with Group([worker], servers=[["/bin/sleep", "600"]], slow_s=0) as group:
        group.until(lambda group: bool(group.of(ForkServerSlow)))
        group.supervisor.kill()
        group.finish()
    return group.events


def called(worker: WorkerSpec, folder: Path) -> list[Event]:
    """What is heard of a caller at the job's socket."""
    with Group([worker]) as group, socket.socket(socket.AF_UNIX) as caller:
        group.supervisor.listen(folder, "1.sock")
        caller.connect(str(folder / "1.sock"))
        group.until(lambda group: bool(group.of(Called)))
        group.supervisor.kill()
        group.finish()
    return group.events


@pytest.fixture(scope="module")
def dicts(testchild: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One real event of each kind, as a dict."""
    child = str(testchild)
    outside = max(os.sched_getaffinity(0)) + 1000
    with Group([WorkerSpec([child, "ignore", "TERM", "pause"])]) as group:
        group.all_started()
        group.supervisor.kill()
        group.finish()
    events = [
        *group.events,
        *called(WorkerSpec([child, "pause"]), tmp_path_factory.mktemp("called", numbered=True) / "dsl"),
        *slow(WorkerSpec([child, "exit", "0"], fork_server=0, fork_entry=1)),
        *run(WorkerSpec(["/bin/echo", "hi"], stdout=Stdio.pipe())),
        *run(WorkerSpec(["/bin/echo", "hi"], stdout=Stdio.log("/dev/full"))),
        *run(WorkerSpec([child, "exit", "0"], cpus=[outside]), binding="wanted"),
        *run(WorkerSpec([child, "exit", "3"])),
        *run(WorkerSpec(["/bin/sh", "-c", "sleep 600 &"]), lingers=True, grace_s=0.2),
        *run(WorkerSpec(["/usr/bin/env", child, "exit", "0"], fork_server=0, fork_entry=1), servers=[SERVER]),
        *run(WorkerSpec([child, "exit", "0"], fork_server=0, fork_entry=1), servers=[["/bin/false"]]),
    ]
    said = ran([sys.executable, "-c", AGENT, child, "pause"], check=True).stdout
    return {one["event"]: one for one in [*(event.to_dict() for event in events), *json.loads(said)]}


def test_each_class_has_the_documented_attributes() -> None:
    found = documented()
    assert found.pop("Survivor") == ["pid", "state", "name", "wchan", "errno"]
    attributes = {name: list(record_fields(kind)) for name, kind in {**EVENTS, "Exit": Exit}.items()}
    assert found == attributes


def test_each_dict_has_the_documented_fields_in_their_order(dicts: dict[str, dict[str, Any]]) -> None:
    fields = documented()
    needs_pidfds = {"ForkServerReady", "ForkServerSlow"} if dsl._core.kernel_interfaces()["pidfd"] else set()
    assert set(dicts) == set(EVENTS) - needs_pidfds
    for name, one in dicts.items():
        assert list(one) == ["event", "version", *fields[name]]
        assert one["version"] == EVENT_VERSION == dsl.EVENT_VERSION == 1
        assert json.loads(json.dumps(one)) == one
    assert list(dicts["Exited"]["exit"]) == fields["Exit"]
    assert dicts["Ended"]["survivors"] == []
    assert f"which is {EVENT_VERSION} " in (DOCS / "events.md").read_text(encoding="utf-8")


def test_a_dict_says_what_the_attributes_say(testchild: Path) -> None:
    events = run(WorkerSpec([str(testchild), "exit", "3"]))
    for event in events:
        plain = event.to_dict()
        for name in documented()[plain["event"]]:
            value = getattr(event, name)
            if isinstance(value, Exit):
                assert plain[name] == {field: getattr(value, field) for field in documented()["Exit"]}
            elif isinstance(value, bytes):
                assert base64.b64decode(plain[name], validate=True) == value
            else:
                assert plain[name] == (list(value) if isinstance(value, tuple) else value)


def test_bytes_and_paths_come_through_json_whatever_they_hold(testchild: Path, tmp_path: Path) -> None:
    raw = bytes(range(256))
    (tmp_path / "raw").write_bytes(raw)
    events = run(WorkerSpec(["/bin/cat", str(tmp_path / "raw")], stdout=Stdio.pipe(), stderr=Stdio.null()))
    outputs = [event.to_dict() for event in events if isinstance(event, Output)]
    assert b"".join(base64.b64decode(one["data"], validate=True) for one in outputs) == raw
    assert outputs[-1]["data"] == ""
    (exited,) = (event for event in run(WorkerSpec([b"/no/\xff/prog"])) if isinstance(event, Exited))
    assert exited.exit.exec_path == "/no/\udcff/prog"
    assert exited.to_dict()["exit"]["exec_path"] == "/no/\ufffd/prog"


def test_a_long_output_is_cut_in_its_repr() -> None:
    events = run(WorkerSpec(["head", "-c", "1000", "/dev/zero"], stdout=Stdio.pipe()))
    texts = [repr(event) for event in events if isinstance(event, Output)]
    assert any(re.search(r"data=<\d+ bytes, b'(\\x00){64}'\.\.\.>\)$", text) for text in texts)
