"""``python -m dsl_launcher.node``: the agent on one host of a job, started by the head's launcher.

The agent introduces itself to the head, gets the whole job over the connection, and runs its part as `dsl`
runs a job on one host. Users never type this command: its options may change.
"""

from __future__ import annotations

import os
import sys

from dsl import LogNotice, Supervisor, __version__
from dsl._record import replace
from dsl.agent.member import Member
from dsl.agent.planner import Planner
from dsl.agent.preflight import assignment_problem, look, meeting_problem
from dsl.agent.session import Session, Side
from dsl.control.hub import FdStream, Hub, Link, connect
from dsl.control.messages import (
    Assignment,
    Bye,
    Checked,
    Hello,
    Lost,
    Over,
    Recorded,
    Refused,
    Said,
    TryWays,
    WaysTried,
)
from dsl.errors import ControlError, DslError
from dsl.facts import Facts
from dsl.launchers.base import FIRST_PLACE, PLACE
from dsl.machine import Console, Names, use_null
from dsl.model.job import Meeting, Notice
from dsl.model.observation import Look, Looked, SignalRank
from dsl.model.request import DEFAULT_HEARTBEAT_S
from dsl.plan.job import JobPlan
from dsl.plan.worker import shared_ranks
from dsl.report.narrator import Narrator
from dsl.report.speak import say
from dsl.words import TASKS, parse_number, parse_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsl.agent.roles import Channel, Listener
    from dsl.model.job import NodePlan
    from dsl.report.narrator import Show

COMMAND = "dsl"
KEY_VARIABLE = "DSL_CONTROL_KEY"
"""Variable with the key of the job, if the launcher passes variables on."""

RANK_VARIABLES = tuple([rank for rank, *_ in TASKS])
LOCAL_RANK_VARIABLES = tuple([local_rank for _, local_rank, *_ in TASKS])

CONNECT_S = 30.0
WORD_S = 600.0
"""An agent waits at most this long for a message of the head before its workers run."""

LEAST_SILENCE_S = 15.0
"""An agent that waits for its first workers gives a silent head at least this long."""

FAREWELL_S = 5.0
SCANCEL_S = 3.0
LOST = 1


VALUED = ("--connect", PLACE, FIRST_PLACE, "--heartbeat")
FLAGS = ("--stdio", "--detach", "--per-node", "--per-rank", "--own-allocation")


