"""Specs as values, and what the engine refuses when it reads them."""

from __future__ import annotations

from typing import Any

import pytest

from dsl import LaunchSpec, SpecError, Stdio, Supervisor, WorkerSpec


def worker(**changes: Any) -> WorkerSpec:
    return WorkerSpec(["prog", b"\xff"], **changes)


def test_a_spec_shows_what_is_not_the_default() -> None:
    assert repr(Stdio.log("/l", console=2)) == "Stdio(kind='log', path='/l', console=2)"
    assert repr(worker(cpus=(1,))) == "WorkerSpec(argv=['prog', b'\\xff'], cpus=(1,))"
    assert repr(LaunchSpec((), grace_s=2.5)) == "LaunchSpec(workers=(), grace_s=2.5)"


def test_no_value_of_a_variable_is_shown() -> None:
    spec = LaunchSpec((worker(env={"TOKEN": "secret"}),), env={"A": "secret", "B": "secret"})
    assert repr(spec) == (
        "LaunchSpec(workers=(WorkerSpec(argv=['prog', b'\\xff'], env=<1 variable>),), env=<2 variables>)"
    )


@pytest.mark.parametrize(
    "spec, message",
    [
        (LaunchSpec(()), "at least one worker"),
        (LaunchSpec((WorkerSpec(()),)), "empty argv"),
        (LaunchSpec((WorkerSpec(("",)),)), "empty argv"),
        (LaunchSpec((WorkerSpec(("a\0b",)),)), "NUL byte"),
        (LaunchSpec((worker(cwd="a\0b"),)), "NUL byte"),
        (LaunchSpec((worker(env={"A\0B": ""}),)), "NUL byte"),
        (LaunchSpec((worker(env={"A=B": ""}),)), "no name for an environment variable"),
        (LaunchSpec((worker(env={"": ""}),)), "no name for an environment variable"),
        (LaunchSpec((worker(),), grace_s=-1.0), "-1 is no length of time"),
        (LaunchSpec((worker(),), grace_s=float("nan")), "NaN is no length of time"),
        (LaunchSpec((worker(foreground=True),) * 2), "foreground"),
        (LaunchSpec((worker(stdin=Stdio.pipe()),)), "stdin cannot be a pipe"),
        (LaunchSpec((worker(stdout=Stdio("what")),)), 'no such Stdio as "what"'),  # type: ignore[arg-type]
        (LaunchSpec((worker(stdout=Stdio.log(console=3)),)), "not 3"),  # type: ignore[arg-type]
        (LaunchSpec((worker(mempolicy=("some", (0,))),)), 'memory policy "some" is not one of bind,'),
        (LaunchSpec((worker(keep_fds=(2,)),)), "0 to 2 are the standard streams"),
        (LaunchSpec((worker(keep_fds=(-1,)),)), "descriptor -1"),
        (LaunchSpec((worker(keep_fds=(7, 3, 7)),)), "7 is to be kept twice"),
        (LaunchSpec((worker(),), on_failure="no"), 'on_failure "no" is not one of stop, report'),  # type: ignore[arg-type]
        (LaunchSpec((worker(),), signal_scope="no"), "is not one of rank, group"),  # type: ignore[arg-type]
        (LaunchSpec((worker(),), binding="no"), "is not one of required, cpus_required, wanted"),  # type: ignore[arg-type]
        (LaunchSpec((worker(),), at_once=0), "at_once 0 lets no worker begin"),
    ],
)
def test_what_cannot_be_started_as_written_is_refused(spec: LaunchSpec, message: str) -> None:
    with Supervisor() as supervisor, pytest.raises((SpecError, ValueError)) as refused:
        supervisor.start(spec)
    assert message in str(refused.value)
