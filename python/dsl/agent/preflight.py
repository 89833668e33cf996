"""Finds everything that stands in the way of a job on this host, before anything is started."""

from __future__ import annotations

import os

from dsl.control.messages import Assignment, Checked
from dsl.errors import DslError, PortError, ProgramError
from dsl.machine.check import check_executable, check_program, find_executable, is_out_of_reach
from dsl.machine.network import is_loopback
from dsl.model.request import DEFAULT_MASTER_PORT
from dsl.plan.worker import accelerator_of, inherited_environment, shown_slots
from dsl.words import counted, format_ranges, numbered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsl.facts import Facts
    from dsl.model.job import Host, Job, Meeting, NodePlan, Notice


def assignment_problem(assignment: Assignment) -> str:
    """Why this part of a job cannot exist; empty: it can."""
    hosts, node_rank, task = assignment.job.hosts, assignment.node_rank, assignment.task
    if node_rank >= len(hosts):
        return f"the job has no host {node_rank}"
    if task is not None and task >= len(hosts[node_rank].slots):
        return f"host {hosts[node_rank].name} has no local rank {task}"
    return ""


def meeting_problem(meeting: Meeting, host: Host) -> str:
    """Why the nodes cannot meet in this way; empty: they can. ``host``: that of this node."""
    if meeting.node_rank >= meeting.node_count:
        return f"node {meeting.node_rank} is none of {meeting.node_count}"
    count = meeting.local_world_size
    if count != len(host.slots):
        return f"host {host.name} has {counted(len(host.slots), 'slot')}, not {count}"
    return ""


def look(assignment: Assignment, facts: Facts, reached: str = "") -> Checked:
    """Look at this host. Starts, makes and changes nothing, and raises nothing.

    ``reached`` is this machine's address on the connection to the head; without it we take the address that
    sshd names. Among several tasks on a host, only the first looks, for all of them. Without
    `Assignment.checks` we look only for addresses and ports.
    """
    if assignment.task:
        return Checked()
    job, is_first = assignment.job, assignment.node_rank == 0
    reached = reached or _sshd_address(facts)
    addresses = () if not reached or is_loopback(reached) else (reached,)
    port_problem, is_port_free, free_port = "", True, 0
    if is_first or assignment.is_elastic:
        addresses = tuple(dict.fromkeys((*addresses, *facts.network.addresses())))
        port_problem, is_port_free, free_port = _look_at_port(job, facts)
    if assignment.is_elastic:
        addresses = (*_own_master(job, facts), *addresses)
    problems: list[str] = []
    accelerator = ""
    if assignment.checks:
        environ = inherited_environment(job, facts.environ)
        problems += file_problems(job, environ, assignment.cwd)
        problems += _look_at_debugger(assignment, environ, facts)
        problems += _look_at_wraps(assignment, environ)
        problem, accelerator = _look_at_slots(job, assignment.node_rank, environ, facts)
        problems.append(problem)
        if not assignment.is_elastic:  # for elastic jobs the head picks address and port of the first node
            problems += [_look_at_master(job, facts, addresses, is_first=is_first), port_problem]
    return Checked(
        problems=tuple([problem for problem in problems if problem]),
        addresses=addresses,
        is_port_free=is_port_free,
        free_port=free_port,
        accelerator=accelerator,
        machine=facts.network.identity(),
    )


def _sshd_address(facts: Facts) -> str:
    """This host's address as sshd names it: the third word, after the caller's address and port.

    MPI and Slurm may have copied the variable from the user's session on another host.
    """
    words = facts.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and facts.network.is_own(words[2]) else ""


def file_problems(job: Job, environ: Mapping[str, str], cwd: str) -> list[str]:
    """Problems with the program of a job, its interpreter, its directory and that of its logs."""
    missing = _folder_problem(cwd) if cwd else ""
    problems = [missing]
    # A relative program cannot exist if its directory is missing.
    if not missing or os.path.isabs(job.program.script):
        try:
            check_program(job.program, job.flavour, environ, cwd)
        except DslError as error:
            problems.append(str(error))
    variable = job.flavour.interpreter_variable
    named = environ.get(variable, "") if job.program.kind in ("script", "module") else ""
    if named and not find_executable(named, environ, cwd):
        problems.append(f"{variable}={named} names no program that can be executed, correct or unset it")
    folder = job.output.each_rank_log or job.output.log_dir
    if folder is not None and (not missing or os.path.isabs(folder)):
        problems.append(_log_dir_problem(folder, cwd))
    return problems


