"""Starts and ends the programs that reach the hosts of an elastic job, one for each host, as the head orders.

The engine supervises a group that does not change, but these programs come and go. So the group has one
program, the keeper, and these programs are its children. The keeper reads orders of the head from stdin. It
writes to stdout what the programs say and how they end. Each order and each answer is one JSON object a line.

| order | |
| --- | --- |
| ``{"reach": PLACE}`` | start the program of this host; if the last one still runs, end it first |
| ``{"end": [PLACE, ...]}`` | end the programs of these hosts, wait a moment for the others, and end |

| answer | |
| --- | --- |
| ``{"place": PLACE, "line": TEXT, "stream": 1 or 2}`` | a line of the program's stdout or stderr |
| ``{"place": PLACE, "status": CODE}`` | the program has ended, with its code or 128 + the signal |
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from json import dumps, load, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

KILL_S = 3.0
"""A program gets this long to end before it is killed."""

END_S = 5.0
"""At the end of the job, programs whose agents have ended get this long to end by themselves."""

LONGEST_LINE = 2000
CHUNK = 65536


def keep(path: str) -> int:
    """Start a program for each host of the file, and follow the orders on stdin until the job ends."""
    with open(path, encoding="utf-8") as file:
        commands: list[list[str]] = load(file)["commands"]
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    keeper = Keeper(commands, read)
    for place in range(len(commands)):
        keeper.start(place)
    while keeper.turn():
        pass
    return 0


class _Program:
    """The program of one host."""

    def __init__(self, process: subprocess.Popen[bytes], place: int) -> None:
        self.process = process
        self.place = place
        self.rest = {1: b"", 2: b""}
        self.kill_s: float | None = None
        """`time.monotonic` when the program is killed; None if it was not asked to end."""

    def fd(self, stream: int) -> int:
        """The descriptor from which its stdout or stderr is read."""
        pipe = self.process.stdout if stream == 1 else self.process.stderr
        assert pipe is not None
        return pipe.fileno()


class Keeper:
    """Keeps the programs. ``bell_fd``: readable when a child has ended. ``orders_fd``: has the orders."""

    def __init__(self, commands: Sequence[Sequence[str]], bell_fd: int, orders_fd: int = 0) -> None:
        self._commands = commands
        self._bell_fd = bell_fd
        self._orders_fd = orders_fd
        self._rest = b""
        self._programs: dict[int, _Program] = {}
        self._again: set[int] = set()
        self._streams: dict[int, tuple[_Program, int]] = {}
        self._end_s: float | None = None
        self._poller = select.poll()
        for fd in (bell_fd, orders_fd):
            self._poller.register(fd, select.POLLIN)

    def start(self, place: int) -> None:
        """Start the program of a host, after its last program has ended."""
        if place in self._programs:
            self._again.add(place)
            self._stop(self._programs[place])
            return
        self._again.discard(place)
        try:
            process = subprocess.Popen(
                self._commands[place],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            self._tell({"place": place, "line": f"{error.strerror}", "stream": 2})
            self._tell({"place": place, "status": 127})
            return
        self._programs[place] = program = _Program(process, place)
        for stream in (1, 2):
            fd = program.fd(stream)
            os.set_blocking(fd, False)
            self._streams[fd] = (program, stream)
            self._poller.register(fd, select.POLLIN)

    def turn(self) -> bool:
        """Wait for the next order, output, end or deadline, and handle it. False when all is done."""
        due = [one.kill_s for one in self._programs.values() if one.kill_s is not None]
        due += [] if self._end_s is None else [self._end_s]
        left_ms = (max(min(due) - time.monotonic(), 0) * 1000 + 1) if due else None
        for fd, _ in self._poller.poll(left_ms):
            if fd == self._orders_fd:
                self._obey()
            elif fd == self._bell_fd:
                os.read(fd, CHUNK)
            elif fd in self._streams:
                self._hear(*self._streams[fd])
        for program in list(self._programs.values()):
            if program.process.poll() is not None:
                self._finish(program)
        now_s = time.monotonic()
        for program in self._programs.values():
            if program.kill_s is not None and program.kill_s <= now_s:
                program.kill_s = None
                program.process.kill()
        if self._end_s is not None and self._end_s <= now_s:
            for program in self._programs.values():
                program.process.kill()
            return False
        return self._end_s is None or bool(self._programs)

    def _stop(self, program: _Program) -> None:
        if program.kill_s is None:
            program.kill_s = time.monotonic() + KILL_S
            program.process.terminate()

    def _obey(self) -> None:
        data = os.read(self._orders_fd, CHUNK)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data:  # the head is gone
            lines.append(dumps({"end": list(self._programs)}).encode())
            self._poller.unregister(self._orders_fd)
        for line in lines:
            order = loads(line)
            if "reach" in order:
                self.start(order["reach"])
            else:
                self._again.clear()
                self._end_s = time.monotonic() + END_S
                for place in order["end"]:
                    if place in self._programs:
                        self._stop(self._programs[place])

    def _hear(self, program: _Program, stream: int) -> bool:
        """Read once from a stream, and pass lines on. True if there may be more to read."""
        fd = program.fd(stream)
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        *lines, rest = (program.rest[stream] + data).split(b"\n")
        if not data and rest:
            lines.append(rest)
        program.rest[stream] = rest[-LONGEST_LINE:] if data else b""
        for line in lines:
            text = line[:LONGEST_LINE].decode(errors="replace").rstrip("\r")
            if text.strip():
                self._tell({"place": program.place, "line": text, "stream": stream})
        if not data and fd in self._streams:
            del self._streams[fd]
            self._poller.unregister(fd)
        return bool(data)

    def _finish(self, program: _Program) -> None:
        """Report a program that has ended, after its last output. Its children may hold its streams open."""
        for stream in (1, 2):
            fd = program.fd(stream)
            while fd in self._streams and self._hear(program, stream):
                pass
            if self._streams.pop(fd, None) is not None:
                self._poller.unregister(fd)
        for pipe in (program.process.stdout, program.process.stderr):
            assert pipe is not None
            pipe.close()
        del self._programs[program.place]
        code = program.process.returncode
        self._tell({"place": program.place, "status": code if code >= 0 else 128 - code})
        if program.place in self._again:
            self.start(program.place)

    @staticmethod
    def _tell(answer: dict[str, object]) -> None:
        sys.stdout.write(dumps(answer) + "\n")
        sys.stdout.flush()
