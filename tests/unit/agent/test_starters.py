"""What follows from what the programs that reach the hosts say, and from how they end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.events import an_exit, exited
from tests.support.launchers import make_agents

from dsl import Output
from dsl.agent.keeper import LONGEST_LINE
from dsl.agent.starters import KeyTold, Killed, Missing, Starters
from dsl.errors import LauncherError
from dsl.launchers.base import Start
from dsl.launchers.table import kept
from dsl.model.job import Host, Job, MeetingPoint, Notice
from dsl.model.request import Program
from dsl.plan.flavours import DEEPSPEED

STDOUT, STDERR = 1, 2
JOB = Job(
    flavour=DEEPSPEED,
    program=Program("script", "train.py"),
    meeting=MeetingPoint("static", "10.0.0.1", 29501),
    hosts=(Host("n0", (0,)), Host("n1", (0,))),
    node_count=2,
)
AGENTS = make_agents({"n0": 1, "n1": 1}, folder="/folder")
SSH = [
    Start(argv=("/usr/bin/ssh", name), node_rank=rank, speaks=True) for rank, name in enumerate(("n0", "n1"))
]
PDSH = Start(argv=("pdsh",), labels=(("n0", 0), ("n1", 1)))
MPIRUN = Start(argv=("mpirun",))
KEPT = kept(SSH, AGENTS)
MADE: list[Stage] = []


class Stage:
    """The programs that reach two hosts, and what the head is told of them."""

    def __init__(self, *starts: Start) -> None:
        MADE.append(self)
        self.starters = Starters(JOB, starts, (0, 1), {"HOME": "/", "GONE": "1"})
        self.plan = self.starters.plan()
        self.orders_fd = self.plan.workers[0].stdin_fd

    def says(self, program: int, data: bytes, stream: int = STDERR) -> list[object]:
        """A program writes; no data: that is its end. What follows, without the lines that are shown for debugging."""
        event: Any = Mock(spec=Output, worker=program, stream=stream, data=data)
        news = self.starters.hear(event)
        return [one for one in news if not isinstance(one, Notice) or one.level != "debug"]

    def exits(self, program: int, **how: Any) -> list[object]:
        """A program ends. Its children may hold its output."""
        return self.starters.hear(exited(an_exit(program, **how)))

    def ends(self, program: int, **how: Any) -> list[object]:
        """A program ends, and its output, too."""
        return [*self.exits(program, **how), *self.says(program, b"")]

    def answers(self, **answer: Any) -> list[object]:
        """The keeper answers."""
        return self.says(0, json.dumps({"Answer": answer}).encode() + b"\n", STDOUT)

    def orders(self) -> list[dict[str, Any]]:
        """What the keeper has been told since the last call."""
        assert self.orders_fd is not None
        os.set_blocking(self.orders_fd, False)
        found = []
        try:
            while True:
                found.append(json.loads(os.read(self.orders_fd, 4096)))
        except BlockingIOError:
            return found


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Close what a test has opened."""
    yield
    while MADE:
        one = MADE.pop().starters
        one.disown()
        for fd in one.streams.values():
            os.close(fd)


def missing(news: Sequence[object]) -> list[tuple[tuple[int, ...], str]]:
    """Places and reasons of agents that will not come; nothing else is in the news."""
    found = [(one.places, one.why) for one in news if isinstance(one, Missing)]
    assert len(found) == len(news), news
    return found


def warning(text: str) -> Notice:
    return Notice("warning", f"{text}: it was refused")


def key_line(place: int, key: str = "ab" * 32) -> bytes:
    return f"dsl-agent {place} {key}\n".encode()


def test_what_a_program_writes_last_is_waited_for_but_not_long() -> None:
    """Another process may hold its stderr."""
    ssh = Stage(*SSH)
    assert [ssh.exits(program, code=255) for program in range(2)] == [[], []]
    ssh.says(1, b"ssh: connection refused\n")
    assert missing(ssh.says(1, b"")) == [
        (
            (1,),
            "cannot be reached: ssh: connection refused, check that `ssh n1 true` works without a password",
        )
    ]
    ssh.says(0, b"ssh: no route to host\n")
    due_s = ssh.starters.deadline_s
    assert due_s is not None
    assert due_s <= time.monotonic() + 1
    ((places, why),) = missing(ssh.starters.go_on(due_s))
    assert places == (0,)
    assert "no route to host" in why
    assert ssh.says(0, b"") == []


