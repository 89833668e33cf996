"""``dsl-report``: what this machine has for a training job, like DeepSpeed's ``ds_report``; and timelines.

The keys of its JSON are documented in docs/tools.md. A value that cannot be found is None or empty. If the
user can fix that, a line in ``problems`` says why.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dsl import __version__
from dsl._core import build_info, kernel_interfaces
from dsl.cli.tool import Tool, ToolParser
from dsl.doctor.host_checks import SHM, SMALL_SHM_BYTES
from dsl.errors import DslError, OptionError, TimelineError
from dsl.facts import Facts, this_machine
from dsl.machine.kernel import shared_memory
from dsl.machine.programs import find_package, find_programs
from dsl.model.request import DEFAULT_HOSTFILE, DEFAULT_MASTER_PORT
from dsl.plan.hosts import read_hostfile
from dsl.report.speak import show_text
from dsl.resources.exports import DEFAULT_NAME, NAME_VARIABLE, env_file_paths, read_env_files
from dsl.resources.hosts import find_allocation
from dsl.words import counted, format_ranges

SCHEMA = 1
"""Raised when a key is removed or changes its meaning; new keys may come at any time."""

GIT_FACTS = ("git_hash", "git_branch", "torch_info", "accelerator_name")

WIDTH = 33
"""Column of the values, as in ds_report."""

RULE = "-" * 50
ABSENT = "not found"


def _report(options: argparse.Namespace) -> int:
    if options.timeline is not None:
        return _draw(options.timeline, options.output)
    if options.output is not None:
        raise OptionError("--output names the files of a timeline: add --timeline FILE")
    found = survey(options.hostfile, this_machine())
    if options.json:
        from json import dumps

        text = dumps(found, indent=2)
    else:
        text = "\n".join(machine_lines(found))
    show_text(text)
    return 0


def _draw(events: str, name: str | None) -> int:
    """Write NAME.json and NAME.png, the timeline of the last job in a record. Raises TimelineError.

    ``name``: None for the name of the record without ``.jsonl``.
    """
    from json import dumps

    from dsl.view.timeline import picture_of, read_job, spans_of, trace_of

    try:
        with open(events, "rb") as file:
            spans = spans_of(read_job(file))
    except OSError as error:
        raise TimelineError(f"{events!r}: {error.strerror}") from None
    name = events.removesuffix(".jsonl") if name is None else name
    _write(f"{name}.json", dumps(trace_of(spans)).encode(), ", which https://ui.perfetto.dev opens")
    _write(f"{name}.png", picture_of(spans))
    return 0


def _write(path: str, data: bytes, use: str = "") -> None:
    from dsl.machine.files import reason, write_output

    try:
        write_output(path, data, read_again=True)
    except (OSError, ValueError) as error:
        raise TimelineError(f"{path!r} cannot be written: {reason(error)}, choose another --output") from None
    REPORT.say(f"wrote {path}{use}")


def _add(parser: ToolParser) -> None:
    """Add the options, and those of ds_report about operators without effect: dsl has none."""
    add = parser.add_argument
    add("--json", action="store_true", help="write JSON, with keys that stay (docs/tools.md)")
    add("-H", "--hostfile", metavar="PATH", default=DEFAULT_HOSTFILE, help="the hostfile to count")
    add(
        "--timeline",
        metavar="FILE",
        help="draw what the last job in a record of 'dsl --events FILE' was spent on: NAME.json, NAME.png",
    )
    add("--output", metavar="NAME", help="start of their names (default: FILE without .jsonl)")
    for name in ("--hide_operator_status", "--hide_errors_and_warnings"):
        add(name, action="store_true", help=argparse.SUPPRESS)


REPORT = Tool(
    "dsl-report", "[OPTIONS]", "Tell what there is on this machine for a training job.", _add, _report
)


def survey(hostfile: str, facts: Facts) -> dict[str, Any]:
    """The whole survey, with its keys in the order in which people read them. torch is not imported."""
    problems: list[str] = []
    engine, (soft, hard) = build_info(), resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "schema": SCHEMA,
        "host": facts.names.host,
        "dsl": {
            "version": __version__,
            "path": os.path.dirname(sys.modules["dsl"].__file__ or ""),
            "engine": {name: engine[name] for name in ("version", "target", "profile")},
        },
        "python": {"version": sys.version.split()[0], "path": facts.names.executable},
        "torch": find_package("torch", "version.py", ("cuda", "hip")),
        "deepspeed": find_package("deepspeed", "git_version_info_installed.py", GIT_FACTS),
        "kernel": {"release": os.uname().release, "interfaces": kernel_interfaces()},
        "cpus": _cpus(facts),
        "accelerator": _accelerator(facts, problems),
        "nvidia": _nvidia(facts, problems),
        "programs": find_programs(facts.environ),
        "addresses": list(facts.network.addresses()),
        "master_port": _master_port(facts, problems),
        "shared_memory": _shared_memory(problems),
        "open_files": {"soft": soft, "hard": hard},  # -1: no limit
        "hostfile": _hostfile(hostfile, facts, problems),
        "allocation": _allocation(facts, problems),
        "env_files": _env_files(facts, problems),
        "problems": problems,
    }


def _cpus(facts: Facts) -> dict[str, Any]:
    allowed = facts.cpus.allowed
    nodes = [
        {"number": node.number, "cpus": format_ranges(node.cpus), "usable_memory": node.usable_memory}
        for node in facts.cpus.numa_nodes
    ]
    return {"count": len(allowed), "allowed": format_ranges(allowed), "numa_nodes": nodes}


def _accelerator(facts: Facts, problems: list[str]) -> dict[str, Any]:
    """The accelerator that a job would run on here, and which devices the user makes visible."""
    from dsl.devices import ACCELERATORS
    from dsl.devices.offered import find_devices

    try:
        found = find_devices(facts.environ, facts.devices, facts.cpus)
    except DslError as error:
        problems.append(str(error))
        return {"name": None, "count": None, "visible": None, "variable": None}
    variable = ACCELERATORS[found.accelerator].visible_variable
    return {
        "name": found.accelerator,
        "count": len(found.slots),
        "visible": facts.environ.get(variable),
        "variable": variable,
    }


def _nvidia(facts: Facts, problems: list[str]) -> dict[str, Any] | None:
    """The driver and its devices; None without a driver."""
    text = facts.files.read_text("/proc/driver/nvidia/version")
    found = facts.devices.survey
    problems.extend(found.problems)
    if text is None and not found.source:
        return None
    names = ("address", "uuid", "model", "memory_bytes", "numa_node")
    devices = [
        {**{name: getattr(device, name) for name in names}, "mig": [part.uuid for part in device.mig]}
        for device in found.devices
    ]
    return {"driver": driver_version(text or ""), "source": found.source, "devices": devices}


def driver_version(text: str) -> str:
    """The version in the driver's own file: the first word of its first line that looks like a version."""
    words = (text.splitlines() or [""])[0].split()
    return next((word for word in words if word.count(".") and word.replace(".", "").isdigit()), "")


