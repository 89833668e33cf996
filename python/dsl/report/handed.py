"""Hands what is known about a failure to the program that started us.

An operator of Kubernetes gets the root cause's record, in a file as torchrun leaves it (torch 2.13): the
worker's record, with the exit code added. A tuner gets the facts of how its experiment ended.
"""

from __future__ import annotations

import os

from dsl.errors import DslError
from dsl.model.outcome import Outcome
from dsl.report.failures import read_data, root_cause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl.model.failure import Failure
    from dsl.model.judgement import Judgement


class HandedError:
    """A listener that writes the record when the job has failed, and calls ``warn`` if it cannot."""

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn

    def hear(self, event: object) -> None:
        """Act on the outcome."""
        if isinstance(event, Outcome) and event.last.failures:
            try:
                hand_on(root_cause(event.last.failures), self._path)
            except DslError as error:
                self._warn(str(error))


def hand_judgement(judgement: Judgement) -> None:
    """Write the facts for the tuner that started this job. It can do without them."""
    from dsl.model.codec import to_json, to_plain
    from dsl.report import speak

    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(speak.end_path, flags, 0o640)
        with open(file, "wb") as writer:
            writer.write(to_json(to_plain(judgement)))
    except OSError:
        return


def hand_on(failure: Failure, path: str) -> None:
    """Write the record of a failure to a file; without a record write nothing, as torchrun does.

    The file is overwritten in place: it may be mounted, or lie in a directory that we may not change.

    Raises:
        DslError: the file cannot be written.
    """
    data = read_data(failure)
    if data is None:
        return
    import json

    message = data.get("message")
    if failure.exitcode and isinstance(message, dict):
        message["errorCode"] = failure.exitcode
    rest = json.dumps(data).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o666)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)
    except OSError as error:
        raise DslError(f"cannot write the error file {path}: {error.strerror}") from None
