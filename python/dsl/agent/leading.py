"""A node that conducts its job, and runs its part in the same process.

That is node 0 of a job with fixed places, or the node of a job over a store that has won the claim there. The
other nodes connect to it. At the agreed port of fixed places they are sent to another port: rank 0 needs the
agreed one. So node 0 closes it before the first attempt, and each node hangs up there first, because a
connection that node 0 ends would block the port for a minute.
"""

from __future__ import annotations

import time

from dsl import SignalReceived, Stopping, __version__
from dsl._record import replace
from dsl.agent.carrier import Near
from dsl.agent.elsewhere import Elsewhere
from dsl.agent.joining import WAITING, awaited, objection, silence_of
from dsl.conductor.conductor import Conductor
from dsl.conductor.terms import fixed_places, open_places
from dsl.control.clock import OURS
from dsl.control.hub import Hub, allow_connections
from dsl.control.messages import Bye, Checked, Hello, Lost, Moved, Refused, Said
from dsl.errors import DslError, PortError, RendezvousError
from dsl.machine import wait_for
from dsl.machine.network import is_loopback, is_own_address, own_addresses, resolve
from dsl.model.job import Meeting, Notice
from dsl.model.judgement import Report
from dsl.model.outcome import END_ACTIONS, Hang, signal_code
from dsl.plan.node import choose_port
from dsl.rendezvous.settings import number
from dsl.words import counted, end_on_request, format_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Supervisor
    from dsl.agent.joining import Joining
    from dsl.agent.roles import Channel
    from dsl.control.hub import Link
    from dsl.machine import Ports
    from dsl.model.job import Job

REMIND_S = 2.0
"""After this time the user hears which nodes are missing."""

MOST_WARNINGS = 8
"""How many refused nodes the user hears about."""

FAREWELL_S = 5.0
FAILURE, USAGE = 1, 2

FIRST_WORD_S = 5.0
"""After this time the user hears what the job waits for."""

REGROUP_S = 5
"""Nodes that have lost their conductor find the next one within this time."""


class Joins:
    """A node that waits for the first meeting under its guard."""

    _joining: Joining
    _tell: Callable[[Notice], None]
    _inbox: list[object]
    """What `receive` returns first."""

    def join(self, supervisor: Supervisor | None = None) -> object:
        """Wait for the first meeting, and return it or another last message of the conductor.

        An exit code: a signal that ``supervisor`` reports has ended the wait.

        Raises:
            RefusedLinkError: the conductor refuses this node.
            RendezvousError: the nodes have not come in time.
        """
        while True:
            said = self.receive()
            for count, message in enumerate(said, 1):
                if isinstance(message, Refused):
                    raise self._refusal(message)
                if not isinstance(message, Said):
                    self._inbox = said[count:]
                    return message
            self._wait(-1 if supervisor is None else supervisor.fileno())
            code = None if supervisor is None else self.end_of_wait(supervisor)
            if code is not None:
                return code

    def end_of_wait(self, supervisor: Supervisor) -> int | None:
        """The exit code if a signal, or the loss of the guard, has ended the wait for the others."""
        for event in supervisor.wait(0):
            if isinstance(event, SignalReceived) and event.action in END_ACTIONS:
                return self._end_wait(event)
            if isinstance(event, Stopping):
                return FAILURE
        return None

    def _end_wait(self, event: SignalReceived) -> int:
        """Tell the user here what a signal has ended. Returns the exit code."""
        is_preemption = event.action == "preempt"
        how = end_on_request(event.signum, is_key=event.from_terminal, is_preemption=is_preemption)
        self._tell(Notice("critical", f"{how} while waiting for {self._awaited()}"))
        self._tell = lambda _: None  # what follows is news for the other nodes
        return signal_code(event.signum, self._joining.job.signals.preempt)

    def _refusal(self, message: Refused) -> DslError:
        return RendezvousError(message.text)

    def _awaited(self) -> str:
        """What the first attempt waits for, in words."""
        return awaited(self._joining.job)

    # ------------------------------------------------------------------ what differs

    def receive(self) -> list[object]:
        """Take the messages for this node."""
        raise NotImplementedError

    def _wait(self, *others: int) -> None:
        """Wait until `receive` has something to do, or another descriptor is readable."""
        raise NotImplementedError


