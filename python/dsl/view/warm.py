"""``dsl-warm``: shows, ends and starts the warm fork servers of this user on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

from dsl._core import warm_answer, warm_call
from dsl._record import Record, replace
from dsl.cli.tool import Tool, ToolParser
from dsl.errors import DslError, OptionError, UsageError
from dsl.machine import (
    MARK,
    MOST_AT_ONCE,
    NEW,
    READY,
    ask_sockets,
    left_alone,
    peer_pid,
    remove_socket,
    wait_for,
)
from dsl.machine.kernel import memory_of
from dsl.model.job import ForkServer, NodePlan
from dsl.model.request import Request
from dsl.report.speak import show_text
from dsl.view.table import duration, size
from dsl.view.tools import table, terminal_width
from dsl.words import counted, printable, quote

SCHEMA = 1
"""Raised when a key of the JSON is removed or changes its meaning; new keys may come at any time."""

NAMES = ("pid", "state", "memory", "jobs", "running", "holders", "interpreter", "program")
"""Keys of the JSON that are fields of a server."""

TITLES = ("PID", "STATE", "MEMORY", "JOBS", "PROGRAM", "IMPORTS")
NONE = "there is no warm server of yours on this machine"
MOST_NAMES = 60
"""Characters of the names of modules that a row shows."""
IMPORT_S = 630.0
"""How long the imports may take."""
ANSWER_S = 1.0
"""How long a server may take to answer."""
END_S = 5.0
"""How long a server without jobs may take to end."""
YOUNG_S = 10.0
"""A socket that is younger may belong to a server that begins."""
START_USAGE = "dsl-warm start [--preload MODULE,...] dsl|dslrun [OPTIONS] SCRIPT"


class WarmServer(Record):
    """A warm server."""

    folder: str
    """Folder of its socket."""
    name: str
    """Name of its socket."""
    pid: int
    """Its process."""
    state: Literal["idle", "busy", "importing", "no answer"]
    """Whether it has jobs, or why it has not said anything about itself."""
    memory: int
    """Bytes that it has for itself."""
    jobs: int = 0
    """Jobs that it has forked workers for."""
    running: int = 0
    """Those that run."""
    idle_s: float = 0.0
    """Seconds since it had its last job."""
    stay_s: float = 0.0
    """Seconds without a job after which it ends."""
    holders: int = 0
    """Programs that hold it: it does not end before them."""
    interpreter: str = ""
    """Its Python."""
    program: str = ""
    """The program whose workers it forks."""
    modules: tuple[str, ...] = ()
    """What it has imported."""


def _run(options: argparse.Namespace) -> int:
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
        return _start(options.words, options.preload)
    if action == "stop":
        return _stop(pids)
    if pids:
        raise OptionError(f"status takes no pid: {quote(pids[0])}")
    return _status(as_json=options.json)


def _status(*, as_json: bool) -> int:
    servers = warm_servers(WARM.say)
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
        **{name: getattr(server, name) for name in NAMES},
        "idle_s": server.idle_s if is_idle else None,
        "ends_in_s": max(server.stay_s - server.idle_s, 0.0) if may_end else None,
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
    servers = warm_servers(WARM.say)
    for word in words:
        if word not in [str(one.pid) for one in servers]:
            raise UsageError(f"no warm server has the pid {quote(word)}, see dsl-warm status")
    chosen = [one for one in servers if not words or str(one.pid) in words]
    if not chosen:
        show_text(NONE)
        return 0
    code = 0
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        have_ended = list(pool.map(_has_ended, chosen))
    for one, has_ended in zip(chosen, have_ended, strict=True):
        if has_ended:
            show_text(f"server {one.pid} has ended")
        elif one.state == "busy":
            jobs = "its job" if one.running == 1 else f"its {one.running} jobs"
            show_text(f"server {one.pid} takes no more jobs, and ends after {jobs}")
        else:
            WARM.say(f"error: server {one.pid} has not ended")
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
        raise DslError(f"no warm server for {request.program.script}, which is started as a program")
    if plan.fork_servers:
        raise DslError("no warm server for workers that share its CPUs or memory: leave out the binding")
    raise DslError("no warm server for these workers, which are all executed")


def read_request(line: Sequence[str]) -> Request:
    """The request of a command line of ``dsl`` or ``dslrun``. Raises OptionError."""
    name = os.path.basename(line[0]) if line else ""
    if name in ("dsl", "dslrun"):
        from dsl.cli import deepspeed, torchrun

        read = deepspeed.read if name == "dsl" else torchrun.read
        return read(line[1:], os.environ)[0]
    if not line:
        raise OptionError(f"no command line was given: {START_USAGE}")
    raise OptionError(f"{quote(line[0])} is neither dsl nor dslrun: {START_USAGE}")


def _plan(request: Request) -> NodePlan:
    from dsl.agent.planner import Planner, check_job
    from dsl.facts import this_machine
    from dsl.plan.job import plan_job

    facts = this_machine()
    planned = plan_job(request, facts)
    if planned.remote is not None or planned.job.meeting.way != "alone":
        raise DslError("no warm server for a job on several hosts: jobs of one host alone can start one")
    check_job(planned.job, facts)
    return Planner(planned, facts).plan(0)


def _add(parser: ToolParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="status as JSON, with keys that stay (docs/tools.md)")
    add(
        "--preload", metavar="MODULE,...", help="what the server imports (as the option of the job's command)"
    )
    add("action", nargs="?", metavar="status|stop|start", help="what to do (default: status)")
    add("pids", nargs="*", metavar="PID", help="servers to end (default: all)")


def warm_servers(tell: Callable[[str], None] | None = None) -> list[WarmServer]:
    """All warm servers, by their pids. Removes sockets that servers have left.

    ``tell`` hears of sockets whose process is not one of this user here: nothing is asked there.
    """
    found = ask_sockets(_ask, NEW, READY)
    for one in found:
        if tell is not None and isinstance(one, str):
            tell(one)
    return sorted([one for one in found if isinstance(one, WarmServer)], key=lambda one: one.pid)


def _ask(place: tuple[str, str]) -> WarmServer | str | None:
    folder, name = place
    if name.endswith(NEW):
        # Not by a call: a server that imports would take it for that of its job.
        pid = _importing(name)
        if pid:
            return WarmServer(folder, name, pid, "importing", memory_of(pid))
        try:
            if time.time() - os.lstat(os.path.join(folder, name)).st_mtime < YOUNG_S:
                return None
        except OSError:
            return None
    try:
        fd = warm_call(folder, name, "tell")
    except (ConnectionRefusedError, ConnectionResetError):  # it has ended, or is just ending
        remove_socket(folder, name)
        return None
    except BlockingIOError:  # it is stopped, and too many calls wait
        pid = _importing(name)
        return WarmServer(folder, name, pid, "no answer", memory_of(pid)) if pid else None
    except PermissionError as error:
        return None if error.errno else left_alone(folder, name, error)
    except OSError:
        return None
    try:
        pid = peer_pid(fd)
    except OSError:  # it has ended meanwhile
        pid = 0
    answer = warm_answer(fd, ANSWER_S)
    if answer is not None:
        return parse(folder, name, pid, answer)
    if not os.path.exists(os.path.join(folder, name)) or not _is_server(pid, name):
        return None
    return WarmServer(folder, name, pid, "no answer", memory_of(pid))


def parse(folder: str, name: str, pid: int, answer: bytes) -> WarmServer:
    """A server by its socket, the pid that the kernel tells, and its answer."""
    line, _, about = answer.partition(b"\n")
    jobs, running, idle_ms, stay_ms, holders = map(int, line.split()[1:])
    interpreter, program, names = [*map(os.fsdecode, about.split(b"\0")), "", "", ""][:3]
    modules = tuple([module for module in names.split(",") if module])
    state: Literal["idle", "busy"] = "busy" if running else "idle"
    known = (jobs, running, idle_ms / 1000, stay_ms / 1000, holders, interpreter, program, modules)
    return WarmServer(folder, name, pid, state, memory_of(pid), *known)


def _importing(name: str) -> int:
    """Pid of the server that listens at this socket while it imports; 0: there is none."""
    found = [int(one) for one in os.listdir("/proc") if one.isdecimal() and _is_server(int(one), name)]
    return max(found, default=0)


def _is_server(pid: int, name: str) -> bool:
    """Whether a process of this user was started as the server with this socket."""
    stem = name.removesuffix(READY).removesuffix(NEW)
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().removesuffix(b"\0").split(b"\0")
    except OSError:
        return False
    return len(words) > 1 and words[-1].startswith(MARK.encode()) and words[-2] == os.fsencode(stem + NEW)


def _has_ended(server: WarmServer) -> bool:
    """End a server. False: it is still there, because it has jobs or cannot be ended."""
    try:
        pidfd = os.pidfd_open(server.pid)
    except OSError:
        return True
    try:
        if not _is_server(server.pid, server.name):
            return True
        if not _is_told_to_end(server):
            with suppress(OSError):
                # No other signal ends it: it holds all others back.
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                remove_socket(server.folder, server.name)
        return bool(wait_for(pidfd, left_s=0 if server.state == "busy" else END_S))
    finally:
        os.close(pidfd)


def _is_told_to_end(server: WarmServer) -> bool:
    if server.state not in ("idle", "busy"):
        return False
    try:
        return warm_answer(warm_call(server.folder, server.name, "stop"), ANSWER_S) is not None
    except OSError:
        return False


WARM = Tool(
    "dsl-warm",
    "[OPTIONS] [status | stop [PID ...] | start dsl|dslrun ...]",
    "Show your warm fork servers on this machine. You can also end or start them.",
    _add,
    _run,
    "A warm server keeps what workers import for the next job (--start-method warm). The exit code is 0; "
    "1 if a server cannot be started or ended; 2 if no server has such a pid.",
    options_at=lambda words: 1 if list(words[:1]) == ["start"] else None,
)
