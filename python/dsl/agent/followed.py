"""The words by which a tool of this process would start a program: debuggers and tracers change them.

A tool that follows what a program starts replaces functions of `subprocess` and `os`, and puts words of its
own before the script. The engine calls none of these functions. So we call them here, and Python's audit
events say what they would have started; an error that we raise there keeps them from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from dsl._record import replace
from dsl.plan.starting import without_fork_servers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from dsl.model.job import NodePlan

NOWHERE = "/dev/null"
"""No program can be in this folder: nothing starts even if a tool makes no audit event."""

_heard: dict[int, list[tuple[Any, Any]]] = {}
"""What was to be started, as words and environment, by the thread that asks. Others start what they want."""
_hooks: list[object] = []


class _NotStartedError(Exception):
    """Ends a call that was about to start a program."""


def as_followed(plan: NodePlan) -> NodePlan:
    """The plan with the words and variables of the tools, which cannot follow workers that are forked."""
    workers = []
    for worker in plan.workers:
        env = {**os.environ, **plan.env, **worker.env}
        words, found = followed(worker.argv, env)
        own = {name: value for name, value in found.items() if env.get(name) != value}
        workers.append(replace(worker, argv=words, env={**worker.env, **own}))
    return without_fork_servers(replace(plan, workers=tuple(workers)))


def followed(words: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words and the environment with which the tools of this process would start this program."""
    if not _hooks:
        _hooks.append(_hear)
        sys.addaudithook(_hear)  # it stays, and costs a call for each audit event
    heard = _heard[threading.get_ident()] = [(list(words), dict(env))]
    nowhere = f"{NOWHERE}/{os.path.basename(words[0])}"
    try:
        for start in (_by_popen, _by_spawn):
            try:
                start(nowhere, *heard[-1])
            except Exception:  # noqa: BLE001, S112  code of the tool is in between
                continue
    finally:
        del _heard[threading.get_ident()]
    found, variables = heard[-1]
    text = os.fsdecode
    return tuple(map(text, found)), {text(name): text(value) for name, value in variables.items()}


def _by_popen(path: str, words: list[str], env: dict[str, str]) -> None:
    subprocess.Popen(words, executable=path, env=env)


def _by_spawn(path: str, words: list[str], env: dict[str, str]) -> None:
    os.posix_spawn(path, words, env)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _heard or event not in ("subprocess.Popen", "os.posix_spawn"):
        return
    heard = _heard.get(threading.get_ident())
    if heard is not None:
        heard.append((args[1], args[3] if event == "subprocess.Popen" else args[2]))
        raise _NotStartedError
