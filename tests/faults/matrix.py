"""The kill matrix as data: who gets which signal while the workers do what, and how the command must end."""

from __future__ import annotations

from typing import NamedTuple

POLITE = "TERM,INT,HUP"


class Case(NamedTuple):
    """One row of the matrix."""

    victim: str
    """``worker`` (rank 1), ``agent`` or ``guard``."""
    signal: str
    """Name without SIG. HUP is always sent under nohup."""
    behaviour: str
    """Key of `BEHAVIOURS`."""
    code: int | None
    """Exit code of the command; None when the signal must change nothing and the job goes on."""

    @property
    def name(self) -> str:
        return f"{self.victim}-{self.signal}-{self.behaviour}"

    @property
    def nohup(self) -> bool:
        return self.signal == "HUP"


def words(behaviour: str, directory: str, testchild: str) -> list[str]:
    """Words for `dsl-testchild`: announce the processes in ``ready``, then behave."""
    note = ["note", f"{directory}/ready"]
    worker = [*note, "%r %p", "pause"]
    descendant = ["ignore", POLITE, *note, "d%p %p"]
    begin = ["catch", "USR1", "trace", f"{directory}/trace"]
    shapes = {
        "plain": worker,
        "deaf": ["ignore", POLITE, *worker],
        "setsid": ["child", "[", "setsid", *descendant, "pause", "]", *worker],
        "daemon": ["daemon", "[", *descendant, "pause", "]", *worker],
        # Bounded: one process that keeps changing its pid, one that makes 40 children, in two ranks.
        "forking": [
            *("only", "0,1", "[", "child", "[", *descendant, "hop", "4000", "500", "]"),
            *("child", "[", *descendant, "churn", "40", "1000", "]", "]", *worker),
        ],
        "stopped": [*note, "%r %p", "stop", "pause"],
        "threadchild": ["threadchild", "[", "setsid", *descendant, "pause", "]", *worker],
        "bloom": ["only", "0,1", "[", "child", "[", *descendant, "bloom", "5", "300", "]", "]", *worker],
        "vfork": ["child", "[", *descendant, "vforkblock", "]", *worker],
        "renamed": [
            *("only", "0,1", "[", "child", "[", "setsid", "exec", "/usr/bin/env", "--unset=DSL_JOB_ID"),
            *(testchild, *descendant, "pause", "]", "]", *worker),
        ],
        "setuid": ["daemon", "[", *descendant, "setuid", "65534", "pause", "]", *worker],
    }
    return begin + shapes[behaviour]


def announced(behaviour: str, workers: int) -> int:
    """How many lines the ready file gets."""
    everybody = {"setsid", "daemon", "threadchild", "vfork", "setuid"}
    extra = {"forking": 4, "bloom": 2, "renamed": 2}
    return workers + (workers if behaviour in everybody else extra.get(behaviour, 0))


SIX = ("plain", "deaf", "setsid", "daemon", "forking", "stopped")
HARD = ("threadchild", "bloom", "vfork", "renamed", "setuid")


def _cases() -> list[Case]:
    cases = [Case("worker", "TERM", "plain", 143), Case("worker", "INT", "plain", 130)]
    cases += [Case("worker", "KILL", behaviour, 137) for behaviour in SIX + HARD]
    cases += [Case("worker", "TERM", "deaf", None), Case("worker", "HUP", "plain", None)]
    for victim in ("agent", "guard"):
        killed = 137 if victim == "agent" else -9
        cases += [Case(victim, "TERM", behaviour, 143) for behaviour in SIX]
        cases += [Case(victim, "INT", behaviour, 130) for behaviour in ("plain", "deaf", "daemon", "stopped")]
        cases += [Case(victim, "KILL", behaviour, killed) for behaviour in SIX]
        cases += [Case(victim, "HUP", behaviour, None) for behaviour in ("plain", "daemon")]
    cases += [Case("agent", "KILL", behaviour, 137) for behaviour in HARD]
    cases += [Case("guard", "TERM", behaviour, 143) for behaviour in HARD]
    return cases


CASES = _cases()

SAMPLE_AT_64 = {
    "worker-KILL-deaf",
    "agent-KILL-daemon",
    "agent-KILL-forking",
    "guard-TERM-forking",
    "guard-KILL-setsid",
    "guard-INT-stopped",
}
"""Cases that every run also does with 64 workers."""

SAMPLE_ON_A_SCREEN = {
    "worker-TERM-plain",
    "worker-KILL-daemon",
    "agent-TERM-plain",
    "agent-KILL-setsid",
    "guard-TERM-stopped",
    "guard-INT-deaf",
    "guard-KILL-daemon",
}
"""Cases that every run also does on a terminal that stops whoever writes to it from the background."""
