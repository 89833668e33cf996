"""What a conductor orders. The head, or node 0 of a job with fixed places, carries the orders out."""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.job import Notice
    from dsl.model.judgement import Judgement
    from dsl.model.request import Level


@record
class Send:
    """Send a message to a member."""

    place: int
    message: object


@record
class Speak:
    """Tell the user something."""

    notice: Notice


@record
class Show:
    """Write lines to the user's stdout."""

    text: str


@record
class Explain:
    """Tell the user in one line why an attempt has ended."""

    judgement: Judgement
    level: Level


@record
class Dismiss:
    """End the programs that reach the members: they get ``within_s`` to end by themselves."""

    within_s: float


@record
class Reach:
    """Start the program that reaches a member again. If an earlier one still runs, end it first."""

    place: int


@record
class Drop:
    """End the connection to a member."""

    place: int
