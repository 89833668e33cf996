"""Finds the problems of a job on several hosts, in words. Nothing is looked up here.

The first half is for a host, with the facts that were found there. The second half is for the head: it
compares what the hosts have reported.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.lists import counted, format_ranges, numbered
from dsl.model.job import Job, Meeting, Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.control.messages import Assignment, Checked, Hello

MOST_SKEW_NS = 1_000_000_000
"""Nanoseconds by which clocks may differ without a warning."""


def slot_problem(slots: Sequence[int], accelerator: str, count: int) -> str:
    """What is wrong with the slots of a host that has ``count`` devices; empty if nothing is.

    On a CPU a slot is a worker, and there may be any number of them.
    """
    if accelerator == "cpu":
        return ""
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


class MasterAddress(Record):
    """What a host knows about the address that the user has named for rank 0."""

    address: str
    """The address as the user wrote it."""
    option: str
    """The option for it, as the command spells it."""
    unchecked: str
    """The option that leaves the checks out, in the same spelling."""
    resolved: tuple[str, ...]
    """The addresses that it stands for here."""
    loopback: tuple[str, ...]
    """Resolved addresses by which every machine means itself."""
    own: tuple[str, ...] = ()
    """Resolved addresses that belong to this machine."""
    addresses: tuple[str, ...] = ()
    """The addresses of this machine (of node 0)."""
    blocked: str = ""
    """Why no packet can go to any resolved address; empty: there is a route."""


def master_problem(found: MasterAddress, *, is_first: bool) -> str:
    """What is wrong with the address that the user has named; empty if nothing is.

    ``is_first``: this is node 0, where rank 0 is to listen.
    """
    named = f"master address {found.address}"
    if not found.resolved:
        return f"{named} has no address here, check the name or give an address with {found.option}"
    inner, real = found.loopback, [one for one in found.resolved if one not in found.loopback]
    if found.address in (*inner, "localhost"):
        return f"{named} is another machine on every host, give {found.option} one that all can reach"
    if is_first:
        # Debian's /etc/hosts has the machine's own name at 127.0.1.1: rank 0 listens on all addresses.
        if found.own or inner:
            return ""
        have = ", ".join([one for one in found.addresses if "%" not in one][:4]) or "others"
        return (
            f"{named} is not one of this host, where rank 0 listens: it has {have}; correct {found.option}, "
            f"or give {found.unchecked} if packets to that address are passed on to it"
        )
    if not real:
        return f"{named} is this machine itself here ({inner[0]}), correct /etc/hosts or give {found.option}"
    shown = f"{found.address} ({real[0]})" if real[0] != found.address else found.address
    if found.blocked:
        return f"there is no way to master address {shown}: {found.blocked}, give another with {found.option}"
    return ""


def assignment_problem(assignment: Assignment) -> str:
    """Why this part of a job cannot exist; empty: it can."""
    hosts, node_rank, task = assignment.job.hosts, assignment.node_rank, assignment.task
    if node_rank >= len(hosts):
        return f"the job has no host {node_rank}"
    if task is not None and task >= len(hosts[node_rank].slots):
        return f"host {hosts[node_rank].name} has no local rank {task}"
    return ""


def meeting_problem(meeting: Meeting, job: Job) -> str:
    """Why the nodes of a job cannot meet in this way; empty: they can."""
    if meeting.node_rank >= meeting.node_count:
        return f"node {meeting.node_rank} is none of {meeting.node_count}"
    if meeting.host_index >= len(job.hosts):
        return f"the job has no host {meeting.host_index}"
    host, count = job.hosts[meeting.host_index], meeting.local_world_size
    if count != len(host.slots):
        return f"host {host.name} has {counted(len(host.slots), 'slot')}, not {count}"
    return ""


def version_problem(hello: Hello, version: str) -> str:
    """What is wrong with the version of dsl on a host; empty if it is the head's version."""
    if hello.version == version:
        return ""
    where = f" for {hello.python}" if hello.python else ""
    return f"it has dsl {hello.version}, this host has {version}: install the same version{where}"


def _subject(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"host {names[0]}"
    shown = ", ".join(names[:8])
    return f"hosts {shown}, ... ({len(names)} in all)" if len(names) > 8 else f"hosts {shown}"


def compare(hosts: Sequence[tuple[str, Checked]]) -> tuple[Notice, ...]:
    """Warnings from a comparison of the hosts that pass the checks.

    The accelerators of hosts differ, or several names mean the same machine.
    """
    notices = []
    kinds: dict[str, list[str]] = {}
    machines: dict[str, list[str]] = {}
    for name, checked in hosts:
        if checked.accelerator:
            kinds.setdefault(checked.accelerator, []).append(name)
        if checked.machine:
            machines.setdefault(checked.machine, []).append(name)
    if len(kinds) > 1:
        parts = [f"{kind} on {_subject(names)}" for kind, names in kinds.items()]
        text = f"the accelerators differ: {'; '.join(parts)}"
        notices.append(Notice("warning", f"{text}; set DS_ACCELERATOR if that is not meant"))
    for names in machines.values():
        if len(names) > 1:
            text = f"{_subject(names)} are one machine: their workers share its devices and CPUs"
            notices.append(Notice("warning", text))
    return tuple(notices)


def skew_notice(name: str, offset_ns: int, bound_ns: int) -> Notice | None:
    """A warning if the clock of a host is surely more than a second from ours; None if not.

    ``offset_ns`` is its clock minus ours, and ``bound_ns`` is the largest error of ``offset_ns``.
    """
    if abs(offset_ns) - bound_ns <= MOST_SKEW_NS:
        return None
    side = "ahead of" if offset_ns > 0 else "behind"
    text = (
        f"the clock of host {name} is {abs(offset_ns) / 1e9:.1f} s {side} this one's "
        f"(to within {max(bound_ns / 1e6, 0.1):.1f} ms): times in their logs do not compare, let NTP set both"
    )
    return Notice("warning", text)
