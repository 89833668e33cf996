"""Node 0 of a job with fixed places: it conducts the job, and runs its part in the same process.

The other nodes connect at the agreed port, and move to another port: rank 0 needs the agreed one. So node 0
closes it before the first attempt, and each node hangs up there first, because a connection that node 0 ends
would block the port for a minute.
"""

from __future__ import annotations

import time

from dsl import SignalReceived, Stopping
from dsl._record import replace
from dsl.agent.agent import wait_for
from dsl.agent.carrier import Near
from dsl.agent.elsewhere import Elsewhere
from dsl.agent.joining import WAITING, objection
from dsl.agent.member import END_ACTIONS, signal_code
from dsl.conductor.conductor import Conductor
from dsl.conductor.terms import fixed_places
from dsl.control.clock import OURS
from dsl.control.hub import Hub, allow_connections
from dsl.control.messages import Bye, Hello, Lost, Moved, Refused
from dsl.errors import PortError, RendezvousError
from dsl.lists import format_ranges
from dsl.machine.network import is_loopback, is_own_address, own_addresses, resolve
from dsl.model.job import Meeting, Notice
from dsl.model.judgement import Report
from dsl.rendezvous.static import choose_port
from dsl.signals import end_on_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Supervisor
    from dsl.agent.joining import Joining
    from dsl.control.hub import Link
    from dsl.machine.this_process import Ports
    from dsl.model.job import Job

REMIND_S = 2.0
"""After this time the user hears which nodes are missing."""

MOST_WARNINGS = 8
"""How many refused nodes the user hears about."""

FAREWELL_S = 5.0
FAILURE, USAGE = 1, 2


