"""What all experiments of a tuning have in common: the slots to share, and the words of their commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.machinery import PathFinder
from typing import TypeAlias

from dsl._record import Record, replace
from dsl.agent.planner import Planner, check_job
from dsl.devices import ACCELERATORS
from dsl.errors import AutotuningError, FilterError
from dsl.facts import Facts
from dsl.model.job import ForkServer, Host, Notice
from dsl.model.request import Program, Request
from dsl.plan.hosts import ActiveHosts, choose_hosts
from dsl.plan.job import JobPlan, plan_job
from dsl.tune.config import (
    ConfigWord,
    Section,
    experiment_words,
    find_config,
    find_slips,
    parse_config,
    read_section,
    resolve_auto,
)
from dsl.tune.experiment import GRACE_S, Resources
from dsl.words import shorten

RESOURCES = ("include", "exclude", "num_nodes", "num_gpus", "hostfile")
REPLACED = ("autotuning", *RESOURCES, "master_addr", "master_port")
"""Options that each experiment sets by itself."""

OWN = (*("max_restarts", "restart_on", "give_up_on", "grace", "enable_each_rank_log", "save_pid", "stdin"),)
"""Options of the training that an experiment does not use, or sets in its own way."""

WARM = ("--start-method=warm", "--warm-for=0")
"""The options by which experiments use the servers of the tuner, and keep none."""


SlotGroup: TypeAlias = tuple[Host, ...]
"""The slots of one experiment: its hosts by node rank, each with the slots that it gives, by real numbers."""


def as_filter(group: SlotGroup) -> str:
    """The slots as ``--include`` takes them."""
    return "@".join([f"{host.name}:{','.join(map(str, host.slots))}" for host in group])


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
        return tuple(hosts)

    def give_back(self, group: SlotGroup) -> None:
        """Free the slots of an experiment that has ended."""
        for host in group:
            free = {*self._free[host.name], *host.slots}
            self._free[host.name] = [slot for slot in self._order[host.name] if slot in free]


def count_lanes(hosts: Sequence[Host], nodes: int, slots_per_node: int) -> int:
    """How many experiments of this size fit side by side."""
    slots = SlotPool(hosts, nodes, slots_per_node)
    lanes = 0
    while slots.take() is not None:
        lanes += 1
    return lanes


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
    request: Request
    """What they ask for: the job to tune."""
    config: ConfigWord
    """Where the config is among the arguments of the script."""
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
    environ: Mapping[str, str]
    """The environment of the command."""
    visible: tuple[str, tuple[str, ...]] = ("", ())
    """A variable, and the names of devices for it, to use in place of slots; empty: slots are used."""
    script_digest: str = ""
    """Digest of the script, or of the module that it names."""
    device: str = ""
    """Accelerator and models of its devices, if the slots are devices of this machine; empty: unknown."""

    @property
    def program(self) -> Program:
        """What each worker runs."""
        return self.request.program

    @property
    def grace_s(self) -> float:
        """Seconds that the workers of an experiment get to end."""
        return min(self.request.signals.grace_s, GRACE_S)

    @property
    def start_words(self) -> tuple[str, ...]:
        """The options by which an experiment uses the servers, and keeps none.

        With the start method ``warm`` the user's own words say how long such a server stays.
        """
        return WARM if self.servers and self.request.start.method != "warm" else ()

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
        slots = () if self.visible[1] else (*self.user.only("hostfile"), f"--include={as_filter(place)}")
        is_first = place[0].name == self.hosts[0].name
        return (*slots, *(self.user.only("master_addr") if is_first else ()))

    def shown_to(self, place: SlotGroup) -> Mapping[str, str]:
        """The variable by which an experiment sees only its own devices, if it needs one."""
        variable, names = self.visible
        if not names or self.is_whole:
            return {}
        return {variable: ",".join([names[slot] for slot in place[0].slots])}

    def own_words(self) -> tuple[str, ...]:
        """The options that place the user's own job, in the size that was tuned."""
        if self.is_uniform:
            return self.user.only(*RESOURCES, "master_addr", "master_port")
        place = SlotPool(self.hosts, self.size.nodes, self.size.slots_per_node).take()
        assert place is not None  # there is one lane at least
        return (*self.place_words(place), *self.user.only("master_port"))

    def args_for(
        self, config: Mapping[str, object], path: str, *, is_encoded: bool = False
    ) -> tuple[str, ...]:
        """The script's arguments with a config: as base64, or as the path of its file."""
        place = replace(self.config, is_encoded=is_encoded)
        return experiment_words(self.program.args, place, config, path, self.section)

    def words(self, options: Sequence[str], args: Sequence[str]) -> tuple[str, ...]:
        """The words behind ``dsl``. dsl drops the first ``--`` behind the script, so we double it."""
        doubled = ("--",) if args and args[0] == "--" else ()
        return (*options, self.program.script, *doubled, *args)