@pytest.mark.parametrize(
    "said, status, why",
    [
        ("", 127, "did not start: it printed nothing (exit code 127), the same interpreter has to be there"),
        ("No module named dsl", 1, "(exit code 1), install the same version of dsl there"),
        ("unknown option\nusage: ssh [-x]\n          [-y]", 255, "cannot be reached: unknown option, check"),
    ],
)
def test_the_end_of_an_ssh_tells_how_to_mend_it(said: str, status: int, why: str) -> None:
    ssh, elastic = Stage(*SSH), Stage(KEPT)
    ssh.says(0, said.encode())
    assert why in missing(ssh.ends(0, code=status))[0][1]
    for line in said.splitlines():
        elastic.answers(place=0, line=line)
    assert why in missing(elastic.answers(place=0, status=status))[0][1]


def test_a_launcher_that_fails_is_quoted() -> None:
    """If it has said much, the first and the last lines are kept."""
    why = "mpirun ended with 3 before its agent had answered"
    mpirun = Stage(MPIRUN)
    mpirun.says(0, b"no slots\n")
    assert missing(mpirun.ends(0, code=3)) == [((0, 1), f"{why}: no slots")]
    mpirun = Stage(MPIRUN)
    mpirun.says(0, b"".join(b"line %d\n" % number for number in range(1000)) + b"mpirun: stopped\n")
    (end,) = mpirun.ends(0, code=3)
    assert isinstance(end, Missing)
    assert (end.why, len(end.said)) == (why, 40)
    assert (end.said[0], end.said[19], end.said[-1]) == (
        "mpirun: line 0",
        "mpirun: line 19",
        "mpirun: stopped",
    )
    assert mpirun.starters.why_lost == "mpirun has ended with 3: mpirun: stopped"


@pytest.mark.parametrize(
    "line, places, why",
    [
        ("ssh: Could not resolve hostname N1: Name or service not known", (1,), "cannot be reached: ssh: "),
        ("ssh: connect to host n0 port 22: Connection refused", (0,), "`ssh n0 true`"),
        ("pat@n1: Permission denied (publickey).", (1,), "Permission denied"),
        ("Host key verification failed.", (0, 1), "mpirun: Host key verification failed."),
    ],
)
def test_an_mpirun_that_goes_on_without_a_host_is_understood(
    line: str, places: tuple[int, ...], why: str
) -> None:
    mpirun = Stage(MPIRUN)
    assert mpirun.says(0, b"[n0:22] plm:ssh: Warning: setpgid failed\npeer: Connection reset by peer\n") == []
    ((found, text),) = missing(mpirun.says(0, line.encode() + b"\n"))
    assert found == places
    assert why in text


def test_the_last_words_of_programs_and_of_the_hosts_that_are_missing() -> None:
    mpirun, pdsh, ssh = Stage(MPIRUN), Stage(PDSH), Stage(*SSH)
    mpirun.says(0, b"mpirun: waiting\nfor a proxy\n")
    assert mpirun.starters.last_words(()) == []
    assert mpirun.starters.last_words((1,)) == ["mpirun: waiting", "mpirun: for a proxy"]
    mpirun.starters.told.add(1)  # by what has followed from the end of the program
    assert mpirun.starters.last_words((1,)) == []
    pdsh.says(0, b"n0: fine\nn1: Traceback\nn1: ImportError: x\n")
    assert pdsh.starters.last_words((1,)) == ["n1: Traceback", "n1: ImportError: x"]
    ssh.says(1, b"Killed\n")
    assert ssh.starters.last_words((1,)) == ["n1: Killed"]