def _master_port(facts: Facts, problems: list[str]) -> dict[str, Any]:
    port = DEFAULT_MASTER_PORT
    try:
        is_free = facts.ports.is_free(port)
    except DslError as error:
        problems.append(str(error))
        return {"port": port, "is_free": False, "holder": ""}
    return {"port": port, "is_free": is_free, "holder": "" if is_free else facts.ports.holder(port)}


def _shared_memory(problems: list[str]) -> dict[str, Any] | None:
    size, free = shared_memory()
    if not size:
        return None
    if size < SMALL_SHM_BYTES:
        problems.append(
            f"{SHM} has {size >> 20} MB, which may be too small: in a container raise it with --shm-size=1gb"
        )
    return {"path": SHM, "bytes": size, "free_bytes": free}


def _hostfile(path: str, facts: Facts, problems: list[str]) -> dict[str, Any] | None:
    try:
        pool = read_hostfile(path, facts.files.read_input)
    except DslError as error:
        problems.append(str(error))
        return {"path": path, "hosts": None, "slots": None}
    return None if pool is None else {"path": path, "hosts": len(pool), "slots": sum(pool.values())}


def _allocation(facts: Facts, problems: list[str]) -> dict[str, Any] | None:
    """The hosts and slots that a scheduler gave to the job that we run in."""
    try:
        found = find_allocation(facts.environ, facts.files.read_text)
    except DslError as error:
        problems.append(str(error))
        return None
    if found is None:
        return None
    return {"name": found.name, "hosts": len(found.hosts), "slots": sum(count for _, count in found.hosts)}


def _env_files(facts: Facts, problems: list[str]) -> list[dict[str, Any]]:
    """The environment files with the names of their variables; values may be secrets."""
    name = facts.environ.get(NAME_VARIABLE) or DEFAULT_NAME
    paths = env_file_paths(name, facts.files.home, facts.files.cwd)
    try:
        files = read_env_files(paths, facts.files.read_text)
    except DslError as error:
        problems.append(str(error))
        return []
    return [{"path": path, "variables": list(dict(entries))} for path, entries in files.items()]


