"""What each worker executes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model import Request


def worker_command(request: Request, executable: str) -> tuple[str, ...]:
    """The words of a worker's command up to and including the script."""
    if request.no_python:
        return (request.script,)
    module = ("-m",) if request.module else ()
    return (executable, "-u", *module, request.script)
