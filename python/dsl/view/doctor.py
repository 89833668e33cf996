"""Looks at this host for the doctor, and tries the ways to others: facts, no judgement. Changes nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from subprocess import DEVNULL, SubprocessError, check_output
from threading import Event, Thread
from typing import Any

from dsl._core import kernel_interfaces
from dsl._record import replace
from dsl.doctor.host_checks import PROXIES
from dsl.facts import Facts
from dsl.forkserver.preload import TORCH_PACKAGES, find_imports, package_of
from dsl.machine.crowd import close, serve
from dsl.machine.kernel import list_names, read_fact, read_fields, room_left, shared_memory
from dsl.machine.network import interfaces
from dsl.machine.programs import read_constants
from dsl.model.health import (
    Answer,
    DeviceLook,
    Directory,
    FolderLook,
    Health,
    Holder,
    LimitLook,
    ProgramLook,
    Target,
    Way,
)
from dsl.model.job import Flavour, Job
from dsl.model.request import OutputRequest, Program
from dsl.plan.worker import inherited_environment, interpreter_of

INTERPRETER_S = 5.0
"""An interpreter gets this long to say its version."""

LARGEST_SCRIPT = 1 << 20
"""Most bytes of a script that are read."""

MOST_LOCKS = 8
"""Stale locks that are named."""

ASK = """
import sys
sys.path[:] = [one for one in sys.path if one]
from importlib.util import find_spec
found = find_spec("torch")
places = found.submodule_search_locations if found else None
print(sys.version.split()[0])
print(next(iter(places), "") if places else "")
"""
"""Makes an interpreter print its version and the folder of its torch, without an import of torch."""

STEERING = ("NCCL_", "GLOO_", "TP_", "TORCH_NCCL_", "UCX_", "FI_")
"""Prefixes of variables that steer how hosts talk."""
OTHERS = ("OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "no_proxy", "NO_PROXY")

HIDDEN_BY_FILES = frozenset(
    {
        *("torch", "numpy", "deepspeed", "random", "types", "logging", "queue", "copy", "enum", "inspect"),
        *("socket", "signal", "json", "tempfile", "typing", "typing_extensions", "threading", "pickle"),
        *("multiprocessing", "dataclasses", "functools", "collections", "operator", "warnings", "weakref"),
        *("string", "struct", "select", "subprocess", "platform", "numbers", "contextlib", "importlib"),
    }
)
"""Modules that torch imports: a file of such a name beside the script takes the place of one."""

MARK = "DSL_JOB_ID"
"""Marks the processes of a job of dsl."""

REAPERS = ("systemd", "init", "tini", "dumb-init")
"""Programs that adopt a process whose parents are gone, beside pid 1."""

MOST_HOLDERS = 8
LONGEST_COMMAND = 60
USED_BYTES = 256 << 20
"""Memory of a device that counts as used: a monitor takes less."""

BULK = 64 * 1024
"""Bytes that each side sends: many packets of full size, so that a network shows that loses large ones."""
TRY_S = 2.0
"""All ways of a host are tried at once, for so long."""
CALL_S = 5.0
"""A caller gets so long."""
MOST_ADDRESSES = 2
"""Addresses of a host that are tried."""
WITH_TOKEN = 3
"""Answers that a call has had when the host has said its token."""
RANK: tuple[Answer, ...] = ("", "listens", "small", "refuses", "stranger", "silent", "unreachable")
"""Answers, the best first."""


def look_here(
    job: Job, environ: Mapping[str, str], facts: Facts, *, node_rank: int, workers: int, cwd: str
) -> Health:
    """Look at this host for its part of a job. ``cwd``: where the job runs. Raises nothing."""
    inherited = inherited_environment(job, environ)
    others = [host.name for place, host in enumerate(job.hosts) if place != node_rank]
    spans = others or ([job.meeting.address] if job.node_count > 1 and job.meeting.address else [])
    name = facts.names.host
    named = facts.network.resolve(name) if spans else ()
    return Health(
        workers=workers,
        peers=tuple(spans),
        name=name,
        name_addresses=named,
        name_is_own=any(map(facts.network.is_own, named)),
        interfaces=interfaces(),
        slots_named=bool(job.hosts),
        program=_program(job.program, job.flavour, inherited, facts, cwd),
        devices=_devices(job.accelerator, inherited, facts),
        limits=_limits(facts),
        folders=_folders(job.output, inherited, facts, cwd),
        variables=_variables(inherited),
        missing_preloads=_missing_preloads(inherited),
        kernel=tuple(kernel_interfaces().items()),
    )


def _program(
    program: Program, flavour: Flavour, environ: Mapping[str, str], facts: Facts, cwd: str
) -> ProgramLook:
    if program.kind not in ("script", "module"):
        return ProgramLook()
    python = interpreter_of(flavour, environ, facts.names.executable)
    version, torch = _ask_interpreter(python, environ, cwd)
    found = ProgramLook(python, version)
    if torch:
        said = read_constants(os.path.join(torch, "version.py"), ("__version__", "cuda", "hip"))
        # A build of somebody's own has none of them: nothing is known about it.
        build = said.get("cuda") or said.get("hip") or ("" if "cuda" in said else "unknown")
        found = replace(found, torch=said.get("__version__") or "of an unknown version", torch_build=build)
    path = os.path.join(cwd, program.script)
    return _with_script(found, path) if program.kind == "script" and os.path.isfile(path) else found


def _ask_interpreter(python: str, environ: Mapping[str, str], cwd: str) -> tuple[str, str]:
    """The version of an interpreter, empty if it does not run, and the folder of its torch."""
    words, folder, env = [python, "-c", ASK], cwd if os.path.isdir(cwd) else None, dict(environ)
    try:
        said = check_output(words, cwd=folder, env=env, stdin=DEVNULL, stderr=DEVNULL, timeout=INTERPRETER_S)
    except (OSError, ValueError, SubprocessError):
        return "", ""
    lines = [*said.decode(errors="replace").splitlines(), "", ""]
    return lines[0], lines[1]


def _with_script(found: ProgramLook, path: str) -> ProgramLook:
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST_SCRIPT)
    except OSError:
        return found
    needs_torch = False
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # another check says so
        outer = [name.module for name in find_imports(text, is_program=True) if not name.is_inner]
        needs_torch = any(package_of(module) in TORCH_PACKAGES for module in outer)
    folder, own = os.path.split(path)
    names = [name for name in sorted(list_names(folder)) if name != own and name.endswith(".py")]
    hiding = [f"{folder}/{name}" for name in names if needs_torch and name[:-3] in HIDDEN_BY_FILES]
    return replace(
        found, script=sha256(text).hexdigest()[:16], needs_torch=needs_torch, shadows=tuple(hiding)
    )


def _devices(named: str, environ: Mapping[str, str], facts: Facts) -> DeviceLook:
    from dsl.devices import ACCELERATORS
    from dsl.devices.counted import count_visible_devices
    from dsl.errors import DslError

    left = _left_over()
    if environ.get("DS_ACCELERATOR") == "cpu":
        return DeviceLook("cpu", holders=left)
    named = "" if named == "cpu" else named  # also if all devices are hidden
    kind = named or environ.get("DS_ACCELERATOR") or facts.devices.other_name or "cuda"
    try:
        count = facts.devices.cuda_count if kind == "cuda" else facts.devices.other_count(kind, environ)
        visible = count_visible_devices(kind, environ, facts.devices)
    except (DslError, KeyError):
        return DeviceLook(holders=left)
    if not count:
        return DeviceLook("cpu", holders=left)
    variable = ACCELERATORS[kind].visible_variable
    mask = f"{variable}={environ[variable]}" if variable in environ else ""
    found = DeviceLook(kind, count, visible, mask, holders=left)
    if kind != "cuda" or not facts.devices.survey.source:
        return found
    return replace(
        found,
        problems=tuple(facts.devices.survey.problems),
        lacks_uvm=os.path.exists("/dev/nvidia0") and not os.path.exists("/dev/nvidia-uvm"),
        holders=(*on_devices(count), *left),
    )


def _limits(facts: Facts) -> LimitLook:
    def limit(which: int) -> int | None:
        soft = resource.getrlimit(which)[0]
        return None if soft == resource.RLIM_INFINITY else soft

    room = room_left()
    memory = [(room.memory_bytes, room.memory_limit)] if room.memory_bytes is not None else []
    if left := _free_memory():
        memory.append((left, "this machine"))
    tasks = [(room.tasks, room.tasks_limit)] if room.tasks is not None else []
    own = limit(resource.RLIMIT_NPROC)
    if own is not None and os.geteuid():
        tasks.append((max(own - _count_tasks(os.getuid()), 0), f"ulimit -u ({own})"))
    least_memory = min(memory, default=(None, ""), key=lambda one: one[0] or 0)
    least_tasks = min(tasks, default=(None, ""), key=lambda one: one[0] or 0)
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    governor = f"{read_fact(f'{folder}/scaling_driver')} {read_fact(f'{folder}/scaling_governor')}"
    size, free = shared_memory()
    return LimitLook(
        size or None,
        free if size else None,
        open_files=limit(resource.RLIMIT_NOFILE),
        locked_bytes=limit(resource.RLIMIT_MEMLOCK),
        address_bytes=limit(resource.RLIMIT_AS),
        has_rdma=bool(list_names("/sys/class/infiniband")),
        tasks_left=least_tasks[0],
        tasks_limit=least_tasks[1],
        memory_left=least_memory[0],
        memory_limit=least_memory[1],
        cpus=len(facts.cpus.allowed),
        cpu_quota=room.cpus,
        governor=governor.strip(),
    )


def _free_memory() -> int:
    """Bytes of memory that are available without swapping."""
    words = read_fields("/proc/meminfo").get("MemAvailable", "").split()
    return int(words[0]) << 10 if words and words[0].isdigit() else 0


def _folders(output: OutputRequest, environ: Mapping[str, str], facts: Facts, cwd: str) -> FolderLook:
    temp, home = facts.names.temp_dir, facts.files.home or "/"
    user = environ.get("USER") or environ.get("LOGNAME") or ""
    extensions = environ.get("TORCH_EXTENSIONS_DIR") or f"{home}/.cache/torch_extensions"
    logs = output.each_rank_log or output.log_dir
    places = [("temporary files", temp)]
    if logs:
        places.append(("log files", os.path.join(cwd, logs)))
    for variable, usual in (
        ("TORCHINDUCTOR_CACHE_DIR", f"{temp}/torchinductor_{user}"),
        ("TRITON_CACHE_DIR", f"{home}/.triton"),
        ("TORCH_EXTENSIONS_DIR", extensions),
    ):
        if os.path.isdir(path := environ.get(variable) or usual):
            places.append(("compile cache", path))
    asked = environ.get("TMPDIR", "")
    is_lost = bool(asked) and not (os.path.isdir(asked) and os.access(asked, os.W_OK | os.X_OK))
    return FolderLook(
        tuple([one for use, path in places if (one := _folder(use, path))]),
        asked if is_lost else "",
        _unheld(_batons(extensions)),
    )


def _folder(use: str, path: str) -> Directory | None:
    """Facts about a directory, or about the first existing one above it."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Directory(
        use,
        path,
        found.f_frsize * found.f_bavail,
        found.f_favail if found.f_files else None,
        runs_code=not found.f_flag & os.ST_NOEXEC,
        is_writable=use != "compile cache" or os.access(path, os.W_OK | os.X_OK),
    )


