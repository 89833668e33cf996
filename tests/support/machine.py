"""A machine for the plan that the test describes: nothing of the real one shows through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsl._record import replace
from dsl.devices.nvidia import Device
from dsl.machine.host import Host
from dsl.machine.ports import PortProbe
from dsl.machine.topology import NumaNode, Topology
from dsl.output.routes import Console

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FREE_PORT = 40_001


def numa_table(*nodes: Sequence[int]) -> tuple[NumaNode, ...]:
    """NUMA nodes 0, 1, ... with these CPUs."""
    return tuple(NumaNode(number, tuple(cpus)) for number, cpus in enumerate(nodes))


def _topology(cpus: Iterable[int]) -> Topology:
    return Topology(numa_table(range(8)), tuple((cpu,) for cpu in cpus))


def make_host(
    *, files: dict[str, str] | None = None, cuda: int = 0, taken: Sequence[int] = (), **facts: Any
) -> Host:
    """A machine with one NUMA node of 8 cores, these files, CUDA devices and taken ports; `facts` are Host's fields."""
    known = files or {}
    host = Host(
        executable="/opt/python",
        pid=77,
        temp_dir="/var/folder",
        ports=PortProbe(
            lambda port: port not in taken, lambda: FREE_PORT, lambda _port: "pid 9 (python old.py)"
        ),
        read_text=known.get,
        stamp=lambda: "20260102030405",
        allowed_cpus=lambda: set(range(8)),
        count_cuda=lambda: cuda,
        find_other=lambda: None,
        count_other=lambda _name, _environ: 0,
        other_devices=lambda _name, _environ: (),
        numa_nodes=lambda: numa_table(range(8)),
        topology=_topology,
        packages=lambda _cpus: (),
        caches=lambda _cpus: (),
        gpus=lambda: [
            Device(f"0000:{number:02x}:00.0", f"GPU-{number:08x}", "H200", 0) for number in range(cuda)
        ],
        mig_parent=lambda _name: None,
        is_local=lambda name: name == "here",
        console=Console,
        name=lambda: "machine",
        random=lambda: "0123456789abcdef",
    )
    return replace(host, **facts)
