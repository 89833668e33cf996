"""The checks of the doctor that need one host: facts in, findings out. Pure.

`HOST_CHECKS` is the table. Its names and mends are those of docs/doctor.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from dsl.model.health import Health, Symptom, Verdict
from dsl.words import BEYOND, counted, parse_number, quote, shorten

Found: TypeAlias = Iterator[tuple[Verdict, str]]
"""Level and text of each finding."""

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Variables that name a proxy, in small or capital letters."""
SHM = "/dev/shm"  # noqa: S108  the shared memory itself, where nothing is made
MEGABYTE = 1 << 20
GIGABYTE = 1 << 30

SMALL_SHM_BYTES = 512 * MEGABYTE
"""NCCL and data loaders need more shared memory than this (DeepSpeed's ds_report warns of less)."""
FULL_BYTES = 64 * MEGABYTE
"""With less space than this a directory counts as full: a compiled kernel or a log does not fit."""
FEW_BYTES = GIGABYTE
"""With less space than this a directory will soon be full."""
FEW_FILES = 1000
"""Files that a run with compiled kernels and logs easily makes."""
FEW_OPEN_FILES = 1024
"""The usual limit of a shell. Data loaders that share tensors, and connections to many ranks, need more."""
TASKS_EACH = 128
"""Threads that a worker with data loaders, OpenMP and NCCL easily has."""
LEAST_TASKS_EACH = 16
"""With fewer threads a worker cannot even import torch."""
MEMORY_EACH = GIGABYTE
"""A worker with torch and its context on a device takes about as much."""
LEAST_MEMORY_EACH = MEGABYTE * 256
"""The import of torch alone takes more."""
RDMA_BYTES = GIGABYTE
"""Memory that RDMA locks for the buffers of a few peers."""
STEERING_BY_DRIVER = ("intel_pstate", "intel_cpufreq", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose governor ``powersave`` reaches full speed."""


def size(number: int) -> str:
    """A number of bytes in short: ``64 MB``, ``1.5 GB``."""
    return f"{number / GIGABYTE:.1f} GB".replace(".0 ", " ") if number >= GIGABYTE else f"{number >> 20} MB"


def error(text: str) -> tuple[Verdict, str]:
    """A finding with which the job would fail or hang."""
    return "error", text


def warning(text: str) -> tuple[Verdict, str]:
    """A finding with which the job may fail, or be slow."""
    return "warning", text


def _interpreter(health: Health) -> Found:
    if health.program.python and not health.program.python_version:
        yield error(f"interpreter {health.program.python} does not run, install it there or name another")


def _torch(health: Health) -> Found:
    program = health.program
    if program.needs_torch and program.python_version and not program.torch:
        yield error(
            f"the script imports torch, which {program.python} does not have: install torch there, or "
            "activate the environment that has it before dsl"
        )


def _torch_build(health: Health) -> Found:
    program, devices = health.program, health.devices
    if program.torch and not program.torch_build and devices.accelerator == "cuda" and devices.count:
        yield error(
            f"torch {program.torch} of {program.python} is built for the CPU alone, but "
            f"{counted(devices.count, 'GPU', 'is', 'are')} there: install torch's "
            "CUDA build"
        )


def _device_mask(health: Health) -> Found:
    devices = health.devices
    if devices.count and devices.mask and not devices.visible:
        yield warning(
            f"{devices.mask} leaves none of {counted(devices.count, 'device')} visible: the workers run on "
            "the CPU; unset or correct it, or set DS_ACCELERATOR=cpu if that is meant"
        )


def _workers(health: Health) -> Found:
    devices = health.devices
    is_named = health.slots_named or devices.accelerator == "cpu"
    if devices.visible and health.workers > devices.visible and not is_named:
        yield warning(
            f"{health.workers} workers, but {counted(devices.visible, 'device')}: start as many workers as "
            "devices, or let the script share them"
        )


def _driver(health: Health) -> Found:
    for problem in health.devices.problems:
        yield warning(problem) if "pynvml" in problem else error(problem)  # dsl alone misses pynvml


def _uvm(health: Health) -> Found:
    if health.devices.lacks_uvm:
        yield error(
            "there are NVIDIA devices without /dev/nvidia-uvm, so CUDA does not start: run nvidia-modprobe "
            "-u -c=0 as root, or start the container with --gpus"
        )


def _leftovers(health: Health) -> Found:
    for holder in health.devices.holders:
        who = f"pid {holder.pid} ({holder.command})"
        if holder.what:
            yield warning(f"{who} uses {holder.what}: end it (kill {holder.pid}), or leave the device out")
        else:
            yield warning(f"{who} is left over from an earlier job: end it (kill {holder.pid})")


def _shared_memory(health: Health) -> Found:
    total, free = health.limits.shm_bytes, health.limits.shm_free_bytes
    if total is not None and total < SMALL_SHM_BYTES:
        yield warning(
            f"{SHM} has {size(total)}, too little for NCCL and data loaders: start the container with "
            "--shm-size=8g, in Kubernetes mount an emptyDir with medium: Memory there"
        )
    elif total is not None and free is not None and free < FULL_BYTES:
        yield warning(
            f"{SHM} has {size(free)} left of {size(total)}: remove what earlier jobs have left there"
        )


def _open_files(health: Health) -> Found:
    if health.limits.open_files is not None and health.limits.open_files <= FEW_OPEN_FILES:
        yield warning(
            f"a process may open {health.limits.open_files} files, data loaders and many ranks need more: "
            "ulimit -n 65536 (container: --ulimit nofile=65536, ssh and Slurm: /etc/security/limits.conf)"
        )


def _processes(health: Health) -> Found:
    limits = health.limits
    left = limits.tasks_left
    if left is None or left >= health.workers * TASKS_EACH:
        return
    level: Verdict = "error" if left < health.workers * LEAST_TASKS_EACH else "warning"
    text = (
        f"{limits.tasks_limit} leaves {left} processes and threads for {counted(health.workers, 'worker')}: "
        f"raise it to {health.workers * TASKS_EACH} or more (container: --pids-limit, user: ulimit -u)"
    )
    yield level, text


def _memory(health: Health) -> Found:
    limits = health.limits
    left = limits.memory_left
    if left is None or left >= health.workers * MEMORY_EACH:
        return
    level: Verdict = "error" if left < health.workers * LEAST_MEMORY_EACH else "warning"
    text = (
        f"{limits.memory_limit} leaves {size(left)} of memory for {counted(health.workers, 'worker')}, the "
        "kernel would kill some: raise the limit (container: --memory, Slurm: --mem), or start fewer workers"
    )
    yield level, text


def _address_space(health: Health) -> Found:
    space = health.limits.address_bytes
    if space is not None and (health.devices.accelerator != "cpu" or space < 64 * GIGABYTE):
        yield warning(
            f"the address space of a process is limited to {size(space)}, CUDA and large models reserve "
            "far more: ulimit -v unlimited"
        )


def _locked_memory(health: Health) -> Found:
    limits = health.limits
    if limits.has_rdma and limits.locked_bytes is not None and limits.locked_bytes < RDMA_BYTES:
        yield warning(
            f"a process may lock {size(limits.locked_bytes)} of memory, RDMA needs more: ulimit -l unlimited "
            "(container: --ulimit memlock=-1)"
        )


def _cpus(health: Health) -> Found:
    limits = health.limits
    if limits.cpu_quota is not None and limits.cpu_quota < min(health.workers, limits.cpus):
        yield warning(
            f"the control group gives {limits.cpu_quota:g} CPUs at a time to "
            f"{counted(health.workers, 'worker')}: raise the limit (container: --cpus), or start fewer "
            "workers"
        )
    elif limits.cpus < health.workers:
        yield warning(
            f"{health.workers} workers share {counted(limits.cpus, 'CPU')}: ask for more CPUs (Slurm: "
            "--cpus-per-task, else taskset and the cpuset), or start fewer workers"
        )


def _threads(health: Health) -> Found:
    limits = health.limits
    text = dict(health.variables).get("OMP_NUM_THREADS", "")
    if not text:
        return
    words = [word.strip() for word in text.split(",")]  # one for each level of nested teams
    mend = f"set it to {max(limits.cpus // health.workers, 1)} or unset it"
    if not all(word.isascii() and word.isdigit() and word.strip("0") for word in words):
        yield warning(f"OMP_NUM_THREADS={quote(text)} is no number of threads, so OpenMP ignores it: {mend}")
        return
    first = shorten(words[0])
    threads = BEYOND if (number := parse_number(words[0])) is None else number
    if threads > limits.cpus:
        yield warning(
            f"OMP_NUM_THREADS={first}, but there {'is' if limits.cpus == 1 else 'are'} "
            f"{counted(limits.cpus, 'CPU')}: {mend}"
        )
    elif threads > 1 and threads * health.workers > limits.cpus:
        yield warning(
            f"OMP_NUM_THREADS={first} in each of {health.workers} workers, but there are {limits.cpus} CPUs: "
            f"{mend}"
        )


def _governor(health: Health) -> Found:
    driver, _, governor = health.limits.governor.partition(" ")
    if governor == "powersave" and driver not in STEERING_BY_DRIVER:
        yield warning(
            "the CPUs run at their lowest frequency (governor powersave): cpupower frequency-set -g "
            "performance"
        )


def _disk(health: Health) -> Found:
    for folder in health.folders.found:
        where = f"{folder.path} ({folder.use})"
        mend = "make room, or name another directory" + (
            " with TMPDIR" if folder.use == "temporary files" else ""
        )
        if folder.free_bytes < FULL_BYTES:
            yield error(f"{where} is full, {size(folder.free_bytes)} left: {mend}")
        elif folder.free_files is not None and folder.free_files < FEW_FILES:
            yield error(f"{where} can take {folder.free_files} more files (inodes): {mend}")
        elif folder.free_bytes < FEW_BYTES:
            yield warning(f"{where} has {size(folder.free_bytes)} left: {mend}")


def _cache_owner(health: Health) -> Found:
    for folder in health.folders.found:
        if not folder.is_writable:
            yield warning(
                f"{folder.path} ({folder.use}) cannot be written by this user: correct its owner, or name "
                "another directory"
            )


def _noexec(health: Health) -> Found:
    for folder in health.folders.found:
        if not folder.runs_code and folder.use != "log files":
            yield warning(
                f"{folder.path} ({folder.use}) is mounted noexec, compiled kernels cannot be loaded from "
                "there: set TMPDIR and TRITON_CACHE_DIR to another directory"
            )


def _tmpdir(health: Health) -> Found:
    folders = health.folders
    if folders.lost_tmpdir:
        yield warning(
            f"TMPDIR={folders.lost_tmpdir} is no directory that this user can write to, so others are used: "
            "make it on every host, or unset it"
        )


def _stale_lock(health: Health) -> Found:
    for path in health.folders.locks:
        yield error(
            f"{path} is a lock whose owner is gone, and a compile would wait for it for ever: remove it"
        )


def _socket_interface(health: Health) -> Found:
    variables = dict(health.variables)
    if not health.interfaces:
        return
    up = [face.name for face in health.interfaces if face.is_up and face.addresses]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = variables.get(name, "")
        if not value or _matches(name, value, up):
            continue
        have = ", ".join([name for name in up if name != "lo"][:6]) or "only lo"
        yield error(
            f"{name}={value} is no interface with an address here: correct or unset it, there is {have}"
        )


def _matches(variable: str, value: str, names: list[str]) -> bool:
    """NCCL takes prefixes, ``=`` before exact names and ``^`` before excluded ones; the others take names."""
    if not variable.startswith("NCCL"):
        return all(word in names for word in value.split(","))
    is_excluding, rest = value.startswith("^"), value.lstrip("^")
    is_exact, rest = rest.startswith("="), rest.lstrip("=")
    words = [word for word in rest.split(",") if word]
    hits = [name for name in names if any(name == w if is_exact else name.startswith(w) for w in words)]
    return len(hits) < len(names) if is_excluding else bool(hits)


def _loopback(health: Health) -> Found:
    if any(face.name == "lo" and not face.is_up for face in health.interfaces):
        yield error(
            "the interface lo is down, and processes of one host meet through it: ip link set lo up (as root)"
        )


def _own_name(health: Health) -> Found:
    if not health.peers or "GLOO_SOCKET_IFNAME" in dict(health.variables):
        return
    mend = "correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that reaches the others"
    found = health.name_addresses
    if not found:
        yield warning(f"its own name {health.name} has no address, and gloo asks for it: {mend}")
    elif not health.name_is_own:
        yield error(f"its own name {health.name} is the address of another machine ({found[0]}): {mend}")
    elif all(address.startswith("127.") or address == "::1" for address in found):
        yield warning(
            f"its own name {health.name} is {found[0]}, where other hosts do not reach gloo: {mend}"
        )


def unproxied(variables: Mapping[str, str], hosts: Sequence[str]) -> tuple[str, list[str]]:
    """The variable that names a proxy, and the hosts that ``no_proxy`` does not except from it."""
    both = [name for word in PROXIES for name in (word, word.upper())]
    name = next((one for one in both if variables.get(one)), "")
    if not name:
        return "", []
    text = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    exceptions = [word.strip() for word in text.split(",") if word.strip()]
    return name, [host for host in hosts if not any(_covers(one, host) for one in exceptions)]


def _covers(exception: str, host: str) -> bool:
    """An exception is ``*``, a name with all names below it, an address, or a network as ``10.0.0.0/8``."""
    if exception == "*":
        return True
    host = host.rpartition("@")[2].lower()
    name = exception.lower().removeprefix("*").lstrip(".").partition(":")[0]
    if host == name or host.endswith(f".{name}"):
        return True
    if "/" not in exception:
        return False
    from ipaddress import ip_address, ip_network

    try:
        return ip_address(host) in ip_network(exception, strict=False)
    except ValueError:
        return False


def _proxy(health: Health) -> Found:
    name, hosts = unproxied(dict(health.variables), health.peers)
    if hosts:
        yield warning(
            f"{name} is set, and no_proxy leaves out {', '.join(hosts[:4])}: connections between the hosts "
            "may go to the proxy; add the hosts to no_proxy"
        )


def _kernel(health: Health) -> Found:
    for name, why in health.kernel:
        if why and name != "cgroup":
            yield warning(
                f"the kernel does not offer {name} ({why}), so starts and ends are slower: use Linux 5.9 or "
                "later, or let the container's seccomp profile pass it"
            )


def _slow_settings(health: Health) -> Found:
    variables = dict(health.variables)
    for name in ("CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if variables.get(name, "0").strip() not in ("", "0"):
            yield warning(f"{name}={variables[name]} makes training much slower: unset it after debugging")
    if health.limits.has_rdma and variables.get("NCCL_IB_DISABLE", "0").strip() == "1":
        yield warning("NCCL_IB_DISABLE=1 keeps NCCL from the InfiniBand adapters: unset it")
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield warning("TORCH_DISTRIBUTED_DEBUG=DETAIL makes training slower: unset it after debugging")


def _preload(health: Health) -> Found:
    for path in health.missing_preloads:
        yield warning(f"LD_PRELOAD names {path}, which does not exist: correct or unset it")


def _shadowed_module(health: Health) -> Found:
    for path in health.program.shadows:
        yield error(f"{path} hides the module that torch imports by this name: rename the file")


def _meeting_point(health: Health) -> Found:
    look = health.meeting
    if look is None:
        return
    where, option = f"{look.name} port {look.port}", look.option
    if not look.addresses:
        yield error(f"{look.name} has no address here: check the name or give an address with {option}")
    elif look.is_first and not look.is_own:
        yield error(
            f"{look.name} ({look.addresses[0]}) is not this machine, where node 0 listens: correct {option}"
        )
    elif look.is_own and look.holder and not look.is_first:  # for node 0 its plan says so
        text = f"port {look.port} is taken by {look.holder}: end it, or choose another port on every node"
        yield warning(text)
    elif all(one.startswith("127.") or one == "::1" for one in look.addresses):
        yield error(
            f"{look.name} is this machine itself on every node: give {option} an address that all can reach"
        )
    elif look.answer in ("silent", "unreachable"):
        what = "does not answer" if look.answer == "silent" else "cannot be reached"
        yield error(f"{where} {what}: check the address, the route and the firewall of node 0")


_CHECKS: tuple[Callable[[Health], Found], ...] = (
    *(_interpreter, _torch, _torch_build, _device_mask),
    *(_workers, _driver, _uvm, _leftovers),
    *(_shared_memory, _open_files, _processes, _memory, _address_space),
    *(_locked_memory, _cpus, _threads, _governor),
    *(_disk, _cache_owner, _noexec, _tmpdir, _stale_lock),
    *(_socket_interface, _loopback, _own_name, _proxy),
    *(_kernel, _slow_settings, _preload, _shadowed_module, _meeting_point),
)
HOST_CHECKS = {check.__name__[1:].replace("_", "-"): check for check in _CHECKS}
"""The checks of one host, by the names that their functions have here."""


def find_on_host(health: Health) -> list[Symptom]:
    """What is wrong on a host."""
    return [
        Symptom(level, name, text) for name, check in HOST_CHECKS.items() for level, text in check(health)
    ]
