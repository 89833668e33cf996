"""Reads files that workers will load into the page cache: once and in order, instead of page by page.

Nothing is imported or executed: the path of the interpreter shows where its libraries and those of torch are.
"""

from __future__ import annotations

import errno
import os
import time

from dsl.machine.check import find_executable
from dsl.machine.kernel_files import read_fields
from dsl.model.outcome import Prewarmed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CHUNK = 4 << 20
"""Bytes of one read."""

SAMPLE = 128 << 10
"""One byte of this many is tested to see whether they are in memory: the kernel reads ahead as much."""

LONGEST_S = 60.0
"""Seconds after which the workers have to read the rest."""

MEMORY_SHARE = 2
"""At most the free memory divided by this number is filled."""

LIBRARY_FOLDERS = ("torch/lib", "torch", "nvidia/*/lib", "nvidia/*/*/lib", "numpy/_core", "numpy.libs")
"""Folders with the libraries of torch, below a folder of installed packages."""


def prewarm(interpreter: str, environ: Mapping[str, str], goes_on: Callable[[], bool]) -> Prewarmed:
    """Read the files of `library_files` that are not in memory, as long as ``goes_on`` returns True.

    This fills at most half of the free memory, and ends after a minute. A file that cannot be read is left
    out: the worker that needs it will report why.
    """
    begin_s = time.monotonic()
    left = free_memory() // MEMORY_SHARE
    files = file_bytes = read_bytes = 0
    is_whole = True
    buffer = bytearray(CHUNK)
    for path in library_files(interpreter, environ):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            size = os.fstat(fd).st_size
            files += 1
            file_bytes += size
            for offset in range(0, size, CHUNK):
                is_whole = left >= size and time.monotonic() - begin_s < LONGEST_S and goes_on()
                if not is_whole:
                    break
                if not is_cached(fd, offset, min(size, offset + CHUNK)):
                    read_bytes += os.preadv(fd, [buffer], offset)
            left -= size
        except OSError:
            continue
        finally:
            os.close(fd)
        if not is_whole:
            break
    return Prewarmed(files, file_bytes, read_bytes, time.monotonic() - begin_s, is_whole)


def library_files(interpreter: str, environ: Mapping[str, str]) -> list[str]:
    """The interpreter, its shared libraries and those of torch, each once.

    ``interpreter``: a path, or a name that is looked up on the ``PATH`` of ``environ``.
    """
    from glob import glob

    path = interpreter if os.sep in interpreter else find_executable(interpreter, environ)
    if not path:
        return []
    prefixes = _prefixes(path)
    found = [os.path.realpath(path)]
    for prefix in prefixes:
        found += sorted(glob(f"{prefix}/lib/libpython3*.so*"))
        found += sorted(glob(f"{prefix}/lib/python3*/lib-dynload/*.so"))
    for folder in _package_folders(prefixes, environ):
        if os.path.isdir(f"{folder}/torch"):
            for part in LIBRARY_FOLDERS:
                found += sorted(glob(f"{folder}/{part}/*.so*"))
            break
    real = dict.fromkeys(map(os.path.realpath, found))
    return [one for one in real if os.path.isfile(one)]


def _prefixes(path: str) -> list[str]:
    """The folders of the interpreter: its virtual environment first, then the installation behind that."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    behind = [os.path.dirname(os.path.dirname(os.path.realpath(path)))]
    try:
        with open(f"{own}/pyvenv.cfg", encoding="utf-8", errors="surrogateescape") as file:
            pairs = [line.partition("=") for line in file]
    except OSError:
        pairs = []
    homes = [os.path.dirname(value.strip()) for name, _, value in pairs if name.strip() == "home"]
    return list(dict.fromkeys([own, *homes, *behind]))


def _package_folders(prefixes: list[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Folders of installed packages, in the order in which the interpreter searches them."""
    from glob import glob

    yield from filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    for prefix in prefixes:
        for pattern in ("lib*/python3*/site-packages", "lib/python3*/dist-packages"):
            yield from sorted(glob(f"{prefix}/{pattern}"), reverse=True)


def is_cached(fd: int, start: int, stop: int) -> bool:
    """Whether this part of a file seems to be in memory, judged by samples."""
    byte = bytearray(1)
    try:
        for offset in range(start, stop, SAMPLE):
            os.preadv(fd, [byte], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def free_memory() -> int:
    """Bytes of memory that are available without swapping."""
    words = read_fields("/proc/meminfo").get("MemAvailable", "").split()
    return int(words[0]) << 10 if words and words[0].isdigit() else 0
