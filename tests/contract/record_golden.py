"""Record what DeepSpeed 0.19.8 does into ``golden/*.json``. Not part of a test run.

From the root of the repository, with a Python that has deepspeed 0.19.8 and torch::

    python -m tests.contract.record_golden

Each file says how it was obtained and holds the cases: what DeepSpeed was asked, and what it answered. Nothing
in it is written by hand. DeepSpeed runs with DS_ACCELERATOR=cpu, so no device is needed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.contract import golden_file
from tests.contract import golden_inputs as inputs
from tests.contract.golden_file import outcome


def load(name: str) -> Any:
    """A module of DeepSpeed, which has no types."""
    return import_module(f"deepspeed.{name}")


def write(name: str, how: str, **content: list[Any]) -> None:
    golden_file.write(name, f"deepspeed {import_module('deepspeed').__version__}: {how}", **content)


def record_flags(runner: Any) -> None:
    """Options with type and default, and what every prefix of an option resolves to."""
    argparse = import_module("argparse")
    original = argparse.ArgumentParser.parse_args
    parsers: list[Any] = []

    def spy(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parsers.append(parser)
        return original(parser, *args, **kwargs)

    argparse.ArgumentParser.parse_args = spy
    defaults = vars(runner.parse_args(["script"]))
    argparse.ArgumentParser.parse_args = original
    options = [
        {
            "flags": action.option_strings,
            "dest": action.dest,
            "type": getattr(action.type, "__name__", None),
            "default": action.default,
            "takes_value": action.nargs is None,
            "choices": action.choices,
        }
        for action in parsers[0]._actions
        if action.option_strings and action.dest != "help"
    ]
    names = {flag for option in options for flag in option["flags"] if flag.startswith("--")}
    prefixes = sorted({name[:end] for name in names for end in range(3, len(name) + 1)})

    def resolve(prefix: str) -> Any:
        for words in ([], ["3"], ["tune"], ["debug"]):
            answer = outcome(lambda argv: vars(runner.parse_args(argv)), [prefix, *words, "script"])
            changed = [key for key, value in answer.get("result", {}).items() if value != defaults[key]]
            if len(changed) == 1 and changed != ["user_script"]:
                return changed[0]
        return None

    write(
        "flags",
        "options of the parser of parse_args; each prefix parsed in a command line (null: refused)",
        options=options,
        prefixes=[[prefix, resolve(prefix)] for prefix in prefixes],
    )


def record_functions(runner: Any) -> None:
    """The functions that users import."""
    defaults = vars(runner.parse_args(["script"]))

    def parse(argv: list[str]) -> dict[str, Any]:
        return {key: value for key, value in vars(runner.parse_args(argv)).items() if value != defaults[key]}

    write(
        "parse_args",
        "parse_args of command lines, without the attributes that keep their default",
        cases=[[argv, outcome(parse, argv)] for argv in inputs.command_lines()],
    )
    write(
        "hostfile",
        "_parse_hostfile of lists of lines, as pairs",
        cases=[
            [lines, outcome(lambda text: list(runner._parse_hostfile(text).items()), lines)]
            for lines in inputs.hostfiles()
        ],
    )
    write(
        "filters",
        "parse_inclusion_exclusion(pool, include, exclude), as pairs",
        cases=[
            [list(pool.items()), include, exclude, outcome(_filter, runner, pool, include, exclude)]
            for pool, include, exclude in inputs.filters()
        ],
    )
    write(
        "world_info",
        "encode_world_info",
        cases=[[world, runner.encode_world_info(world)] for world in inputs.WORLDS],
    )


def _filter(runner: Any, pool: inputs.Pool, include: str, exclude: str) -> Any:
    return list(runner.parse_inclusion_exclusion(pool, include, exclude).items())


def record_binding(numa: Any) -> None:
    """Core lists, and numactl's arguments for machines that are described in the golden."""
    answers = [(text, outcome(numa.parse_range_list, text)) for text in inputs.core_lists()]
    write(
        "core_lists",
        "utils.numa.parse_range_list, without very long answers",
        cases=[[text, answer] for text, answer in answers if len(answer.get("result", ())) < 80],
    )
    numa.check_for_numactl_pkg = lambda: True
    numa.psutil.cpu_count = lambda logical: 16 if logical else 8
    cases: list[Any] = []
    for table in inputs.NUMA_TABLES:
        numa.get_numa_cores = lambda table=table: table
        for cores in inputs.BOUND_CORES:
            for count in inputs.LOCAL_WORLD_SIZES:
                ranks = [outcome(numa.get_numactl_cmd, cores, count, rank) for rank in range(count)]
                share = ranks[0]["result"][0] if "result" in ranks[0] else None
                words = [" ".join(answer["result"][1][1:]) for answer in ranks if "result" in answer]
                cases.append([table, cores, count, share, words])
    write(
        "binding",
        "utils.numa.get_numactl_cmd on 8 physical cores, with the cpus of each NUMA node given in place of "
        "`numactl --hardware`: cpus of the nodes, core list, local world size, cores a rank, numactl's "
        "arguments of each rank (null and none: refused)",
        cases=cases,
    )


