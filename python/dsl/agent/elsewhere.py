"""The members of a job on other hosts, as far as views into the job are concerned."""

from __future__ import annotations

import time
from itertools import count

from dsl._record import replace
from dsl.model.observation import Look, Looked, NodePulse, NodeStacks, Relayed, Signalled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from queue import SimpleQueue
    from typing import TypeAlias

    from dsl.control.hub import Link
    from dsl.model.job import Meeting
    from dsl.model.observation import SignalRank

    Question: TypeAlias = Look | SignalRank

ANSWER_S = 8.0
"""How long we wait for the answers of other hosts."""


class Elsewhere:
    """The members of a job on other hosts, as far as views are concerned.

    ``links`` returns the links of those that take part now, by place; ``name`` the user's name of a place.
    ``workers`` and ``nodes`` are the numbers of the whole job; None: that of our own plan. ``has_own`` says
    whether our own workers are ranks of the job now, not programs that reach hosts. ``tee`` copies the
    members' output, which is shown here, to a descriptor; None: they show it elsewhere.
    """

    def __init__(
        self,
        links: Callable[[], Mapping[int, Link]],
        name: Callable[[int], str],
        *,
        nodes: int,
        workers: int | None = None,
        has_own: Callable[[], bool] = lambda: False,
        tee: Callable[[int], None] | None = None,
    ) -> None:
        self.tee = tee
        self.meeting: Meeting | None = None
        """The last meeting of a member; None: our own workers are members."""
        self._links, self._name = links, name
        self.nodes, self.workers, self.has_own = nodes, workers, has_own
        self._answers: dict[int, SimpleQueue[tuple[int, object]]] = {}
        self._numbers = count(1)

    def hear(self, place: int, message: object) -> bool:
        """Whether a message is the answer of a member to a view; then it is passed on."""
        if not isinstance(message, (Relayed, NodePulse, NodeStacks, Signalled, Looked)):
            return False
        queue = self._answers.get(message.number)
        if queue is not None:
            queue.put((place, message))
        return True

    def look(self, look: Question) -> Iterator[object]:
        """Ask all members at once. Returns their answers, as they come, and a `Looked` at last."""
        from queue import SimpleQueue

        number = next(self._numbers)
        queue = self._answers[number] = SimpleQueue()
        links = dict(self._links())
        for link in links.values():
            link.send(replace(look, number=number))
        missing = {place for place, link in links.items() if not link.is_lost}
        return self._answers_of(look, number, queue, missing)

    def _answers_of(
        self, look: Question, number: int, queue: SimpleQueue[tuple[int, object]], missing: set[int]
    ) -> Iterator[object]:
        from queue import Empty

        deadline_s = time.monotonic() + ANSWER_S + (look.for_s if isinstance(look, Look) else 0)
        waiting = set(missing)
        try:
            while waiting:
                place, answer = queue.get(timeout=max(deadline_s - time.monotonic(), 0.0))
                if isinstance(answer, Looked):
                    waiting.discard(place)
                    if not answer.missing:  # else it cannot answer
                        missing.discard(place)
                else:
                    yield replace(answer, number=look.number)
        except Empty:
            pass
        finally:
            del self._answers[number]
        yield Looked(look.number, tuple([self._name(place) for place in sorted(missing)]))
