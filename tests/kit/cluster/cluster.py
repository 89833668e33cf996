"""A cluster: hosts that boot, end and are looked after together."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kit.cluster.host import Host
from tests.kit.cluster.packages import Missing
from tests.kit.cluster.site import PREFIX, Site
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self  # for the type checker alone

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
        self.site = Site()
        self.hosts = [Host(self.site, i, f"{prefix}{i}", f"{network}.{10 + i}") for i in range(size)]
        self._cgroup: Path | None = None

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def state(self) -> Path:
        """The directory of all its files."""
        return self.site.state

    @property
    def home(self) -> Path:
        """Root's home on all hosts: empty at first, and not the home of root on this machine."""
        return self.site.home

    @property
    def names(self) -> list[str]:
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
        self.site.settle()
        _clusters.append(self)
        try:
            self.site.build({host.name: host.address for host in self.hosts})
            self._make_cgroups()
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
        self.site.end_switch()
        self._remove_cgroups()
        if self in _clusters:
            _clusters.remove(self)
            shutil.rmtree(self.state, ignore_errors=True)

    def carriers(self) -> list[int]:
        """The children of ours that this cluster lives in."""
        carriers = [self.site.carrier, *(host.carrier for host in self.hosts)]
        return [pid for pid in carriers if pid is not None]

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
