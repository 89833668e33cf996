"""Try wheels on other systems, without Rust: the oldest and the newest glibc of Debian's mirror, and musl.

    try_wheels.py [--in FOLDER] WHEEL...

Each wheel is installed with pip, shows a plan (`dsl --dry-run`) and runs 8 workers, in directory trees that
this script makes below FOLDER (default: target/try) and keeps: of Debian with debootstrap, and of musl alone.
A system whose Python is older than 3.10, or that has none, gets one that zig compiles from Debian's sources.
For another processor qemu boots a machine with a kernel of Debian and such a tree: its emulation of single
programs lacks what a supervisor needs. Needs root, and Debian's packages debootstrap, xz-utils, cpio and
qemu-system-arm (on ARM: qemu-system-x86); on Ubuntu also debian-archive-keyring. The first run takes half an
hour, later ones some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
OLDEST, STABLE, NEWEST = "bullseye", "stable", "testing"
"""Suites of Debian. The first one is the oldest that its mirrors still have: glibc 2.31."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's name of a processor."""
BINFMT = Path("/proc/sys/fs/binfmt_misc")
MACHINES = {"x86_64": "3e", "aarch64": "b7"}
"""A processor in the head of a program."""
RULE = (
    r":dsl-{0}:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x{1}\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{2}:PF"
)
"""Tells the kernel which program runs the programs for a processor."""
BOARDS = {"x86_64": ("q35", "max", "ttyS0"), "aarch64": ("virt", "cortex-a57", "ttyAMA0")}
"""A machine as qemu emulates it: its kind, its processor, its console."""
INIT = """#!/bin/sh
busybox=/try/busybox
$busybox mount -t proc proc /proc; $busybox mount -t devtmpfs dev /dev; $busybox mount -t tmpfs tmp /tmp
$busybox ifconfig lo up
. /try/job.sh
$busybox poweroff -f
"""
"""The first process of such a machine."""
JOB = """
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp PYTHONPATH=/try/site
export DS_ACCELERATOR=cpu LOCAL_SIZE={workers}
cd /tmp
/try/site/bin/dsl --dry-run /try/worker.py >/tmp/plan && echo plan: yes
/try/site/bin/dsl /try/worker.py && echo job: yes
{python} -c "import platform as p; print('Python', p.python_version(), *p.libc_ver(), p.machine())"
"""
WORKERS = 8
WORKER = "import os\nprint('worker', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
ENTER = """
mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && mount --bind "$SHARED" "$0/try" &&
mount --bind "$ZIG" "$0/zig" && exec chroot "$0" "$@"
"""
"""What a new mount namespace does before the command: nothing of it is left when the command has ended."""
BUILD_PYTHON = """
set -eu
cd /try/$1 && mkdir zlib python
printf '#!/bin/sh\\nexec /zig/zig cc -target %s -dynamic "$@"\\n' $2 >cc
for tool in ar ranlib; do printf '#!/bin/sh\\nexec /zig/zig %s "$@"\\n' $tool >$tool; done
chmod +x cc ar ranlib
(cd zlib && ../cc -w -O2 -fPIC -DHAVE_UNISTD_H -c /try/source/zlib-*/*.c && ../ar rcs libz.a *.o)
cd python
CC=/try/$1/cc AR=/try/$1/ar RANLIB=/try/$1/ranlib CFLAGS='-w -O1 -Wno-error=date-time' PKG_CONFIG=false \\
    ZLIB_CFLAGS="-I$(echo /try/source/zlib-*)" ZLIB_LIBS=/try/$1/zlib/libz.a \\
    /try/source/Python-*/configure --quiet --build=$4-pc-linux-gnu --host=$3 --with-build-python=python3 \\
    --prefix=/try/$1/prefix --disable-test-modules --without-ensurepip \\
    --disable-ipv6 ac_cv_file__dev_ptmx=yes ac_cv_file__dev_ptc=no
make -s -j$(nproc) && make -s install
"""
"""Compiles Python elsewhere: $1 its folder, $2 its kind for zig, $3 for configure, $4 of this machine."""


class System(NamedTuple):
    """A system to try wheels on."""

    processor: str
    suite: str
    """Of Debian; "musl": nothing but musl, busybox and Python."""

    @property
    def name(self) -> str:
        """Of its tree."""
        return f"{self.suite}-{self.processor}"

    @property
    def python(self) -> str:
        """Path of its Python."""
        return "/usr/bin/python3" if self.suite == NEWEST else f"/try/{self.name}/prefix/bin/python3"


