"""What follows from what the programs that reach the hosts say, and from how they end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from tests.support.conducting import a_job
from tests.support.events import an_exit, exited

from dsl import EngineError, Output
from dsl._record import replace
from dsl.agent.starters import KILL_S, LONGEST_LINE, Starters
from dsl.errors import LauncherError
from dsl.launchers.base import Start
from dsl.model.job import Notice

STDOUT, STDERR = 1, 2
SSH = [
    Start(argv=("/usr/bin/ssh", name), node_rank=rank, speaks=True) for rank, name in enumerate(("n0", "n1"))
]
PDSH = Start(argv=("pdsh",), labels=(("n0", 0), ("n1", 1)))
MPIRUN = Start(argv=("mpirun",))
ELASTIC = [replace(start, speaks=False) for start in SSH]
MANY = [replace(start, detaches=True) for start in ELASTIC]
MADE: list[Stage] = []


class KeyTold(NamedTuple):
    """An agent may come in."""

    place: int
    key: bytes


class Missing(NamedTuple):
    """Agents will not come."""

    places: tuple[int, ...]
    why: str
    said: tuple[str, ...]


class Killed(NamedTuple):
    """The program that reaches all hosts is gone."""

    why: str


class Stage:
    """The programs that reach two hosts, and what the head is told of them."""

    def __init__(self, *starts: Start, beside: Start | None = None) -> None:
        MADE.append(self)
        self.starters = Starters(a_job(1, 1), starts, (0, 1), {"HOME": "/", "GONE": "1"}, at_once=64)
        self.starters.beside = beside
        self.plan = self.starters.plan(0)
        self.news: list[object] = []
        self.starters.tell = self.news.append
        self.starters.let_in = lambda place, key: self.news.append(KeyTold(place, key))
        self.starters.miss = lambda places, why, said: self.news.append(
            Missing(tuple(places), why, tuple(said))
        )
        self.starters.lose = lambda why: self.news.append(Killed(why))
        self.supervisor = self.starters.supervisor = Mock(add=Mock(side_effect=count(len(starts))))

    def says(self, program: int, data: bytes, stream: int = STDERR) -> list[object]:
        """A program writes; no data: that is its end. What follows, without the lines that are shown for debugging."""
        event: Any = Mock(spec=Output, worker=program, stream=stream, data=data)
        self.starters.hear(event)
        return [one for one in self.told() if not isinstance(one, Notice) or one.level != "debug"]

    def told(self) -> list[object]:
        """What the head was told since the last call."""
        news = [*self.news]
        self.news.clear()
        return news

    def exits(self, program: int, **how: Any) -> list[object]:
        """A program ends. Its children may hold its output."""
        self.starters.hear(exited(an_exit(program, **how)))
        return self.told()

    def ends(self, program: int, **how: Any) -> list[object]:
        """A program ends, and its output, too."""
        return [*self.exits(program, **how), *self.says(program, b"")]

    def added(self) -> list[Any]:
        """The words of the programs that were added since the last call."""
        calls = self.supervisor.add.call_args_list
        words = [call[0][0].argv for call in calls]
        calls.clear()
        return words

    def signals(self) -> list[tuple[int, int]]:
        """The signals that programs have got since the last call, and the numbers of these programs."""
        calls = self.supervisor.signal.call_args_list
        sent = [call[0] for call in calls]
        calls.clear()
        return sent


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


def test_a_program_in_place_of_ssh_is_the_one_to_try() -> None:
    own = Stage(
        *[Start(argv=("hop", "-v", f"n{rank}", "line"), node_rank=rank, speaks=True) for rank in range(2)]
    )
    (found,) = missing(own.says(1, b"ssh: connect to host n1 port 22: Connection refused\n"))
    assert found[0] == (1,)
    assert found[1].endswith(", check that `hop -v n1 true` works without a password")


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
    ssh.starters.go_on(due_s)
    ((places, why),) = missing(ssh.told())
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
    for starts in (SSH, ELASTIC):
        ssh = Stage(*starts)
        ssh.says(0, said.encode())
        assert why in missing(ssh.ends(0, code=status))[0][1]


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
    pdsh.starters.hear(event)
    ((places, why),) = missing(pdsh.told())
    assert places == (1,)
    assert why.startswith("pdsh does not mark the lines of hosts with their names")
    assert "ab" * 32 not in str(pdsh.ends(0, code=1))


def test_only_programs_over_ssh_carry_keys() -> None:
    """A rank of an MPI says what it likes."""
    each = [Start(argv=("mpirun",), node_rank=rank) for rank in range(2)]
    assert Stage(*each).says(1, key_line(1), STDOUT) == []
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


# Programs that come and go.


def test_the_group_stays_open_where_programs_come_and_go() -> None:
    def kind(*starts: Start) -> tuple[bool, int | None, str]:
        group = Stage(*starts).plan.group
        return group.stays_open, group.at_once, group.on_failure

    assert kind(*ELASTIC) == (True, None, "report")
    assert kind(*MANY) == (True, 64, "report")
    assert kind(*SSH) == kind(PDSH) == (False, None, "report")


def test_each_program_has_its_own_variables() -> None:
    plan = Stage(
        *[Start(argv=("srun",), node_rank=n, env=(("KEY", str(n)),), unset=("GONE",)) for n in (0, 1)]
    ).plan
    assert [dict(worker.env) for worker in plan.workers] == [{"KEY": "0"}, {"KEY": "1"}]
    assert dict(plan.env) == {"HOME": "/"}


def test_a_host_that_is_reached_again_tells_another_key_and_its_last_program_does_not_count() -> None:
    """The last one ends because the host is reached again, which is no failure of the new one."""
    elastic, line = Stage(*ELASTIC), key_line(1)
    assert elastic.says(1, line, STDOUT) == [KeyTold(1, b"\xab" * 32)]
    assert elastic.says(1, line, STDOUT) == [warning("host n1 has told a second key")]
    elastic.starters.reach(1)
    assert elastic.told() == [KeyTold(1, b"")], "the new one may call before its key is told"
    assert (elastic.signals(), elastic.added()) == ([(15, 1)], []), (
        "the new one waits for the end of the last"
    )
    assert elastic.says(1, line, STDOUT) == elastic.ends(1, code=143) == []
    assert elastic.added() == [("/usr/bin/ssh", "n1")]
    assert elastic.says(1, line, STDOUT) == [], "another process has its output"
    assert elastic.says(2, line, STDOUT) == [KeyTold(1, b"\xab" * 32)]
    assert missing(elastic.ends(2, code=255))[0][0] == (1,)
    elastic.starters.reach(1)
    assert elastic.told() == [KeyTold(1, b"")]
    assert elastic.added() == [("/usr/bin/ssh", "n1")], "at once, as nothing is left of the last"
    assert elastic.starters.deadline_s is None


def test_a_program_that_does_not_want_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("dsl.agent.starters.time.monotonic", lambda: now_s[0])
    elastic = Stage(*ELASTIC)
    elastic.starters.reach(0)
    elastic.starters.reach(0)
    assert elastic.signals() == [(15, 0)], "once"
    due_s = elastic.starters.deadline_s
    assert due_s == now_s[0] + KILL_S
    elastic.starters.go_on(due_s - 1)
    assert elastic.signals() == []
    elastic.starters.go_on(due_s)
    assert elastic.signals() == [(9, 0)]
    elastic.exits(0, signal=9)
    assert (elastic.added(), elastic.starters.deadline_s) == ([("/usr/bin/ssh", "n0")], None)


def test_a_program_that_cannot_be_added_is_missing_and_may_be_tried_again() -> None:
    elastic = Stage(*ELASTIC)
    elastic.ends(0, code=255)
    add = elastic.supervisor.add
    add.side_effect = EngineError("no processes are left")
    elastic.starters.reach(0)
    assert missing(elastic.told()) == [((0,), "no processes are left")]
    add.side_effect = [2]
    elastic.starters.reach(0)
    assert elastic.told() == []


def test_an_agent_that_runs_on_by_itself_is_not_missing() -> None:
    many = Stage(*MANY)
    assert many.ends(1, code=0) == []
    assert missing(many.ends(0, code=255))[0][0] == (0,)
    assert missing(Stage(*ELASTIC).ends(1, code=0))[0][0] == (1,)


def test_the_group_ends_with_the_last_program_and_those_of_lost_hosts_are_ended() -> None:
    assert not Stage(*SSH).starters.end([0]), "it ends by itself"
    elastic = Stage(*ELASTIC)
    elastic.starters.reach(1)
    elastic.signals()
    assert elastic.starters.end([0, 1])
    assert elastic.signals() == [(15, 0)]
    elastic.exits(1, code=143)
    assert (elastic.added(), elastic.supervisor.stop.called) == ([], False)
    elastic.exits(0, code=143)
    assert elastic.supervisor.stop.called
    many = Stage(*MANY)
    assert many.starters.end([])
    assert many.supervisor.stop.called, "no agent needs its program, and some programs may not have begun"


def test_a_long_line_of_a_host_is_heard_whole() -> None:
    elastic = Stage(*ELASTIC)
    elastic.says(1, b"\x01" * (LONGEST_LINE - 20) + b" ends here\n")
    assert "ends here (exit code 1)" in missing(elastic.ends(1, code=1))[0][1]


def test_files_are_for_this_user_alone_and_go_with_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    files = [((f"{folder}_{rank}/hosts", f"n{rank}\n"),) for rank in range(2)]
    starts = [Start(argv=("mpirun",), node_rank=rank, files=some) for rank, some in enumerate(files)]
    stage = Stage(*starts)
    one, plan = stage.starters, stage.plan
    assert one.prepare(plan) is plan
    folder = tmp_path / "run_1"
    assert (folder / "hosts").read_text() == "n1\n"
    assert folder.stat().st_mode & 0o777 == 0o700
    one.finish(succeeded=True)
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    with pytest.raises(LauncherError, match=f"cannot write {folder} for the launcher: File exists"):
        one.prepare(plan)
    one.finish(succeeded=True)
    assert folder.exists(), "it is not ours"


def test_hosts_that_are_listed_later_have_programs_of_their_own() -> None:
    """The last program of the plan is another one, whose numbers the others do not get."""
    stage = Stage(*ELASTIC, beside=Start(("python", "-c", "list")))
    assert [worker.argv[0] for worker in stage.plan.workers] == ["/usr/bin/ssh", "/usr/bin/ssh", "python"]
    more = Start(argv=("/usr/bin/ssh", "n2"), node_rank=2)
    stage.starters.extend(a_job(1, 1, 1), [*ELASTIC, more])
    assert stage.added() == []
    stage.supervisor.add.side_effect = EngineError("no")
    stage.starters.reach(2)
    assert missing(stage.told()) == [((2,), "no")]
    stage.supervisor.add.side_effect = count(3)
    stage.added()
    stage.starters.reach(2)
    assert stage.added() == [("/usr/bin/ssh", "n2")]
    stage.exits(3, code=255)
    assert missing(stage.says(3, b"")) == [
        ((2,), "cannot be reached, check that `ssh n2 true` works without a password")
    ]
    stage.starters.reach(2)
    assert stage.added() == [("/usr/bin/ssh", "n2")]
