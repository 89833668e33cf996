"""What a conductor orders. The head, or node 0 of a job with fixed places, carries the orders out."""

from __future__ import annotations

from dsl._record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.job import Notice
    from dsl.model.judgement import Judgement
    from dsl.model.request import Level


class Send(Record):
    """Send a message to a member."""

    place: int
    message: object


class Speak(Record):
    """Tell the user something."""

    notice: Notice


class Show(Record):
    """Write lines to the user's stdout."""

    text: str


class Explain(Record):
    """Tell the user in one line why an attempt has ended."""

    judgement: Judgement
    level: Level


class Dismiss(Record):
    """End the programs that reach the members: they get ``within_s`` to end by themselves."""

    within_s: float


class Reach(Record):
    """Start the program that reaches a member again. If an earlier one still runs, end it first."""

    place: int


class Drop(Record):
    """End the connection to a member."""

    place: int
