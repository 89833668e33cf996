"""What ``--dry-run``, ``--dry-run-json`` and ``--report-bindings`` print."""

from __future__ import annotations

import os
import sys

from dsl.report.plan import bindings_table, plan_json, plan_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsl.launchers.base import Start
    from dsl.model.job import Job
    from dsl.model.node import NodePlan
    from dsl.model.remote import Remote
    from dsl.model.request import ShowRequest


def show_plan(
    asked: ShowRequest, plan: NodePlan, environ: Mapping[str, str], say: Callable[[str], None]
) -> bool:
    """Print what is asked for; whether that was all the user wants (a dry run).

    ``environ`` is the environment that the command was started in; ``say`` puts a line on stderr.
    """
    if asked.bindings:
        for line in bindings_table(plan):
            say(line)
    if asked.dry_run_json:
        show_text(plan_json(plan, environ))
    elif asked.dry_run:
        show_text("\n".join(plan_text(plan, environ)))
    return asked.dry_run or asked.dry_run_json


def show_hosts(job: Job, remote: Remote, starts: Sequence[Start], *, as_json: bool) -> None:
    """Print what would reach the hosts of a job; nothing of it is started."""
    from dsl.report.plan import hosts_json, hosts_text

    text = hosts_json(job, remote, starts) if as_json else "\n".join(hosts_text(job, remote, starts))
    show_text(text)


def show_text(text: str) -> None:
    """Text on stdout, unless nobody reads it."""
    if sys.stdout is None:
        return
    try:
        print(text, flush=True)
    except OSError:
        # Nobody reads it. What is left in the buffer must not fail again when the interpreter ends.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