def _batons(folder: str) -> list[str]:
    """Lock files of torch's C++ extensions: ``VERSION/NAME/lock``, or ``NAME/lock``.

    torch waits as long as such a file exists (`torch.utils.file_baton`). The locks of Inductor and Triton end
    with their processes.
    """
    found = []
    for name in list_names(folder)[:100]:
        one = f"{folder}/{name}"
        found += [one, *[f"{one}/{inner}" for inner in list_names(one)[:200]]]
    locks = [f"{path}/lock" for path in found]
    return [path for path in locks if os.path.isfile(path)][:MOST_LOCKS]


def _variables(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Variables that the checks read. A proxy's address may hold a password: only its presence is kept."""
    names = [name for name in environ if name.startswith(STEERING) or name in OTHERS]
    kept = [(name, environ[name]) for name in sorted(names)]
    both = [name for word in PROXIES for name in (word, word.upper()) if environ.get(name)]
    return (*kept, *[(name, "set") for name in both])


def _missing_preloads(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Paths of LD_PRELOAD that do not exist. Words without a slash are found by the loader."""
    words: Sequence[str] = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return tuple([word for word in words if "/" in word and "$" not in word and not os.path.exists(word)])


def _all(*facts: str) -> Iterator[dict[str, Any]]:
    """These facts of all processes, None for what this user may not see; nothing if psutil is missing."""
    try:
        from psutil import process_iter
    except ImportError:
        return
    for one in process_iter(["pid", *facts]):
        yield one.info


def command_of(pid: int) -> str:
    """The command of a process, cut short."""
    words = read_fact(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return (words or read_fact(f"/proc/{pid}/comm"))[:LONGEST_COMMAND]


def _left_over() -> tuple[Holder, ...]:
    """Processes with a job's token whose supervisor is gone: init or another reaper has adopted them."""
    if "dsl" in command_of(1):
        return ()  # a guard adopts what its own job leaves, and clears it away
    own = os.environ.get(MARK)
    found = []
    for process in _all("environ", "ppid"):
        token, parent = (process["environ"] or {}).get(MARK), process["ppid"]
        if token and token != own and (parent == 1 or read_fact(f"/proc/{parent}/comm") in REAPERS):
            found.append(Holder(process["pid"], command_of(process["pid"]), ""))
    return tuple(found[:MOST_HOLDERS])


def _count_tasks(uid: int) -> int:
    """Threads of all processes of a user."""
    own = [one for one in _all("uids", "num_threads") if one["uids"] and one["uids"].real == uid]
    return sum(one["num_threads"] or 0 for one in own)


def on_devices(count: int) -> tuple[Holder, ...]:
    """Processes that compute on the NVIDIA devices of this machine, as far as the driver names them."""
    from dsl.devices.nvidia import Nvml, NvmlError

    found = []
    try:
        with Nvml() as driver:
            for number in range(count):
                device = driver.ask("device", number=number)
                for pid, used in driver.ask("processes", device):
                    if (used is None or used >= USED_BYTES) and pid != os.getpid():
                        size = "" if used is None else f" ({used >> 20} MB)"
                        command = command_of(pid) or "of another user or container"
                        found.append(Holder(pid, command, f"GPU {number}{size}"))
    except NvmlError:
        pass  # the survey of the devices says so
    return tuple(found[:MOST_HOLDERS])


def _unheld(paths: Sequence[str]) -> tuple[str, ...]:
    """Those of some files that no process has open. A process of another user or host may have one open."""
    if not paths:
        return ()
    held = {file.path for one in _all("open_files") for file in one["open_files"] or ()}
    return tuple([path for path in paths if os.path.realpath(path) not in held])


class Porch:
    """A port that says the token to all who connect, and takes and sends bulk. A context manager.

    A thread serves it: the process beside it waits for its head.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        """``ports``: those to try, in this order; 0: any free one."""
        self.token = os.urandom(8).hex()
        """What it says."""
        self.port = 0
        """Where it listens; 0: it could not."""
        self._is_over = Event()
        self._socket: socket.socket | None = None
        for port in ports:
            with suppress(OSError):
                self._socket = _listen(port)
                self.port = self._socket.getsockname()[1]
                break

    def __enter__(self) -> Porch:  # noqa: PYI034  typing has no Self before 3.11
        if self._socket is not None:
            Thread(target=self._serve, args=(self._socket,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._socket is not None:
            close(self._socket, self._is_over)

    def _serve(self, door: socket.socket) -> None:
        def answer(asked: bytearray) -> bytes | None:
            return bytes(BULK) if len(asked) >= BULK else None

        greeting = self.token.encode()
        serve(door, self._is_over, answer, within_s=CALL_S, most_bytes=BULK, greeting=greeting)


def _listen(port: int) -> socket.socket:
    """A listening socket for IPv4 and, if there is IPv6, for that, too. Raises OSError."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", port), backlog=256)


