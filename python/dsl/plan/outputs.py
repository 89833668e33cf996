"""Where a job shows its events and figures: what the values of ``--events`` and ``--metrics`` mean."""

from __future__ import annotations

from dsl.errors import EventsFileError, MetricsError
from dsl.lists import LAST_PORT, parse_number, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.facts import Facts
    from dsl.model.request import Request

THIS_MACHINE = "127.0.0.1"


def read_target(text: str) -> tuple[str, int] | None:
    """The host and the port that a value of ``--metrics`` names; None: it is a file.

    A value with a slash is a file. Another one is an address if it has a colon, or begins with a digit, a
    sign or a blank, so a mistyped address makes no file. Raises MetricsError: it is neither.
    """
    first = text[:1]
    is_number = first in "+-" or first.isdigit() or first.isspace()  # "" counts, too
    if "/" in text or (":" not in text and not is_number):
        return None
    host, colon, port = text.rpartition(":")
    number = parse_number(port)
    if number is not None and not 1 <= number <= LAST_PORT:
        raise MetricsError(f"--metrics: {number} is no port, give a number from 1 to {LAST_PORT}")
    name = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    if number is None or (colon and not name) or name.split() != [name] * bool(colon):
        hint = f", or {quote('./' + text)} for a file of this name" if text.strip() else ""
        raise MetricsError(f"--metrics {quote(text)} is no address: give PORT or HOST:PORT{hint}")
    return name or THIS_MACHINE, number


def check_outputs(request: Request, facts: Facts) -> None:
    """Refuse a file that cannot be written, before anything is made. Raises EventsFileError, MetricsError."""
    path, target = request.events, request.metrics
    if path is not None:
        why = facts.files.why_not_written(path) if path.strip() else "it names no file"
        if why:
            raise EventsFileError(f"--events {path!r} cannot be written: {why}, choose another file")
    if target is not None and read_target(target) is None:
        why = facts.files.why_not_written(target, read_again=True)
        if why:
            raise MetricsError(f"--metrics {target!r} cannot be written: {why}, choose another file")
