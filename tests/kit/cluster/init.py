"""Pid 1 of a host: makes its file system, brings its network up, starts sshd, collects orphans.

It is told in lines of JSON on stdin and answers by words on stdout. The end of stdin is the end of the host,
so a host never outlives the program that has started it. Only `host.py` runs it, inside new namespaces.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

MS_RDONLY = 1
MS_BIND = 4096

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

SSHD = """\
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 2048
MaxSessions 1024
AcceptEnv LANG LC_*
SetEnv TMPDIR=/run/tmp
Subsystem sftp internal-sftp
"""

SSH = """\
Host *
    IdentityFile {keys}/user
    IdentitiesOnly yes
    BatchMode yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    GlobalKnownHostsFile /dev/null
    LogLevel ERROR
    ConnectTimeout 5
"""

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """One mount, seen in this host alone."""
    words = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    if _libc.mount(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {source} on {target}: {os.strerror(number)}")


def bind(source: Path, target: str) -> None:
    """Show a directory of the cluster at another place."""
    source.mkdir(parents=True, exist_ok=True)
    mount(str(source), target, flags=MS_BIND)


def make_file_system(name: str, state: Path, packages: Path) -> None:
    """What belongs to a host alone: /proc, /run, /dev/shm, /etc, logs, spools; and the unpacked packages."""
    mount("proc", "/proc", "proc")
    mount("tmpfs", "/run", "tmpfs", data="mode=755")
    mount("tmpfs", "/dev/shm", "tmpfs", data="mode=1777")
    for folder in ("sshd", "lock", "etc/upper", "etc/work"):
        Path("/run", folder).mkdir(parents=True)
    Path("/run/tmp").mkdir()  # where MPI keeps files that are named after the host and small numbers
    Path("/run/tmp").chmod(0o1777)
    mount("overlay", "/usr", "overlay", MS_RDONLY, f"lowerdir={packages}/usr:/usr")
    layers = f"lowerdir={packages}/etc:/etc,upperdir=/run/etc/upper,workdir=/run/etc/work"
    mount("overlay", "/etc", "overlay", data=layers)
    bind(state / name / "spool", "/var/spool")
    bind(state / name / "log", "/var/log")
    for folder in ("munge", "slurm"):
        if Path("/var/lib", folder).is_dir():
            mount("tmpfs", f"/var/lib/{folder}", "tmpfs")


def write(path: str, text: str) -> None:
    """A file of this host's own /etc; what the machine has there may be a link to elsewhere."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_text(text, encoding="utf-8")


def make_etc(name: str, state: Path) -> None:
    """Its name, the names of all hosts, root's home, and both sides of ssh."""
    home, keys = state / "home", state / "keys"
    lines = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if line.partition(":")[0] not in {"root", "sshd"}]
    own = [f"root:x:0:0:root:{home}:/bin/bash", "sshd:x:990:65534::/run/sshd:/usr/sbin/nologin"]
    write("/etc/passwd", "\n".join([*own, *others, ""]))
    write("/etc/hostname", f"{name}\n")
    write("/etc/hosts", (state / "hosts").read_text(encoding="utf-8"))
    write("/etc/resolv.conf", "")  # names of no host are refused at once
    write("/etc/ssh/sshd_config", SSHD.format(keys="/etc/ssh/cluster"))
    write("/etc/ssh/ssh_config", SSH.format(keys="/etc/ssh/cluster"))
    for file in keys.iterdir():  # sshd takes no keys from below a directory that all may write, such as /tmp
        write(f"/etc/ssh/cluster/{file.name}", file.read_text(encoding="utf-8"))
        Path("/etc/ssh/cluster", file.name).chmod(0o600)


def bring_up_network(address: str) -> None:
    """The cable is in; give it its address."""
    lines = f"link set lo up\naddr add {address}/24 dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)


def told() -> Any:
    """The next line of whoever has started this host; its end is ours."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)


def answer(word: str) -> None:
    """Progress."""
    print(word, flush=True)


def collect(*_: object) -> None:
    """Wait for every orphan that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    os.environ.clear()
    os.environ["PATH"] = PATH
    answer("born")
    how = told()
    state = Path(how["state"])
    socket.sethostname(how["name"])
    make_file_system(how["name"], state, Path(how["packages"]))
    make_etc(how["name"], state)
    answer("built")
    told()
    bring_up_network(how["address"])
    # Not our stdin, whose end is the end of the host, nor our stdout.
    sshd = ["/usr/sbin/sshd", "-E", "/var/log/sshd.log"]
    subprocess.run(sshd, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    signal.signal(signal.SIGCHLD, collect)
    collect()
    answer("up")
    told()


if __name__ == "__main__":
    main()