def digest_of(script: str) -> str:
    """SHA-256 of the file of a script or module, in hex; empty if it cannot be read."""
    try:
        with open(script if os.path.isfile(script) else _module_file(script), "rb") as file:
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


def set_up(
    request: Request, user: UserWords, facts: Facts
) -> tuple[Setup, dict[str, object], tuple[Notice, ...]]:
    """What all experiments have in common, the config to tune, and notices for the user.

    Raises:
        UsageError: the job or its config cannot be tuned.
    """
    args = request.program.args
    word = find_config(args)
    try:
        text = facts.files.read_text(word.path)
    except OSError as error:
        raise AutotuningError(f"{shorten(word.path)}: the config cannot be read: {error.strerror}") from None
    if text is None:
        raise AutotuningError(
            f"{shorten(word.path)}: there is no such config, {word.option} names it: give the path of a file"
        )
    config = parse_config(text, word.path)
    section = read_section(config)
    config = resolve_auto(config, section, args)
    planned = plan_job(request, facts)  # finds mistakes in the job itself before any experiment runs
    job = planned.job
    check_job(job, facts)
    nodes, slots = len(job.hosts), min([len(host.slots) for host in job.hosts])
    asked = ActiveHosts(
        job.hosts,
        planned.node_rank,
        job.meeting.address,
        is_remote=planned.remote is not None,
        accelerator=job.accelerator,
        visible_devices=job.visible_devices,
    )
    whole = _all_hosts(request, asked, facts)
    if count_lanes(whole.hosts, nodes, slots) == 0:
        whole = asked  # a CPU may have more workers than it counts slots
    lanes = count_lanes(whole.hosts, nodes, slots)
    # With one lane an experiment runs on the same hosts and slots as the user's own job.
    memory = device_memory(asked if lanes == 1 else whole, lanes * slots, section.device_memory, facts)
    setup = Setup(
        user=user,
        request=request,
        config=word,
        section=section,
        size=Resources(nodes, slots, lanes, memory),
        hosts=whole.hosts,
        is_uniform=all(len(host.slots) == slots for host in job.hosts),
        servers=() if asked.is_remote or whole.is_remote else _servers(planned, facts),
        environ=dict(facts.environ),
        visible=_shown(whole),
        script_digest=digest_of(request.program.script),
        device=name_devices(whole, facts),
    )
    return setup, config, (*planned.notices, *find_slips(config))


def _servers(planned: JobPlan, facts: Facts) -> tuple[ForkServer, ...]:
    """Warm fork servers that all experiments can share; none if the workers are not forked anyway."""
    job, method = planned.job, planned.job.start.method
    if method == "forkserver":
        job = replace(job, start=replace(job.start, method="warm"))
    plan = Planner(replace(planned, job=job), facts).plan(0)
    servers = [server for server in plan.fork_servers if server.warm is not None]
    if method != "warm":
        servers = [
            replace(server, warm=replace(server.warm, stay_s=0.0, only_if_there=False)) for server in servers
        ]
    return tuple(servers)


def _all_hosts(request: Request, asked: ActiveHosts, facts: Facts) -> ActiveHosts:
    """All hosts and slots that are available, independent of the size of the job."""
    resources = replace(request.resources, min_nodes=None, max_nodes=None, num_gpus=None)
    try:
        return choose_hosts(replace(request, resources=resources), facts)
    except FilterError:
        return asked


def _shown(hosts: ActiveHosts) -> tuple[str, tuple[str, ...]]:
    """The variable for visible devices, and the user's names in it; empty if the slots name the devices."""
    if not hosts.visible_devices or hosts.accelerator == "cpu":
        return "", ()
    return ACCELERATORS[hosts.accelerator].visible_variable, tuple(hosts.visible_devices.split(","))


def name_devices(hosts: ActiveHosts, facts: Facts) -> str:
    """The accelerator, and for CUDA also the models of this machine's devices."""
    if hosts.accelerator != "cuda":
        return hosts.accelerator
    return ", ".join(["cuda", *sorted({device.model for device in facts.devices.survey.devices})])


def device_memory(hosts: ActiveHosts, count: int, given: int | None, facts: Facts) -> int | None:
    """Free bytes of the experiments' device that has the least free memory; None if unknown.

    Experiments get the first ``count`` slots. A device that does not report its free memory counts in full.
    ``given``: the size that the user has set.
    """
    if given is not None:
        return given
    if hosts.is_remote or hosts.accelerator != "cuda":
        return None
    from dsl.devices.nvidia import visible_devices

    slots = ",".join(map(str, hosts.hosts[0].slots))
    found = visible_devices(hosts.visible_devices or slots, facts.devices.survey.devices)[:count]
    # A device that is divided into instances reports its free memory as a whole, not for each instance.
    sizes = [one.memory_bytes if one.mig or one.free_bytes is None else one.free_bytes for one in found]
    return min([size for size in sizes if size is not None], default=None)
