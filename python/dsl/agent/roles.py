"""Who takes part in a job beside the engine, as the agent sees them. Only type checkers import this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsl.model.job import NodePlan
from dsl.model.outcome import AttemptOutcome, Decision


class Decider(Protocol):
    """Decides for the agent of one node."""

    def decide(self, event: object, last: AttemptOutcome | None) -> Decision:
        """Say what follows from an event. ``last``: the last attempt, if no worker runs.

        The end of an attempt is such an event, and so is a `RestartFailed`: the job has to end.
        """


class Listener(Protocol):
    """An object that hears what happens. It must not raise."""

    def hear(self, event: object) -> None:
        """Take note of an event: one of the engine's, or one of `dsl.model.outcome`."""


class Source(Protocol):
    """Where the plans of a job come from: a node or a head."""

    def plan(self, attempt: int) -> NodePlan:
        """Decide what an attempt starts, counted from 0. Raises DslError.

        If the nodes meet first, they have met before this call.
        """

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make what the plan needs, such as directories; return what can be started. Raises DslError."""

    def finish(self, *, succeeded: bool) -> None:
        """Remove the files that were made for the job."""

    def tidy(self) -> None:
        """Remove what earlier jobs have left. Called at a time when nobody waits for that."""


class Channel(Protocol):
    """Another source of events than the engine: a store, another node."""

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when there will be events even if nothing is readable; None: never."""

    def fileno(self) -> int:
        """Give a descriptor that is readable when there are events; negative: there will be none."""

    def read(self) -> Sequence[object]:
        """Take the events that are there, without waiting."""
