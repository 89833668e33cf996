"""A debugger as an editor is one: its side of the Debug Adapter Protocol, as far as tests need it."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

ANSWER_S = 60.0


class Debugger:
    """A connection to the debugger of one process. Every wait ends after `ANSWER_S`."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Connect as soon as a debugger answers there: at first a tunnel may lead to nobody."""
        self._count = 0
        self._seen: list[dict[str, Any]] = []
        """What came while something else was waited for."""
        until(lambda: self._greet(host, port), ANSWER_S)

    def _greet(self, host: str, port: int) -> bool:
        try:
            self._socket = socket.create_connection((host, port), timeout=ANSWER_S)
        except OSError:
            return False
        self._stream = self._socket.makefile("rb")
        try:
            self.ask("initialize", adapterID="dsl", pathFormat="path", linesStartAt1=True)
        except OSError:
            self.__exit__(None, None, None)
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._socket.close()

    def attach(self, path: str, line: int, request: str = "attach", **arguments: Any) -> None:
        """Attach, or ``launch``, with a breakpoint in that line of a file. A program that waits goes on."""
        attached = self._send(request, {"justMyCode": False, **arguments})
        self.hear("initialized")
        found = self.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": line}])
        assert [one["verified"] for one in found["breakpoints"]] == [True]
        self.ask("configurationDone")
        self._answer(attached)

    def stopped(self) -> int:
        """Wait until the program stops at a breakpoint: the thread that did."""
        event = self.hear("stopped")
        assert event["reason"] == "breakpoint", event
        return int(event["threadId"])

    def evaluate(self, thread: int, expression: str) -> str:
        """What an expression is worth in the innermost frame of a thread that stands still."""
        frames = self.ask("stackTrace", threadId=thread)["stackFrames"]
        answer = self.ask("evaluate", expression=expression, frameId=frames[0]["id"])
        return str(answer["result"])

    def go_on(self, thread: int) -> None:
        self.ask("continue", threadId=thread)

    def leave(self) -> None:
        """Detach; the program goes on."""
        self.ask("disconnect", terminateDebuggee=False)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The body of the answer to a request."""
        return self._answer(self._send(command, arguments))

    def hear(self, event: str) -> dict[str, Any]:
        """The body of the next event of that name."""
        found = self._await(lambda one: one["type"] == "event" and one["event"] == event)
        body: dict[str, Any] = found.get("body") or {}
        return body

    def ended(self) -> None:
        """Wait until the program has ended. Its adapter may end with it before it has told."""
        try:
            self.hear("terminated")
        except ConnectionError:
            return

    def _answer(self, number: int) -> dict[str, Any]:
        found = self._await(lambda one: one["type"] == "response" and one["request_seq"] == number)
        assert found["success"], found
        body: dict[str, Any] = found.get("body") or {}
        return body

    def _send(self, command: str, arguments: dict[str, Any]) -> int:
        self._count += 1
        message = {"seq": self._count, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        return self._count

    def _await(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        for index, one in enumerate(self._seen):
            if fits(one):
                return self._seen.pop(index)
        while not fits(one := self._read()):
            self._seen.append(one)
        return one

    def _read(self) -> dict[str, Any]:
        length = 0
        try:
            while line := self._stream.readline().strip():
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
        except TimeoutError:
            raise AssertionError(f"nothing more came within {ANSWER_S} s after {self._seen}") from None
        if not length:
            raise ConnectionError("the debugger has closed the connection")
        message: dict[str, Any] = json.loads(self._stream.read(length))
        return message
