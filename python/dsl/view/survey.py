"""What this machine has for a job, as plain data: the JSON of ``dsl-report``.

Its keys are documented in docs/cli.md. A value that cannot be found is None or empty. If the user can fix
that, a line in ``problems`` says why.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from dsl import __version__
from dsl.doctor.host_checks import SHM, SMALL_SHM_BYTES
from dsl.errors import DslError
from dsl.facts import Facts
from dsl.lists import format_ranges
from dsl.machine.kernel_files import shared_memory
from dsl.machine.programs import find_package, find_programs
from dsl.model.request import DEFAULT_MASTER_PORT
from dsl.plan.hosts import read_hostfile
from dsl.resources.exports import DEFAULT_NAME, NAME_VARIABLE, env_file_paths, read_env_files
from dsl.resources.hosts import find_allocation

SCHEMA = 1
"""Raised when a key is removed or changes its meaning; new keys may come at any time."""

GIT_FACTS = ("git_hash", "git_branch", "torch_info", "accelerator_name")


def survey(hostfile: str, facts: Facts) -> dict[str, Any]:
    """The whole survey, with its keys in the order in which people read them. torch is not imported."""
    problems: list[str] = []
    return {
        "schema": SCHEMA,
        "host": facts.names.host,
        "dsl": _dsl(),
        "python": {"version": sys.version.split()[0], "path": facts.names.executable},
        "torch": find_package("torch", "version.py", ("cuda", "hip")),
        "deepspeed": find_package("deepspeed", "git_version_info_installed.py", GIT_FACTS),
        "kernel": _kernel(),
        "cpus": _cpus(facts),
        "accelerator": _accelerator(facts, problems),
        "nvidia": _nvidia(facts, problems),
        "programs": find_programs(facts.environ),
        "addresses": list(facts.network.addresses()),
        "master_port": _master_port(facts, problems),
        "shared_memory": _shared_memory(problems),
        "open_files": _open_files(),
        "hostfile": _hostfile(hostfile, facts, problems),
        "allocation": _allocation(facts, problems),
        "env_files": _env_files(facts, problems),
        "problems": problems,
    }


def _dsl() -> dict[str, Any]:
    from dsl._core import build_info

    info = build_info()
    return {
        "version": __version__,
        "path": os.path.dirname(sys.modules["dsl"].__file__ or ""),
        "engine": {name: info[name] for name in ("version", "target", "profile")},
    }


def _kernel() -> dict[str, Any]:
    from dsl._core import kernel_interfaces

    return {"release": os.uname().release, "interfaces": kernel_interfaces()}


def _cpus(facts: Facts) -> dict[str, Any]:
    allowed = facts.cpus.allowed
    nodes = [
        {"number": node.number, "cpus": format_ranges(node.cpus), "usable_memory": node.usable_memory}
        for node in facts.cpus.numa_nodes
    ]
    return {"count": len(allowed), "allowed": format_ranges(allowed), "numa_nodes": nodes}


def _accelerator(facts: Facts, problems: list[str]) -> dict[str, Any]:
    """The accelerator that a job would run on here, and which devices the user makes visible."""
    from dsl.devices.accelerators import ACCELERATORS
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
    devices = [
        {
            "address": one.address,
            "uuid": one.uuid,
            "model": one.model,
            "memory_bytes": one.memory_bytes,
            "numa_node": one.numa_node,
            "mig": [instance.uuid for instance in one.mig],
        }
        for one in found.devices
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


def _open_files() -> dict[str, int]:
    """The limits on open descriptors; -1 means no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


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
