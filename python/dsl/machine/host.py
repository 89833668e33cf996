"""What the plan needs to know of the machine it is made on: facts, and ways to ask for more."""

from __future__ import annotations

import os
import sys

from dsl._record import record
from dsl.devices.select import (
    count_cuda_devices,
    count_other_devices,
    find_other_accelerator,
    has_nvidia_driver,
)
from dsl.machine.ports import PortProbe, name_port_holder, pick_free_port, port_is_free
from dsl.output.routes import Console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dsl.devices.located import LocatedDevice
    from dsl.devices.nvidia import Device
    from dsl.machine.topology import NumaNode, Topology
    from dsl.output.routes import Kind


@record
class Host:
    """This machine as the plan sees it. Tests give one of their own.

    ``pid`` is the process that the user's shell sees, ``temp_dir`` where its pid file goes. The functions
    answer only when asked: ``read_text`` (None: no such file), ``stamp`` (local time as YYYYmmddHHMMSS),
    ``allowed_cpus`` (the affinity mask), ``count_cuda`` (devices of the machine, hidden ones too),
    ``find_other`` (the accelerator that comes before CUDA, if any), ``count_other`` (devices of such a one),
    ``other_devices`` (where those and AMD's, as ``cuda``, are, in their runtime's order, hidden ones too),
    ``numa_nodes``, ``topology`` of some CPUs, their ``packages`` and ``caches`` of the last level, ``gpus``
    (NVIDIA devices by PCI address, hidden ones too), ``mig_parent`` (PCI address of the device that a
    ``MIG-...`` name is a part of; None: not known), ``is_local`` (is a host of the hostfile this machine),
    ``console`` (what our own output streams are), ``name`` (of this machine), and ``random`` (16 hexadecimal
    digits that nobody can guess).
    """

    executable: str
    pid: int
    temp_dir: str
    ports: PortProbe
    read_text: Callable[[str], str | None]
    stamp: Callable[[], str]
    allowed_cpus: Callable[[], Iterable[int]]
    count_cuda: Callable[[], int]
    find_other: Callable[[], str | None]
    count_other: Callable[[str, Mapping[str, str]], int]
    other_devices: Callable[[str, Mapping[str, str]], Sequence[LocatedDevice]]
    numa_nodes: Callable[[], Iterable[NumaNode]]
    topology: Callable[[Iterable[int]], Topology]
    packages: Callable[[Iterable[int]], Sequence[Sequence[int]]]
    caches: Callable[[Iterable[int]], Sequence[Sequence[int]]]
    gpus: Callable[[], Sequence[Device]]
    mig_parent: Callable[[str], str | None]
    is_local: Callable[[str], bool]
    console: Callable[[], Console]
    name: Callable[[], str]
    random: Callable[[], str]


def this_host() -> Host:
    """The machine we run on."""
    return Host(
        executable=sys.executable,
        pid=os.getpid(),
        temp_dir=temp_dir(),
        ports=PortProbe(port_is_free, pick_free_port, name_port_holder),
        read_text=read_text,
        stamp=_stamp,
        allowed_cpus=lambda: os.sched_getaffinity(0),
        count_cuda=count_cuda_devices,
        find_other=find_other_accelerator,
        count_other=_count_once(),
        other_devices=_other_devices,
        numa_nodes=_numa_nodes,
        topology=_read_topology_once(),
        packages=_packages,
        caches=_caches,
        gpus=_gpus,
        mig_parent=_mig_parent,
        is_local=is_this_machine,
        console=lambda: Console(_kind(1), _kind(2)),
        name=lambda: os.uname().nodename,
        random=lambda: os.urandom(8).hex(),
    )


def temp_dir() -> str:
    """The directory `tempfile.gettempdir` would name, without its import."""
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    for folder in (*named, "/tmp", "/var/tmp", "/usr/tmp"):  # noqa: S108  the search order of tempfile
        if folder and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return os.path.abspath(folder)
    return os.curdir


def read_text(path: str) -> str | None:
    """Text of a file, None if it is no regular file. Bytes that are not UTF-8 come as surrogates.

    Raises:
        OSError: the file is there but cannot be read.
    """
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _kind(fd: int) -> Kind:
    try:
        if os.isatty(fd):
            return "terminal"
        return "null" if os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev else "other"
    except OSError:
        return "null"  # it is closed


def _stamp() -> str:
    from time import strftime

    return strftime("%Y%m%d%H%M%S")


def _count_once() -> Callable[[str, Mapping[str, str]], int]:
    """`count_other_devices`, which may ask a plug-in: that takes seconds, so an answer is kept."""
    known: dict[str, int] = {}

    def count(name: str, environ: Mapping[str, str]) -> int:
        if name not in known:
            known[name] = count_other_devices(name, environ)
        return known[name]

    return count


def _other_devices(name: str, environ: Mapping[str, str]) -> Sequence[LocatedDevice]:
    if name == "cuda" and not os.path.exists("/dev/kfd"):
        return ()
    from dsl.devices.located import read_devices

    return read_devices(name, environ)


def _numa_nodes() -> Iterable[NumaNode]:
    from dsl.machine.topology import read_numa_nodes

    return read_numa_nodes()


def _read_topology_once() -> Callable[[Iterable[int]], Topology]:
    """`read_topology`, whose answers are kept: it reads several files for each core."""
    known: dict[tuple[int, ...], Topology] = {}

    def read(cpus: Iterable[int]) -> Topology:
        from dsl.machine.topology import read_topology

        wanted = tuple(cpus)
        if wanted not in known:
            known[wanted] = read_topology(wanted)
        return known[wanted]

    return read


def _packages(cpus: Iterable[int]) -> Sequence[Sequence[int]]:
    from dsl.machine.topology import read_packages

    return read_packages(cpus)


def _caches(cpus: Iterable[int]) -> Sequence[Sequence[int]]:
    from dsl.machine.topology import read_caches

    return read_caches(cpus)


def _gpus() -> Sequence[Device]:
    if not has_nvidia_driver():
        return ()
    from dsl.devices.nvidia import quick_devices

    return quick_devices()


def _mig_parent(name: str) -> str | None:
    from dsl.devices.nvidia import devices, mig_parent

    return mig_parent(name, devices())


def is_this_machine(host: str) -> bool:
    """Whether a host of the hostfile is this machine: by its name, else by owning one of its addresses."""
    name = host.rpartition("@")[2]
    own = os.uname().nodename
    if name in ("localhost", own) or name.partition(".")[0] == own or own.partition(".")[0] == name:
        return True
    import socket

    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False
