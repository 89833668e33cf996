"""What a rendezvous is: it makes one `dsl.model.job.Meeting` per attempt, and knows the nodes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from dsl.model.job import Meeting
    from dsl.model.outcome import Membership

    class Rendezvous(Protocol):
        """How the nodes of a job meet."""

        def meet(self, attempt: int, local_world_size: int) -> Meeting:
            """Meet the other nodes for an attempt, counted from 0, as a node with that many workers.

            Raises:
                DslError: the nodes do not meet.
            """

        def membership(self) -> Membership:
            """Say which nodes take part now."""
