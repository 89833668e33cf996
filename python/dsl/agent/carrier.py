"""Carries out what the conductor of a job orders: over links, and by direct call to a member of its own.

The head has links alone, and a node that conducts has both.
"""

from __future__ import annotations

import time

from dsl import SignalReceived
from dsl.conductor.orders import Dismiss, Drop, Explain, Reach, Send, Show, Speak
from dsl.control.messages import Hello, Preempted, Said, Stop
from dsl.model.job import Notice
from dsl.model.outcome import Hang
from dsl.report.verdict import hang_lines, headlines
from dsl.words import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl.agent.elsewhere import Elsewhere
    from dsl.conductor.conductor import Conductor
    from dsl.conductor.examination import Examination
    from dsl.control.hub import Hub, Link


class Carrier:
    """Carries out a conductor's orders over a table of links."""

    elsewhere: Elsewhere | None = None
    """What views into the job see of the members at links; None: there are none."""

    def __init__(self, conductor: Conductor | Examination, hub: Hub | None) -> None:
        """``hub`` has the links; None: there are none."""
        self.conductor = conductor
        self._hub = hub
        self._links: dict[int, Link] = {}
        """The links of members that have greeted us, by place."""

    def _taking_part(self) -> dict[int, Link]:
        """The links of members that are no spares."""
        return {place: link for place, link in self._links.items() if self.conductor.takes_part(place)}

    def fileno(self) -> int:
        """The descriptor of the hub; negative: there is none."""
        return -1 if self._hub is None else self._hub.fileno()

    def _due(self, *others: float | None) -> float | None:
        """`time.monotonic` when something is due, here or for the conductor."""
        return min([one for one in (self.conductor.deadline_s, *others) if one is not None], default=None)

    def _hear_links(self) -> None:
        """Hear what has come over the links, and do what follows."""
        for link, message in () if self._hub is None else self._hub.read():
            if link is not None:
                self._hear_link(link, message)
            elif isinstance(message, Notice):
                self._speak_here(message)

    def _hear_link(self, link: Link, message: object) -> None:
        place = link.place
        if isinstance(message, Hello):
            if not self._admit(link, message):
                return
            self._links[place] = link
        if self._links.get(place) is not link:
            self._hear_guest(link, message)
            return
        if self.elsewhere is not None and self.elsewhere.hear(place, message):
            return
        if not self._is_for_conductor(link, message):
            return
        if link.clock is not None:
            self.conductor.clocks[place] = link.clock
        orders = self.conductor.hear(place, message, time.monotonic())
        self._obey(orders, self._speak_once if isinstance(message, Hello) else self._speak)

    def _obey(self, orders: Sequence[object], speak: Callable[[Notice], None] | None = None) -> None:
        """Carry out the conductor's orders. ``speak`` tells users something; None: `_speak`."""
        speak = speak or self._speak
        for order in orders:
            if isinstance(order, Send):
                self._send(order.place, order.message)
            elif isinstance(order, Speak):
                speak(order.notice)
            elif isinstance(order, Show):
                self._show(order.text)
            elif isinstance(order, Explain):
                for line in headlines(order.judgement):
                    self._explain(Notice(order.level, line))
            elif isinstance(order, Reach):
                self._reach(order.place)
            elif isinstance(order, Drop):
                link = self._links.pop(order.place, None)
                if link is not None:
                    link.close()
            elif isinstance(order, Dismiss):
                for link in self._links.values():
                    link.close()
                self._dismiss(order.within_s)

    def _send(self, place: int, message: object) -> None:
        link = self._links.get(place)
        if link is not None:
            link.send(message)

    # ------------------------------------------------------------------ what differs

    def _admit(self, link: Link, hello: Hello) -> bool:  # noqa: ARG002  where members call, it differs
        """Whether the member that calls may greet the conductor."""
        return False

    def _hear_guest(self, link: Link, message: object) -> None:
        """Hear a link that has not greeted us, or whose place another one has."""

    def _is_for_conductor(self, link: Link, message: object) -> bool:  # noqa: ARG002  the head leaves some out
        """Whether the conductor has to hear a message. What else has to be done with it is done here."""
        return True

    def _speak_here(self, notice: Notice) -> None:
        """Tell the user of this host something."""

    def _speak(self, notice: Notice) -> None:
        """Tell all users something."""
        self._speak_here(notice)

    def _speak_once(self, notice: Notice) -> None:
        """Tell the user something about a member that calls, and may call again and again."""
        self._speak_here(notice)

    def _explain(self, notice: Notice) -> None:
        """Tell all users why an attempt has ended that another one follows."""
        self._speak(notice)

    def _show(self, text: str) -> None:
        """Write lines to the user's stdout."""

    def _reach(self, place: int) -> None:
        """Start the program that reaches a member."""

    def _dismiss(self, within_s: float) -> None:
        """End the programs that reach members."""


class Near(Carrier):
    """A carrier in the process of the member at place 0, and that member's conversation with the conductor.

    The member's own agent acts on signals, and tells the user here.
    """

    def __init__(self, conductor: Conductor, hub: Hub | None) -> None:
        super().__init__(conductor, hub)
        self._inbox: list[object] = []
        """Messages to the member."""

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when something is due."""
        return 0.0 if self._inbox else self._due()

    def receive(self) -> list[object]:
        """Hear the other members, do what follows, and take the messages to the own one."""
        self._hear_links()
        self._obey(self.conductor.wait_is_over(time.monotonic()))
        inbox, self._inbox = self._inbox, []
        return inbox

    def send(self, message: object) -> None:
        """Tell the conductor something."""
        # The user here knows of a preemption.
        speak = self._speak_elsewhere if isinstance(message, Preempted) else None
        self._obey(self.conductor.hear(0, message, time.monotonic()), speak)

    def hear(self, event: object) -> None:
        """Listen to our own agent: signals and hangs count for all members."""
        if isinstance(event, Hang):
            for line in hang_lines(event):
                self._speak_elsewhere(Notice("error", line))
            self._obey(self.conductor.hang(event, time.monotonic()))
        elif isinstance(event, SignalReceived) and event.action in ("stop", "preempt"):
            now_s, is_key = time.monotonic(), event.from_terminal
            orders = self.conductor.signal(event.signum, event.action, now_s, is_key=is_key)
            if orders:
                self._speak_elsewhere(self._left(0, event.signum))
            for order in orders:
                if isinstance(order, Send) and (order.place or not isinstance(order.message, Stop)):
                    self._send(order.place, order.message)

    def _send(self, place: int, message: object) -> None:
        if place:
            super()._send(place, message)
        else:
            self._inbox.append(message)

    def _speak(self, notice: Notice) -> None:
        self._speak_here(notice)
        self._speak_elsewhere(notice)

    def _speak_elsewhere(self, notice: Notice) -> None:
        for link in self._links.values():
            link.send(Said(notice, has_begun=self.conductor.has_begun))

    def _left(self, place: int, signum: int) -> Notice:
        name = self.conductor.roster.name(place)
        return Notice("info", f"{name} leaves the job, which ends: {signal_name(signum)} received there")
