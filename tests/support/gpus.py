"""Runs a command as on a machine with NVIDIA GPUs, in a namespace of mounts: as root, or where users may make some.

    python -m tests.support.gpus COUNT COMMAND...

The driver's files and libnvidia-ml.so.1 are those of a recorded machine with one H100; more GPUs are copies of it.
All processes below see them, whatever their environment. With 0 nothing is run: the exit code says whether it
could be, and if not, the output says what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.unit.devices.record_nvml import FOLDER, lay

RECORDED = "one_h100"
LIBRARY = "libnvidia-ml.so.1"
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
KEPT = ("null", "zero", "full", "random", "urandom", "tty")
"""What every process may count on in ``/dev``."""

Recording = dict[str, Any]


def machine(count: int) -> Recording:
    """The recording of a machine with so many GPUs of the kind of the one that was recorded."""
    one = json.loads((FOLDER / f"{RECORDED}.json").read_text(encoding="utf-8"))
    place, uuid = one["nvml"]["address 0"][-7:], one["nvml"]["uuid 0"]
    files: dict[str, str] = {}
    answers: dict[str, Any] = {"count": count}
    for number in range(count):
        own = (
            (place, f"{int(place[:2], 16) + number:02x}{place[2:]}"),
            (uuid, f"{uuid[:-2]}{int(uuid[-2:], 16) + number:02x}"),
            ("nvidia0", f"nvidia{number}"),
            ("Device Minor: \t 0", f"Device Minor: \t {number}"),
        )
        files.update({_replace(path, own): _replace(text, own) for path, text in one["files"].items()})
        for question, answer in one["nvml"].items():
            if question != "count":
                name = question.replace("0", str(number))
                answers[name] = _replace(answer, own) if isinstance(answer, str) else answer
        answers[f"device {number}"] = str(number)
    return {"about": f"{count} GPUs, made of one", "files": files, "nvml": answers}


def _replace(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    for old, new in changes:
        text = text.replace(old, new)
    return text


def missing() -> str:
    """What this machine lacks, as the reason of a skip; empty if it lacks nothing."""
    for name in ("cc", "ldconfig", "unshare", "mount"):
        if shutil.which(name, path=SYSTEM_PATH) is None:
            return f"needs the program {name}"
    own = _namespace()
    is_allowed = subprocess.run([*own, "true"], capture_output=True, check=False).returncode == 0
    return "" if is_allowed else f"needs namespaces that are refused here: {' '.join(own)}"


def _namespace() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--mount", "--propagation", "private"]


def _call(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, env={**os.environ, "PATH": SYSTEM_PATH})


def build_library(answers: Recording, folder: Path) -> None:
    """The driver's library with these answers, and a cache of the loader in which it is the first of its name."""
    rows = []
    for number in range(answers["count"]):
        texts = [json.dumps(answers[f"{name} {number}"]) for name in ("uuid", "name", "address")]
        nodes = sum(1 << node for node in answers[f"numa_nodes {number}"])
        sizes = [answers[f"{name} {number}"] for name in ("memory_bytes", "free_bytes")]
        numbers = [f"{value}ull" for value in (*sizes, nodes, int(answers[f"mig_on {number}"]))]
        rows.append(f"    {{{', '.join([*texts, *numbers])}}},\n")
    folder.mkdir()
    (folder / "devices.h").write_text(
        f"static const struct device devices[] = {{\n{''.join(rows)}}};\n", encoding="utf-8"
    )
    source = Path(__file__).with_name("nvml.c")
    _call("cc", "-shared", "-fPIC", "-I", folder, f"-Wl,-soname,{LIBRARY}", "-o", folder / LIBRARY, source)
    (folder / "conf").write_text(f"{folder}\ninclude /etc/ld.so.conf\n", encoding="utf-8")
    _call("ldconfig", "-X", "-C", folder / "cache", "-f", folder / "conf")


def mount_driver(folder: Path) -> None:
    """Show what lies in the folder where the driver has it, to this process and to all that it starts."""
    root = folder / "root"
    _call("mount", "--bind", root / "proc/driver", "/proc/driver")
    _call("mount", "--bind", folder / "lib/cache", "/etc/ld.so.cache")
    pci = Path("/sys/bus/pci/devices")
    if pci.is_dir():
        ours = root / pci.relative_to("/")
        for path in pci.iterdir():
            if not (ours / path.name).exists():
                (ours / path.name).symlink_to(path.resolve())
        _call("mount", "--bind", ours, pci)
    _mount_devices(root / "dev")


def _mount_devices(dev: Path) -> None:
    """The driver's device files, and what everybody may use of the machine's."""
    names = [path.name for path in dev.iterdir()]
    _call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", dev)
    for name in names:
        (dev / name).touch()
    for path in Path("/dev").iterdir():
        if path.is_symlink() and path.name != "ptmx":
            (dev / path.name).symlink_to(path.readlink())
        elif path.is_dir() and path.name != "pts":
            (dev / path.name).mkdir()
            _call("mount", "--rbind", path, dev / path.name)
        elif path.name in KEPT:
            (dev / path.name).touch()
            _call("mount", "--bind", path, dev / path.name)
    (dev / "pts").mkdir()
    _call("mount", "-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620", "devpts", dev / "pts")
    (dev / "ptmx").symlink_to("pts/ptmx")
    _call("mount", "--rbind", dev, "/dev")


def become(folder: Path, uid: str, gid: str, command: list[str]) -> None:
    """Become the command, in the namespace that we are in: for the user who has asked for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    mount_driver(folder)
    if uid != "0":
        command = ["unshare", "--user", f"--map-user={uid}", f"--map-group={gid}", *command]
    os.execvp(command[0], command)


def run(count: int, command: list[str]) -> int:
    """Run the command as on a machine with so many GPUs, with a directory for temporary files of its own."""
    with tempfile.TemporaryDirectory(prefix="g") as temporary:  # a long path would be too long for sockets
        folder = Path(temporary, "gpus")
        folder.mkdir()
        folder.parent.chmod(0o1777)  # for what runs as somebody else
        made = machine(count)
        lay(made["files"], folder / "root")
        build_library(made["nvml"], folder / "lib")
        inside = [sys.executable, "-m", __spec__.name, "--inside", str(folder)]
        inside += [str(os.geteuid()), str(os.getegid())]
        env = {**os.environ, "TMPDIR": temporary}
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends the command, and we end with that
        return subprocess.run([*_namespace(), *inside, *command], env=env, check=False).returncode


def main() -> None:
    first, *rest = sys.argv[1:]
    if first == "--inside":
        become(Path(rest[0]), rest[1], rest[2], rest[3:])
    if lacks := missing():
        print(f"SKIPPED [1] {lacks}")
        sys.exit(1)
    sys.exit(run(int(first), rest) if int(first) else 0)


if __name__ == "__main__":
    main()
