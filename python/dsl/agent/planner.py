"""The plans of this node, attempt by attempt: it meets the others, asks the logs plug-in, and plans.

Also here: a plan as the engine reads it.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.engine import LaunchSpec, Stdio, WorkerSpec
from dsl.errors import LogDirError
from dsl.machine.check import NO_PYTHON, check_program
from dsl.model.job import INHERIT, NodePlan, Notice, Route, WorkerPlan, refuse_fallbacks
from dsl.model.request import NO_POLICY
from dsl.output import without_files
from dsl.plan.node import AttemptFiles, Static, choose_run_dir, count_workers, plan_node
from dsl.plan.worker import CALL_FILE, RESULT_FILE, WORKER_FILE, choose_timer_file, inherited_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal, TypeAlias

    from dsl.agent.timers import FileTimers
    from dsl.facts import Facts
    from dsl.model.job import Job, Meeting
    from dsl.output.plugin import LogsPlugin
    from dsl.plan.job import JobPlan
    from dsl.plan.node import Rendezvous

    _Streams: TypeAlias = dict[tuple[int, int], tuple[Stdio, Stdio, bool]]

NOWHERE = Route()
"""A stream that is neither kept nor shown."""


def check_job(job: Job, facts: Facts, option: str = NO_PYTHON) -> None:
    """Refuse a program that the workers could not run; see `check_program`."""
    check_program(job.program, job.flavour, inherited_environment(job, facts.environ), option=option)


class Planner:
    """Makes the plans of this node's part of a job, and what they need on the file system."""

    shares_dirs = False
    """Other processes of ours make the same directories."""

    def __init__(self, planned: JobPlan, facts: Facts) -> None:
        """The nodes meet at the address that the job fixes beforehand, unless `meet_by` is called.

        Raises:
            UsageError: this node cannot say how many workers it has, or the logs plug-in cannot be used.
        """
        self.job = job = planned.job
        self._place = planned.node_rank
        self._told = planned.notices
        self._facts = facts
        self.attempts = 0
        self._made_log_dir: str | None = None
        self._latest: str | None = None
        self._rendezvous: Rendezvous = Static(job, planned.node_rank, facts.ports)
        self.local_world_size = count_workers(job, planned.node_rank, facts)
        self.run_dir = choose_run_dir(job, planned.node_rank, facts.names)
        self._plugin: LogsPlugin | None = None
        if job.output.logs_specs is not None:
            from dsl.output.plugin import load_plugin

            self._plugin = load_plugin(job.output.logs_specs, job.output)
        self._is_private = job.output.log_dir is None and job.flavour.keeps_errors
        """The run's directory is for this user alone, and goes with the run."""
        self._files = AttemptFiles(self.run_dir, timer_file=choose_timer_file(job, facts))
        self.timers: FileTimers | None = None
        """The workers' timers, once their file is made; the agent waits for them, too."""

    def plan(self, attempt: int) -> NodePlan:
        """Decide what this node starts in an attempt, counted from 0.

        Raises:
            DslError: the nodes do not meet, or a wish cannot be fulfilled.
        """
        meeting = self._rendezvous.meet(attempt, self.local_world_size)
        self.attempts = meeting.attempt + 1
        plan = plan_node(self.job, meeting, self._files, self._facts, self._place)
        if self._plugin is not None:
            files = replace(self._files, chosen=self._plugin.ask(plan))
            plan = plan_node(self.job, meeting, files, self._facts, self._place)
        if self.job.is_strict and not attempt:
            refuse_fallbacks(plan.notices)
        if self.job.log_level == "debug":
            from dsl.plan.node import account

            plan = replace(plan, notices=(*plan.notices, *account(plan, self._facts.environ)))
        return plan

    def sketch(self, meeting: Meeting | None = None) -> NodePlan:
        """What is known of the first plan before the nodes have met; nothing is asked or made for it.

        It assumes that all nodes have as many workers as this one, and meet in this way, if it is given.

        Raises:
            DslError: a wish cannot be fulfilled here.
        """
        meeting = meeting or self._rendezvous.meet(0, self.local_world_size)
        return plan_node(self.job, meeting, self._files, self._facts, self._place)

    def meet_by(self, rendezvous: Rendezvous) -> None:
        """Plan with these meetings from now on."""
        self._rendezvous = rendezvous

    def notices(self, plan: NodePlan) -> tuple[Notice, ...]:
        """What is to be known about the first plan. Raises UsageError if a debugger or a wrap cannot work."""
        notices = (*self._told, *plan.notices)
        if self.job.start.wraps:
            from dsl.agent.preflight import check_wraps

            check_wraps(self.job, [worker.rank for worker in plan.workers], plan.env)
        if not self.job.debug.ranks:
            return notices
        from dsl.agent.preflight import debugger_notices

        return (*notices, *debugger_notices(plan, self._facts))

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make the directories and the timers' file of an attempt, and return its plan.

        A restart does not fail for lack of files: if they cannot be made, it gets the plan without them.

        Raises:
            LogDirError: a directory cannot be made for the first attempt, or for the results of functions.
            DslError: the timers' file cannot be made.
        """
        if plan.timer_file is not None:
            from dsl.agent.timers import FileTimers

            timers = self.timers or FileTimers(plan.timer_file)
            self.timers = timers if timers.open() else None
        if plan.log_dir is None and not plan.run_dirs:
            return plan
        try:
            self._make_dirs(plan)
        except LogDirError as error:
            if plan.meeting.attempt == 0 or self.job.program.kind == "call":
                raise
            return self._without_files(plan.meeting, error)
        return plan

    def _make_dirs(self, plan: NodePlan) -> None:
        from dsl.output.folders import (
            hold_run_dir,
            link_latest,
            make_log_dir,
            make_run_dirs,
            remake_run_dirs,
        )

        if plan.log_dir is not None and make_log_dir(plan.log_dir):
            self._made_log_dir = plan.log_dir
        is_private = self._is_private
        if self.shares_dirs:
            make_run_dirs(plan.run_dirs, are_shared=True)
        elif plan.meeting.attempt and self.run_dir is not None and plan.run_dirs:
            remake_run_dirs(self.run_dir, plan.run_dirs, is_private=is_private)
        else:
            if self.run_dir is not None and is_private:
                hold_run_dir(self.run_dir)
            make_run_dirs(plan.run_dirs, is_private=is_private)
        if plan.meeting.attempt == 0 and plan.run_dirs and self.job.output.log_dir is not None:
            self._latest = f".latest_node{plan.meeting.node_rank}" if plan.meeting.node_rank else ".latest"
            link_latest(plan.run_dirs[0], self._latest)

    def _without_files(self, meeting: Meeting, error: LogDirError) -> NodePlan:
        """The plan of a meeting without files: output that files would keep is shown instead."""
        output = replace(without_files(self.job.output), local_ranks=self.job.output.local_ranks)
        job = replace(self.job, output=replace(output, each_rank_log=None, stdout_words="", stderr_words=""))
        plan = plan_node(job, meeting, replace(self._files, run_dir=None), self._facts, self._place)
        notice = Notice("warning", f"{error}, this attempt has no log files and no error files")
        return replace(plan, notices=(notice,))

    def finish(self, *, succeeded: bool) -> None:
        """Remove empty parts of the run's directory; after a success all of it, if we chose its place."""
        job = self.job
        if self.timers is not None:
            self.timers.close()
        if self.run_dir is None:
            return
        from dsl.output.folders import (
            let_go_run_dir,
            remove_log_dir,
            remove_run_dir,
            unlink_latest,
        )

        remove_run_dir(self.run_dir, succeeded=succeeded and job.output.log_dir is None)
        if self._latest is not None:
            unlink_latest(self.run_dir, self._latest)
        if self._made_log_dir is not None:
            remove_log_dir(self._made_log_dir)
        let_go_run_dir(self.run_dir)

    def tidy(self) -> None:
        """Remove what killed runs have left, if this run has such a directory, too."""
        if self.run_dir is None or not self._is_private:
            return
        from dsl.output.folders import remove_dead_runs

        remove_dead_runs(self._facts.names.temp_dir, (CALL_FILE, WORKER_FILE, RESULT_FILE))


