"""``dsl-warm``: shows, ends and starts the warm fork servers of this user on this machine."""

from __future__ import annotations

import os
import sys

from dsl._record import replace
from dsl.cli.command import Command
from dsl.cli.jobs import table, terminal_width
from dsl.cli.options_warm import NAME, make_parser
from dsl.errors import DslError, OptionError, UsageError
from dsl.lists import counted, quote
from dsl.observe.table import duration, size
from dsl.observe.warm_servers import stop, warm_servers
from dsl.printable import printable
from dsl.report.speak import show_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from dsl.model.job import ForkServer, NodePlan
    from dsl.model.request import Request
    from dsl.observe.warm_servers import WarmServer

COMMAND = Command(NAME)
SCHEMA = 1
"""Raised when a key of the JSON is removed or changes its meaning; new keys may come at any time."""

TITLES = ("PID", "STATE", "MEMORY", "JOBS", "PROGRAM", "IMPORTS")
NONE = "there is no warm server of yours on this machine"
MOST_NAMES = 60
"""Characters of the names of modules that a row shows."""
IMPORT_S = 630.0
"""How long the imports may take."""
START_USAGE = "dsl-warm start [--preload MODULE,...] dsl|dslrun [OPTIONS] SCRIPT"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; ``argv`` does not include the program's name."""
    return COMMAND.run(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    own, line = split_line(argv)
    options = make_parser().parse_args(own)
    action, pids = "status" if options.action is None else options.action, options.pids
    if action not in ("status", "stop", "start"):
        raise OptionError(f"no such action: {quote(action)}, expected status, stop or start")
    for text, is_given, needed in (
        ("--json", options.json, "status"),
        ("--preload", options.preload is not None, "start"),
    ):
        if is_given and action != needed:
            raise OptionError(f"{text} is for dsl-warm {needed}")
    if action == "start":
        return _start(line, options.preload)
    if action == "stop":
        return _stop(pids)
    if pids:
        raise OptionError(f"status takes no pid: {quote(pids[0])}")
    return _status(as_json=options.json)


def split_line(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words behind ``start``: first our options, then the command line of the job."""
    if list(argv[:1]) != ["start"]:
        return list(argv), []
    valued = make_parser().valued()
    index = 1
    while index < len(argv) and argv[index].startswith("-"):
        index += 2 if argv[index] in valued else 1
    return list(argv[:index]), list(argv[index:])


def _status(*, as_json: bool) -> int:
    servers = warm_servers(COMMAND.say)
    if as_json:
        from json import dumps

        show_text(dumps({"schema": SCHEMA, "servers": [*map(_fields, servers)]}, indent=2))
    elif servers:
        show_text("\n".join(table([TITLES, *map(row, servers)], terminal_width())))
    else:
        show_text(NONE)
    return 0


def _fields(server: WarmServer) -> dict[str, Any]:
    is_idle = server.state == "idle"
    may_end = is_idle and not server.holders
    return {
        "pid": server.pid,
        "state": server.state,
        "memory": server.memory,
        "jobs": server.jobs,
        "running": server.running,
        "idle_s": server.idle_s if is_idle else None,
        "holders": server.holders,
        "ends_in_s": max(server.stay_s - server.idle_s, 0.0) if may_end else None,
        "interpreter": server.interpreter,
        "program": server.program,
        "modules": list(server.modules),
    }


def row(server: WarmServer) -> tuple[str, ...]:
    """The cells of a server."""
    memory = size(server.memory)
    state: str = server.state
    if state == "busy":
        state = f"{counted(server.running, 'job')} running"
    elif state == "idle":
        left = duration(max(server.stay_s - server.idle_s, 0.0))
        end = f"held by {counted(server.holders, 'program')}" if server.holders else f"ends in {left}"
        state = f"idle {duration(server.idle_s)}, {end}"
    if server.state in ("importing", "no answer"):
        return (str(server.pid), state, memory, "-", "-", "-")
    names = ",".join(server.modules)
    names = names if len(names) <= MOST_NAMES else f"{names[:MOST_NAMES].rpartition(',')[0]},..."
    program = printable(server.program) or "-"
    return (str(server.pid), state, memory, str(server.jobs), program, printable(names) or "-")


def _stop(words: Sequence[str]) -> int:
    servers = warm_servers(COMMAND.say)
    for word in words:
        if word not in [str(one.pid) for one in servers]:
            raise UsageError(f"no warm server has the pid {quote(word)}, see dsl-warm status")
    chosen = [one for one in servers if not words or str(one.pid) in words]
    if not chosen:
        show_text(NONE)
        return 0
    left = stop(chosen)
    code = 0
    for one in chosen:
        if one not in left:
            show_text(f"server {one.pid} has ended")
        elif one.state == "busy":
            jobs = "its job" if one.running == 1 else f"its {one.running} jobs"
            show_text(f"server {one.pid} takes no more jobs, and ends after {jobs}")
        else:
            COMMAND.say(f"error: server {one.pid} has not ended")
            code = 1
    return code


def _start(line: Sequence[str], preload: str | None) -> int:
    from dsl.agent.warm import answer, call, digest_of, why_none

    servers = planned_servers(line, preload)
    import _signal  # type: ignore[import-not-found]  # what `signal` is made of, which has no stub

    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    calls = [(one, call(one, start_mask=mask, purpose="hold")) for one in servers]
    for server, found in calls:
        if found is None:
            raise DslError(f"no warm server can be started: {why_none()}")
        why = answer(found, IMPORT_S)
        if why:
            raise DslError(f"the warm server {why}")
        digest = digest_of(server)
        ready = [
            one for one in warm_servers() if one.name.startswith(f"{digest}-") and one.state != "importing"
        ]
        if not ready:
            raise DslError("the warm server has ended while it imported")
        names = ", ".join(ready[0].modules) or "nothing"
        is_new = "" if found.is_new else "was there: it "
        stay = duration(ready[0].stay_s)
        show_text(
            f"server {ready[0].pid} {is_new}has imported {printable(names)}, and stays {stay} without a job"
        )
    return 0


def planned_servers(line: Sequence[str], preload: str | None) -> tuple[ForkServer, ...]:
    """The warm servers that a command line needs. Exits with 2 for bad usage of that command.

    Raises:
        DslError: the command line is wrong, or its workers can have no warm server that is started here.
    """
    request = read_request(line)
    start = replace(request.start, method="warm")
    if preload is not None:
        start = replace(start, preload=tuple([one for one in preload.split(",") if one]))
    plan = _plan(replace(request, start=start))
    found = tuple([one for one in plan.fork_servers if one.warm is not None])
    if found:
        return found
    if request.program.kind == "program":
        raise DslError(f"no warm server for {request.program.script}, which is not run by Python")
    if plan.fork_servers:
        raise DslError("no warm server for workers that share its CPUs or memory: leave out the binding")
    raise DslError("no warm server for these workers, which are all executed")


def read_request(line: Sequence[str]) -> Request:
    """The request of a command line of ``dsl`` or ``dslrun``. Raises OptionError."""
    name = os.path.basename(line[0]) if line else ""
    if name == "dsl":
        from dsl.cli import deepspeed

        return deepspeed.read(line[1:], os.environ)[0]
    if name == "dslrun":
        from dsl.cli import torchrun

        return torchrun.read(line[1:], os.environ)[0]
    if not line:
        raise OptionError(f"no command line was given: {START_USAGE}")
    raise OptionError(f"{quote(line[0])} is neither dsl nor dslrun: {START_USAGE}")


def _plan(request: Request) -> NodePlan:
    from dsl.agent.planner import Planner
    from dsl.facts import this_machine
    from dsl.plan.job import plan_job

    facts = this_machine()
    planned = plan_job(request, facts)
    if planned.remote is not None or planned.job.meeting.backend:
        raise DslError("no warm server for a job on several hosts: jobs of one host alone can start one")
    return Planner(planned, facts).plan(0)