def machine_lines(found: Mapping[str, Any]) -> list[str]:
    """Lines ``name ..... value`` for what `survey` has found, then the problems."""
    lines = [RULE, "dsl general environment info:"]
    lines += [f"{name} {'.' * (WIDTH - len(name))} {value}" for name, value in _pairs(found)]
    problems = [f"[WARNING] {line}" for line in found["problems"]]
    return [*lines, *problems]


def _pairs(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    own, engine = found["dsl"], found["dsl"]["engine"]
    yield "host", found["host"]
    yield "dsl install path", own["path"]
    yield "dsl version", own["version"]
    yield (
        "dsl engine",
        ", ".join(one for one in (engine["version"], engine["target"], engine["profile"]) if one),
    )
    yield "python", f"{found['python']['version']}, {found['python']['path']}"
    yield from _packages(found)
    yield "kernel", found["kernel"]["release"]
    for name, why in found["kernel"]["interfaces"].items():
        yield f"kernel {name}", why or "used"
    yield from _devices(found)
    yield from _programs(found["programs"])
    yield from _resources(found)


def _packages(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    torch, deepspeed = found["torch"], found["deepspeed"]
    yield "torch install path", torch["path"] if torch else ABSENT
    if torch:
        yield "torch version", torch["version"] or "unknown"
        yield "torch cuda version", torch.get("cuda") or "None"
        yield "torch hip version", torch.get("hip") or "None"
    yield "deepspeed install path", deepspeed["path"] if deepspeed else ABSENT
    if deepspeed:
        git = (deepspeed.get("git_hash"), deepspeed.get("git_branch"))
        yield "deepspeed info", ", ".join(one for one in (deepspeed["version"], *git) if one)
        if deepspeed.get("torch_info"):
            yield "deepspeed wheel compiled w.", deepspeed["torch_info"]


def _devices(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    cpus, accelerator, nvidia = found["cpus"], found["accelerator"], found["nvidia"]
    yield "cpus", f"{cpus['count']} ({cpus['allowed']})"
    for node in cpus["numa_nodes"]:
        note = "" if node["usable_memory"] else ", no memory for us"
        yield f"numa node {node['number']}", f"cpus {node['cpus'] or 'none'}{note}"
    if accelerator["name"]:
        yield "accelerator", accelerator["name"]
        yield "slots", str(accelerator["count"])
        visible = accelerator["visible"]
        yield accelerator["variable"], "not set" if visible is None else repr(visible)
    if nvidia:
        yield "nvidia driver", nvidia["driver"] or "unknown"
        for number, one in enumerate(nvidia["devices"]):
            yield f"nvidia device {number}", ", ".join(_device_words(one))


def _device_words(device: Mapping[str, Any]) -> Iterator[str]:
    yield device["model"] or "unknown model"
    if device["memory_bytes"]:
        yield human(device["memory_bytes"])
    yield device["address"]
    if device["numa_node"] is not None:
        yield f"numa node {device['numa_node']}"
    if device["mig"]:
        yield counted(len(device["mig"]), "MIG instance")


def _programs(programs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, one in programs.items():
        words = [] if one is None else [one["kind"], one["version"] or "version unknown", one["path"]]
        yield f"{name}", ", ".join(word for word in words if word) or ABSENT


def _resources(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    port, memory, files = found["master_port"], found["shared_memory"], found["open_files"]
    yield "addresses", ", ".join(found["addresses"]) or "none but loopback"
    held = f"taken by {port['holder']}" if port["holder"] else "cannot be used"
    yield f"master port {port['port']}", "free" if port["is_free"] else held
    if memory:
        yield f"shared memory ({memory['path']}) size", human(memory["bytes"])
    yield "open files", f"{_limit(files['soft'])}, up to {_limit(files['hard'])}"
    hostfile = found["hostfile"]
    if hostfile is None:
        yield "hostfile", ABSENT
    elif hostfile["hosts"] is None:
        yield "hostfile", f"{hostfile['path']}, malformed"
    else:
        yield "hostfile", f"{hostfile['path']}, {_counts(hostfile)}"
    if found["allocation"]:
        yield "allocation", f"{found['allocation']['name']}, {_counts(found['allocation'])}"
    for one in found["env_files"]:
        yield "env file", f"{one['path']}: {', '.join(one['variables']) or 'no variable'}"


def _counts(hosts: Mapping[str, Any]) -> str:
    return f"{counted(hosts['hosts'], 'host')}, {counted(hosts['slots'], 'slot')}"


def _limit(number: int) -> str:
    return "no limit" if number < 0 else str(number)


def human(size: int) -> str:
    """A number of bytes as ds_report writes it: ``64.0 MB``."""
    number = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1024:
            return f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TB"
