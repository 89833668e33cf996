"""Jobs of Slurm that run a script."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit.cluster import Cluster

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "slurm"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Batch:
    """A job of Slurm that a script was submitted for, from the first host."""

    def __init__(
        self,
        hosts: Cluster,
        folder: Path,
        script: str | Path,
        *words: str,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``script``: one of the examples, or a path. ``options``: of sbatch. ``env``: more variables of it."""
        self._host = hosts[0]
        self._output = folder / "output"
        path = f"{Path(sys.executable).parent}:{self._host.environment()['PATH']}"
        own = {"PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **(env or {})}
        command = ["sbatch", "--parsable", f"--output={self._output}", *options, str(SCRIPTS / script)]
        command += [*words]
        result = self._host.run(command, env=own, cwd=folder, check=True)
        self.id = result.stdout.strip()

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8") if self._output.exists() else ""

    def facts(self) -> dict[str, str]:
        shown = self._host.run(["scontrol", "show", "job", self.id], check=True).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def ended(self) -> dict[str, str]:
        """The same, once it has ended; empty before."""
        facts = self.facts()
        return facts if facts["JobState"] in ENDED else {}

    def ask(self, *command: str) -> None:
        """Run one of Slurm's commands."""
        self._host.run(command, check=True)
