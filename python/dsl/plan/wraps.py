"""``--wrap``: a command executes the workers of some global ranks, as in ``nsys profile python train.py``."""

from __future__ import annotations

from dsl._record import replace
from dsl.errors import OptionError
from dsl.output.grammar import is_in, shell_words
from dsl.plan.starting import check_ranks, keeps_ranks, ranks_or_all
from dsl.words import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.job import Job, NodePlan
    from dsl.output.grammar import Runs


def parse_wrap(text: str) -> tuple[Runs, tuple[str, ...]]:
    """Read ``0,8-15:nsys profile -o out``: ranks, and the words of a command as a shell splits them.

    Raises:
        OptionError: the ranks are no list, or there is no command.
    """
    ranks, _, command = text.partition(":")
    runs = ranks_or_all(ranks, "--wrap")
    words = shell_words(command, "--wrap")
    if not words or not words[0]:
        raise OptionError(
            f"--wrap {quote(text)}: there is no command, give RANKS:COMMAND, as in 0:nsys profile"
        )
    return runs, words


def check_wrapped(job: Job, world_size: int) -> None:
    """Refuse what cannot be read, and ranks to wrap that no attempt of a job has. Raises OptionError."""
    for text in job.start.wraps:
        parse_wrap(text)
        if keeps_ranks(job):
            check_ranks(text.partition(":")[0], "--wrap", world_size)


def with_wraps(plan: NodePlan) -> NodePlan:
    """Return the plan with the chosen workers wrapped: a command executes them, which hears no signal alone.

    If several name a rank, the first one executes the next.

    Raises:
        OptionError: the user names a rank that the job does not have.
    """
    job = plan.job
    if job.node_count == 1:  # before other nodes have met, nobody knows how many workers each has
        check_wrapped(job, plan.meeting.world_size)
    wraps = [parse_wrap(text) for text in job.start.wraps]
    workers = []
    for worker in plan.workers:
        words = [word for runs, words in wraps if is_in(worker.rank, runs) for word in words]
        workers.append(replace(worker, wrap=tuple(words)))
    scope = job.signals.scope or ("group" if any(one.wrap for one in workers) else plan.group.signal_scope)
    return replace(plan, workers=tuple(workers), group=replace(plan.group, signal_scope=scope))