class AgentOptions:
    """The values of the command line."""

    def __init__(self, words: Sequence[str]) -> None:
        """Read the words. Raises DslError for a word that the head never writes."""
        given = dict.fromkeys(FLAGS, False)
        values = dict.fromkeys(VALUED, "")
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word in values and rest:
                values[word] = rest.pop(0)
            elif word in given:
                given[word] = True
            else:
                raise DslError(
                    f"dsl_launcher.node is started by dsl on another host, it does not know {word!r}"
                )
        self.addresses = tuple(values["--connect"].split(",")) if values["--connect"] else ()
        self.place = parse_number(values[PLACE])
        self.first_place = parse_number(values[FIRST_PLACE]) or 0
        self.heartbeat_s = parse_seconds(values["--heartbeat"]) or DEFAULT_HEARTBEAT_S
        self.detaches, self.owns_allocation = given["--detach"], given["--own-allocation"]
        self.per_rank = given["--per-rank"]
        self.has_variables = given["--per-rank"] or given["--per-node"]
        """The launcher passes variables on, and with them the key of the job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run this host's part of a job. Returns the exit code only if nothing was started."""
    try:
        return _run(AgentOptions(sys.argv[1:] if argv is None else argv))
    except DslError as error:
        say(COMMAND, f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(options: AgentOptions) -> int:
    environ = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    place, local_rank = place_of(options, environ)
    hub = Hub(options.heartbeat_s)
    link = _link(hub, options, place)
    os.environ.pop(KEY_VARIABLE, None)
    hello = Hello(
        __version__,
        place,
        os.uname().nodename,
        os.getpid(),
        is_task=options.per_rank,
        local_rank=local_rank,
        python=sys.executable,
    )
    link.send_now(hello)
    if options.detaches:
        from dsl.agent.background import stay_behind

        stay_behind()
    assignment = _await(link, WORD_S)
    if not isinstance(assignment, Assignment):
        return _end_early(link, assignment)
    try:
        allocation = environ.get("SLURM_JOB_ID", "") if options.owns_allocation and not local_rank else ""
        return _take_part(hub, link, assignment, environ, allocation)
    except DslError as error:
        link.send_now(Refused(str(error), error.exit_code))
        return error.exit_code


def _await(link: Link, patience_s: float, *, while_heard: bool = False) -> object:
    """The next message that says what to do. Views may look before this host has anything to show."""
    while True:
        message = link.receive(patience_s, while_heard=while_heard)
        if not isinstance(message, (Look, SignalRank)):
            return message
        link.send_now(Looked(message.number))


def _take_part(hub: Hub, link: Link, assignment: Assignment, environ: dict[str, str], allocation: str) -> int:
    problem = assignment_problem(assignment)
    if problem:
        raise DslError(f"the head of the job has said what cannot be: {problem}")
    facts = Facts(
        environ=environ,
        names=_PartNames(assignment),
        console=Console(assignment.stdout, assignment.stderr, is_relayed=True, is_one=assignment.is_one),
    )
    checked = look(assignment, facts, link.own_address)
    if assignment.examines:
        return _be_examined(link, assignment, facts, checked)
    if assignment.looks_first and not assignment.task:
        checked = _with_health(checked, assignment, facts)
    link.send_now(checked)
    if checked.problems:
        return _end_early(link, _await(link, WORD_S))
    if assignment.is_elastic:
        first = _await(link, max(hub.heartbeat_s, LEAST_SILENCE_S), while_heard=True)
    else:
        first = _await(link, WORD_S)
    if not isinstance(first, Meeting):
        return _end_early(link, first)
    _enter(assignment.cwd, environ)
    head = HeadLink(hub, link, facts.console, assignment, allocation)
    member = head.decider = Member(head, first)
    head.source = Part(JobPlan(assignment.job, assignment.node_rank), facts, assignment, member)
    recorder = None
    if assignment.records:
        from dsl.report.recorder import Recorder

        name = assignment.job.hosts[assignment.node_rank].name
        recorder = Recorder(lambda line: head.send(Recorded(line.decode())), "", name)
    return Session(head, recorder=recorder).run_guarded()


def _with_health(checked: Checked, assignment: Assignment, facts: Facts) -> Checked:
    """What we know of this host, with what the doctor finds here for ``--doctor-first``."""
    from dsl.doctor.host_checks import find_on_host
    from dsl.view import look_here

    job, node_rank = assignment.job, assignment.node_rank
    workers = len(job.hosts[node_rank].slots)
    health = look_here(job, facts.environ, facts, node_rank=node_rank, workers=workers, cwd=assignment.cwd)
    errors = [finding.line for finding in find_on_host(health) if finding.level == "error"]
    return replace(checked, problems=(*checked.problems, *errors), health=health)


def _be_examined(link: Link, assignment: Assignment, facts: Facts, checked: Checked) -> int:
    """Look at this host for ``--doctor``, and at the ways to the others. Returns the exit code."""
    from dsl.model.request import DEFAULT_MASTER_PORT
    from dsl.view import Porch, look_here, try_ways

    job, node_rank = assignment.job, assignment.node_rank
    is_open = not node_rank and checked.is_port_free  # the way to rank 0 is tried at its own port
    asked = DEFAULT_MASTER_PORT if job.meeting.port is None else job.meeting.port
    with Porch((asked, 0) if is_open else (0,)) as porch:
        workers = len(job.hosts[node_rank].slots)
        health = look_here(
            job, facts.environ, facts, node_rank=node_rank, workers=workers, cwd=assignment.cwd
        )
        health = replace(health, token=porch.token, port=porch.port)
        link.send_now(replace(checked, health=health))
        message = link.receive(WORD_S)
        if isinstance(message, TryWays):
            link.send_now(WaysTried(try_ways(message.targets)))
            message = link.receive(WORD_S)
    return _end_early(link, message)


def announcements(plan: NodePlan, assignment: Assignment) -> list[Notice]:
    """Notices for the user before the first attempt, once for each host; the head shows them."""
    if assignment.task:
        return []
    # In a log directory that the user has named, the first host's notice shows where all files are.
    is_known = assignment.node_rank > 0 and assignment.job.output.log_dir is not None
    notices = [notice for notice in plan.notices if not (is_known and notice.is_made)]
    said = [replace(notice, text=f"host {plan.host}: {notice.text}") for notice in notices]
    if assignment.is_elastic and assignment.job.debug.ranks:
        from dsl.plan.starting import attach_notices

        told = attach_notices(plan)
        said += [replace(notice, text=f"host {plan.host}: {notice.text}") for notice in told]
    if assignment.job.placement.names_devices:
        from dsl.report.plan import bindings_table

        said += [Notice("critical", f"host {plan.host}: {line}") for line in bindings_table(plan)]
    return said


def _enter(cwd: str, environ: dict[str, str]) -> None:
    """Change to the directory of the job, and set ``PWD`` as a shell does. Raises DslError on failure."""
    if not cwd:
        return
    try:
        os.chdir(cwd)
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise DslError(f"working directory {cwd!r} cannot be entered: {reason}") from None
    environ["PWD"] = cwd


def _end_early(link: Link, message: object) -> int:
    """End without workers: the head has ended the job, or is gone. Returns the exit code."""
    if isinstance(message, Over):
        link.send_now(Bye())
        return 0
    why = message.reason if isinstance(message, Lost) else "has said something else than was expected"
    say(COMMAND, f"error: the head of the job {why}")
    return LOST


def place_of(options: AgentOptions, environ: Mapping[str, str]) -> tuple[int, int]:
    """Our node rank, or our rank and local rank if we are a task of one rank."""
    if options.place is not None:
        return options.first_place + options.place, 0
    rank = _number(environ, RANK_VARIABLES)
    if rank is None:
        raise DslError(
            f"the launcher has set none of {', '.join(RANK_VARIABLES)}: it cannot place this agent"
        )
    return options.first_place + rank, _number(environ, LOCAL_RANK_VARIABLES) or 0


def _number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    found = [environ[name] for name in names if environ.get(name, "").isdecimal()]
    return int(found[0]) if found else None


def _link(hub: Hub, options: AgentOptions, place: int) -> Link:
    """The connection to the head. If it uses stdin and stdout, these become /dev/null for everything else."""
    if not options.addresses:
        ours = [os.dup(fd) for fd in (0, 1)]
        use_null(0, 1)
        return hub.add(FdStream(*ours), "the head")
    if options.has_variables:
        secret = _given_key()
    else:
        secret = os.urandom(32)
        os.write(1, f"dsl-agent {place} {secret.hex()}\n".encode())
    stream = connect(options.addresses, secret, place, CONNECT_S)
    if not options.has_variables and os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # now the head ends this agent, no longer the end of the connection that started it
    return hub.add(stream, "the head")


def _given_key() -> bytes:
    """The key of the job, from the environment. Raises DslError: something on the way has taken it away."""
    text = os.environ.get(KEY_VARIABLE, "")
    if not text:
        raise DslError(
            f"{KEY_VARIABLE} has not come to host {os.uname().nodename}: let the launcher, and what it runs "
            "there, pass variables on"
        )
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise DslError(f"{KEY_VARIABLE} holds no key: the launcher has changed it") from None


class _PartNames(Names):
    """Names of this machine; names of files are those of the whole job."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__()
        self.pid = assignment.pid
        self._assignment = assignment

    def stamp(self) -> str:
        """The time stamp of the head."""
        return self._assignment.stamp

    def count_run(self) -> int:
        """The command of the head runs one job."""
        return 0

    def random(self) -> str:
        """The token of the run."""
        return self._assignment.token


class Part(Planner):
    """A source of plans for the host, or the one rank of it, that the head has assigned."""

    def __init__(self, planned: JobPlan, facts: Facts, assignment: Assignment, member: Member) -> None:
        """Raises UsageError: the logs plug-in cannot be used."""
        super().__init__(planned, facts)
        self.meet_by(member)
        self._task = assignment.task
        self.shares_dirs = self._task is not None
        self._member = member

    def plan(self, attempt: int) -> NodePlan:  # noqa: ARG002  the head counts attempts over all hosts
        """Decide what this host starts in the attempt that the head has made the last meeting for.

        Raises:
            DslError: a wish cannot be fulfilled here.
        """
        meeting = self._member.meeting
        problem = meeting_problem(meeting, self.job.hosts[self._place])
        if problem:
            raise ControlError(f"the head of the job has said what cannot be: {problem}")
        ranks = {} if self._task is None else shared_ranks(self._facts.environ, meeting, self._task)
        return conducted(super().plan(meeting.attempt), self._task, ranks)


def conducted(plan: NodePlan, task: int | None, ranks: Mapping[str, str]) -> NodePlan:
    """The part of a node's plan that a conducted agent starts.

    ``task`` is the one local rank that it starts; None: all. ``ranks``: what the launcher has told this task.
    ``PMI_FD`` is the descriptor by which a program of MPICH's family talks to its process manager.
    """
    if task is not None and plan.fork_servers:
        from dsl.plan.starting import with_notice, without_fork_servers

        text = "start method forkserver has no effect on tasks of one rank each, give --one-agent-per-node"
        plan = with_notice(without_fork_servers(plan), "warning", text)
    workers = plan.workers if task is None else plan.workers[task : task + 1]
    env = {**ranks, **plan.env}
    pmi_fd = env.get("PMI_FD", "")
    if pmi_fd.isascii() and pmi_fd.isdecimal() and int(pmi_fd) > 2:
        workers = tuple([replace(worker, keep_fds=(int(pmi_fd),)) for worker in workers])
    run_dirs, pid_file = plan.run_dirs, plan.pid_file
    if task is not None:
        of_tasks = f"/attempt_{plan.meeting.attempt}/"
        run_dirs = tuple(
            [path for path in run_dirs if of_tasks not in path or path.endswith(f"{of_tasks}{task}")]
        )
        pid_file = pid_file if task == 0 else None
    workers = tuple([replace(worker, stdin=False) for worker in workers])
    return replace(
        plan,
        workers=workers,
        env=env,
        run_dirs=run_dirs,
        pid_file=pid_file,
        is_conducted=True,
    )


def at_head(send: Callable[[object], None]) -> Show:
    """Let the head show the narrator's lines, which it marks, if the user wants their level."""
    return lambda plan, text, level, _: send(Said(Notice(level, f"host {plan.host}: {text}")))


class HeadLink(Side):
    """The conversation with the head: it gets all messages, and has the user's console.

    ``allocation``: the Slurm job that was made for this job alone; this agent ends it if the head is lost.
    """

    decider: Member
    deadline_s = None
    is_visible = False

    def __init__(
        self, hub: Hub, link: Link, console: Console, assignment: Assignment, allocation: str = ""
    ) -> None:
        self._announced: list[Notice] = []
        """Notices that the head shows before the first attempt."""
        self._hub = hub
        self._link = link
        self._console = console
        self._assignment = assignment
        self._allocation = allocation
        self._is_served = self._has_lost_output = False

    def listeners(self, plan: NodePlan) -> list[Listener]:
        """The member, and a narrator whose lines the head shows."""
        self._announced = announcements(plan, self._assignment)
        return [self.decider, Narrator(plan, at_head(self.send), has_verdict=False)]

    def channels(self) -> list[Channel]:
        """The member, which hears the head."""
        return [self.decider]

    def fileno(self) -> int:
        """The descriptor of the hub."""
        return self._hub.fileno()

    def receive(self) -> list[object]:
        """The messages that have arrived."""
        return [message for _, message in self._hub.read()]

    def send(self, message: object) -> None:
        """Send a message."""
        self._link.send(message)

    def hear(self, event: object) -> None:
        """The head hears in the member's messages what it has to know; the last one tells of lost output."""
        self._has_lost_output |= isinstance(event, LogNotice) and event.kind == "file_failed"

    def stay(self) -> None:
        """Leave the connection to the agent: when the agent dies, the head sees it at once."""
        self._hub.disown()

    def enter(self, supervisor: Supervisor) -> None:  # noqa: ARG002  as of all hooks
        """Send the output of this process and its workers to the head, unless the head discards it."""
        ends = []
        for fd, kind in ((1, self._console.stdout), (2, self._console.stderr)):
            read, write = os.pipe2(os.O_CLOEXEC)
            if kind == "null":
                os.close(write)
                write = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(write, fd)
            os.close(write)
            ends.append(read)
        self._hub.relay(self._link, *ends)
        self._hub.start()
        self._is_served = True
        for notice in self._announced:
            self.send(Said(notice))

    def refuse(self, command: str, text: str, code: int) -> None:  # noqa: ARG002  the head has a name of its own
        """Let the head report it."""
        (self.send if self._is_served else self._link.send_now)(Refused(text, code))

    def leave(self, code: int) -> int:  # noqa: ARG002  the reports have told it to the head
        """Send the rest of the output, then the last message.

        The launcher always gets 0: for any other code Open MPI 4 takes three seconds to end, and Slurm ends
        agents that still send output.
        """
        self._hub.drain()
        self.send(Bye(self._has_lost_output))
        is_alone = self._link.is_lost
        self._hub.close(FAREWELL_S)
        if is_alone and self._allocation:
            end_allocation(self._allocation)
        return 0


def end_allocation(number: str) -> None:
    """End a Slurm job whose srun was killed: it would keep its nodes for ever."""
    import subprocess

    try:
        quiet = subprocess.DEVNULL
        command = ["scancel", "--quiet", number]
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=SCANCEL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return  # there is no scancel here, or it does not answer