class Conducting(Near, Joins):
    """A node that conducts a job whose members come by themselves, and runs its part in the same process."""

    conductor: Conductor

    def __init__(
        self, conductor: Conductor, joining: Joining, hub: Hub, tell: Callable[[Notice], None]
    ) -> None:
        """``tell`` shows a notice to the user here."""
        super().__init__(conductor, hub)
        self.hub, self._joining, self._tell = hub, joining, tell
        self._hello = hello = joining.hello
        self.conductor.clocks[0] = OURS
        name = self.conductor.roster.name
        self.elsewhere = Elsewhere(
            self._taking_part, name, nodes=hello.nodes, has_own=lambda: self.conductor.takes_part(0)
        )
        self._guests: list[Link] = []
        """Nodes that were sent to another port, or away, and have not hung up yet."""
        self._remind_s: float | None = None
        self._said: set[str] = set()

    def start(self, supervisor: Supervisor | None = None) -> None:  # noqa: ARG002  others need it
        """Begin to answer. From here on this process must not fork and go on in the child."""
        self.hub.start()
        self._obey(self.conductor.hear(0, self._hello, time.monotonic()))

    def disown(self) -> None:
        """Close the connections in this process alone."""
        self.hub.disown()

    def leave(self) -> None:
        """End, when our part has ended. If the whole job ends, all nodes do so first."""
        is_ending = self.conductor.has_begun and self.conductor.is_ending
        self.send(Bye())
        while is_ending and not self.conductor.roster.is_done:
            self._wait(-1)
            self.receive()
        self.hub.close(FAREWELL_S)

    def _wait(self, *others: int) -> None:
        """Wait until `receive` has something to do, or another descriptor is readable."""
        due_s = self.deadline_s
        left_s = None if due_s is None else max(due_s - time.monotonic(), 0)
        wait_for(self.hub.fileno(), *others, left_s=left_s)

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when something is due."""
        return 0.0 if self._inbox else self._due(self._remind_s)

    def receive(self) -> list[object]:
        """Hear the other nodes, do what follows, and take the messages for our own part."""
        found = super().receive()
        if self._remind_s is not None and time.monotonic() >= self._remind_s:
            self._remind()
        return found

    def _hear_guest(self, link: Link, message: object) -> None:
        if isinstance(message, Lost) and link in self._guests:
            self._guests.remove(link)

    def _turn_away(self, link: Link, hello: Hello, why: str) -> None:
        """Tell a node that calls, and the user here, why it cannot take part."""
        self._guests.append(link)
        text = f"node {hello.place} ({hello.host}) cannot take part: {why}"
        link.send(Refused(text, USAGE))
        self._speak_once(Notice("warning", text))

    def _send(self, place: int, message: object) -> None:
        super()._send(place, message)
        if isinstance(message, Refused) and place in self._links:  # it hangs up
            self._guests.append(self._links.pop(place))

    def _speak_here(self, notice: Notice) -> None:
        self._tell(notice)

    def _speak_once(self, notice: Notice) -> None:
        """Tell the user here of a node that calls. Somebody may call again and again."""
        if notice.text not in self._said and len(self._said) < MOST_WARNINGS:
            self._said.add(notice.text)
            self._tell(notice)

    def _remind(self) -> None:
        """Say what the first attempt waits for."""


class FirstNode(Conducting):
    """Node 0: the port where the others join, and the carrier of the conductor's orders."""

    def __init__(
        self,
        joining: Joining,
        ports: Ports,
        tell: Callable[[Notice], None],
        offer: Callable[[], Checked] | None = None,
    ) -> None:
        """Begin to listen; nobody is answered before `start`. ``tell`` shows a notice to the user here.

        ``offer`` makes what this node says about itself before each attempt if there are spares. Then other
        nodes may come at the agreed port at any time.

        Raises:
            PortError: the agreed port is taken, or we cannot listen at it.
        """
        self._joining, self._ports, self._offer = joining, ports, offer
        hello, hub = joining.hello, Hub(joining.silence_s, show=True)
        self._inner = 0
        allow_connections(hello.nodes + hello.spares)
        self._listen(hub)
        hub.expect(None, joining.key, count=None if offer else hello.nodes)
        terms = fixed_places(
            joining.job, hello.nodes, hello.version, joining.address, joining.port, joining.timeout_s
        )
        port_of = None if offer else self._port_of
        super().__init__(Conductor(terms, time.monotonic(), port_of), joining, hub, tell)
        self._hosts = {0: self._hello.host}
        self._is_open = True

    def _listen(self, hub: Hub) -> None:
        joining = self._joining
        choose_port(joining.port, shared=True, ports=self._ports)
        problem: OSError | None = None
        for address in places_of(joining.address):
            try:
                hub.listen(address, joining.port, keyed=joining.is_keyed)
                self._inner = hub.listen(address, self._inner, keyed=joining.is_keyed)
            except OSError as error:
                problem = error
        if not self._inner:
            assert problem is not None
            reason = (problem.strerror or "").lower()
            raise PortError(f"cannot listen at {joining.meeting_point}: {reason}")

    def start(self, supervisor: Supervisor | None = None) -> None:
        """Begin to answer. From here on this process must not fork and go on in the child."""
        self._remind_s = time.monotonic() + REMIND_S
        super().start(supervisor)
        if self._offer is not None:
            self.send(self._offer())

    # ------------------------------------------------------------------ the other nodes

    def _awaited(self) -> str:
        roster = self.conductor.roster
        return roster.names(roster.missing())

    def _admit(self, link: Link, hello: Hello) -> bool:
        if link.port != self._inner:
            self._guests.append(link)
            link.send(Moved(self._inner, self._hello.host))
            return False
        why = objection(hello, self._hello, self._joining.job)
        if not why and hello.place in self._links:
            name = self.conductor.roster.name(hello.place)
            why = f"its {' is '.join(self._joining.option_of(hello.place))}, and so is that of {name}"
        if not why and self.conductor.expects(hello.place):
            self._hosts[hello.place] = hello.host
            return True
        self._turn_away(link, hello, why)
        return False

    def _is_for_conductor(self, link: Link, message: object) -> bool:
        place = link.place
        if isinstance(message, Lost) and (self._offer or not self.conductor.has_begun):
            del self._links[place]
        preempt = self._joining.job.signals.preempt
        if self._offer is None and isinstance(message, Report) and message.stop_signal not in (None, preempt):
            self._speak(self._left(place, message.stop_signal))
        return True

    def _send(self, place: int, message: object) -> None:
        if isinstance(message, Meeting) and self._offer is not None:
            self._remind_s = None
        elif isinstance(message, Meeting) and not message.attempt:
            if self._is_open:
                self._close_ports()
            names = [self._hosts[one] for one in range(self._hello.nodes)]
            text = f"starting with {len(names)} nodes: {', '.join(names)}"
            message = replace(message, notices=(Notice("info", text),))
        super()._send(place, message)

    def _close_ports(self) -> None:
        self._is_open, self._remind_s = False, None
        self.hub.unlisten(self._joining.port)
        self.hub.unlisten(self._inner)
        for link in self._guests:
            link.close()

    def _port_of(self, attempt: int) -> int:
        """The port of an attempt: the agreed one, unless another process has taken it since."""
        port = self._joining.port
        return port if attempt == 0 or self._ports.is_free(port) else self._ports.pick()

    def _remind(self) -> None:
        """Say which nodes are missing, and what to type there."""
        self._remind_s = None
        joining, missing = self._joining, self.conductor.roster.missing()
        count = len(self.conductor.roster)
        names = f"node{'s' if len(missing) > 1 else ''} {format_ranges(missing)}"
        text = f"{WAITING}{len(missing)} of {count} nodes: {names}"
        here = f"this is node 0, {text}, at {joining.meeting_point} for up to {joining.timeout_s:g} s"
        self._tell(Notice("info", here + self._doubt() + self._advice(missing)))
        self._speak_elsewhere(Notice("info", text))

    def _doubt(self) -> str:
        """A possible reason why no node comes."""
        if self._links:
            return ""
        address = self._joining.address
        found = resolve(address)
        if any(map(is_own_address, found)):
            return ""
        return f"; {address} is no address of this machine" if found else f"; {address} is not known here"

    def _advice(self, missing: Sequence[int]) -> str:
        """What to type on the nodes that have not come."""
        command = self._joining.command_of(missing[0]) if missing else ""
        if not command:
            return ""
        command += ", and so on" if len(missing) > 1 else ""
        if not is_loopback(self._joining.address):
            return f"; type there: {command}"
        own = next(iter(own_addresses()), "its own")
        return f"; type on this machine: {command}; other machines need the address {own} here and there"


