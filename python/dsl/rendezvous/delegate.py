"""``python -m dsl.rendezvous.delegate FD``: takes part in torch's rendezvous for the agent at socket FD.

So the agent imports no torch, waits only for its own events, and survives a crash of this process.
`dsl.rendezvous.delegate_messages` has the messages between the two.

One thread reads the agent's orders, so that it sees the end of the socket even while torch blocks: then the
node leaves the job, and this process ends within `LEAVE_S`. The main thread carries out the orders. A third
thread watches the rendezvous. This process ignores signals that end a job: the agent handles them. Nothing
that this process prints reaches the user's terminal.

A delegate that hosts the store and has to leave keeps the store for the other nodes, and its agent waits for
it: so the job goes on, and still nothing of it outlives the command. If the agent ends anyway, the delegate
ends too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from queue import Empty, SimpleQueue

from dsl.errors import JobFormatError
from dsl.machine.this_process import use_null
from dsl.model.codec import Lines, to_line
from dsl.model.nodes import MeetingRefused, PeerFailure
from dsl.rendezvous.delegate_messages import ORDERS, Answer, Finish, Leave, Meet, Open, Order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.rendezvous.participant import Participant

LEAVE_S = 2.5
"""A delegate ends within this time after its agent has gone or has told it to leave."""
LOOK_S = 5.0
"""How often the main thread checks that the store still answers."""
MOST_KEPT = 64 << 10
"""How many bytes of torch's output we keep."""
IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU")


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

    def is_wanted(self) -> bool:
        """Whether to go on with the present order: the agent is there and has sent no further order."""
        return self._orders.empty() and not self._gone.is_set()

    def read(self) -> None:
        """Read orders until the agent has gone. Runs in a thread of its own."""
        lines = Lines(*ORDERS)
        try:
            while data := self._connection.recv(1 << 16):
                for order in lines.feed(data):
                    if _is_last(order):  # a frozen store would block us for a minute
                        self._end_soon()
                    self._orders.put(order)
        except (OSError, JobFormatError):
            pass
        self._gone.set()
        self._end_soon()
        self._orders.put(Leave())

    def _end_soon(self) -> None:
        if self._end is None or not self._end.is_alive():
            self._end = threading.Timer(LEAVE_S, os._exit, [0])
            self._end.daemon = True
            self._end.start()

    def serve(self) -> None:
        """Carry out orders up to the last one."""
        from dsl.rendezvous.participant import open_participant

        member: Participant | None = None
        while True:
            try:
                order = self._orders.get(timeout=LOOK_S)
            except Empty:
                if member is not None:
                    member.look_after_store()
                continue
            if isinstance(order, Open):
                member = open_participant(order, self.say, self.is_wanted)
            elif member is not None:
                self._carry_out(member, order)
            if _is_last(order) or (isinstance(order, Finish) and self._orders.empty()):
                return

    def _carry_out(self, member: Participant, order: Order) -> None:
        if isinstance(order, Meet):
            member.meet(order)
        elif isinstance(order, PeerFailure):
            member.fail(order)
        elif isinstance(order, Finish):
            member.finish()
            if self.is_wanted():
                member.host_on(self.is_wanted, has_finished=True)
        else:
            member.leave()
            if member.is_host and not self._gone.is_set():
                if self._end is not None:
                    self._end.cancel()
                member.host_on(lambda: not self._gone.is_set(), has_finished=False)


def _is_last(order: Order) -> bool:
    """Whether the delegate ends after an order."""
    return isinstance(order, Leave) or (isinstance(order, PeerFailure) and order.is_final)


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
    with contextlib.suppress(Exception):  # `open_participant` reports what is wrong with this torch
        _warm_up()
    try:
        delegate.serve()
    except Exception as error:  # noqa: BLE001 - no traceback of ours reaches the user: one line does
        from dsl.rendezvous.refusals import one_line

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
