"""Slurm on the hosts of a cluster: munge and slurmd on each, the controller on the first."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from tests.kit.cluster.cluster import Cluster
from tests.kit.cluster.host import Host
from tests.kit.waiting import until

READY_S = 60.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={head}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PropagateResourceLimitsExcept=ALL
ReturnToService=2
KillWait=3
SlurmdTimeout=10
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/var/spool/slurmd
StateSaveLocation=/var/spool/slurmctld
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
GresTypes=gpu
NodeName={nodes} CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
# What has to differ from the defaults: no cgroups, which the hosts share; more CPUs than there are.

MUNGE = "/run/munge"

DAEMONS = frozenset({"munged", "slurmctld", "slurmscriptd", "slurmd"})
"""What stays on the hosts. `slurmstepd`, which holds the tasks of a step, does not."""


class Slurm:
    """One Slurm over all hosts of a cluster. After the boot of a host its daemons come back."""

    def __init__(self, cluster: Cluster, *, cpus: int = 8, gpus: int = 4) -> None:
        self.cluster = cluster
        self.cpus = cpus
        """Of each host, as Slurm believes."""
        self.gpus = gpus
        """Of each host: devices of no use, but Slurm hands out their numbers."""

    @property
    def head(self) -> Host:
        """Where the controller runs."""
        return self.cluster[0]

    def up(self) -> None:
        """Start it on every host, and wait until all of them are idle."""
        self._folder.mkdir()
        (self._folder / "munge.key").write_bytes(os.urandom(1024))
        (self._folder / "munge.key").chmod(0o400)
        for host in self.cluster:
            host.daemons |= DAEMONS
            self._start(host)
        self._wait_until_idle()
        for host in self.cluster:
            host.listeners.append(self._start)

    def clear(self) -> None:
        """End all jobs. Where that takes long, start everything anew, with all hosts."""
        try:
            until(self._is_clear, 5)
        except AssertionError:
            self._start_anew()

    def _is_clear(self) -> bool:
        self.head.run(["scancel", "--user=root", "--signal=KILL"])
        self.head.run(["scancel", "--user=root"])
        jobs = self.head.run(["squeue", "--noheader"])
        return jobs.returncode == 0 and not jobs.stdout.strip() and self._is_idle()

    def _is_idle(self) -> bool:
        out = self.head.run(["sinfo", "--noheader", "--format=%T %D"]).stdout
        return out.strip() == f"idle {len(self.cluster)}"

    def _wait_until_idle(self) -> None:
        try:
            until(self._is_idle, READY_S)
        except AssertionError:
            state = self.head.run(["sinfo", "--long", "--Node"])
            logs = (self.cluster.state / self.head.name / "log" / "slurmctld.log").read_text(errors="replace")
            raise AssertionError(
                f"Slurm does not come up: {state.stdout}{state.stderr}{logs[-2000:]}"
            ) from None

    def _start_anew(self) -> None:
        for host in self.cluster:
            host.crash()
            shutil.rmtree(self.cluster.state / host.name / "spool", ignore_errors=True)
        self.cluster.restore()
        self._wait_until_idle()

    @property
    def _folder(self) -> Path:
        return self.cluster.state / "slurm"

    def _start(self, host: Host) -> None:
        root = host.root
        for name in ("run/munge", "run/gpu", "var/log/munge", "var/spool/slurmd", "var/spool/slurmctld"):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "var/log/munge").chmod(0o700)
        for name in ("etc/munge", "etc/slurm"):
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(mode=0o700)
        shutil.copy(self._folder / "munge.key", root / "etc/munge/munge.key")
        names = self.cluster.names
        settings = {"head": self.head.name, "nodes": ",".join(names), "cpus": self.cpus, "gpus": self.gpus}
        (root / "etc/slurm/slurm.conf").write_text(CONFIGURATION.format(**settings), encoding="utf-8")
        # No plugin of ours uses it. Left to choose, slurmd does not start where v2 is mounted and v1 counts.
        (root / "etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
        lines = []
        for number in range(self.gpus):
            os.mknod(root / f"run/gpu/gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
            lines.append(f"NodeName={','.join(names)} Name=gpu File=/run/gpu/gpu{number}\n")
        (root / "etc/slurm/gres.conf").write_text("".join(lines), encoding="utf-8")
        places = {"socket": f"{MUNGE}/munge.socket.2", "pid-file": f"{MUNGE}/munged.pid"}
        places |= {"seed-file": f"{MUNGE}/munged.seed", "log-file": "/var/log/munge/munged.log"}
        places |= {"key-file": "/etc/munge/munge.key"}
        _daemon(host, "munged", "--force", *(f"--{name}={path}" for name, path in places.items()))
        if host is self.head:
            _daemon(host, "slurmctld", "-c")  # it would run a job again that its last record calls unfinished
        _daemon(host, "slurmd")


def _daemon(host: Host, *command: str) -> None:
    """Start what goes into the background by itself."""
    log = host.root / "var/log/daemons.log"
    with log.open("a", encoding="utf-8") as file:
        result = host.run(command, cwd="/", stdout=file, stderr=file)
    assert result.returncode == 0, f"{host}: {command[0]}: {log.read_text(errors='replace')[-1000:]}"
