"""What the agent of a host makes of its command line, and has said before its workers start."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from tests.support.events import a_plan

from dsl import LogNotice
from dsl._record import replace
from dsl.agent import node
from dsl.agent.node import AgentOptions, HeadLink, announcements, place_of
from dsl.control.messages import Assignment, Bye, Refused
from dsl.errors import DslError
from dsl.machine import Console
from dsl.model.job import Host, Job, MeetingPoint, Notice
from dsl.model.request import PlacementRequest, Program
from dsl.plan.worker import DEEPSPEED

JOB = Job(DEEPSPEED, Program("script", "t.py"), MeetingPoint("static", "a", 1), hosts=(Host("n", (0, 1)),))
ASSIGNMENT = Assignment("1", JOB, 0)


def test_what_was_found_while_planning_is_said_with_the_name_of_the_host() -> None:
    plan = replace(a_plan(2), notices=(Notice("warning", "no cores"),))
    assert announcements(plan, ASSIGNMENT) == [Notice("warning", f"host {plan.host}: no cores")]


def test_of_the_tasks_of_a_host_the_first_says_it() -> None:
    plan = replace(a_plan(2), notices=(Notice("warning", "no cores"),))
    assert len(announcements(plan, replace(ASSIGNMENT, task=0))) == 1
    assert announcements(plan, replace(ASSIGNMENT, task=1)) == []


def test_bindings_that_are_to_be_shown_are_said_by_every_host() -> None:
    job = replace(JOB, placement=PlacementRequest(names_devices=True))
    plan = a_plan(2)
    lines = [notice.text for notice in announcements(plan, replace(ASSIGNMENT, job=job))]
    assert len(lines) == 3
    assert lines[0].startswith(f"host {plan.host}: rank")


def test_only_the_words_of_a_head_are_understood() -> None:
    options = AgentOptions(["--connect", "a:1,[::1]:2", "--place", "3", "--heartbeat", "4"])
    assert (options.addresses, options.place, options.heartbeat_s) == (("a:1", "[::1]:2"), 3, 4.0)
    with pytest.raises(DslError, match="does not know '--x'"):
        AgentOptions(["--x"])


def test_a_reason_not_to_start_is_sent_at_once_while_nothing_serves_the_connection() -> None:
    link = Mock()
    head = HeadLink(Mock(), link, Console(), Mock())
    head.refuse("dsl", "cannot start the process that watches the workers", 1)
    assert [one.args for one in link.send_now.mock_calls] == [
        (Refused("cannot start the process that watches the workers", 1),)
    ]
    link.send.assert_not_called()


@pytest.mark.parametrize(
    "environ, place",
    [
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "5"}, (5, 1)),
        ({"PMI_RANK": "4", "MPI_LOCALRANKID": "0"}, (4, 0)),
        ({"PMI_RANK": "4", "PALS_LOCAL_RANKID": "2"}, (4, 2)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, (3, 1)),
    ],
)
def test_a_task_finds_its_place_in_what_its_launcher_says(
    environ: dict[str, str], place: tuple[int, int]
) -> None:
    assert place_of(AgentOptions(["--connect", "a:1", "--per-rank"]), environ) == place


def test_a_task_without_a_place_says_which_variables_it_lacks() -> None:
    with pytest.raises(DslError, match="OMPI_COMM_WORLD_RANK"):
        place_of(AgentOptions(["--connect", "a:1", "--per-rank"]), {})


@pytest.mark.parametrize("is_lost, ended", [(True, ["77"]), (False, [])])
def test_the_allocation_of_a_job_ends_with_a_lost_head_alone(
    is_lost: bool,  # noqa: FBT001  a row of the table
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []
    monkeypatch.setattr(node, "end_allocation", found.append)
    head = HeadLink(Mock(), Mock(is_lost=is_lost), Console(), Mock(), "77")
    assert head.leave(7) == 0
    assert found == ended


@pytest.mark.parametrize("kind, is_lost", [("file_failed", True), ("first_output", False)])
def test_the_last_message_says_whether_output_is_lost(kind: str, is_lost: bool) -> None:  # noqa: FBT001  both cases
    link = Mock(is_lost=False)
    head = HeadLink(Mock(), link, Console(), Mock())
    head.hear(Mock(spec=LogNotice, kind=kind))
    head.leave(0)
    link.send.assert_called_once_with(Bye(has_lost_output=is_lost))


def test_a_host_without_scancel_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nosuch")
    node.end_allocation("77")
