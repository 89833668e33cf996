"""What watches the workers while a job runs: views into it, the watcher for hangs, metrics."""

from __future__ import annotations

from os import urandom

from dsl import EngineError
from dsl._record import kept
from dsl.machine.this_process import socket_folders
from dsl.report.speak import optional

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Supervisor
    from dsl.agent.elsewhere import Elsewhere
    from dsl.agent.lookout import HangWatcher
    from dsl.agent.metrics import Metrics
    from dsl.agent.views import Views
    from dsl.model.job import NodePlan
    from dsl.model.outcome import History


class Watchers:
    """The watchers of one agent, made when its job lasts or somebody asks about it.

    ``state`` returns the fields of `dsl.agent.views.State`. ``command_pid`` and ``elsewhere``: those of
    the agent.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        state: Callable[[], tuple[NodePlan, History, int, float]],
        command_pid: int,
        elsewhere: Elsewhere | None,
    ) -> None:
        self._supervisor, self._state = supervisor, state
        self._command_pid, self._elsewhere = command_pid, elsewhere
        self._hangs: HangWatcher | None = None
        self._listens = False

    @kept
    def views(self) -> Views:
        """The views into the job."""
        from dsl.agent.views import State, Views

        def state() -> State:
            return State(*self._state())

        return Views(self._supervisor, state, self._command_pid, self._elsewhere)

    def begin(self, plan: NodePlan, metrics: Metrics | None) -> Sequence[HangWatcher]:
        """Let views call, and watch as the user wants. Returns the channels that the agent has to read."""
        self._listens = self._listen()
        if metrics is not None:
            what = "there are no metrics"
            optional(plan.command, what, lambda: metrics.show(self.views.ask, self.views.view))
        sees_all = self._elsewhere is not None or plan.world_size == len(plan.workers)
        if plan.hang_timeout_s is None or not sees_all:
            return ()
        self._hangs = optional(
            plan.command, "nobody watches for hangs (--hang-timeout)", lambda: self._watch(plan)
        )
        return () if self._hangs is None else (self._hangs,)

    def _watch(self, plan: NodePlan) -> HangWatcher:
        from dsl.agent.lookout import HangWatcher

        return HangWatcher(plan, self.views.ask, ends_ranks=self._elsewhere is None)

    def _listen(self) -> bool:
        """Make the socket at which views call; False: it cannot be made, so nobody can look."""
        name = f"{self._command_pid}-{urandom(4).hex()}.sock"
        for folder in socket_folders():
            try:
                self._supervisor.listen(folder, name)
            except EngineError:
                continue
            return True
        return False

    def end(self) -> None:
        """The job is over."""
        if self._listens:
            self._supervisor.unlisten()
        if self._hangs is not None:
            self._hangs.close()
