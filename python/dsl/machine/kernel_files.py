"""Files of the kernel and of drivers in ``/dev``, ``/proc`` and ``/sys`` that describe CPUs and devices."""

from __future__ import annotations

import os
import time

LARGEST_FILE = 1 << 16
"""Most bytes that are read of a file."""


def list_names(folder: str) -> list[str]:
    """Names in a folder; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def numbered(folder: str, prefix: str) -> list[str]:
    """Names in a folder that consist of the prefix and a number."""
    size = len(prefix)
    return [name for name in list_names(folder) if name[:size] == prefix and name[size:].isdigit()]


def read_fact(path: str) -> str:
    """The text of a small file of the kernel; empty if there is no such file.

    One read without a buffer: large machines have hundreds of these files. In Linux 5.15-rc1 lists of CPUs
    end with a zero byte.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, LARGEST_FILE).decode("utf-8", "replace").strip("\0 \t\n")
    except OSError:
        return ""
    finally:
        os.close(fd)


def read_fields(path: str) -> dict[str, str]:
    """The fields of a file with lines ``NAME: VALUE``; empty if there is no such file."""
    pairs = [line.partition(":") for line in read_fact(path).splitlines()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def pci_address(text: str) -> str:
    """A PCI address as sysfs spells it: NVML's ``00000000:07:00.0`` is ``0000:07:00.0``."""
    domain, colon, rest = text.strip().lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if colon else ""


def read_numa_node(address: str, root: str = "/") -> int | None:
    """NUMA node of a PCI device by sysfs; None when the kernel does not know it (it says -1)."""
    text = read_fact(os.path.join(root, "sys/bus/pci/devices", address, "numa_node"))
    return int(text) if text.isascii() and text.isdecimal() else None


def has_nvidia_driver(root: str = "/") -> bool:
    """Whether there are files of an NVIDIA driver (on WSL: of any GPU's driver)."""
    names = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")
    return any(os.path.exists(os.path.join(root, name)) for name in names)


def has_intel_torch(folder: str) -> bool:
    """Whether a torch for Intel GPUs is installed in this folder of packages."""
    names = ("torch/lib/libtorch_xpu.so", "intel_extension_for_pytorch")
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def shared_memory() -> tuple[int, int]:
    """Bytes of shared memory, and how many of them are free; 0 if there is none."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108  the memory itself, where nothing is made
    except OSError:
        return 0, 0
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has for itself; 0 if it is gone."""
    words = read_fact(f"/proc/{pid}/statm").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE") if len(words) > 2 else 0


def began_ns(pid: int | str) -> int | None:
    """CLOCK_REALTIME when a process was started, to a hundredth of a second; None: /proc does not say."""
    found = read_fact(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not found:
        return None
    ticks = int(found[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
