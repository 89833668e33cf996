"""Who takes part in a job beside the engine, as the agent sees them. Only type checkers import this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from dsl.model.job import NodePlan
from dsl.model.outcome import Decision, History, Membership

Policy: TypeAlias = Callable[[History, object, Membership], Decision]


class Listener(Protocol):
    """An object that hears what happens. It must not raise."""

    def hear(self, event: object) -> None:
        """Take note of an event: one of the engine's, or one of `dsl.model.outcome`."""


class Source(Protocol):
    """Where the plans of a job come from: a node, a head, an experiment."""

    max_restarts: int

    def plan(self, attempt: int) -> NodePlan | None:
        """Decide what an attempt starts, counted from 0; None: the job is over. Raises DslError.

        If policy makes the nodes meet first, they have met before this call.
        """

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make what the plan needs, such as directories; return what can be started. Raises DslError."""

    def membership(self) -> Membership:
        """Say which nodes take part."""


class Plans(Source, Protocol):
    """A source of plans that cleans up after the job."""

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
