"""Tunings of `tests/workers/tuned.py`, and what its runs have told of themselves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.command import ran

SCRIPT = Path(__file__).parent.parent / "workers" / "tuned.py"


class Tuning:
    """A folder with a config and a hostfile of four slots, in which `dsl --autotuning` works."""

    def __init__(self, dsl: Path, folder: Path) -> None:
        self.dsl = dsl
        self.folder = folder
        self.results = folder / "autotuning_results"
        self.hosts("localhost slots=4")
        self.configure(n=[1, 2, 3])

    def hosts(self, *lines: str) -> None:
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def configure(self, section: dict[str, Any] | None = None, **space: list[Any]) -> None:
        """Write the config: each key of the space with each of its values."""
        fixed = {key: values[0] for key, values in space.items() if len(values) == 1}
        tried = {key: values for key, values in space.items() if len(values) > 1}
        own = {"space": tried, "tuner_early_stopping": 0, "repeats": 0, **(section or {})}
        (self.folder / "config.json").write_text(json.dumps({**fixed, "autotuning": own}))

    def words(self, mode: str, *options: str, args: tuple[str, ...] = ()) -> list[str]:
        """The command line, one worker an experiment unless an option says otherwise."""
        is_sized = any(word in options for word in ("-i", "-e", "--num_gpus"))
        size = () if is_sized else ("--num_gpus", "1")
        return [
            *(str(self.dsl), "-H", "hosts", *size, "--autotuning", mode, *options),
            *(str(SCRIPT), *args, "--deepspeed_config", "config.json"),
        ]

    @property
    def environ(self) -> dict[str, str]:
        path = f"{self.dsl.parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}

    def run(
        self, mode: str = "tune", *options: str, args: tuple[str, ...] = (), **environ: str
    ) -> subprocess.CompletedProcess[str]:
        words = self.words(mode, *options, args=args)
        return ran(words, 120, cwd=self.folder, env={**self.environ, **environ})

    def run_well(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Tune to an end that is a good one."""
        result = self.run(*words, **more)
        assert result.returncode == 0, result.stderr
        return result

    @contextlib.contextmanager
    def running(self, mode: str = "tune", *options: str) -> Iterator[subprocess.Popen[str]]:
        """Tune while the block runs, as the leader of a session."""
        process = subprocess.Popen(
            self.words(mode, *options),
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=30)

    def runs(self, what: str) -> list[dict[str, Any]]:
        """What the runs have told, of one kind, in order."""
        try:
            lines = (self.folder / "runs").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [one for one in map(json.loads, lines) if one["what"] == what]

    def outcomes(self, key: str) -> dict[Any, dict[str, Any]]:
        """What became of each experiment, by the value of a key in its config; not of those put aside."""
        found = {}
        for path in self.results.glob("*/result.json"):
            if "@" in path.parent.name:
                continue
            config = json.loads((path.parent / "ds_config.json").read_text())
            found[config[key]] = json.loads(path.read_text())
        return found

    def best(self) -> dict[str, Any]:
        best: dict[str, Any] = json.loads((self.results / "ds_config_optimal.json").read_text())
        return best
