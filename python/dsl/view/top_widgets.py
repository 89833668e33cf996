"""The parts of the screen of ``dsl-top``: the lines of the table, and what lies over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import OptionList, Static


class RowsView(ScrollView, can_focus=True):
    """The lines of the table. Only visible lines are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.cursor = 0

    def show(self, lines: list[str], cursor: int) -> None:
        """Show other lines."""
        self.lines = lines
        self.virtual_size = Size(self.size.width, len(lines))
        self.move_to(cursor)

    def move_to(self, cursor: int) -> None:
        """Put the cursor on a line, which becomes visible."""
        self.cursor = max(0, min(cursor, len(self.lines) - 1))
        height, top = self.size.height, self.scroll_offset.y
        if height and not top <= self.cursor < top + height:
            self.scroll_to(y=self.cursor if self.cursor < top else self.cursor - height + 1, animate=False)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """A line of the screen."""
        index, width = y + self.scroll_offset.y, self.size.width
        if index >= len(self.lines):
            return Strip.blank(width, self.rich_style)
        style = self.rich_style + Style(reverse=True) if index == self.cursor else self.rich_style
        return Strip([Segment(self.lines[index], style)]).adjust_cell_length(width, style)

    def on_key(self, event: events.Key) -> None:
        """Move the cursor."""
        page = max(self.size.height - 1, 1)
        steps = {"up": -1, "down": 1, "pageup": -page, "pagedown": page}
        steps |= {"home": -len(self.lines), "end": len(self.lines)}
        if event.key in steps:
            self.move_to(self.cursor + steps[event.key])
            event.stop()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where the mouse is."""
        self.move_to(event.y + self.scroll_offset.y)


class TextScreen(ModalScreen[None]):
    """A text over the table, which escape closes."""

    BINDINGS: ClassVar = [Binding("escape,q", "dismiss", "close")]

    def __init__(self, title: str, text: str = "", read: Callable[[], str] | None = None) -> None:
        """``read``: gives the text anew every second, and its end is shown."""
        super().__init__()
        self._heading, self._body, self._source = title, text, read

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(self._heading, markup=False, classes="heading")
        with VerticalScroll():
            yield Static(self._body, markup=False, id="text")
        yield Static("escape back", markup=False, classes="bar")

    def on_mount(self) -> None:
        """Begin to follow."""
        self.query_one(VerticalScroll).focus()
        if self._source is not None:
            self._follow()
            self.set_interval(1.0, self._follow)

    def _follow(self) -> None:
        assert self._source is not None
        scroll = self.query_one(VerticalScroll)
        is_at_end = scroll.scroll_offset.y >= scroll.max_scroll_y
        self.show(self._source())
        if is_at_end:
            scroll.scroll_end(animate=False)

    def show(self, text: str) -> None:
        """Show another text."""
        self.query_one("#text", Static).update(text)


class ChoiceScreen(ModalScreen[int | None]):
    """A list; the result is the number of the chosen line, None: nothing was chosen."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss(None)", "back")]

    def __init__(self, title: str, lines: list[str]) -> None:
        super().__init__()
        self._heading, self._choices = title, lines

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(self._heading, markup=False, classes="bar")
        yield OptionList(*self._choices, markup=False)
        yield Static("enter choose  escape back", markup=False, classes="bar")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """End with the chosen line."""
        _ = self.dismiss(event.option_index)
