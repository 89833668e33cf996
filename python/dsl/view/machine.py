"""The survey of a machine as text for people, in the shape of DeepSpeed's ``ds_report``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsl.lists import counted

WIDTH = 33
"""Column of the values, as in ds_report."""

RULE = "-" * 50
ABSENT = "not found"


def machine_lines(found: Mapping[str, Any]) -> list[str]:
    """Lines ``name ..... value`` for what `dsl.view.survey` has found, then the problems."""
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
