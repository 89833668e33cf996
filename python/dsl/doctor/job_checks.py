"""The checks that compare the hosts of a job, and what the doctor says on one screen. Pure.

A start makes those of `FREE` with what it knows of its hosts anyway, the doctor makes all; so does a start
with ``--doctor-first``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from dsl._record import Record
from dsl.control.clock import Clock
from dsl.control.messages import Checked
from dsl.model.health import Health, Symptom, Verdict, Way
from dsl.model.job import Notice
from dsl.words import counted, name_few, printable

Found: TypeAlias = Iterator[tuple[Verdict, Sequence[str], str]]
"""Level, hosts and text of each finding."""

MOST_SKEW_NS = 1_000_000_000
"""Nanoseconds by which clocks may differ without a warning."""

LAUNCH = "launch"
"""Name of all that a launch refuses, too."""

ANSWERS = {
    "refuses": "refuses connections on ports that listen: open its firewall for the ports of the job",
    "silent": "does not answer: open the firewalls between the two, or correct the route",
    "unreachable": "cannot be reached: correct the route or the address",
    "stranger": "is another machine: correct /etc/hosts or the name server",
    "small": "gets small packets but loses large ones: set the MTU of the interface to what the network "
    "carries (ip link set dev NAME mtu 1400)",
}
"""What each answer of a `Way` means, after the name of the other host."""

COMPARED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_")
"""Variables that have to be equal on all hosts begin so."""

MAY_DIFFER = ("_IFNAME", "_HCA", "_ADAPTER", "_DEBUG_FILE", "_NET_DEVICES", "_DEVICES", "_IFACE")
"""Ends of variables that name what one host has."""


class Examined(Record):
    """What is known of one host."""

    name: str
    """As the user calls it; empty: the job has one host."""
    checked: Checked | None = None
    """What its agent has found; None: it has not answered."""
    problem: str = ""
    """Why it cannot take part; empty: it can."""
    ways: tuple[Way, ...] = ()
    """The ways to the other hosts."""
    clock: Clock | None = None
    """Its clock, compared with ours."""


def _health(hosts: Sequence[Examined]) -> list[tuple[str, Health]]:
    return [(host.name, host.checked.health) for host in hosts if host.checked and host.checked.health]


def _groups(values: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Hosts by value."""
    found: dict[str, list[str]] = {}
    for name, value in values:
        found.setdefault(value, []).append(name)
    return found


def _words(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value or 'none'} on {name_few(names)}" for value, names in groups.items())


def _differs(what: str, values: Sequence[tuple[str, str]], mend: str, level: Verdict = "warning") -> Found:
    groups = _groups(values)
    if len(groups) > 1:
        yield level, (), f"{what} differs: {_words(groups)}; {mend}"


def _torch_versions(hosts: Sequence[Examined]) -> Found:
    running = [(name, health.program) for name, health in _health(hosts) if health.program.python_version]
    values = [(name, program.torch) for name, program in running]
    versions = {version for _, version in values}
    if "" in versions and any(program.needs_torch for _, program in running):
        return  # the host without it says so
    level: Verdict = "error" if len({version.partition("+")[0] for version in versions}) > 1 else "warning"
    yield from _differs("torch", values, "install the same version on every host", level)


def _pythons(hosts: Sequence[Examined]) -> Found:
    versions = [(name, health.program.python_version) for name, health in _health(hosts)]
    values = [(name, ".".join(text.split(".")[:2])) for name, text in versions if text]
    yield from _differs("Python", values, "use the same version on every host")


def _scripts(hosts: Sequence[Examined]) -> Found:
    groups = _groups(
        [(name, health.program.script) for name, health in _health(hosts) if health.program.script]
    )
    if len(groups) > 1:
        most = max(groups.values(), key=len)
        others = [name for names in groups.values() if names is not most for name in names]
        mend = "copy it, or put it on a file system that all share"
        yield "error", others, f"the script is another one than on {name_few(most)}: {mend}"


def _machines(hosts: Sequence[Examined]) -> Found:
    """The accelerators of hosts that can take part differ, or several names mean the same machine."""
    fit = [(host.name, host.checked) for host in hosts if host.checked and not host.problem]
    kinds = _groups([(name, checked.accelerator) for name, checked in fit if checked.accelerator])
    if len(kinds) > 1:
        parts = [f"{kind} on {_subject(names)}" for kind, names in kinds.items()]
        text = f"the accelerators differ: {'; '.join(parts)}"
        yield "warning", (), f"{text}; set DS_ACCELERATOR if that is not meant"
    for names in _groups([(name, checked.machine) for name, checked in fit if checked.machine]).values():
        if len(names) > 1:
            text = f"{_subject(names)} are one machine: their workers share its devices and CPUs"
            yield "warning", (), text


