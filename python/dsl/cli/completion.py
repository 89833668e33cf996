"""What ``dsl --completion`` prints: the script of a shell, and the answers that such a script asks for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dsl.errors import DslError
from dsl.facts import Facts, this_machine
from dsl.model.options import SHELLS
from dsl.model.request import DEFAULT_HOSTFILE
from dsl.output.job_folders import JobFolders
from dsl.plan.hosts import read_hostfile
from dsl.report.speak import show_text
from dsl.resources.hosts import find_allocation
from dsl.view.jobs import running_jobs
from dsl.words import JOB_CONTROL, SIGNALS, UNTAKEABLE, counted, printable

ASKED = ("FILTER", "JOB", "SIGNAL", "SIGNAL,...")
"""Values that shells ask `answer` for."""
MOST_SLOTS = 64
"""So many slots of a host are offered at most."""
PLAIN = re.compile(r"[\w.:@,-]+")
"""What may get onto a command line: a shell reads it as it is."""


def answer(kind: str, command: str, word: str, hostfile: str, facts: Facts) -> list[str]:
    """What may stand in place of a word: lines of a whole word, and a tab with its description behind.

    ``kind``: one of `ASKED`. ``hostfile``: the one that the command line names, or empty. What cannot be
    found out is left out.
    """
    found: Iterable[tuple[str, str]] = ()
    try:
        if kind == "FILTER":
            found = filters(word, _pool(hostfile, facts))
        elif kind == "JOB":
            found = _jobs(facts.environ, with_ended=command in ("dsl-wait", "dsl-attach"))
        elif kind in ASKED:
            found = signals(word if kind.endswith(",...") else "")
    except (DslError, OSError):
        return []
    return [
        f"{one}\t{' '.join(printable(text).split())[:100]}"
        for one, text in found
        if one.startswith(word) and PLAIN.fullmatch(one)
    ]


def filters(word: str, pool: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """How a filter may go on. ``pool``: hosts with their numbers of slots."""
    before, at, last = word.rpartition("@")
    host, colon, slots = last.partition(":")
    if colon:
        done, comma, _ = slots.rpartition(",")
        free = [str(slot) for slot in range(min(pool.get(host, 0), MOST_SLOTS))]
        for slot in free:
            if slot not in done.split(","):
                yield f"{before}{at}{host}:{done}{comma}{slot}", f"slot of {host}"
        return
    taken = [one.partition(":")[0] for one in before.split("@")]
    for name, count in pool.items():
        if name not in taken:
            yield f"{before}{at}{name}", counted(count, "slot")


def signals(word: str) -> Iterator[tuple[str, str]]:
    """Signals that a job can handle, behind those that a list has already."""
    done, comma, _ = word.rpartition(",")
    for number, name in SIGNALS.items():
        if number not in (*UNTAKEABLE, *JOB_CONTROL) and name not in done.split(","):
            yield f"{done}{comma}{name}", f"signal {number}"


def _pool(hostfile: str, facts: Facts) -> Mapping[str, int]:
    """The hosts that a filter may name. Raises DslError: they cannot be found out."""
    path = os.path.expanduser(hostfile) if hostfile else DEFAULT_HOSTFILE
    pool = read_hostfile(path, facts.files.read_text)
    if pool is None and not hostfile:
        allocation = find_allocation(facts.environ, facts.files.read_text)
        pool = None if allocation is None else dict(allocation.hosts)
    if pool is not None or hostfile:
        return pool or {}
    from dsl.devices.offered import find_devices

    return {"localhost": len(find_devices(facts.environ, facts.devices, facts.cpus).slots)}


def _jobs(environ: Mapping[str, str], *, with_ended: bool) -> Iterator[tuple[str, str]]:
    """The jobs of this user, each once; ``with_ended``: also those that ran in the background."""
    seen = set()
    for job in running_jobs():
        seen.add(job.view.pid)
        yield str(job.view.pid), " ".join(job.view.words)
        job.close()
    for kept in JobFolders(environ).jobs() if with_ended else ():
        if kept.pid not in seen:
            seen.add(kept.pid)
            yield str(kept.pid), " ".join(kept.begun.words)


def reply(words: Sequence[str]) -> bool:
    """Print what a command line that begins with ``--completion`` asks for; false: it asks for nothing.

    Users name a shell and get its script. The scripts write ``--completion KIND COMMAND WORD HOSTFILE``.
    """
    option, equals, shell = words[0].partition("=")
    shell = shell if equals else "".join(words[1:2])
    is_script = option.replace("_", "-") in ("--completion", "--print-completion")
    if is_script and len(words) == (1 if equals else 2) and shell in SHELLS:
        # scripts/completion_scripts.py makes these files from the options.
        # `importlib.resources` finds no files of a package that `dsl._own_process` has loaded.
        with open(f"{os.path.dirname(__file__)}/completions/{shell}", encoding="utf-8") as script:
            show_text(script.read().rstrip("\n"))
    elif option == "--completion" and len(words) == 5 and words[1] in ASKED:
        kind, command, word, hostfile = words[1:]
        show_text("\n".join(answer(kind, command, word, hostfile, this_machine())))
    else:
        return False
    return True
