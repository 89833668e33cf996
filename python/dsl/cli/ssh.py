"""``dsl-ssh``: runs one command on all hosts of a hostfile, like DeepSpeed's ``ds_ssh``."""

from __future__ import annotations

import os

from dsl.agent.hosts import AT_ONCE, HostCommands, plan_hosts
from dsl.agent.session import SIGINT, Session, die_of_interrupt
from dsl.cli.tool import Tool, ToolParser
from dsl.errors import HostfileError, LauncherError, OptionError
from dsl.facts import this_machine
from dsl.functions.errors import HandledSignals, SignalException
from dsl.launchers.base import Start
from dsl.launchers.ssh import LONGEST_LINE, ssh_command
from dsl.machine.check import find_executable
from dsl.model.options import BadValueError, integer
from dsl.model.request import DEFAULT_HOSTFILE
from dsl.plan.hosts import apply_filters, read_hostfile
from dsl.report.speak import flush_output
from dsl.resources.hosts import find_allocation
from dsl.words import LAST_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from dsl.facts import Facts

PROGRAM = "ssh"
STOP_SIGNALS = (15, 1)


def _run(options: argparse.Namespace) -> int:
    words, facts = options.words, this_machine()
    if not words:
        raise OptionError("no command was given: dsl-ssh [OPTIONS] COMMAND [ARGUMENTS]")
    hosts = choose_hosts(options, facts)
    if not find_executable(PROGRAM, facts.environ):
        raise LauncherError("ssh is not on PATH, install OpenSSH's client")
    commands = [ssh_command(host, words, options.ssh_port) for host in hosts]
    starts = [Start(argv, node_rank=number) for number, argv in enumerate(commands)]
    size = len(os.fsencode(commands[0][-1]))
    if size > LONGEST_LINE:
        raise OptionError(
            f"the command is too long: written for a shell it has {size} bytes, and at most {LONGEST_LINE} "
            "fit: copy a script to the hosts, and run that"
        )
    # Every ssh reads from this pipe. Only we hold the other end: when we end, the commands on all hosts end.
    reading, _writing = os.pipe()
    flush_output()
    try:
        with HandledSignals((SIGINT, *STOP_SIGNALS)):
            source = HostCommands(plan_hosts(starts, hosts, reading, options.max_at_once, facts))
            return Session(source).run_here(lambda outcome: outcome.code) or 0
    except SignalException as ended:
        if ended.sigval == SIGINT:
            die_of_interrupt()
        raise


def _add(parser: ToolParser) -> None:
    add = parser.add_argument
    add("-f", "-H", "--hostfile", metavar="PATH", default=DEFAULT_HOSTFILE, help="lines of 'HOST slots=N'")
    add("-i", "--include", metavar="FILTER", default="", help="run it on these hosts alone: HOST@HOST")
    add("-e", "--exclude", metavar="FILTER", default="", help="run it on all hosts but these")
    add("--ssh_port", "--ssh-port", metavar="PORT", type=_up_to(LAST_PORT), help="port of the ssh servers")
    add("--max_at_once", "--max-at-once", metavar="N", type=_up_to(1024), default=AT_ONCE,
        help="run it on so many hosts at once; the next follows when one has ended")  # fmt: skip
    add("command", nargs="*", metavar="COMMAND", help="what each host runs")


def _up_to(most: int) -> Callable[[str], int]:
    """A reader of numbers from 1 on."""

    def read(text: str) -> int:
        number = integer(text)
        if not 1 <= number <= most:
            raise BadValueError(f"{number} is not in the range of 1 to {most}")
        return number

    return read


def choose_hosts(options: argparse.Namespace, facts: Facts) -> tuple[str, ...]:
    """The hosts that the options select, in the order of the hostfile, or without one of the scheduler.

    Raises:
        HostfileError: there is no such file, or it is malformed.
        FilterError: a filter is malformed, or names an unknown host or slot.
    """
    pool = read_hostfile(options.hostfile, facts.files.read_input)
    if pool is None and options.hostfile == DEFAULT_HOSTFILE:
        allocation = find_allocation(facts.environ, facts.files.read_text)
        pool = None if allocation is None else dict(allocation.hosts)
    if pool is None:
        is_there = os.path.exists(options.hostfile)
        why = "names no hosts, it is no regular file:" if is_there else "does not exist,"
        raise HostfileError(f"hostfile {options.hostfile} {why} name one with -f")
    slots = {host: range(count) for host, count in pool.items()}
    if not options.include and not options.exclude:
        return tuple(slots)
    # A host without slots counts, too.
    chosen = apply_filters(
        {host: one or range(1) for host, one in slots.items()}, options.include, options.exclude
    )
    return tuple(chosen)


SSH = Tool(
    "dsl-ssh",
    "[OPTIONS] COMMAND [ARGUMENTS]",
    "Run one command on all hosts of a hostfile.",
    _add,
    _run,
    "One COMMAND alone is a line for the shell of each host: dsl-ssh 'ls | wc -l'. With ARGUMENTS it is a "
    "program that gets them byte for byte: dsl-ssh rm -- 'my file'. The exit code is 0 if the command has "
    "ended with 0 on all hosts, else that of the first host that failed.",
    options_at=lambda _: 0,
    allow_abbrev=False,
)