def record_cpu_devices() -> None:
    """Workers of the cpu accelerator by NUMA table."""
    accelerator = import_module("deepspeed.accelerator.cpu_accelerator")
    numa = load("utils.numa")
    cases = []
    for table in inputs.COUNTED_NUMA_TABLES:
        numa.get_numa_cores = lambda table=table: table
        cases.append([table, accelerator.CPU_Accelerator().device_count()])
    write("cpu_devices", "CPU_Accelerator.device_count with the cpus of each NUMA node given", cases=cases)


class Captured(Exception):  # noqa: N818  carries the command out of main
    """The runner was about to start this command."""


def record_decisions(runner: Any) -> None:
    """What main decides: the world info and the flags it would give to the per-node launcher, or its error."""

    def capture(command: list[str], **_kwargs: Any) -> None:
        raise Captured(command)

    runner.subprocess.Popen = capture
    runner.subprocess.check_call = lambda *_args, **_kwargs: 0
    runner.subprocess.check_output = lambda *_args, **_kwargs: b"10.0.0.1\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hostfile"
        cases = [[*case, _decide(runner, path, *case)] for case in inputs.decisions()]
    write(
        "decisions",
        "main with DS_ACCELERATOR=cpu LOCAL_SIZE=4, a hostfile of the given text (null: none), the given "
        "environment and options, stopped where it would start the per-node launcher",
        cases=cases,
    )


def _decide(
    runner: Any, path: Path, text: str | None, env: dict[str, str], options: list[str]
) -> dict[str, Any]:
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text, encoding="utf-8")
    command: list[str] = []

    def run() -> None:
        try:
            runner.main(["--hostfile", str(path), *options, "train.py", "--x"])
        except Captured as captured:
            command.extend(captured.args[0])

    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(env)
    answer = outcome(run)
    if not command:
        return answer
    flags = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
    world = json.loads(base64.urlsafe_b64decode(flags["world_info"]))
    return {
        "world": list(world.items()),
        "master_addr": flags["master_addr"],
        "master_port": int(flags["master_port"]),
        "node_rank": int(flags.get("node_rank", "0")),
    }


DUMP = """
import json, os, sys, tempfile
data = {"words": sys.orig_argv[1:], "env": dict(os.environ)}
fd, _ = tempfile.mkstemp(suffix=".json", dir=os.environ["DUMP_DIR"])
os.write(fd, json.dumps(data).encode())
"""


def record_workers() -> None:
    """Arguments and environment of real workers, started by the per-node launcher."""
    cases = [
        [world, node_rank, options, _run_workers(world, node_rank, options)]
        for world, node_rank, options in inputs.WORKERS
    ]
    write(
        "workers",
        "what each worker of `python -m deepspeed.launcher.launch --world_info=W --node_rank=R --master_addr=m "
        "--master_port=29511 OPTIONS SCRIPT 'a b' ''` finds in sys.orig_argv[1:], and in its environment beyond "
        "what was given to the launcher (with --module, `dump` is the script)",
        cases=cases,
    )


