"""Stands for an agent: says where it is and what its launcher has told it, in one line of JSON."""

from __future__ import annotations

import glob
import json
import os
import sys

PREFIXES = (
    "OMPI_COMM_WORLD_",
    "PMIX_RANK",
    "PMI_",
    "MPI_LOCALRANKID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "TEST_",
)
secret = os.environ.get("TEST_SECRET", "no secret was given")
shown = []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        with open(path, "rb") as file:
            shown.append(file.read())
    except OSError:  # it has ended meanwhile
        continue
said = {
    "host": os.uname().nodename,
    "argv": sys.argv[1:],
    "cpus": len(os.sched_getaffinity(0)),
    "env": {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
    "is_shown": any(secret.encode() in line for line in shown),
}
os.write(1, json.dumps(said).encode() + b"\n")
