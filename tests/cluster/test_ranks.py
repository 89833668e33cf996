"""What is asked for by global rank, on several hosts."""

from __future__ import annotations

import re
import uuid

import pytest
from tests.kit.cluster import Cluster
from tests.support.fleet import PLAIN, SSH, Launch, Ways, gone_within

LAUNCHERS = ("ssh", "pdsh", "openmpi5", "slurm")

every_way = pytest.mark.parametrize("ways", LAUNCHERS, indirect=True)


@every_way
def test_the_console_shows_these_ranks_of_all_hosts(hosts: Cluster, launch: Launch, ways: Ways) -> None:
    """And each host keeps the files of all of its ranks."""
    folder = f"run/logs-{uuid.uuid4().hex}"
    options = ("--ranks-filter", "0,3-4", "--log-dir", f"/{folder}")
    with launch(("say", "out of %r"), ways, *options) as job:
        assert job.wait() == 0, job.stderr
        gone_within(hosts)
    assert sorted(line for line in job.stdout.splitlines() if " of " in line) == [
        f"out of {rank}" for rank in (0, 3, 4)
    ]
    for host in hosts:
        texts = [path.read_text() for path in (host.root / folder).rglob("stdout.log")]
        assert sorted(texts) == [f"out of {rank}\n" for rank in (2 * host.index, 2 * host.index + 1)]


def test_files_are_for_the_ranks_of_all_hosts_that_the_maps_name(hosts: Cluster, launch: Launch) -> None:
    folder = f"run/logs-{uuid.uuid4().hex}"
    options = ("--log-dir", f"/{folder}", "--redirects", "rank1:3,rank4-5:1")
    with launch(("say", "out of %r"), SSH, *options) as job:
        assert job.wait() == 0, job.stderr
        gone_within(hosts)
    assert sorted(job.stdout.splitlines()) == [f"out of {rank}" for rank in (0, 2, 3)]
    kept = [[path.read_text() for path in (host.root / folder).rglob("stdout.log")] for host in hosts]
    assert [sorted(texts) for texts in kept] == [["out of 1\n"], [], ["out of 4\n", "out of 5\n"]]


@every_way
def test_a_prefix_names_the_host_of_each_line(hosts: Cluster, launch: Launch, ways: Ways) -> None:
    template = "<${host} ${rank}> ${time} "
    with launch(("say", "out of %r"), ways, "--log-line-prefix-template", template) as job:
        assert job.wait() == 0, job.stderr
        gone_within(hosts)
    expected = [f"<{hosts[rank // 2].name} {rank}> TIME out of {rank}" for rank in range(6)]
    said = re.sub(r"\b\d\d:\d\d:\d\d\.\d{3}\b", "TIME", job.stdout)
    assert sorted(said.splitlines()) == expected


@every_way
def test_a_command_executes_the_ranks_of_any_host_that_it_wraps(
    hosts: Cluster, launch: Launch, ways: Ways
) -> None:
    wrap = '0,3-4:/bin/sh -c \'echo "wrap of $RANK"; "$@"; exit $?\' wrapper'
    with launch(("say", "out of %r"), ways, "--wrap", wrap) as job:
        assert job.wait() == 0, job.stderr
        gone_within(hosts)
    expected = [*(f"out of {rank}" for rank in range(6)), *(f"wrap of {rank}" for rank in (0, 3, 4))]
    assert sorted(job.stdout.splitlines()) == expected


def test_workers_behind_a_command_hear_the_end_of_the_job_on_all_hosts(
    hosts: Cluster, launch: Launch
) -> None:
    wrap = "all:/bin/sh -c '\"$@\"; exit $?' wrapper"
    with launch(PLAIN, SSH, "--grace", "60", "--wrap", wrap) as job:
        job.ready(6)
        job.process.terminate()
        assert job.wait() == 143
        gone_within(hosts)


def test_a_command_that_one_host_lacks_is_named_with_it(hosts: Cluster, launch: Launch) -> None:
    """A host without such a rank does without the command."""
    with launch(("say", "out of %r"), SSH, "--wrap", "2:no-such-program -x") as job:
        assert job.wait() == 2
        gone_within(hosts)
    assert job.stdout == ""
    assert [line for line in job.stderr.splitlines() if "no-such-program" in line] == [
        f"dsl: error: host {hosts[1].name}: --wrap: program 'no-such-program' is not on PATH"
    ]