def _run_workers(world: dict[str, list[int]], node_rank: int, options: list[str]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "dump.py"
        script.write_text(f"#!{sys.executable}\n{DUMP}", encoding="utf-8")
        script.chmod(0o755)
        env = {"PATH": os.environ["PATH"], "DS_ACCELERATOR": "cpu", "DUMP_DIR": folder, "PYTHONPATH": folder}
        info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
        command = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={info}"]
        command += [f"--node_rank={node_rank}", "--master_addr=m", "--master_port=29511", *options]
        command += ["dump" if "--module" in options else str(script), "a b", ""]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        workers = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*.json")]
    for worker in workers:
        worker["words"] = [word.replace(str(script), "SCRIPT") for word in worker["words"]]
        worker["env"] = {name: value for name, value in worker["env"].items() if env.get(name) != value}
        worker["env"].pop("LC_CTYPE", None)  # Python's own, in a C locale
    return sorted(workers, key=lambda worker: int(worker["env"]["RANK"]))


def record_exports(runner: Any) -> None:
    """Which variables main hands to the other hosts, before each launcher quotes them in its own way."""
    cases = []
    for accelerator, env, files in inputs.EXPORTS:
        with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
            cases.append([accelerator, env, files, _export(runner, accelerator, env, files, home, folder)])
    write(
        "exports",
        "main of two hosts, stopped where it would start the launcher: the variables given to "
        "MultiNodeRunner.add_export, stripped as it does and the last of each name; accelerator, environment, env "
        "files (HOME and CWD: the default one there, which those words also stand for in values)",
        cases=cases,
    )


def _export(
    runner: Any, accelerator: str, env: dict[str, str], files: dict[str, str], home: str, folder: str
) -> dict[str, Any]:
    places = {
        "HOME": f"{home}/.deepspeed_env",
        "CWD": f"{folder}/.deepspeed_env",
        "ABSOLUTE": f"{home}/absolute",
    }
    for name, text in files.items():
        place, _, own = name.partition("/")
        path = f"{home if place == 'HOME' else folder}/{own}" if own else places[place]
        Path(path).write_text(text, encoding="utf-8")
    name = env.get("DS_ENV_FILE", ".deepspeed_env")
    runner.DEEPSPEED_ENVIRONMENT_NAME = places.get(name, name)
    runner.DEEPSPEED_ENVIRONMENT_PATHS = [home, "."]
    module = import_module(f"deepspeed.accelerator.{accelerator}_accelerator")
    kinds = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
    (kind,) = [one for one in kinds if hasattr(one, "export_envs")]
    runner.get_accelerator().export_envs = lambda: kind.export_envs(None)
    found: dict[str, str] = {}
    pdsh = load("launcher.multinode_runner").PDSHRunner
    pdsh.backend_exists = lambda _self: True
    pdsh.add_export = lambda _self, key, value: found.update({key.strip(): value.strip()})

    def stop(*_args: Any, **_kwargs: Any) -> None:
        raise Captured

    runner.subprocess.Popen = stop
    before, cwd = dict(os.environ), Path.cwd()
    hosts = Path(folder) / "hosts"
    hosts.write_text("a slots=1\nb slots=1\n", encoding="utf-8")
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)

    def run() -> None:
        with contextlib.suppress(Captured):
            words = ["--hostfile", str(hosts), "--master_addr", "m", "--no_ssh_check"]
            runner.main([*words, "train.py"])

    answer = outcome(run)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(before)
    if "error" in answer:
        return answer
    return {"result": {name: value.replace(os.path.realpath(folder), "CWD") for name, value in found.items()}}


def main() -> None:
    """Record everything."""
    record_workers()
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE="4")
    runner = load("launcher.runner")
    record_flags(runner)
    record_functions(runner)
    record_decisions(runner)
    record_exports(runner)
    del os.environ["LOCAL_SIZE"]
    record_cpu_devices()
    record_binding(load("utils.numa"))


if __name__ == "__main__":
    main()
