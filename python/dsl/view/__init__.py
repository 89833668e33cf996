"""What looks at jobs, and the only door to it: the launcher imports nothing else of this wing.

`Watchers` is what a job needs that lasts. Each other name is imported on first use.
"""

from __future__ import annotations

from os import urandom

from dsl import Called, EngineError
from dsl._record import kept
from dsl.machine import socket_folders
from dsl.model.outcome import Asked
from dsl.report.speak import optional

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from dsl import SignalReceived, Supervisor
    from dsl.agent.elsewhere import Elsewhere
    from dsl.model.job import NodePlan
    from dsl.view.doctor import Porch, knock, look_here, try_ways
    from dsl.view.explain import explain_stacks
    from dsl.view.lookout import FailureLook, HangWatcher
    from dsl.view.metrics import Metrics
    from dsl.view.views import Views

__all__ = ["FailureLook", "Metrics", "Porch", "Watchers", "explain_stacks", "knock", "look_here", "try_ways"]

_PLACES = {
    **dict.fromkeys(("Porch", "knock", "look_here", "try_ways"), "doctor"),
    "FailureLook": "lookout",
    "Metrics": "metrics",
    "explain_stacks": "explain",
}
"""Modules of the names that are imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(__import__(f"dsl.view.{_PLACES[name]}", fromlist=[name]), name)


class Watchers:
    """The watchers of one agent, made when its job lasts or somebody asks about it.

    ``state`` returns the fields of `dsl.view.views.State`. ``command_pid`` and ``elsewhere``: those of
    the agent.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        state: Callable[[], tuple[NodePlan, int, float]],
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
        from dsl.view.views import State, Views

        def state() -> State:
            return State(*self._state())

        return Views(self._supervisor, state, self._command_pid, self._elsewhere)

    def serve(self, event: Asked | Called | SignalReceived) -> None:
        """Serve somebody who looks at the job."""
        if isinstance(event, Asked):
            self.views.answer(event.look, event.reply)
        elif isinstance(event, Called):
            self.views.welcome()
        else:
            self.views.explain()

    def begin(self, plan: NodePlan, metrics: Metrics | None) -> Sequence[HangWatcher]:
        """Let views call, and watch as the user wants. Returns the channels that the agent has to read."""
        self._listens = self._listen()
        if metrics is not None:
            what = "there are no metrics"
            optional(plan.command, what, lambda: metrics.show(self.views.ask, self.views.view))
        sees_all = self._elsewhere is not None or plan.meeting.world_size == len(plan.workers)
        if plan.job.hang_timeout_s is None or not sees_all:
            return ()
        self._hangs = optional(
            plan.command, "nobody watches for hangs (--hang-timeout)", lambda: self._watch(plan)
        )
        return () if self._hangs is None else (self._hangs,)

    def _watch(self, plan: NodePlan) -> HangWatcher:
        from dsl.view.lookout import HangWatcher

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