def say(text: str) -> None:
    """One line of progress."""
    print(f"try: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """End with one line that says what to do."""
    sys.exit(f"try: {text}")


def systems(wheel: Path) -> list[System]:
    """Where a wheel has to run."""
    processor = next(name for name in ARCHITECTURES if wheel.stem.endswith(name))
    suites = ("musl",) if "musllinux" in wheel.name else (NEWEST, OLDEST)
    return [System(processor, suite) for suite in suites]


class Trees:
    """The trees below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        """Seen as /try in every tree."""
        self.shared.mkdir(parents=True, exist_ok=True)
        zig = importlib.util.find_spec("ziglang")
        if zig is None or zig.origin is None:
            fail("zig is missing: run this inside scripts/with-environment --release")
        self.zig = Path(zig.origin).parent

    def run(self, tree: Path, *command: str) -> str:
        """Run a command inside a tree, as root of its own processes; what it prints."""
        names = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", "LC_ALL=C.UTF-8")
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, str(tree)]
        result = subprocess.run(
            [*argv, "/usr/bin/env", "-i", *names, *command],
            env={**os.environ, "SHARED": str(self.shared), "ZIG": str(self.zig)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        if result.returncode != 0:
            tail = "\n".join(result.stdout.splitlines()[-20:])
            fail(f"`{' '.join(command)[:200]}` failed in {tree} with {result.returncode}:\n{tail}")
        return result.stdout

    def tree(self, system: System) -> Path:
        """The tree of a system, made if it is missing."""
        tree = self.folder / system.name
        if (tree / "try").exists():
            return tree
        shutil.rmtree(tree, ignore_errors=True)
        say(f"making {tree}")
        (self.musl if system.suite == "musl" else self.debian)(system, tree)
        for name in ("zig", "try"):
            (tree / name).mkdir()
        return tree

    def debian(self, system: System, tree: Path) -> None:
        """Fill a tree with Debian."""
        packages = {STABLE: "python3,make,qemu-user", NEWEST: "python3,musl,busybox-static"}
        more = [f"--include={packages[system.suite]}"] if system.suite in packages else []
        command = ("debootstrap", f"--arch={ARCHITECTURES[system.processor]}", "--variant=minbase", *more)
        log = tree.with_suffix(".log")
        with log.open("wb") as file:
            done = subprocess.run(
                [*command, system.suite, str(tree)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                check=False,
            )  # fmt: skip
        if done.returncode != 0:
            fail(f"debootstrap failed: {log} says why")

    def musl(self, system: System, tree: Path) -> None:
        """Fill a tree with nothing but musl, and the commands of busybox."""
        other = self.tree(system._replace(suite=NEWEST))
        for name in ("proc", "dev", "tmp", "lib", "usr/bin"):
            (tree / name).mkdir(parents=True)
        (tree / "bin").symlink_to("usr/bin")
        for name in ("sh", "env", "true"):
            (tree / "bin" / name).symlink_to("busybox")
        shutil.copy(other / "usr/bin/busybox", tree / "bin/busybox")
        loader = next((other / "usr/lib").glob("ld-musl-*.so.1")).name
        shutil.copy(other / f"usr/lib/{system.processor}-linux-musl/libc.so", tree / "lib" / loader)

    def python(self, system: System) -> None:
        """Compile Python for a system, if it needs one."""
        build = self.shared / system.name
        if system.python.startswith("/usr/") or (build / "prefix/bin/python3").exists():
            return
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir()
        own = platform.machine()
        builder = self.tree(System(own, STABLE))
        self.sources(builder)
        say(f"compiling Python for {system.name}: five minutes")
        libc, version = ("musl", "") if system.suite == "musl" else ("gnu", ".2.17")
        kinds = (f"{system.processor}-linux-{libc}{version}", f"{system.processor}-other-linux-{libc}")
        self.run(builder, "sh", "-c", BUILD_PYTHON, "sh", system.name, *kinds, own)

    def sources(self, builder: Path) -> None:
        """Unpack what Python is compiled from."""
        folder = self.shared / "source"
        if folder.exists():
            return
        say("fetching the sources of Python and zlib")
        part = self.shared / "source.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        lines = (builder / "etc/apt/sources.list").read_text(encoding="utf-8")
        (builder / "etc/apt/sources.list.d/source.list").write_text(
            lines.replace("deb ", "deb-src "), encoding="utf-8"
        )
        self.run(builder, "apt-get", "update", "-qq")
        python = self.run(builder, "python3", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])")
        fetch = f"cd /try/source.part; apt-get source -qq --download-only {python.strip()} zlib"
        said = self.run(builder, "sh", "-c", f"{fetch} || true")  # a mirror may lack the part that we leave
        archives = [str(path) for path in part.glob("*.orig.tar.?z")]
        if len(archives) != 2:
            fail(f"the sources did not come: {said}")
        for archive in archives:
            subprocess.run(["tar", "-xf", archive, "-C", str(part)], check=True)
        part.rename(folder)

    def check(self, wheel: Path, system: System) -> None:
        """Install a wheel in a system, show a plan, and run a job."""
        tree = self.tree(system)
        self.python(system)
        site = self.shared / "site"
        shutil.rmtree(site, ignore_errors=True)
        shutil.copy(wheel, self.shared)
        (self.shared / "worker.py").write_text(WORKER, encoding="utf-8")
        pip = importlib.util.find_spec("pip")
        assert pip is not None
        assert pip.origin is not None
        shutil.copytree(Path(pip.origin).parent, self.shared / "pip-own/pip", dirs_exist_ok=True)
        install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", "/try/site")
        python = ("env", "PYTHONPATH=/try/pip-own", system.python)
        self.run(tree, *python, *install, f"/try/{wheel.name}")
        job = JOB.format(workers=WORKERS, python=system.python)
        (self.shared / "job.sh").write_text(job, encoding="utf-8")
        if system.processor == platform.machine():
            said = self.run(tree, "sh", "/try/job.sh")
        else:
            said = self.boot(system, tree)
        wanted = {f"worker {rank} of {WORKERS}" for rank in range(WORKERS)} | {"plan: yes", "job: yes"}
        lacking = {line for line in wanted if line not in said}
        if lacking:
            fail(f"{wheel.name} does not run on {system.name}, there is no {sorted(lacking)}:\n{said}")
        found = next(line for line in said.splitlines() if line.startswith("Python "))
        say(f"{wheel.name}: installed, planned, {WORKERS} workers on {system.name} ({found.strip()})")

    def boot(self, system: System, tree: Path) -> str:
        """Boot an emulated machine that runs the job and ends; its console."""
        other = self.tree(system._replace(suite=NEWEST))
        stage = self.folder / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        shutil.copytree(self.shared / "site", stage / "try/site")
        if not system.python.startswith("/usr/"):
            shutil.copytree(self.shared / system.name / "prefix", stage / f"try/{system.name}/prefix")
        shutil.copy(other / "usr/bin/busybox", stage / "try")
        for name in ("job.sh", "worker.py"):
            shutil.copy(self.shared / name, stage / "try")
        (stage / "init").write_text(INIT, encoding="utf-8")
        (stage / "init").chmod(0o755)
        image = self.folder / "initramfs"
        with image.open("wb") as file:
            for part in (tree, stage):  # the kernel unpacks one archive after the other
                command = "find . -xdev | cpio --quiet -o -H newc"
                subprocess.run(["sh", "-c", command], cwd=part, stdout=file, check=True)
        kind, cpu, console = BOARDS[system.processor]
        argv = [f"qemu-system-{system.processor}", "-M", kind, "-cpu", cpu, "-smp", "2", "-m", "4096"]
        argv += ["-nographic", "-nic", "none", "-no-reboot", "-kernel", str(self.kernel(system, other))]
        argv += ["-initrd", str(image), "-append", f"console={console} quiet panic=-1"]
        try:
            result = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
            )
        except subprocess.TimeoutExpired:
            fail(f"the emulated machine for {system.name} did not end within ten minutes")
        return result.stdout + result.stderr

    def kernel(self, system: System, tree: Path) -> Path:
        """The kernel that Debian has for a processor."""
        folder = self.shared / f"kernel-{system.processor}"
        if not any(folder.rglob("vmlinuz*")):
            say(f"fetching a kernel for {system.processor}")
            pattern = f"^linux-binary-[0-9.]+.*-cloud-{ARCHITECTURES[system.processor]}$"
            name = self.run(tree, "apt-cache", "search", "--names-only", pattern).split()[0]
            script = 'cd "/try/$1" && apt-get download -qq "$2" && dpkg-deb -x linux-*.deb .'
            folder.mkdir(exist_ok=True)
            self.run(tree, "sh", "-c", script, "sh", folder.name, name)
        return next(folder.rglob("vmlinuz*"))


@contextlib.contextmanager
def emulated(trees: Trees, processors: set[str]) -> Iterator[None]:
    """The kernel runs programs for these processors through the qemu of stable Debian: qemu 7 is too old."""
    own, added = platform.machine(), []
    try:
        for processor in processors - {own}:
            if not (BINFMT / "register").exists():
                subprocess.run(["mount", "-t", "binfmt_misc", "none", str(BINFMT)], check=True)
            qemu = trees.tree(System(own, STABLE)) / f"usr/bin/qemu-{processor}"
            rule = RULE.format(processor, MACHINES[processor], qemu)
            entry = BINFMT / f"dsl-{processor}"
            if entry.exists():  # of a run that was killed
                entry.write_text("-1", encoding="utf-8")
            (BINFMT / "register").write_text(rule, encoding="utf-8")
            added.append(entry)
        yield
    finally:
        for entry in added:
            entry.write_text("-1", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="try wheels on other systems, without Rust")
    parser.add_argument("--in", dest="folder", type=Path, default=ROOT / "target/try", help="for the trees")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    args = parser.parse_args()
    if os.geteuid() != 0:
        fail("this makes namespaces and mounts: run it as root")
    lacking = [name for name in ("debootstrap", "xz", "cpio") if shutil.which(name) is None]
    if lacking:
        fail(
            f"{', '.join(lacking)}: missing; apt-get install cpio debian-archive-keyring debootstrap xz-utils"
        )
    trees = Trees(args.folder.absolute())
    pairs = [(wheel, system) for wheel in args.wheels for system in systems(wheel)]
    with emulated(trees, {system.processor for _, system in pairs}):
        for wheel, system in pairs:
            trees.check(wheel, system)


if __name__ == "__main__":
    main()
