"""One connection of a hub: what to send, what has arrived, and since when the other side is silent."""

from __future__ import annotations

import errno
import select
import threading
import time
from collections import deque

from dsl.control import clock, frames
from dsl.control.frames import Damaged, Decoder
from dsl.control.messages import TO_AGENT, TO_HEAD, Hello, message_from_bytes
from dsl.errors import ControlError, JobFormatError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    from dsl.control.clock import Clock, Sample
    from dsl.control.frames import Frame
    from dsl.control.stream import Stream

    class Owner(Protocol):
        """The hub, as its links see it."""

        is_head: bool
        is_started: bool

        def encoded(self, message: object) -> bytes:
            """The frame of a message."""

        def call(self, link: Link) -> None:
            """Let the thread of the hub look at a link."""

        def deliver(self, link: Link, message: object, size: int) -> None:
            """Keep a message until it is read."""

        def grant(self, link: Link) -> None:
            """Let an agent send more output, as far as there is room for it."""

        def first_message_of(self, link: Link) -> object:
            """Take the first unread message of a link; None: there is none."""

        def show(self, link: Link, fd: int, data: bytes, *, unfinished: bool) -> None:
            """Show output."""


CLOSED = "has closed the connection"

QUEUE_BYTES = 2 * frames.LONGEST
"""Most bytes that wait for a peer that reads nothing."""

CHUNK = 64 << 10
_FIRST_PINGS = 4


