"""The plans of this node, attempt by attempt: it meets the others, asks the logs plug-in, and plans."""

from __future__ import annotations

from dsl.plan.node import AttemptFiles, choose_run_dir, count_workers, plan_node
from dsl.rendezvous.static import Static

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.facts import Facts
    from dsl.model.node import NodePlan
    from dsl.model.outcome import Membership
    from dsl.model.request import OutputRequest
    from dsl.output.plugin import LogsPlugin
    from dsl.plan.job import JobPlan
    from dsl.rendezvous.base import Rendezvous


class Planner:
    """Makes the plans of this node's part of a job, and what they need on the file system."""

    def __init__(
        self,
        planned: JobPlan,
        facts: Facts,
        rendezvous: Rendezvous | None = None,
        plugin: LogsPlugin | None = None,
    ) -> None:
        """``rendezvous`` is where the nodes meet; None: at what the job has agreed beforehand.

        ``plugin`` is the one that the job names, if it is loaded already.

        Raises:
            UsageError: this node cannot say how many workers it has, or the logs plug-in cannot be used.
        """
        self.job = job = planned.job
        self.max_restarts = job.max_restarts
        self._facts = facts
        self.attempts = 0
        self._rendezvous = rendezvous or Static(job, planned.node_rank, facts.ports)
        self.local_world_size = count_workers(job, planned.node_rank, facts)
        self.run_dir = choose_run_dir(job, planned.node_rank, facts.names)
        self._plugin = plugin or _load_plugin(job.output)

    def plan(self, attempt: int) -> NodePlan:
        """Decide what this node starts in an attempt, counted from 0.

        Raises:
            DslError: the nodes do not meet, or a wish cannot be fulfilled.
        """
        self.attempts = attempt + 1
        meeting = self._rendezvous.meet(attempt, self.local_world_size)
        plan = plan_node(self.job, meeting, AttemptFiles(self.run_dir), self._facts)
        if self._plugin is None:
            return plan
        chosen = self._plugin.ask(plan)
        return plan_node(self.job, meeting, AttemptFiles(self.run_dir, chosen), self._facts)

    def prepare(self, plan: NodePlan) -> None:
        """Make the directories of an attempt. Raises LogDirError."""
        if plan.log_dir is None and not plan.run_dirs:
            return
        from dsl.output.folders import make_log_dir, make_run_dirs

        if plan.log_dir is not None:
            make_log_dir(plan.log_dir)
        make_run_dirs(plan.run_dirs)

    def membership(self) -> Membership:
        """Say who takes part."""
        return self._rendezvous.membership()

    def finish(self, *, succeeded: bool) -> None:
        """Remove what is not worth keeping of the run's directory, if its place was ours to choose."""
        job = self.job
        if self.run_dir is not None and job.flavour.keeps_errors and job.output.log_dir is None:
            from dsl.output.folders import remove_run_dir

            remove_run_dir(self.run_dir, self.attempts, self.local_world_size, succeeded=succeeded)


def _load_plugin(output: OutputRequest) -> LogsPlugin | None:
    if output.logs_specs is None:
        return None
    from dsl.output.plugin import load_plugin

    return load_plugin(output.logs_specs, output)
