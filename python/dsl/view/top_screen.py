"""The screen of ``dsl-top``. What it shows is made in `dsl.view.table`."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.timer import Timer
from textual.widgets import Input, Static

from dsl._record import replace
from dsl.errors import DslError, JobFormatError
from dsl.model.observation import NodeStatus
from dsl.view.explain import explain_stacks
from dsl.view.jobs import RunningJob, running_jobs
from dsl.view.table import (
    COLUMNS,
    Layout,
    Row,
    by_host,
    cells,
    cut,
    fold,
    headline,
    in_order,
    make_rows,
    select,
    totals,
)
from dsl.view.top_widgets import ChoiceScreen, RowsView, TextScreen
from dsl.words import ENDING, printable, signal_name

SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGUSR1", "SIGUSR2", "SIGINT", "SIGTERM", "SIGSTOP", "SIGCONT", "SIGQUIT", "SIGKILL")
)
"""What can be sent to a rank, the harmless ones first."""

LOG_BYTES = 64 << 10
"""The end of a log file that is shown."""

MESSAGE_S = 6.0
"""How long a message stays."""

END_S = 1.0
"""How long textual may take to give the terminal back."""

BEGUN = (1000, 1003, 1004, 1006, 1015, 2004, 1049)
USUAL = b"".join([b"\x1b[?%dl" % mode for mode in BEGUN]) + b"\x1b[<u\x1b[?7h\x1b[?25h"
"""Sequences that end what textual has begun: mouse, focus, pasting, other screen, keys; and the cursor."""

FOOT = "? help  / filter  f fold  h hosts  x stacks  l log  k signal  j jobs  q quit"

HELP = """\
arrows, page up/down, home, end   move the cursor
{sorts}
/        show only rows with a text: part of a rank, host, state or last line
escape   show all rows again
f        one row for ranks that do the same, or one for each rank
h        one row for each host, or one for each rank
x, enter what the threads of the row's ranks execute
l        log file of the row's first rank; follows it where this machine can read it
k        send a signal to the row's rank; you are asked twice
j        choose another job
q        quit; the job goes on

