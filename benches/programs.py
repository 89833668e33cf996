"""Where the measured programs are: our command, the helper programs, the peers in their own environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

PEERS_VARIABLE = "DSL_BENCH_PEERS"
PEERS = ("torch>=2.1", "numpy", "deepspeed")


class Programs(NamedTuple):
    """Paths of everything that is measured."""

    dsl: str
    dslrun: str
    testchild: str
    floor: str

    def launch(self, workers: int, *program: str) -> list[str]:
        """`dsl` with `program` as it stands, `workers` times."""
        return [self.dsl, "--no_python", "--no_local_rank", "--num_gpus", str(workers), *program]

    def bare(self, mode: str, workers: int, *program: str) -> list[str]:
        """The floor: this Python's own start, then a C-like loop of posix_spawn."""
        become = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
        return [sys.executable, "-c", become, self.floor, mode, str(workers), *program]


def programs() -> Programs:
    """Our programs, built if need be."""
    command = ["cargo", "build", "--quiet", "--release", "--package", "dsl-testkit"]
    subprocess.run(command, cwd=ROOT, check=True)
    built = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    scripts = Path(sysconfig.get_path("scripts"))
    return Programs(
        str(scripts / "dsl"), str(scripts / "dslrun"), str(built / "dsl-testchild"), str(built / "dsl-floor")
    )


def peers(given: str | None) -> Path:
    """Scripts of the environment with torchrun and deepspeed: the one given, else one made here, once."""
    directory = Path(given or os.environ.get(PEERS_VARIABLE) or ROOT / "bench-results" / "peers")
    scripts = directory / "bin"
    if not (scripts / "deepspeed").exists():
        print(f"installing {', '.join(PEERS)} into {directory} (once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        environ = {**os.environ, "DS_BUILD_OPS": "0"}
        install = [str(scripts / "pip"), "install", "--quiet"]
        subprocess.run([*install, "wheel", *PEERS[:2]], check=True)
        subprocess.run([*install, "--no-build-isolation", *PEERS[2:]], check=True, env=environ)
    return scripts