def test_the_end_of_a_program_for_all_hosts_is_told_as_it_was() -> None:
    assert Stage(PDSH).exits(0, signal=9) == [Killed("pdsh was killed by SIGKILL (signal 9)")]
    assert Stage(PDSH).exits(0, signal=15, by_us=True) == []
    assert Stage(*SSH).exits(0, signal=9) == []
    assert Stage(PDSH).ends(0, code=0) == []
    ((places, why),) = missing(Stage(PDSH).exits(0, failed_at=("exec", 2, "pdsh")))
    assert places == (0, 1)
    assert why.startswith("pdsh could not be executed: pdsh: No such file")


def test_an_agent_tells_its_key_over_pdsh_by_a_line_of_its_own_host() -> None:
    """Each place has one key."""
    pdsh = Stage(PDSH)
    news = pdsh.says(0, b"n1: Welcome! " + key_line(1) + b"n0: " + key_line(0, "cd" * 32), STDOUT)
    assert news == [KeyTold(1, b"\xab" * 32), KeyTold(0, b"\xcd" * 32)]
    assert pdsh.says(0, b"n1: " + key_line(1, "cd" * 32), STDOUT) == [
        warning("host n1 has told a second key")
    ]


@pytest.mark.parametrize(
    "line",
    [
        *(prefix + key_line(1) for prefix in (b"n0: ", b"n0: n1: ")),
        *(b"n0: " + line for line in (key_line(5), key_line(0, "ab"), key_line(0, "xy" * 32))),
        b"n0: dsl-agent " + b"9" * 5000 + b" " + b"ab" * 32 + b"\n",
    ],
)
def test_a_host_cannot_tell_the_key_of_another(line: bytes) -> None:
    news = Stage(PDSH).says(0, line, STDOUT)
    assert news in ([], [warning("host n0 has told the key of another place")])


@pytest.mark.parametrize("mark", [b"", b"n2: ", b"n1:"])
def test_a_key_in_a_line_of_an_unknown_host_is_said_at_once_and_never_shown(mark: bytes) -> None:
    """A wrapper of pdsh may hide or change the names of hosts."""
    pdsh = Stage(PDSH)
    event: Any = Mock(spec=Output, worker=0, stream=STDOUT, data=mark + key_line(1))
    ((places, why),) = missing(pdsh.starters.hear(event))
    assert places == (1,)
    assert why.startswith("pdsh does not mark the lines of hosts with their names")
    assert "ab" * 32 not in str(pdsh.ends(0, code=1))


def test_only_programs_over_ssh_carry_keys() -> None:
    """A rank of an MPI says what it likes."""
    mpirun = kept([Start(argv=("mpirun",), node_rank=rank) for rank in range(2)], AGENTS)
    assert Stage(mpirun).answers(place=1, line=key_line(1).decode()) == []
    assert Stage(MPIRUN).says(0, key_line(1) + b"n1: " + key_line(1), STDOUT) == []
    assert Stage(*SSH).says(1, key_line(1)) == []


def test_a_host_whose_ssh_failed_is_known_by_what_pdsh_calls_it() -> None:
    pdsh = Stage(PDSH)
    ((places, why),) = missing(
        pdsh.says(0, b"n0: hello\nn1: no route\npdsh@here: n1: ssh exited with exit code 255\n")
    )
    assert places == (1,)
    assert why.startswith("cannot be reached: no route, check that `ssh n1 true`")
    assert pdsh.says(0, b"pdsh@here: n0: ssh exited with exit code " + b"9" * 400 + b"\n") == []
    assert missing(pdsh.says(0, b"n0: dsl-agent-ended 0 0\n", STDOUT)) == [
        ((0,), "its agent did not start: hello (exit code 0)")
    ]
    assert pdsh.says(0, b"n0: dsl-agent-ended 1 0\nn0: dsl-agent-ended 0 7\n", STDOUT) == []


# The keeper.


def test_the_keeper_is_the_one_program_and_inherits_what_the_others_need() -> None:
    starts = [Start(argv=("srun",), node_rank=0, env=(("KEY", "k"),), unset=("GONE",))] * 2
    plan = Stage(kept(starts, AGENTS)).plan
    (worker,) = plan.workers
    assert worker.stdin_fd is not None
    assert worker.argv == ("/opt/py", "-m", "dsl_launcher.fanout", "/folder/commands.json")
    assert (worker.stdout.pipe, dict(worker.env), dict(plan.env)) == (True, {"KEY": "k"}, {"HOME": "/"})


