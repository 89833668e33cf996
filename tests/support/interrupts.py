"""What a command may say and end with when SIGINT comes in its first moments."""

from __future__ import annotations

import re
import signal

OURS = re.compile(r'File "[^"]*/(dsl/[^"]*"|dsl(run)?", line ([89]|\d\d))')
"""A line of a traceback that is ours. A script's first statement, in line 6, has still to be begun."""


def assert_silent(code: int, said: str, where: object) -> None:
    """No traceback of ours, and the end of Ctrl-C. What Python says before our first byte-code is its own."""
    assert not OURS.search(said), (where, said)
    if "KeyboardInterrupt" not in said and "Fatal Python error: init_" not in said:
        # The job may have ended well before.
        codes = (130, -signal.SIGINT, *((0,) if "already stopping" in said else ()))
        assert code in codes, (where, code, said)
