"""Record what launches from Python do under torch into ``golden/torch_launch.json``. Not part of a test run.

From the root of the repository, with a Python that has torch::

    python -m tests.contract.record_torch_launch

Nothing in the golden is written by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.contract.golden_file import torch_version, write
from tests.contract.torch_launch_inputs import CASES, observe

LIMIT_S = 120


def _config(fields: dict[str, Any]) -> Any:
    """torch's config: directories and streams are those of its DefaultLogsSpecs."""
    api: Any = import_module("torch.distributed.launcher.api")
    log_dir = fields.pop("log_dir", None)
    if log_dir is not None:
        fields["logs_specs"] = api.DefaultLogsSpecs(log_dir=log_dir)
    return api.LaunchConfig(**fields)


def _answer(name: str) -> dict[str, Any]:
    """What torch makes of a case, in a process of its own: some never end."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "answer.json")
        words = [sys.executable, "-m", "tests.contract.record_torch_launch", name, folder, str(said)]
        process = subprocess.Popen(words, start_new_session=True)
        try:
            process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"hangs": True}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answer: dict[str, Any] = json.loads(said.read_text())
    return answer


def main() -> None:
    """Record everything, or say what torch makes of one case in a folder."""
    if sys.argv[1:]:
        api: Any = import_module("torch.distributed.launcher.api")
        answer = observe(sys.argv[1], _config, api.launch_agent, api.ChildFailedError, Path(sys.argv[2]))
        Path(sys.argv[3]).write_text(json.dumps(answer))
        os._exit(0)
    found = [[name, _answer(name)] for name in CASES]
    how = (
        f"torch {torch_version()}: what torch.distributed.launcher.api.launch_agent returned or raised for each case of "
        "torch_launch_inputs; `at` is where it raised, `says` the first line of what it said, `hangs` that it had "
        f"not ended after {LIMIT_S} s"
    )
    write("torch_launch", how, cases=found)


if __name__ == "__main__":
    main()