CPU% is the use since the last look, 100 is one CPU. In a row of several ranks, figures are means.
"""


class TopApp(App[int]):
    """The live view of a job."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    .bar { height: 1; text-style: bold; }
    .heading { height: auto; text-style: bold; }
    #about { height: 1; }
    RowsView { height: 1fr; scrollbar-size-vertical: 1; }
    ModalScreen { background: $background; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    OptionList { height: 1fr; border: none; }
    """
    BINDINGS: ClassVar = [
        Binding("q", "quit", "quit"),
        Binding("question_mark", "help", "help"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "unfilter", "all rows"),
        Binding("f", "group('fold')", "fold"),
        Binding("h", "group('hosts')", "hosts"),
        Binding("x,enter", "stacks", "stacks"),
        Binding("l", "log", "log"),
        Binding("k", "signal", "signal"),
        Binding("j", "jobs", "jobs"),
        *[Binding(one.key, f"sort('{one.name}')", one.name) for one in COLUMNS],
    ]

    def __init__(self, refresh_s: float, job: RunningJob | None) -> None:
        """``job``: whose path and view are used; None: the user chooses."""
        super().__init__()
        self._refresh_s = refresh_s
        self._job = job
        self._over = threading.Event()
        """Set when the job is watched no more."""
        self._before: list[NodeStatus] = []
        self._now: list[NodeStatus] = []
        self._missing: tuple[str, ...] = ()
        self._end = ""
        self._rows: list[Row] = []
        self._sorted_by, self._is_reversed = "RANK", False
        self._grouped, self._filter = "", ""
        self._message: Timer | None = None

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(markup=False, id="head", classes="bar")
        yield Static(markup=False, id="about")
        yield Static(markup=False, id="title", classes="bar")
        yield RowsView()
        yield Input(placeholder="part of a rank, host, state or line", id="filter")
        yield Static(FOOT, markup=False, id="foot", classes="bar")

    def on_load(self) -> None:
        """Before the terminal becomes ours: a signal that ends this process gives it back first."""
        loop, settings = asyncio.get_running_loop(), termios.tcgetattr(0)
        for signum in ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._end_by, signum, settings)

    def _end_by(self, signum: int, settings: list[Any]) -> None:
        def insist(*_: object) -> None:
            with suppress(OSError, termios.error):  # the terminal has gone
                termios.tcsetattr(0, termios.TCSANOW, settings)
                os.write(1, USUAL)
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

        # Where the terminal has gone, textual may wait for ever for its thread that writes there.
        signal.signal(signal.SIGALRM, insist)
        signal.setitimer(signal.ITIMER_REAL, END_S)
        self.exit(128 + signum)

    def on_mount(self) -> None:
        """Begin to watch the job, or let the user choose."""
        self.query_one(RowsView).focus()
        if self._job is None:
            self.action_jobs()
        else:
            self._begin(self._job)

    def on_unmount(self) -> None:
        """End the connection."""
        self._over.set()

    def on_resize(self) -> None:
        """Fit the table into the terminal, when the widgets have their new sizes."""
        self.call_after_refresh(self.draw)

    def _begin(self, job: RunningJob) -> None:
        self._over.set()
        self._job, self._before, self._now, self._missing, self._end = job, [], [], (), ""
        self.draw()
        over = self._over = threading.Event()

        def watch(job: RunningJob) -> None:
            while not over.is_set():
                answers, missing = job.look("status")
                self._later(partial(self._take, over, answers, missing))
                over.wait(self._refresh_s)

        self._talk(watch, lambda why: self._take_end(over, why))

    def _take(self, over: threading.Event, nodes: list[NodeStatus], missing: tuple[str, ...]) -> None:
        """Show what a look has brought, unless the watch that has made it is over."""
        if not over.is_set():
            self._before, self._now, self._missing = self._now, nodes, missing
            self.draw()

    def _take_end(self, over: threading.Event, why: str) -> None:
        """Say that the job has ended. The last state stays."""
        if not over.is_set():
            self._end = why
            self.draw()

    def draw(self) -> None:
        """Draw the table anew."""
        if self._job is None or not self.screen_stack:
            return
        view = self.screen_stack[0].query_one(RowsView)
        chosen = self._chosen()
        rows = make_rows(self._before, self._now)
        about = totals(rows) if rows else "waiting for the job's answer"
        if self._missing:
            about = f"no answer from {', '.join(self._missing)}; {about}"
        if self._end:
            about = f"{self._end}, this is the last state: {about}"
        rows = select(rows, self._filter)
        rows = fold(rows) if self._grouped == "fold" else by_host(rows) if self._grouped == "hosts" else rows
        self._rows = in_order(rows, self._sorted_by, is_reversed=self._is_reversed)
        texts = [cells(row) for row in self._rows]
        layout = Layout(texts, view.size.width or self.size.width)
        places = [_identity(row) for row in self._rows]
        at = 0
        if chosen is not None:
            at = places.index(_identity(chosen)) if _identity(chosen) in places else view.cursor
        width = self.size.width
        self._part("#head").update(cut(headline(self._job.view, self._now, time.time()), width))
        self._part("#about").update(cut(about, width))
        title = layout.title(self._sorted_by, is_reversed=self._is_reversed)
        self._part("#title").update(title)
        view.show([layout.line(text) for text in texts], at)

    def _part(self, name: str) -> Static:
        return self.screen_stack[0].query_one(name, Static)

    def _say(self, text: str) -> None:
        """Show a message for a while, in place of the keys."""
        self._part("#foot").update(cut(text, self.size.width))
        if self._message is not None:
            self._message.stop()
        self._message = self.set_timer(MESSAGE_S, self._show_foot)

    def _show_foot(self) -> None:
        text = f"filter: {self._filter}  escape shows all" if self._filter else FOOT
        self._part("#foot").update(cut(text, self.size.width))

    def _chosen(self) -> Row | None:
        cursor = self.screen_stack[0].query_one(RowsView).cursor
        return self._rows[cursor] if cursor < len(self._rows) else None

    def action_sort(self, name: str) -> None:
        """Sort by a column; the other way round if the rows are sorted by it."""
        self._is_reversed = name == self._sorted_by and not self._is_reversed
        self._sorted_by = name
        self.draw()

    def action_group(self, how: str) -> None:
        """Make fewer rows, or one for each rank again."""
        self._grouped = "" if self._grouped == how else how
        self.draw()

    def action_filter(self) -> None:
        """Ask for a text."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.value = self._filter
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._filter = event.value
        self.draw()

    def on_input_submitted(self) -> None:
        """Go back to the table."""
        self._close_filter()

    def action_unfilter(self) -> None:
        """Show all rows."""
        self._filter = ""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.query_one(RowsView).focus()
        self._show_foot()
        self.draw()

    def action_help(self) -> None:
        """Show the keys."""
        keys = ", ".join(f"{one.key} {one.name}" for one in COLUMNS)
        _ = self.push_screen(TextScreen("keys", HELP.format(sorts=f"sort, again for the other way: {keys}")))

    def action_jobs(self) -> None:
        """Choose a job."""
        jobs = running_jobs()
        for job in jobs:
            job.close()
        if not jobs:
            self._say("no job of this user runs on this machine")
            return

        def begin(index: int | None) -> None:
            if index is not None:
                self._begin(jobs[index])
            elif self._job is None:
                self.exit(0)

        _ = self.push_screen(
            ChoiceScreen("jobs", [headline(job.view, [], time.time()) for job in jobs]), begin
        )

    def action_stacks(self) -> None:
        """Show what the threads of the row's ranks execute."""
        row = self._chosen()
        if row is None:
            return
        screen = TextScreen(f"stacks of {cells(row)[0]}", "the hosts take the stacks ...")
        _ = self.push_screen(screen)

        def ask(job: RunningJob) -> Callable[[], None]:
            answers, missing = job.look("stacks")
            nodes = [
                replace(one, ranks=tuple([rank for rank in one.ranks if rank.rank in row.ranks]))
                for one in answers
            ]
            chosen = explain_stacks([node for node in nodes if node.ranks])
            lines = [*explain_stacks(answers, missing)[:1], "", *chosen]
            return lambda: screen.show("\n".join(lines))

        self._ask(ask, screen.show)

    def action_log(self) -> None:
        """Show the log file of the row's first rank."""
        row = self._chosen()
        if row is None:
            return

        def ask(job: RunningJob) -> Callable[[], None]:
            rows = make_rows([], job.look("status", with_logs=True)[0])
            path = next(
                (one.log for one in rows if one.pid == row.pid and one.node_rank == row.node_rank), ""
            )
            return lambda: show(path)

        def show(path: str) -> None:
            name = f"rank {row.ranks[0]} on host {row.hosts[0]}"
            if path:
                screen = TextScreen(f"log of {name}: {path}", read=lambda: _read_end(path, row.hosts[0]))
                _ = self.push_screen(screen)
            else:
                self._say(f"{name} has no log file: its output goes to the command's output only")

        self._ask(ask, self._say)

    def action_signal(self) -> None:
        """Send a signal to the row's rank, if the user insists."""
        row = self._chosen()
        if row is None:
            return
        if len(row.ranks) > 1 or not row.pid:
            self._say("a signal goes to a single rank that runs: choose a row of one rank")
            return
        name = f"rank {row.ranks[0]} (pid {row.pid}, host {row.hosts[0]})"
        names = [signal_name(one) for one in SIGNALS]

        def confirm(index: int | None) -> None:
            if index is None:
                return

            def send(job: RunningJob) -> Callable[[], None]:
                is_sent = job.signal(row.node_rank, row.local_rank, row.pid, SIGNALS[index])
                said = f"{names[index]} was sent to {name}" if is_sent else f"{name} is not there any more"
                return lambda: self._say(said)

            def insist(answer: int | None) -> None:
                if answer == 1:
                    self._ask(send, self._say)

            words = ["no, send nothing", f"yes, send {names[index]} to {name}"]
            _ = self.push_screen(ChoiceScreen(f"send {names[index]} to {name}?", words), insist)

        _ = self.push_screen(ChoiceScreen(f"signal to {name}", names), confirm)

    def _ask(self, ask: Callable[[RunningJob], Callable[[], None]], fail: Callable[[str], None]) -> None:
        """Ask the job, then do what follows here."""
        self._talk(lambda job: self._later(ask(job)), fail)

    def _later(self, work: Callable[[], None]) -> None:
        """From another thread, do it here."""
        if self.is_running:
            self.call_from_thread(work)

    def _talk(self, work: Callable[[RunningJob], None], fail: Callable[[str], None]) -> None:
        """Do it in a thread, with a connection of its own to the job. ``fail`` gets the reason if it ends."""
        assert self._job is not None
        path = self._job.path

        def run() -> None:
            try:
                with closing(RunningJob(path)) as job:
                    work(job)
            except (DslError, JobFormatError, OSError) as error:
                self._later(partial(fail, _reason(error)))

        threading.Thread(target=run, daemon=True).start()


def _reason(error: Exception) -> str:
    if isinstance(error, JobFormatError):
        return f"the job's answer cannot be read: {error}"
    if isinstance(error, DslError):
        return str(error)
    return "the job does not answer" if isinstance(error, TimeoutError) else "the job has ended"


def _identity(row: Row) -> tuple[int, int]:
    return row.node_rank, row.local_rank


def _read_end(path: str, host: str) -> str:
    """The last lines of a log file, for the screen."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - LOG_BYTES, 0))
            data = file.read(LOG_BYTES)
    except OSError as error:
        return f"it lies on host {host}; this machine cannot read it: {(error.strerror or '').lower()}"
    return "\n".join(printable(line) for line in data.decode("utf-8", "replace").split("\n"))
