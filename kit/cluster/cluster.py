"""A cluster: hosts, the switch between them, and the files that they share."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kit.cluster.host import BOOT_S, PATH, Host, _line, missing_programs
from kit.cluster.packages import Missing, debian_packages
from kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self  # for the type checker alone

PREFIX = "dsl-cluster-"
"""Of a cluster's directory, and of its cgroup."""

_clusters: list[Cluster] = []


def standing() -> set[int]:
    """Children of ours that carry hosts and switches: they may outlive a test."""
    return {pid for cluster in _clusters for pid in cluster.carriers()}


class Cluster:
    """Hosts `node0` to `node<n-1>`, each with sshd, on a network of their own. A context manager.

    Root's home and /tmp are the same on all of them, as on NFS; the rest of the machine shows through. Each
    has /etc, /run, /dev/shm, /var/log and /var/spool for itself. Several clusters may be up at once.
    """

    def __init__(self, size: int = 3, *, prefix: str = "node", network: str = "10.77.0") -> None:
        self.hosts = [Host(self, i, f"{prefix}{i}", f"{network}.{10 + i}") for i in range(size)]
        self.listeners: list[Callable[[Host], None]] = []
        """Called after each boot of a host but the first: they start its further daemons again."""
        self.state = Path()
        self.packages = Path()
        self._switch: subprocess.Popen[str] | None = None
        self._cgroup: Path | None = None

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def home(self) -> Path:
        """Root's home on all hosts: empty at first, and not the home of root on this machine."""
        return self.state / "home"

    @property
    def names(self) -> list[str]:
        """The names of all hosts."""
        return [host.name for host in self.hosts]

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def up(self) -> None:
        """Boot all hosts.

        Raises:
            Missing: a program, a package or a right is not there; the message says which.
            AssertionError: a host did not come up.
        """
        if os.geteuid() != 0:
            raise Missing("a cluster needs root")
        if missing := missing_programs():
            raise Missing(f"not on PATH: {', '.join(missing)} (Debian: util-linux, iproute2, openssh-client)")
        self.packages = debian_packages()
        self.state = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.state.chmod(0o755)
        self.home.mkdir()
        _clusters.append(self)
        try:
            self._make_keys()
            addresses = [f"{host.address} {host.name}\n" for host in self.hosts]
            lines = ["127.0.0.1 localhost\n", "::1 localhost ip6-localhost\n", *addresses]
            (self.state / "hosts").write_text("".join(lines), encoding="utf-8")
            self._make_cgroups()
            self._start_switch()
            for step in (Host.begin, Host.finish, Host.settle):
                for host in self.hosts:
                    step(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all hosts and remove every trace."""
        for host in self.hosts:
            with contextlib.suppress(Exception):
                host.crash()
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
            self._switch = None
        self._remove_cgroups()
        if self in _clusters:
            _clusters.remove(self)
            shutil.rmtree(self.state, ignore_errors=True)

    def carriers(self) -> list[int]:
        """The children of ours that this cluster lives in."""
        ours = [self._switch, *(host._init for host in self.hosts)]  # noqa: SLF001 - one unit in two modules
        return [one.pid for one in ours if one is not None]

    def after_boot(self, host: Host) -> None:
        """Tell the listeners."""
        for listener in self.listeners:
            listener(host)

    def restore(self) -> None:
        """Every host up, plugged in and awake again."""
        for host in self.hosts:
            if host.is_up and host.cgroup is not None:
                host.thaw()
            if not host.is_up:
                host.boot()
            elif not host.is_plugged:
                host.plug()

    def leftovers(self) -> dict[Host, list[str]]:
        """Processes beyond the hosts' own, by host."""
        found = {host: host.strangers() for host in self.hosts}
        return {host: [f"{one.pid} {one.command}" for one in some] for host, some in found.items() if some}

    # The switch: a bridge in a network namespace of its own, so that the machine's network sees nothing.

    def _start_switch(self) -> None:
        self._switch = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", "echo up; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd="/", env={"PATH": PATH}, start_new_session=True,
        )  # fmt: skip
        assert self._switch.stdout is not None
        if _line(self._switch.stdout, BOOT_S) != "up":
            raise Missing("this user may make no network namespace")
        self.switch("link add br0 type bridge forward_delay 0 stp_state 0\nlink set br0 up\nlink set lo up")

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

    # Files.

    def _make_keys(self) -> None:
        folder = self.state / "keys"
        folder.mkdir(mode=0o700)
        for name in ("host", "user"):
            kind = ["-q", "-t", "ed25519", "-N", "", "-C", "dsl-test"]
            command = ["ssh-keygen", *kind, "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def _make_cgroups(self) -> None:
        """One for each host: what runs there makes its own below it, and sweeps no other host's."""
        above = _own_cgroup()
        if above is None:
            return
        self.remove_stale_cgroups()
        with contextlib.suppress(OSError):
            folder = above / self.state.name
            folder.mkdir()
            self._cgroup = folder
            for host in self.hosts:
                (folder / host.name).mkdir()
                host.cgroup = folder / host.name

    def remove_stale_cgroups(self) -> None:
        """Those of clusters whose program was killed: nobody lives in them, and their files are gone."""
        above = _own_cgroup()
        for folder in above.glob(f"{PREFIX}*") if above else ():
            if not (self.state.parent / folder.name).exists():
                for path, _, _ in os.walk(folder, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(path)

    def _remove_cgroups(self) -> None:
        if self._cgroup is None:
            return
        with contextlib.suppress(OSError):
            (self._cgroup / "cgroup.kill").write_text("1", encoding="utf-8")

        def removed() -> bool:
            assert self._cgroup is not None
            for folder, _, _ in os.walk(self._cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            return not self._cgroup.exists()

        until(removed, 10)
        self._cgroup = None


def _own_cgroup() -> Path | None:
    """This process's own cgroup v2, if the machine has such a thing."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    points = [fields[1] for line in mounts if (fields := line.split())[2] == "cgroup2"]
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    names = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    if not points or not names:
        return None
    return Path(points[0] + names[0])
