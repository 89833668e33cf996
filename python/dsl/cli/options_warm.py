"""The options of ``dsl-warm``, beside which completion needs nothing of that command."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.cli.tool import ToolParser

NAME = "dsl-warm"


def make_parser() -> ToolParser:
    """The parser of the options; the command line of a job has to be split off before."""
    from dsl.cli.tool import ToolParser

    parser = ToolParser(
        NAME,
        "[OPTIONS] [status | stop [PID ...] | start dsl|dslrun ...]",
        "Show your warm fork servers on this machine. You can also end or start them.",
        "A warm server keeps what workers import for the next job (--start-method warm). The exit code is 0; "
        "1 if a server cannot be started or ended; 2 if no server has such a pid.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="status as JSON, with keys that stay (docs/cli.md)")
    add(
        "--preload", metavar="MODULE,...", help="what the server imports (as the option of the job's command)"
    )
    add("action", nargs="?", metavar="status|stop|start", help="what to do (default: status)")
    add("pids", nargs="*", metavar="PID", help="servers to end (default: all)")
    return parser
