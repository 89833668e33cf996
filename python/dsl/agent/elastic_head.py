"""The head of an elastic job: it reaches hosts one by one, and reaches lost hosts again."""

from __future__ import annotations

import os
import time

from dsl._record import record
from dsl.agent.gathering import Drop, Reach
from dsl.agent.head import KEPT_LINES, Head, unreachable
from dsl.errors import JobFormatError
from dsl.launchers.base import ENDED
from dsl.model.codec import fields_from_plain, from_json
from dsl.model.job import Notice
from dsl.model.request import Count
from dsl.plan.reaching import Reaching, plan_reaching
from dsl.printable import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.agent.head import HeadDecided, Program
    from dsl.model.node import NodePlan

BY_SSH = ("ssh", "pdsh")
"""Launchers whose last words come from ssh."""

RETRY_S = 0.05
"""Time until an order is sent again to a program that took none."""


@record
class Word:
    """What the head's one program reports of a program that reaches a host (`dsl.cli.starters`)."""

    place: Count
    """The host's place."""
    line: str = ""
    """A line of that program's output, if it has not ended."""
    stream: Count = 1
    """1 for the line's stdout, 2 for stderr."""
    status: Count | None = None
    """The program's exit status, once it has ended."""


class ElasticHead(Head):
    """A head with one program, which runs the programs that reach the hosts (see `dsl.cli.starters`)."""

    launcher = "ssh"
    """The launcher that reaches the hosts."""
    longest_line = 16_384

    def plan(self, attempt: int) -> NodePlan | None:
        """Plan the one program that runs the others."""
        if attempt:
            return None
        import socket

        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._orders = ours
        self._waiting: dict[str, None] = {}
        """Orders that the program has not taken. Equal orders count once, so each host has few."""
        self._begun = b""
        """The rest of an order that the program has taken in part."""
        self._retry_s: float | None = None
        self._said: dict[int, list[str]] = {}
        (program,) = self._programs
        program.fds.append(theirs.detach())
        start = program.start
        reaching = Reaching(start.argv, env=start.env, orders_fd=program.fds[0])
        environ = {name: value for name, value in self._environ.items() if name not in start.unset}
        return plan_reaching(self.job, [reaching], environ)

    def disown(self) -> None:
        """Close the connections in the guard: they belong to the agent."""
        super().disown()
        self._orders.close()

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when something is due."""
        return min([one for one in (super().deadline_s, self._retry_s) if one is not None], default=None)

    def read(self) -> list[HeadDecided]:
        """Send orders that wait, then read as every head does."""
        self._send_orders()
        return super().read()

    def _obey(self, orders: Sequence[object]) -> None:
        for order in orders:
            if isinstance(order, Reach):
                self._said.pop(order.place, None)
                self._order(f'{{"reach": {order.place}}}')
            elif isinstance(order, Drop):
                link = self._links.pop(order.place, None)
                if link is not None:
                    link.close()
        super()._obey([one for one in orders if not isinstance(one, (Reach, Drop))])

    def _dismiss(self, within_s: float) -> None:
        """End the programs whose agents have not said goodbye; the others end by themselves."""
        conductor = self.conductor
        others = [place for place in range(len(conductor.places)) if not conductor.has_said_goodbye(place)]
        self._order(f'{{"end": {others}}}')
        self._dismissal_s = time.monotonic() + within_s

    def _order(self, line: str) -> None:
        self._waiting[line] = None
        self._send_orders()

    def _send_orders(self) -> None:
        self._retry_s = None
        try:
            while self._begun or self._waiting:
                if not self._begun:
                    line = next(iter(self._waiting))
                    del self._waiting[line]
                    self._begun = f"{line}\n".encode()
                self._begun = self._begun[self._orders.send(self._begun) :]
        except BlockingIOError:
            self._retry_s = time.monotonic() + RETRY_S
        except OSError:  # the program is gone, and so is the job
            self._begun = b""
            self._waiting.clear()

    def _hear_line(self, program: Program, text: str) -> None:
        try:
            word = fields_from_plain(from_json(text.encode("ascii")), Word)
        except (JobFormatError, UnicodeEncodeError):
            super()._hear_line(program, text)
            return
        if word.place >= len(self.conductor.places):
            return
        if word.status is not None:
            self._keyed.discard(word.place)
            self._hear_status(word.place, word.status)
        elif ENDED not in word.line and not (
            self.launcher in BY_SSH and self._take_key([word.place], word.line)
        ):
            self._keep(word.place, printable(word.line))

    def _keep(self, place: int, line: str) -> None:
        """Keep and show a line of a program that reaches a host."""
        name = self.job.hosts[place].name
        lines = self._said.setdefault(place, [])
        lines.append(line.removeprefix(f"{name.rpartition('@')[2]}: "))
        if len(lines) > 2 * KEPT_LINES:
            del lines[KEPT_LINES]
        self._speak(Notice("debug", f"{name}: {line}"))

    def _hear_status(self, place: int, status: int) -> None:
        """Tell the conductor that a program that reaches a host has ended."""
        lines = [one for one in self._said.pop(place, []) if not one.startswith("pdsh@")]
        name = self.job.hosts[place].name
        if self.launcher in BY_SSH:
            why = unreachable(name, lines, status)
        else:
            program = os.path.basename(self._program_name)
            said = f": {lines[-1]}" if lines else ""
            why = f"{program} ended with {status} before its agent had answered{said}"
        self._obey(self.conductor.starter_ended([place], why, time.monotonic()))

    @property
    def _program_name(self) -> str:
        return {"slurm": "srun"}.get(self.launcher, "mpirun")
