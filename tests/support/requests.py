"""Requests by flat names: a test says only what it is about."""

from __future__ import annotations

from typing import Any

from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.facts import Facts
from dsl.model.job import NodePlan
from dsl.model.request import Program, Request
from dsl.plan.job import plan_job

PARTS = (
    *("program", "resources", "meeting", "remote", "signals", "output", "placement", "elastic", "start"),
    *("debug", "policy"),
)
# Names of options where they say more than those of the fields.
NAMES = {
    "num_nodes": ("resources", "min_nodes"),
    "rdzv_backend": ("meeting", "backend"),
    "rdzv_endpoint": ("meeting", "endpoint"),
    "rdzv_id": ("meeting", "run_id"),
    "rdzv_conf": ("meeting", "settings"),
    "elastic_training": ("elastic", "training"),
    "bind_core_list": ("placement", "core_list"),
    "stop_signals": ("signals", "stop"),
    "forward_signals": ("signals", "forward"),
    "preempt_signal": ("signals", "preempt"),
    "signal_scope": ("signals", "scope"),
    "mem_policy": ("placement", "memory"),
    "start_method": ("start", "method"),
    "tag_output": ("output", "tag"),
    "debug_port": ("debug", "port"),
    "debug_address": ("debug", "address"),
    "debug_wait": ("debug", "waits"),
}


def make_request(flavour: str, script: str = "t.py", *args: str, **wishes: Any) -> Request:
    """A request of this flavour for a script; ``wishes`` are fields of the request or of one of its parts."""
    option = "--local_rank" if flavour == "deepspeed" else ""
    request = Request(flavour, Program("script", script, args, local_rank_option=option))  # type: ignore[arg-type]
    for name, value in wishes.items():
        part, field = NAMES.get(name) or _find(request, name)
        if part:
            inner = replace(getattr(request, part), **{field: value})
            request = replace(request, **{part: inner})
        else:
            request = replace(request, **{field: value})
    return request


def _find(request: Any, name: str) -> tuple[str, str]:
    if name in type(request).__match_args__:
        return "", name
    found = [part for part in PARTS if name in type(getattr(request, part)).__match_args__]
    if name in ("min_nodes", "max_nodes"):
        return "resources", name
    assert len(found) == 1, f"{name} is a field of {found}"
    return found[0], name


def plan_of(request: Request, facts: Facts, attempt: int = 0) -> NodePlan:
    """What this machine would start for the request."""
    return Planner(plan_job(request, facts), facts).plan(attempt)


def wish_of(request: Request, name: str) -> Any:
    """The value of a field by its flat name, as `make_request` takes it."""
    part, field = NAMES.get(name) or _find(request, name)
    return getattr(getattr(request, part) if part else request, field)
