"""Record the commands of DeepSpeed's launchers into ``golden/launchers.json``. Not part of a test run.

From the root of the repository, with a Python that has deepspeed 0.19.8 and torch::

    python -m tests.contract.record_launchers

Nothing in the file is written by hand. DeepSpeed runs with DS_ACCELERATOR=cpu; nothing is started.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from typing import Any

from tests.contract.golden_file import outcome
from tests.contract.launcher_inputs import CASES, EXPORTS, LauncherCase
from tests.contract.record_golden import load, write

CLASSES = {
    "pdsh": "PDSHRunner",
    "openmpi": "OpenMPIRunner",
    "mpich": "MPICHRunner",
    "impi": "IMPIRunner",
    "mvapich": "MVAPICHRunner",
    "slurm": "SlurmRunner",
}
HOW = (
    "the runner classes, with exports, given the options of each case and pool and active resources as main makes "
    "them: the slots of each host, the words of the command before the interpreter, those behind it (of the first rank, "
    "where each has its own), and the variables that it sets"
)


def command(runner: Any, case: LauncherCase) -> dict[str, Any]:
    """The words of a command, and the variables that its launcher is given."""
    options = ["--hostfile", "/job/hostfile", "--launcher", case.launcher, *case.options, "train.py"]
    args = runner.parse_args(options)
    args.master_addr = "10.0.0.1"
    kind = getattr(load("launcher.multinode_runner"), CLASSES[case.launcher])
    pool = dict(case.pool)
    chosen = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
    active = runner.apply_num_nodes_and_gpus(chosen, args.num_nodes, args.num_gpus)
    world = runner.encode_world_info(active)
    instance = kind(args, world) if case.launcher == "pdsh" else kind(args, world, pool)
    for name, value in EXPORTS:
        instance.add_export(name, value)
    environ = dict(case.environ)
    found = instance.get_cmd(environ, active)
    words = found[0] if case.launcher == "pdsh" else found
    python = words.index(sys.executable)
    end = words.index(":", python) if ":" in words else len(words)
    home = os.path.dirname(runner.__file__)
    return {
        "slots": [[name, len(slots)] for name, slots in active.items()],
        "argv": words[:python],
        "program": [word.replace(home, "/LAUNCHER") for word in words[python + 1 : end]],
        "env": {name: value for name, value in environ.items() if dict(case.environ).get(name) != value},
    }


def main() -> None:
    """Write the file."""
    runner = load("launcher.runner")
    with tempfile.TemporaryDirectory() as folder:
        load("launcher.multinode_runner").MVAPICH_TMP_HOSTFILE = f"{folder}/hosts"
        os.chdir("/")
        answers = [outcome(command, runner, case) for case in CASES]
    for answer in answers:
        if "result" in answer:
            found = answer["result"]["argv"]
            found[:] = [word.replace(folder, "/FOLDER") for word in found]
    write("launchers", HOW, cases=answers)


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_module("deepspeed")
    main()
