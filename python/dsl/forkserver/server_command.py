"""The words that start a fork server."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


# Empty words at the end. C libraries that set the title of a process look in a worker's memory for as many
# words as the server was started with. They find that many if the worker itself has no more words.
_ROOM = ("",) * 60


def server_words(
    interpreter: Sequence[str], *, folder_of_core: str, preload: Sequence[str], script: str, is_module: bool
) -> tuple[str, ...]:
    """Command line of a fork server, to which the engine adds the number of its descriptor.

    ``interpreter``: Python and its flags, as they stand in the workers' command lines. ``folder_of_core``:
    the folder of this package that holds the extension; the interpreter need not have dsl installed.
    ``preload``: modules to import; if empty, those that the script names itself. ``script``: path of the
    script, or name of the module if ``is_module``; empty if it is not known.
    """
    program = ("-m", script) if is_module else (script,)
    boot = f"{folder_of_core}/forkserver/boot.py"
    return (*interpreter, boot, ",".join(preload), *(program if script else ()), *_ROOM)
