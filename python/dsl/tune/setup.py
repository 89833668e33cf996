"""What all experiments of a tuning have in common: the slots to share, and the words of their commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.machinery import PathFinder

from dsl._own_process import START
from dsl._record import Record
from dsl.model.job import Host
from dsl.model.node import ForkServer
from dsl.tune.ds_config import ConfigWord
from dsl.tune.experiment import Resources
from dsl.tune.section import Section

START_DSL = f"{START}from dsl.__main__ import main; sys.exit(main())"
"""Python code of the command ``dsl``."""


class SlotGroup(Record):
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


RESOURCES = ("include", "exclude", "num_nodes", "num_gpus", "hostfile")
REPLACED = ("autotuning", *RESOURCES, "master_addr", "master_port")
"""Options that each experiment sets by itself."""

OWN = ("max_restarts", "grace", "enable_each_rank_log", "save_pid", "stdin")
"""Options of the training that an experiment does not use, or sets in its own way."""


class UserWords(Record):
    """The options of the user as words of a command line."""

    words: tuple[tuple[str, str], ...]
    """Each option: the name of its value, and its word."""

    def only(self, *names: str) -> tuple[str, ...]:
        """The words of these options."""
        return tuple([word for name, word in self.words if name in names])

    def without(self, *names: str) -> tuple[str, ...]:
        """The words of all other options."""
        return tuple([word for name, word in self.words if name not in names])


class Setup(Record):
    """What all experiments of a tuning have in common."""

    user: UserWords
    """The options of the user."""
    grace_s: float
    """Seconds that the workers of an experiment get to end."""
    rank_logs: bool
    """Whether each rank has a log file of its own."""
    script: str
    """What each worker runs."""
    args: tuple[str, ...]
    """The script's arguments, as the user gave them."""
    config: ConfigWord
    """Where the config is among the arguments."""
    section: Section
    """How to tune."""
    size: Resources
    """What an experiment gets."""
    hosts: tuple[Host, ...]
    """The hosts and slots that there are."""
    is_uniform: bool
    """Whether each host of the user's own job gives as many slots as a host of an experiment."""
    servers: tuple[ForkServer, ...]
    """Warm fork servers that the tuner holds for the workers of all experiments."""
    start_words: tuple[str, ...]
    """The options by which an experiment uses these servers, and keeps none."""
    environ: Mapping[str, str]
    """The environment of the command."""
    visible: tuple[str, tuple[str, ...]] = ("", ())
    """A variable, and the names of devices for it, to use in place of slots; empty: slots are used."""
    script_digest: str = ""
    """Digest of the script, or of the module that it names."""
    device: str = ""
    """Accelerator and models of its devices, if the slots are devices of this machine; empty: unknown."""

    @property
    def trial_words(self) -> tuple[str, ...]:
        """The options of every experiment."""
        grace = f"{self.grace_s:f}".rstrip("0").rstrip(".")  # options do not read an exponent
        return (*self.user.without(*REPLACED, *OWN), f"--grace={grace}")

    @property
    def is_whole(self) -> bool:
        """Whether an experiment is placed just as the user's own job would be."""
        return self.is_uniform and self.size.lanes == 1

    def place_words(self, place: SlotGroup) -> tuple[str, ...]:
        """The options that put a job at a place."""
        if self.is_whole:
            return self.user.only(*RESOURCES, "master_addr")
        slots = () if self.visible[1] else (*self.user.only("hostfile"), f"--include={place.filter}")
        is_first = place.hosts[0].name == self.hosts[0].name
        return (*slots, *(self.user.only("master_addr") if is_first else ()))

    def own_words(self) -> tuple[str, ...]:
        """The options that place the user's own job, in the size that was tuned."""
        if self.is_uniform:
            return self.user.only(*RESOURCES, "master_addr", "master_port")
        place = SlotPool(self.hosts, self.size.nodes, self.size.slots_per_node).take()
        assert place is not None  # there is one lane at least
        return (*self.place_words(place), *self.user.only("master_port"))


def dsl_words(options: Sequence[str], script: str, args: Sequence[str]) -> tuple[str, ...]:
    """The words behind ``dsl``. dsl drops the first ``--`` behind the script, so we double it."""
    return (*options, script, *(("--",) if args[:1] in (("--",), ["--"]) else ()), *args)


def digest_of(script: str) -> str:
    """SHA-256 of the file of a script or module, in hex; empty if it cannot be read."""
    path = script if os.path.isfile(script) else _module_file(script)
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            return sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _module_file(name: str) -> str:
    """The file that ``python -m NAME`` runs, found without running any of it; empty if there is none."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return ""
    places = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(":")), *sys.path]
    for part in (*parts, "__main__"):  # a package runs by its __main__
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return ""
        if spec.submodule_search_locations is None:
            return (spec.origin or "") if part in (parts[-1], "__main__") else ""
        places = list(spec.submodule_search_locations)
    return ""
