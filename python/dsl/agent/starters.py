"""The programs that reach the hosts of a job: what they say, why one has ended, and what to tell the user.

The head's engine supervises these programs. If they come and go, because hosts do or because there are more
hosts than ssh reaches at once, the group stays open: a program is added when its host is reached again.
"""

from __future__ import annotations

import os
import socket
import time

from dsl import EngineError, Exited, Output, Started
from dsl._record import replace
from dsl.agent.planner import worker_spec
from dsl.control.hub import KEY_BYTES
from dsl.errors import LauncherError
from dsl.launchers.base import ENDED, bare, plan_starts
from dsl.launchers.ssh import DENIED, GIVES_UP, SSH_FAILED
from dsl.launchers.table import BY_SSH, OF_ALL
from dsl.model.job import Notice
from dsl.plan.worker import without_ranks
from dsl.report.verdict import reason
from dsl.words import TASKS, parse_number, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsl import Exit, Supervisor
    from dsl.launchers.base import Start
    from dsl.model.job import Job, NodePlan

ANNOUNCEMENT = "dsl-agent"
"""First word of the line in which an agent tells its key through the program that started it."""

MARGIN_S = 5.0
"""Seconds added to the grace of the workers, for messages over the network."""

KEPT_LINES = 20
"""How many first lines, and how many last lines, we keep of a program's output."""

LONGEST_LINE = 2000
"""Bytes of a line that we read."""

KILL_S = 3.0
"""A program that we have told to end gets this long before it is killed."""

LAST_WORDS_S = 0.5
"""How long we wait for a program's last output: another process may still hold its stderr open."""

WAITING_BYTES = 1 << 20
"""So much of what an agent has sent may wait in the kernel, if that allows it: its ssh seldom waits."""

STDERR = 2
SIGKILL, SIGTERM = 9, 15


class LineCutter:
    """Cuts a stream into lines of at most ``longest`` bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes, without blank ones. No data is the end of the stream."""
        *lines, rest = (self._rest + data).split(b"\n")
        if not data:
            lines, rest = [rest], b""
        self._rest = rest[-self._longest :]
        texts = [line[: self._longest].decode(errors="replace").strip("\r") for line in lines]
        return [text for text in texts if text.strip()]