def launch_spec(
    plan: NodePlan,
    *,
    stdin_is_terminal: bool,
    fork_servers: Sequence[Sequence[int]] = (),
    tells_first_output: bool = False,
) -> LaunchSpec:
    """Translate a plan. The only decision here is how to carry out each route.

    A worker that reads from our terminal, or writes to it directly, goes to the foreground: elsewhere the
    terminal may stop it. ``fork_servers``: the engine's numbers for each fork server of the plan, whose
    workers take turns at them; without them all workers are executed. ``tells_first_output``: the engine
    reports the first output of each worker that dsl sees.
    """
    made: _Streams = {}
    workers = tuple(
        [worker_spec(plan, worker, stdin_is_terminal, fork_servers, made) for worker in plan.workers]
    )
    return replace(
        plan.group,
        workers=workers,
        env=plan.env,
        inherits=True,
        lingers=plan.workers[0].noun == "rank",
        relayed=plan.is_conducted,
        tells_first_output=tells_first_output,
    )


def worker_spec(
    plan: NodePlan,
    worker: WorkerPlan,
    stdin_is_terminal: bool = False,  # noqa: FBT001, FBT002
    fork_servers: Sequence[Sequence[int]] = (),
    made: _Streams | None = None,
) -> WorkerSpec:
    """Translate the plan of one worker. ``made`` has what workers with the same routes share.

    The other arguments are those of `launch_spec`.
    """
    routes = (id(worker.stdout), id(worker.stderr))  # the plan keeps them, so they stay what they are
    made = {} if made is None else made
    if (streams := made.get(routes)) is None:
        stdout, stderr = _stdio(plan, worker.stdout, 1), _stderr(plan, worker)
        streams = made[routes] = (stdout, stderr, _has_terminal(worker))
    stdout, stderr, has_terminal = streams
    servers = fork_servers[worker.fork_server] if fork_servers and worker.fork_server is not None else ()
    return WorkerSpec(
        worker.command,
        env=worker.env,
        stdin=_stdin(worker, is_terminal=stdin_is_terminal),
        stdout=stdout,
        stderr=stderr,
        cpus=worker.cpus or (),
        mempolicy=worker.mempolicy,
        foreground=(worker.stdin and stdin_is_terminal) or has_terminal,
        prefix=worker.prefix,
        keep_fds=worker.keep_fds,
        fork_server=servers[worker.local_rank % len(servers)] if servers else None,
        fork_entry=worker.fork_entry,
    )


