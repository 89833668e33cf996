"""Nodes that find each other through a store: a delegate meets them for us, attempt by attempt.

The delegate (`dsl.rendezvous.delegate`) is a process of its own: its imports take long, start threads, and
may crash. The launcher starts it first, and plans while the delegate gets ready. The launcher waits for the
first meeting before there is a guard; the wait ends if this process ends. Later meetings come as events.

The delegate is a child of the process that becomes the guard, and the guard knows it: see `dsl.Guard`. It
ends when its socket is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time

from dsl._own_process import START
from dsl._record import replace
from dsl.errors import JobFormatError, OptionError, RendezvousError
from dsl.model.codec import Lines, to_line
from dsl.model.job import Job, Meeting, Notice, RestartReason
from dsl.model.nodes import MeetingRefused, NodesFinished, NodesMet, PeerFailure
from dsl.model.outcome import Membership, MembershipChanged, PatienceOver
from dsl.rendezvous.delegate_messages import ANSWERS, Answer, Meet, Open, Order
from dsl.signals import ENDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


READ_BYTES = 1 << 16

GOODBYE_S = 4.0
"""Most time that a delegate gets to leave the rendezvous."""

END_MS = 1000
"""Most time that it gets to end after it has closed its socket."""

LAST_WORDS_BYTES = 4096
"""How much we read of what a delegate wrote before it died."""

SIGKILL = 9
_START = f"{START}import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def delegate_words() -> tuple[str, ...]:
    """The command line of a delegate without its last word, the descriptor of its socket."""
    return (sys.executable, "-c", _START, "dsl.rendezvous.delegate")


class Delegate:
    """A started delegate, and the connection to it."""

    def __init__(self, words: Sequence[str], *, shows_errors: bool = False) -> None:
        """``shows_errors``: its stderr goes to ours, instead of into the message about its death."""
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

    def fileno(self) -> int:
        """A descriptor that is readable when the delegate has said something, or is gone."""
        return self._socket.fileno()

    def send(self, order: Order) -> None:
        """Send an order. If the delegate is gone, `receive` notices that."""
        try:
            self._socket.sendall(to_line(order))
        except OSError:
            return

    def receive(self) -> list[Answer]:
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
        if self._pidfd >= 0 and not _is_readable(self._pidfd, END_MS):
            self._kill()
        self.close()

    def _hears_end(self, deadline_s: float) -> bool:
        while (left_s := deadline_s - time.monotonic()) > 0:
            if _is_readable(self._socket.fileno(), left_s * 1000) and not self._socket.recv(READ_BYTES):
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


class Dynamic:
    """The rendezvous of a job whose nodes come and go, and the channel of news about them."""

    def __init__(self, job: Job, host: str, delegate: Delegate) -> None:
        """``host`` is the name of this node."""
        self.host = host
        self._role = job.role
        self._delegate = delegate
        self._is_lost = False
        self._membership = Membership(1)
        self._met: NodesMet | None = None
        self._events: list[object] = []
        """Events of the first meeting that are for the policy."""
        self._local_world_size = 1
        self._due: tuple[float, Order] | None = None
        """An order that waits, and when it is due."""
        self._patience_s: float | None = None
        self._is_leaving = False
        self._has_finished = False
        self.send(Open(job.meeting, job.run_id, job.node_count, host))

    def open(
        self, local_world_size: int, tell: Callable[[Notice], None]
    ) -> PeerFailure | MeetingRefused | None:
        """Meet the other nodes for the first time, which may take long. ``tell`` hears what we wait for.

        An event is returned if the job has ended without needing this node; otherwise None.

        Raises:
            RendezvousError: the nodes do not meet.
            OptionError: the backend or its settings are not valid.
        """
        self._local_world_size = local_world_size
        self.join(0, "start")
        while self._met is None:
            for event in self._take(self._delegate.receive()):
                if isinstance(event, Notice):
                    tell(event)
                elif isinstance(event, MeetingRefused) and event.is_unneeded:
                    final = [one for one in self._events if isinstance(one, PeerFailure) and one.is_final]
                    return final[0] if final else event
                elif isinstance(event, MeetingRefused):
                    raise (OptionError if event.kind == "settings" else RendezvousError)(event.text)
                elif not isinstance(event, NodesMet):
                    self._events.append(event)
        return None

    def meet(self, attempt: int, local_world_size: int) -> Meeting:  # noqa: ARG002  the delegate was told
        """The meeting of an attempt. The nodes have met before: see `open` and `NodesMet`."""
        assert self._met is not None
        return replace(self._met.meeting, attempt=attempt)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes of the last round, by node rank."""
        return () if self._met is None else self._met.hosts

    def membership(self) -> Membership:
        """Which nodes take part, as far as this node knows."""
        return self._membership

    def fileno(self) -> int:
        """The descriptor of the delegate's socket."""
        return -1 if self._is_lost else self._delegate.fileno()

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when an order is due, or a wait is over; 0 while events are queued."""
        if self._events:
            return 0.0
        due = [] if self._due is None else [self._due[0]]
        return min([*due, *([] if self._patience_s is None else [self._patience_s])], default=None)

    def read(self) -> list[object]:
        """The events that are there, without waiting."""
        now_s = time.monotonic()
        if self._due is not None and self._due[0] <= now_s:
            self.send(self._due[1])
        events, self._events = self._events, []
        if self._patience_s is not None and self._patience_s <= now_s:
            self._patience_s = None
            events.append(PatienceOver())
        return [*events, *self._hear()]

    def send(self, order: Order) -> None:
        """Give the delegate an order, in place of an order that still waits."""
        self._due = None
        self._delegate.send(order)

    def join(self, restarts: int, reason: RestartReason, pause_s: float = 0.0) -> None:
        """Join the next round, after a pause. ``restarts``: counted restarts that this node knows of."""
        self._patience_s = None
        order = Meet(self._local_world_size, self._role, restarts, reason)
        if pause_s > 0:
            self._due = (time.monotonic() + pause_s, order)
        else:
            self.send(order)

    def wait(self, within_s: float, *, for_goodbye: bool = False) -> None:
        """Report `PatienceOver` after this time, unless the node joins the next round before.

        ``for_goodbye``: the delegate may take longer, if it says why.
        """
        self._patience_s = time.monotonic() + within_s
        self._is_leaving = for_goodbye

    def _hear(self) -> list[object]:
        if self._is_lost or not _is_readable(self._delegate.fileno()):
            return []
        try:
            return self._take(self._delegate.receive())
        except RendezvousError as error:
            self._is_lost, self._due = True, None
            return [MeetingRefused(str(error), "lost")]

    def _take(self, answers: Sequence[Answer]) -> list[object]:
        """Note what the rendezvous itself has to know. Returns the events for the policy and the user."""
        events: list[object] = []
        for event in answers:
            if isinstance(event, NodesMet):
                self._met, self._membership = event, Membership(event.meeting.node_count)
            elif isinstance(event, MembershipChanged):
                self._membership = event.membership
            elif isinstance(event, NodesFinished):
                self._has_finished = True
            elif isinstance(event, Notice):
                if self._is_leaving:
                    self._patience_s = None
                if self._has_finished:
                    continue  # the job has ended well: the user needs no more notices
            events.append(event)
        return events


def _is_readable(fd: int, timeout_ms: float = 0) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))


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
