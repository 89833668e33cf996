"""The CPUs that this process may use, and how they lie in the machine. Each fact is read once, when asked."""

from __future__ import annotations

import os
from functools import cached_property

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.machine.topology import NumaNode, Topology

    Groups = tuple[tuple[int, ...], ...]


class Cpus:
    """CPUs of the machine below ``root``. Large machines have hundreds of files about them."""

    def __init__(self, root: str = "/") -> None:
        self._root = root

    @cached_property
    def allowed(self) -> tuple[int, ...]:
        """The affinity mask that workers would inherit, ascending."""
        return tuple(sorted(os.sched_getaffinity(0)))

    @cached_property
    def numa_nodes(self) -> tuple[NumaNode, ...]:
        """NUMA nodes of the machine; none when the kernel does not say."""
        from dsl.machine.topology import read_numa_nodes

        return read_numa_nodes(self._root)

    @cached_property
    def topology(self) -> Topology:
        """The NUMA nodes, and the cores of the CPUs that are allowed."""
        from dsl.machine.topology import Topology, read_cores

        return Topology(self.numa_nodes, read_cores(self.allowed, self._root))

    @cached_property
    def packages(self) -> Groups:
        """CPUs of each package (socket) that some allowed ones are in, where the kernel names it."""
        from dsl.machine.topology import read_packages

        return read_packages(self.allowed, self._root)

    @cached_property
    def caches(self) -> Groups:
        """The same for caches of the last level."""
        from dsl.machine.topology import read_caches

        return read_caches(self.allowed, self._root)
