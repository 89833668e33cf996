"""``python -m dsl.rendezvous.delegate FD``: uses the store of a job for the agent at socket FD.

So the agent imports no torch, waits only for its own events, and survives a crash of this process.
`dsl.rendezvous.delegate_messages` has the messages between the two.

One thread reads the agent's orders, so that it sees the end of the socket even while torch blocks: then the
node leaves the job, and this process ends within `LEAVE_S`. The main thread carries out the orders, and looks
into the store while there are none. This process ignores signals that end a job: the agent handles them.
Nothing that this process prints reaches the user's terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from queue import Empty, SimpleQueue

from dsl.errors import JobFormatError
from dsl.machine import use_null
from dsl.model.codec import Lines, to_line
from dsl.model.job import Notice
from dsl.rendezvous.delegate_messages import (
    ORDERS,
    Answer,
    Claim,
    Finish,
    Leave,
    Meet,
    MeetingRefused,
    NodesFinished,
    Open,
    Order,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dsl.rendezvous.claim import Claims
    from dsl.rendezvous.rounds import Meetings
    from dsl.rendezvous.torch_side import Site

LEAVE_S = 2.5
"""A delegate ends within this time after its agent has gone or has told it to leave."""
LOOK_S = 1.0
"""How often the main thread looks into the store."""
FIRST_WORD_S = 5.0
"""After this time the user hears what we wait for."""
STRANGERS_S = 1.0
"""How long the host of the store stays at the end, for nodes under torchrun that still ask it."""
MOST_KEPT = 64 << 10
"""How many bytes of torch's output we keep."""
IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU")


class Interrupted(Exception):  # noqa: N818 - not an error: the agent wants something else
    """The agent no longer wants the present order."""


class AgentConnection:
    """The connection to the agent, and the loop that serves it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._saying = threading.Lock()
        self._gone = threading.Event()
        self._end: threading.Timer | None = None

    def say(self, answer: Answer) -> None:
        """Send a line, or nothing if the agent has gone. Any thread may call this."""
        with self._saying:
            try:
                self._connection.sendall(to_line(answer))
            except OSError:
                self._gone.set()

    def check(self) -> None:
        """Go on with the present order only if the agent is there and has sent no further order.

        Raises:
            Interrupted: do not go on.
        """
        if self._gone.is_set() or not self._orders.empty():
            raise Interrupted

    def read(self) -> None:
        """Read orders until the agent has gone. Runs in a thread of its own."""
        lines = Lines(*ORDERS)
        try:
            while data := self._connection.recv(1 << 16):
                for order in lines.feed(data):
                    if isinstance(order, Leave):  # a frozen store would block us for a minute
                        self._end_soon()
                    self._orders.put(order)
        except (OSError, JobFormatError):
            pass
        self._gone.set()
        self._end_soon()
        self._orders.put(Leave())

    def _end_soon(self) -> None:
        if self._end is None:
            self._end = threading.Timer(LEAVE_S, os._exit, [0])
            self._end.daemon = True
            self._end.start()

    def serve(self) -> None:
        """Carry out orders up to the last one."""
        part: DelegatePart | None = None
        while True:
            try:
                order = self._orders.get(timeout=LOOK_S)
            except Empty:
                if part is not None:
                    part.look()
                continue
            if isinstance(order, Open):
                part = open_part(order, self)
            elif part is not None:
                part.carry_out(order)
            if isinstance(order, Leave) or (isinstance(order, Finish) and self._orders.empty()):
                return


def open_part(order: Open, agent: AgentConnection) -> DelegatePart | None:
    """Open the store, and make this node's part in the job; if that fails, say why and return None."""
    from dsl.rendezvous.claim import Claims
    from dsl.rendezvous.rounds import Meetings
    from dsl.rendezvous.settings import number
    from dsl.rendezvous.torch_side import connection_text, host_and_port, open_site, refusal
    from dsl.words import with_port

    begin_s = time.monotonic()

    def text() -> str:
        return connection_text(order, f"trying for up to {number(order.point.settings, 'read_timeout')} s")

    try:
        with said_later(agent, text):
            site = open_site(order)
            meetings = Meetings(site, agent.say, agent.check)
            claims = Claims(site, meetings.node[0], meetings.address(), agent.check)
    except Exception as error:  # noqa: BLE001 - torch has no common class for its errors
        agent.say(refusal(error, order, time.monotonic() - begin_s, is_open=False))
        return None
    host, port = host_and_port(order.point)
    if site.is_host and port == 0:
        site.place = with_port(host, site.store.port)
        if order.max_nodes > 1:
            agent.say(Notice("info", f"the store of the rendezvous listens on port {site.store.port}"))
    return DelegatePart(site, claims, meetings, agent)