class Link:
    """A connection. Owners of the hub use its public names, except those that a comment keeps for the hub."""

    def __init__(
        self,
        hub: Owner,
        stream: Stream,
        name: str,
        place: int = -1,
        decoder: Decoder | None = None,
        port: int = 0,
    ) -> None:
        self.name = name
        """Name of the other side, as the user knows it."""
        self.place = place
        """Node rank or rank of the agent there; -1: not known yet, or the other side is the head."""
        self.port = port
        """Our port at which it came in; 0: we have made the connection, or were given it."""
        self.last_heard_s = time.monotonic()
        """`time.monotonic` when the last bytes came from there."""
        # The fields from here on are for the hub alone.
        self.stream = stream
        self.fds = stream.fds()
        self.is_lost = self.is_closing = self.is_finished = self.is_heard = False
        self.is_greeted = False
        """Head: whether the agent has said who it is."""
        self.is_paused = self.is_deaf = False
        """Too many of its messages are unread, so we do not read from it."""
        self.unread_bytes = 0
        self.waits_to_write = False
        self.stuck_since_s: float | None = None
        self.last_sent_s = self.last_heard_s
        self.last_measured_s = self.last_heard_s
        self.linger_until_s = 0.0
        self.control: deque[bytes] = deque()
        self.control_bytes = 0
        self._pong = b""
        """The answer to the last heartbeat. We keep only one, however many heartbeats come."""
        self._is_ping_due = False
        self._owed = 0
        """Head: bytes of output that the agent may send, but does not know of yet."""
        self.output: deque[bytes] = deque()
        self.output_bytes = 0
        self.credit = 0
        """Agent: bytes of output that we may still send, including `frames.OUTPUT_COST` for each piece."""
        self.leave = 0
        """Head: bytes of output that the agent may still send, counted in the same way."""
        self.outstanding = 0
        """Head: `leave`, plus the bytes that have arrived and are not shown."""
        self.samples: tuple[Sample, ...] = ()
        self._hub = hub
        self._decoder = decoder or Decoder(frames.LONGEST_OF_AGENTS if hub.is_head else frames.LONGEST)
        self._chunk = memoryview(b"")
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        """Name and place."""
        return f"Link({self.name!r}, place={self.place})"

    @property
    def is_local(self) -> bool:
        """Whether both ends are known to be on one machine; False for descriptors, which do not tell."""
        return self.stream.is_local

    @property
    def own_address(self) -> str:
        """Our address at this end of the connection; empty: another program, such as ssh, made it."""
        return self.stream.own_address.removeprefix("::ffff:")

    @property
    def clock(self) -> Clock | None:
        """How far the agent's clock is from ours (on the head); None: not known yet."""
        return clock.estimate(self.samples, time.monotonic_ns())

    def send(self, message: object) -> None:
        """Queue a message, from any thread, without waiting. Does nothing if the link is lost."""
        self.queue_control(self._hub.encoded(message))
        self._hub.call(self)

    def close(self) -> None:
        """Send what is queued, then end the connection. Nothing is read any more, and no `Lost` follows."""
        self.is_closing = True
        self._hub.call(self)

    def send_now(self, message: object, timeout_s: float = 30.0) -> None:
        """Send a message before the hub is started, and wait until it has gone.

        Raises:
            ControlError: the connection has ended, or the other side took nothing for too long.
        """
        self.queue_control(self._hub.encoded(message))
        self._flush_now(time.monotonic() + timeout_s)

    def receive(self, timeout_s: float, *, while_heard: bool = False) -> object:
        """Wait for a message before the hub is started.

        ``while_heard``: the time begins anew whenever the other side sends something.

        Raises:
            ControlError: the connection has ended, or no message came in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while (message := self._hub.first_message_of(self)) is None:
            if while_heard:
                deadline_s = self.last_heard_s + timeout_s
            self._wait(select.POLLIN, deadline_s)
            try:
                self.take()
            except (Damaged, OSError) as error:
                raise ControlError(f"{self.name} {reason_of(error)}") from None
            self._flush_now(deadline_s)
        return message

    def _flush_now(self, deadline_s: float) -> None:
        try:
            while self.flush():
                self._wait(select.POLLOUT, deadline_s)
        except OSError as error:
            raise ControlError(f"{self.name} {reason_of(error)}") from None

    def _wait(self, mask: int, deadline_s: float) -> None:
        poller = select.poll()
        poller.register(self.stream.fds()[mask == select.POLLOUT], mask)
        left_ms = max(deadline_s - time.monotonic(), 0) * 1000
        if not poller.poll(left_ms):
            raise ControlError(f"{self.name} does not answer")

    # The methods from here on are called on the thread of the hub, or before that thread is started.

    def queue_control(self, frame: bytes) -> None:
        """Queue a message; it goes before all output. From any thread."""
        with self._lock:
            if not self.is_lost:
                self.control.append(frame)
                self.control_bytes += len(frame)

    def owe(self, count: int) -> None:
        """Tell the agent soon that it may send ``count`` more bytes. From any thread."""
        with self._lock:
            self._owed += count

    def queue_output(self, frame: bytes, count: int) -> None:
        """Queue a frame with ``count`` bytes of output."""
        self.output.append(frame)
        self.output_bytes += len(frame)
        self.credit -= count + frames.OUTPUT_COST

    def lose(self) -> None:
        """Forget what waits to be sent: the other side is gone."""
        with self._lock:
            self.is_lost = True
            self.control.clear()
            self.output.clear()
            self.control_bytes = self.output_bytes = self._owed = 0
            self._pong, self._is_ping_due = b"", False
        self._chunk = memoryview(b"")

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be sent."""
        beats = self._pong or self._is_ping_due or self._owed
        return not (self.control or self.output or self._chunk or beats)

    def flush(self) -> bool:
        """Write what the connection takes; returns whether to wait for room. Raises OSError."""
        while True:
            if not self._chunk:
                self._chunk = memoryview(self._next_chunk())
                if not self._chunk:
                    done = self.stream.is_written()
                    self.stuck_since_s = None if done else self.stuck_since_s or time.monotonic()
                    return not done
            count = self.stream.write(self._chunk)
            now_s = time.monotonic()
            if not count:
                self.stuck_since_s = self.stuck_since_s or now_s
                return True
            self._chunk = self._chunk[count:]
            self.last_sent_s, self.stuck_since_s = now_s, None

    def _next_chunk(self) -> bytes:
        """Frames to write at once: first all control frames, then output."""
        size = 0
        with self._lock:
            parts = self._beats()
            while self.control and size < CHUNK:
                parts.append(self.control.popleft())
                size += len(parts[-1])
            self.control_bytes -= size
        while self.output and size < CHUNK:
            parts.append(self.output.popleft())
            size += len(parts[-1])
            self.output_bytes -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _beats(self) -> list[bytes]:
        """Heartbeats and leave. We make them when they can be sent, so a peer cannot pile them up here."""
        parts = []
        if self._pong:
            parts.append(self._pong)
        if self._is_ping_due:
            parts.append(frames.ping(time.monotonic_ns(), time.time_ns()))
        if self._owed:
            parts.append(frames.credit(self._owed))
        self._pong, self._is_ping_due, self._owed = b"", False, 0
        return parts

    def take(self) -> bool:
        """Read once and handle the frames; returns whether there was data. Raises OSError, Damaged."""
        data = self.stream.read()
        if data is None:
            return False
        if not data:
            raise Damaged(CLOSED)
        self.last_heard_s = time.monotonic()
        self.handle(self._decoder.feed(data))
        return True

    def handle(self, arrived: Iterable[Frame]) -> None:
        """Do what frames ask for. Raises Damaged."""
        for kind, payload in arrived:
            if self.is_closing:
                continue
            if not self.is_heard:
                self.is_heard = True
                self._greet()
            if kind == frames.MESSAGE:
                self._deliver(payload)
            elif kind == frames.PING:
                heard_ns = time.time_ns()
                self._pong = frames.pong(payload, heard_ns, time.time_ns())
            elif kind == frames.PONG:
                self._measure(payload)
            elif kind == frames.CREDIT:
                self.credit += frames.read_credit(payload)
            elif kind == frames.OUTPUT:
                fd, data, unfinished = frames.read_output(payload)
                self._hub.show(self, fd, data, unfinished=unfinished)

    def _greet(self) -> None:
        """Answer the first frame, if we are the head: allow output, and measure the clock."""
        if self._hub.is_head:
            self._hub.grant(self)
            self.ping()

    def _deliver(self, payload: bytes) -> None:
        try:
            message = message_from_bytes(payload, TO_HEAD if self._hub.is_head else TO_AGENT)
        except JobFormatError as error:
            raise Damaged(f"has sent something that cannot be read: {error}") from None
        if self._hub.is_head:
            self._check_greeting(message)
        self._hub.deliver(self, message, len(payload))

    def _check_greeting(self, message: object) -> None:
        """Check that only the first message is a `Hello`, of the expected agent. Raises Damaged."""
        if not self.is_greeted and not isinstance(message, Hello):
            raise Damaged(f"has not said who it is before it sent {type(message).__name__}")
        if not isinstance(message, Hello):
            return
        if self.is_greeted:
            raise Damaged("has said twice who it is")
        if self.place not in (-1, message.place):
            raise Damaged(f"has said that it is that of place {message.place}, not {self.place}")
        self.is_greeted, self.place = True, message.place

    def ping(self) -> None:
        """Send a heartbeat as soon as the connection takes it."""
        self.last_measured_s = time.monotonic()
        self._is_ping_due = True

    def _measure(self, payload: bytes) -> None:
        sent_ns, a_ns, b_ns, c_ns = frames.read_pong(payload)
        sample = clock.measure(a_ns, b_ns, c_ns, time.time_ns(), sent_ns, time.monotonic_ns())
        if sample is not None:
            self.samples = clock.add(self.samples, sample)
            if len(self.samples) < _FIRST_PINGS:
                self.ping()


def reason_of(error: Exception) -> str:
    """Why a connection has ended, in words that follow the name of the other side."""
    if isinstance(error, OSError):
        if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.EBADF):
            return CLOSED
        return f"cannot be reached any more ({error.strerror})"
    if isinstance(error, Damaged):
        return str(error)
    return f"has sent something that cannot be dealt with: {type(error).__name__}: {error}"