def test_a_host_that_is_reached_again_tells_another_key_and_its_last_program_does_not_count() -> None:
    """The last one ends because the host is reached again, which is no failure of the new one."""
    elastic, line = Stage(KEPT), key_line(1).decode()
    assert elastic.answers(place=1, line=line) == [KeyTold(1, b"\xab" * 32)]
    assert elastic.answers(place=1, line=line) == [warning("host n1 has told a second key")]
    elastic.starters.reach(1)
    assert elastic.orders() == [{"Begin": {"place": 1, "turn": 1}}]
    assert elastic.answers(place=1, line=line) == elastic.answers(place=1, status=143) == []
    assert elastic.answers(place=1, turn=1, line=line) == [KeyTold(1, b"\xab" * 32)]
    assert missing(elastic.answers(place=1, turn=1, status=143))[0][0] == (1,)


def test_an_agent_that_runs_on_by_itself_is_not_missing() -> None:
    many = Stage(kept(SSH, AGENTS, 64))
    assert many.answers(place=1, status=0) == []
    assert missing(many.answers(place=0, status=255))[0][0] == (0,)
    assert missing(Stage(KEPT).answers(place=1, status=0))[0][0] == (1,)


def test_a_long_line_of_a_host_is_heard_whole() -> None:
    elastic = Stage(KEPT)
    elastic.answers(place=1, line="\x00" * (LONGEST_LINE - 20) + " ends here")
    assert "ends here (exit code 1)" in missing(elastic.answers(place=1, status=1))[0][1]


@pytest.mark.parametrize(
    "said",
    [
        *({"place": place, "status": 1} for place in (9, -1, True, "1", 1.5)),
        *({"place": 1, name: value} for name, value in (("status", "1"), ("line", [1]), ("odd", 1))),
        {"place": 1, "turn": 7, "status": 1},
    ],
)
def test_an_answer_of_the_wrong_kind_is_no_more_than_a_word_of_the_keeper(said: dict[str, Any]) -> None:
    elastic = Stage(KEPT)
    assert elastic.answers(**said) == []
    assert elastic.answers(place=1, status=255) != []
    elastic.says(0, b"Traceback\n[1, 2]\n")
    (end,) = elastic.ends(0, code=1)
    assert isinstance(end, Missing)
    assert end.said[-2:] == ("py: Traceback", "py: [1, 2]")


def test_orders_that_a_keeper_does_not_take_wait_and_are_few() -> None:
    elastic, count = Stage(KEPT), 2000
    for _ in range(count):
        elastic.starters.reach(0)
        elastic.starters.reach(1)
    assert elastic.starters.end([1])
    due_s = elastic.starters.deadline_s
    assert due_s is not None
    assert due_s <= time.monotonic() + 1
    taken = elastic.orders()
    assert len(taken) < count
    assert taken == [{"Begin": {"place": n % 2, "turn": n // 2 + 1}} for n in range(len(taken))]
    elastic.starters.go_on(due_s)
    late = sorted(elastic.orders(), key=str)
    assert late == [
        {"Begin": {"place": 0, "turn": count}},
        {"Begin": {"place": 1, "turn": count}},
        {"End": {"places": [1]}},
    ]
    assert elastic.starters.deadline_s is None


def test_files_are_for_this_user_alone_and_go_with_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    files = [((f"{folder}/{rank}/hosts", f"n{rank}\n"),) for rank in range(2)]
    starts = [Start(argv=("mpirun",), node_rank=rank, files=some) for rank, some in enumerate(files)]
    one = Stage(kept(starts, make_agents({}, folder=str(folder)))).starters
    one.prepare()
    assert (folder / "1" / "hosts").read_text() == "n1\n"
    assert json.loads((folder / "commands.json").read_text())["commands"] == [["mpirun"], ["mpirun"]]
    assert folder.stat().st_mode & 0o777 == 0o700
    one.finish()
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    with pytest.raises(LauncherError, match=f"cannot write {folder} for the launcher: File exists"):
        one.prepare()
    one.finish()
    assert folder.exists(), "it is not ours"
