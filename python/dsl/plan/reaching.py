"""The plan of a head: the programs that reach the hosts of a job, such as one ssh for each."""

from __future__ import annotations

from dsl._record import record
from dsl.model.node import NodePlan, Route, WorkerPlan
from dsl.plan.node import signal_meanings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.model.job import Job, Pairs

MARGIN_S = 5.0
"""Seconds added to the grace of the workers, for messages over the network."""


@record
class Reaching:
    """A program that reaches one host, or all hosts."""

    argv: tuple[str, ...]
    """The words of its command."""
    host: str = ""
    """The one host that it reaches; empty: all."""
    env: Pairs = ()
    """Variables added to the environment of the command."""
    fd: int | None = None
    """Our descriptor that the program gets as stdin and stdout; None: we read its stdout from a pipe."""
    orders_fd: int | None = None
    """Our descriptor that the program gets as stdin alone; None: it gets no orders this way."""

    @property
    def name(self) -> str:
        """What reports call the program: the name of its host, or its own."""
        return self.host or self.argv[0].rpartition("/")[2]


def plan_reaching(job: Job, programs: Sequence[Reaching], environ: Mapping[str, str]) -> NodePlan:
    """The plan of what the launching host starts. ``environ`` is the environment of the programs.

    Signals to the job do not reach these programs: the agents learn of signals in other ways.
    """
    signals = job.signals
    workers = [
        WorkerPlan(
            rank=index,
            local_rank=index,
            argv=program.argv,
            env=dict(program.env),
            stdin_fd=program.orders_fd if program.fd is None else program.fd,
            stdout=Route(pipe=True) if program.fd is None else Route(fd=program.fd),
            stderr=Route(pipe=True),
            noun="host" if program.host else "launcher",
            name=program.name,
        )
        for index, program in enumerate(programs)
    ]
    return NodePlan(
        host="",
        node_rank=0,
        workers=tuple(workers),
        env=environ,
        master_addr="",
        master_port=0,
        world_size=len(workers),
        grace_s=signals.grace_s + MARGIN_S,
        log_level=job.log_level,
        command=job.flavour.command,
        name=job.program.name,
        signals=signal_meanings(job),
        preempt_signal=signals.preempt,
        preempt_grace_s=None if signals.preempt_grace_s is None else signals.preempt_grace_s + MARGIN_S,
        on_failure="report",
        tells_signals=True,
    )
