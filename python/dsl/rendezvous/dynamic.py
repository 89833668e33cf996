"""Nodes that find each other through a store: a delegate uses it for us.

The delegate (`dsl.rendezvous.delegate`) is a process of its own: its imports take long, start threads, and
may crash. The launcher starts it first, and plans while the delegate gets ready.

The delegate is a child of the process that becomes the guard, and the guard knows it: see `dsl.Guard`. It
ends when its socket is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from dsl._own_process import START
from dsl.errors import JobFormatError, OptionError, RendezvousError
from dsl.machine import wait_for
from dsl.model.codec import Lines, to_line
from dsl.model.job import Job, Notice
from dsl.rendezvous.delegate_messages import ANSWERS, Answer, Claim, Meet, MeetingRefused, Open, Order
from dsl.words import ENDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _A = TypeVar("_A")

READ_BYTES = 1 << 16

GOODBYE_S = 4.0
"""Most time that a delegate gets to leave the rendezvous."""

END_S = 1.0
"""Most time that it gets to end after it has closed its socket."""

LAST_WORDS_BYTES = 4096
"""How much we read of what a delegate wrote before it died."""

SIGKILL = 9
_START = f"{START}import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def delegate_words() -> tuple[str, ...]:
    """The command line of a delegate without its last word, the descriptor of its socket."""
    return (sys.executable, "-c", _START, "dsl.rendezvous.delegate")


class Delegate:
    """A started delegate: it gets orders, and is a channel of events."""

    def __init__(self, job: Job, host: str, handle: Callable[[object], list[object]]) -> None:
        """``host`` is the name of this node. ``handle`` takes an event, and returns those for the agent.

        Raises:
            RendezvousError: it cannot be started.
        """
        words, shows_errors = delegate_words(), job.log_level == "debug"
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            self._errors = -1 if shows_errors else _unnamed_file()
            errors = 2 if shows_errors else null if self._errors < 0 else self._errors
            try:
                self.pid = os.posix_spawn(
                    words[0],
                    [*words, str(theirs.fileno())],
                    os.environ,
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, null, 0),
                        (os.POSIX_SPAWN_DUP2, errors, 1),
                        (os.POSIX_SPAWN_DUP2, errors, 2),
                    ],
                    setpgroup=0,
                    setsigmask=ENDING,  # they are the job's: the delegate ends with its socket
                )
            except OSError as error:
                ours.close()
                raise RendezvousError(f"cannot start {words[0]}, which meets the nodes: {error}") from None
            finally:
                os.close(null)
        self._socket = ours
        self._lines = Lines(*ANSWERS)
        self._pidfd = _pidfd_of(self.pid)
        self._handle = handle
        self._lost: MeetingRefused | None = None
        """How the delegate was lost."""
        self._due: tuple[float, Order] | None = None
        """An order that waits, and when it is due."""
        self._read: list[object] = []
        """Events that came together with an answer that was waited for."""
        self.send(Open(job.meeting, job.run_id, job.node_count, host))

    def ask(
        self,
        order: Claim | Meet,
        kinds: tuple[type[_A], ...],
        tell: Callable[[Notice], None],
        wait: Callable[[], int] = lambda: 0,
    ) -> _A | MeetingRefused | int:
        """Give an order, and wait for an answer of these kinds, which may take long.

        ``tell`` hears what we wait for. ``wait`` returns when `fileno` is readable; an exit code other than 0
        ends the wait, and is returned. A refusal is returned if the job has ended without needing this node.

        Raises:
            RendezvousError: the store cannot be used, or the nodes do not meet.
            OptionError: the backend or its settings are not valid.
        """
        self.send(order)
        while True:
            if code := wait():
                return code
            events = self._receive()
            for index, event in enumerate(events):
                if isinstance(event, Notice):
                    tell(event)
                elif isinstance(event, MeetingRefused) and event.kind != "unneeded":
                    raise (OptionError if event.kind == "settings" else RendezvousError)(event.text)
                elif isinstance(event, (MeetingRefused, *kinds)):
                    self._read = list(events[index + 1 :])
                    return event  # type: ignore[return-value]

    def fileno(self) -> int:
        """The descriptor of the delegate's socket."""
        return -1 if self._lost is not None else self._socket.fileno()

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when an order is due; 0 while events are queued."""
        return 0.0 if self._read else None if self._due is None else self._due[0]

    def read(self) -> list[object]:
        """The events that are there, without waiting."""
        if self._due is not None and self._due[0] <= time.monotonic():
            self.send(self._due[1])
        events, self._read = self._read, []
        if self._lost is None and wait_for(self._socket.fileno(), left_s=0):
            try:
                events += self._receive()
            except RendezvousError as error:
                self._lost = MeetingRefused(str(error), "lost")
                events.append(self._lost)
        return [found for event in events for found in self._handle(event)]

    def send(self, order: Order, pause_s: float = 0.0) -> None:
        """Give the delegate an order, in place of an order that still waits. ``pause_s``: wait before.

        If the delegate is lost, that is the answer.
        """
        if self._lost is not None:
            self._read = [self._lost]
            return
        self._due = (time.monotonic() + pause_s, order) if pause_s > 0 else None
        if self._due is None:
            with contextlib.suppress(OSError):  # it is gone, which `read` notices
                self._socket.sendall(to_line(order))

    def _receive(self) -> list[Answer]:
        """Wait for an answer, and return all that are there.

        Raises:
            RendezvousError: the delegate has ended, or an answer is damaged.
        """
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise RendezvousError(f"the process that meets the other nodes has ended{self._last_words()}")
        try:
            return self._lines.feed(data)
        except JobFormatError as error:
            raise RendezvousError(f"the process that meets the other nodes says nonsense: {error}") from None

    def _last_words(self) -> str:
        if self._errors < 0:
            return ""
        size = os.fstat(self._errors).st_size
        text = os.pread(self._errors, LAST_WORDS_BYTES, max(0, size - LAST_WORDS_BYTES))
        lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()}" if lines else ""

    def close(self) -> None:
        """Close our end, in a process that does not use it."""
        self._socket.close()
        for fd in (self._errors, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._errors = self._pidfd = -1

    def see_off(self) -> None:
        """Close the connection, and wait until the delegate has left; kill it if it stays too long."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            if not self._hears_end(time.monotonic() + GOODBYE_S):
                self._kill()
        except OSError:  # the delegate is gone
            self._socket.close()
        # The process may end a moment after its socket.
        if self._pidfd >= 0 and not wait_for(self._pidfd, left_s=END_S):
            self._kill()
        self.close()

    def _hears_end(self, deadline_s: float) -> bool:
        while (left_s := deadline_s - time.monotonic()) > 0:
            if wait_for(self._socket.fileno(), left_s=left_s) and not self._socket.recv(READ_BYTES):
                return True
        return False

    def _kill(self) -> None:
        if self._pidfd >= 0:
            import signal

            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, SIGKILL)

    def reap(self) -> None:
        """Call `see_off` and reap the delegate, in the process that has started it."""
        self.see_off()
        try:
            # The delegate has nothing left to do, or has used up its time.
            os.kill(self.pid, SIGKILL)
            os.waitpid(self.pid, 0)
        except OSError:
            return


def _unnamed_file() -> int:
    """A file that vanishes with its last descriptor; -1 if the interpreter cannot make one."""
    try:
        return os.memfd_create("dsl-delegate")
    except (AttributeError, OSError):  # an interpreter built for an old C library
        return -1


def _pidfd_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel or interpreter
        return -1
