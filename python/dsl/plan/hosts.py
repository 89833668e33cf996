"""Which hosts and slots take part, and which host this node is: the decisions of DeepSpeed's runner.

A filter (``--include``, ``--exclude``) is ``HOST[:SLOT[,SLOT...]]``, several joined by ``@``. A host without
slots means all of its slots, unless the same filter also names some of them. The result keeps the order of
the resource pool, not the order of the filter. It drops hosts that have no slot left.
"""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.devices.offered import (
    Devices,
    check_slots,
    find_devices,
    select_accelerator,
    slots_text,
    visible_override,
    visible_slots,
    visible_warning,
)
from dsl.errors import (
    AcceleratorError,
    FilterError,
    HostfileError,
    NoDevicesError,
    NumNodesError,
    OptionError,
    OutOfReachError,
)
from dsl.model.job import Host, Notice
from dsl.model.request import DEFAULT_HOSTFILE, Level, RemoteRequest, Request, ResourceRequest
from dsl.words import (
    MOST_WORKERS,
    counted,
    first_few,
    has_odd_colon,
    parse_integer,
    parse_number,
    quote,
    shorten,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsl.facts import Facts
    from dsl.resources.hosts import Allocation

LOCAL_NAME = "localhost"
LOCAL_ADDRESS = "127.0.0.1"
ALLOCATION_VARIABLES = (
    *("SLURM_JOB_NODELIST", "SLURM_NODELIST", "PBS_NODEFILE", "PE_HOSTFILE"),
    *("LSB_MCPU_HOSTS", "LSB_DJOB_RANKFILE", "LSB_HOSTS"),
)
"""If none of them is set, no scheduler names hosts for this command."""


class Pool(Record):
    """The hosts to choose from."""

    slots: Mapping[str, Sequence[int]]
    source: str
    """``hostfile``, or the scheduler; empty: this machine alone."""
    name: str
    """What messages call this source."""
    counts_devices: bool = True
    """A host cannot have more workers than slots."""
    text: str = ""
    tasks: Mapping[str, int] | None = None
    """How many of a launcher's tasks each host has room for; None: the source does not say."""

    def pythons(self) -> dict[str, str]:
        """The interpreters of hosts that name one. Raises HostfileError."""
        if "python=" not in self.text:
            return {}
        from dsl.resources.hosts import parse_pythons

        return parse_pythons(self.text.split("\n"), self.name)


class ActiveHosts(Record):
    """The decisions about the hosts of a job."""

    hosts: tuple[Host, ...]
    """Hosts that take part, by node rank."""
    node_rank: int
    address: str
    """Where rank 0 listens; empty: the head or the nodes find an address later."""
    is_remote: bool = False
    """A head starts an agent on every host, on this machine too; False: this node starts its part itself."""
    pool: Pool | None = None
    """The hosts that they were chosen from."""
    accelerator: str = ""
    """The accelerator of this machine, if its devices are the slots; else empty."""
    visible_devices: str | None = None
    """Value of the visible-devices variable in place of slots; None: the slots."""
    ranks: tuple[int, ...] = ()
    """What ``--node_rank`` says on each host: there hosts without slots count, too."""
    notices: tuple[Notice, ...] = ()


def choose_hosts(request: Request, facts: Facts, listed: Pool | None = None) -> ActiveHosts:
    """Decide which hosts and slots take part.

    The devices of this machine are looked up only if neither a hostfile nor a scheduler names hosts: then the
    devices are the slots. ``listed``: other hosts than these, which all are reached.

    Raises:
        UsageError: the hosts cannot be chosen as asked; the subclass tells the kind of error.
    """
    asked, remote = request.resources, request.remote
    if asked.max_nodes is not None:  # a range drops no host: those beyond the most are spares
        asked = replace(asked, min_nodes=None, max_nodes=None)
    notices: list[Notice] = []
    pool = listed or _read_pool(request, facts, notices)
    devices = None
    if pool is None:
        devices = find_devices(facts.environ, facts.devices, facts.cpus)
        path = asked.hostfile or DEFAULT_HOSTFILE
        pool = Pool({LOCAL_NAME: devices.slots}, "", path, counts_devices=devices.accelerator != "cpu")
    is_named = devices is None
    shown = () if devices is None else _shown_devices(asked, devices, notices)
    _check_counts(asked, has_pool=is_named)
    if devices is not None and shown:
        active = {LOCAL_NAME: _slots_of(devices, shown, asked.num_gpus or 0, facts)}
    else:
        title = "hostfile" if pool.source in ("", "hostfile") else pool.name
        active = apply_filters(pool.slots, asked.include, asked.exclude, title)
    if not remote.no_ssh and any(active.values()):  # with --no_ssh --node_rank is a place in the file
        active = {name: slots for name, slots in active.items() if slots}
    active = trim(active, asked.min_nodes, asked.num_gpus, checked=pool.counts_devices, source=pool.name)
    if not any(active.values()):
        filters = (("--include", asked.include), ("--exclude", asked.exclude), ("hostfile", asked.hostfile))
        what = next(f"{name} {text}" for name, text in filters if text or name == "hostfile")
        raise FilterError(f"nothing is left to start: {what} leaves no slot")
    hosts = tuple([Host(name, tuple(slots)) for name, slots in active.items()])
    ranks = tuple(range(len(hosts)))
    if devices is not None and devices.accelerator == "cpu":
        notices += _cpu_notices(asked, devices, facts.environ, len(hosts[0].slots))
    is_remote = listed is not None or _is_remote(remote, hosts, facts, is_named=is_named)
    node_rank = _own_node_rank(request, hosts) if remote.no_ssh else 0
    if not hosts[node_rank].slots:
        raise FilterError(
            f"host {hosts[node_rank].name!r} has no slots in {asked.hostfile}, this node has nothing to start"
        )
    # A host without slots has no command, for which the others would wait.
    if remote.is_connected or request.elastic.training:
        ranks = tuple([rank for rank in ranks if hosts[rank].slots])
        node_rank, hosts = ranks.index(node_rank), tuple([hosts[rank] for rank in ranks])
    return ActiveHosts(
        hosts=hosts,
        node_rank=node_rank,
        ranks=ranks,
        address=_master_address(request, hosts, is_named=is_named, is_remote=is_remote, notices=notices),
        is_remote=is_remote,
        pool=pool,
        accelerator="" if devices is None else devices.accelerator,
        visible_devices=None if devices is None else visible_override(devices, shown, asked.num_gpus or 0),
        notices=tuple(notices),
    )


def _read_pool(request: Request, facts: Facts, notices: list[Notice]) -> Pool | None:
    """The hosts of the hostfile, else those of a scheduler; None: this machine alone."""
    path = request.resources.hostfile or DEFAULT_HOSTFILE
    text = read_hosts_text(path, facts.files.read_input)
    if text is not None:
        from dsl.resources.hosts import parse_hostfile

        found = parse_hostfile(text.split("\n"), path)
        return Pool({name: range(slots) for name, slots in found.items()}, "hostfile", path, text=text)
    if request.is_strict and path != DEFAULT_HOSTFILE:
        raise HostfileError(
            f"hostfile {path} does not exist, correct --hostfile (--strict makes this an error)"
        )
    notices.append(Notice("debug" if path == DEFAULT_HOSTFILE else "warning", missing_hostfile(path)))
    if path != DEFAULT_HOSTFILE or not any(name in facts.environ for name in ALLOCATION_VARIABLES):
        return None
    return _allocated_pool(request, facts, notices)


def _allocated_pool(request: Request, facts: Facts, notices: list[Notice]) -> Pool | None:
    """The hosts that a scheduler has given to this job; None if they are this machine alone, or not used."""
    asked = request.resources
    if request.remote.no_ssh or LOCAL_NAME in f"{asked.include}@{asked.exclude}":
        return None
    from dsl.resources.hosts import OWN_JOB, find_allocation

    found = find_allocation(facts.environ, facts.files.read_text)
    if OWN_JOB not in facts.environ:
        notices += [Notice("warning", text) for text in _slurm_warnings(facts.environ)]
    if found is None or (len(found.hosts) == 1 and facts.names.is_this_machine(found.hosts[0][0])):
        return None
    notices += _slots_notices(found, asked, facts)
    names = first_few([name for name, _ in found.hosts], 3)
    slots = sum([count for _, count in found.hosts])
    text = f"hosts of {found.name}: {names} ({len(found.hosts)} with {slots} slots)"
    notices.append(Notice("info", text))
    pool = {name: range(count) for name, count in found.hosts}
    tasks = dict(zip(pool, found.tasks, strict=True)) if found.tasks else None
    return Pool(pool, found.scheduler, found.name, found.counts_devices, tasks=tasks)


def _slurm_warnings(environ: Mapping[str, str]) -> list[str]:
    """What is most likely not meant: a job for each task of srun, or a part of the hosts."""
    tasks = parse_number(environ.get("SLURM_STEP_NUM_TASKS", "")) or 0
    parts = parse_number(environ.get("SLURM_HET_SIZE", "")) or 0
    if parse_number(environ.get("SLURM_STEP_ID", "")) is None:
        text = (
            f"only component 0 of this heterogeneous Slurm job takes part, of {parts}: name the hosts of all "
            "components in a hostfile, with --launcher ssh"
        )
        return [text] if parts > 1 else []
    text = (
        f"srun has started this command {tasks} times, so {tasks} jobs run: for one job on all hosts start "
        "dsl without srun, in the batch script or below salloc"
    )
    return [text] if tasks > 1 and environ.get("SLURM_PROCID") == "0" else []


def _slots_notices(found: Allocation, asked: ResourceRequest, facts: Facts) -> list[Notice]:
    """Say what is counted if a scheduler names each host once, and this host has several devices."""
    if found.scheduler == "slurm" or asked.num_gpus or any(count > 1 for _, count in found.hosts):
        return []
    try:
        count = select_accelerator(facts.environ, facts.devices)[1]
    except (AcceleratorError, NoDevicesError):
        return []  # the hosts look for themselves
    text = f"{found.name} names each host once, so each gets 1 worker, and this host has {count} devices"
    return [Notice("warning", f"{text}: --num_gpus {count} starts {count} on each")] if count > 1 else []


def read_hostfile(path: str, read_text: Callable[[str], str | None]) -> dict[str, int] | None:
    """Read host -> number of slots; None if there is no such file.

    Raises:
        HostfileError: a malformed line, a host named twice, no host, or a file that cannot be read.
    """
    from dsl.resources.hosts import parse_hostfile

    text = read_hosts_text(path, read_text)
    return None if text is None else parse_hostfile(text.split("\n"), path)


def read_hosts_text(path: str, read_text: Callable[[str], str | None]) -> str | None:
    """The text of a hostfile; None if there is no such file. Raises HostfileError if it cannot be read."""
    try:
        return read_text(path)
    except OSError as error:
        if path == DEFAULT_HOSTFILE and isinstance(error, OutOfReachError):
            return None  # nobody has named it
        raise HostfileError(f"{path}: hostfile cannot be read: {(error.strerror or '').lower()}") from None


def missing_hostfile(path: str) -> str:
    """The message for a missing hostfile, in DeepSpeed's words."""
    return f"unable to find hostfile {path}, will proceed with training with local resources only"


def _shown_devices(asked: ResourceRequest, devices: Devices, notices: list[Notice]) -> tuple[str, ...]:
    """Devices that the visible-devices variable picks; empty if an option picks them instead.

    ``--num_gpus`` takes the first of them, on a CPU any number of workers.
    """
    option, shown, those = _picking_option(asked), devices.visible or (), "those devices"
    if option == "--num_gpus" and devices.accelerator != "cpu":
        option = ""
        # Several parts may be of one device: the workers see all parts, and use the first devices.
        if (asked.num_gpus or 0) < len(shown) and not any("." in entry for entry in shown):
            shown = shown[: asked.num_gpus]
            those = f"the first{f' {len(shown)}' if len(shown) > 1 else ''} of those devices"
    warning = None if option else visible_warning(shown)
    if warning:
        notices.append(Notice("warning", warning))
    if devices.visible:
        fate = f"but ignoring it because {option} was given" if option else f"and using only {those}"
        level: Level = "info" if option else "detail"
        notices.append(Notice(level, f"detected {devices.visible_setting} {fate}"))
    elif devices.size_from_environment and not asked.num_gpus:
        notices.append(Notice("detail", f"LOCAL_SIZE={len(devices.slots)} sets the number of workers"))
    return () if option else shown


def _slots_of(devices: Devices, shown: Sequence[str], num_gpus: int, facts: Facts) -> list[int]:
    """The slots of the devices that the visible-devices variable picks."""
    names: tuple[str, ...] = ()
    if devices.accelerator == "cuda" and not shown[0].isdigit():
        from dsl.devices.counted import known_names

        names = known_names(shown[0], facts.environ, facts.devices)
    slots = visible_slots(devices, shown, names)
    if num_gpus > len(slots):
        raise FilterError(
            f"--num_gpus {num_gpus} is too many: {shorten(devices.visible_setting)} shows "
            f"{counted(len(slots), 'device')}, give fewer, or correct or unset the variable"
        )
    return slots


def _cpu_notices(
    asked: ResourceRequest, devices: Devices, environ: Mapping[str, str], count: int
) -> list[Notice]:
    """Say that workers run on the CPU, unless the user asked for that.

    A user who picks workers by an option knows what runs: then it is a debug line, else a warning.
    """
    if environ.get("DS_ACCELERATOR") or devices.visible == () or devices.size_from_environment:
        return []
    level: Level = "debug" if _picking_option(asked) else "warning"
    runs = counted(count, "worker", "runs", "run")
    text = f"no accelerator was found, {runs} on the CPU: set DS_ACCELERATOR=cpu if that is meant"
    return [Notice(level, text, is_fallback=True)]


def _picking_option(asked: ResourceRequest) -> str:
    if asked.include or asked.exclude:
        return "--include" if asked.include else "--exclude"
    if (asked.min_nodes or 0) > 1:
        return "--num_nodes"
    return "--num_gpus" if (asked.num_gpus or 0) > 0 else ""


def _check_counts(asked: ResourceRequest, *, has_pool: bool) -> None:
    counted = asked.min_nodes is not None or asked.num_gpus is not None
    if counted and (asked.include or asked.exclude):
        raise OptionError("cannot specify num_nodes/gpus with include/exclude, give one or the other")
    if not has_pool and (asked.min_nodes or 0) > 1:
        raise OptionError(
            f"num nodes is >1 but no extra nodes available via hostfile: {asked.hostfile} does not exist"
        )


def _is_remote(asked: RemoteRequest, hosts: Sequence[Host], facts: Facts, *, is_named: bool) -> bool:
    """Whether a head starts agents: other hosts take part, or the user wants agents even for one host."""
    if asked.no_ssh:
        return False
    if asked.force_multi or len(hosts) > 1:
        return True
    return is_named and not facts.names.is_this_machine(hosts[0].name)


def _own_node_rank(request: Request, hosts: Sequence[Host]) -> int:
    """Rank of the node that this command starts itself, with ``--no_ssh``."""
    node_rank = request.meeting.node_rank
    if node_rank is None or not 0 <= node_rank < len(hosts):
        given = "none was given" if node_rank is None else f"got {node_rank}"
        raise OptionError(
            f"launching training without ssh, but --node_rank is not set correctly: "
            f"expected 0 to {len(hosts) - 1}, {given}"
        )
    return node_rank


def _master_address(
    request: Request, hosts: Sequence[Host], *, is_named: bool, is_remote: bool, notices: list[Notice]
) -> str:
    asked = request.meeting.master_addr or ""
    if has_odd_colon(asked.strip("[]")):
        raise OptionError(
            f"--master_addr {quote(asked)}: expected a host name or an address, --master_port has the port"
        )
    if request.elastic.training and not is_remote:
        return asked
    if not is_named:
        if asked not in ("", LOCAL_NAME, LOCAL_ADDRESS):
            text = f"--master_addr {asked} is not used: without a hostfile it is {LOCAL_ADDRESS}"
            notices.append(Notice("info", text, is_fallback=True))
        return LOCAL_ADDRESS
    if is_remote:
        return asked
    if not asked and len(hosts) > 1:
        raise OptionError(
            f"--no_ssh needs --master_addr, an address of host {hosts[0].name!r} that every host can reach"
        )
    return asked or LOCAL_ADDRESS


def parse_filter(text: str) -> dict[str, list[int]]:
    """``"a:1,0@b"`` -> ``{"a": [0, 1], "b": []}``; an empty list stands for the whole host.

    Raises:
        FilterError: a part that is not ``HOST[:SLOT[,SLOT...]]``.
    """
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        chosen = named.setdefault(host, set())
        if not colon:
            continue
        for slot in slots.split(","):
            number = parse_integer(slot)
            if number is None:
                raise FilterError(
                    f"bad filter {quote(part)}, expected HOST or HOST:SLOT,SLOT with whole numbers as slots"
                )
            chosen.add(number)
    return {host: sorted(slots) for host, slots in named.items()}


def apply_filters(
    pool: Mapping[str, Sequence[int]], include: str, exclude: str, source: str = "hostfile"
) -> dict[str, list[int]]:
    """Return the active resources: host -> slots that pass the filter, in the order of the pool.

    Without a filter it returns the whole pool, with hosts that have no slots. ``source``: name of the pool in
    errors.

    Raises:
        FilterError: both filters at once, a malformed filter, or a host or slot that is not in the pool.
    """
    if include and exclude:
        raise FilterError("--include and --exclude are mutually exclusive, give one of them")
    if not include and not exclude:
        return {host: list(slots) for host, slots in pool.items()}
    named = parse_filter(include or exclude)
    for host, slots in named.items():
        check_slots(host, slots, pool, source)
    active: dict[str, list[int]] = {}
    for host, there in pool.items():
        chosen = list(named[host] or there) if host in named else []
        kept = [slot for slot in there if slot not in chosen] if exclude else chosen
        if kept:
            active[host] = list(dict.fromkeys(kept))
    return active


def parse_num_nodes(text: str, elastic_training: bool) -> tuple[int, int]:  # noqa: FBT001  DeepSpeed's signature
    """``"N"`` -> (N, -1); ``"MIN:MAX"`` of an elastic job -> (MIN, MAX).

    Raises:
        NumNodesError: MIN:MAX without elastic training, more than two parts, or a part that is no number.
    """
    counts = [parse_integer(part) for part in text.split(":")]
    least, most = counts[0], counts[-1]
    if least is None or most is None or len(counts) > 2:
        raise NumNodesError(f"num_nodes {quote(text)} is not in MIN:MAX format, nor a whole number")
    if len(counts) == 1:
        return least, -1
    if not elastic_training:
        raise NumNodesError(f"num_nodes {text!r}: MIN:MAX format is only supported in elastic training")
    return least, most


def trim(
    active: Mapping[str, Sequence[int]],
    num_nodes: int | None,
    num_gpus: int | None,
    *,
    checked: bool,
    source: str,
) -> dict[str, list[int]]:
    """Keep the first ``num_nodes`` hosts, each with its first ``num_gpus`` slots; None and 0 change nothing.

    ``checked``: False if slots are only a number, such as the slots that dsl counts for a CPU; then a host
    gets slots 0 to ``num_gpus`` - 1, even if it has fewer. ``source``: name of the hostfile in errors.

    Raises:
        FilterError: fewer hosts, or fewer slots on a host, than asked for.
    """
    hosts = list(active)
    if num_nodes is not None and num_nodes > len(hosts):
        raise FilterError(
            f"--num_nodes {num_nodes} is more than the hosts that {source} leaves: {len(hosts)}"
        )
    if num_nodes is not None and num_nodes > 0:
        hosts = hosts[:num_nodes]
    if num_gpus is not None and num_gpus > MOST_WORKERS:
        raise FilterError(f"--num_gpus {num_gpus} is too many: a host can have {MOST_WORKERS} at most")
    if num_gpus is None or num_gpus <= 0:
        return {host: list(active[host]) for host in hosts}
    for host in hosts:
        if checked and num_gpus > len(active[host]):
            raise FilterError(
                f"--num_gpus {num_gpus} is too many: host {host!r} has {slots_text(active[host])}"
            )
    return {host: list(active[host][:num_gpus]) if checked else list(range(num_gpus)) for host in hosts}
