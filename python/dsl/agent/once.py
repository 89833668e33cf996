"""A source of plans for a job with one attempt, whose plan exists already."""

from __future__ import annotations

from dsl.model.outcome import Membership

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.node import NodePlan


class Once:
    """A source of one plan, for an agent."""

    max_restarts = 0

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan

    def plan(self, _attempt: int) -> NodePlan:
        """Give the plan."""
        return self._plan

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make nothing."""
        return plan

    def membership(self) -> Membership:
        """A single node: the membership never changes."""
        return Membership(1)
