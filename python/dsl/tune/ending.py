"""Judges an experiment by its exit code and the file that it had to write.

Words in the output never make an experiment fail if it ended well. They only tell kinds of failures apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import loads

from dsl._record import Record
from dsl.lists import shorten
from dsl.model.judgement import NO_EVIDENCE, Judgement
from dsl.report.verdict import verdict
from dsl.tune.experiment import Outcome, Result
from dsl.tune.section import is_number

OUT_OF_MEMORY = (
    "out of memory",
    "outofmemory",
    "memoryerror",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
    "resource_exhausted",
)
"""Words in the output if a device or the host ran out of memory, in lower case."""

MOST = 1e308
"""Numbers beyond it, and NaN, cannot be compared."""


class Ending(Record):
    """How the job of an experiment ended, and what it left."""

    exit_code: int
    """Exit code of the job."""
    elapsed_s: float
    """From start to end, in seconds."""
    written: str | None
    """Text of the file that it had to write; None: there is none."""
    instead: str = ""
    """What is in the place of that file, in words; empty: nothing."""
    stdout: str = ""
    """Last part of its stdout."""
    stderr: str = ""
    """Last part of its stderr."""
    stop: str = ""
    """Why we ended it: ``timeout`` or ``stopped``; empty: it ended by itself."""
    limit_s: float = 0.0
    """Seconds that it had."""
    judgement: Judgement | None = None
    """What its job knows about a failure; None: nothing."""


def judge(ending: Ending, keys: Sequence[str]) -> Result:
    """The result of an experiment that had to write a number for one of these keys; no keys: for any."""
    outcome, metrics, reason = _judge(ending, keys)
    return Result(outcome, metrics, reason, ending.exit_code, ending.elapsed_s)


def _judge(ending: Ending, keys: Sequence[str]) -> tuple[Outcome, Mapping[str, float], str]:
    if ending.stop == "stopped":
        return "stopped", {}, "it was stopped"
    if ending.stop == "timeout":
        return "timeout", {}, f"it did not end in {ending.limit_s:g} s (autotuning.exp_timeout_s)"
    if ending.exit_code:
        return _failure(ending)
    if ending.written is None:
        instead = f": {ending.instead}" if ending.instead else ""
        return "no metric", {}, f"it ended well and wrote no metrics{instead}"
    return read_metrics(ending.written, keys)


def read_metrics(text: str, keys: Sequence[str]) -> tuple[Outcome, Mapping[str, float], str]:
    """The numbers in a file that an experiment wrote, or what is wrong with it."""
    try:
        found = loads(text)
    except (ValueError, RecursionError):
        end = "" if text.strip() else ": it is empty"
        return "torn metric", {}, f"its metrics are no JSON, or were cut off while they were written{end}"
    if not isinstance(found, dict):
        return "torn metric", {}, f"its metrics are no JSON object: {shorten(text)}"
    numbers = {name: float(value) for name, value in found.items() if is_number(value) and abs(value) < MOST}
    if not numbers or (keys and not any(key in numbers for key in keys)):
        for key in keys:
            if key in found:
                shown = shorten(" ".join(repr(found[key]).split()))
                return "no metric", {}, f"its {key} is no number that can be compared: {shown}"
        wanted, has = " or ".join(keys) or "a number", shorten(", ".join(found)) or "nothing"
        return "no metric", {}, f"its metrics lack {wanted}, they have {has}"
    return "ok", numbers, ""


def _failure(ending: Ending) -> tuple[Outcome, Mapping[str, float], str]:
    said, judgement = f"{ending.stdout}\n{ending.stderr}".lower(), ending.judgement
    lines = verdict(judgement) if judgement is not None else []
    evidence = judgement.causes[0].evidence if judgement is not None and judgement.causes else NO_EVIDENCE
    has_run_out = evidence.is_out_of_memory or any(words in said for words in OUT_OF_MEMORY)
    written = [line.strip() for line in ending.stderr.splitlines() if line.strip()]
    # Without a judgement no worker has run, and the last line of the command says why.
    script = [line for line in written if not (lines and line.startswith("dsl: "))]
    last = (evidence.lines or script or ("",))[-1]
    why = lines[0] if lines else f"exit code {ending.exit_code}"
    is_news = bool(last) and last not in why
    return "oom" if has_run_out else "crash", {}, shorten(f"{why}: {last}" if is_news else why, 300)
