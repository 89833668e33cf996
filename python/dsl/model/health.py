"""What ``--doctor`` knows of a host, and what it says about a job."""

from __future__ import annotations

from dsl._record import Record
from dsl.model.request import Count, Moment, Port, Shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Annotated, Literal, TypeAlias

# Text, as in `dsl.model.request`.
Verdict: TypeAlias = "Literal['error', 'warning']"
Answer: TypeAlias = "Literal['', 'listens', 'refuses', 'silent', 'unreachable', 'stranger', 'small']"
CpuShare: TypeAlias = "Annotated[float, 0, 999_999]"
Pairs: TypeAlias = "tuple[tuple[Shown, Shown], ...]"


class Symptom(Record):
    """Something that would go wrong, or cost the job dearly."""

    level: Verdict
    """``error``: the job would fail or hang; ``warning``: it may fail, or be slow."""
    check: Shown
    """The check that found it, as docs/doctor.md names it."""
    text: Shown
    """One line: what, where and how to mend it, without the name of the host."""

    @property
    def line(self) -> str:
        """The text with the name of the check behind."""
        return f"{self.text} [{self.check}]"


class Directory(Record):
    """A directory that the job writes to."""

    use: Shown
    """What for, such as ``temporary files``."""
    path: Shown
    free_bytes: Moment
    """Bytes that this user may still write there."""
    free_files: Moment | None = None
    """Files that may still be made there; None: as many as the bytes allow."""
    runs_code: bool = True
    """Libraries that lie there can be loaded (it is not mounted ``noexec``)."""
    is_writable: bool = True


class Interface(Record):
    """A network interface."""

    name: Shown
    mtu: Count
    """Largest packet, in bytes."""
    is_up: bool
    addresses: tuple[Shown, ...]


class Holder(Record):
    """A process that has what the job needs."""

    pid: Count
    """Its pid; 0: unknown."""
    command: Shown
    """Its command, cut short."""
    what: Shown
    """What it holds, such as ``GPU 0 (30 GB)``; empty: it is only left over."""


class MeetingLook(Record):
    """Where the nodes of a job meet that reach it by themselves, as seen from one node."""

    name: Shown
    """The address as the user wrote it."""
    port: Port
    is_first: bool
    """This node has node rank 0, so it listens there."""
    option: Shown
    """The option that names the place."""
    addresses: tuple[Shown, ...]
    """What the name stands for here."""
    is_own: bool
    """One of the addresses belongs to this machine."""
    answer: Answer = ""
    """What a connection to it brought."""
    holder: Shown = ""
    """The process that listens there, on this machine."""


class ProgramLook(Record):
    """The program of the workers, their interpreter and its torch."""

    python: Shown = ""
    """Interpreter of the workers; empty: they run another program."""
    python_version: Shown = ""
    """Its version; empty: it does not run."""
    torch: Shown = ""
    """Version of its torch; empty: there is none."""
    torch_build: Shown = ""
    """The CUDA or HIP version that torch was built for; empty: for the CPU alone."""
    needs_torch: bool = False
    """The script imports torch, or a package that needs torch."""
    script: Shown = ""
    """A word for the contents of the script: equal on two hosts only if the script is."""
    shadows: tuple[Shown, ...] = ()
    """Files beside the script that hide modules which torch imports."""


class DeviceLook(Record):
    """The devices of a host."""

    accelerator: Shown = ""
    """Kind of the devices, such as ``cuda``; ``cpu``: none are used; empty: unknown."""
    count: Count = 0
    """Devices of the machine."""
    visible: Count = 0
    """Devices that the environment leaves visible."""
    mask: Shown = ""
    """The variable that hides devices, as ``NAME=VALUE``; empty: none is set."""
    problems: tuple[Shown, ...] = ()
    """What the driver says is wrong."""
    lacks_uvm: bool = False
    """There are NVIDIA devices without the file by which CUDA shares memory with them."""
    holders: tuple[Holder, ...] = ()
    """Other processes on the devices, and processes left over from earlier jobs of this user."""


class LimitLook(Record):
    """What limits the processes of this user. A number that is None has no limit, or is unknown."""

    shm_bytes: Moment | None = None
    """Size of /dev/shm."""
    shm_free_bytes: Moment | None = None
    open_files: Moment | None = None
    """Limit of open descriptors."""
    locked_bytes: Moment | None = None
    """Limit of locked memory."""
    address_bytes: Moment | None = None
    """Limit of address space."""
    has_rdma: bool = False
    """There are InfiniBand or RoCE adapters."""
    tasks_left: Moment | None = None
    """Processes and threads that may still be started."""
    tasks_limit: Shown = ""
    """What limits them."""
    memory_left: Moment | None = None
    """Bytes of memory that are left."""
    memory_limit: Shown = ""
    """What limits them."""
    cpus: Count = 1
    """CPUs that this process may run on."""
    cpu_quota: CpuShare | None = None
    """CPUs that its control group may use at a time."""
    governor: Shown = ""
    """How the frequency of the CPUs is governed, as ``DRIVER GOVERNOR``."""


class FolderLook(Record):
    """The directories to which the job writes."""

    found: tuple[Directory, ...] = ()
    lost_tmpdir: Shown = ""
    """The value of TMPDIR, if it is no directory that this user may write to."""
    locks: tuple[Shown, ...] = ()
    """Locks of compile caches that no process holds."""


class Health(Record):
    """What one host has for its part of a job."""

    workers: Count = 1
    """Workers of the job on this host."""
    peers: tuple[Shown, ...] = ()
    """Names of the other hosts; empty: the job runs on this host alone."""
    name: Shown = ""
    """Name of the machine (``uname -n``)."""
    name_addresses: tuple[Shown, ...] = ()
    """Addresses that this name stands for here."""
    name_is_own: bool = True
    """One of these addresses belongs to this machine."""
    slots_named: bool = False
    """The workers' devices are named by slots, whatever the mask says."""
    program: ProgramLook = ProgramLook()
    devices: DeviceLook = DeviceLook()
    limits: LimitLook = LimitLook()
    folders: FolderLook = FolderLook()
    interfaces: tuple[Interface, ...] = ()
    variables: Pairs = ()
    """Variables of the workers that steer libraries: NCCL, OpenMP, proxies and others."""
    missing_preloads: tuple[Shown, ...] = ()
    """Libraries of LD_PRELOAD that do not exist."""
    kernel: Pairs = ()
    """Interfaces of the kernel that the engine does without, and why."""
    meeting: MeetingLook | None = None
    """Where the nodes meet, for nodes that come by themselves."""
    token: Shown = ""
    """What this host says to connections that try the way to it."""
    port: Port = 0
    """Where it waits for them; 0: nowhere."""


class Target(Record):
    """A host to try the way to."""

    place: Count
    host: Shown
    """Its name."""
    addresses: tuple[Shown, ...]
    """Its addresses, best first."""
    port: Port
    token: Shown
    """What it says to a connection."""


class Way(Record):
    """What came of trying the way to a host."""

    place: Count
    """Place of that host."""
    address: Shown
    """The address that was tried."""
    answer: Answer
    """Empty: small and large packets go there and back."""
    why: Shown = ""
    """The kernel's reason, if it gave one."""