class Leading(Conducting):
    """The node that conducts."""

    def __init__(
        self,
        joining: Joining,
        hub: Hub,
        offer: Callable[[], Checked],
        tell: Callable[[Notice], None],
    ) -> None:
        """``offer`` makes what this node says about itself before each attempt."""
        job = joining.job
        last_call_s = number(job.meeting.settings, "last_call_timeout")
        if joining.hello.attempts:  # the others have lost their conductor, too, and are about to come
            last_call_s = min(last_call_s, REGROUP_S)
        terms = open_places(job, __version__, wait_s=joining.timeout_s, last_call_s=last_call_s)
        super().__init__(Conductor(terms, time.monotonic()), joining, hub, tell)
        assert joining.claimed is not None
        self._claimed, self._offer = joining.claimed, offer
        self._supervisor: Supervisor | None = None
        self.delegate: Channel | None = None
        """What the delegate says."""

    def start(self, supervisor: Supervisor | None = None) -> None:
        """Begin to answer. From here on this process must not fork and go on in the child."""
        self._supervisor = supervisor
        self._remind_s = time.monotonic() + FIRST_WORD_S
        super().start(supervisor)
        self.send(self._offer())

    def meet_by_torch(self) -> None:
        """A node under torchrun has come."""
        self._obey(self.conductor.meet_by_torch(time.monotonic()))

    def hang_up(self) -> None:
        """End the links, once another node or torch decides."""
        self.hub.close(FAREWELL_S)

    def hear(self, event: object) -> None:
        """Listen to our own agent: hangs count for all members, signals for this node alone."""
        if isinstance(event, Hang):
            super().hear(event)

    def receive(self) -> list[object]:
        """Hear the other nodes and the delegate, and take the messages for our own part."""
        told = [] if self.delegate is None else self.delegate.read()
        return [*told, *super().receive()]

    def leave(self) -> None:
        """End, when our part has ended, and no other node needs this one any more."""
        has_begun, has_told = self.conductor.has_begun, False
        self.send(Bye())
        while has_begun and self._is_needed and not self._is_asked_to_end():
            if not self.conductor.roster.is_over and not has_told:
                has_told = True
                self._tell(Notice("warning", _STAYS.format(place=self._claimed.store)))
            self._wait(-1 if self._supervisor is None else self._supervisor.fileno())
            self.receive()
        self.hub.close(FAREWELL_S)

    @property
    def _is_needed(self) -> bool:
        roster = self.conductor.roster
        if roster.is_over:
            return not roster.is_done
        return self._claimed.hosts_store and any(one.is_there for place, one in enumerate(roster) if place)

    def _is_asked_to_end(self) -> bool:
        events = [] if self._supervisor is None else self._supervisor.wait(0)
        return any(
            isinstance(event, Stopping) or (isinstance(event, SignalReceived) and event.action in END_ACTIONS)
            for event in events
        )

    def _wait(self, *others: int) -> None:
        super()._wait(*others, -1 if self.delegate is None else self.delegate.fileno())

    def _admit(self, link: Link, hello: Hello) -> bool:
        if hello.place and hello.place not in self._links and self.conductor.expects(hello.place):
            return True
        self._turn_away(link, hello, "another node has its place")
        return False

    def _is_for_conductor(self, link: Link, message: object) -> bool:
        if isinstance(message, Lost):
            del self._links[link.place]
        return True

    def _remind(self) -> None:
        """Say how many nodes have come, and again when their number has changed."""
        if self.conductor.has_begun:
            self._remind_s = None
            return
        self._remind_s = time.monotonic() + FIRST_WORD_S
        job, there = self._joining.job, len(self.conductor.roster.ready())
        least, most = job.meeting.least_nodes, job.node_count
        where = f"at {self._claimed.store} with run id {job.run_id}"
        text = f"waits for nodes: {there} of {least} are {where}"
        if there >= least:
            time_s = number(job.meeting.settings, "last_call_timeout")
            text = (
                f"{there} of up to {counted(most, 'node')} are {where}, which is enough: waits up to "
                f"{time_s} s for more (last_call_timeout)"
            )
        if text not in self._said:
            self._said.add(text)
            self._speak(Notice("info", text))


_STAYS = (
    "this node hosts the store of the rendezvous at {place}: it has left the job, and keeps the store until "
    "the other nodes have ended; without it no node could join, and none start again"
)


def listening_hub(job: Job, key: bytes) -> tuple[Hub, int]:
    """The hub of a node that may have to conduct, and the port where it listens.

    Raises:
        PortError: it cannot listen.
    """
    allow_connections(job.node_count)
    hub, port = Hub(silence_of(job), show=True), 0
    for address in places_of(job.meeting.local_address):
        try:
            port = hub.listen(address, port, keyed=True)
        except OSError as error:
            problem = (error.strerror or "").lower()
    if not port:
        raise PortError(f"cannot listen for other nodes: {problem}")
    hub.expect(None, key)
    return hub, port


def places_of(address: str) -> tuple[str, ...]:
    """Where such a node listens, so that the others reach it by this address.

    An address that every machine has is used as it is. Another one may mean something else here, or reach us
    through another machine: then we listen everywhere, as a store of torch does.
    """
    if address in ("localhost", "localhost.localdomain"):
        return ("127.0.0.1", "::1")
    return (address,) if address.startswith("127.") or address == "::1" else ("",)
