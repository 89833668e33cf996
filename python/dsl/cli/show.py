"""What ``--dry-run``, ``--dry-run-json`` and ``--report-bindings`` print."""

from __future__ import annotations

from dsl.report.plan import bindings_table, plan_json, plan_text
from dsl.report.speak import show_text

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
    """Print what the user asked for. True for a dry run, after which nothing is started.

    ``environ``: the environment that the command was started in. ``say``: writes a line to stderr.
    """
    if asked.bindings:
        for line in bindings_table(plan):
            say(line)
    if asked.dry_run_json:
        show_text(plan_json(plan, environ))
    elif asked.dry_run:
        show_text("\n".join(plan_text(plan, environ)))
    return asked.is_dry


def show_hosts(job: Job, remote: Remote, starts: Sequence[Start], *, as_json: bool) -> None:
    """Print the commands that would reach the hosts of a job, without starting them."""
    from dsl.report.plan import hosts_json, hosts_text

    text = hosts_json(job, remote, starts) if as_json else "\n".join(hosts_text(job, remote, starts))
    show_text(text)