def try_ways(targets: Sequence[Target], within_s: float = TRY_S) -> tuple[Way, ...]:
    """Try the ways to some hosts, all at once; the best answer of a host's addresses counts."""

    async def try_host(target: Target) -> list[Way]:
        tries = [_try(target, address, within_s) for address in target.addresses[:MOST_ADDRESSES]]
        return sorted(await asyncio.gather(*tries), key=lambda way: RANK.index(way.answer))[:1]

    async def try_all() -> list[list[Way]]:
        return await asyncio.gather(*map(try_host, targets))

    return tuple([way for ways in asyncio.run(try_all()) for way in ways])


async def _try(target: Target, address: str, within_s: float) -> Way:
    """Try the way to one address."""
    answers: list[Answer] = ["silent"]
    why = ""
    try:
        await asyncio.wait_for(_talk(target, address, answers), within_s)
    except (asyncio.TimeoutError, TimeoutError):
        pass  # the last answer holds
    except ConnectionRefusedError:
        answers.append("refuses")
    except ConnectionResetError as error:
        if len(answers) < WITH_TOKEN:
            why = _reason(error)
            answers.append("unreachable")
    except (OSError, UnicodeError) as error:
        why = _reason(error)
        answers.append("unreachable")
    return Way(target.place, address, answers[-1], why)


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the name has no address"
    return os.strerror(getattr(error, "errno", None) or errno.EINVAL).lower()


