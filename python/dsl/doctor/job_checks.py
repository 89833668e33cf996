"""The checks of the doctor that compare the hosts of a job: facts in, findings out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from dsl._record import Record
from dsl.control.checks import compare, skew_notice
from dsl.control.clock import Clock
from dsl.control.messages import Checked
from dsl.doctor.host_checks import find_on_host
from dsl.lists import name_few
from dsl.model.health import Health, Symptom, Verdict, Way
from dsl.model.job import Notice

Found: TypeAlias = Iterator[tuple[Verdict, Sequence[str], str]]
"""Level, hosts and text of each finding."""

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
    return [(one.name, one.checked.health) for one in hosts if one.checked and one.checked.health]


def _groups(values: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Hosts by value."""
    found: dict[str, list[str]] = {}
    for name, value in values:
        found.setdefault(value, []).append(name)
    return found


def _words(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value or 'none'} on {name_few(names)}" for value, names in groups.items())


def _torch_versions(hosts: Sequence[Examined]) -> Found:
    running = [(name, one) for name, one in _health(hosts) if one.python_version]
    groups = _groups([(name, one.torch) for name, one in running])
    if len(groups) > 1 and not ("" in groups and any(one.needs_torch for _, one in running)):
        public = {value.partition("+")[0] for value in groups}
        level: Verdict = "error" if len(public) > 1 else "warning"
        yield level, (), f"torch differs: {_words(groups)}; install the same version on every host"


def _pythons(hosts: Sequence[Examined]) -> Found:
    running = [(name, one.python_version) for name, one in _health(hosts) if one.python_version]
    groups = _groups([(name, ".".join(version.split(".")[:2])) for name, version in running])
    if len(groups) > 1:
        yield "warning", (), f"Python differs: {_words(groups)}; use the same version on every host"


def _scripts(hosts: Sequence[Examined]) -> Found:
    groups = _groups([(name, one.script) for name, one in _health(hosts) if one.script])
    if len(groups) > 1:
        most = max(groups.values(), key=len)
        others = [name for names in groups.values() if names is not most for name in names]
        mend = "copy it, or put it on a file system that all share"
        yield "error", others, f"the script is another one than on {name_few(most)}: {mend}"


def _machines(hosts: Sequence[Examined]) -> Found:
    known = [(one.name, one.checked) for one in hosts if one.checked and not one.problem]
    for notice in compare(known):
        yield "warning", (), notice.text


def _clocks(hosts: Sequence[Examined]) -> Found:
    for one in hosts:
        notice = one.clock and skew_notice(one.name, one.clock.offset_ns, one.clock.error_ns)
        if notice:
            yield "warning", (), notice.text


def _ways(hosts: Sequence[Examined], *, small: bool = False) -> Found:
    where: dict[str, list[str]] = {}
    for one in hosts:
        for way in one.ways:
            if way.answer in ANSWERS and (way.answer == "small") == small and way.place < len(hosts):
                why = f" ({way.why})" if way.why else ""
                text = f"from here {hosts[way.place].name} at {way.address}{why} {ANSWERS[way.answer]}"
                where.setdefault(text, []).append(one.name)
    for text, names in where.items():
        yield "error", names, text


def _mtus(hosts: Sequence[Examined]) -> Found:
    found = []
    for one in hosts:
        health = one.checked.health if one.checked else None
        addresses = one.checked.addresses[:1] if one.checked else ()
        faces = health.interfaces if health else ()
        found += [(one.name, str(face.mtu)) for face in faces if {*addresses} & {*face.addresses}]
    groups = _groups(found)
    if len(groups) > 1:
        yield "warning", (), f"the MTU differs: {_words(groups)}; set the same on every host"


def _settings(hosts: Sequence[Examined]) -> Found:
    healths = _health(hosts)
    names = {
        name
        for _, one in healths
        for name, _ in one.variables
        if name.startswith(COMPARED) and not name.endswith(MAY_DIFFER)
    }
    for name in sorted(names):
        groups = _groups([(host, dict(one.variables).get(name, "")) for host, one in healths])
        if len(groups) > 1:
            yield "warning", (), f"{name} differs: {_words(groups)}; set it on every host, or on none"


def _names(hosts: Sequence[Examined]) -> Found:
    """A name of a host that stands for different machines on different hosts shows as a way to a stranger."""
    found = _groups([(one.name, one.name_addresses[0]) for _, one in _health(hosts) if one.name_addresses])
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


def find_all(
    hosts: Sequence[Examined], planned: Sequence[Notice] = ()
) -> list[tuple[tuple[str, ...], Symptom]]:
    """All findings of a job with the hosts that they are about, each once, errors first.

    A finding without hosts is about the whole job, or about the one host that the job has. ``planned``: what
    the plan of the job has to say; its warnings are findings.
    """
    found: dict[Symptom, list[str]] = {
        Symptom("warning", LAUNCH, one.text): [] for one in planned if one.level == "warning"
    }
    for one in hosts:
        checked = one.checked
        problems = (one.problem, *(checked.problems if checked else ()))
        own = [Symptom("error", LAUNCH, text) for text in problems if text]
        if checked and checked.health:
            own += find_on_host(checked.health)
        for finding in own:
            found.setdefault(finding, []).append(one.name)
    for check, find in JOB_CHECKS.items() if len(hosts) > 1 else ():
        for level, names, text in find(hosts):
            found.setdefault(Symptom(level, check, text), []).extend(names)
    pairs = [(tuple(filter(None, names)), finding) for finding, names in found.items()]
    return sorted(pairs, key=lambda pair: pair[1].level != "error")