class Starter:
    """A program that reaches one host, or all hosts."""

    def __init__(self, start: Start, node_ranks: Sequence[int]) -> None:
        """``node_ranks``: the node rank of each place."""
        self.start = start
        self.name = os.path.basename(start.argv[0])
        self.places = tuple([place for place, one in enumerate(node_ranks) if start.node_rank in (None, one)])
        self.is_ssh = start.node_rank is not None and self.name in BY_SSH
        self.is_of_host = start.node_rank is not None and self.name not in OF_ALL
        """What it writes comes from its one host, or is about it."""
        self.labels: dict[str, list[int]] = {}
        """Prefixes of the lines of a host, each with the places on that host."""
        for label, node_rank in start.labels:
            mine = [place for place in self.places if node_ranks[place] == node_rank]
            self.labels.setdefault(label, []).extend(mine)
        self.lines: list[str] = []
        self.streams = {1: LineCutter(LONGEST_LINE), STDERR: LineCutter(LONGEST_LINE)}
        self.fd: int | None = None
        """Our copy of the descriptor that the program gets as stdin, until the program runs."""
        self.exit: Exit | None = None
        """How it ended, until that is reported."""
        self.due_s = 0.0
        """Latest `time.monotonic` at which to report its exit."""
        self.is_silent = False
        """Its stderr has ended."""
        self.has_ended = False
        self.is_replaced = False
        """Its host is reached again: neither what it says nor how it ends matters."""
        self.kill_s: float | None = None
        """`time.monotonic` when it is killed; None: it was not told to end."""

    def connect(self) -> int:
        """Our end of a connection to its stdin. Raises OSError."""
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WAITING_BYTES)
        self.fd = theirs.detach()
        return ours.detach()

    def let_go(self) -> None:
        """Close our copy of the program's end of the connection."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def about(self, text: str) -> tuple[Sequence[int], str]:
        """The places of the host that a line comes from, and what the host says; unknown: no places."""
        label, _, said = text.partition(": ")
        if label in self.labels:
            return self.labels[label], said
        return self.places if self.is_of_host and not text.startswith("pdsh@") else (), text

    def telling(self) -> list[str]:
        """What the program has said, up to its usage text."""
        for number, line in enumerate(self.lines):
            if number and line.lower().startswith("usage:"):
                return self.lines[:number]
        return self.lines

    def last_words(self) -> tuple[str, ...]:
        """What the program has said, each line behind its name."""
        return tuple([f"{self.name}: {line.removeprefix(f'{self.name}: ')}" for line in self.telling()])

    def said_by(self, place: int) -> list[str]:
        """What the host of a place has said."""
        return [said for places, said in map(self.about, self.telling()) if place in places]

    def why_lost(self, exit_: Exit) -> str:
        """How the program has ended, if its agents are still there."""
        if exit_.signal is not None:
            return f"{self.name} was {reason(exit_)}"
        said = f": {self.lines[-1]}" if self.lines else ""
        return f"{self.name} has ended with {exit_.status}{said}"


class Starters:
    """All programs that reach the hosts of a job: the source of the head's one plan.

    They take the engine's events, and call the head when something follows from one.
    """

    tell: Callable[[Notice], None]
    """Tells the user something."""
    let_in: Callable[[int, bytes], None]
    """An agent has told its place, and the key with which it will connect."""
    miss: Callable[[Sequence[int], str, Sequence[str]], None]
    """Agents at these places that have not come so far will not come. The reason stands behind the name of
    the host. Then follows what the program has said, if that is more than fits into the reason."""
    beside: Start | None = None
    """Another program, which runs beside them as the last of the plan; others hear its events."""
    lose: Callable[[str], None]
    """The program that reaches all hosts was killed. Processes that it leaves behind may end the agents."""

    def __init__(
        self,
        job: Job,
        starts: Sequence[Start],
        node_ranks: Sequence[int],
        environ: Mapping[str, str],
        at_once: int,
    ) -> None:
        """Raises OSError: no descriptors are left.

        ``node_ranks``: the node rank of each place. ``at_once``: how many programs run at a time, if they end
        as soon as their agents run on by themselves.
        """
        self.job = job
        signals, preempt_s = job.signals, job.signals.preempt_grace_s
        preempt_s = None if preempt_s is None else preempt_s + MARGIN_S
        signals = replace(signals, grace_s=signals.grace_s + MARGIN_S, preempt_grace_s=preempt_s)
        self._planned = replace(job, signals=signals, stacks_on_failure=False)
        """The job of the plan: the programs take longer to end than their workers, and have no stacks."""
        self._node_ranks = node_ranks
        unset = {name for start in starts for name in start.unset}
        # An agent takes its place from them: those of its launcher, not of one around this command.
        outer = without_ranks(environ, TASKS[:-1])
        self._environ = {name: value for name, value in outer.items() if name not in unset}
        self._programs = {number: Starter(start, node_ranks) for number, start in enumerate(starts)}
        """By the engine's numbers, the latest program of each host last."""
        self._detaches = any(start.detaches for start in starts)
        self._at_once = at_once if self._detaches else None
        self._stays_open = any(start.node_rank is not None and not start.speaks for start in starts)
        self._is_ending = False
        self._unused: dict[int, Start] = {}
        """Programs that were never started, by place."""
        self.supervisor: Supervisor
        """That of the head, from the begin of its agent on."""
        self.streams: dict[int, int] = {}
        """Our descriptor of the connection to each agent that talks over its program's streams, by place."""
        self.told: set[int] = set()
        """Places for which the user was told why no agent has come."""
        self._keyed: set[int] = set()
        """Places whose agents have told their keys."""
        self._has_warned = False
        self._made: list[tuple[Callable[[str], None], str]] = []
        """Files and directories that we have made, each with the call that removes it."""
        self.why_lost = ""
        """How the last program that has ended did so."""
        for program in self._programs.values():
            if program.start.speaks:
                self.streams[program.places[0]] = program.connect()

    def plan(self, attempt: int) -> NodePlan:  # noqa: ARG002  there is only one
        """What the engine has to start. The agents learn of signals to the job in other ways."""
        starts, fds = zip(*[(one.start, one.fd) for one in self._programs.values()], strict=True)
        if self.beside is not None:
            starts, fds = (*starts, self.beside), (*fds, None)
        plan = self._plan_of(starts, fds)
        group = replace(plan.group, tells_signals=True, stays_open=self._stays_open)
        return replace(plan, group=group)

    def _plan_of(self, starts: Sequence[Start], fds: Sequence[int | None]) -> NodePlan:
        names = [host.name for host in self.job.hosts]
        return plan_starts(self._planned, starts, names, fds, self._environ, at_once=self._at_once)

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Write the files that the programs read, for this user alone. Raises LauncherError."""
        files = [entry for program in self._programs.values() for entry in program.start.files]
        try:
            for folder in dict.fromkeys([os.path.dirname(path) for path, _ in files]):
                os.mkdir(folder, 0o700)
                self._made.append((os.rmdir, folder))
            for path, text in files:
                with open(path, "x", encoding="utf-8", errors="surrogateescape") as file:
                    self._made.append((os.unlink, path))
                    file.write(text)
        except OSError as error:
            where = error.filename or "a file"
            raise LauncherError(f"cannot write {where} for the launcher: {error.strerror}") from None
        return plan

    def finish(self, *, succeeded: bool) -> None:  # noqa: ARG002  as every source
        """Remove the files and directories."""
        while self._made:
            remove, path = self._made.pop()
            try:
                remove(path)
            except OSError:
                continue  # the other process of the command has removed it

    def tidy(self) -> None:
        """There is nothing to remove."""

    def disown(self) -> None:
        """Close the connections in the guard: they belong to the agent."""
        for program in self._programs.values():
            program.let_go()

    # ------------------------------------------------------------------ orders

    def extend(self, job: Job, starts: Sequence[Start]) -> None:
        """Know the programs of more hosts, each a place of its own. `reach` starts them."""
        new = range(len(self._node_ranks), len(job.hosts))
        self.job, self._node_ranks = job, (*self._node_ranks, *new)
        self._unused.update({place: starts[place] for place in new})

    def reach(self, place: int) -> None:
        """Start the program of a host, or start it again, once the last one has ended."""
        if place in self._keyed:  # the next agent has another key, and may call before it says which
            self._keyed.remove(place)
            self.let_in(place, b"")
        if place in self._unused:
            if self._add(self._unused[place], (place,)):
                del self._unused[place]
            return
        worker, last = [found for found in self._programs.items() if place in found[1].places][-1]
        last.is_replaced = True
        if last.has_ended:
            self._replace(worker)
        else:
            self._stop(worker)

    def end(self, places: Sequence[int]) -> bool:
        """End the programs of these places now, and the group with the last one. False: it ends by itself."""
        if not self._stays_open:
            return False
        self._is_ending = True
        for worker, program in self._programs.items():
            if not program.has_ended and not set(program.places).isdisjoint(places):
                self._stop(worker)
        self._end_with_the_last()
        return True

    def _replace(self, worker: int) -> None:
        """Start a program that has ended again, and forget what it has said."""
        last = self._programs[worker]
        if self._add(last.start, last.places):
            del self._programs[worker]

    def _add(self, start: Start, places: Sequence[int]) -> bool:
        """Start a program for these places beside the others. Whether that was possible."""
        plan = self._plan_of([start], [None])
        try:
            added = self.supervisor.add(worker_spec(plan, plan.workers[0]))
        except EngineError as error:
            self.miss(places, str(error), ())
            return False
        self._programs[added] = Starter(start, self._node_ranks)
        return True

    def _stop(self, worker: int) -> None:
        program = self._programs[worker]
        if program.kill_s is None:
            program.kill_s = time.monotonic() + KILL_S
            self.supervisor.signal(SIGTERM, worker)

    def _end_with_the_last(self) -> None:
        """End the group if no program is left, or if those that are left were not started by now."""
        is_last = self._detaches or all(program.has_ended for program in self._programs.values())
        if self._is_ending and is_last:
            self.supervisor.stop(grace_s=KILL_S)

    # ------------------------------------------------------------------ what is heard

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when to call `go_on`; None: nothing is due."""
        programs = self._programs.values()
        due = [one.due_s for one in programs if one.exit is not None]
        due += [one.kill_s for one in programs if one.kill_s is not None and not one.has_ended]
        return min(due, default=None)

    def last_words(self, places: Sequence[int]) -> list[str]:
        """What these places have said, or the programs that mark no lines, if the user does not know it."""
        found: list[str] = []
        for program in () if self._stays_open else self._programs.values():  # lost hosts were told at once
            mine = [place for place in program.places if place in places and place not in self.told]
            if mine and not program.is_ssh and not program.labels:
                found += program.last_words()
            found += [f"{self._host(one)}: {line}" for one in mine for line in program.said_by(one)]
        return found[-KEPT_LINES:]

    def go_on(self, now_s: float) -> None:
        """Kill programs that do not end, and report those whose last words were awaited long enough."""
        for worker, program in self._programs.items():
            if program.kill_s is not None and program.kill_s <= now_s and not program.has_ended:
                program.kill_s += KILL_S
                self.supervisor.signal(SIGKILL, worker)
        for program in [one for one in self._programs.values() if one.due_s <= now_s]:
            self._conclude(program)

    def hear(self, event: object) -> None:
        """Take note of an event of the engine."""
        if isinstance(event, Started):
            self._programs[event.worker].let_go()
        elif isinstance(event, Exited):
            self._hear_exit(event.exit)
        elif isinstance(event, Output):
            program = self._programs.get(event.worker)
            if program is not None and not program.is_replaced:
                self._hear_output(program, event)

    def _hear_output(self, program: Starter, event: Output) -> None:
        for text in program.streams[event.stream].feed(event.data):
            self._hear_line(program, text)
        if not event.data and event.stream == STDERR:
            program.is_silent = True
            self._conclude(program)

    def _hear_exit(self, exit_: Exit) -> None:
        program = self._programs[exit_.worker]
        program.let_go()
        program.has_ended = True
        if program.is_replaced and not self._is_ending:
            self._replace(exit_.worker)
            return
        self._end_with_the_last()
        program.exit, program.due_s = exit_, time.monotonic() + LAST_WORDS_S
        if exit_.signal is not None and not exit_.caused_by_stop and program.start.node_rank is None:
            self.lose(program.why_lost(exit_))
        if program.is_silent or exit_.exec_errno is not None:
            self._conclude(program)

    def _conclude(self, program: Starter) -> None:
        """Report a program that has ended and written all its output."""
        exit_, program.exit = program.exit, None
        if exit_ is None or program.is_replaced:
            return
        self.why_lost = program.why_lost(exit_)
        status, serves_all = exit_.status, program.start.node_rank is None
        how = reason(exit_) if exit_.exec_errno is not None or exit_.signal is not None else ""
        # Agents that have not answered never will.
        if not how and status == 0 and (serves_all or program.start.detaches):
            return
        if not how and program.is_ssh:
            self._miss(program, program.places, status)
            return
        lines, name = program.telling(), program.name
        said = program.last_words() if serves_all and len(lines) > 1 else ()
        last = f": {lines[-1]}" if lines and not said else ""
        why = how or f"ended with {status} before its agent had answered{last}"
        self.miss(program.places, f"{name} {why}", said)

    def _hear_line(self, program: Starter, text: str) -> None:
        places, said = program.about(text)
        words = said.split()
        if not program.start.speaks and len(words) > 2 and words[-3].endswith(ANNOUNCEMENT):
            self._hear_key(program, places, *words[-2:])  # the user does not see a line with a key
            return
        if len(words) == 3 and words[0] == ENDED:
            # The program reports other codes itself, and if it serves one host, this code, too.
            if parse_number(words[1]) in places and parse_number(words[2]) == 0 and not program.is_ssh:
                self._miss(program, places, 0)
            return
        line = printable(text)[:LONGEST_LINE]
        program.lines.append(line)
        if len(program.lines) > 2 * KEPT_LINES:
            del program.lines[KEPT_LINES]
        rank = program.start.node_rank
        name = program.name if rank is None else self.job.hosts[rank].name
        self.tell(Notice("debug", f"{name}: {line}"))
        if not (program.is_ssh or program.labels) and (line.startswith(GIVES_UP) or DENIED in line):
            self._hear_ssh(program, line)
        label, status = _failed_host(line)
        if label in program.labels and status is not None:
            self._miss(program, program.labels[label], status)

    def _hear_ssh(self, program: Starter, line: str) -> None:
        """An ssh of this program gives up, and the program goes on. At best the line says on which host."""
        words = "".join([" " if mark in ":@," else mark for mark in line.lower()]).split()
        names = {place: bare(self._host(place)).rpartition("@")[2].lower() for place in program.places}
        places = [place for place, name in names.items() if name in words]
        way = f"ssh {self._host(places[0])}" if places else ""
        way = " ".join(program.start.argv[:-1]) if program.is_of_host else way  # the user's, in place of ssh
        why = unreachable(way, [line], SSH_FAILED) if places else f"{program.name}: {line}"
        self.miss(places or program.places, why, ())

    def _hear_key(self, program: Starter, places: Sequence[int], number: str, key: str) -> None:
        """Take a key that a host of these places has told, if the host is known. Each place has one key."""
        place = parse_number(number)
        try:
            secret = bytes.fromhex(key)
        except ValueError:
            return
        if place is None or len(secret) != KEY_BYTES:
            return
        if not places and program.labels and place in program.places:
            name = program.name
            why = f"{name} does not mark the lines of hosts with their names, so the agent's key was refused"
            mend = "take out what hides the names (-N, a wrapper)"
            self.miss((place,), f"{why}: {mend}", ())
        elif places and place in places and place not in self._keyed:
            self._keyed.add(place)
            self.let_in(place, secret)
        elif places and not self._has_warned:
            self._has_warned = True
            what = "a second key" if place in places else "the key of another place"
            self.tell(Notice("warning", f"host {self._host(places[0])} has told {what}: it was refused"))

    def _miss(self, program: Starter, places: Sequence[int], status: int) -> None:
        """The agents of one host are missing, because its ssh has ended."""
        self.miss(places, unreachable(f"ssh {self._host(places[0])}", program.said_by(places[0]), status), ())

    def _host(self, place: int) -> str:
        return self.job.hosts[self._node_ranks[place]].name


def _failed_host(line: str) -> tuple[str, int | None]:
    """The host and the code in ``pdsh@HERE: HOST: ssh exited with exit code N``."""
    head, _, code = line.rpartition(": ssh exited with exit code ")
    return head.partition(": ")[2] if head.startswith("pdsh@") else "", parse_number(code)


def unreachable(way: str, lines: Sequence[str], status: int) -> str:
    """Why a host has no agent, judged by the output of ssh. ``way``: the words that reach the host."""
    last = lines[-1] if lines else ""
    if status == SSH_FAILED:
        said = f": {last}" if last else ""
        return f"cannot be reached{said}, check that `{way} true` works without a password"
    mend = ""
    if "No module named" in last:
        mend = ", install the same version of dsl there"
    elif status == 127:
        mend = ", the same interpreter has to be there (python=PATH in the hostfile names another)"
    return f"its agent did not start: {last or 'it printed nothing'} (exit code {status}){mend}"
