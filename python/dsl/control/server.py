"""The thread of a hub: waits for all connections at once, and watches their time limits.

Everything here runs on that thread, except `Server.do` and `Server.call`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque

from dsl.control.link import QUEUE_BYTES, reason_of
from dsl.control.messages import Lost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl.control.door import Door
    from dsl.control.link import Link
    from dsl.control.mailbox import Mailbox
    from dsl.control.relay import Pipe, Relay

_READ, _WRITE, _BROKEN = select.EPOLLIN, select.EPOLLOUT, select.EPOLLERR | select.EPOLLHUP
_EVENTS = 4096
_LAST_READS = 256
_DRAIN_READS = 64
_LINGER_S = 5.0


class Server:
    """Serves links, the door of a head and the relay of an agent.

    ``pause_s``: after this time without a byte from us, a link gets a heartbeat. ``gone(link)`` is called
    when a link has ended.
    """

    def __init__(
        self,
        heartbeat_s: float,
        pause_s: float,
        mailbox: Mailbox,
        gone: Callable[[Link], None],
        *,
        is_head: bool,
    ) -> None:
        self.links: dict[int, Link] = {}
        self.door: Door | None = None
        self.relay: Relay | None = None
        self.is_closing = self.is_closed = False
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when a link has gone."""
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._heartbeat_s, self._pause_s, self._is_head = heartbeat_s, pause_s, is_head
        self._mailbox, self._gone = mailbox, gone
        self._epoll: select.epoll | None = None
        self._watched: dict[int, Callable[[int], None]] = {}
        self._actions: deque[Callable[[], None]] = deque()
        self._called: dict[int, Link] = {}
        self._is_rung = False
        self._tick_s = 0.0
        self._seen_s = 0.0
        """When the last turn was over."""
        self._drained: list[threading.Event] = []

    def __del__(self) -> None:
        """Close the bell only now: any thread may ring it as long as the server exists."""
        os.close(self.bell)

    def do(self, action: Callable[[], None]) -> None:
        """Let the thread do something as soon as it runs. From any thread."""
        with self.lock:
            self._actions.append(action)
            self._ring()

    def call(self, link: Link) -> None:
        """Let the thread look at a link. From any thread."""
        with self.lock:
            self._called[id(link)] = link
            self._ring()

    def _ring(self) -> None:
        if not self._is_rung and not self.is_closed:
            self._is_rung = True
            os.eventfd_write(self.bell, 1)

    def _hear_bell(self, _mask: int) -> None:
        with self.lock:
            os.eventfd_read(self.bell)
            self._is_rung = False
            actions, self._actions = self._actions, deque()
            called, self._called = self._called, {}
        for action in actions:
            action()
        for link in called.values():
            self._attend(link)

    def watch(self, fd: int, ready: Callable[[int], None], mask: int = _READ) -> None:
        """Call back when something can be done with a descriptor."""
        assert self._epoll is not None
        self._watched[fd] = ready
        self._epoll.register(fd, mask)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor."""
        assert self._epoll is not None
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def run(self) -> None:
        """Serve until the end."""
        self._epoll = select.epoll()
        self._seen_s = time.monotonic()
        try:
            self.watch(self.bell, self._hear_bell)
            while not self.is_closed:
                self._turn()
        except Exception as error:  # noqa: BLE001  the reader of messages must hear of it
            for link in list(self.links.values()):
                self._drop(link, f"cannot be heard any more: internal error: {type(error).__name__}: {error}")
        finally:
            self._end()

    def _turn(self) -> None:
        assert self._epoll is not None
        pause_s = max(self._due_s() - time.monotonic(), 0.0)
        events = self._epoll.poll(pause_s, _EVENTS)
        for fd, mask in events:
            ready = self._watched.get(fd)
            if ready is not None:
                ready(mask)
        now_s = time.monotonic()
        if now_s - self._seen_s - pause_s > self._pause_s:
            self._forgive(now_s)
        if now_s >= self._tick_s:
            self._tick(now_s)
        if self.door is not None:
            self.door.expire(now_s)
        if self.relay is not None:
            self._serve_relay(self.relay)
        self._seen_s = now_s

    def _due_s(self) -> float:
        due = [self._tick_s]
        if self.door is not None and self.door.due_s is not None:
            due.append(self.door.due_s)
        return min(due)

    # Links.

    def begin(self, link: Link) -> None:
        """Serve a link. Its silence counts from now on, because we may not have read from it before."""
        link.last_heard_s = link.last_sent_s = time.monotonic()
        read_fd, write_fd = link.fds = link.stream.fds()
        self.links[id(link)] = link
        self._tick_s = min(self._tick_s, time.monotonic() + self._pause_s)
        self.watch(read_fd, lambda mask: self._ready(link, mask))
        if write_fd != read_fd:
            self.watch(write_fd, lambda mask: self._ready_to_write(link, mask), 0)
        self._attend(link)

    def _ready(self, link: Link, mask: int) -> None:
        def read() -> None:
            if mask & (_READ | _BROKEN):
                link.take()
            self._flush(link)

        self.guard(link, read)

    def _ready_to_write(self, link: Link, mask: int) -> None:
        def write() -> None:
            if mask & _BROKEN and _is_ready(link.fds[1], 0):
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            self._flush(link)

        self.guard(link, write)

    def guard(self, link: Link, work: Callable[[], None]) -> None:
        """Do something for a link. An error ends this link and no other."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  what one agent sends must not end the others
            said = self._last_words(link) if isinstance(error, OSError) else ""
            self._drop(link, said or reason_of(error))

    def _last_words(self, link: Link) -> str:
        """Read what has arrived on a link that cannot be written; returns why no more comes, if known."""
        try:
            for _ in range(_LAST_READS):
                if not _is_ready(link.fds[0], select.POLLIN):
                    break
                link.take()
        except OSError:
            return ""
        except Exception as error:  # noqa: BLE001  as in `guard`
            return reason_of(error)
        return ""

    def _attend(self, link: Link) -> None:
        """Send what is queued on a link, or end the link if its end was requested."""
        if link.is_lost or id(link) not in self.links:
            return
        if link.control_bytes > QUEUE_BYTES:
            self._drop(link, "does not read what it is sent")
            return
        self.guard(link, lambda: self._flush(link))

    def _flush(self, link: Link) -> None:
        if link.is_lost or link.is_finished:
            return
        self._aim(link, waits=link.flush())
        if link.is_closing and link.is_idle and not link.waits_to_write:
            link.is_finished = True
            if link.fds[0] != link.fds[1]:
                self.unwatch(link.fds[1])
            link.linger_until_s = time.monotonic() + _LINGER_S
            if not link.stream.finish():
                self._drop(link, "")

    def _aim(self, link: Link, *, waits: bool) -> None:
        """Wait for what a link needs: bytes, unless it is paused, and room if something has to be written."""
        if (waits, link.is_paused) == (link.waits_to_write, link.is_deaf):
            return
        assert self._epoll is not None
        if link.is_deaf and not link.is_paused:
            link.last_heard_s = time.monotonic()  # we did not listen
        link.waits_to_write, link.is_deaf = waits, link.is_paused
        read_fd, write_fd = link.fds
        reading, writing = 0 if link.is_deaf else _READ, _WRITE if waits else 0
        if read_fd == write_fd:
            self._epoll.modify(read_fd, reading | writing)
        else:
            self._epoll.modify(read_fd, reading)
            self._epoll.modify(write_fd, writing)

    def _drop(self, link: Link, reason: str, *, is_silent: bool = False) -> None:
        """End a link; the reader of messages gets a `Lost` with the reason, unless we have closed it."""
        if link.is_lost or self.links.pop(id(link), None) is None:
            return
        link.lose()
        for fd in set(link.fds):
            self.unwatch(fd)
        link.stream.close()
        self._gone(link)
        if not link.is_closing:
            self._mailbox.put(link, Lost(reason, is_silent=is_silent))
        with self.lock:
            self.changed.notify_all()

    # Time.

    def _forgive(self, now_s: float) -> None:
        """Give links more time: we were stopped, or had no processor, and may not have read everything."""
        for link in self.links.values():
            link.last_heard_s = max(link.last_heard_s, now_s - 0.75 * self._heartbeat_s)
            if link.stuck_since_s is not None:
                link.stuck_since_s = now_s
        self._tick_s = now_s

    def _tick(self, now_s: float) -> None:
        """Send heartbeats where we are silent, and end links that are silent or take nothing."""
        next_s = now_s + self._pause_s
        for link in list(self.links.values()):
            heard_until_s = link.last_heard_s + self._heartbeat_s
            stuck_until_s = (link.stuck_since_s or now_s) + self._heartbeat_s
            if link.is_finished:
                if link.linger_until_s <= now_s:
                    self._drop(link, "")
            elif stuck_until_s <= now_s:
                self._drop(link, f"has taken nothing for {self._heartbeat_s:g} s")
            elif not link.is_heard and self._is_head:
                continue  # ssh may take long; the caller that started it limits that time
            elif heard_until_s <= now_s and not link.is_deaf:
                self._drop(link, f"has not been heard for {self._heartbeat_s:g} s", is_silent=True)
            else:
                next_s = min(next_s, max(heard_until_s, now_s + 0.001), stuck_until_s)
                if self._needs_ping(link, now_s):
                    link.ping()
                    self._attend(link)
        self._tick_s = next_s

    def _needs_ping(self, link: Link, now_s: float) -> bool:
        if now_s - link.last_sent_s >= 0.9 * self._pause_s:
            return True
        return self._is_head and now_s - link.last_measured_s >= self._heartbeat_s

    # The output of an agent.

    def _serve_relay(self, relay: Relay) -> None:
        if self._drained:
            for pipe in relay.pipes:
                for _ in range(_DRAIN_READS):
                    if not pipe.owed or not relay.room(pipe):
                        break
                    relay.pump(pipe)
                if not pipe.owed:
                    relay.flush(pipe)
        self._attend(relay.link)
        if self._drained and relay.is_done():
            self._tell_drained()
        for pipe in relay.pipes:
            self._aim_pipe(relay, pipe)

    def _aim_pipe(self, relay: Relay, pipe: Pipe) -> None:
        wants = (relay.room(pipe) > 0 or relay.is_full(pipe)) and not pipe.is_ended
        if self._drained and not pipe.owed:
            wants = False  # a worker writes more, but we do not wait for that
        if wants and pipe.fd not in self._watched:
            self.watch(pipe.fd, lambda _mask: relay.pump(pipe))
        elif not wants and pipe.fd in self._watched:
            self.unwatch(pipe.fd)

    def drain(self, drained: threading.Event) -> None:
        """Set ``drained`` when all bytes that are in the pipes now have been sent."""
        self._drained.append(drained)
        if self.relay is None:
            self._tell_drained()
            return
        for pipe in self.relay.pipes:
            pipe.owe()

    def _tell_drained(self) -> None:
        for drained in self._drained:
            drained.set()
        self._drained.clear()

    # The end.

    def close_links(self) -> None:
        """End all links when what is queued has been sent."""
        self.is_closing = True
        for link in list(self.links.values()):
            link.is_closing = True
            if link.is_paused:
                link.is_paused = False
            self._attend(link)
        with self.lock:
            self.changed.notify_all()

    def stop(self) -> None:
        """Stop serving."""
        self.is_closed = True

    def _end(self) -> None:
        for link in list(self.links.values()):
            link.is_closing = True
            self._drop(link, "")
        if self.door is not None:
            self.door.close()
        if self.relay is not None:
            self.relay.close()
        assert self._epoll is not None
        with self.lock:
            self.is_closed = True
            self.changed.notify_all()
        self._tell_drained()
        self._epoll.close()


def _is_ready(fd: int, mask: int) -> bool:
    """Whether something can be done with a descriptor now, or it is broken."""
    poller = select.poll()
    poller.register(fd, mask)
    return bool(poller.poll(0))
