"""What the head makes of what the program of ``--discover`` says while the job runs."""

from __future__ import annotations

import json
import time
from typing import Any
from unittest.mock import Mock

from tests.support.conducting import a_job, reached
from tests.support.events import an_exit, exited
from tests.support.machine import make_facts

from dsl import Output, Started
from dsl.agent.discovery import Discovery
from dsl.conductor.listed import ListedConductor
from dsl.conductor.orders import Reach
from dsl.control.messages import Assignment
from dsl.launchers.base import Start
from dsl.model.job import Job
from dsl.plan.remote import Remote


class Stage:
    """A discovery of a job on n0 and n1, and what follows from it."""

    def __init__(self) -> None:
        job = a_job(1, 1, is_elastic=True)
        remote = Remote("ssh", least_nodes=1, most_nodes=9, wait_s=1.0, discover=("list", "it"))
        self.starters = Mock()
        self.conductor = ListedConductor(reached(job, remote), time.monotonic())
        assignment = Assignment("1", job, 0)
        self.discovery = Discovery(
            self.conductor, self.starters, assignment, remote, make_facts(), self.starts_of
        )
        self.jobs: list[Job] = []
        self.orders: list[Any] = []
        self.discovery.relist = self.relist

    def starts_of(self, job: Job, remote: Remote) -> list[Start]:
        assert remote.world_sizes == ()
        return [Start((host.name,), node_rank=rank) for rank, host in enumerate(job.hosts)]

    def relist(self, job: Job, orders: Any) -> None:
        self.jobs.append(job)
        self.orders = orders

    def says(self, **said: str) -> None:
        """The program's process writes a line, in two pieces."""
        line = json.dumps(said).encode() + b"\n"
        for piece in (line[:5], line[5:]):
            event: Any = Mock(spec=Output, worker=2, stream=1, data=piece)
            assert self.discovery.hear(event)

    @property
    def warnings(self) -> list[str]:
        return [call[0][0].line for call in self.starters.tell.call_args_list]


def test_events_of_other_programs_are_left_to_others() -> None:
    stage = Stage()
    assert stage.starters.beside.argv[-2:] == ("list", "it")
    for number, is_ours in ((1, False), (2, True), (3, False)):
        started: Any = Mock(spec=Started, worker=number)
        assert stage.discovery.hear(started) == is_ours
        assert stage.discovery.hear(exited(an_exit(number, by_us=True))) == is_ours
    assert not stage.discovery.hear(object())
    assert stage.warnings == []


def test_new_hosts_get_programs_and_the_assignment_of_a_job_that_has_them() -> None:
    stage = Stage()
    stage.says(hosts="n1 slots=1\nn2 slots=4\n")
    (job,) = stage.jobs
    assert [host.name for host in job.hosts] == ["n0", "n1", "n2"]
    (extended, starts), _ = stage.starters.extend.call_args
    assert (extended, [start.argv for start in starts]) == (job, [("n0",), ("n1",), ("n2",)])
    assert [one.place for one in stage.orders if isinstance(one, Reach)] == [2]
    stage.says(hosts="n0 slots=1\nn1 slots=1\n")
    assert stage.starters.extend.call_count == 1
    assert stage.jobs[1] == job


def test_what_is_no_list_changes_nothing_and_is_told() -> None:
    stage = Stage()
    stage.says(problem="--discover: 'list' has ended with 1")
    stage.says(hosts="n0\n")
    stage.discovery.hear(exited(an_exit(2, code=1)))
    assert stage.jobs == []
    ends = "; the hosts stay as they are"
    assert stage.warnings[0] == f"warning: --discover: 'list' has ended with 1{ends}"
    assert stage.warnings[1].startswith("warning: --discover line 1: hostfile contains a bad entry: 'n0'")
    assert stage.warnings[2] == f"warning: the process that runs --discover has ended{ends}"
