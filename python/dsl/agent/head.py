"""The head of a job on several hosts: starts the hosts' agents and carries out the conductor's orders.

To the agent that runs here, the head is the source of the one plan, a channel, and a listener. That agent
supervises the programs that reach the hosts, such as one ssh per host.
"""

from __future__ import annotations

import os
import time

from dsl import Ended, Exited, Output, SignalReceived, Started, Stopping
from dsl._record import record
from dsl.agent.conductor import Dismiss, Send, Speak
from dsl.agent.policy import GO_ON
from dsl.conductor.judge import Clocks
from dsl.control.hub import KEY_BYTES
from dsl.control.messages import Hello, Lost
from dsl.launchers.base import ENDED
from dsl.lists import parse_number
from dsl.model.job import Notice
from dsl.model.outcome import Decision, Membership, Outcome
from dsl.model.request import LEVELS
from dsl.plan.reaching import Reaching, plan_reaching
from dsl.printable import printable
from dsl.report import speak
from dsl.report.speak import say
from dsl.report.verdict import cause_last, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsl import Exit, Supervisor
    from dsl.agent.agent import Policy
    from dsl.agent.conductor import Conductor
    from dsl.control.hub import Hub
    from dsl.control.link import Link
    from dsl.launchers.base import Start
    from dsl.model.job import Job
    from dsl.model.node import NodePlan
    from dsl.model.outcome import History

ENDING_S = 2.0
"""When all agents have ended, ssh and similar programs that still run get this long to obey SIGTERM."""

ANNOUNCEMENT = "dsl-agent"
"""First word of the line in which an agent tells its key through its launcher's ssh."""

UNREACHABLE = "dsl-unreachable"
"""First word of the line about a host that one of many ssh processes could not reach."""

KEPT_LINES = 20
"""How many first lines, and how many last lines, we keep of such a program's output."""

LONGEST_LINE = 500

LAST_WORDS_S = 0.5
"""How long we wait for a program's last output: another process may still hold its stderr open."""

SSH_FAILED = 255
STDERR = 2


@record
class HeadDecided:
    """The head has decided something about the programs that it has started."""

    decision: Decision


def decide_for(conductor: Conductor) -> Policy:
    """The policy of a head: the job ends as the conductor says."""

    def decide(history: History, event: object, membership: Membership) -> Decision:  # noqa: ARG001
        if isinstance(event, HeadDecided):
            return event.decision
        if isinstance(event, Ended):
            return Decision("end", code=1 if conductor.code is None else conductor.code)
        return GO_ON

    return decide


class Program:
    """One of the programs that reach the hosts, and what it has said."""

    def __init__(self, start: Start, places: Mapping[int, int]) -> None:
        """``places``: the places of its agents, each with its node rank."""
        self.start = start
        self.places = tuple(places)
        self.labels: dict[str, list[int]] = {}
        """Prefixes that it writes before the lines of a host, each with the places on that host."""
        of_host: dict[int, list[int]] = {}
        for place, node_rank in places.items():
            of_host.setdefault(node_rank, []).append(place)
        for label, node_rank in start.labels:
            self.labels.setdefault(label, []).extend(of_host.get(node_rank, ()))
        self.lines: list[str] = []
        self.rest = {1: b"", 2: b""}
        self.fds: list[int] = []
        self.exit: Exit | None = None
        self.due_s = 0.0
        """Latest `time.monotonic` at which to tell the conductor of the exit."""
        self.is_silent = False
        """Its stderr has ended."""


