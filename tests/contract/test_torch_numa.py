"""The CPUs of each worker against those that torch 2.15 would bind it to (golden/torch_numa.json)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.contract.golden_file import cases
from tests.contract.torch_numa_inputs import MODES, TABLE, Machine, machines, write_sysfs
from tests.support.machine import make_facts

from dsl.binding import NodeGroup, place
from dsl.binding.rules import MODES as OUR_MODES
from dsl.devices.nvidia import read_devices
from dsl.errors import PlacementError
from dsl.facts import Facts
from dsl.machine.kernel import Cpus
from dsl.model.request import PlacementRequest
from dsl.words import format_ranges

REFUSED = "refused"
MACHINES = dict(machines())
GOLDEN: dict[str, dict[str, list[str]]] = dict(cases("torch_numa"))

# (machine, mode) -> our answer where torch raises, with the reason. Without a device it always raises; we spread
# the workers (tests/unit/binding/test_torch_modes.py). Beyond these there is only what `_socket` says.
DIFFERENCES: dict[tuple[str, str], tuple[str, list[str]]] = {
    **{
        ("not told, and node 0 may not be used", mode): (
            "the only NUMA node that may be used is as good a guess as node 0, and binding to it harms nobody",
            cpus,
        )
        for mode, cpus in {
            "node": ["8-15,24-31"] * 2,
            "socket": ["8-15,24-31"] * 2,
            "exclusive": ["8-11,24-27", "12-15,28-31"],
            "core-complex": ["8-11,24-27", "12-15,28-31"],
        }.items()
    },
    ("caches are not named", "core-complex"): (
        "in virtual machines whose kernel names no cache, a NUMA node is the smallest group there is",
        ["0-7,16-23", "8-15,24-31"],
    ),
}


def _host(machine: Machine, root: Path) -> Facts:
    """A machine whose every fact is read from the files that torch was shown."""
    write_sysfs(machine, root)
    folder = str(root)
    cpus = sorted(machine.cpus())
    found = Cpus(folder, cpus)
    return make_facts(
        allowed=cpus,
        numa_nodes=found.numa_nodes,
        topology=found.topology,
        packages=found.packages,
        caches=found.caches,
        gpus=read_devices(folder),
    )


def _socket(machine: Machine, home: int) -> str:
    """torch gives up if any NUMA node that the machine could have has no CPU that may be used.

    Memory without CPUs (GH200, CXL), a cpuset, and CPUs that are offline make such nodes; none of them says
    anything about the socket of the device. Where sockets are not named, a NUMA node counts as one.
    """
    own = [sorted(machine.cpus().intersection(node)) for node in machine.nodes]
    if not own[home]:
        return REFUSED
    package = next((one for one in machine.sockets if own[home][0] in one), own[home])
    return format_ranges(sorted({cpu for node in own if node and node[0] in package for cpu in node}))


@cache
def _expected(name: str, mode: str) -> list[str]:
    machine, answers = MACHINES[name], GOLDEN[name][mode]
    ours = DIFFERENCES.get((name, mode), ("", [REFUSED] * len(answers)))[1]
    if mode == "socket" and (name, mode) not in DIFFERENCES:
        ours = [_socket(machine, max(home, 0)) for home in machine.gpus]
    return [
        answer if answer[0].isdigit() else ours[rank]
        for rank, answer in enumerate(answers[: len(machine.gpus)])
    ]


def _ask(mode: str, count: int, host: Facts) -> Any:
    try:
        bindings = place(PlacementRequest(numa_binding=mode), NodeGroup(count, {}), host).bindings
    except PlacementError:
        return REFUSED
    return [format_ranges(binding.cpus) for binding in bindings]


@pytest.mark.parametrize("name", [name for name, machine in MACHINES.items() if machine.gpus])
def test_workers_get_the_cpus_that_torch_gives_them(name: str, memory_path: Path) -> None:
    """With any number of workers up to that of the devices. torch refuses one worker alone, we the whole job."""
    machine = MACHINES[name]
    host = _host(machine, memory_path)
    for mode in MODES:
        expected = _expected(name, mode)
        for count in range(1, len(machine.gpus) + 1):
            first = expected[:count]
            assert _ask(mode, count, host) == (REFUSED if REFUSED in first else first), (mode, count)
        assert not GOLDEN[name][mode][-1][0].isdigit()
        assert _ask(mode, len(machine.gpus) + 1, host) == REFUSED


@pytest.mark.parametrize("mode", MODES)
def test_where_torch_has_no_device_we_bind_all_the_same(mode: str, memory_path: Path) -> None:
    """Each NUMA node gets its part of the workers."""
    for name in ("no device", "no device, one CPU"):
        machine = TABLE[name]
        assert not GOLDEN[name][mode][0][0].isdigit()
        host = _host(machine, memory_path / name)
        workers = len(machine.nodes)
        answer = _ask(mode, workers, host)
        as_with_devices = _host(
            machine._replace(gpus=tuple(range(workers))), memory_path / f"{name}, devices"
        )
        assert answer != REFUSED
        assert answer == _ask(mode, workers, as_with_devices)


def test_every_listed_difference_is_one() -> None:
    for name, mode in DIFFERENCES:
        assert not any(answer[0].isdigit() for answer in GOLDEN[name][mode])


def test_the_modes_are_torchs() -> None:
    assert OUR_MODES == MODES == tuple(GOLDEN["no device"])