def debugger_notices(plan: NodePlan, facts: Facts) -> tuple[Notice, ...]:
    """Notices on how to attach to the workers of a node that starts its part itself.

    Raises:
        OptionError: debugpy is missing.
        PortError: a worker's port is taken.
    """
    from dsl.plan.starting import attach_notices, check_ports

    check_ports(plan, facts)
    notices = attach_notices(plan)
    if notices:
        need_debugger(plan.job, plan.env, facts)
    return notices


def need_debugger(job: Job, environ: Mapping[str, str], facts: Facts) -> None:
    """Refuse workers that have to run under debugpy if their interpreter lacks it. Raises OptionError."""
    from dsl.machine import programs
    from dsl.plan.worker import interpreter_of

    is_call = job.program.kind == "call"
    interpreter = interpreter_of(job.flavour, environ, facts.names.executable)
    programs.check_debugger(job.program.script if is_call else interpreter, environ)


def _look_at_debugger(assignment: Assignment, environ: Mapping[str, str], facts: Facts) -> list[str]:
    """Problems with debugpy, and with the ports of this node's debugged workers."""
    job = assignment.job
    if not job.debug.ranks:
        return []
    from dsl.plan.starting import debug_port, port_problem

    ranks = _first_ranks(assignment)
    first = ranks.start
    try:
        # In an elastic job any rank may run on any host.
        ports = [] if assignment.is_elastic else [debug_port(job, one, one - first) for one in ranks]
        if any(ports) or assignment.is_elastic:
            need_debugger(job, environ, facts)
    except DslError as error:
        return [str(error)]
    return [port_problem(first + local, port, facts) for local, port in enumerate(ports) if port is not None]


def _first_ranks(assignment: Assignment) -> range:
    """Ranks of this node's workers, as long as all hosts take part."""
    hosts, node_rank = assignment.job.hosts, assignment.node_rank
    first = sum(len(host.slots) for host in hosts[:node_rank])
    return range(first, first + len(hosts[node_rank].slots))


def check_wraps(
    job: Job, ranks: Collection[int] | None, environ: Mapping[str, str], folder: str = ""
) -> None:
    """Refuse commands that are not there, which are to wrap workers of these ranks; None: of any rank.

    Raises:
        ProgramNotFoundError: a command does not exist.
        ProgramNotExecutableError: a command may not be executed, or not be reached.
    """
    from dsl.output.grammar import is_in
    from dsl.plan.wraps import parse_wrap

    for runs, words in map(parse_wrap, job.start.wraps):
        if ranks is not None and not any(is_in(rank, runs) for rank in ranks):
            continue
        try:
            check_executable(words[0], "--wrap", environ, folder)
        except ProgramError as error:
            raise type(error)(f"--wrap: {error}") from None


def _look_at_wraps(assignment: Assignment, environ: Mapping[str, str]) -> list[str]:
    """Problems with the commands that wrap workers of this node. In an elastic job it may have any rank."""
    if not assignment.job.start.wraps:
        return []
    ranks = None if assignment.is_elastic else _first_ranks(assignment)
    try:
        check_wraps(assignment.job, ranks, environ, assignment.cwd)
    except DslError as error:
        return [str(error)]
    return []


def _folder_problem(cwd: str) -> str:
    if is_out_of_reach(cwd):
        return (
            f"working directory {cwd!r} cannot be reached by this user, "
            "check the permissions of its directories"
        )
    if not os.path.exists(cwd):
        return f"working directory {cwd!r} does not exist, start the command in one that every host has"
    if not os.path.isdir(cwd):
        return f"working directory {cwd!r} is no directory, start the command in one that every host has"
    if not os.access(cwd, os.X_OK):
        return f"working directory {cwd!r} cannot be entered by this user, check its permissions"
    return ""


def _log_dir_problem(folder: str, cwd: str) -> str:
    """What would keep us from making the directory, with its parents, and writing to it."""
    path = os.path.join(cwd, folder)
    if os.path.exists(path) and not os.path.isdir(path):
        return f"log directory {folder!r} is a file, name a directory"
    existing = path
    while not os.path.exists(existing) and os.path.dirname(existing) != existing:
        existing = os.path.dirname(existing)
    if os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        return ""
    if existing == path:
        return f"log directory {folder!r} cannot be written by this user, check its permissions"
    return f"log directory {folder!r} cannot be made in {existing!r}, check the path and the permissions"


