"""What a worker executes."""

from __future__ import annotations

import pytest

from dsl.model import Request
from dsl.plan.program import worker_command


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request("t.py"), ("/opt/python", "-u", "t.py")),
        (Request("pkg.mod", module=True), ("/opt/python", "-u", "-m", "pkg.mod")),
        (Request("./t.sh", no_python=True), ("./t.sh",)),
    ],
)
def test_the_command_of_a_worker(request_: Request, words: tuple[str, ...]) -> None:
    assert worker_command(request_, "/opt/python") == words
