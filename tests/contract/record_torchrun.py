"""Record what torchrun of torch 2.15 does into ``golden/torchrun_*.json``. Not part of a test run.

From the root of the repository, with a Python that has torch 2.15::

    python -m tests.contract.record_torchrun

(torchrun_nodes.json alone: ``python -m tests.contract.record_torchrun nodes``.)

Each file says how it was obtained and holds the cases: what torchrun was asked, and what it answered. Nothing in
it is written by hand. Real workers are started, on a machine where no device of an accelerator is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from tests.contract import golden_file
from tests.contract import torchrun_inputs as inputs


def outcome(call: Callable[..., Any], argv: list[str], env: dict[str, str]) -> dict[str, Any]:
    """The outcome of a call in an environment."""
    clean = {"PATH": os.environ["PATH"], **env}
    with mock.patch.dict(os.environ, clean, clear=True):
        return golden_file.outcome(call, argv)


def write(name: str, how: str, **content: list[Any]) -> None:
    golden_file.write(name, f"torch {golden_file.torch_version()}: {how}", **content)


def record_options() -> None:
    """The parser: its options, what it makes of command lines, and the words of a worker."""
    run = import_module("torch.distributed.run")
    launch = import_module("torch.distributed.launch")
    defaults = vars(run.parse_args(["t.py"]))

    def parse(argv: list[str]) -> dict[str, Any]:
        return {key: value for key, value in vars(run.parse_args(argv)).items() if value != defaults[key]}

    def words(argv: list[str], parse: Callable[..., Any] = run.parse_args) -> list[str]:
        _, command, rest = run.config_from_args(_with_port(parse(argv)))
        return ["PYTHON" if command == sys.executable else command, *rest]

    def launch_words(argv: list[str]) -> list[str]:
        # Its own check stands between the two.
        options = launch.parse_args(argv)
        with mock.patch.object(launch, "run"):
            launch.launch(options)
        return words(argv, launch.parse_args)

    options = [
        {
            "flags": action.option_strings,
            "dest": action.dest,
            "default": action.default,
            "takes_value": action.nargs is None,
            "choices": action.choices,
        }
        for action in run.get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    ]
    write(
        "torchrun_options",
        "torch.distributed.run: options of its parser; parse_args of command lines in an environment, without the "
        "attributes that keep their default; words of a worker from config_from_args; the same words of "
        "torch.distributed.launch",
        options=options,
        cases=[[argv, env, outcome(parse, argv, env)] for argv, env in inputs.cases(inputs.OPTION_LINES)],
        words=[[argv, env, outcome(words, argv, env)] for argv, env in inputs.cases(inputs.WORD_LINES)],
        launch=[
            [argv, env, outcome(launch_words, argv, env)] for argv, env in inputs.cases(inputs.LAUNCH_LINES)
        ],
    )


def _with_port(options: Any) -> Any:
    options.master_port = options.master_port or 29500
    return options


DUMP = """
import json, os, sys
data = {"words": sys.orig_argv[1:], "env": dict(os.environ)}
with open(os.environ["DUMP_DIR"] + "/" + os.environ["RANK"] + ".json", "w") as file:
    json.dump(data, file)
"""


def record_environment() -> None:
    """The environment of real workers."""
    write(
        "torchrun_environment",
        f"what each worker of `torchrun --nproc-per-node {inputs.WORKERS} OPTIONS dump.py` finds in its environment that "
        "is not as it was given to torchrun (name, options, given variables, workers), without what differs from run "
        "to run; the same of two such commands, --node-rank 0 and 1, with two workers each",
        cases=[[*case, _run(*case[1:])] for case in inputs.ENVIRONMENTS],
        nodes=[[*case, _run(*case[1:], nodes=2)] for case in inputs.NODES],
    )


def record_nodes() -> None:
    """The environment of workers on nodes that differ."""
    found = []
    for name, options, each in inputs.UNEQUAL:
        counts = [int(one.split()[0]) for one in each]
        places = [
            [f"--nproc-per-node={one.split()[0]}", *one.split()[1:], "--node-rank", str(rank)]
            for rank, one in enumerate(each)
        ]
        found.append([name, options, each, _run_all(options, {}, places, sum(counts))])
    write(
        "torchrun_nodes",
        "what each worker finds in its environment that is not as it was given to torchrun, for "
        "`torchrun --nproc-per-node OF_NODE OPTIONS --node-rank RANK dump.py` (name, options, of each node, workers)",
        cases=found,
    )


def _run(options: str, given: dict[str, str], nodes: int = 1) -> list[dict[str, str]]:
    count = f"--nproc-per-node={inputs.WORKERS // nodes}"
    places = [[count, "--node-rank", str(rank)] for rank in range(nodes)] if nodes > 1 else [[count]]
    return _run_all(options, given, places, inputs.WORKERS)


def _run_all(
    options: str, given: dict[str, str], places: list[list[str]], workers: int
) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "dump.py")
        script.write_text(DUMP, encoding="utf-8")
        env = {"PATH": os.environ["PATH"], "DUMP_DIR": folder, "TMPDIR": folder, **given}
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += options.split()
        running = [
            subprocess.Popen([*command, *place, str(script)], env=env, stderr=subprocess.DEVNULL)
            for place in places
        ]
        codes = [one.wait() for one in running]
        if any(codes):
            msg = f"torchrun {options} has failed"
            raise RuntimeError(msg)
        found = []
        for rank in range(workers):
            worker = json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8"))["env"]
            worker.pop("LC_CTYPE", None)  # Python's own, in a C locale
            new = {name: value for name, value in worker.items() if env.get(name) != value}
            found.append({name: inputs.normal(name, value, options) for name, value in sorted(new.items())})
    return found


def main() -> None:
    """Record everything, or what differs between nodes."""
    if sys.argv[1:] != ["nodes"]:
        record_options()
        record_environment()
    record_nodes()


if __name__ == "__main__":
    main()
