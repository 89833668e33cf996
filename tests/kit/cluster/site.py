"""What all hosts of a cluster share: a directory, keys and names, and the switch between them."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.kit.cluster.packages import Missing, debian_packages
from tests.kit.waiting import until

PREFIX = "dsl-cluster-"
"""Of a cluster's directory, and of its cgroup."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_S = 60.0
"""Far more than a boot takes, also on a machine that is busy."""
_PROGRAMS = ("unshare", "nsenter", "setsid", "ip", "ssh-keygen")


class Site:
    """The directory of a cluster, and its switch: a bridge in a network namespace of its own.

    The network of the machine sees nothing of the switch.
    """

    def __init__(self) -> None:
        self.state = Path()
        """The directory of all files of the cluster."""
        self.packages = Path()
        self._switch: subprocess.Popen[str] | None = None

    @property
    def home(self) -> Path:
        """Root's home on all hosts."""
        return self.state / "home"

    @property
    def carrier(self) -> int | None:
        """Pid of our child that carries the switch; None while there is none."""
        return None if self._switch is None else self._switch.pid

    def settle(self) -> None:
        """Find what the hosts need, and make the directory.

        Raises:
            Missing: a program or a package is not there; the message says which.
        """
        if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
            raise Missing(f"not on PATH: {', '.join(missing)} (Debian: util-linux, iproute2, openssh-client)")
        self.packages = debian_packages()
        self.state = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.state.chmod(0o755)
        self.home.mkdir()

    def build(self, addresses: Mapping[str, str]) -> None:
        """Write keys and names, and start the switch. `addresses` has the address of each host by name."""
        self._make_keys()
        own = {"localhost": "127.0.0.1", "localhost ip6-localhost": "::1"}
        lines = [f"{address} {name}\n" for name, address in {**own, **addresses}.items()]
        (self.state / "hosts").write_text("".join(lines), encoding="utf-8")
        self._start_switch()

    def _make_keys(self) -> None:
        folder = self.state / "keys"
        folder.mkdir(mode=0o700)
        for name in ("host", "user"):
            kind = ["-q", "-t", "ed25519", "-N", "", "-C", "dsl-test"]
            command = ["ssh-keygen", *kind, "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def _start_switch(self) -> None:
        self._switch = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", "echo up; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd="/", env={"PATH": PATH}, start_new_session=True,
        )  # fmt: skip
        assert self._switch.stdout is not None
        if answer(self._switch.stdout) != "up":
            raise Missing("this user may make no network namespace")
        self.switch("link add br0 type bridge forward_delay 0 stp_state 0\nlink set br0 up\nlink set lo up")

    def end_switch(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
            self._switch = None

    def switch(self, lines: str, *, may_fail: bool = False) -> bool:
        """Commands of `ip` in the switch; true if they succeeded."""
        assert self._switch is not None
        enter = ["nsenter", f"--target={self._switch.pid}", "--net", "--", "ip", "-batch", "-"]
        result = subprocess.run(enter, input=f"{lines}\n", text=True, capture_output=True, check=False)
        assert may_fail or result.returncode == 0, f"{lines}: {result.stderr}"
        return result.returncode == 0

    def plug_in(self, index: int, pid: int) -> None:
        """A new cable between the switch and a host."""
        # Of an earlier life. The kernel takes it away, but not at once.
        self.switch(f"link del p{index}", may_fail=True)
        # The same address for each boot: peers that remember the old one would talk to nobody for seconds.
        mac = f"02:d5:10:00:{index // 256:02x}:{index % 256:02x}"
        add = f"link add p{index} type veth peer name eth0 address {mac} netns {pid}"
        until(lambda: self.switch(add, may_fail=True), 10)
        self.switch(f"link set p{index} master br0 up")


def answer(stream: IO[str]) -> str:
    """The next line, byte by byte, so that nothing waits in a buffer that `select` cannot see."""
    deadline = time.monotonic() + BOOT_S
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            return data.decode() or "silence"
        byte = os.read(stream.fileno(), 1)
        if not byte:
            return data.decode() or "its end"
        data += byte
    return data.decode().strip()