class FirstNode(Near):
    """Node 0: the port where the others join, and the carrier of the conductor's orders."""

    def __init__(self, job: Job, joining: Joining, ports: Ports, tell: Callable[[Notice], None]) -> None:
        """Begin to listen; nobody is answered before `start`. ``tell`` shows a notice to the user here.

        Raises:
            PortError: the agreed port is taken, or we cannot listen at it.
        """
        self._joining, self._ports, self._tell = joining, ports, tell
        hello = self._hello = joining.hello
        self._preempt_signal = job.signals.preempt
        self.hub = hub = Hub(joining.silence_s, show=True)
        self._inner = 0
        allow_connections(hello.nodes)
        self._listen()
        hub.expect(None, joining.key, count=hello.nodes)
        terms = fixed_places(
            job, hello.nodes, hello.version, joining.address, joining.port, joining.timeout_s
        )
        super().__init__(Conductor(terms, time.monotonic(), self._port_of), hub)
        self.conductor.clocks[0] = OURS
        name = self.conductor.roster.name
        self.elsewhere = Elsewhere(lambda: self._links, name, nodes=hello.nodes, has_own=True)
        self._guests: list[Link] = []
        """Nodes that were sent to the other port, or away, and have not hung up yet."""
        self._hosts = {0: self._hello.host}
        self._is_open = True
        self._remind_s: float | None = None
        self._said: set[str] = set()

    def _listen(self) -> None:
        joining = self._joining
        choose_port(joining.port, shared=True, ports=self._ports)
        problem: OSError | None = None
        for address in _places_of(joining.address):
            try:
                self.hub.listen(address, joining.port, keyed=joining.is_keyed)
                self._inner = self.hub.listen(address, self._inner, keyed=joining.is_keyed)
            except OSError as error:
                problem = error
        if not self._inner:
            assert problem is not None
            reason = (problem.strerror or "").lower()
            raise PortError(f"cannot listen at {joining.meeting_point}: {reason}")

    def call(self) -> None:
        """Nothing: the other nodes call this one."""

    def start(self) -> None:
        """Begin to answer. From here on this process must not fork and go on in the child."""
        self.hub.start()
        self._remind_s = time.monotonic() + REMIND_S
        self._obey(self.conductor.hear(0, self._hello, time.monotonic()))

    def join(self, supervisor: Supervisor | None = None) -> Meeting | int:
        """Wait for the first meeting. An exit code: a signal that ``supervisor`` reports has ended the wait.

        Raises:
            RendezvousError: the nodes have not come in time.
        """
        while True:
            for message in self.receive():
                if isinstance(message, Meeting):
                    return message
                if isinstance(message, Refused):
                    raise RendezvousError(message.text)
            self._wait(-1 if supervisor is None else supervisor.fileno())
            for event in () if supervisor is None else supervisor.wait(0):
                if isinstance(event, SignalReceived) and event.action in END_ACTIONS:
                    return self._end_wait(event)
                if isinstance(event, Stopping):
                    return FAILURE

    def _end_wait(self, event: SignalReceived) -> int:
        """Tell the user here what a signal has ended. Returns the exit code."""
        roster, is_preemption = self.conductor.roster, event.action == "preempt"
        how = end_on_request(event.signum, is_key=event.from_terminal, is_preemption=is_preemption)
        self._tell(Notice("critical", f"{how} while waiting for {roster.names(roster.missing())}"))
        self._tell = lambda _: None  # what follows is news for the other nodes
        return signal_code(event.signum, self._preempt_signal)

    def disown(self) -> None:
        """Close the connections in this process alone."""
        self.hub.disown()

    def leave(self, code: int) -> None:
        """End, when our part has ended. If the whole job has ended, all nodes hear of it first."""
        is_over = self.conductor.has_begun and self.conductor.code is not None
        self.send(Bye(code))
        while is_over and not self.conductor.roster.is_done:
            self._wait(-1)
            self.receive()
        self.hub.close(FAREWELL_S)

    def _wait(self, other_fd: int) -> None:
        """Wait until `receive` has something to do, or the other descriptor is readable."""
        due_s = self.deadline_s
        left_s = None if due_s is None else max(due_s - time.monotonic(), 0)
        wait_for(self.hub.fileno(), other_fd, left_s=left_s)

    # ------------------------------------------------------------------ the other nodes

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

    def _admit(self, link: Link, hello: Hello) -> bool:
        if link.port != self._inner:
            self._guests.append(link)
            link.send(Moved(self._inner, self._hello.host))
            return False
        why = objection(hello, self._hello)
        if not why and hello.place in self._links:
            name = self.conductor.roster.name(hello.place)
            why = f"its --node-rank is {hello.place}, and so is that of {name}"
        if not why and self.conductor.expects(hello.place):
            self._hosts[hello.place] = hello.host
            return True
        self._guests.append(link)
        text = f"node {hello.place} ({hello.host}) cannot take part: {why}"
        link.send(Refused(text, USAGE))
        self._speak_once(Notice("warning", text))
        return False

    def _hear_guest(self, link: Link, message: object) -> None:
        if isinstance(message, Lost) and link in self._guests:
            self._guests.remove(link)

    def _is_for_conductor(self, link: Link, message: object) -> bool:
        place = link.place
        if isinstance(message, Lost) and not self.conductor.has_begun:
            del self._links[place]
        if isinstance(message, Report) and message.stop_signal not in (None, self._preempt_signal):
            self._speak(self._left(place, message.stop_signal))
        return True

    def _send(self, place: int, message: object) -> None:
        if isinstance(message, Meeting) and not message.attempt:
            if self._is_open:
                self._close_ports()
            names = [self._hosts[one] for one in range(self._hello.nodes)]
            text = f"starting with {len(names)} nodes: {', '.join(names)}"
            message = replace(message, notices=(Notice("info", text),))
        super()._send(place, message)
        if isinstance(message, Refused) and place in self._links:  # it hangs up
            self._guests.append(self._links.pop(place))

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

    # ------------------------------------------------------------------ what the user hears meanwhile

    def _speak_here(self, notice: Notice) -> None:
        self._tell(notice)

    def _speak_once(self, notice: Notice) -> None:
        """Tell the user here of a node that calls. Somebody may call again and again."""
        if notice.text not in self._said and len(self._said) < MOST_WARNINGS:
            self._said.add(notice.text)
            self._tell(notice)

    def _remind(self) -> None:
        """Say which nodes are missing, and what to type there."""
        self._remind_s = None
        joining, missing = self._joining, self.conductor.roster.missing()
        count = self._hello.nodes
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
        better = f"--master-addr {next(iter(own_addresses()), 'ADDRESS')}"
        return f"; type on this machine: {command}; other machines need {better} here and there"


def _places_of(address: str) -> tuple[str, ...]:
    """Where node 0 listens, so that the others reach it by this address.

    An address that every machine has is used as it is. Another one may mean something else here, or reach us
    through another machine: then we listen everywhere, as a store of torch does.
    """
    if address in ("localhost", "localhost.localdomain"):
        return ("127.0.0.1", "::1")
    return (address,) if address.startswith("127.") or address == "::1" else ("",)
