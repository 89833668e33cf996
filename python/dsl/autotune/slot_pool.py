"""The slots of the active hosts, each given to one experiment at a time."""

from __future__ import annotations

from dsl._record import record
from dsl.model.job import Host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


@record
class SlotGroup:
    """The slots of one experiment."""

    hosts: tuple[Host, ...]
    """Its hosts by node rank, each with the slots that it gives, by their real numbers."""

    @property
    def filter(self) -> str:
        """The slots as ``--include`` takes them."""
        return "@".join([f"{host.name}:{','.join(map(str, host.slots))}" for host in self.hosts])


class SlotPool:
    """All slots. An experiment takes ``slots_per_node`` of each of ``nodes`` hosts."""

    def __init__(self, hosts: Sequence[Host], nodes: int, slots_per_node: int) -> None:
        self._nodes = nodes
        self._slots_per_node = slots_per_node
        self._names = [host.name for host in hosts]
        self._order = {host.name: host.slots for host in hosts}
        self._free = {host.name: list(host.slots) for host in hosts}

    def take(self) -> SlotGroup | None:
        """Take slots for another experiment; None if too few are free.

        Hosts with the most room come first, so that as many experiments as possible fit.
        """
        count = self._slots_per_node
        by_room = sorted(self._names, key=lambda name: -(len(self._free[name]) // count))
        chosen = [name for name in by_room[: self._nodes] if len(self._free[name]) >= count]
        if len(chosen) < self._nodes:
            return None
        hosts = []
        for name in sorted(chosen, key=self._names.index):
            hosts.append(Host(name, tuple(self._free[name][:count])))
            del self._free[name][:count]
        return SlotGroup(tuple(hosts))

    def give_back(self, group: SlotGroup) -> None:
        """Free the slots of an experiment that has ended."""
        for host in group.hosts:
            free = {*self._free[host.name], *host.slots}
            self._free[host.name] = [slot for slot in self._order[host.name] if slot in free]


def count_lanes(hosts: Sequence[Host], nodes: int, slots_per_node: int) -> int:
    """How many experiments of this size fit side by side."""
    slots = SlotPool(hosts, nodes, slots_per_node)
    lanes = 0
    while slots.take() is not None:
        lanes += 1
    return lanes