@contextlib.contextmanager
def said_later(agent: AgentConnection, text: Callable[[], str]) -> Iterator[None]:
    """Tell the user what the block waits for, if it takes long."""
    timer = threading.Timer(FIRST_WORD_S, lambda: agent.say(Notice("info", text())))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class DelegatePart:
    """This node's part in the job."""

    def __init__(self, site: Site, claims: Claims, meetings: Meetings, agent: AgentConnection) -> None:
        self._site, self._claims, self._meetings, self._agent = site, claims, meetings, agent
        self._is_lost = False
        """The store does not answer any more."""

    def carry_out(self, order: Order) -> None:
        """Carry out an order, and answer. Refusals are answers, too."""
        from dsl.rendezvous.torch_side import refusal, waiting_text

        agent, site, begin_s = self._agent, self._site, time.monotonic()
        if isinstance(order, Finish):
            self._finish()
        elif isinstance(order, Leave):
            self._leave(closes=order.closes)
        else:
            try:
                if isinstance(order, Claim):
                    agent.say(self._claims.claim(order))
                elif isinstance(order, Meet):
                    with said_later(agent, lambda: waiting_text(site.order, site.place)):
                        self._meetings.meet(order)
            except Interrupted:
                return
            except Exception as error:  # noqa: BLE001 - torch has no common class for its errors
                agent.say(refusal(error, site.order, time.monotonic() - begin_s, site.place))

    def look(self) -> None:
        """See what has changed in the store, and whether it is still there."""
        claims, meetings = self._claims, self._meetings
        if not claims.are_won and not meetings.is_running:
            return
        try:
            answer = claims.look()
            if answer is not None:
                self._agent.say(answer)
            meetings.look()
        except Exception:  # noqa: BLE001 - a lost store raises errors of many classes
            if not self._is_lost:
                text = _UNUSED if claims.are_won else _LOST
                self._agent.say(Notice("warning", text.format(place=self._site.place)))
            self._is_lost = True
        else:
            self._is_lost = False

    def _finish(self) -> None:
        try:
            self._meetings.finish()
        except Interrupted:
            return
        except Exception:  # noqa: BLE001, S110 - the store is gone, and with it the way to wait
            pass
        self._agent.say(NodesFinished())
        if self._site.is_host:
            time.sleep(STRANGERS_S)

    def _leave(self, *, closes: bool) -> None:
        with contextlib.suppress(Exception):  # the store is gone: the others see that this node is silent
            if closes:
                self._site.handler.set_closed()
            self._claims.leave()


_LOST = (
    "the store of the rendezvous at {place} does not answer any more: the workers go on, but no node can "
    "join and none can start again, see to the node that hosts it"
)
_UNUSED = (
    "the store of the rendezvous at {place} does not answer any more: the job goes on, but no other node can "
    "join, see to the node that hosts it"
)


class Kept:
    """The end of what this process and torch print."""

    def __init__(self) -> None:
        self._text = b""
        use_null(0)
        reader, writer = os.pipe()
        for fd in (1, 2):
            os.dup2(writer, fd)
        if writer > 2:
            os.close(writer)
        self._reader = reader
        threading.Thread(target=self._read, name="output", daemon=True).start()

    def _read(self) -> None:
        while data := os.read(self._reader, 1 << 16):
            self._text = (self._text + data)[-MOST_KEPT:]

    def last_line(self) -> str:
        """The last line that is not empty."""
        lines = [line.strip() for line in self._text.decode("utf-8", "replace").splitlines()]
        return next(filter(None, reversed(lines)), "")


def prepare_environment(environ: os._Environ[str]) -> None:
    """Remove variables that torch reads in workers and in torchrun's agents."""
    for name in list(environ):
        if name.startswith(("TORCHELASTIC_", "MASTER_")):
            del environ[name]
    # Workers get a store of their own, a new one in each attempt.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environ.setdefault("OMP_NUM_THREADS", "1")


def main(argv: list[str]) -> int:
    """Serve the agent at the other end of the socket whose descriptor is the argument."""
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    kept = Kept()
    prepare_environment(os.environ)
    here = os.getcwd()
    sys.path[:] = [path for path in sys.path if path not in ("", here)]  # a folder named torch may lie here
    delegate = AgentConnection(socket.socket(fileno=int(argv[1])))
    threading.Thread(target=delegate.read, name="reader", daemon=True).start()
    with contextlib.suppress(Exception):  # `open_part` reports what is wrong with this torch
        _warm_up()
    try:
        delegate.serve()
    except Exception as error:  # noqa: BLE001 - no traceback of ours reaches the user: one line does
        from dsl.rendezvous.torch_side import one_line

        text = f"the rendezvous: {type(error).__name__}: {one_line(error)}"
        last = kept.last_line()
        delegate.say(MeetingRefused(f"{text} ({last[:200]})" if last else text))
        return 1
    return 0


def _warm_up() -> None:
    """Import slow modules while the agent makes its plan."""
    import torch.distributed.elastic.agent.server.api
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401 - only to have it


if __name__ == "__main__":
    os._exit(main(sys.argv))  # does not wait for torch's threads and destructors
