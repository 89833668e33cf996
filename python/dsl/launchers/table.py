"""The launchers by their names for ``--launcher``."""

from __future__ import annotations

from dsl.launchers.hydra import impi, mpich, mvapich
from dsl.launchers.openmpi import openmpi
from dsl.launchers.pdsh import pdsh
from dsl.launchers.slurm import slurm
from dsl.launchers.ssh import ssh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.launchers.base import Launcher
    from dsl.model.remote import LauncherName

TABLE: dict[LauncherName, Launcher] = {
    "ssh": ssh,
    "pdsh": pdsh,
    "openmpi": openmpi,
    "mpich": mpich,
    "impi": impi,
    "mvapich": mvapich,
    "slurm": slurm,
}
"""Name -> launcher. The first word of a launcher's command is the program that it needs."""
