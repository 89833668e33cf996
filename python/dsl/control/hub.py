"""The connections of a process: messages, heartbeats and output, served by one thread.

A hub is silent until it is started. So an agent can talk to its head first (`Link.send_now`,
`Link.receive`), then fork, and start the hub in the process that goes on.
"""

from __future__ import annotations

import signal
import threading
from functools import partial

from dsl.control import frames
from dsl.control.console import Console
from dsl.control.door import Door
from dsl.control.frames import Damaged
from dsl.control.link import Link
from dsl.control.mailbox import Mailbox
from dsl.control.messages import message_to_bytes
from dsl.control.relay import Relay
from dsl.control.server import Server
from dsl.errors import ControlError
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl.control.frames import Decoder, Frame
    from dsl.control.stream import SecureStream, Stream

OUTPUT_BYTES = 32 << 20
"""Bytes of output of all agents that may be on their way or wait for the console."""

FIRST_WINDOW = 64 << 10
"""Most bytes of output that an agent may send before the first of them is shown."""

LEAST_WINDOW = 2 << 10
"""Bytes of output that an agent may always send, however many agents there are."""

USUAL_AGENTS = 16

KEY_BYTES = 32

_MANY = 1 << 12
_SHUT_S = 5.0


class Hub:
    """The connections of this process.

    ``heartbeat_s``: silence after which the other side counts as lost. ``show``: this is the head, and output
    that agents send is written to ``console``, the descriptors of stdout and stderr.
    """

    def __init__(self, heartbeat_s: float, *, show: bool = False, console: tuple[int, int] = (1, 2)) -> None:
        self.heartbeat_s = heartbeat_s
        self.is_head = show
        self.is_started = False
        self._mailbox = Mailbox()
        # An agent answers the heartbeats of its head, and sends its own only if none come.
        pause_s = heartbeat_s / 4 if show else heartbeat_s / 3
        self._server = Server(heartbeat_s, pause_s, self._mailbox, self._gone, is_head=show)
        self._thread = threading.Thread(target=self._server.run, name="dsl-hub", daemon=True)
        self._console = Console(*console, self._taken, self._tell) if show else None
        self._early: list[Link] = []
        self._encoded: tuple[object, bytes] = (None, b"")
        self.agents = USUAL_AGENTS
        """Head: number of agents that share the memory for output."""
        self._granted = 0

    def add(self, stream: Stream, name: str) -> Link:
        """Serve a connection; ``name`` is the other side's name for the user."""
        stream.tune(self.heartbeat_s)
        link = Link(self, stream, name)
        if self.is_started:
            self._server.do(lambda: self._server.begin(link))
        else:
            self._early.append(link)
        return link

    def listen(self, address: str = "", port: int = 0, *, keyed: bool | None = None) -> int:
        """Let agents connect by TCP at a port; returns the port. The same call again changes nothing.

        ``address``: one of this machine; empty: every one. ``port``: 0 for any free one. ``keyed``: whether
        agents need a key that their user has given them, or must have none; None: it is not checked. A port
        with this check is for agents that come by themselves: several may come for a place.

        Raises:
            OSError: we cannot listen there.
        """
        server = self._server
        if server.door is None:
            server.door = Door(self)
        number, made = server.door.add(address, port, keyed=keyed)
        if made is not None:
            server.do(partial(server.door.open, made))
        return number

    def unlisten(self, port: int) -> None:
        """Close a port. Returns when another process can listen there; links that came in by it stay."""
        door, done = self._server.door, threading.Event()
        if door is None:
            return
        self._server.do(lambda: door.shut(port, done))
        if self.is_started:
            done.wait(_SHUT_S)

    def expect(self, place: int | None, key: bytes, count: int | None = None) -> None:
        """Let in agents of a place that know a key of 32 bytes; None: of every place. Call `listen` first.

        ``count``: number of these agents; the default is one for a place, some thousands for every place.

        Raises:
            ControlError: the key does not have 32 bytes.
        """
        door = self._server.door
        assert door is not None
        if len(key) != KEY_BYTES:
            raise ControlError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        many = count or (_MANY if place is None else 1)
        self._server.do(lambda: door.expect(place, key, many))

    @property
    def strangers(self) -> int:
        """Connections that were refused because they did not know the key."""
        return self._server.door.strangers if self._server.door is not None else 0

    def fileno(self) -> int:
        """Give a descriptor that is readable while `read` returns something."""
        return self._mailbox.fd

    def read(self) -> list[tuple[Link | None, object]]:
        """Take the messages that have arrived. `Lost` is a link's last message; a `Notice` has no link."""
        messages, resumed = self._mailbox.take()
        for link in resumed:
            self._server.call(link)
        return messages

    def relay(self, link: Link, stdout_fd: int, stderr_fd: int) -> None:
        """Send what comes out of two pipes to the head, which shows it. The hub then owns the read ends."""
        relay = Relay(link, stdout_fd, stderr_fd)

        def begin() -> None:
            self._server.relay = relay

        self._server.do(begin)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for output; False: the time is over, or the head is gone.

        An agent waits until all that was in the pipes is written to the connection. A head waits until all
        that has arrived is shown.
        """
        if self._console is not None:
            return self._console.drain(timeout_s)
        server, drained = self._server, threading.Event()
        server.do(lambda: server.drain(drained))
        is_done = drained.wait(timeout_s)
        return is_done and server.relay is not None and not server.relay.link.is_lost

    def start(self) -> None:
        """Begin to serve. From here on this process must not fork and go on in the child."""
        if self.is_started:
            return
        self.is_started = True
        early, self._early = self._early, []
        for link in early:
            self._server.do(lambda link=link: self._server.begin(link))  # type: ignore[misc]
        # Only the threads that existed before take signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            if self._console is not None:
                self._console.thread.start()
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self, timeout_s: float) -> None:
        """Send what is queued, end all connections, and wait no longer than this for it."""
        self.start()
        server = self._server
        server.do(server.close_links)
        with server.lock:
            server.changed.wait_for(lambda: server.is_closing and not server.links, timeout_s)
        server.do(server.stop)
        self._thread.join(timeout_s + 1)
        if self._console is not None:
            self._console.close()

    def disown(self) -> None:
        """Close the descriptors in this process alone: a process forked from it goes on with them."""
        for link in self._early:
            link.stream.disown()
        if self._server.door is not None:
            self._server.door.disown()

    # For links, the door and the console.

    def encoded(self, message: object) -> bytes:
        """The frame of a message, kept for the next call: often one message goes to all links."""
        last, data = self._encoded
        if last is not message:
            data = frames.frame(frames.MESSAGE, message_to_bytes(message))
            self._encoded = message, data
        return data

    def call(self, link: Link) -> None:
        """Let the thread look at a link."""
        self._server.call(link)

    def deliver(self, link: Link, message: object, size: int) -> None:
        """Keep a message until it is read."""
        self._mailbox.put(link, message, size)

    def first_message_of(self, link: Link) -> object:
        """Take the first unread message of a link; None: there is none."""
        return self._mailbox.take_first(link)

    def show(self, link: Link, fd: int, data: bytes, *, unfinished: bool) -> None:
        """Show output of an agent. Raises Damaged if the agent has sent more than it may."""
        if self._console is None:
            raise Damaged("has sent output to an agent")
        with self._server.lock:
            link.leave -= len(data) + frames.OUTPUT_COST
        if link.leave < 0:
            raise Damaged("has sent more output than it has leave for")
        self._console.put(link, fd, data, unfinished=unfinished)

    def grant(self, link: Link, most: int = FIRST_WINDOW) -> None:
        """Let an agent send more: up to ``most``, its share of `OUTPUT_BYTES`, and what is free."""
        share = max(OUTPUT_BYTES // max(self.agents, len(self._server.links)), LEAST_WINDOW)
        with self._server.lock:
            free = max(OUTPUT_BYTES - self._granted, LEAST_WINDOW - link.outstanding)
            more = min(min(share, most) - link.outstanding, free)
            has_enough = link.outstanding > LEAST_WINDOW // 2 and more < share // 4
            if has_enough or more <= 0 or link.is_lost:
                return
            self._grant(link, more)
            link.leave += more
        link.owe(more)
        self._server.call(link)

    def _grant(self, link: Link, count: int) -> None:
        link.outstanding += count
        self._granted += count

    def _taken(self, who: object, count: int) -> None:
        """The console has shown bytes of an agent, so the agent may send more."""
        link = who
        assert isinstance(link, Link)
        with self._server.lock:
            self._grant(link, -count - frames.OUTPUT_COST)
        self.grant(link, OUTPUT_BYTES)

    def _gone(self, link: Link) -> None:
        with self._server.lock:
            self._grant(link, -link.leave)
            link.leave = 0
        if self._console is not None:
            self._console.end(link)

    def _tell(self, notice: Notice) -> None:
        self._mailbox.put(None, notice)

    def watch(self, fd: int, ready: Callable[[int], None]) -> None:
        """Call back when a descriptor is readable."""
        self._server.watch(fd, ready)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor."""
        self._server.unwatch(fd)

    def is_connected(self, place: int) -> bool:
        """Whether an agent of that place is connected."""
        return any(link.place == place for link in self._server.links.values())

    def admit(
        self,
        stream: SecureStream,
        address: str,
        place: int,
        port: int,
        decoder: Decoder,
        arrived: list[Frame],
    ) -> None:
        """Make a link of a connection that has shown that it knows the key."""
        stream.tune(self.heartbeat_s)
        link = Link(self, stream, address, place, decoder, port)
        self._server.begin(link)
        self._server.guard(link, lambda: link.handle(arrived))
        self._server.call(link)

    def warn(self, text: str) -> None:
        """Tell the user."""
        self._tell(Notice("warning", text))
