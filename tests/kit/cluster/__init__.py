"""Several hosts on one machine, for tests and benches: own network, processes, names and daemons.

    with Cluster(3) as cluster:
        cluster[0].run(["ssh", "node1", "hostname"])

Needs root, and the packages that `packages.py` unpacks. Nothing is installed on the machine.
"""

from tests.kit.cluster.cluster import Cluster, standing
from tests.kit.cluster.host import Host, HostProcess, Running
from tests.kit.cluster.mpi import MPI, Mpi, find_mpi
from tests.kit.cluster.packages import Missing
from tests.kit.cluster.slurm import Slurm

__all__ = [
    "MPI",
    "Cluster",
    "Host",
    "HostProcess",
    "Missing",
    "Mpi",
    "Running",
    "Slurm",
    "find_mpi",
    "standing",
]
