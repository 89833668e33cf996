"""The words that start a fork server."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.model.job import ForkServer


MARK = "warm:"
"""Begins the last word of a warm server: descriptors of its socket, and maybe of a call and its request."""

NEW, READY = ".new", ".warm"
"""Ends of the names of sockets: of a warm server that imports, and of one that takes calls at once."""

# Empty words at the end. C libraries that set the title of a process look in a worker's memory for as many
# words as the server was started with. They find that many if the worker itself has no more words.
_ROOM = ("",) * 60


def words_of(server: ForkServer, withheld: Sequence[str] | None = None) -> tuple[str, ...]:
    """`server_words` for a planned server."""
    import dsl

    return server_words(
        server.interpreter,
        folder_of_core=dsl.__path__[0],
        preload=server.preload,
        script=server.script,
        is_module=server.is_module,
        withheld=withheld,
    )


def server_words(
    interpreter: Sequence[str],
    *,
    folder_of_core: str,
    preload: Sequence[str],
    script: str,
    is_module: bool,
    withheld: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Command line of a fork server, to which the engine adds the number of its descriptor.

    A warm server has the names of variables that it does not get, ``withheld``, and further words behind
    them: folder and name of its socket, and the word with `MARK`.

    ``interpreter``: Python and its flags, as they stand in the workers' command lines. ``folder_of_core``:
    the folder of this package that holds the extension; the interpreter need not have dsl installed.
    ``preload``: modules to import; if empty, those that the script names itself. ``script``: path of the
    script, or name of the module if ``is_module``; empty if it is not known.
    """
    program = ("-m", script) if is_module else (script,)
    boot = f"{folder_of_core}/forkserver/boot.py"
    words = (*interpreter, boot, ",".join(preload), *(program if script else ()), *_ROOM)
    return words if withheld is None else (*words, ",".join(withheld))
