"""The connections of a process: messages in and out. The links themselves are in ``rust/control``.

A hub is silent until it is started. So an agent can talk to its head first (`Link.send_now`,
`Link.receive`), then fork, and start the hub in the process that goes on.
"""

from __future__ import annotations

import time

from dsl import _core
from dsl._core import FdStream, Stream, connect
from dsl.control import clock
from dsl.control.messages import TO_AGENT, TO_HEAD, Hello, Lost, Refused
from dsl.errors import ControlError, JobFormatError
from dsl.model.codec import from_line, to_line
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

    from dsl.control.clock import Clock, Sample

__all__ = ["KEY_BYTES", "FdStream", "Hub", "Link", "Stream", "allow_connections", "connect"]

KEY_BYTES = 32

FEW = 256
"""Number of connections for which every usual limit of descriptors is enough."""

_TAKEN = Refused("another agent of this place is connected")


class Link:
    """A connection of a hub."""

    def __init__(self, hub: Hub, core: _core.Link) -> None:
        self.name = core.name
        """Name of the other side, as the user knows it."""
        self.port = core.port
        """Our port at which it came in; 0: we have made the connection, or were given it."""
        self.own_address = core.own_address
        """Our address at this end of the connection; empty: another program, such as ssh, made it."""
        self.is_greeted = False
        """Head: whether the agent has said who it is."""
        self.is_refused = False
        """Whether we have ended the connection because of what the other side has said."""
        self._hub, self._core = hub, core
        self._samples: tuple[Sample, ...] = ()

    @property
    def place(self) -> int:
        """Node rank or rank of the agent there; -1: not known yet, or the other side is the head."""
        return self._core.place

    @place.setter
    def place(self, place: int) -> None:
        self._core.place = place

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return self._core.is_lost

    @property
    def clock(self) -> Clock | None:
        """How far the agent's clock is from ours (on the head); None: not known yet."""
        for times in self._core.take_samples():
            sample = clock.measure(*times)
            if sample is not None:
                self._samples = clock.add(self._samples, sample)
        return clock.estimate(self._samples, time.monotonic_ns())

    def send(self, message: object) -> None:
        """Queue a message, from any thread, without waiting. Does nothing if the link is lost."""
        self._core.send(self._hub.encoded(message))

    def close(self) -> None:
        """Send what is queued, then end the connection. Nothing is read any more, and no `Lost` follows."""
        self._core.close()

    def refuse(self) -> bool:
        """End the connection at once; returns whether it was that of a stranger, of whom the user hears."""
        self.is_refused = True
        is_stranger = self.port > 0 and not self.is_greeted
        self._core.drop(is_stranger)
        return is_stranger

    def send_now(self, message: object, timeout_s: float = 30.0) -> None:
        """Send a message before the hub is started, and wait until it has gone.

        Raises:
            ControlError: the connection has ended, or the other side took nothing for too long.
        """
        self._core.send_now(self._hub.encoded(message), timeout_s)

    def receive(self, timeout_s: float, *, while_heard: bool = False) -> object:
        """Wait for a message before the hub is started.

        ``while_heard``: the time begins anew whenever the other side sends something.

        Raises:
            ControlError: the connection has ended, or no message came in time.
        """
        message = self._hub.understood(self, self._core.receive(timeout_s, while_heard))
        if isinstance(message, Lost):
            raise ControlError(f"{self.name} {message.reason}")
        return message


class Hub(_core.Hub):
    """The connections of this process."""

    heartbeat_s: float
    is_head: bool
    has_lost_output = False
    """Some output could not be written here."""
    _links: dict[int, Link]
    _encoded: tuple[object, bytes] = (None, b"")

    def __new__(cls, heartbeat_s: float, *, show: bool = False, console: tuple[int, int] = (1, 2)) -> Self:
        """``heartbeat_s``: silence after which the other side counts as lost.

        ``show``: this is the head, and output that agents send is written to ``console``, the descriptors of
        stdout and stderr.
        """
        self = super().__new__(cls, heartbeat_s, console if show else None, to_line(_TAKEN))
        self.heartbeat_s, self.is_head, self._links = heartbeat_s, show, {}
        return self

    def add(self, stream: Stream, name: str) -> Link:
        """Serve a connection; ``name`` is the other side's name for the user."""
        return self._link(self.serve(stream, name))

    def _link(self, core: _core.Link) -> Link:
        link = self._links.get(core.id)
        if link is None:
            link = self._links[core.id] = Link(self, core)
        return link

    def read(self) -> list[tuple[Link | None, object]]:
        """Take the messages that have arrived. `Lost` is a link's last message; a `Notice` has no link."""
        found: list[tuple[Link | None, object]] = []
        for core, kind, said in self.take():
            if core is None:
                self.has_lost_output |= kind == "lost"
                found.append((None, Notice("warning", str(said))))
                continue
            link = self._link(core)
            message: object = None
            if kind != "message":
                del self._links[core.id]
                is_news = bool(kind) and not link.is_refused
                message = Lost(str(said), is_silent=kind == "silent") if is_news else None
            elif isinstance(said, bytes) and not link.is_refused:
                message = self.understood(link, said)
            if message is not None:
                found.append((link, message))
        return found

    def understood(self, link: Link, data: bytes) -> object:
        """The message that a link has brought. None or `Lost`: the link has ended because of it."""
        try:
            message = from_line(data, TO_HEAD if self.is_head else TO_AGENT)
        except JobFormatError as error:
            problem = f"has sent something that cannot be read: {error}"
        else:
            problem = _greeting_problem(link, message) if self.is_head else ""
            if not problem:
                return message
        return None if link.refuse() else Lost(problem)

    def relay(self, link: Link, stdout_fd: int, stderr_fd: int) -> None:
        """Send what comes out of two pipes to the head, which shows it. The hub then owns the read ends."""
        self.pass_on(link._core, stdout_fd, stderr_fd)  # noqa: SLF001  the two classes are one unit

    def encoded(self, message: object) -> bytes:
        """The bytes of a message, kept for the next call: often one message goes to all links."""
        last, data = self._encoded
        if last is not message:
            data = to_line(message)
            self._encoded = message, data
        return data


def _greeting_problem(link: Link, message: object) -> str:
    """Why an agent may not send this now: only its first message is a `Hello`, of the right place."""
    if not isinstance(message, Hello):
        said = type(message).__name__
        return "" if link.is_greeted else f"has not said who it is before it sent {said}"
    if link.is_greeted:
        return "has said twice who it is"
    if link.place not in (-1, message.place):
        return f"has said that it is that of place {message.place}, not {link.place}"
    link.is_greeted, link.place = True, message.place
    return ""


def allow_connections(count: int) -> None:
    """Raise the limit of descriptors for so many connections, as far as the system allows it."""
    if count < FEW:
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + FEW
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