def _subject(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"host {names[0]}"
    shown = ", ".join(names[:8])
    return f"hosts {shown}, ... ({len(names)} in all)" if len(names) > 8 else f"hosts {shown}"


def _clocks(hosts: Sequence[Examined]) -> Found:
    """The clock of a host is surely more than a second from ours."""
    for host in hosts:
        if host.clock is None or abs(host.clock.offset_ns) - host.clock.error_ns <= MOST_SKEW_NS:
            continue
        offset_s, error_ms = host.clock.offset_ns / 1e9, host.clock.error_ns / 1e6
        side = "ahead of" if offset_s > 0 else "behind"
        text = (
            f"the clock of host {host.name} is {abs(offset_s):.1f} s {side} this one's (to within "
            f"{max(error_ms, 0.1):.1f} ms): times in their logs do not compare, let NTP set both"
        )
        yield "warning", (), text


def _ways(hosts: Sequence[Examined], *, small: bool = False) -> Found:
    where: dict[str, list[str]] = {}
    for host in hosts:
        for way in host.ways:
            if way.answer in ANSWERS and (way.answer == "small") == small and way.place < len(hosts):
                why = f" ({way.why})" if way.why else ""
                text = f"from here {hosts[way.place].name} at {way.address}{why} {ANSWERS[way.answer]}"
                where.setdefault(text, []).append(host.name)
    for text, names in where.items():
        yield "error", names, text


def _mtus(hosts: Sequence[Examined]) -> Found:
    found = []
    for host in hosts:
        health = host.checked.health if host.checked else None
        addresses = host.checked.addresses[:1] if host.checked else ()
        faces = health.interfaces if health else ()
        found += [(host.name, str(face.mtu)) for face in faces if {*addresses} & {*face.addresses}]
    yield from _differs("the MTU", found, "set the same on every host")


def _settings(hosts: Sequence[Examined]) -> Found:
    healths = _health(hosts)
    names = {
        name
        for _, health in healths
        for name, _ in health.variables
        if name.startswith(COMPARED) and not name.endswith(MAY_DIFFER)
    }
    for name in sorted(names):
        values = [(host, dict(health.variables).get(name, "")) for host, health in healths]
        yield from _differs(name, values, "set it on every host, or on none")


def _names(hosts: Sequence[Examined]) -> Found:
    """A name of a host that stands for different machines on different hosts shows as a way to a stranger."""
    found = _groups(
        [(health.name, health.name_addresses[0]) for _, health in _health(hosts) if health.name_addresses]
    )
    for address, names in found.items():
        others = sorted({*names})
        if len(others) > 1 and not address.startswith("127.") and address != "::1":
            text = (
                f"{name_few(others)} have the same address {address}: correct /etc/hosts or the name server"
            )
            yield "warning", (), text


JOB_CHECKS: Mapping[str, Callable[[Sequence[Examined]], Found]] = {
    "torch-version": _torch_versions,
    "python-version": _pythons,
    "other-script": _scripts,
    "machines": _machines,
    "clocks": _clocks,
    "route": _ways,
    "lost-packets": lambda hosts: _ways(hosts, small=True),
    "mtu": _mtus,
    "other-settings": _settings,
    "same-address": _names,
}
"""The checks that compare hosts, by name."""
FREE = ("machines", "clocks")
"""Those that cost nothing."""
MOST_LINES = 22
"""Lines of findings that fit on a screen with the others."""

CODES = {"warning": 1, "error": 2}


def start_notices(hosts: Sequence[Examined]) -> list[Notice]:
    """What a start says: findings of the free checks, or of all if the hosts were looked at."""
    if not _health(hosts):
        return [Notice(level, text) for check in FREE for level, _, text in JOB_CHECKS[check](hosts)]
    return [Notice(finding.level, where(names) + finding.line) for names, finding in find_all(hosts)]


def find_all(
    hosts: Sequence[Examined], planned: Sequence[Notice] = ()
) -> list[tuple[tuple[str, ...], Symptom]]:
    """All findings of a job with the hosts that they are about, each once, errors first.

    A finding without hosts is about the whole job, or about the one host that the job has. ``planned``: what
    the plan of the job has to say; its warnings are findings.
    """
    from dsl.doctor.host_checks import find_on_host

    found: dict[Symptom, list[str]] = {
        Symptom("warning", LAUNCH, notice.text): [] for notice in planned if notice.level == "warning"
    }
    for host in hosts:
        checked = host.checked
        problems = (host.problem, *(checked.problems if checked else ()))
        own = [Symptom("error", LAUNCH, text) for text in problems if text]
        if checked and checked.health:
            own += find_on_host(checked.health)
        for finding in own:
            found.setdefault(finding, []).append(host.name)
    for check, find in JOB_CHECKS.items() if len(hosts) > 1 else ():
        for level, names, text in find(hosts):
            found.setdefault(Symptom(level, check, text), []).extend(names)
    pairs = [(tuple(filter(None, names)), finding) for finding, names in found.items()]
    return sorted(pairs, key=lambda pair: pair[1].level != "error")


def exit_code(findings: Sequence[tuple[tuple[str, ...], Symptom]]) -> int:
    """0 if all is well, 1 with warnings, 2 with errors."""
    return max([CODES[finding.level] for _, finding in findings], default=0)


def page(
    findings: Sequence[tuple[tuple[str, ...], Symptom]], hosts: Sequence[str], workers: int
) -> list[str]:
    """The lines of the page. ``hosts``: those of the job; none: this one alone."""
    who = f"{len(hosts)} hosts" if len(hosts) > 1 else hosts[0] if hosts else "this host"
    job = f"{who}, {counted(workers, 'worker')}" if workers else who
    from dsl.doctor.host_checks import HOST_CHECKS

    checks = len(HOST_CHECKS) + (len(JOB_CHECKS) if len(hosts) > 1 else 0)
    counts = [
        counted(number, level)
        for level in ("error", "warning")
        if (number := sum(finding.level == level for _, finding in findings))
    ]
    head = f"doctor: {job}: {', '.join(counts) or f'all is well, {checks} checks found nothing'}"
    shown = [line_of(names, finding) for names, finding in findings[:MOST_LINES]]
    rest = findings[MOST_LINES:]
    more = [f"... and {len(rest)} more: mend these first, then look again"] if rest else []
    return [head, *shown, *more]


def line_of(names: Sequence[str], finding: Symptom) -> str:
    """A finding as a line of the page."""
    return printable(f"{finding.level:7}  {where(names)}{finding.line}")


def where(names: Sequence[str]) -> str:
    """The hosts of a finding, before its text; empty: it is about all of them."""
    return f"{name_few(names)}: " if names else ""
