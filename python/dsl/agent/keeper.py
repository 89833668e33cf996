"""``python -m dsl_launcher.fanout FILE``: runs the programs that reach the hosts of a job, one for each host.

The engine supervises a group that does not change. If hosts come and go, or if there are more hosts than ssh
reaches at once, these programs come and go. So the group has one program, the keeper, with these programs as
its children.

The file is a JSON object: ``commands`` has the words of each program, in the order of the hosts' places, and
``at_once`` is the number of programs that may run at a time (0: all). Orders and answers are records
(`dsl.model.codec`): the keeper answers on stdout, with an `Answer` a line, and reads the head's orders
(`Begin`, `End`) from stdin, a socket with an order a message.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from json import load

from dsl._record import Record
from dsl.model.codec import from_line, to_line
from dsl.model.request import Count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

KILL_S = 3.0
"""A program gets this long to end before it is killed."""

END_S = 5.0
"""At the end of the job, programs whose agents have ended get this long to end by themselves."""

LONGEST_LINE = 2000
CHUNK = 65536
LONGEST_ORDER = 1 << 20
ORDERS_FD = 0


class Answer(Record):
    """What the keeper reports of a program that reaches a host."""

    place: Count
    """The host's place."""
    turn: Count = 0
    """The number of the order that started the program; 0: the program was started without an order."""
    line: str = ""
    """A line of the program's output, if it has not ended."""
    status: Count | None = None
    """The program's exit code, or 128 + the signal, once the program has ended."""


class Begin(Record):
    """End the program of a host if it still runs, then start it again."""

    place: Count
    """The host's place."""
    turn: Count
    """The number of this order for the host."""


class End(Record):
    """End the programs of these hosts, wait a moment for the others, and end."""

    places: tuple[Count, ...]
    """The hosts' places."""


ORDERS: dict[str, type] = {"Begin": Begin, "End": End}


class LineCutter:
    """Cuts a stream into lines of at most ``longest`` bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes, without blank ones. No data is the end of the stream."""
        *lines, rest = (self._rest + data).split(b"\n")
        if not data:
            lines, rest = [rest], b""
        self._rest = rest[-self._longest :]
        texts = [line[: self._longest].decode(errors="replace").strip("\r") for line in lines]
        return [text for text in texts if text.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the programs of the file, and follow the orders on stdin until the job ends."""
    (path,) = sys.argv[1:] if argv is None else argv
    with open(path, encoding="utf-8") as file:
        keeper = Keeper(**load(file))
    while keeper.turn():
        pass
    return 0


class _Program:
    """The program of one host."""

    def __init__(self, words: Sequence[str], place: int, turn: int) -> None:
        """Start it. Raises OSError."""
        pipe, streams = subprocess.PIPE, subprocess.STDOUT
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=streams)
        assert self.process.stdout is not None
        self.fd = self.process.stdout.fileno()
        os.set_blocking(self.fd, False)
        self.place = place
        self.turn = turn
        self.lines = LineCutter(LONGEST_LINE)
        self.kill_s: float | None = None
        """`time.monotonic` when the program is killed; None: it may run on."""

    def stop(self) -> None:
        """Let it end, once."""
        if self.kill_s is None:
            self.kill_s = time.monotonic() + KILL_S
            self.process.terminate()


class Keeper:
    """Keeps the programs of these commands, at most ``at_once`` of them at a time (0: all)."""

    def __init__(self, commands: Sequence[Sequence[str]], at_once: int) -> None:
        self._commands = commands
        self._at_once = at_once or len(commands)
        self._due = dict.fromkeys(range(len(commands)), 0)
        """Places whose program has to be started, each with its turn."""
        self._programs: dict[int, _Program] = {}
        self._of_fd: dict[int, _Program] = {}
        """Programs whose output has not ended."""
        self._is_ending = False
        # Readable when a child has ended.
        self._bell_fd, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._poller = select.poll()
        for fd in (self._bell_fd, ORDERS_FD):
            self._poller.register(fd, select.POLLIN)

    def turn(self) -> bool:
        """Start what is due, then wait for an order, output, end or deadline. False when all is done."""
        for place, turn in list(self._due.items()):
            if len(self._programs) < self._at_once and place not in self._programs:
                del self._due[place]
                self._start(place, turn)
        due = [one.kill_s for one in self._programs.values() if one.kill_s is not None]
        left_ms = (max(min(due) - time.monotonic(), 0) * 1000 + 1) if due else None
        for fd, _ in self._poller.poll(left_ms):
            if fd == ORDERS_FD:
                self._obey()
            elif fd == self._bell_fd:
                os.read(fd, CHUNK)
            elif fd in self._of_fd:
                self._hear(self._of_fd[fd])
        for program in list(self._programs.values()):
            if program.process.poll() is not None:
                self._finish(program)
            elif program.kill_s is not None and program.kill_s <= time.monotonic():
                program.process.kill()
                program.kill_s += KILL_S
        return bool(self._programs) or not self._is_ending

    def _start(self, place: int, turn: int) -> None:
        try:
            program = _Program(self._commands[place], place, turn)
        except OSError as error:
            _tell(Answer(place, turn, line=error.strerror or ""))
            _tell(Answer(place, turn, status=127))
            return
        self._programs[place] = self._of_fd[program.fd] = program
        self._poller.register(program.fd, select.POLLIN)

    def _obey(self) -> None:
        data = os.read(ORDERS_FD, LONGEST_ORDER)
        if not data:  # the head is gone
            self._poller.unregister(ORDERS_FD)
        order = from_line(data, ORDERS) if data else End(tuple(self._programs))
        if isinstance(order, Begin):
            places: tuple[int, ...] = (order.place,)
            self._due[order.place] = order.turn
        else:
            places = order.places
            self._due.clear()
            self._is_ending = True
        for place, program in self._programs.items():
            if place in places:
                program.stop()
            elif self._is_ending and program.kill_s is None:
                program.kill_s = time.monotonic() + END_S

    def _hear(self, program: _Program) -> bool:
        """Read once from a program, and pass its lines on. True if there may be more to read."""
        try:
            data = os.read(program.fd, CHUNK)
        except BlockingIOError:
            return False
        for line in program.lines.feed(data):
            _tell(Answer(program.place, program.turn, line))
        if not data:
            self._close(program)
        return bool(data)

    def _close(self, program: _Program) -> None:
        if self._of_fd.pop(program.fd, None) is not None:
            self._poller.unregister(program.fd)

    def _finish(self, program: _Program) -> None:
        """Report a program that has ended, after its last output. Its children may hold its streams open."""
        while self._hear(program):
            pass
        self._close(program)
        assert program.process.stdout is not None
        program.process.stdout.close()
        del self._programs[program.place]
        code = program.process.returncode
        _tell(Answer(program.place, program.turn, status=code if code >= 0 else 128 - code))


def _tell(answer: Answer) -> None:
    sys.stdout.buffer.write(to_line(answer))
    sys.stdout.flush()