class Head:
    """Source, channel and listener of the agent that runs on the host where a job was launched."""

    max_restarts = 0
    """The programs that reach the hosts are not restarted."""
    longest_line = LONGEST_LINE

    def __init__(
        self, job: Job, conductor: Conductor, starts: Sequence[Start], hub: Hub, environ: Mapping[str, str]
    ) -> None:
        """Make the connections of programs that speak. Raises OSError: no descriptors are left."""
        self.job = job
        self.conductor = conductor
        self._hub = hub
        hub.agents = len(conductor.places)
        self._environ = environ
        self._links: dict[int, Link] = {}
        self._programs = []
        self._decisions: list[HeadDecided] = []
        self._dismissal_s: float | None = None
        self._supervisor: Supervisor | None = None
        self._is_orphan = False
        self._guard = 0
        self.on_finish: Callable[[], None] | None = None
        """Called to remove what was made for the programs."""
        self._keyed: set[int] = set()
        """Places whose agents have told their keys."""
        self._has_warned = False
        for start in starts:
            mine = {
                place: one.node_rank
                for place, one in enumerate(conductor.places)
                if start.node_rank in (None, one.node_rank)
            }
            program = Program(start, mine)
            if start.speaks:
                self._connect(program)
            self._programs.append(program)
        self._exited: list[Program] = []
        """Ended programs of which the conductor has to hear."""
        self._why_lost = ""

    def _connect(self, program: Program) -> None:
        import socket

        from dsl.control.stream import FdStream

        ours, theirs = socket.socketpair()
        place = program.places[0]
        own, other = ours.detach(), theirs.detach()
        self._links[place] = self._hub.add(FdStream(own, own), self.conductor.name(place))
        self._links[place].place = place
        program.fds.append(other)

    # ------------------------------------------------------------------ source

    def plan(self, attempt: int) -> NodePlan | None:
        """Plan the programs that reach the hosts, in the only attempt."""
        if attempt:
            return None
        reaching = [
            Reaching(
                program.start.argv,
                self._host(program),
                program.start.env,
                program.fds[0] if program.fds else None,
            )
            for program in self._programs
        ]
        unset = {name for program in self._programs for name in program.start.unset}
        environ = {name: value for name, value in self._environ.items() if name not in unset}
        return plan_reaching(self.job, reaching, environ)

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Return the plan: everything was made before."""
        return plan

    def finish(self, *, succeeded: bool) -> None:  # noqa: ARG002  as every source
        """Remove what was made for the programs."""
        if self.on_finish is not None:
            self.on_finish()

    def membership(self) -> Membership:
        """All hosts."""
        return Membership(len(self.job.hosts))

    # ------------------------------------------------------------------ channel

    def fileno(self) -> int:
        """The descriptor of the hub."""
        return self._hub.fileno()

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when something is due."""
        if self._decisions:
            return 0.0
        due = [one for one in (self.conductor.deadline_s, self._dismissal_s) if one is not None]
        due += [program.due_s for program in self._exited]
        return min(due, default=None)

    def read(self) -> list[HeadDecided]:
        """Hear what the agents say, and do what follows."""
        for link, message in self._hub.read():
            self._hear_link(link, message)
        now_s = time.monotonic()
        for program in [one for one in self._exited if one.due_s <= now_s]:
            self._conclude(program)
        due_s = self.conductor.deadline_s
        if due_s is not None and due_s <= now_s and not self._hub.drain(0.0):
            self.conductor.wait_longer(now_s)
        self._obey(self.conductor.wait_is_over(now_s))
        if self._dismissal_s is not None and now_s >= self._dismissal_s:
            self._dismissal_s = None
            self._decisions.append(HeadDecided(Decision("stop", grace_s=ENDING_S)))
        decisions, self._decisions = self._decisions, []
        return decisions

    def _hear_link(self, link: Link | None, message: object) -> None:
        if link is None:
            if isinstance(message, Notice):
                self._speak(message)
            return
        place = link.place
        if isinstance(message, Hello):
            if place >= len(self.conductor.places) or not self.conductor.expects(place):
                self._refuse(link)
                return
            self._links[place] = link
        if self._links.get(place) is not link:
            return  # this link has not greeted us
        if isinstance(message, Lost) and self._is_unknown(place):
            return  # its program will end and say why
        self._note_clock(place, link)
        self._obey(self.conductor.hear(place, message, time.monotonic()))

    def _refuse(self, link: Link) -> None:
        """Refuse an agent whose place does not exist, or was taken by another agent."""
        text = f"an agent for place {link.place} has connected from {link.name}, where none is expected"
        self._warn(text)
        link.close()

    def _warn(self, text: str) -> None:
        """Warn about an unexpected connection or key, but only once."""
        if not self._has_warned:
            self._has_warned = True
            self._speak(Notice("warning", f"{text}: it was refused"))

    def _is_unknown(self, place: int) -> bool:
        return not self.conductor.has_greeted(place) and any(
            program.start.speaks and place in program.places for program in self._programs
        )

    def _note_clock(self, place: int, link: Link) -> None:
        clock = link.clock
        if clock is not None:
            self.conductor.clocks[place] = Clocks(clock.offset_ns, clock.error_ns)

    def _obey(self, orders: Sequence[object]) -> None:
        for order in orders:
            if isinstance(order, Send):
                link = self._links.get(order.place)
                if link is not None:
                    link.send(order.message)
            elif isinstance(order, Speak):
                self._speak(order.notice)
            elif isinstance(order, Dismiss):
                for link in self._links.values():
                    link.close()
                self._dismiss(order.within_s)

    def _dismiss(self, within_s: float) -> None:
        """Give the programs that reach the hosts ``within_s`` to end."""
        ends = self.conductor.is_complete and not any(one.start.lingers for one in self._programs)
        self._dismissal_s = time.monotonic() + (within_s if ends else 0.0)

    # ------------------------------------------------------------------ listener

    def hear(self, event: object) -> None:
        """Hear what happens here."""
        if isinstance(event, Stopping):
            if event.reason == "guard_lost":
                self._is_orphan = True
                self._speak(Notice("info", "the guard process is gone: ending the job on all hosts"))
        elif isinstance(event, SignalReceived):
            now_s = time.monotonic()
            self._obey(self.conductor.signal(event.signum, event.action, now_s, is_key=event.from_terminal))
        elif isinstance(event, Output):
            self._hear_output(self._programs[event.worker], event.stream, event.data)
        elif isinstance(event, Started):
            self._let_go(self._programs[event.worker])
        elif isinstance(event, Exited):
            program = self._programs[event.exit.worker]
            self._let_go(program)
            program.exit, program.due_s = event.exit, time.monotonic() + LAST_WORDS_S
            self._exited.append(program)
            self._hear_killed(program, event.exit)
            if program.is_silent or event.exit.exec_errno is not None:
                self._conclude(program)
        elif isinstance(event, Ended):
            for program in list(self._exited):
                self._conclude(program)
            if not self._is_orphan:
                self._hear_out()
            self._show_rest()
        elif isinstance(event, Outcome):
            self._end()

    def _hear_killed(self, program: Program, exit_: Exit) -> None:
        """Act at once: processes that the program leaves behind, such as an orted, may end the agents."""
        is_killed = exit_.signal is not None and not exit_.caused_by_stop
        if is_killed and program.start.node_rank is None and self.conductor.has_begun:
            self._obey(self.conductor.starters_lost(_why_lost(program, exit_), time.monotonic()))

    def _conclude(self, program: Program) -> None:
        """Handle a program that has ended and written all its output."""
        exit_, program.exit = program.exit, None
        if exit_ is None:
            return
        self._exited.remove(program)
        now_s = time.monotonic()
        if not (exit_.status == 0 and program.start.node_rank is None):
            self._pass_on(program)
            why = _why(program, exit_, self._host(program))
            self._obey(self.conductor.starter_ended(program.places, why, now_s))
        self._why_lost = _why_lost(program, exit_)

    def _pass_on(self, program: Program) -> None:
        """Show what a launcher said that ended before its agents answered, if it said more than a line."""
        said = _telling(program.lines)
        is_awaited = any(self.conductor.is_awaited(place) for place in program.places)
        if is_awaited and len(said) > 1 and not program.start.speaks:
            name = os.path.basename(program.start.argv[0])
            for line in said:
                self._speak(Notice("critical", f"{name}: {line.removeprefix(f'{name}: ')}"))

    def _host(self, program: Program) -> str:
        rank = program.start.node_rank
        return "" if rank is None else self.job.hosts[rank].name

    @staticmethod
    def _let_go(program: Program) -> None:
        """Close our copy of the program's end of the connection."""
        for fd in program.fds:
            os.close(fd)
        program.fds.clear()

    def _hear_output(self, program: Program, stream: int, data: bytes) -> None:
        *lines, program.rest[stream] = (program.rest[stream] + data).split(b"\n")
        if not data and program.rest[stream]:
            lines.append(program.rest[stream])
        for line in lines:
            text = line.decode(errors="replace").strip("\r")
            heard = self._hear_announcement(program, text) or self._hear_unreachable(program, text)
            if not heard and not self._hear_agent_ended(program, text) and text.strip():
                self._hear_line(program, printable(text[: self.longest_line]))
        program.rest[stream] = program.rest[stream][-self.longest_line :] if data else b""
        if not data and stream == STDERR:
            program.is_silent = True
            self._conclude(program)

    def _hear_announcement(self, program: Program, text: str) -> bool:
        """Hear ``HOST: dsl-agent PLACE KEY``, which comes through the launcher's ssh."""
        label, _, said = text.partition(": ")
        places = program.labels.get(label)
        return places is not None and self._take_key(places, said)

    def _take_key(self, places: Sequence[int], text: str) -> bool:
        """Take the key in ``dsl-agent PLACE KEY``, said by a host of these places. Each place has one key."""
        words = text.split()
        if len(words) < 3 or words[-3] != ANNOUNCEMENT:
            return False
        place = parse_number(words[-2])
        try:
            key = bytes.fromhex(words[-1])
        except ValueError:
            return False
        if place is None or len(key) != KEY_BYTES:
            return False
        if place not in places or place in self._keyed:
            name = self.conductor.name(places[0]) if places else "a host"
            what = "a second key" if place in places else "the key of another place"
            self._warn(f"{name} has told {what}")
            return True
        self._keyed.add(place)
        self._hub.expect(place, key)
        return True

    def _hear_agent_ended(self, program: Program, text: str) -> bool:
        """Hear ``HOST: dsl-agent-ended PLACE CODE``. The launcher itself reports codes other than 0."""
        label, _, said = text.partition(": ")
        words = said.split()
        if len(words) != 3 or words[0] != ENDED:
            return False
        place, code = parse_number(words[1]), parse_number(words[2])
        if place is not None and place in program.labels.get(label, ()) and code == 0:
            host = self.job.hosts[self.conductor.places[place].node_rank].name
            self._obey(self.conductor.starter_ended([place], unreachable(host, (), 0), time.monotonic()))
        return True

    def _hear_unreachable(self, program: Program, text: str) -> bool:
        """Hear ``dsl-unreachable PLACE STATUS LAST-WORDS`` of the program that reaches many hosts by ssh."""
        words = text.split(maxsplit=3)
        if len(words) < 3 or words[0] != UNREACHABLE or not program.start.lingers:
            return False
        place, status = parse_number(words[1]), parse_number(words[2])
        if place is not None and place in program.places and status is not None:
            name = self.job.hosts[self.conductor.places[place].node_rank].name
            why = unreachable(name, [printable(word) for word in words[3:]], status)
            self._obey(self.conductor.starter_ended([place], why, time.monotonic()))
        return True

    def _hear_line(self, program: Program, text: str) -> None:
        line = printable(text[:LONGEST_LINE])
        program.lines.append(line)
        if len(program.lines) > 2 * KEPT_LINES:
            del program.lines[KEPT_LINES]
        host = self._host(program) or os.path.basename(program.start.argv[0])
        self._speak(Notice("debug", f"{host}: {line}"))
        name, status = _failed_host(line)
        failed = program.labels.get(name)
        if failed and status is not None:
            said = [one for one in program.lines if one.startswith(f"{name}: ")]
            said = [one.removeprefix(f"{name}: ") for one in said]
            why = unreachable(self.job.hosts[self.conductor.places[failed[0]].node_rank].name, said, status)
            self._obey(self.conductor.starter_ended(failed, why, time.monotonic()))

    def _speak(self, notice: Notice) -> None:
        if LEVELS[notice.level] >= LEVELS[self.job.log_level]:
            say(self.job.flavour.command, printable(notice.line))

    # ------------------------------------------------------------------ processes

    def enter(self, supervisor: Supervisor) -> None:
        """Serve the connections, in the agent."""
        self._supervisor = supervisor
        self._guard = os.getppid()
        self._hub.start()

    def _hear_out(self) -> None:
        """All programs that reach hosts have ended: tell living agents to end, and hear them out."""
        import select

        if self.conductor.is_done:
            return
        supervisor = self._supervisor
        assert supervisor is not None
        self._obey(self.conductor.starters_lost(self._why_lost, time.monotonic()))
        poller = select.poll()
        poller.register(self._hub.fileno(), select.POLLIN)
        poller.register(supervisor.fileno(), select.POLLIN)
        while not self.conductor.is_done:
            due_s = self.conductor.deadline_s
            left_ms = None if due_s is None else max(due_s - time.monotonic(), 0) * 1000 + 1
            poller.poll(left_ms)
            self.read()
            for event in supervisor.wait(0):
                if isinstance(event, SignalReceived):
                    self.hear(event)

    def disown(self) -> None:
        """Close the connections in the guard: they belong to the agent."""
        self._hub.disown()
        for program in self._programs:
            self._let_go(program)

    def _show_rest(self) -> None:
        """Wait until all received output is shown, a signal ends the wait, or the guard is gone."""
        while not self._is_orphan and not self._hub.drain(0.5):
            self._is_orphan = os.getppid() != self._guard
            for event in () if self._supervisor is None else self._supervisor.wait(0):
                if isinstance(event, SignalReceived) and event.action == "stop":
                    self._obey(self.conductor.cut_output(event.signum))
                    return

    def _end(self) -> None:
        """Say how the job has ended."""
        notices = [] if self._is_orphan else list(self.conductor.verdict)
        judgement = self.conductor.judgement
        if speak.end_path and judgement is not None:
            from dsl.report.handed import hand_judgement

            hand_judgement(judgement)
        if self.conductor.has_begun and os.isatty(STDERR):
            told = [notice.text for notice in notices if notice.level == "critical"]
            notices = [notice for notice in notices if notice.level != "critical"]
            notices += [Notice("critical", text) for text in cause_last(told)]
        for notice in notices:
            self._speak(notice)
        self._hub.close(0.0)