def _look_at_slots(job: Job, node_rank: int, environ: Mapping[str, str], facts: Facts) -> tuple[str, str]:
    """The problem with this node's slots, and its accelerator."""
    if not job.hosts:
        return "", ""
    slots = job.hosts[node_rank].slots
    try:
        accelerator = accelerator_of(job, environ, facts)
        if accelerator == "cpu" or job.visible_devices is not None:
            return "", accelerator
        is_cuda = accelerator == "cuda"
        count = facts.devices.cuda_count if is_cuda else facts.devices.other_count(accelerator, environ)
        shown_slots(job, slots, environ, facts)
    except DslError as error:
        return str(error), ""
    return _slot_problem(slots, accelerator, count), accelerator


def _slot_problem(slots: Sequence[int], accelerator: str, count: int) -> str:
    """What is wrong with the slots of a host that has ``count`` devices; empty if nothing is."""
    asked = numbered("slot", sorted(slots))
    if not count:
        return f"{asked} were given to the job, but there is no {accelerator} device, check its driver"
    missing = [slot for slot in slots if slot >= count]
    if not missing:
        return ""
    lacking = numbered("slot", sorted(missing))
    verb = "do" if len(missing) > 1 else "does"
    here = f"{counted(count, f'{accelerator} device')} ({format_ranges(range(count))})"
    return f"{lacking} {verb} not exist, there {'are' if count > 1 else 'is'} {here}: correct the hostfile"


def _own_master(job: Job, facts: Facts) -> tuple[str, ...]:
    """The address that the user has named, if it belongs to this host."""
    address, network = job.meeting.address, facts.network
    if not address or not any(
        network.is_own(one) and not is_loopback(one) for one in network.resolve(address)
    ):
        return ()
    return (address,)


def _look_at_master(job: Job, facts: Facts, addresses: tuple[str, ...], *, is_first: bool) -> str:
    """The problem with the address that the user has named, if more than one host needs it.

    ``is_first``: this is node 0, where rank 0 is to listen.
    """
    address, network = job.meeting.address, facts.network
    if not address or job.node_count == 1:
        return ""
    option, unchecked = map(job.flavour.spell, ("--master-addr", "--no-ssh-check"))
    named = f"master address {address}"
    resolved = network.resolve(address)
    if not resolved:
        return f"{named} has no address here, check the name or give an address with {option}"
    inner = [one for one in resolved if is_loopback(one)]
    outer = [one for one in resolved if not is_loopback(one)]
    if address in (*inner, "localhost"):
        return f"{named} is another machine on every host, give {option} one that all can reach"
    if is_first:
        # Debian's /etc/hosts has the machine's own name at 127.0.1.1: rank 0 listens on all addresses.
        if inner or any(map(network.is_own, outer)):
            return ""
        have = ", ".join([one for one in addresses if "%" not in one][:4]) or "others"
        return (
            f"{named} is not one of this host, where rank 0 listens: it has {have}; correct {option}, "
            f"or give {unchecked} if packets to that address are passed on to it"
        )
    if not outer:
        return f"{named} is this machine itself here ({inner[0]}), correct /etc/hosts or give {option}"
    blocked = [network.why_unreachable(one) for one in outer]
    if not all(blocked):
        return ""
    shown = f"{address} ({outer[0]})" if outer[0] != address else address
    return f"there is no way to master address {shown}: {blocked[0]}, give another with {option}"


def _look_at_port(job: Job, facts: Facts) -> tuple[str, bool, int]:
    """For node 0: the problem with the named port, whether the port is free, and a free port."""
    asked, ports = job.meeting.port, facts.ports
    port = DEFAULT_MASTER_PORT if asked is None else asked
    try:
        if port and ports.is_free(port):
            return "", True, 0
        free = ports.pick()
    except PortError as error:
        return str(error), False, 0
    if not asked:
        return "", not port, free
    option = job.flavour.spell("--master-port")
    problem = f"master port {port} is taken by {ports.holder(port)}, choose another with {option}"
    return problem, False, free
