"""The MPI libraries of a cluster, each with its own `mpirun` in front of PATH."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.kit.cluster import packages
from tests.kit.cluster.cluster import Cluster
from tests.kit.cluster.site import PATH

MPI = ("openmpi4", "openmpi5", "mpich4", "mpich5", "impi", "mvapich-standin")
"""The first digit of the version, where there are two. No package has MVAPICH: see `_mvapich_standin`."""

MPINAME = "MVAPICH2-GDR 2.3.7 (a stand-in: MPICH's Hydra under the name of MVAPICH)"


class Mpi(NamedTuple):
    name: str
    """A word of `MPI`."""
    launcher: str
    """The word of `--launcher`."""
    env: Mapping[str, str]
    """What the head needs: its programs come first in PATH, and root may use them."""
    python: Mapping[str, str]
    """What workers that import mpi4py need besides."""

    @property
    def is_openmpi(self) -> bool:
        """Else it is one of Hydra's family."""
        return self.launcher == "openmpi"

    def command(self, cluster: Cluster, per_host: int = 1, env: Mapping[str, str] | None = None) -> list[str]:
        """The words before a program that start `per_host` ranks of it on each host; `env`: of every rank."""
        count = str(per_host * len(cluster))
        if self.is_openmpi:
            hosts = ",".join(f"{name}:{per_host}" for name in cluster.names)
            exported = [word for name, value in (env or {}).items() for word in ("-x", f"{name}={value}")]
            return ["mpirun", "-n", count, "--host", hosts, "--bind-to", "none", *exported]
        exported = [word for name, value in (env or {}).items() for word in ("-genv", name, value)]
        return ["mpirun", "-n", count, "-ppn", str(per_host), "-hosts", ",".join(cluster.names), *exported]


def find_mpi(cluster: Cluster, name: str) -> Mpi:
    """An MPI library by its name.

    Raises:
        Missing: it has not been fetched.
    """
    launcher = name.partition("-")[0].rstrip("0123456789")
    python = {"PYTHONPATH": str(packages.mpi4py())}
    if name in packages.PYPI:
        prefix = packages.wheel(name)
        programs = prefix / "bin"
        python["LD_LIBRARY_PATH"] = str(prefix / "lib")
        if name == "impi":
            python |= {"FI_PROVIDER_PATH": str(prefix / "lib"), "FI_PROVIDER": "tcp"}
    else:
        if launcher != "openmpi":
            # Debian's library, which talks through UCX, often hangs in MPI_Finalize with two ranks on a host.
            python["LD_LIBRARY_PATH"] = str(packages.wheel("mpich5") / "lib")
            python["MPI4PY_RC_FINALIZE"] = "0"  # MPI_Finalize of MPICH 4.0 now and then never returns here
        programs = _programs(cluster, name, "openmpi" if launcher == "openmpi" else "mpich")
    python["MPI4PY_MPIABI"] = "openmpi" if launcher == "openmpi" else "mpich"
    env = {"PATH": f"{programs}{os.pathsep}{PATH}"}
    if launcher == "openmpi":
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Mpi(name, launcher, env, python)


def _programs(cluster: Cluster, name: str, flavour: str) -> Path:
    """A directory with `mpirun`; Debian calls it after the library, so that both can be installed.

    They are scripts, because Open MPI takes a link's directory for that of its installation.
    """
    folder = cluster.state / "mpi" / name
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for program in ("mpirun", "mpiexec"):
            _script(folder / program, f'exec {program}.{flavour} "$@"')
        if name == "mvapich-standin":
            _script(folder / "mpiname", f'echo "{MPINAME}"')
    return folder


def _script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)