def _failed_host(line: str) -> tuple[str, int | None]:
    """The host and the code in ``pdsh@HERE: HOST: ssh exited with exit code N``."""
    head, _, code = line.rpartition(": ssh exited with exit code ")
    return head.partition(": ")[2] if head.startswith("pdsh@") else "", parse_number(code)


def _why(program: Program, exit_: Exit, host: str) -> str:
    """Why the agents are missing that a program should have started."""
    if exit_.exec_errno is not None or exit_.signal is not None:
        return f"{os.path.basename(program.start.argv[0])} {reason(exit_)}"
    lines = _telling(program.lines)
    if program.start.speaks:
        return unreachable(host, lines, exit_.status)
    name = os.path.basename(program.start.argv[0])
    said = f": {lines[0]}" if len(lines) == 1 else ""
    return f"{name} ended with {exit_.status} before its agent had answered{said}"


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """The lines before the usage text, if there are any."""
    for number, line in enumerate(lines):
        if number and line.lower().startswith("usage:"):
            return lines[:number]
    return lines


def _why_lost(program: Program, exit_: Exit) -> str:
    """How a program has ended whose agents are still there."""
    name = os.path.basename(program.start.argv[0])
    if exit_.signal is not None:
        return f"{name} was {reason(exit_)}"
    said = f": {program.lines[-1]}" if program.lines else ""
    return f"{name} has ended with {exit_.status}{said}"


def unreachable(host: str, lines: Sequence[str], status: int) -> str:
    """Why a host has no agent, judged by the output of ssh."""
    last = lines[-1] if lines else ""
    if status == SSH_FAILED:
        said = f": {last}" if last else ""
        return f"cannot be reached{said}, check that `ssh {host} true` works without a password"
    mend = ""
    if "No module named" in last:
        mend = ", install the same version of dsl there"
    elif status == 127:
        mend = ", the same interpreter has to be there (python=PATH in the hostfile names another)"
    return f"its agent did not start: {last or 'nothing was said'} (exit code {status}){mend}"