def with_few_pipes(plan: NodePlan) -> NodePlan:
    """The plan for few descriptors: workers write straight to the console what goes nowhere else."""

    def own(route: Route | None) -> Route | None:
        is_only_shown = route is not None and route.console is not None and route.path is None
        return INHERIT if is_only_shown and not plan.group.line_files else route

    workers = [replace(one, stdout=own(one.stdout), stderr=own(one.stderr)) for one in plan.workers]
    return replace(plan, workers=tuple(workers), job=replace(plan.job, policy=NO_POLICY))


def _stdin(worker: WorkerPlan, *, is_terminal: bool) -> Stdio:
    """At a terminal each worker can ask its stdin for the terminal's size, as ``stty size`` does."""
    if worker.stdin_fd is not None:
        return Stdio.fd(worker.stdin_fd)
    if worker.stdin:
        return Stdio.inherit()
    return Stdio.unreadable() if is_terminal else Stdio.null()


def _stderr(plan: NodePlan, worker: WorkerPlan) -> Stdio:
    """Read stderr even if it is neither shown nor kept: its end may say why the worker failed."""
    is_one = plan.job.policy != NO_POLICY and worker.stdout.terminal and worker.stderr == worker.stdout
    if is_one or (worker.stderr is None and worker.stdout != NOWHERE):  # one terminal keeps the order
        return Stdio.stdout()
    if worker.stderr in (None, NOWHERE):
        return Stdio.log()
    return _stdio(plan, worker.stderr, 2)


def _has_terminal(worker: WorkerPlan) -> bool:
    routes = (worker.stdout, worker.stderr)
    return any(route is not None and route.inherit and route.terminal for route in routes)


def _stdio(plan: NodePlan, route: Route, stream: Literal[1, 2]) -> Stdio:
    """Let the worker write to its file directly, unless the engine has to process the bytes.

    A policy of restarts has to know whether there was any output.
    """
    is_heard = plan.job.policy != NO_POLICY
    if route.inherit and is_heard:
        route = replace(route, inherit=False, console=stream)
    if route.inherit:
        return Stdio.inherit()
    if route.pipe or route.fd is not None:
        return Stdio.pipe() if route.fd is None else Stdio.fd(route.fd)
    is_searched = any(number == stream for number, _, _ in plan.group.line_files)
    if route.console is not None or is_searched or is_heard or (route.path and plan.group.log_max_bytes):
        return Stdio.log(route.path, console=route.console, terminal=route.terminal, prefix=route.prefix)
    return Stdio.null() if route.path is None else Stdio.file(route.path, append=True)
