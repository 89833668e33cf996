"""What `record_launchers` asks DeepSpeed's launchers."""

from __future__ import annotations

from typing import NamedTuple

LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
EQUAL = (("b", 2), ("a", 2))
UNEQUAL = (("b", 2), ("a", 1))
EXPORTS = (("NCCL_DEBUG", "INFO"),)
SSH_ARGS = (("PDSH_SSH_ARGS_APPEND", "-v"),)


class LauncherCase(NamedTuple):
    """One question."""

    launcher: str
    pool: tuple[tuple[str, int], ...] = EQUAL
    options: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


CASES = (
    *(LauncherCase(launcher) for launcher in LAUNCHERS),
    *(LauncherCase(launcher, options=("--launcher_args", "--own 'a b'")) for launcher in LAUNCHERS),
    *(LauncherCase(launcher, UNEQUAL) for launcher in LAUNCHERS),
    *(LauncherCase(launcher, options=("--include", "b")) for launcher in LAUNCHERS),
    *(LauncherCase(launcher, options=("--include", "b:1@a:0")) for launcher in LAUNCHERS),
    *(LauncherCase(launcher, options=("--num_gpus", "1")) for launcher in LAUNCHERS),
    *(LauncherCase(launcher, options=("--ssh_port", "2222")) for launcher in LAUNCHERS),
    LauncherCase("pdsh", options=("--ssh_port", "2222"), environ=SSH_ARGS),
    LauncherCase("openmpi", options=("--launcher_args", "--mca btl_tcp_if_include ib0")),
    LauncherCase("slurm", options=("--num_nodes", "1")),
)