async def _talk(target: Target, address: str, answers: list[Answer]) -> None:
    """Send and take bulk; each step adds what the answer is if nothing follows. Raises OSError."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, place = (
        await loop.getaddrinfo(address, target.port, type=socket.SOCK_STREAM)
    )[0]
    with socket.socket(family, kind, protocol) as caller:
        caller.setblocking(False)
        await loop.sock_connect(caller, place)
        reader, writer = await asyncio.open_connection(sock=caller.dup())  # closed with the writer
    try:
        answers.append("small")
        writer.write(bytes(BULK))
        said = await reader.readexactly(len(target.token))
        answers.append("stranger")
        if said == target.token.encode():
            answers.append("small")
            await reader.readexactly(BULK)
            answers.append("")
    except asyncio.IncompleteReadError:
        answers.append("stranger")
    finally:
        writer.close()


def knock(addresses: Sequence[str], port: int, within_s: float = TRY_S) -> Answer:
    """What answers at a port of a host. We send nothing."""
    answers: list[Answer] = []
    for address in addresses[:MOST_ADDRESSES]:
        try:
            with socket.create_connection((address, port), within_s):
                answers.append("listens")
        except ConnectionRefusedError:
            answers.append("refuses")
        except TimeoutError:
            answers.append("silent")
        except OSError:
            answers.append("unreachable")
    return min(answers, key=RANK.index, default="unreachable")
