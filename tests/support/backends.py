"""The launchers of `dsl` as they are installed on the hosts of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tests.kit.cluster import MPI, Cluster, find_mpi

BACKENDS = ("ssh", "pdsh", *MPI, "slurm")
"""Each word of ``--launcher``, and two versions of those that differ much. Slurm has to be up."""


class Backend(NamedTuple):
    launcher: str
    """Its word."""
    env: Mapping[str, str]
    """What `dsl` needs to find it."""
    options: tuple[str, ...] = ()
    """More options of `dsl`."""

    @property
    def words(self) -> tuple[str, ...]:
        """The options of `dsl` that choose it."""
        return ("--launcher", self.launcher, *self.options)


def find_backend(cluster: Cluster, name: str) -> Backend:
    """One by its word of `BACKENDS`."""
    if name not in MPI:
        return Backend(name, {})
    mpi = find_mpi(cluster, name)
    return Backend(mpi.launcher, {"PATH": mpi.env["PATH"]})
