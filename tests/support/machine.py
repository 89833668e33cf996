"""A machine for the plan that the test describes: nothing of the real one shows through."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dsl.devices.nvidia import Device, Survey
from dsl.facts import Facts
from dsl.machine import Console
from dsl.machine.kernel import Cpus, NumaNode, Topology

FREE_PORT = 40_001
OWN_ADDRESSES = ("10.0.0.1", "fd00::1")
UNASKED = object()
"""Stands for a fact that must not be asked for."""

ROOMS = {
    "names": ("executable", "pid", "temp_dir", "host", "stamp", "count_run", "random", "is_this_machine"),
    "files": (
        *("read_text", "read_input", "why_not_written", "cwd", "home", "has_program", "has_warm_server"),
        *("ask_for_hosts", "is_script"),
    ),
    "cpus": ("allowed", "room", "numa_nodes", "topology", "packages", "caches"),
    "devices": (
        "cuda_count",
        "other_name",
        "other_count",
        "located",
        "gpus",
        "survey",
    ),
    "ports": ("is_free", "pick", "holder"),
    "network": ("addresses", "addresses_toward", "resolve", "is_own", "why_unreachable", "identity"),
}
"""The facts of each room, as in `dsl.facts.Facts`."""


class Room:
    """Facts by name. A question for another fails the test."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.__dict__.update({name: fact for name, fact in facts.items() if fact is not UNASKED})

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the machine was asked about {name}")


def numa_table(*nodes: Iterable[int]) -> tuple[NumaNode, ...]:
    """NUMA nodes 0, 1, ... with these CPUs."""
    return tuple(NumaNode(number, tuple(cpus)) for number, cpus in enumerate(nodes))


def read_topology(cpus: Iterable[int], root: str = "/") -> Topology:
    """NUMA nodes of the machine, and the cores that the given CPUs belong to."""
    found: Topology = Cpus(root, cpus).topology
    return found


def make_gpus(homes: Iterable[int | None], model: str = "H200") -> list[Device]:
    """NVIDIA devices at these NUMA nodes, by their numbers."""
    return [
        Device(f"0000:{number:02x}:00.0", f"GPU-{number:08x}", model, home)
        for number, home in enumerate(homes)
    ]


def make_facts(
    *,
    files: dict[str, str] | None = None,
    cuda: int = 0,
    taken: Sequence[int] = (),
    programs: Collection[str] = ("ssh", "pdsh", "mpirun", "mpiname", "srun"),
    environ: Mapping[str, str] | None = None,
    **overrides: Any,
) -> Facts:
    """A machine with one NUMA node of 8 cores, these files, CUDA devices, taken ports, programs on PATH and own environment.

    ``overrides`` are a ``console`` or single facts of `ROOMS`; `UNASKED` for one that must not be asked for.
    """
    allowed = tuple(sorted(overrides.get("allowed", range(8))))
    facts: dict[str, Any] = {
        "executable": "/opt/python",
        "pid": 77,
        "temp_dir": "/var/folder",
        "host": "machine",
        "stamp": lambda: "20260102030405",
        "count_run": lambda: 0,
        "random": lambda: "0123456789abcdef",
        "is_this_machine": lambda name: name == "here",
        "read_text": (files or {}).get,
        "read_input": (files or {}).get,
        "why_not_written": lambda _path, **_: "",
        "cwd": "/data/dir",
        "home": "/home/me",
        "has_program": lambda name: name in programs,
        "has_warm_server": bool,
        "is_script": lambda name, _environ: name.endswith(".sh"),
        "ask_for_hosts": lambda words: (files or {})[words[-1]],
        "room": len(allowed),
        "numa_nodes": numa_table(range(8)),
        "topology": Topology(numa_table(range(8)), tuple((cpu,) for cpu in allowed)),
        "packages": (),
        "caches": (),
        "cuda_count": cuda,
        "other_name": None,
        "other_count": lambda _name, _environ: 0,
        "located": lambda _name, _environ: (),
        "gpus": make_gpus([0] * cuda),
        "survey": Survey(tuple(make_gpus([0] * cuda)), "nvml" if cuda else ""),
        "is_free": lambda port: port not in taken,
        "pick": lambda: FREE_PORT,
        "holder": lambda _port: "pid 9 (python old.py)",
        "addresses": lambda: OWN_ADDRESSES,
        "resolve": lambda name: (name,),
        "is_own": lambda address: address in OWN_ADDRESSES,
        "why_unreachable": lambda _address: "",
        "addresses_toward": lambda _names: ("10.0.0.1",),
        "identity": lambda: "boot 4026531840 machine",
        **overrides,
        "allowed": allowed,
    }
    rooms = {room: Room({name: facts.pop(name) for name in names}) for room, names in ROOMS.items()}
    console = facts.pop("console", Console())
    assert not facts, f"no room has {', '.join(facts)}"
    return Facts(environ=environ or {}, console=console, **rooms)
